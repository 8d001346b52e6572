"""Serving for the report and as columns: static beside continuous batching, the cached prefix, serving.csv.

The words of serving.csv are those of vLLM's serving benchmark: `request_throughput`, `output_throughput`,
`median_ttft_ms`, `p99_itl_ms`, `mean_e2el_ms`, `request_goodput`. Its total of input and output tokens a second has no
column here: the two are never added.

    write_atomically(folder / "serving.csv", serving_csv(report))
    print(serving_markdown(report))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.csv_text import Cell, csv_text
from pipeline.measured import Distribution
from pipeline.results import Report, VariantReport
from pipeline.serving_results import PrefixRow, ServingCost, ServingResult, ServingRow
from pipeline.simulation import Percentiles
from pipeline.text_table import figure_cell, markdown_table

_SHORT = {"out_of_memory": "OOM", "void": "void", "failed": "failed"}


@dataclass(frozen=True)
class _Served:
    """One row's place in a report."""

    report: Report
    variant: VariantReport
    serving: ServingResult
    row: ServingRow

    @property
    def measured(self) -> ServingRow | None:
        """The row if its figures hold."""
        return self.row if self.row.outcome == "measured" else None

    @property
    def cost(self) -> ServingCost | None:
        """The price at this row's rates."""
        row = self.row
        place = (row.mode, row.load, row.concurrency)
        costs = self.variant.cost.serving if self.variant.cost else ()
        return next((one for one in costs if (one.mode, one.load, one.concurrency) == place), None)


def _rows(report: Report) -> Iterator[_Served]:
    for variant in report.variants:
        if variant.serving:
            for row in variant.serving.rows:
                yield _Served(report, variant, variant.serving, row)


def _field(name: str) -> Callable[[_Served], Cell]:
    """A field of a measured row, a distribution by its median."""

    def of(served: _Served) -> Cell:
        value = getattr(served.measured, name, None)
        return value.median if isinstance(value, Distribution) else value

    return of


def _time(name: str, figure: str, *, factor: float = 1e3) -> Callable[[_Served], float | None]:
    """One figure of a measured row's percentiles, in milliseconds unless `factor` says otherwise."""

    def of(served: _Served) -> float | None:
        value: Percentiles | None = getattr(served.measured, name, None)
        seconds: float | None = getattr(value, figure, None)
        return None if seconds is None else seconds * factor

    return of


def _share(name: str, *, factor: float = 1.0) -> Callable[[_Served], float | None]:
    def of(served: _Served) -> float | None:
        shares = served.measured.latency_shares if served.measured else None
        share: float | None = getattr(shares, name, None)
        return None if share is None else share * factor

    return of


def _goodput(name: str) -> Callable[[_Served], float | None]:
    return lambda served: getattr(served.measured.goodput if served.measured else None, name, None)


def _price(name: str) -> Callable[[_Served], float | None]:
    return lambda served: getattr(served.cost, f"dollars_per_million_{name}_tokens", None)


def _tokens(name: str) -> Callable[[_Served], int | None]:
    """Tokens of one repeat, as they were counted."""

    def of(served: _Served) -> int | None:
        row = served.measured
        return sum(getattr(one, name) for one in row.repeats[0]) if row and row.repeats else None

    return of


# --- Markdown --------------------------------------------------------------------------------------------


def serving_markdown(report: Report) -> str:
    """Every table with what its words mean; empty where nothing was served."""
    if not any(True for _ in _rows(report)):
        return ""
    parts = [
        _table(report, _figures()),
        "Static: batches in order, padded, run until the longest answer is done; TTFT from the batch's start. "
        "Continuous, closed loop: so many requests under way, times from submission. Open loop: requests come when "
        "they come, times from arrival. Only tokens that somebody wanted are counted. Gain: continuous ÷ static "
        "output tok/s, repeat by repeat. $/1M pays for the whole hour, prompts included.",
        "### Where the time goes",
        _table(report, _places()),
    ]
    prefix = _prefix_table(report)
    if prefix:
        parts += ["### Prefill from a cached prefix", prefix]
    return "\n\n".join(parts)


def serving_notes(serving: ServingResult) -> list[str]:
    """How it ran, and why rows have no figures."""
    notes = [f"serving: static: {serving.static_execution}; continuous: {serving.continuous_execution}"]
    notes += [
        f"serving: {row.name}, {row.outcome.replace('_', ' ')}: {row.because}"
        for row in serving.rows
        if row.because
    ]
    if serving.prefix and serving.prefix.because:
        notes.append(
            f"serving: cached prefix, {serving.prefix.outcome.replace('_', ' ')}: {serving.prefix.because}"
        )
    steps = serving.step_times
    if steps:
        terms = ", ".join(f"{name} {seconds * 1e3:.4g} ms" for name, seconds in steps.seconds.items())
        notes.append(
            f"serving: step times fitted to {steps.samples} steps: {terms} "
            f"(median error {100 * steps.median_error:.1f} %)"
        )
    return [*notes, *serving.notes]


def _table(report: Report, figures: Mapping[str, Callable[[_Served], str]]) -> str:
    rows = [
        (
            served.variant.name,
            served.row.mode,
            served.row.load,
            str(served.row.concurrency),
            *(figure(served) for figure in figures.values()),
        )
        for served in _rows(report)
    ]
    return markdown_table(
        ("variant", "mode", "load", "at once", *figures), rows, text_columns=("mode", "load")
    )


def _figures() -> dict[str, Callable[[_Served], str]]:
    return {
        "requests/s": _shown(_field("requests_per_s"), ".3g"),
        "output tok/s": _output_rate,
        "gain": _shown(_field("gain"), ".2f"),
        "TTFT p50 ms": _shown(_time("ttft_s", "p50"), ".1f"),
        "TTFT p99 ms": _shown(_time("ttft_s", "p99"), ".1f"),
        "TPOT p50 ms": _shown(_time("tpot_s", "p50"), ".2f"),
        "ITL p99 ms": _shown(_time("itl_s", "p99"), ".2f"),
        "latency p99 s": _shown(_time("latency_s", "p99", factor=1), ".2f"),
        "goodput/s": _good,
        "$/1M output": _shown(_price("output"), ".4g"),
        "$/1M input": _shown(_price("input"), ".4g"),
    }


def _places() -> dict[str, Callable[[_Served], str]]:
    return {
        "waiting %": _shown(_share("waiting", factor=100), ".1f"),
        "prefill %": _shown(_share("prefill", factor=100), ".1f"),
        "decode %": _shown(_share("decode", factor=100), ".1f"),
        "wait p99 ms": _shown(_time("wait_s", "p99"), ".1f"),
        "steps": _shown(_field("steps"), "d"),
        "mean batch": _shown(_field("mean_batch"), ".2f"),
        "preempted": _shown(_field("preemptions"), "d"),
        "input tok/s": _shown(_field("input_tokens_per_s"), ".1f"),
        "peak MB": _shown(lambda served: _millionth(_field("peak_memory_bytes")(served)), ".0f"),
    }


def _output_rate(served: _Served) -> str:
    """Rows without figures say why; `~` is noisy, and a rate at which the queue grows is marked."""
    row = served.measured
    if row is None or row.output_tokens_per_s is None:
        return _SHORT.get(served.row.outcome, "–")
    marks = ("~" if row.noisy else "") + (" overloaded" if row.overloaded else "")
    return f"{row.output_tokens_per_s.median:.1f}{marks}"


def _good(served: _Served) -> str:
    found = served.measured.goodput if served.measured else None
    return f"{found.requests_per_s:.3g} ({100 * found.share:.0f} %)" if found else "–"


def _prefix_table(report: Report) -> str:
    header = (
        *("variant", "outcome", "prefix", "fresh", "computed cold", "computed cached", "reused"),
        *("cold TTFT ms", "cached TTFT ms", "times faster"),
    )
    rows = [
        _prefix_cells(variant.name, variant.serving.prefix)
        for variant in report.variants
        if variant.serving and variant.serving.prefix
    ]
    return markdown_table(header, rows, text_columns=("outcome",)) if rows else ""


def _prefix_cells(name: str, row: PrefixRow) -> tuple[str, ...]:
    """Counts always, times only where they hold."""
    holds = row.outcome == "measured"
    counts = (row.cold_computed_tokens, row.cached_computed_tokens, row.reused_tokens)
    times = [
        times.median * 1e3 if holds and times else None for times in (row.cold_ttft_s, row.cached_ttft_s)
    ]
    return (
        name,
        row.outcome.replace("_", " ") + (", noisy" if holds and row.noisy else ""),
        str(row.prefix_tokens),
        str(row.fresh_tokens),
        *(figure_cell(count, "d") for count in counts),
        *(figure_cell(time_ms, ".1f") for time_ms in times),
        figure_cell(row.times_faster if holds else None, ".2f"),
    )


def _shown(of: Callable[[_Served], Cell], form: str) -> Callable[[_Served], str]:
    return lambda served: figure_cell(of(served), form)


def _millionth(value: Cell) -> float | None:
    return value / 1e6 if isinstance(value, int | float) else None


# --- serving.csv -----------------------------------------------------------------------------------------


def serving_csv(report: Report) -> str:
    """RFC 4180 with "\\n" at a line's end: one line for each variant and cell; what is missing is an empty cell.

    A row that is void, failed or out of memory has no figures.
    """
    return csv_text(list(COLUMNS), ([of(served) for of in COLUMNS.values()] for served in _rows(report)))


def _rate_cv_percent(served: _Served) -> Cell:
    rate = served.measured.output_tokens_per_s if served.measured else None
    return rate.cv_percent if rate else None


def _percentile_columns() -> dict[str, Callable[[_Served], Cell]]:
    """`mean_ttft_ms` … `p99_e2el_ms`."""
    times = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "latency_s", "wait": "wait_s"}
    figures = {"mean": "mean", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
    return {
        f"{figure}_{word}_ms": _time(name, of)
        for word, name in times.items()
        for figure, of in figures.items()
    }


COLUMNS: dict[str, Callable[[_Served], Cell]] = {
    "model": lambda served: served.report.model_id,
    "variant": lambda served: served.variant.name,
    "precision": lambda served: served.variant.precision,
    "engine": lambda served: served.serving.engine,
    "device": lambda served: served.serving.device,
    "compute_dtype": lambda served: served.serving.compute_dtype,
    "mode": lambda served: served.row.mode,
    "load": lambda served: served.row.load,
    "max_concurrency": lambda served: served.row.concurrency,
    "request_rate": lambda served: served.row.offered_requests_per_s,
    "num_prompts": lambda served: served.row.requests,
    "outcome": lambda served: served.row.outcome,
    "duration": _field("duration_s"),
    "total_input_tokens": _tokens("prompt_tokens"),
    "total_output_tokens": _tokens("new_tokens"),
    "request_throughput": _field("requests_per_s"),
    "input_throughput": _field("input_tokens_per_s"),
    "output_throughput": _field("output_tokens_per_s"),
    "output_throughput_cv_percent": _rate_cv_percent,
    "gain_over_static": _field("gain"),
    "request_goodput": _goodput("requests_per_s"),
    "goodput_share": _goodput("share"),
    **_percentile_columns(),
    "waiting_share": _share("waiting"),
    "prefill_share": _share("prefill"),
    "decode_share": _share("decode"),
    "steps": _field("steps"),
    "mean_batch": _field("mean_batch"),
    "preemptions": _field("preemptions"),
    "peak_memory_bytes": _field("peak_memory_bytes"),
    "kv_cache_bytes": _field("kv_cache_bytes"),
    "dollars_per_million_output_tokens": _price("output"),
    "dollars_per_million_input_tokens": _price("input"),
    "overloaded": _field("overloaded"),
    "noisy": lambda served: served.row.noisy,
    "because": lambda served: served.row.because or None,
}
