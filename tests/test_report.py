"""What people and programs read of a run: every variant beside the baseline, gaps as gaps, nothing prettied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.commands import write_report
from pipeline.recipe import LoadedRecipe, load_recipe
from pipeline.report import comparison_table, make_report, markdown
from pipeline.results import Finding, Report, StageFailure, VariantResults
from tests import result_builders as build

RECIPE = """\
model: some/model
baseline: fp16
variants:
  - {name: fp16}
  - {name: int8, quantizer: {kind: quanto, weights: int8}}
  - {name: int4, quantizer: {kind: bitsandbytes, type: nf4}, required: false}
speed: {batch_sizes: [1, 8]}
capacity: {context_tokens: 1024}
quality: {tasks: ["naïve 🚢 | task"]}
gate:
  - {kind: min_speedup, factor: 1.5}
  - {kind: max_memory, fraction: 0.6}
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return load_recipe(path)


def make(loaded: LoadedRecipe, *variants: VariantResults, interrupted: bool = False) -> Report:
    return make_report(
        loaded,
        recipe=loaded.recipe.expand(device="cpu"),
        variants=variants,
        device=None,
        provenance={"git": None},
        started_at="2026-01-02T03:04:05+00:00",
        seconds=1.0,
        interrupted=interrupted,
    )


def row(text: str, name: str) -> list[str]:
    """The cells of a variant's line in the terminal table."""
    return next(line for line in text.splitlines() if line.startswith(name)).split()


FP16 = build.variant("fp16")
INT8 = build.variant("int8")


# --- the report ------------------------------------------------------------------------------------------


def test_the_report_holds_verdict_findings_and_the_recipe_it_was_made_for(loaded: LoadedRecipe) -> None:
    report = make(loaded, FP16, INT8)
    assert report.verdict == "ship"
    assert report.recipe_digest == loaded.recipe.digest()
    assert report.resolved_recipe == loaded.recipe.expand(device="cpu").model_dump(mode="json")
    int8 = report.variant("int8")
    assert int8 is not None
    assert [finding.outcome for finding in int8.findings] == ["pass", "pass"]
    assert Report.model_validate_json(report.to_json()) == report


def test_an_optional_variant_is_judged_and_does_not_change_the_verdict(loaded: LoadedRecipe) -> None:
    slow = build.variant("int4", required=False, speed=build.speed("int4", [build.speed_row(1, 5.0)]))
    report = make(loaded, FP16, INT8, slow)
    assert report.verdict == "ship"
    int4 = report.variant("int4")
    assert int4 is not None
    assert int4.verdict == "no-ship"
    assert row(comparison_table(report), "int4")[:3] == ["int4", "(optional)", "no-ship"]


def test_an_interrupted_run_ships_nothing(loaded: LoadedRecipe) -> None:
    report = make(loaded, FP16, INT8, interrupted=True)
    assert (report.verdict, report.interrupted) == ("error", True)
    assert report.because[0] == "the run was interrupted"


def test_a_failed_stage_is_told_with_its_reason_wherever_the_report_is_read(loaded: LoadedRecipe) -> None:
    failure = StageFailure(stage="speed", reason="out_of_memory", message="killed at batch 8")
    report = make(loaded, FP16, build.variant("int8", speed=None, memory=None, failures=(failure,)))
    assert report.verdict == "error"
    for text in (comparison_table(report), markdown(report), " ".join(report.because)):
        assert "killed at batch 8" in text


# --- the table -------------------------------------------------------------------------------------------


def test_the_table_shows_speed_memory_and_quality_beside_the_baseline(loaded: LoadedRecipe) -> None:
    task = build.task("piqa", [1.0, 1.0, 1.0, 0.0])
    variants = (build.variant(name, quality=build.quality(task)) for name in ("fp16", "int8"))
    table = comparison_table(make(loaded, *variants))
    assert row(table, "fp16") == [
        *("fp16", "baseline", "1000.0", "1.00", "16.00", "210", "20.0", "80.0", "1.00", "10", "0.750")
    ]
    assert row(table, "int8") == [
        *("int8", "ship", "500.0", "0.50", "8.00", "210", "40.0", "160.0", "2.00", "20", "0.750")
    ]
    assert "piqa acc" in table
    assert table.endswith("verdict: ship")


def test_what_was_not_measured_is_a_dash_and_never_a_number(loaded: LoadedRecipe) -> None:
    bare = VariantResults(name="int8", precision="int8", required=True, quantizer={})
    table = comparison_table(make(loaded, FP16, bare))
    assert set(row(table, "int8")[2:]) == {"–"}
    assert "MISSING" in table


def test_a_void_or_failed_row_shows_its_outcome_and_gives_no_ratio(loaded: LoadedRecipe) -> None:
    for outcome, shown in (("void", "void"), ("out_of_memory", "OOM"), ("failed", "failed")):
        rows = [build.speed_row(1, 4000.0, outcome=outcome), build.speed_row(8, 160.0)]
        table = comparison_table(make(loaded, FP16, build.variant("int8", speed=build.speed("int8", rows))))
        cells = row(table, "int8")
        assert cells[5:9] == ["–", shown, "160.0", "–"]
        assert "4000" not in " ".join(cells)


def test_memory_is_compared_like_with_like(loaded: LoadedRecipe) -> None:
    wide = build.variant("fp16", memory=build.memory("fp16", weight_bytes_resident=2_000_000_000))
    not_run = build.variant("int8", memory=None, speed=None)
    assert row(comparison_table(make(loaded, wide, not_run)), "int8")[3] == "0.50", "on disk with on disk"


def test_a_noisy_row_is_marked_and_the_mark_explained(loaded: LoadedRecipe) -> None:
    rows = [build.speed_row(1, 40.0, noisy=True), build.speed_row(8, 160.0)]
    table = comparison_table(make(loaded, FP16, build.variant("int8", speed=build.speed("int8", rows))))
    assert "40.0~" in table
    assert "~ noisy" in table
    assert "~" not in comparison_table(make(loaded, FP16, INT8))


# --- Markdown and files ----------------------------------------------------------------------------------


def test_the_markdown_starts_with_the_verdict_and_its_reasons(loaded: LoadedRecipe) -> None:
    slow = build.variant("int8", speed=build.speed("int8", [build.speed_row(1, 21.0)]))
    lines = markdown(make(loaded, FP16, slow)).splitlines()
    assert lines[0] == "# no-ship: some/model"
    assert lines[2] == "- int8: no-ship"
    assert lines[3].startswith("- int8: min_speedup fail:")


def test_a_cell_can_t_break_the_markdown_table(loaded: LoadedRecipe) -> None:
    report = make(loaded, FP16, INT8)
    int8 = report.variant("int8")
    assert int8 is not None
    finding = Finding(
        rule="max_memory", outcome="fail", observed=1.0, limit=2.0, unit="x", because="first | line\nsecond"
    )
    odd = int8.model_copy(update={"findings": (finding,)})
    text = markdown(report.model_copy(update={"variants": (report.variants[0], odd)}))
    found = next(line for line in text.splitlines() if line.startswith("| int8 | max_memory"))
    assert found.endswith("| first \\| line second |")


def test_the_run_s_files_are_whole_and_read_back_to_the_same(loaded: LoadedRecipe, tmp_path: Path) -> None:
    report = make(loaded, FP16, INT8)
    folder = tmp_path / "run"
    write_report(report, folder=folder, recipe_text=loaded.text)
    assert {path.name for path in folder.iterdir()} >= {
        *("report.json", "report.md", "recipe.yaml", "resolved-recipe.json")
    }
    assert Report.model_validate_json((folder / "report.json").read_bytes()) == report
    assert load_recipe(folder / "recipe.yaml").recipe == loaded.recipe
    again = load_recipe(folder / "resolved-recipe.json").recipe
    assert again.expand(device="cuda") == loaded.recipe.expand(device="cpu")
    assert json.loads((folder / "resolved-recipe.json").read_text("utf-8")) == report.resolved_recipe


def test_a_report_of_another_version_or_with_unknown_fields_is_no_report(loaded: LoadedRecipe) -> None:
    data = json.loads(make(loaded, FP16, INT8).to_json())
    for change in ({"format_version": 2}, {"verdict": "maybe"}, {"extra": 1}, {"seconds": "fast"}):
        with pytest.raises(ValueError, match="1 validation error"):
            Report.model_validate_json(json.dumps({**data, **change}))
