"""What the gate's limits can decide: before a run with an assumed flip rate, after it with the observed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.paired_drop import power
from pipeline.plan_tables import quality_table
from pipeline.plan_values import TaskSizes
from pipeline.quality_power import observed_flip_rates, quality_notes, quality_plan
from pipeline.recipe import ExpandedRecipe, load_recipe
from pipeline.report import markdown
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.task_sizes import quality_request, task_sizes
from tests import result_builders as build
from tests.plan_builders import plan

RECIPE = """
model: tiny/model
precisions: [fp16, int8]
quality: {{tasks: {tasks}, task_folders: [tasks], data_folder: data{more}}}
gate:
  - {{kind: max_quality_drop, points: 1{rule}}}
"""
TASK = """
task: {name}
output_type: {kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "${{EVAL_DATA}}/{name}.jsonl", train: "${{EVAL_DATA}}/none.jsonl"}}}}
test_split: test
"""


def recipe(folder: Path, tasks: str, *, more: str = "", rule: str = "") -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(tasks=tasks, more=more, rule=rule), "utf-8")
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "data").mkdir(exist_ok=True)
    return path


def task(folder: Path, name: str, documents: int, *, kind: str = "multiple_choice") -> None:
    (folder / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind), "utf-8")
    (folder / "data" / f"{name}.jsonl").write_text('{"a": 1}\n' * documents, "utf-8")


def sized(path: Path) -> tuple[ExpandedRecipe, TaskSizes]:
    loaded = load_recipe(path)
    expanded = loaded.recipe.expand(device="cpu")
    request = quality_request(loaded, expanded)
    assert request is not None
    return expanded, task_sizes(request)


def test_a_one_point_margin_at_five_percent_flips_needs_three_thousand_documents() -> None:
    found = power(documents=3092, flip_rate=0.05, margin=0.01, confidence=0.95)
    assert found.documents_needed == 3092
    assert found.detectable_points == pytest.approx(1.0, abs=1e-3)
    assert found.decides is True
    assert power(documents=None, flip_rate=0.05, margin=0.01, confidence=0.95).decides is None


def test_documents_are_counted_in_the_data_and_cut_by_the_limit(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[one, two]", more=", limit: 50")
    task(tmp_path, "one", 40)
    task(tmp_path, "two", 90)
    expanded, sizes = sized(path)
    assert sizes.documents == {"one": 40, "two": 50}
    rows = quality_plan(expanded, sizes=sizes, flip_rates={"two": 0.02})
    assert [(row.task, row.power.documents, row.flips) for row in rows] == [
        ("one", 40, "assumed"),
        ("two", 50, "measured"),
    ]
    assert [row.power.documents_needed for row in rows] == [3092, 1237]
    assert rows[0].documents_to_find == 3923


def test_what_is_not_known_is_left_out_and_never_zero(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[one]")
    task(tmp_path, "one", 40)
    (tmp_path / "data" / "one.jsonl").unlink()
    expanded, sizes = sized(path)
    (row,) = quality_plan(expanded, sizes=sizes, flip_rates={})
    assert (row.power.documents, row.power.detectable_points, row.power.decides) == (None, None, None)
    assert quality_notes((row,)) == ()
    table = quality_table(plan(quality=(row,)))
    assert table is not None
    cells = {column.label: cell for column, cell in table.rows[0]}
    assert (cells["documents"], cells["limit needs"], cells["enough"]) == ("?", "3,092", "?")


def test_a_group_counts_the_documents_of_its_tasks(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[both, text]")
    (tmp_path / "tasks" / "both.yaml").write_text("group: both\ntask: [one, two]\n", "utf-8")
    task(tmp_path, "one", 40)
    task(tmp_path, "two", 90)
    task(tmp_path, "text", 7, kind="loglikelihood_rolling")
    expanded, sizes = sized(path)
    rows = quality_plan(expanded, sizes=sizes, flip_rates={})
    assert [(row.task, row.power.documents) for row in rows] == [("both", 130)]
    recipe(tmp_path, "[both, text]", rule=", pool_groups: false")
    rows = quality_plan(load_recipe(path).recipe.expand(device="cpu"), sizes=sizes, flip_rates={})
    assert [(row.task, row.power.documents) for row in rows] == [("one", 40), ("two", 90)]


def test_stopping_early_costs_documents_at_the_last_look(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[one]", more=", sequential: true")
    task(tmp_path, "one", 4000)
    expanded, sizes = sized(path)
    (row,) = quality_plan(expanded, sizes=sizes, flip_rates={})
    assert row.power.documents_needed == 3521
    assert (row.confidence, row.power.decides) == (0.95, True)


def test_a_pooled_group_doesn_t_stop_early_and_keeps_its_whole_confidence(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[both, three]", more=", sequential: true")
    (tmp_path / "tasks" / "both.yaml").write_text("group: both\ntask: [one, two]\n", "utf-8")
    for name in ("one", "two", "three"):
        task(tmp_path, name, 2000)
    expanded, sizes = sized(path)
    rows = quality_plan(expanded, sizes=sizes, flip_rates={})
    assert {row.task: row.power.documents_needed for row in rows} == {"both": 3092, "three": 3521}
    recipe(tmp_path, "[both, three]", more=", sequential: true", rule=", pool_groups: false")
    rows = quality_plan(load_recipe(path).recipe.expand(device="cpu"), sizes=sizes, flip_rates={})
    assert {row.power.documents_needed for row in rows} == {3521}


def test_too_few_documents_are_noted_with_the_margin_that_they_decide(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[one]")
    task(tmp_path, "one", 30)
    expanded, sizes = sized(path)
    (note,) = quality_notes(quality_plan(expanded, sizes=sizes, flip_rates={}))
    assert "on one: likely inconclusive, 30 documents decide a margin of 10.2 points" in note


def test_after_a_run_the_observed_flip_rate_takes_the_place_of_the_assumed_one() -> None:
    before, after = build.paired_answers(both_right=250, lost=6, gained=3, both_wrong=141)
    baseline = build.variant("fp16", quality=build.quality(build.task(values=before)))
    candidate = build.variant("int8", quality=build.quality(build.task(values=after)))
    findings = MaxQualityDrop(points=2.0).judge(baseline=baseline, candidate=candidate)
    report = build.report(
        build.variant_report(baseline),
        build.variant_report(candidate, findings=findings),
        build.variant_report(candidate, name="int4", required=False, findings=()),
    )
    assert observed_flip_rates(report) == {"piqa": pytest.approx(9.5 / 401)}
    (finding,) = findings
    assert finding.power is not None
    assert finding.power.documents_needed == 367
    assert finding.power.decides


def test_the_report_shows_groups_and_what_the_documents_could_decide() -> None:
    before, after = build.paired_answers(both_right=250, lost=6, gained=3, both_wrong=141)
    arms = [
        build.quality(
            build.task("a", values=values), build.task("b", values=[1.0, 0.0]), groups={"ab": ("a", "b")}
        )
        for values in (before, after)
    ]
    baseline, candidate = (
        build.variant(name, quality=quality) for name, quality in zip(("fp16", "int8"), arms, strict=True)
    )
    findings = MaxQualityDrop(points=2.0).judge(baseline=baseline, candidate=candidate)
    report = build.report(
        build.variant_report(baseline),
        build.variant_report(candidate, findings=findings),
        resolved_recipe={"model": {"id": "tiny/model"}},
    )
    text = markdown(report)
    assert "| fp16 | ab | acc | 2 | 402 | 0.6393 | – | 0.5700 |" in text
    assert "| int8 | ab | 2 | 2.36 | 402 | 1.90 | 365 | yes |" in text
    header = next(line for line in text.splitlines() if line.startswith("| variant | verdict |"))
    assert header.endswith("max seqs | ab |")
