"""Rules that their recipe can't feed are refused before any work: sections, batch sizes, concurrency, tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import RecipeError
from pipeline.hardware import detect
from pipeline.preflight import Preflight, preflight
from pipeline.recipe import load_recipe
from pipeline.store import Store
from tests.quality_tasks import CHOICES, ROLLING, questions, write_task
from tests.tiny_models import write_llama

RECIPE: dict[str, Any] = {
    "model": "./llama",
    "precisions": ["fp16", "int8"],
    "workload": {"prompt_tokens": 8, "new_tokens": 4},
    "speed": {"batch_sizes": [1, 4]},
}


def written(folder: Path, *rules: dict[str, Any], **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **changes, "gate": list(rules)}), "utf-8")
    return path


@pytest.mark.parametrize(
    ("rule", "changes", "fault"),
    [
        (
            {"kind": "min_throughput", "tokens_per_s": 9.0, "batch_size": 2},
            {},
            "gate[0]: batch size 2 is not measured; speed.batch_sizes: [1, 4]",
        ),
        (
            {"kind": "max_energy", "joules_per_output_token": 1.0},
            {"speed": None},
            "needs the section 'speed'",
        ),
        ({"kind": "max_cost", "dollars_per_million_output_tokens": 1.0}, {}, "needs the section 'cost'"),
        (
            {"kind": "max_cost", "dollars_per_million_output_tokens": 1.0, "batch_size": 8},
            {"cost": {"dollars_per_hour": 2.0}},
            "batch size 8 is not measured",
        ),
        ({"kind": "min_serving_throughput", "tokens_per_s": 1.0}, {}, "needs the section 'serving'"),
        (
            {"kind": "min_serving_throughput", "tokens_per_s": 1.0, "concurrency": 3},
            {"serving": {"requests": 8}},
            "concurrency 3 is not measured; serving.concurrency: [1, 4, 8]",
        ),
        ({"kind": "min_score", "score": 0.5, "tasks": ["quiz"]}, {}, "needs the section 'quality'"),
    ],
)
def test_a_rule_without_its_measurement_is_refused(
    tmp_path: Path, rule: dict[str, Any], changes: dict[str, Any], fault: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(written(tmp_path, rule, **changes))
    assert fault in str(refused.value)


def test_cost_needs_no_batch_size_since_the_best_is_taken(tmp_path: Path) -> None:
    rule = {"kind": "max_cost", "dollars_per_million_output_tokens": 1.0}
    changes = {"cost": {"dollars_per_hour": 2.0}, "speed": {"batch_sizes": [4]}}
    assert load_recipe(written(tmp_path, rule, **changes)).recipe.gate[0].kind == "max_cost"


def looked_at(folder: Path, *names: str) -> Preflight:
    """A rule that names tasks, over the group `quizzes` of two tasks."""
    for task in ("easy", "hard"):
        write_task(folder / "tasks", task, CHOICES, questions(4))
    (folder / "tasks" / "quizzes.yaml").write_text("group: quizzes\ntask: [easy, hard]\n", "utf-8")
    write_llama(folder / "llama")
    section = {"tasks": ["quizzes"], "task_folders": ["tasks"], "data_folder": "tasks/data"}
    rule = {"kind": "max_quality_drop", "points": 2.0, "tasks": list(names)}
    loaded, device = load_recipe(written(folder, rule, quality=section)), detect()
    recipe = loaded.recipe.expand(device=device.kind)
    return preflight(loaded, recipe=recipe, device=device, store=Store(folder / "store"))


def test_a_rule_may_name_a_group_or_one_of_its_members_and_nothing_else(tmp_path: Path) -> None:
    assert not [one for one in looked_at(tmp_path, "quizzes", "hard").problems if "gate[" in one.what]
    (problem,) = (one for one in looked_at(tmp_path, "hrad", "easy").problems if "gate[" in one.what)
    assert problem.what.startswith(
        "gate[0].tasks: 'hrad' is not among quality.tasks and their groups'; did you mean 'hard'?"
    )
    assert "quality.tasks" in problem.fix


QUIZ_DROP = {"kind": "max_quality_drop", "points": 2.0}


@pytest.mark.parametrize(
    ("rule", "section", "expected"),
    [
        ({"kind": "max_perplexity_increase", "percent": 2.0}, {"tasks": ["quiz"]}, "quiz is multiple_choice"),
        (
            {"kind": "max_length_drift", "percent": 2.0},
            {"tasks": ["quiz", "text"]},
            "quiz is multiple_choice, text is",
        ),
        (QUIZ_DROP, {"tasks": ["text"]}, "text is loglikelihood_rolling"),
        ({**QUIZ_DROP, "tasks": ["text"]}, {"tasks": ["text", "quiz"]}, "text is loglikelihood_rolling"),
        (
            {**QUIZ_DROP, "metric": "ac"},
            {"tasks": ["quiz"]},
            "task quiz has no metric 'ac'; did you mean 'acc'?",
        ),
        (
            {"kind": "min_score", "score": 0.5, "metric": "f1", "tasks": ["quiz"]},
            {"tasks": ["quiz"]},
            "no metric 'f1'",
        ),
        (QUIZ_DROP, {"tasks": ["both"], "sequential": True}, "quality.sequential: no task can stop early"),
        (
            {**QUIZ_DROP, "tasks": ["quiz"]},
            {"tasks": ["quiz"], "max_length_tokens": 10**7},
            "reads at most 512",
        ),
    ],
)
def test_a_rule_that_the_tasks_can_never_feed_is_told_before_any_work(
    tmp_path: Path, rule: dict[str, Any], section: dict[str, Any], expected: str
) -> None:
    (problem,) = judged_here(tmp_path, rule, section)
    assert expected in problem


@pytest.mark.parametrize(
    ("rule", "section"),
    [
        ({"kind": "max_perplexity_increase", "percent": 2.0}, {"tasks": ["quiz", "text"]}),
        (QUIZ_DROP, {"tasks": ["quiz", "text"], "sequential": True}),
        ({**QUIZ_DROP, "pool_groups": False}, {"tasks": ["both"], "sequential": True}),
        ({**QUIZ_DROP, "metric": "acc_norm"}, {"tasks": ["both"], "max_length_tokens": 512}),
    ],
)
def test_rules_that_some_task_feeds_are_left_alone(
    tmp_path: Path, rule: dict[str, Any], section: dict[str, Any]
) -> None:
    assert judged_here(tmp_path, rule, section) == []


def judged_here(folder: Path, rule: dict[str, Any], section: dict[str, Any]) -> list[str]:
    """What stands in the way of the rule over a quiz, its twin in a group with it, and a text."""
    for task in ("quiz", "twin"):
        write_task(folder / "tasks", task, CHOICES, questions(4))
    write_task(folder / "tasks", "text", ROLLING, [{"text": "some text"}])
    (folder / "tasks" / "both.yaml").write_text("group: both\ntask: [quiz, twin]\n", "utf-8")
    write_llama(folder / "llama")
    section = {**section, "task_folders": ["tasks"], "data_folder": "tasks/data"}
    loaded, device = load_recipe(written(folder, rule, quality=section)), detect()
    recipe = loaded.recipe.expand(device=device.kind)
    found = preflight(loaded, recipe=recipe, device=device, store=Store(folder / "store")).problems
    return [one.what for one in found if "gate[" in one.what or "quality." in one.what]
