"""Speed as columns: the same figures as in the report, under known words, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
import statistics

import pytest

from pipeline.measured import Distribution
from pipeline.report import markdown
from pipeline.results import Report
from pipeline.speed_columns import COLUMNS, speed_csv, speed_markdown
from pipeline.speed_results import SpeedRow
from tests import result_builders as build


def read(report: Report) -> list[dict[str, str]]:
    """The rows as any program reads them, after checking that every line has every column."""
    lines = list(csv.reader(io.StringIO(speed_csv(report))))
    assert {len(line) for line in lines} == {len(COLUMNS)}
    return list(csv.DictReader(io.StringIO(speed_csv(report))))


def one_row(row: SpeedRow, **fields: object) -> Report:
    variant = build.variant("int8", speed=build.speed("int8", [row]))
    return build.report(build.variant_report(variant), **fields)


def test_there_is_a_line_for_each_variant_and_shape_the_baseline_first() -> None:
    rows = read(build.report())
    assert [(row["variant"], row["batch_size"]) for row in rows] == [
        *(("fp16", "1"), ("fp16", "8"), ("int8", "1"), ("int8", "8"))
    ]
    first = rows[2]
    assert (first["model"], first["precision"], first["quantizer"]) == ("tiny/model", "int8", "quanto")
    assert (first["engine"], first["device"], first["compute_dtype"]) == ("transformers", "cpu", "bfloat16")
    assert (first["test"], first["n_prompt"], first["n_gen"]) == ("pp128+tg32", "128", "32")
    assert float(first["bits_per_weight"]) == 8.0


def test_the_figures_read_back_are_those_of_the_report_to_the_last_digit() -> None:
    row = build.speed_row(
        8,
        160.0,
        itl_p50_s=0.0512345,
        itl_p90_s=0.0612345,
        itl_p99_s=0.0712345,
        joules_per_output_token=Distribution.of([0.31, 0.29, 0.3]),
    )
    (cells,) = read(one_row(row))
    assert row.ttft_s is not None
    assert row.tpot_s is not None
    assert float(cells["pp_median_ts"]) == row.prefill_tokens_per_s
    assert float(cells["tg_median_ts"]) == row.decode_tokens_per_s
    assert float(cells["median_ttft_ms"]) == row.ttft_s.median * 1e3
    assert float(cells["median_tpot_ms"]) == row.tpot_s.median * 1e3
    for name, seconds in (("median", row.itl_p50_s), ("p90", row.itl_p90_s), ("p99", row.itl_p99_s)):
        assert seconds is not None
        assert float(cells[f"{name}_itl_ms"]) == seconds * 1e3
    assert int(cells["peak_memory_bytes"]) == row.peak_memory_bytes
    assert float(cells["bandwidth_share"]) == row.bandwidth_share
    assert float(cells["joules_per_output_token"]) == 0.3
    assert (cells["outcome"], cells["noisy"], cells["because"]) == ("measured", "false", "")


def test_averages_and_deviations_are_those_of_the_repeats_rates() -> None:
    row = build.speed_row(
        4,
        80.0,
        ttft_s=Distribution.of([0.25, 0.5, 1.0]),
        prefill_tokens_per_s=4 * 128 / 0.5,
        tpot_s=Distribution.of([0.04, 0.05, 0.08]),
    )
    (cells,) = read(one_row(row))
    prefill, decode = [2048.0, 1024.0, 512.0], [100.0, 80.0, 50.0]
    assert float(cells["pp_avg_ts"]) == pytest.approx(statistics.fmean(prefill))
    assert float(cells["pp_stddev_ts"]) == pytest.approx(statistics.stdev(prefill))
    assert float(cells["tg_avg_ts"]) == pytest.approx(statistics.fmean(decode))
    assert float(cells["tg_stddev_ts"]) == pytest.approx(statistics.stdev(decode))


def test_what_is_missing_is_an_empty_cell_and_never_a_nought() -> None:
    bare = SpeedRow(
        batch_size=8, prompt_tokens=64, new_tokens=16, outcome="out_of_memory", because="8, too many"
    )
    (cells,) = read(one_row(bare))
    assert cells["outcome"] == "out_of_memory"
    assert cells["because"] == "8, too many"
    named = {
        "pp_",
        "tg_",
        "median_",
        "p90_",
        "p99_",
        "peak_",
        "bandwidth_",
        "joules_",
        "tpot_",
        "sheet_",
        "prefill_",
    }
    figures = {name: cell for name, cell in cells.items() if name.startswith(tuple(named))}
    assert len(figures) == 17
    assert set(figures.values()) == {""}


def test_one_repeat_has_an_average_and_no_deviation() -> None:
    row = build.speed_row(1, 20.0, ttft_s=Distribution.of([0.2]), tpot_s=Distribution.of([0.05]))
    (cells,) = read(one_row(row))
    assert float(cells["tg_avg_ts"]) == pytest.approx(20.0)
    assert (cells["pp_stddev_ts"], cells["tg_stddev_ts"]) == ("", "")


def test_the_figures_of_a_void_row_reach_no_table_but_its_reason_does() -> None:
    row = build.speed_row(
        1, 9876.5, outcome="void", because="a step took no time", tpot_s=Distribution.of([0.0])
    )
    report = one_row(row, resolved_recipe={"model": {"id": "tiny/model"}})
    (cells,) = read(report)
    assert (cells["outcome"], cells["because"]) == ("void", "a step took no time")
    assert "9876" not in speed_csv(report) + speed_markdown(report)
    assert "int8: pp128+tg32, batch 1, void: a step took no time" in markdown(report)


def test_prompt_lengths_and_depths_are_told_apart_from_the_workload_s_batches() -> None:
    prefill = build.speed_row(1, None, tpot_s=None, prompt_tokens=512, new_tokens=1, test="prefill")
    depth = build.speed_row(1, 20.0, prompt_tokens=4096, new_tokens=16, test="depth")
    variant = build.variant("int8", speed=build.speed("int8", [prefill, depth]))
    first, second = read(build.report(build.variant_report(variant)))
    assert (first["test"], first["n_prompt"], first["n_depth"], first["tg_median_ts"]) == (
        "pp512",
        "512",
        "0",
        "",
    )
    assert (second["test"], second["n_gen"], second["n_depth"]) == ("tg16 @ d4096", "16", "4096")
    assert (first["chunk_tokens"], second["chunk_tokens"]) == ("", "")
    pieces = build.speed_row(
        1, None, tpot_s=None, prompt_tokens=512, new_tokens=1, test="prefill", chunk_tokens=128
    )
    (cells,) = read(one_row(pieces))
    assert (cells["test"], cells["n_prompt"], cells["chunk_tokens"]) == (
        *("pp512 in chunks of 128", "512", "128"),
    )
    assert speed_markdown(build.report(build.variant_report(variant))) == "", "they have tables of their own"


@pytest.mark.parametrize(
    ("given", "read_back"),
    [
        ('=HYPERLINK("http://x","y")', '\'=HYPERLINK("http://x","y")'),
        ("+1+1", "'+1+1"),
        ("-2", "'-2"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'=1"),
        ("\n=1", "'=1"),
        ("org/model, the\r\nsecond", "org/model, the second"),
        ('a "quoted" name', 'a "quoted" name'),
        ("naïve 🚢;|", "naïve 🚢;|"),
        ("safe=1", "safe=1"),
    ],
)
def test_text_of_others_is_quoted_stays_on_its_line_and_is_no_formula(given: str, read_back: str) -> None:
    odd = build.variant(given, "int8", speed=build.speed("int8", [build.speed_row(1, 20.0)], device=given))
    report = build.report(build.variant_report(odd), resolved_recipe={"model": {"id": given}})
    (cells,) = read(report)
    assert [cells[name] for name in ("model", "variant", "device")] == [read_back] * 3
    assert len(speed_csv(report).splitlines()) == 2


def test_a_figure_below_nought_stays_a_number() -> None:
    (cells,) = read(one_row(build.speed_row(1, 20.0, bandwidth_share=-0.5)))
    assert float(cells["bandwidth_share"]) == -0.5


def test_a_run_without_speed_gives_the_header_alone() -> None:
    report = build.report(build.variant_report(build.variant("fp16", speed=None, memory=None)))
    assert read(report) == []
    assert speed_csv(report).startswith("model,variant,precision,")
    assert speed_markdown(report) == ""


def test_the_markdown_table_shows_the_same_shapes_under_the_same_words() -> None:
    lines = speed_markdown(build.report()).splitlines()
    assert len(lines) == 2 + 4
    assert lines[0].startswith(
        "| variant | test | batch | outcome | pp tok/s | tg tok/s | TTFT ms | TPOT ms |"
    )
    assert lines[2].startswith("| fp16 | pp128+tg32 | 1 | measured | 609.5 | 20.0 | 210.0 | 50.00 |")
