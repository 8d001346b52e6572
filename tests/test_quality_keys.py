"""Stored evaluations and answers under way: which change makes another of them, so that none answers for another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from pipeline.answer_journal import AnswerJournal
from pipeline.engines.transformers import Transformers
from pipeline.quality import inputs_digest
from pipeline.quantizers.native import Native
from pipeline.results import CheckpointManifest, FileRecord, QualityResult, SourceRecord
from pipeline.stage_keys import quality_key
from pipeline.stages import QualityStageRequest, RunnableCheckpoint
from pipeline.store import Store
from tests import result_builders as build
from tests.quality_tasks import CHOICES, load, questions, request_for, run, write_task
from tests.tiny_models import write_llama


def stage_request(**fields: Any) -> QualityStageRequest:
    compute_dtype = fields.pop("compute_dtype", "float32")
    checkpoint = RunnableCheckpoint(
        folder="here", quantizer=Native(dtype="fp16"), engine=Transformers(), device="cpu"
    )
    tasks = fields.pop("tasks", ("quiz",))
    quality = request_for(Path("tasks"), *tasks, **{"limit": 100, **fields})
    return QualityStageRequest(checkpoint=checkpoint, compute_dtype=compute_dtype, quality=quality)


def key(
    manifest: CheckpointManifest | None = None,
    *,
    machine: str = "this one",
    inputs: str = "tasks and data",
    **fields: Any,
) -> str:
    made = manifest or build.manifest()
    return quality_key(stage_request(**fields), machine=machine, manifest=made, inputs=inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"limit": 50},
        {"limit": None},
        {"tasks": ("quiz", "piqa")},
        {"num_fewshot": 5},
        {"batch_size": 8},
        {"apply_chat_template": True},
        {"seed": 1},
        {"max_length_tokens": 64},
        {"compute_dtype": "bfloat16"},
        {"inputs": "another task file"},
        {"machine": "another one"},
        {"manifest": build.manifest(files=(FileRecord(name="m", size_bytes=1, sha256="1" * 64),))},
        {"manifest": build.manifest(source=SourceRecord(model="other", revision=None, files=()))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_evaluation_is_stored_for_one_model_and_one_way_of_asking(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


def test_another_version_of_a_library_is_another_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of that version is found first from here on."""
    before = key()
    package = tmp_path / "transformers-0.0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert key() != before


def test_a_model_with_opposite_answers_is_asked_although_the_first_one_s_are_kept(tmp_path: Path) -> None:
    import torch

    folder = write_llama(tmp_path / "model", dtype="float32")
    model = load(folder)
    model.config.tie_word_embeddings = False
    opposite = copy.deepcopy(model)
    opposite.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach().clone())
    # Of two answers of one letter an odd number of times, so that one's right answers are the other's wrong ones.
    documents = [
        {**one, "answers": ["a", "b"], "right": place % 2} for place, one in enumerate(questions(11))
    ]
    write_task(tmp_path, "quiz", CHOICES, documents)
    request, store = request_for(tmp_path, "quiz"), Store(tmp_path / "store")
    asked = stage_request().model_copy(update={"quality": request})

    def answered(one: Any, weights: str) -> tuple[QualityResult, int]:
        """The result and how often the model was called; its answers stay in the store."""
        files = (FileRecord(name="model.safetensors", size_bytes=1, sha256=weights * 64),)
        own = quality_key(
            asked, machine="m", manifest=build.manifest(files=files), inputs=inputs_digest(request)
        )
        passes: list[int] = []
        hook = one.register_forward_pre_hook(lambda *_: passes.append(1))
        result = run(one, folder, request, journal=AnswerJournal(store.answers_path(own)))
        hook.remove()
        return result, len(passes)

    first, _ = answered(model, "1")
    again, calls = answered(model, "1")
    assert (again, calls) == (first, 0)
    other, calls = answered(opposite, "2")
    assert calls > 0
    scores = [result.tasks["quiz"].metrics["acc"].score for result in (first, other)]
    assert None not in scores
    assert sum(score for score in scores if score is not None) == pytest.approx(1.0)
    hashes = [{sample.answer_hash for sample in result.tasks["quiz"].samples} for result in (first, other)]
    assert hashes[0].isdisjoint(hashes[1])
