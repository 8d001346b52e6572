"""How long a reader waits: TTFT and the gaps between tokens by percentile, for each variant and batch.

for plot in latency_plots(report):
    print(plot.heading, plot.svg())
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.inline_svg import FAINT, INK, inline_svg
from pipeline.plot_marks import LEGEND_ROW_IN, plain, plain_ticks
from pipeline.results import Report, VariantReport
from pipeline.row_axes import mark_height, row_axes, rows_size_in
from pipeline.simulation import Percentiles
from pipeline.speed_results import SpeedRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY_ROWS = 12
"""With more, a plot shows the smallest and the largest batch of each variant; the table shows all."""
_LOOKS = (("|", INK), ("o", INK), ("s", "white"))
"""Marker and filling of the three figures; colours stand for variants in the other plots."""


@dataclass(frozen=True)
class Wait:
    """Three figures of one variant at one load, in seconds, the shortest first; `size` is the batch or the clients."""

    variant: str
    load: str
    size: int
    figures_s: tuple[float, float, float]

    @property
    def name(self) -> str:
        """Variant and load."""
        return f"{self.variant}, {self.load}"


@dataclass(frozen=True)
class LatencyPlot:
    """Waits of one kind; `figures` names the three."""

    key: str
    heading: str
    figures: tuple[str, str, str]
    waits: tuple[Wait, ...]

    @property
    def shown(self) -> tuple[Wait, ...]:
        """All waits, or those at the smallest and largest size of each variant."""
        if len(self.waits) <= MANY_ROWS:
            return self.waits
        sizes: dict[str, list[int]] = {}
        for wait in self.waits:
            sizes.setdefault(wait.variant, []).append(wait.size)
        return tuple(
            one for one in self.waits if one.size in (min(sizes[one.variant]), max(sizes[one.variant]))
        )

    def svg(self) -> str:
        """The plot."""
        return inline_svg(
            self.key,
            size_in=rows_size_in(len(self.shown), below_in=LEGEND_ROW_IN),
            title=f"{self.heading}, {' / '.join(self.figures)} in ms: "
            + "; ".join(f"{wait.name}: {figures_text(wait)}" for wait in self.shown),
            paint=self._paint,
        )

    def _paint(self, figure: Figure) -> dict[str, str]:
        from matplotlib.lines import Line2D

        rows = [(wait.name, f"{figures_text(wait)} ms") for wait in self.shown]
        axes = row_axes(figure, rows, label=f"{self.heading}, ms", below_in=LEGEND_ROW_IN)
        values = [1e3 * value for wait in self.shown for value in wait.figures_s]
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 1.3, 1.3 * max(values))
        plain_ticks(axes.xaxis, axes.get_xlim(), plain)
        tips = {}
        for place, wait in enumerate(self.shown):
            gid = f"wait-{place}"
            self._draw(axes, place, wait, gid=gid)
            tips[gid] = f"{wait.name}: {' / '.join(self.figures)} {figures_text(wait)} ms"
        handles = [
            Line2D([], [], linestyle="none", **_look(place), label=name)
            for place, name in enumerate(self.figures)
        ]
        figure.legend(handles=handles, loc="lower center", ncols=3, columnspacing=1.2, handletextpad=0.3)
        return tips

    def _draw(self, axes: Axes, row: int, wait: Wait, *, gid: str) -> None:
        at = mark_height(row)
        ends = [1e3 * wait.figures_s[0], 1e3 * wait.figures_s[2]]
        axes.plot(ends, [at, at], color=FAINT, linewidth=1.2, gid=gid, zorder=2)
        for place, value in reversed(list(enumerate(wait.figures_s))):
            axes.plot([1e3 * value], [at], linestyle="none", zorder=3, **_look(place))


def _look(place: int) -> dict[str, Any]:
    marker, filling = _LOOKS[place]
    return {"marker": marker, "markersize": 6, "markerfacecolor": filling, "markeredgecolor": INK}


def figures_text(wait: Wait) -> str:
    """The three in milliseconds."""
    return " / ".join(f"{1e3 * value:,.4g}" for value in wait.figures_s)


def latency_plots(report: Report) -> tuple[LatencyPlot, ...]:
    """TTFT and ITL of static batches, then of continuously batched requests; those without a figure are left out."""
    percentiles, quartiles = ("p50", "p90", "p99"), ("lower quartile", "median", "upper quartile")
    plots = (
        LatencyPlot("ttft", "TTFT of static batches", quartiles, _of_batches(report, "ttft")),
        LatencyPlot("itl", "ITL of static batches", percentiles, _of_batches(report, "itl")),
        LatencyPlot("served-ttft", "TTFT, continuous batching", percentiles, _of_served(report, "ttft_s")),
        LatencyPlot("served-itl", "ITL, continuous batching", percentiles, _of_served(report, "itl_s")),
    )
    return tuple(plot for plot in plots if plot.waits)


def _drawable(wait: Wait) -> bool:
    """On a logarithmic axis; a wait of no time at all isn't a measurement."""
    return all(math.isfinite(value) and value > 0 for value in wait.figures_s)


def _of_batches(report: Report, kind: str) -> tuple[Wait, ...]:
    waits = []
    for variant in report.variants:
        for row in variant.speed.of("batch") if variant.speed else ():
            figures = _figures_of(row, kind)
            if row.outcome == "measured" and figures:
                waits.append(Wait(variant.name, f"batch {row.batch_size}", row.batch_size, figures))
    return tuple(filter(_drawable, waits))


def _figures_of(row: SpeedRow, kind: str) -> tuple[float, float, float] | None:
    if kind == "ttft":
        found = row.ttft_s
        return (found.lower_quartile, found.median, found.upper_quartile) if found else None
    p50, p90, p99 = row.itl_p50_s, row.itl_p90_s, row.itl_p99_s
    return None if p50 is None or p90 is None or p99 is None else (p50, p90, p99)


def _of_served(report: Report, field: str) -> tuple[Wait, ...]:
    return tuple(wait for variant in report.variants for wait in _served(variant, field) if _drawable(wait))


def _served(variant: VariantReport, field: str) -> list[Wait]:
    waits = []
    for row in variant.serving.rows if variant.serving else ():
        found: Percentiles | None = getattr(row, field)
        if row.mode == "continuous" and row.outcome == "measured" and found:
            load = "open loop" if row.load == "open" else f"{row.concurrency} at once"
            waits.append(Wait(variant.name, load, row.concurrency, (found.p50, found.p90, found.p99)))
    return waits
