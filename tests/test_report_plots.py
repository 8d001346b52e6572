"""What a report's plots show: bins, roofs, bars and points, as values before anything is drawn."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest

from pipeline.interval_plots import margin_plots
from pipeline.kl_plot import LOWEST_NATS, bin_edges, kl_histograms, token_shares
from pipeline.latency_plots import MANY_ROWS, latency_plots
from pipeline.measured_memory_plot import memory_bars
from pipeline.plot_marks import both_ends
from pipeline.report_blocks import blocks
from pipeline.report_findings import concern, figure_text, limit_text
from pipeline.results import Finding, Reconciliation
from pipeline.sweep_plot import SweepCurve, sweep_curves, sweep_plot
from pipeline.text_table import markdown_table
from pipeline.trade_plot import trade_points, trade_svg
from tests import result_builders as build
from tests.test_report_page import arm, full_report, judged


def test_every_token_is_in_one_bin_and_nought_is_in_the_first() -> None:
    edges = bin_edges(0.5)
    shares = token_shares([0.0, -1e-9, LOWEST_NATS, 0.5, 0.5, edges[-1]], edges)
    assert edges[-2] <= 0.5 < edges[-1]
    assert sum(shares) == pytest.approx(1)
    assert shares[0] == pytest.approx(3 / 6)
    assert shares[-1] == pytest.approx(3 / 6)


def test_the_histogram_leaves_the_baseline_out_and_keeps_each_variant_s_place() -> None:
    _, found = kl_histograms(full_report())
    assert [(one.name, one.place) for one in found] == [("int8", 1), ("int4", 2)]


def test_a_roof_is_bandwidth_over_bytes_until_the_arithmetic_ends_it() -> None:
    points = ((1, 10.0, 1_000_000_000), (4, 30.0, 1_300_000_000))
    curve = SweepCurve("a", 0, points, peak_tokens_per_s=60.0, break_even_batch=None, capacity=None)
    assert curve.roof(1, bandwidth_bytes_per_s=3e10) == pytest.approx(30.0)
    assert curve.roof(2, bandwidth_bytes_per_s=3e10) == pytest.approx(2 * 3e10 / 1.1e9)
    assert curve.roof(8, bandwidth_bytes_per_s=3e10) == 60.0
    unbounded = SweepCurve("a", 0, points, peak_tokens_per_s=None, break_even_batch=None, capacity=None)
    assert unbounded.roof(8, bandwidth_bytes_per_s=3e10) == pytest.approx(8 * 3e10 / 1.7e9)


def test_a_roof_of_one_batch_is_known_at_that_batch_only() -> None:
    curve = SweepCurve(
        "a", 0, ((1, 10.0, 10**9),), peak_tokens_per_s=None, break_even_batch=None, capacity=None
    )
    assert curve.roof(1, bandwidth_bytes_per_s=3e10) == pytest.approx(30.0)
    assert curve.roof(2, bandwidth_bytes_per_s=3e10) is None


def test_the_peak_is_the_rate_at_the_planned_break_even_batch() -> None:
    """40 sequences a step of 1e9 bytes at 3e10 bytes a second."""
    assert sweep_curves(full_report())[0].peak_tokens_per_s == pytest.approx(1200.0)


@pytest.mark.parametrize(("bound", "peak"), [("compute", 60.0), ("memory", None)])
def test_a_planned_roof_that_arithmetic_sets_is_every_larger_batch_s(
    bound: Literal["compute", "memory"], peak: float | None
) -> None:
    rows = [build.speed_row(1, 20.0), build.speed_row(4, 50.0, bytes_read_per_step=1_320_000_000)]
    row = Reconciliation(
        figure="decode at batch 4, at most",
        unit="tok/s",
        batch_size=4,
        bound=bound,
        predicted=60.0,
        measured=50.0,
        because="",
    )
    variant = build.variant("fp16", speed=build.speed("fp16", rows=rows), planned=(row,))
    assert sweep_curves(build.report(build.variant_report(variant)))[0].peak_tokens_per_s == peak


def test_void_rows_are_in_no_plot() -> None:
    report = full_report()
    int4 = next(curve for curve in sweep_curves(report) if curve.name == "int4")
    assert [size for size, _, _ in int4.points] == [1]
    waits = [wait.name for plot in latency_plots(report) for wait in plot.waits]
    assert "int4, batch 1" in waits
    assert "int4, batch 8" not in waits


def test_one_batch_size_makes_no_curve() -> None:
    rows = [build.speed_row(1, 20.0)]
    variants = [build.variant(name, speed=build.speed(name, rows=rows)) for name in ("fp16", "int8")]
    assert sweep_plot(build.report(*map(build.variant_report, variants))) is None


def test_of_many_waits_the_smallest_and_largest_batch_are_drawn_and_all_are_kept() -> None:
    rows = [build.speed_row(2**power, 20.0 * 2**power) for power in range(8)]
    variants = [build.variant(name, speed=build.speed(name, rows=rows)) for name in ("fp16", "int8")]
    plot = latency_plots(build.report(*map(build.variant_report, variants)))[0]
    assert len(plot.waits) == 16 > MANY_ROWS
    assert [wait.size for wait in plot.shown] == [1, 128, 1, 128]


def test_bars_hold_what_was_measured_and_what_was_foretold_for_as_many_sequences() -> None:
    bars = {bar.name: bar for bar in memory_bars(full_report())}
    measured, predicted = bars["int8 measured, 20 sequences"], bars["int8 predicted, 20 sequences"]
    assert dict(measured.parts) == {"weights": 5e8, "KV cache": 2e9, "activations": 4e8}
    assert dict(predicted.parts) == {"weights": 5e8, "KV cache": 2e9, "activations": 1e7 + 20 * 1.5e7}
    assert not any(name.startswith("fp8") for name in bars)


def test_points_stand_at_the_paired_change_with_the_baseline_at_nought() -> None:
    by_scores, by_perplexity = trade_points(full_report())
    assert {point.name: point.change.value for point in by_scores} == pytest.approx(
        {"fp16": 0.0, "int8": 0.25, "int4": -15.0}
    )
    assert [point.tokens_per_s for point in by_scores] == [20.0, 38.0, 11.0]
    assert by_perplexity[0].change.unit != by_scores[0].change.unit


def found(rule: str, **fields: Any) -> Finding:
    """A finding of a rule that could measure nothing."""
    defaults: dict[str, Any] = {
        "outcome": "missing",
        "observed": None,
        "limit": None,
        "unit": "",
        "because": "…",
    }
    return Finding(rule=rule, **{**defaults, **fields})


def test_every_quality_rule_has_its_own_plot_with_every_variant_it_judged() -> None:
    plots = {plot.rule: plot for plot in margin_plots(full_report())}
    assert set(plots) == {"max_quality_drop", "max_kl"}
    assert [name for name, _ in plots["max_kl"].rows] == ["int8", "int4", "fp8"]
    assert plots["max_kl"].limit == 0.1


@pytest.mark.parametrize(
    ("rule", "about"),
    [
        *(
            ("min_speedup", "speed"),
            ("max_ttft", "speed"),
            ("max_memory", "memory"),
            ("min_capacity", "memory"),
            ("max_length_drift", "quality"),
        ),
        *(("max_quality_drop", "quality"), ("max_kl", "quality"), ("label", "other"), ("no/such", "other")),
    ],
)
def test_a_rule_is_about_what_it_reads(rule: str, about: str) -> None:
    assert concern(found(rule)) == about


@pytest.mark.parametrize(
    ("unit", "subject", "about", "limit"),
    [
        ("x", "speed", "speed", "at least 0.9 ×"),
        ("fraction", "memory", "memory", "at most 0.9 ×"),
        ("points", "piqa", "quality", "at most 0.9 points"),
        ("points", "memory", "quality", "at most 0.9 points"),
    ],
)
def test_a_rule_that_judges_several_things_is_told_apart_by_its_units(
    unit: str, subject: str, about: str, limit: str
) -> None:
    finding = found("no_regression", unit=unit, subject=subject, limit=0.9)
    assert (concern(finding), limit_text(finding)) == (about, limit)


def test_what_must_not_stray_either_way_has_its_limit_on_both_sides() -> None:
    finding = found("max_length_drift", unit="percent", subject="gsm8k", limit=10.0)
    assert limit_text(finding) == "within ±10 %"
    shorter = finding.model_copy(update={"observed": -12.0, "interval": (-14.0, -11.0), "outcome": "fail"})
    (plot,) = margin_plots(
        build.report(
            build.variant_report(build.variant("fp16")),
            build.variant_report(build.variant("int8"), findings=(shorter,), verdict="no-ship"),
        )
    )
    drawn = plot.svg()
    assert 'id="limit"' in drawn or "-limit" in drawn
    assert "lower-limit" in drawn
    assert "limit ±10 %" in drawn


def test_figures_and_limits_have_units_and_none_is_missing() -> None:
    finding = Finding(
        rule="max_memory", outcome="fail", observed=None, limit=2.5e9, unit="bytes", because="not measured"
    )
    assert limit_text(finding) == "at most 2,500.0 MB"
    assert figure_text(None, "points") == "missing"
    assert figure_text(0.0, "points") == "0 points"


def test_blocks_hold_the_cells_that_were_written() -> None:
    cells = [("a | b", "1"), ("line\nbreak", "–")]
    text = f"### Tasks\n\nTwo of them.\n\n{markdown_table(('name', 'n'), cells)}"
    heading, paragraph, table = blocks(text)
    assert (heading.text, paragraph.text) == ("Tasks", "Two of them.")
    assert table.table is not None
    assert table.table.title == "Tasks"
    assert [[cell for _, cell in row] for row in table.table.rows] == [["a | b", "1"], ["line break", "–"]]
    assert [column.text for column in table.table.columns] == [True, False]


def test_a_name_that_is_cut_keeps_what_tells_it_from_its_family() -> None:
    names = [f"int4-awq-group-128-symmetric-with-clipping, batch {size}" for size in (1, 64)]
    cut = [both_ends(name, 32) for name in names]
    assert all(len(name) == 32 and name.startswith("int4-awq") for name in cut)
    assert cut[0].endswith("batch 1")
    assert cut[1].endswith("batch 64")
    assert both_ends("fp16", 4) == "fp16"


def test_no_name_is_written_over_the_line_of_no_change() -> None:
    points = trade_points(full_report())[0]
    svg = trade_svg(full_report(), points, key="clear")
    line = re.search(r'id="[^"]*no-change">\s*<path d="M [\d.]+ ([\d.]+)', svg)
    assert line is not None
    at = float(line[1])
    bases = [float(y) for y in re.findall(r'y="([\d.]+)" transform="rotate[^>]*>[^<]* MB</text>', svg)]
    assert len(bases) == len(points)
    assert all(not base - 8 < at < base + 2 for base in bases)


def test_capacities_at_one_place_stand_beside_each_other() -> None:
    report = judged(
        arm("fp16", rates=(20.0, 70.0), sequences=8, right=300, kl=0.0),
        arm("int8", rates=(38.0, 130.0), sequences=8, right=301, kl=0.004),
    )
    svg = sweep_plot(report)
    assert svg is not None
    places = [re.search(rf'id="sweep-v-{place}">.*?<use x="([\d.]+)"', svg, re.S) for place in (0, 1)]
    left, right = (float(found[1]) for found in places if found)
    assert right - left > 5
