"""Prefill over prompt lengths, decode over depths of context, and what the batch sweep shows, as Markdown.

The workload's batches have a table of their own (`speed_columns`); these rows ran at batch 1 and are named as
llama-bench names them: pp512 is a prefill of 512 tokens (in chunks of 256: in two pieces over the cache), tg64 @ d4096
are 64 tokens decoded at a depth of 4096.

    print(length_tables(report))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeline.measure import FREE_STEP, SATURATED_GAIN
from pipeline.measured import Distribution
from pipeline.results import Report
from pipeline.speed_results import SpeedResult, SpeedRow, SpeedTest
from pipeline.text_table import figure_cell, markdown_table

Figure = Callable[[SpeedRow], str]


def length_tables(report: Report) -> str:
    """Both tables under their headings; one that nothing was measured for is left out."""
    tables = (
        ("Prefill by prompt length", _table(report, "prefill", _prefill_figures(report))),
        ("Decode by depth of context", _table(report, "depth", _depth_figures(report))),
    )
    return "\n\n".join(f"### {heading}\n\n{table}" for heading, table in tables if table)


def sweep_notes(speed: SpeedResult) -> list[str]:
    """Where the free lunch of batching ends and what the best batch is worth; nothing where no sweep tells."""
    if speed.free_lunch_batch is None:
        return []
    largest = max(row.batch_size for row in speed.of("batch") if row.outcome == "measured")
    more = " (the largest one measured)" if speed.free_lunch_batch == largest else ""
    times = speed.measured_break_even_batch
    reached = (
        f"not reached by batch {largest}: a doubling still gains {100 * (SATURATED_GAIN - 1):.0f} % or more"
        if times is None
        else f"batch {times:.1f}, the best batch's rate ÷ that of batch 1"
    )
    return [
        f"free lunch: up to batch {speed.free_lunch_batch}{more} a step takes at most {FREE_STEP:g} × that of batch 1",
        f"measured break-even: {reached}",
    ]


def _prefill_figures(report: Report) -> dict[str, Figure]:
    """Peak memory is what chunks are for: it stands beside the whole prefill's where there are any."""
    figures: dict[str, Figure] = {
        "tok/s": lambda row: figure_cell(row.prefill_tokens_per_s, ".1f"),
        "TTFT ms": lambda row: figure_cell(_milliseconds(row.ttft_s), ".1f"),
        "CV %": lambda row: figure_cell(_spread_percent(row.ttft_s), ".1f"),
        "FLOP/s share": lambda row: figure_cell(row.prefill_flops_share, ".2f"),
    }
    if any(row.chunk_tokens for _, row in _rows(report, "prefill")):
        figures["peak MB"] = lambda row: figure_cell(_megabytes(row.peak_memory_bytes), ".1f")
    return figures


def _depth_figures(report: Report) -> dict[str, Figure]:
    figures: dict[str, Figure] = {
        "tok/s": lambda row: figure_cell(row.decode_tokens_per_s, ".1f"),
        "TPOT ms": lambda row: figure_cell(_milliseconds(row.tpot_s), ".2f"),
        "CV %": lambda row: figure_cell(_spread_percent(row.tpot_s), ".1f"),
        "MB a step": lambda row: figure_cell(_megabytes(row.bytes_read_per_step), ".1f"),
        "bandwidth share": lambda row: figure_cell(row.bandwidth_share, ".2f"),
    }
    if any(row.sheet_bandwidth_share is not None for _, row in _rows(report, "depth")):
        figures["of the data sheet's"] = lambda row: figure_cell(row.sheet_bandwidth_share, ".2f")
    return figures


def _table(report: Report, test: SpeedTest, figures: Mapping[str, Figure]) -> str:
    """Rows that failed or are void show no figure; the reason is among the notes."""
    rows = [
        (
            variant,
            row.name,
            _outcome(row),
            *(figure(row) if row.outcome == "measured" else "–" for figure in figures.values()),
        )
        for variant, row in _rows(report, test)
    ]
    header = ("variant", "test", "outcome", *figures)
    return markdown_table(header, rows, text_columns=("test", "outcome")) if rows else ""


def _rows(report: Report, test: SpeedTest) -> list[tuple[str, SpeedRow]]:
    return [
        (variant.name, row)
        for variant in report.variants
        for row in (variant.speed.of(test) if variant.speed else ())
    ]


def _outcome(row: SpeedRow) -> str:
    return row.outcome.replace("_", " ") + (", noisy" if row.noisy else "")


def _milliseconds(times: Distribution | None) -> float | None:
    return times.median * 1e3 if times else None


def _spread_percent(times: Distribution | None) -> float | None:
    return times.cv_percent if times else None


def _megabytes(count: int | None) -> float | None:
    return None if count is None else count / 1e6
