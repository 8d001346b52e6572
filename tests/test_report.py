"""What people and programs read of a run: every variant beside the baseline, gaps as gaps, nothing prettied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import write_report
from pipeline.measured import StageFailure
from pipeline.recipe import LoadedRecipe, load_recipe
from pipeline.report import comparison_table, make_report, markdown
from pipeline.results import CostResult, Finding, Report, VariantResults
from pipeline.speed_columns import speed_csv
from pipeline.speed_results import SpeedRow
from pipeline.stored_reports import load_report, sealed
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
    table = comparison_table(make(loaded, wide, not_run))
    assert row(table, "int8")[2:4] == ["500.0‡", "0.50‡"], "on disk with on disk, and marked"
    assert row(table, "fp16")[2] == "2000.0"
    assert "‡ bytes on disk" in table
    assert "‡" not in comparison_table(make(loaded, FP16, INT8))


def test_columns_of_one_batch_size_are_of_the_smallest(loaded: LoadedRecipe) -> None:
    arms = [
        build.variant(name, speed=build.speed(name, [build.speed_row(8, 160.0), build.speed_row(1, rate)]))
        for name, rate in (("fp16", 20.0), ("int8", 60.0))
    ]
    header, *_ = (table := comparison_table(make(loaded, *arms))).splitlines()
    assert "speed × b1" in header
    assert "3.00" in row(table, "int8")


def test_a_ratio_of_two_engines_speeds_says_so_and_names_both(loaded: LoadedRecipe) -> None:
    other = build.variant("int8", speed=build.speed("int8", engine="llama_cpp"))
    made = make(loaded, FP16, other)
    table = comparison_table(made)
    assert "2.00†" in row(table, "int8")
    for text in (table, markdown(made)):
        assert (
            "† speed across engines, whose difference is in it: int8 llama_cpp against transformers" in text
        )
    assert "†" not in comparison_table(make(loaded, FP16, INT8))


def test_a_void_task_shows_no_score(loaded: LoadedRecipe) -> None:
    arms = [
        build.variant(name, quality=build.quality(build.task("piqa", void="cut")))
        for name in ("fp16", "int8")
    ]
    assert row(comparison_table(make(loaded, *arms)), "int8")[-1] == "void"
    grouped = [
        build.variant(
            name,
            quality=build.quality(build.task("a", void="cut"), build.task("b"), groups={"both": ("a", "b")}),
        )
        for name in ("fp16", "int8")
    ]
    assert row(comparison_table(make(loaded, *grouped)), "int8")[-1] == "void"


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


def lengths() -> list[SpeedRow]:
    """A prefill, a depth and a depth that doesn't fit, beside the workload's batches."""
    return [
        *(build.speed_row(1, 40.0), build.speed_row(8, 160.0)),
        build.speed_row(
            *(1, None),
            prompt_tokens=512,
            new_tokens=1,
            test="prefill",
            tpot_s=None,
            prefill_tokens_per_s=2400.0,
            prefill_flops_share=0.25,
        ),
        build.speed_row(1, 20.0, prompt_tokens=4096, new_tokens=16, test="depth", noisy=True),
        SpeedRow(
            batch_size=1,
            prompt_tokens=9000,
            new_tokens=16,
            test="depth",
            outcome="out_of_memory",
            because="no room",
        ),
    ]


def test_a_recipe_that_names_its_model_by_a_plain_text_has_a_heading_too() -> None:
    assert markdown(build.report()).startswith("# ship: tiny/model\n")
    assert markdown(build.report(resolved_recipe={})).startswith("# ship: recipes/tiny.yaml\n")


def test_prefill_by_length_and_decode_by_depth_have_tables_of_their_own(loaded: LoadedRecipe) -> None:
    report = make(loaded, FP16, build.variant("int8", speed=build.speed("int8", lengths())))
    text = markdown(report)
    assert "| int8 | pp512 | measured | 2400.0 | 210.0 | 3.9 | 0.25 |" in text
    assert "| int8 | tg16 @ d4096 | measured, noisy | 20.0 | 50.00 | 1.6 | 1000.0 | 0.60 |" in text
    assert "| int8 | tg16 @ d9000 | out of memory | – | – | – | – | – |" in text
    assert "of the data sheet's" not in text
    assert comparison_table(report) == comparison_table(make(loaded, FP16, INT8)), (
        "the workload's table is as it was"
    )
    assert "### " not in markdown(make(loaded, FP16, INT8))


def test_a_prefill_in_chunks_stands_under_the_whole_one_with_its_peak_memory(loaded: LoadedRecipe) -> None:
    whole = {"prompt_tokens": 2048, "new_tokens": 1, "test": "prefill", "tpot_s": None}
    rows = [
        build.speed_row(1, 40.0),
        build.speed_row(1, None, **whole, peak_memory_bytes=900_000_000),
        build.speed_row(1, None, **whole, chunk_tokens=256, peak_memory_bytes=400_000_000),
    ]
    text = markdown(make(loaded, FP16, build.variant("int8", speed=build.speed("int8", rows))))
    lines = [line for line in text.splitlines() if "pp2048" in line]
    assert [line.split("|")[2].strip() for line in lines] == ["pp2048", "pp2048 in chunks of 256"]
    assert [line.split("|")[-2].strip() for line in lines] == ["900.0", "400.0"]
    assert "| FLOP/s share | peak MB |" in text


def test_the_data_sheet_s_share_is_shown_where_a_sheet_is_known(loaded: LoadedRecipe) -> None:
    row = build.speed_row(1, 20.0, new_tokens=16, test="depth", sheet_bandwidth_share=0.44)
    report = make(
        loaded, FP16, build.variant("int8", speed=build.speed("int8", [build.speed_row(1, 40.0), row]))
    )
    assert "| bandwidth share | of the data sheet's |" in markdown(report)
    assert "| 0.60 | 0.44 |" in markdown(report)


def test_the_end_of_the_free_lunch_and_the_break_even_are_noted(loaded: LoadedRecipe) -> None:
    def notes(**fields: Any) -> str:
        return markdown(make(loaded, FP16, build.variant("int8", speed=build.speed("int8", **fields))))

    reached = notes(free_lunch_batch=1, measured_break_even_batch=4.25)
    assert "int8: free lunch: up to batch 1 a step takes at most 1.25 × that of batch 1" in reached
    assert "int8: measured break-even: batch 4.2" in reached
    further = notes(free_lunch_batch=8)
    assert "up to batch 8 (the largest one measured)" in further
    assert "measured break-even: not reached by batch 8" in further
    assert "free lunch" not in notes()


def test_reports_from_before_lengths_were_measured_still_load(loaded: LoadedRecipe) -> None:
    data = json.loads(make(loaded, FP16, INT8).to_json())
    for variant in data["variants"]:
        for name in ("measured_break_even_batch", "free_lunch_batch"):
            del variant["speed"][name]
        for row in variant["speed"]["rows"]:
            for name in ("test", "sheet_bandwidth_share", "prefill_flops_share"):
                del row[name]
    assert Report.model_validate_json(json.dumps(data)) == make(loaded, FP16, INT8)


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


def test_the_markdown_prices_input_and_output_apart_and_a_missing_price_is_a_dash(
    loaded: LoadedRecipe,
) -> None:
    price: dict[str, Any] = {
        "dollars_per_hour": 3.5,
        "batch_size": 8,
        "dollars_per_million_output_tokens": 12.25,
    }
    known = CostResult(**price, input_batch_size=4, dollars_per_million_input_tokens=0.75)
    report = make(
        loaded, FP16.model_copy(update={"cost": known}), build.variant("int8", cost=CostResult(**price))
    )
    lines = markdown(report).splitlines()
    assert "| fp16 | 0.75 | 4 | 12.25 | 8 | 3.5 |" in lines
    assert "| int8 | – | – | 12.25 | 8 | 3.5 |" in lines
    assert "## Cost" not in markdown(make(loaded, FP16, INT8))


def test_the_run_s_files_are_whole_and_read_back_to_the_same(loaded: LoadedRecipe, tmp_path: Path) -> None:
    report = make(loaded, FP16, INT8)
    folder = tmp_path / "run"
    write_report(report, folder=folder, recipe_text=loaded.text)
    assert {path.name for path in folder.iterdir()} >= {
        *("report.json", "report.md", "speed.csv", "recipe.yaml", "resolved-recipe.json")
    }
    assert (folder / "speed.csv").read_text("utf-8") == speed_csv(report)
    assert load_report(folder) == sealed(report)
    assert load_recipe(folder / "recipe.yaml").recipe == loaded.recipe
    again = load_recipe(folder / "resolved-recipe.json").recipe
    assert again.expand(device="cuda") == loaded.recipe.expand(device="cpu")
    assert json.loads((folder / "resolved-recipe.json").read_text("utf-8")) == report.resolved_recipe


def test_a_report_of_another_version_or_with_unknown_fields_is_no_report(loaded: LoadedRecipe) -> None:
    data = json.loads(make(loaded, FP16, INT8).to_json())
    for change in ({"format_version": 2}, {"verdict": "maybe"}, {"extra": 1}, {"seconds": "fast"}):
        with pytest.raises(ValueError, match="1 validation error"):
            Report.model_validate_json(json.dumps({**data, **change}))
