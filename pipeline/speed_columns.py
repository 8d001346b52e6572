"""Measured speed as columns: one row for each variant and shape, for spreadsheets, scripts and the report.

The words are those that people know. From llama-bench: `pp512` (prompt processing, i.e. prefill, of 512
tokens), `tg128` (generation of 128, i.e. decode), `n_prompt`, `n_gen`, `avg_ts` and `stddev_ts` (tokens a
second, sample standard deviation). From vLLM's bench: `median_ttft_ms`, `median_tpot_ms`, `p99_itl_ms`.

    write_atomically(folder / "speed.csv", speed_csv(report))
    print(speed_markdown(report))
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.csv_text import Cell, csv_text
from pipeline.measured import Distribution
from pipeline.results import Report, VariantReport
from pipeline.speed_results import SpeedResult, SpeedRow
from pipeline.text_table import markdown_table


@dataclass(frozen=True)
class _Shape:
    """One row's place in a report."""

    report: Report
    variant: VariantReport
    speed: SpeedResult
    row: SpeedRow

    @property
    def measured(self) -> SpeedRow | None:
        """The row if its figures hold: those of a void row must not get into anybody's averages."""
        return self.row if self.row.outcome == "measured" else None

    @property
    def prefill_rates(self) -> tuple[float, ...]:
        """Prompt tokens per second of each repeat: batch × prompt tokens ÷ TTFT."""
        row = self.measured
        if row is None or row.ttft_s is None or row.prefill_tokens_per_s is None:
            return ()
        return _rates(row.batch_size * row.prompt_tokens, row.ttft_s.samples)

    @property
    def decode_rates(self) -> tuple[float, ...]:
        """The batch's tokens per second of each repeat: batch ÷ TPOT."""
        row = self.measured
        if row is None or row.tpot_s is None or row.decode_tokens_per_s is None:
            return ()
        return _rates(row.batch_size, row.tpot_s.samples)


def _rates(tokens: int, samples_s: Sequence[float]) -> tuple[float, ...]:
    """Tokens ÷ each time; none where a time is 0 or less, which the gate calls implausible."""
    return tuple(tokens / one_s for one_s in samples_s) if min(samples_s, default=0.0) > 0 else ()


@dataclass(frozen=True)
class Column:
    """`name` heads it in speed.csv; in Markdown `heading` does, and without one the column isn't there."""

    name: str
    of: Callable[[_Shape], Cell]
    heading: str = ""
    form: str = ""

    def markdown(self, shape: _Shape) -> str:
        """The cell for a reader, who sees beside the outcome whether it is noisy."""
        cell = self.of(shape)
        noisy = ", noisy" if self.name == "outcome" and shape.row.noisy else ""
        return "–" if cell is None else format(cell, self.form) + noisy


def speed_csv(report: Report) -> str:
    """RFC 4180 with "\\n" at a line's end: a header and one line a shape; what is missing is an empty cell."""
    rows = ([column.of(shape) for column in COLUMNS] for shape in _shapes(report))
    return csv_text([column.name for column in COLUMNS], rows)


def speed_markdown(report: Report) -> str:
    """The workload's batches for a reader, under the same words; empty when none was run."""
    shown = [column for column in COLUMNS if column.heading]
    batches = [shape for shape in _shapes(report) if shape.row.test == "batch"]
    rows = [[column.markdown(shape) for column in shown] for shape in batches]
    header = [column.heading for column in shown]
    return markdown_table(header, rows, text_columns=("test", "outcome")) if rows else ""


def _shapes(report: Report) -> Iterator[_Shape]:
    for variant in report.variants:
        if variant.speed:
            for row in variant.speed.rows:
                yield _Shape(report, variant, variant.speed, row)


# --- the figures -----------------------------------------------------------------------------------------


def _bits_per_weight(shape: _Shape) -> Cell:
    return shape.variant.checkpoint.bits_per_weight if shape.variant.checkpoint else None


def _quantizer(shape: _Shape) -> Cell:
    kind = shape.variant.quantizer.get("kind")
    return None if kind is None else str(kind)


def _mean(samples: Sequence[float]) -> float | None:
    return statistics.fmean(samples) if samples else None


def _deviation(samples: Sequence[float]) -> float | None:
    """Sample standard deviation, as llama-bench has it; one sample has none."""
    return statistics.stdev(samples) if len(samples) > 1 else None


def _figure(name: str, *, factor: float | None = None) -> Callable[[_Shape], Cell]:
    """The field of a measured row, a distribution by its median, times `factor`."""

    def of(shape: _Shape) -> Cell:
        value: Distribution | float | None = getattr(shape.measured, name) if shape.measured else None
        number = value.median if isinstance(value, Distribution) else value
        return number if number is None or factor is None else number * factor

    return of


def _tpot_cv_percent(shape: _Shape) -> Cell:
    row = shape.measured
    return row.tpot_s.cv_percent if row and row.tpot_s else None


COLUMNS = (
    Column("model", lambda shape: shape.report.model_id),
    Column("variant", lambda shape: shape.variant.name, heading="variant"),
    Column("precision", lambda shape: shape.variant.precision),
    Column("bits_per_weight", _bits_per_weight),
    Column("quantizer", _quantizer),
    Column("engine", lambda shape: shape.speed.engine),
    Column("device", lambda shape: shape.speed.device),
    Column("compute_dtype", lambda shape: shape.speed.compute_dtype),
    Column("test", lambda shape: shape.row.name, heading="test"),
    Column("n_prompt", lambda shape: shape.row.prompt_tokens),
    Column("n_gen", lambda shape: 0 if shape.row.test == "prefill" else shape.row.new_tokens),
    Column("n_depth", lambda shape: shape.row.prompt_tokens if shape.row.test == "depth" else 0),
    Column("chunk_tokens", lambda shape: shape.row.chunk_tokens),
    Column("batch_size", lambda shape: shape.row.batch_size, heading="batch"),
    Column("outcome", lambda shape: shape.row.outcome, heading="outcome"),
    Column("pp_avg_ts", lambda shape: _mean(shape.prefill_rates)),
    Column("pp_median_ts", _figure("prefill_tokens_per_s"), heading="pp tok/s", form=".1f"),
    Column("pp_stddev_ts", lambda shape: _deviation(shape.prefill_rates)),
    Column("tg_avg_ts", lambda shape: _mean(shape.decode_rates)),
    Column("tg_median_ts", _figure("decode_tokens_per_s"), heading="tg tok/s", form=".1f"),
    Column("tg_stddev_ts", lambda shape: _deviation(shape.decode_rates)),
    Column("median_ttft_ms", _figure("ttft_s", factor=1e3), heading="TTFT ms", form=".1f"),
    Column("median_tpot_ms", _figure("tpot_s", factor=1e3), heading="TPOT ms", form=".2f"),
    Column("tpot_cv_percent", _tpot_cv_percent, heading="CV %", form=".1f"),
    Column("median_itl_ms", _figure("itl_p50_s", factor=1e3)),
    Column("p90_itl_ms", _figure("itl_p90_s", factor=1e3)),
    Column("p99_itl_ms", _figure("itl_p99_s", factor=1e3), heading="ITL p99 ms", form=".2f"),
    Column("peak_memory_bytes", _figure("peak_memory_bytes")),
    Column("bandwidth_share", _figure("bandwidth_share"), heading="bandwidth share", form=".2f"),
    Column("sheet_bandwidth_share", _figure("sheet_bandwidth_share")),
    Column("prefill_flops_share", _figure("prefill_flops_share")),
    Column("joules_per_output_token", _figure("joules_per_output_token"), heading="J/token", form=".3g"),
    Column("noisy", lambda shape: str(shape.row.noisy).lower()),
    Column("because", lambda shape: shape.row.because or None),
)
