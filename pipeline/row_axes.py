"""Axes for plots of named rows, one below the other, each name above what is drawn of it: they stay narrow.

axes = row_axes(figure, ["int8 piqa", "int8 copa"], label="drop, points", below_in=0.3)
axes.plot([1.0], [mark_height(0)], marker="o")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.inline_svg import POINTS_PER_INCH, printable
from pipeline.plot_marks import CHARACTER_POINTS, LABEL_POINTS, both_ends, label_width_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 4.4
"""Narrow enough that a phone shows the letters at nearly their size, wide enough for two on a desk."""
ROW_IN = 0.42
SIDE_IN, TOP_IN, BOTTOM_IN = 0.2, 0.12, 0.55
_NAME_AT, _MARK_AT = -0.22, 0.2
_ROOM_POINTS = (WIDTH_IN - 2 * SIDE_IN) * POINTS_PER_INCH


def rows_size_in(rows: int, *, below_in: float = 0.0, above_in: float = 0.0) -> tuple[float, float]:
    """Width and height of a figure of so many rows, with room for a legend below and texts above."""
    return WIDTH_IN, TOP_IN + above_in + rows * ROW_IN + BOTTOM_IN + below_in


def mark_height(row: int) -> float:
    """Where on the y axis a row's marks stand, below its name."""
    return row + _MARK_AT


def row_axes(
    figure: Figure,
    rows: Sequence[tuple[str, str]],
    *,
    label: str,
    below_in: float = 0.0,
    above_in: float = 0.0,
) -> Axes:
    """Axes with a row for each (name, figure): the name at the left, the figure at the right of the same line."""
    height = figure.get_figheight()
    low, high = BOTTOM_IN + below_in, TOP_IN + above_in
    box = (SIDE_IN / WIDTH_IN, low / height, 1 - 2 * SIDE_IN / WIDTH_IN, 1 - (low + high) / height)
    axes = figure.add_axes(box)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(label)
    for place, (name, figure_text) in enumerate(rows):
        axes.axhspan(
            place - 0.48, place - 0.02, color="white", linewidth=0, zorder=4
        )  # no line crosses the texts
        room = _ROOM_POINTS - label_width_points(figure_text) - 10
        for text, at, side in ((_cut(name, room), 0, "left"), (figure_text, 1, "right")):
            axes.annotate(
                text,
                (at, place + _NAME_AT),
                xycoords=("axes fraction", "data"),
                ha=side,
                va="center",
                fontsize=LABEL_POINTS,
                zorder=5,
            )
        if place:
            axes.axhline(place - 0.5, color="#eeeeee", linewidth=0.8, zorder=0)
    return axes


def _cut(name: str, room_points: float) -> str:
    name = printable(name)
    most = max(4, int(room_points // (CHARACTER_POINTS * LABEL_POINTS / 9)))
    return both_ends(name, most)
