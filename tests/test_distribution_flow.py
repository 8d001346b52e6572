"""Distances on held text from the recipe to the report: what is asked, refused, stored, printed and tracked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli import main
from pipeline.distribution_checks import distribution_request, reference_size
from pipeline.distribution_results import DistributionRequest
from pipeline.engines.transformers import Transformers
from pipeline.errors import RecipeError
from pipeline.quantizers.native import Native
from pipeline.recipe import load_recipe
from pipeline.recipe_sections import DistributionSpec
from pipeline.report import markdown
from pipeline.results import CheckpointManifest, Report
from pipeline.stage_keys import quality_key, reference_key
from pipeline.stages import QualityStageRequest, ReferenceRequest, RunnableCheckpoint, quality, reference
from pipeline.store import file_sha256
from pipeline.tracked_values import variant_metrics
from tests import result_builders as build
from tests.quality_tasks import CHOICES, questions, request_for, write_task
from tests.test_distribution_rules import GOOD, OWN
from tests.tiny_models import TWO_VARIANTS, write_llama

TEXT = (
    "the wind over the harbour was cold and the boats stayed in, said the old man; nobody answered him.\n"
    * 30
)
RECIPE: dict[str, Any] = {
    **TWO_VARIANTS,
    "quality": {
        "tasks": ["quiz"],
        "task_folders": ["tasks"],
        "data_folder": "tasks/data",
        "distribution": {"text": "held.txt", "context_tokens": 32, "max_tokens": 256},
    },
    "gate": [{"kind": "max_kl", "mean_nats": 0.5}, {"kind": "min_top1_agreement", "percent": 50}],
}


def write_recipe(folder: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **changes}), "utf-8")
    return path


def with_distribution(**fields: Any) -> dict[str, Any]:
    return {"quality": {**RECIPE["quality"], "distribution": fields}}


# --- the recipe ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"quality": {"tasks": ["quiz"]}},
            r"gate\[0\]: max_kl needs the block quality.distribution",
        ),
        (
            with_distribution(text="a", max_tokens=900),
            r"max_tokens: max_tokens: 900 hold fewer than two windows of 512",
        ),
        (
            with_distribution(text="a", context_tokens=5000),
            r"context_tokens: max_tokens: 8192 hold fewer than two",
        ),
        (
            with_distribution(text="a", context_tokens=4),
            r"context_tokens: should be greater than or equal to 8",
        ),
        (with_distribution(txt="a"), r"distribution.txt: unknown key; did you mean 'text'"),
        (with_distribution(text="${HOME}/a"), r"environment variables are not expanded"),
        (with_distribution(text="${EVAL_DATA}/${HOME}"), r"environment variables are not expanded"),
    ],
)
def test_a_block_that_can_t_be_measured_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write_recipe(tmp_path, **changes))
    assert re.search(words, str(caught.value)), str(caught.value)


def asked(tmp_path: Path, **fields: Any) -> tuple[DistributionRequest | None, str]:
    loaded = load_recipe(write_recipe(tmp_path))
    spec = DistributionSpec(**{"text": "held.txt", "context_tokens": 32, "max_tokens": 256, **fields})
    found, problems = distribution_request(loaded, spec, data_folder=tmp_path / "data", longest_tokens=512)
    return found, "\n".join(problem.what for problem in problems)


def test_a_text_is_found_beside_the_recipe_or_under_the_data_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "held.txt").write_text(TEXT)
    (tmp_path / "data" / "other.txt").write_text(TEXT + "x")
    beside, _ = asked(tmp_path)
    under, _ = asked(tmp_path, text="${EVAL_DATA}/other.txt")
    assert beside is not None
    assert under is not None
    assert beside.text == str((tmp_path / "held.txt").resolve())
    assert under.text_sha256 == file_sha256(tmp_path / "data" / "other.txt")


@pytest.mark.parametrize(
    ("content", "fields", "words"),
    [
        (None, {}, r"held.txt can't be read \(No such file"),
        (b"\xff\xfe" * 200, {}, "isn't UTF-8 text"),
        (b"short", {}, "has 5 bytes, too few for 2 windows"),
        (TEXT.encode(), {"context_tokens": 1024, "max_tokens": 4096}, "is 1024, the model reads at most 512"),
    ],
)
def test_a_text_that_can_t_be_read_or_fills_no_windows_is_told_before_the_run(
    tmp_path: Path, content: bytes | None, fields: dict[str, Any], words: str
) -> None:
    if content is not None:
        (tmp_path / "held.txt").write_bytes(content)
    _, problems = asked(tmp_path, **fields)
    assert re.search(words, problems)


def test_disk_is_counted_for_the_whole_vocabulary_at_16_bits_but_not_beyond_the_text(tmp_path: Path) -> None:
    path = tmp_path / "held.txt"
    path.write_text("x" * 1_000_000)
    request = DistributionRequest(text=str(path), text_sha256="0", context_tokens=512, max_tokens=8192)
    assert reference_size(request, vocabulary_tokens=262_144) == pytest.approx(
        16 * 255 * 262_144 * 2, rel=1e-3
    )
    path.write_text("x" * 1100)
    assert reference_size(request, vocabulary_tokens=262_144) == pytest.approx(
        2 * 255 * 262_144 * 2, rel=1e-3
    )


# --- stages and keys -------------------------------------------------------------------------------------


def stage_requests(tmp_path: Path, **fields: Any) -> tuple[ReferenceRequest, QualityStageRequest]:
    folder = tmp_path / "llama"
    text = tmp_path / "held.txt"
    text.write_text(TEXT)
    runnable = RunnableCheckpoint(
        folder=str(folder), quantizer=Native(dtype="fp16"), engine=Transformers(), device="cpu"
    )
    held = DistributionRequest(
        **{
            "text": str(text),
            "text_sha256": file_sha256(text),
            "context_tokens": 32,
            "max_tokens": 256,
            "reference": str(tmp_path / "reference"),
            "reference_key": "key",
            **fields,
        }
    )
    first = ReferenceRequest(
        checkpoint=runnable,
        compute_dtype="float32",
        distribution=held,
        batch_size=4,
        out=str(tmp_path / "reference"),
    )
    write_task(tmp_path, "quiz", CHOICES, questions(4))
    second = QualityStageRequest(
        checkpoint=runnable,
        compute_dtype="float32",
        quality=request_for(tmp_path, "quiz"),
        distribution=held,
    )
    return first, second


def test_the_quality_stage_compares_its_loaded_model_after_the_tasks(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    write, compare = stage_requests(tmp_path)
    (tmp_path / "reference").mkdir()
    assert reference(write, progress=lambda _: None).positions == 8 * 15
    result = quality(compare, progress=lambda _: None)
    assert result.tasks["quiz"].documents == 4
    assert result.distribution is not None
    assert result.distribution.distance is not None
    assert abs(result.distribution.distance.kl_mean_nats) < 2e-6
    assert result.distribution.distance.top1_agreement_share == 1.0


def test_keys_hold_text_settings_and_baseline_but_no_places(tmp_path: Path) -> None:
    manifest: CheckpointManifest = build.manifest()

    def keys(**fields: Any) -> tuple[str, str]:
        write, compare = stage_requests(tmp_path, **fields)
        return (
            reference_key(write, machine="m", manifest=manifest),
            quality_key(compare, machine="m", manifest=manifest, inputs="i"),
        )

    before = keys()
    assert keys(reference="/elsewhere", text=str(tmp_path / "held.txt")) == before
    for changed in ({"text_sha256": "1"}, {"context_tokens": 64}, {"max_tokens": 128}):
        after = keys(**changed)
        assert after[0] != before[0]
        assert after[1] != before[1]
    assert keys(reference_key="another baseline")[1] != before[1]


# --- the report ------------------------------------------------------------------------------------------


def reported() -> Report:
    arms = {
        "fp16": build.quality(build.task(), distribution=OWN),
        "int8": build.quality(build.task(), distribution=GOOD),
    }
    return build.report(
        *(build.variant_report(build.variant(name, quality=result)) for name, result in arms.items()),
        resolved_recipe={"model": {"id": "tiny/model"}},
    )


def test_the_report_shows_perplexity_and_distance_of_every_variant() -> None:
    text = markdown(reported())
    section = text.split("## Distribution on held text")[1].split("\n## ")[0]
    assert "Windows of 202 tokens" in section
    assert len(re.findall(r"^\| int8 ", section, re.MULTILINE)) == 2
    assert "| 0.01 |" in section


def test_figures_are_tracked_under_their_names_in_the_report() -> None:
    first, second = reported().variants
    found = {metric.name: metric.value for metric in variant_metrics(second, baseline=first)}
    assert found["quality.distribution.kl_mean_nats"] == pytest.approx(0.01)
    assert found["quality.distribution.token_perplexity"] == 12.18
    assert found["quality.distribution.scored_tokens"] == 800
    assert "quality.distribution.word_perplexity" not in found


# --- a run -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_makes_the_baseline_s_distribution_once_and_again_when_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "llama")
    write_task(tmp_path / "tasks", "quiz", CHOICES, questions(6))
    (tmp_path / "held.txt").write_text(TEXT)
    for name, value in (
        ("PIPELINE_STORE", str(tmp_path / "store")),
        ("OMP_NUM_THREADS", "1"),
        ("HF_HUB_OFFLINE", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")

    def run(**changes: Any) -> tuple[int, Report]:
        code = main(["run", str(write_recipe(tmp_path, **changes))])
        newest = max((tmp_path / "store" / "runs").iterdir())
        return code, Report.model_validate_json((newest / "report.json").read_bytes())

    code, report = run()
    assert code == 0, report.because
    distances = {
        v.name: v.quality.distribution.distance
        for v in report.variants
        if v.quality and v.quality.distribution
    }
    assert distances["fp16"] is not None
    assert distances["int8"] is not None
    assert abs(distances["fp16"].kl_mean_nats) < 2e-6
    assert abs(distances["int8"].kl_mean_nats) < 0.5
    assert distances["fp16"].log_perplexity_ratio == 0.0
    assert distances["int8"].log_perplexity_ratio != 0.0
    (folder,) = (tmp_path / "store" / "distributions").iterdir()
    codes = folder / "codes.bin"
    stored = codes.read_bytes()
    codes.write_bytes(stored[:1000] + b"\x00\x01" + stored[1002:])
    next((tmp_path / "store" / "results" / "quality").iterdir()).unlink()
    code, again = run()
    assert code == 0, again.because
    assert codes.read_bytes() == stored
