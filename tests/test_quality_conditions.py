"""What surrounds a score: lengths, seeds, templates, progress, and what is refused at the start."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import PrerequisiteError, StageError
from tests.quality_tasks import CHOICES, GENERATION, ROLLING, load, questions, request_for, run, write_task
from tests.tiny_models import write_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), dtype="float32")


@pytest.fixture
def model(checkpoint: Path) -> Any:
    return load(checkpoint)


@pytest.fixture
def seen_lengths(model: Any) -> Iterator[list[int]]:
    """Tokens of the longest sequence that reaches the model, one number a forward pass; branches are apart."""
    lengths: list[int] = []

    def look(_module: Any, args: Any, kwargs: Any) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        positions = kwargs.get("position_ids")
        lengths.append(ids.shape[1] if positions is None else int(positions.max()) + 1)

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    yield lengths
    handle.remove()


def test_the_recipes_maximum_length_reaches_the_model(
    tmp_path: Path, model: Any, checkpoint: Path, seen_lengths: list[int]
) -> None:
    document = {"question": "x" * 200, "answers": ["yes", "no"], "right": 0}
    write_task(tmp_path, "quiz", CHOICES, [document])
    task = run(model, checkpoint, request_for(tmp_path, "quiz", max_length_tokens=64)).tasks["quiz"]
    assert max(seen_lengths) == 64
    assert task.truncated_prompts == 2
    with pytest.raises(StageError, match=r"max_length_tokens is 4096, the model reads at most 512"):
        run(model, checkpoint, request_for(tmp_path, "quiz", max_length_tokens=4096))


def test_a_long_text_is_scored_in_windows_and_never_cut(
    tmp_path: Path, model: Any, checkpoint: Path, seen_lengths: list[int]
) -> None:
    write_task(tmp_path, "text", ROLLING, [{"text": "0123456789" * 4}])  # 40 tokens
    lines: list[str] = []
    request = request_for(tmp_path, "text", max_length_tokens=16, batch_size=1)
    task = run(model, checkpoint, request, lines.append).tasks["text"]
    assert seen_lengths == [16, 16, 16]
    assert lines[-1] == "text: 3 of 3 requests"
    assert (task.truncated_prompts, task.samples[0].metrics["tokens"]) == (0, 40)
    assert task.notes[0].startswith("windows of 16 tokens; the first of a document follows token 1")


def test_a_generation_that_leaves_no_room_for_its_prompt_is_refused(
    tmp_path: Path, checkpoint: Path, model: Any, seen_lengths: list[int]
) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(3))
    write_task(tmp_path, "say", GENERATION, questions(3), generation_kwargs={"until": ["\n"]})
    with pytest.raises(StageError, match=r"say generates 256 tokens.*128"):
        run(model, checkpoint, request_for(tmp_path, "quiz", "say", max_length_tokens=128))
    assert not seen_lengths  # not even the first task was run


def test_a_shorter_prompt_is_padded_on_its_left_and_gets_the_logits_it_gets_alone(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    """Padding is the end-of-sequence token, after which a model would begin anew."""
    import torch

    short, long = ({"question": text, "answers": ["yes"], "right": 0} for text in ("one", "one two three"))
    seen: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []

    def look(_module: Any, _args: Any, given: Any, output: Any) -> None:
        seen.append((given["input_ids"], given.get("attention_mask"), output.logits[:, -1]))

    handle = model.register_forward_hook(look, with_kwargs=True)
    for name, documents in (("short", [short]), ("long", [long]), ("both", [short, long])):
        write_task(tmp_path, name, GENERATION, documents)
    firsts = []
    for name in ("short", "long", "both"):
        seen.clear()
        run(model, checkpoint, request_for(tmp_path, name, batch_size=2))
        firsts.append(seen[0])
    handle.remove()
    (one, _, alone), (_, _, other), (ids, mask, together) = firsts
    assert mask is not None
    (padded,) = [row for row in range(2) if not mask[row].all()]
    padding = ids.shape[1] - one.shape[1]
    assert mask[padded].tolist() == [0] * padding + [1] * one.shape[1], "all of it on the left"
    assert ids[padded].tolist() == [model.config.eos_token_id] * padding + one[0].tolist()
    assert torch.allclose(together[padded], alone[0], atol=1e-5)
    assert torch.allclose(together[1 - padded], other[0], atol=1e-5)


def test_prompts_cut_for_generation_are_counted(tmp_path: Path, checkpoint: Path, model: Any) -> None:
    long = {"question": "x" * 100, "answers": ["yes"], "right": 0}
    write_task(tmp_path, "say", GENERATION, [*questions(2), long])
    task = run(model, checkpoint, request_for(tmp_path, "say", max_length_tokens=80)).tasks["say"]
    assert task.truncated_prompts == 1


def test_few_shot_examples_follow_the_recipes_seed_alone(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    import random

    write_task(tmp_path, "quiz", CHOICES, questions(5), training=questions(60)[30:])

    def prompts(seed: int) -> str:
        request = request_for(tmp_path, "quiz", num_fewshot=3, seed=seed)
        return run(model, checkpoint, request).tasks["quiz"].prompts_hash

    first = prompts(1)
    random.seed(99)
    assert prompts(1) == first
    assert prompts(2) != first


IN_A_NEW_PROCESS = """
import sys
from pathlib import Path
from tests.quality_tasks import load, request_for, run
folder, checkpoint = map(Path, sys.argv[1:])
found = run(load(checkpoint), checkpoint, request_for(folder, "quiz", num_fewshot=3)).tasks["quiz"]
print(found.prompts_hash, found.data_hash)
"""


def test_prompts_and_data_are_the_same_in_another_process(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(5), training=questions(60)[30:])
    here = run(model, checkpoint, request_for(tmp_path, "quiz", num_fewshot=3)).tasks["quiz"]
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS, str(tmp_path), str(checkpoint)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [here.prompts_hash, here.data_hash], done.stderr


def test_one_other_document_is_other_data(tmp_path: Path, checkpoint: Path, model: Any) -> None:
    documents = questions(4)
    changed = [*documents[:3], {**documents[3], "right": (documents[3]["right"] + 1) % 3}]
    hashes = []
    for name, some in (("a", documents), ("b", documents), ("c", changed)):
        write_task(tmp_path / name, "quiz", CHOICES, some)
        hashes.append(run(model, checkpoint, request_for(tmp_path / name, "quiz")).tasks["quiz"].data_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_each_model_answers_for_itself(tmp_path: Path, checkpoint: Path, model: Any) -> None:
    import torch

    model.config.tie_word_embeddings = False
    opposite = copy.deepcopy(model)
    opposite.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach().clone())
    passes: list[int] = []
    opposite.register_forward_pre_hook(lambda *_: passes.append(1))
    write_task(tmp_path, "quiz", CHOICES, questions(12))
    request = request_for(tmp_path, "quiz")
    a, b = (run(each, checkpoint, request).tasks["quiz"] for each in (model, opposite))
    assert passes
    assert a.samples != b.samples
    assert (a.prompts_hash, a.data_hash, a.task_hash) == (b.prompts_hash, b.data_hash, b.task_hash)


def test_a_head_that_is_its_own_is_not_tied_to_the_embedding_again(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    import torch

    head = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    model.lm_head.weight = head  # as a quantizer leaves it, with a config that still says "tied"
    write_task(tmp_path, "text", ROLLING, [{"text": "some text"}])
    task = run(model, checkpoint, request_for(tmp_path, "text")).tasks["text"]
    assert model.lm_head.weight is head
    assert task.metrics["token_perplexity"].score == pytest.approx(300, rel=1e-5)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"metric": "odd", "aggregation": "mean"}, "whether a higher odd is better"),
        (
            {"metric": "word_perplexity", "aggregation": "mean", "higher_is_better": True},
            "is an error, but",
        ),
    ],
)
def test_a_metric_whose_direction_is_unknown_or_wrong_is_refused(
    tmp_path: Path, checkpoint: Path, model: Any, entry: dict[str, Any], message: str
) -> None:
    (tmp_path / "look.py").write_text("def odd(doc, results):\n    return {'odd': 1.0}\n")
    path = write_task(tmp_path, "quiz", CHOICES, questions(3), metric_list=[entry])
    path.write_text(path.read_text() + "process_results: !function look.odd\n")
    with pytest.raises(StageError, match=message):
        run(model, checkpoint, request_for(tmp_path, "quiz"))


def test_progress_is_told_in_requests_and_the_terminal_stays_clean(
    tmp_path: Path, checkpoint: Path, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(5))
    write_task(tmp_path, "text", ROLLING, [{"text": "some text"}] * 3)
    lines: list[str] = []
    run(model, checkpoint, request_for(tmp_path, "quiz", "text"), lines.append)
    assert "quiz: 15 of 15 requests" in lines
    assert "text: 3 of 3 requests" in lines
    assert len(lines) < 10
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_chat_template_is_applied_and_hashed_or_refused(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(3))
    plain = run(model, checkpoint, request_for(tmp_path, "quiz"))
    request = request_for(tmp_path, "quiz", apply_chat_template=True)
    with pytest.raises(PrerequisiteError, match="no chat template"):
        run(model, checkpoint, request)
    folder = tmp_path / "with-template"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    chat = run(model, folder, request)
    assert plain.chat_template_hash is None
    assert chat.chat_template_hash is not None
    assert chat.tasks["quiz"].prompts_hash != plain.tasks["quiz"].prompts_hash
    assert chat.tokenizer_hash == plain.tokenizer_hash


def test_a_padding_token_without_an_embedding_is_refused(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "pad_token": "<pad>"}))
    write_task(tmp_path, "quiz", CHOICES, questions(3))
    with pytest.raises(StageError, match=r"padding token 300 is beyond the embedding's 300 rows"):
        run(model, tmp_path, request_for(tmp_path, "quiz"))


def test_data_that_can_be_had_nowhere_is_told_by_task(tmp_path: Path, checkpoint: Path, model: Any) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(3))
    (tmp_path / "data" / "quiz-validation.json").unlink()
    with pytest.raises(
        PrerequisiteError, match=r"the data of task quiz can't be loaded: .*quiz-validation\.json"
    ):
        run(model, checkpoint, request_for(tmp_path, "quiz"))
