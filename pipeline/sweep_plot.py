"""Tokens per second against batch size, as measured, under the limit that reading weights and cache sets.

svg = sweep_plot(report)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pipeline.inline_svg import INK, inline_svg
from pipeline.plot_marks import LEGEND_ROW_IN, axes_over_legend, ink_of, legend_rows, mark, plain, plain_ticks
from pipeline.results import Report, VariantReport
from pipeline.row_axes import WIDTH_IN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BESIDE_IN = 0.09
FARTHEST = 16
"""The axis reaches a capacity of at most so many times the largest batch that was timed."""


@dataclass(frozen=True)
class SweepCurve:
    """A variant's measured batches as (batch, tok/s, bytes a step or None), ascending, and what bounds them.

    `peak_tokens_per_s` is the rate that the device's arithmetic allows, `break_even_batch` what the best batch is
    worth in single streams as measured, `capacity` how many sequences fit; None where it isn't known.
    """

    name: str
    place: int
    points: tuple[tuple[int, float, int | None], ...]
    peak_tokens_per_s: float | None
    break_even_batch: float | None
    capacity: int | None

    def roof(self, batch: float, *, bandwidth_bytes_per_s: float) -> float | None:
        """Highest rate of a batch by memory and, where it is known, arithmetic; bytes are linear between batches."""
        read = self._bytes(batch)
        if read is None:
            return None
        rate = batch * bandwidth_bytes_per_s / read
        return rate if self.peak_tokens_per_s is None else min(rate, self.peak_tokens_per_s)

    def _bytes(self, batch: float) -> float | None:
        known = [(size, float(read)) for size, _, read in self.points if read]
        if len(known) < 2:
            return known[0][1] if known and batch == known[0][0] else None
        pairs = list(pairwise(known))
        (low, few), (high, many) = next((pair for pair in pairs if batch <= pair[1][0]), pairs[-1])
        return few + (many - few) * (batch - low) / (high - low)


def sweep_curves(report: Report) -> tuple[SweepCurve, ...]:
    """The variants that have a measured batch."""
    curves = (_curve(report, place, variant) for place, variant in enumerate(report.variants))
    return tuple(curve for curve in curves if curve.points)


def _curve(report: Report, place: int, variant: VariantReport) -> SweepCurve:
    rows = variant.speed.of("batch") if variant.speed else ()
    points = sorted(
        (row.batch_size, row.decode_tokens_per_s, row.bytes_read_per_step)
        for row in rows
        if row.outcome == "measured" and row.decode_tokens_per_s
    )
    return SweepCurve(
        name=variant.name,
        place=place,
        points=tuple(points),
        peak_tokens_per_s=_peak(report, variant),
        break_even_batch=variant.speed.measured_break_even_batch if variant.speed else None,
        capacity=variant.capacity.measured_sequences if variant.capacity else None,
    )


def _peak(report: Report, variant: VariantReport) -> float | None:
    """The roof of a measured batch that arithmetic bounds, which is every larger one's, too.

    Without such a batch it is where the planned break-even batch puts it: there reading the weights takes as long as
    computing.
    """
    computed = next((one.predicted for one in variant.planned if one.bound == "compute"), None)
    if computed is not None:
        return computed
    planned = next((one.predicted for one in variant.planned if one.figure == "break-even batch"), None)
    memory = variant.loaded_memory
    if planned is None or report.device is None or memory is None or not memory.weight_bytes_read_per_token:
        return None
    return planned * report.device.read_bandwidth_bytes_per_s / memory.weight_bytes_read_per_token


def sweep_plot(report: Report) -> str | None:
    """None where fewer than two batch sizes were measured."""
    curves = sweep_curves(report)
    sizes = {size for curve in curves for size, _, _ in curve.points}
    if len(sizes) < 2:
        return None
    bandwidth = report.device.read_bandwidth_bytes_per_s if report.device else None
    view = _View(curves=curves, bandwidth=bandwidth)
    rows = legend_rows([*view.names, *view.kinds], width_in=WIDTH_IN)
    return inline_svg(
        "sweep", size_in=(WIDTH_IN, 3.3 + rows * LEGEND_ROW_IN), title=view.title, paint=view.paint
    )


@dataclass(frozen=True)
class _View:
    curves: tuple[SweepCurve, ...]
    bandwidth: float | None

    @property
    def names(self) -> list[str]:
        return [curve.name for curve in self.curves]

    @property
    def kinds(self) -> list[str]:
        return []

    @property
    def title(self) -> str:
        told = (
            f"{curve.name} {', '.join(f'{rate:,.4g} at {size}' for size, rate, _ in curve.points)}"
            for curve in self.curves
        )
        roof = f" under the roof of {self.bandwidth / 1e9:,.1f} GB/s" if self.bandwidth else ""
        return f"Tokens per second of all sequences against batch size{roof}: {'; '.join(told)}"

    @property
    def largest(self) -> float:
        timed = max(size for curve in self.curves for size, _, _ in curve.points)
        held = max((curve.capacity or 0 for curve in self.curves), default=0)
        return max(timed, min(held, FARTHEST * timed))

    def paint(self, figure: Figure) -> dict[str, str]:
        axes = axes_over_legend(figure, self.names, places=[curve.place for curve in self.curves])
        self._scale(axes)
        tips: dict[str, str] = {}
        for curve in self.curves:
            self._draw_roof(axes, curve)
            tips |= self._draw_measured(axes, curve) | self._draw_bounds(axes, curve)
        return tips

    def _scale(self, axes: Axes) -> None:
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

        smallest = min(size for curve in self.curves for size, _, _ in curve.points)
        rates = [rate for curve in self.curves for _, rate, _ in curve.points]
        rates += [rate for curve in self.curves for _, rate in self._roof_points(curve)]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(smallest / 1.25, 1.25 * self.largest)
        axes.set_ylim(min(rates) / 1.6, 1.6 * max(rates))
        axes.set_xlabel("batch size, sequences decoded together")
        axes.set_ylabel("tok/s of all sequences")
        powers = [2**power for power in range(int(self.largest).bit_length()) if 2**power >= smallest]
        axes.xaxis.set_major_locator(FixedLocator(powers or [smallest]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
        plain_ticks(axes.yaxis, axes.get_ylim(), plain)

    def _roof_points(self, curve: SweepCurve) -> list[tuple[float, float]]:
        if self.bandwidth is None:
            return []
        first = curve.points[0][0]
        steps = (first * (self.largest / first) ** (step / 24) for step in range(25))
        found = ((at, curve.roof(at, bandwidth_bytes_per_s=self.bandwidth)) for at in steps)
        return [(at, rate) for at, rate in found if rate is not None and rate > 0]

    def _draw_roof(self, axes: Axes, curve: SweepCurve) -> None:
        points = self._roof_points(curve)
        axes.plot(
            *_across(points),
            color=ink_of(curve.place),
            linewidth=1,
            linestyle=":",
            gid=f"roof-{curve.place}",
            zorder=1,
        )

    def _draw_measured(self, axes: Axes, curve: SweepCurve) -> dict[str, str]:
        ink, tips = ink_of(curve.place), {}
        axes.plot(*_across([(size, rate) for size, rate, _ in curve.points]), color=ink, linewidth=1.3)
        for size, rate, _ in curve.points:
            gid = f"sweep-{curve.place}-{size}"
            mark(axes, (size, rate), variant=curve.place, gid=gid)
            tips[gid] = f"{curve.name}, batch {size}: {rate:,.4g} tok/s"
        return tips

    def _draw_bounds(self, axes: Axes, curve: SweepCurve) -> dict[str, str]:
        """Ticks on the axis's own ends: below the batch from which more gains little, above what memory holds.

        Those of several variants at one place stand beside each other, so that none is hidden.
        """
        from matplotlib.transforms import ScaledTranslation

        figure = axes.get_figure()
        assert figure is not None
        tips = {}
        for at, height, marker, words in self._bounds(curve):
            gid = f"{marker}-{curve.place}"
            beside = ScaledTranslation(
                BESIDE_IN * self._before(curve, at, marker), 0.0, figure.dpi_scale_trans
            )
            axes.plot(
                [at],
                [height],
                transform=axes.get_xaxis_transform() + beside,
                marker=marker,
                markersize=7,
                markerfacecolor=ink_of(curve.place),
                markeredgecolor=INK,
                markeredgewidth=0.5,
                linestyle="none",
                clip_on=False,
                gid=gid,
            )
            tips[gid] = f"{curve.name}: {words}"
        return tips

    def _before(self, curve: SweepCurve, at: float, marker: str) -> int:
        """How many earlier curves have a tick of that kind at that place."""
        earlier = self.curves[: self.curves.index(curve)]
        ticks = [(there, kind) for one in earlier for there, _, kind, _ in self._bounds(one)]
        return ticks.count((at, marker))

    def _bounds(self, curve: SweepCurve) -> Iterator[tuple[float, float, str, str]]:
        if curve.break_even_batch is not None:
            yield curve.break_even_batch, 0.0, "^", f"break-even at batch {curve.break_even_batch:.1f}"
        if curve.capacity is not None and curve.capacity <= 1.2 * self.largest and curve.capacity > 0:
            yield curve.capacity, 1.0, "v", f"memory holds {curve.capacity} sequences"


def _across(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
