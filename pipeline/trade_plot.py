"""Speed against quality with memory as size: what each variant gains and what it gives up.

for svg in trade_plots(report):
    print(svg)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from pipeline.inline_svg import FAINT, inline_svg
from pipeline.plot_marks import (
    BOTTOM_IN,
    LEFT_IN,
    RIGHT_IN,
    TOP_IN,
    Labels,
    colour_of,
    ink_of,
    plain,
    plain_ticks,
    short,
)
from pipeline.quality_change import QualityChange, shared_changes
from pipeline.readings import decode_rate, smallest_batch
from pipeline.report_findings import candidates
from pipeline.results import Report
from pipeline.row_axes import WIDTH_IN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT_IN = 3.5
LINE_IN = 0.17
"""Room of each further line beside the upright axis."""
LARGEST_POINTS = 30.0
"""Diameter of the variant with the most bytes; areas are in proportion."""
_BESIDE = tuple(
    (side * (8 + 7 * step), up)
    for up in (-3, 9, -15, 20, -26, 34, -40, 48, -54)
    for step in (0, 1, 2, 3)
    for side in (1, -1)
)


@dataclass(frozen=True)
class TradePoint:
    """A variant at its decode rate, with its change of quality; `place` is its place in the report."""

    name: str
    place: int
    ships: bool
    engine: str
    tokens_per_s: float
    resident_bytes: int
    change: QualityChange

    @property
    def text(self) -> str:
        """All three figures."""
        spread = ""
        if self.change.low is not None and self.change.high is not None:
            spread = f" ({self.change.low:+,.3g} … {self.change.high:+,.3g})"
        return (
            f"{self.name}: {self.tokens_per_s:,.4g} tok/s by {self.engine}, {self.change.value:+,.3g}{spread} "
            f"{self.change.unit}, {self.resident_bytes / 1e6:,.1f} MB"
        )


def trade_points(report: Report) -> tuple[tuple[TradePoint, ...], ...]:
    """Points by scores, and by perplexity where that is another figure; each with the baseline at no change.

    Variants without one of the three figures aren't among them.
    """
    by_first = _points(report, by_perplexity=False)
    by_perplexity = _points(report, by_perplexity=True)
    groups = {points[0].change.unit: points for points in (by_perplexity, by_first) if points}
    return tuple(reversed(groups.values()))


def _points(report: Report, *, by_perplexity: bool) -> tuple[TradePoint, ...]:
    baseline = report.variant(report.baseline)
    if baseline is None:
        return ()
    changes = shared_changes(candidates(report), baseline=baseline, by_perplexity=by_perplexity)
    if not changes:
        return ()
    unit = next(change.unit for change in changes.values())
    changes[report.baseline] = QualityChange(value=0.0, low=None, high=None, unit=unit)
    found = (_point(report, place, changes.get(one.name)) for place, one in enumerate(report.variants))
    points = tuple(point for point in found if point is not None)
    return points if len(points) > 1 else ()


def _point(report: Report, place: int, change: QualityChange | None) -> TradePoint | None:
    variant = report.variants[place]
    rate, memory = decode_rate(variant, smallest_batch(report.variants)), variant.loaded_memory
    if change is None or not rate or memory is None or memory.weight_bytes_resident <= 0:
        return None
    assert variant.speed is not None, "it has a rate"
    return TradePoint(
        name=variant.name,
        place=place,
        ships=variant.verdict == "ship",
        engine=variant.speed.engine,
        tokens_per_s=rate,
        resident_bytes=memory.weight_bytes_resident,
        change=change,
    )


def trade_svg(report: Report, points: tuple[TradePoint, ...], *, key: str) -> str:
    """The plot of one group of points."""
    batch = smallest_batch(report.variants)
    assert batch is not None, "points have rates"
    view = _View(points=points, batch_size=batch, baseline=report.baseline)
    return inline_svg(key, size_in=(WIDTH_IN, HEIGHT_IN), title=view.title, paint=view.paint)


@dataclass(frozen=True)
class _View:
    points: tuple[TradePoint, ...]
    batch_size: int
    baseline: str

    @property
    def title(self) -> str:
        told = "; ".join(one.text for one in self.points)
        return f"Decode speed at batch {self.batch_size} against change of quality, memory as size: {told}"

    def paint(self, figure: Figure) -> dict[str, str]:
        left_in = LEFT_IN + LINE_IN * self._label.count("\n")
        below_in = BOTTOM_IN + LINE_IN * (len(self._engines) > 1)
        box = (
            left_in / WIDTH_IN,
            below_in / HEIGHT_IN,
            1 - (left_in + RIGHT_IN) / WIDTH_IN,
            1 - (below_in + TOP_IN) / HEIGHT_IN,
        )
        axes = figure.add_axes(box)
        self._scale(axes)
        most = max(one.resident_bytes for one in self.points)
        sizes = [LARGEST_POINTS * math.sqrt(one.resident_bytes / most) for one in self.points]
        for one, size in sorted(zip(self.points, sizes, strict=True), key=lambda pair: -pair[1]):
            self._draw(axes, one, size_points=size)
        self._name(axes, sizes)
        return {f"trade-{one.place}": one.text for one in self.points}

    def _scale(self, axes: Axes) -> None:
        rates = [one.tokens_per_s for one in self.points]
        values = [
            value
            for one in self.points
            for value in (one.change.value, one.change.low, one.change.high)
            if value is not None
        ]
        axes.set_xscale("log")
        axes.set_xlim(min(rates) / 1.7, 1.7 * max(rates))
        room = 0.18 * (max(values) - min(values) or 1)
        axes.set_ylim(min(values) - room, max(values) + room)
        beside = f"\n(engines differ: {', '.join(self._engines)})" if len(self._engines) > 1 else ""
        axes.set_xlabel(f"decode at batch {self.batch_size}, tok/s →{beside}")
        axes.set_ylabel(self._label)
        plain_ticks(axes.xaxis, axes.get_xlim(), plain)
        axes.axhline(0, color=FAINT, linewidth=0.9, gid="no-change", zorder=1)

    @property
    def _engines(self) -> list[str]:
        return list(dict.fromkeys(one.engine for one in self.points))

    @property
    def _label(self) -> str:
        return f"{fill(self.points[0].change.unit, 30)} →"

    def _draw(self, axes: Axes, one: TradePoint, *, size_points: float) -> None:
        rate, change = one.tokens_per_s, one.change
        if change.low is not None and change.high is not None:
            axes.plot(
                [rate, rate], [change.low, change.high], color=ink_of(one.place), linewidth=1.2, zorder=2
            )
        axes.plot(
            [rate],
            [change.value],
            marker="o",
            markersize=size_points,
            markerfacecolor=colour_of(one.place) if one.ships else "white",
            markeredgecolor=ink_of(one.place),
            markeredgewidth=1.8,
            alpha=0.9,
            linestyle="none",
            gid=f"trade-{one.place}",
            zorder=3,
        )

    def _name(self, axes: Axes, sizes: list[float]) -> None:
        """Names beside the discs, the baseline's first; those that find no room are in hover texts and tables."""
        labels = Labels(axes, places=_BESIDE)
        labels.keep_line_clear(0)
        radii = {one.name: size / 2 for one, size in zip(self.points, sizes, strict=True)}
        for one in self.points:
            labels.keep_clear(one.tokens_per_s, one.change.value, radius_points=radii[one.name] + 1)
        for one in sorted(self.points, key=lambda point: point.name != self.baseline):
            megabytes = f" {one.resident_bytes / 1e6:,.0f} MB"
            for text in (f"{short(one.name)}{megabytes}", short(one.name)):
                if labels.place(
                    one.tokens_per_s,
                    one.change.value,
                    text,
                    colour=ink_of(one.place),
                    radius_points=radii[one.name],
                ):
                    break
