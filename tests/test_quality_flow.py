"""Null run, sequential candidates and shared results, from a recipe to the report: real workers and a real store."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.early_stopping import Margin, Stopping, plan_stopping
from pipeline.engines.transformers import Transformers
from pipeline.errors import RecipeError
from pipeline.quantizers.native import Native
from pipeline.recipe import load_recipe
from pipeline.run_state import step_names
from pipeline.stage_keys import package_names, quality_key
from pipeline.stages import QualityStageRequest, RunnableCheckpoint
from pipeline.store import Store
from tests import result_builders as build
from tests.quality_tasks import CHOICES, ROLLING, request_for, write_task
from tests.test_early_stopping import easy
from tests.test_run import Ended, Workplace, read
from tests.tiny_models import write_llama

INT8 = {"kind": "quanto", "weights": "int8"}
RECIPE: dict[str, Any] = {
    "model": "./llama",
    "baseline": "fp16",
    "variants": [
        {"name": "fp16"},
        {"name": "int8", "quantizer": INT8},
        {"name": "twin", "quantizer": INT8},
    ],
    "quality": {
        "tasks": ["easy", "text"],
        "task_folders": ["tasks"],
        "data_folder": "tasks/data",
        "batch_size": 4,
        "null_batch_size": 1,
        "sequential": True,
    },
    "gate": [
        {"kind": "max_quality_drop", "points": 20, "tasks": ["easy"]},
        {"kind": "max_perplexity_increase", "percent": 20},
    ],
}
QUALITY = ["quality fp16", "null run fp16", "quality int8", "quality twin"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("flow")
    write_llama(folder / "llama")
    write_task(folder / "tasks", "easy", CHOICES, easy(60))
    texts = [{"text": f"Once upon a time there were {number} bears."} for number in range(12)]
    write_task(folder / "tasks", "text", ROLLING, texts)
    return Workplace(folder)


def recipe(place: Workplace, name: str, **changes: Any) -> Path:
    content = copy.deepcopy(RECIPE)
    content["quality"] = {**content["quality"], **changes.pop("quality", {})}
    content["quality"] = {key: value for key, value in content["quality"].items() if value is not None}
    absent = dict.fromkeys(("speed", "capacity"))
    return place.recipe(name, **{**absent, **content, **changes})


class Runner:
    """The command in this process."""

    def __init__(self, place: Workplace, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
        self.place, self.capfd = place, capfd
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)

    def __call__(self, name: str, **changes: Any) -> Ended:
        code = main(["run", str(recipe(self.place, name, **changes))])
        out, told = self.capfd.readouterr()
        return read(code, out, told)


@pytest.fixture
def run(place: Workplace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Runner:
    return Runner(place, monkeypatch, capfd)


@pytest.mark.slow
def test_a_recipe_s_null_run_and_sequential_candidates_reach_the_report(
    place: Workplace, run: Runner
) -> None:
    first = run("first")
    assert first.code == 0, first.told
    base, int8, twin = first.report.variants
    assert base.quality is not None
    assert base.null_quality is not None
    assert (base.quality.batch_size, base.null_quality.batch_size) == (4, 1)
    assert base.quality.tasks["easy"].documents == 60
    assert base.quality.tasks["easy"].look_confidence is None
    assert int8.null_quality is None
    assert int8.quality is not None
    easy_task, text = int8.quality.tasks["easy"], int8.quality.tasks["text"]
    assert (easy_task.documents, easy_task.available_documents) == (30, 60)
    assert (text.documents, text.available_documents) == (12, None), "perplexity needs every document"
    assert twin.quality == int8.quality
    assert first.reused == ["quantize twin", "quality twin"], (
        "one checkpoint under two names is evaluated once"
    )
    assert not list((place.store / "answers").glob("*")), "what is stored needs no answers any more"
    text_report = (Path(first.line["report"]).parent / "report.md").read_text("utf-8")
    assert "### Null run" in text_report
    assert "stopped after 30 of 60 documents" in text_report

    gate = [RECIPE["gate"][0], {"kind": "max_perplexity_increase", "percent": 300}]
    again = run("again", variants=[RECIPE["variants"][0], RECIPE["variants"][2]], gate=gate)
    assert again.reused == ["quantize fp16", "quantize twin", *QUALITY[:2], "quality twin"]


# --- what is evaluated once ------------------------------------------------------------------------------


def key_of(**fields: Any) -> str:
    """The key of an evaluation whose recipe says so."""
    quality = request_for(Path("tasks"), "easy", **fields.pop("quality", {}))
    checkpoint = RunnableCheckpoint(
        folder=fields.pop("folder", "here"),
        quantizer=Native(dtype="fp16"),
        engine=Transformers(**fields.pop("engine", {})),
        device="cpu",
    )
    request = QualityStageRequest(checkpoint=checkpoint, compute_dtype="float32", quality=quality, **fields)
    return quality_key(request, machine="this one", manifest=build.manifest(), inputs="tasks and data")


def stopping(points: float, right: float = 1.0) -> Stopping | None:
    margin = Margin(metric="acc", drop=points / 100, confidence=0.95, tests=1)
    return plan_stopping(build.quality(build.task(values=[right] * 9)), asked={"piqa": [(margin,)]})


def test_an_evaluation_depends_on_nothing_that_changes_no_answer() -> None:
    others = [
        key_of(folder="elsewhere"),
        key_of(answers="kept.jsonl"),
        key_of(engine={"compute_dtype": "float32"}),
    ]
    assert {*others} == {key_of()}


def test_an_evaluation_depends_on_the_way_of_scoring_and_on_what_reads_and_asks() -> None:
    assert key_of(quality={"scoring": "lm_eval"}) != key_of()
    assert {"tokenizers", "lm_eval", "datasets", "transformers", "torch"} <= package_names("quality")


def test_a_null_run_is_the_evaluation_of_a_recipe_of_its_batch_size() -> None:
    assert key_of(quality={"batch_size": 1}) != key_of(quality={"batch_size": 4})


def test_a_stopped_evaluation_depends_on_the_margins_and_on_the_baseline_s_answers() -> None:
    keys = [key_of(stopping=plan) for plan in (None, stopping(2), stopping(3), stopping(2, right=0.0))]
    assert len(set(keys)) == 4
    assert key_of(stopping=stopping(2)) == keys[1]


# --- recipes ---------------------------------------------------------------------------------------------


def test_the_steps_of_a_run_name_the_null_run(place: Workplace) -> None:
    loaded = load_recipe(recipe(place, "steps"))
    assert [
        step for step in step_names(loaded.recipe.expand(device="cpu")) if "qua" in step or "null" in step
    ] == [
        *("quantize fp16", "quantize int8", "quantize twin"),
        *QUALITY,
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quality": {"null_batch_size": 4}}, r"line \d+: quality.null_batch_size: 4 is quality.batch_size"),
        ({"quality": {"null_batch_size": 8, "batch_size": None}}, "null_batch_size: 8 is quality.batch_size"),
        (
            {"gate": [{"kind": "max_perplexity_increase", "percent": 20}]},
            r"quality.sequential: no rule of the gate can end a task early; add one of .*max_quality_drop",
        ),
        ({"quality": {"null_batch_size": 0}}, "null_batch_size"),
        ({"quality": {"sequential": "yes"}}, "expected true or false"),
        ({"quality": {"scoring": "lm-eval"}}, r"quality.scoring: .*lm_eval"),
    ],
)
def test_contradictions_of_the_quality_section_are_told(
    place: Workplace, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(RecipeError, match=told):
        load_recipe(recipe(place, "wrong", **changes))


def test_answers_that_nobody_took_up_for_a_week_are_removed(tmp_path: Path) -> None:
    import os
    import time

    store = Store(tmp_path)
    old, new = (store.answers_path(key) for key in ("old", "new"))
    for path in (old, new):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}\n")
    week = time.time() - 8 * 24 * 3600
    os.utime(old, (week, week))
    with store.lock():
        assert [path.name for path in (tmp_path / "answers").iterdir()] == ["new.jsonl"]
