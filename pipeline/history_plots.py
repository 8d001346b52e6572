"""A variant's main figures over the runs, one panel each under the other, as SVG.

svg = trend_plot(history, "int8", place=1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.inline_svg import FONT_POINTS, INK, inline_svg, printable
from pipeline.plot_marks import colour_of, ink_of, marker_of, plain
from pipeline.run_history import Point, RunHistory, Series, value_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, PANEL_IN, EDGE_IN = 6.0, 1.25, 0.75
LONGEST_TITLE = 60
MOST_LABELS = 12
"""Runs whose dates find room below the plot."""
_SCALES = {"bytes": (1e6, "MB"), "s": (1e-3, "ms")}
"""What a unit is divided by, and called then, so that ticks stay short."""


def trend_plot(history: RunHistory, variant: str, *, place: int) -> str | None:
    """The panels of one variant; None without a figure. `place` is the variant's, for its colour and marker.

    Bars are quartiles or 95 % intervals; a filled point is apart from the run before it by more than noise, a hollow
    one isn't, or can't be told.
    """
    shown = [series for series in history.series if series.variant == variant]
    if not shown:
        return None

    def paint(figure: Figure) -> dict[str, str]:
        tips: dict[str, str] = {}
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
        for row, series in enumerate(shown):
            tips |= _panel(panels[row][0], series, history=history, place=place, row=row)
        _dates(panels[-1][0], history)
        height = figure.get_size_inches()[1]
        figure.subplots_adjust(
            left=0.14, right=0.97, top=1 - 0.25 / height, bottom=EDGE_IN / height, hspace=0.55
        )
        return tips

    names = ", ".join(series.metric for series in shown)
    return inline_svg(
        f"trend-{place}",
        size_in=(WIDTH_IN, EDGE_IN + PANEL_IN * len(shown)),
        title=f"{variant} over {len(history.runs)} runs: {names}",
        paint=paint,
    )


def _panel(axes: Axes, series: Series, *, history: RunHistory, place: int, row: int) -> dict[str, str]:
    factor, unit = _SCALES.get(series.unit, (1.0, series.unit))
    title = f"{printable(series.metric)[:LONGEST_TITLE]}{f', {unit}' if unit else ''}"
    axes.set_title(title, loc="left", fontsize=FONT_POINTS, color=INK)
    measured = [point for point in series.points if point.value is not None]
    heights = [(point.value or 0) / factor for point in measured]
    axes.plot([point.run + 1 for point in measured], heights, color=ink_of(place), linewidth=1.0)
    tips = {}
    for point, height in zip(measured, heights, strict=True):
        gid = f"point-{row}-{point.run}"
        _draw(axes, point, height, factor=factor, place=place, gid=gid)
        tips[gid] = _tip(point, series, history)
    axes.margins(x=0.04, y=0.25)
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(round(value, 9))))
    return tips


def _draw(axes: Axes, point: Point, height: float, *, factor: float, place: int, gid: str) -> None:
    at = point.run + 1
    if point.low is not None and point.high is not None:
        axes.plot(
            [at, at], [point.low / factor, point.high / factor], color=ink_of(place), linewidth=2.2, alpha=0.6
        )
    axes.plot(
        [at],
        [height],
        marker=marker_of(place),
        markersize=6.5,
        linestyle="none",
        markerfacecolor=colour_of(place) if point.moved else "white",
        markeredgecolor=ink_of(place),
        gid=gid,
        zorder=3,
    )


def _tip(point: Point, series: Series, history: RunHistory) -> str:
    run = history.runs[point.run]
    moved = ", apart from the run before" if point.moved else ""
    return f"{run.name}: {value_cell(point.value)} {series.unit}{moved}"


def _dates(axes: Axes, history: RunHistory) -> None:
    """A run's place and day below the last panel; of many runs every second, third …"""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    count = len(history.runs)
    every = -(-count // MOST_LABELS)
    axes.set_xlim(0.5, count + 0.5)
    axes.xaxis.set_major_locator(FixedLocator(list(range(1, count + 1, every))))
    days: Sequence[str] = [run.started_at[5:10] for run in history.runs]
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda at, _: f"{at:.0f}\n{days[int(at) - 1]}" if 1 <= at <= count else "")
    )
