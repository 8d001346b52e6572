"""Colours, markers, legends, ticks and labels that plots of plans and of reports share.

>>> colour_of(0), marker_of(0)
('#0072B2', 'o')
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipeline.inline_svg import FONT_POINTS, INK, POINTS_PER_INCH, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

CHARACTER_POINTS = 0.6 * FONT_POINTS
"""Mean width of a character; DejaVu Sans, which figures are laid out with, is wider than what browsers use."""
LABEL_POINTS = 8.0
LONGEST_LABEL = 26

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette for all kinds of colour vision, without the yellow that white paper swallows.

https://jfly.uni-koeln.de/color/
"""
INKS = ("#00598c", "#a34700", "#00704f", "#97396c", "#875c00", "#1a6a99", "#000000")
"""The same, as dark as text on white has to be (4.5 : 1): for what is written, for lines and edges."""
MARKERS = ("o", "s", "^", "D", "v", "P", "*", "<", ">", "p", "h", "d")
STROKE, CROSS = "|", "X"
KINDS = {"prefill": STROKE, "measured": CROSS}
"""Markers of kinds of points; those that aren't named are hollow circles."""
LEGEND_ROW_IN = 0.22
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN = 0.75, 0.3, 0.15, 0.55


def short(text: str) -> str:
    """A name as a figure has room for it."""
    return both_ends(printable(text), LONGEST_LABEL)


def both_ends(text: str, most: int) -> str:
    """At most so many characters; names of one family differ at their ends, so that both are kept.

    >>> both_ends("int4-awq-group-128-symmetric, batch 64", 24)
    'int4-awq-gr…ic, batch 64'
    """
    if len(text) <= most:
        return text
    tail = (most - 1) // 2 + 1 if most > 1 else 0
    return f"{text[: most - 1 - tail]}…{text[-tail:] if tail else ''}"


def colour_of(index: int) -> str:
    """The colour of the variant at that place; after seven they start again, with other markers."""
    return COLOURS[index % len(COLOURS)]


def ink_of(index: int) -> str:
    """The colour of what is written of that variant, and of its lines."""
    return INKS[index % len(INKS)]


def marker_of(index: int) -> str:
    """The marker of the variant at that place; with the colour, 84 are told apart."""
    return MARKERS[index % len(MARKERS)]


BESIDE_SLOPE = ((6, -12), (-6, 5), (10, -22), (-10, 15))
"""Places for the text of a point on a rising line, in points right of and above it: off the line first."""
BESIDE_END = tuple((10 + step, -3 + up) for up in (0, 11, -11, 22, -22, 33, -33) for step in (0, 9))
"""Places for the text of a line's last point."""


class Labels:
    """Small texts beside points of one plot, none over another; a text that finds no room is left out.

    Limits and margins of the axes must be final before the first is placed.
    """

    HEIGHT_POINTS = 10.0

    def __init__(self, axes: Axes, *, places: Sequence[tuple[int, int]]) -> None:
        self._axes = axes
        self._places = places
        self._taken: list[tuple[float, float, float, float]] = []

    def keep_clear(self, x: float, y: float, *, radius_points: float = 4, left_points: float = 0) -> None:
        """No text comes over the point at x, y, nor over what reaches `left_points` left of it."""
        across, up = self._axes.transData.transform((x, y))
        left = across - radius_points - left_points
        self._taken.append((left, up - radius_points, across + radius_points, up + radius_points))

    def keep_line_clear(self, y: float) -> None:
        """No text comes over the horizontal line at y."""
        _, up = self._axes.transData.transform((1, y))
        self._taken.append((self._axes.bbox.x0, up - 1, self._axes.bbox.x1, up + 1))

    def place(self, x: float, y: float, text: str, *, colour: str, radius_points: float = 0) -> bool:
        """Write `text` beside the point, joined to its mark of that radius by a line; False where there is no room."""
        width = label_width_points(text)
        across, up = self._axes.transData.transform((x, y))
        for right, above in self._places:
            left = across + right - (width if right < 0 else 0)
            box = (left, up + above - 2, left + width, up + above + self.HEIGHT_POINTS - 2)
            if self._is_free(box):
                self._taken.append(box)
                self._write((x, y), text, offset=(right, above), colour=colour, radius_points=radius_points)
                return True
        return False

    def _write(
        self,
        at: tuple[float, float],
        text: str,
        *,
        offset: tuple[int, int],
        colour: str,
        radius_points: float,
    ) -> None:
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": radius_points}
        self._axes.annotate(
            text,
            at,
            xytext=offset,
            textcoords="offset points",
            ha="right" if offset[0] < 0 else "left",
            color=colour,
            fontsize=LABEL_POINTS,
            arrowprops=line if radius_points else None,
        )

    def _is_free(self, box: tuple[float, float, float, float]) -> bool:
        inside = self._axes.bbox
        if box[0] < inside.x0 or box[2] > inside.x1 or box[1] < inside.y0 or box[3] > inside.y1:
            return False
        return not any(
            box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
            for other in self._taken
        )


def label_width_points(text: str) -> float:
    """Room that `text` takes beside a point."""
    return LABEL_POINTS / FONT_POINTS * CHARACTER_POINTS * len(text)


def mark(
    axes: Axes, at: tuple[float, float], *, variant: int, gid: str, marker: str = "", hollow: bool = False
) -> None:
    """A point of a variant, hollow where it is out of reach; `marker` is that of a kind, else the variant's."""
    stroke = marker == STROKE
    axes.plot(
        [at[0]],
        [at[1]],
        marker=marker or marker_of(variant),
        markersize=12 if stroke else 7,
        markerfacecolor="white" if hollow else colour_of(variant),
        markeredgecolor=ink_of(variant),
        markeredgewidth=2.5 if stroke else 1.5 if hollow else 0.7,
        linestyle="none",
        gid=gid,
        zorder=3,
    )


def legend_rows(names: Sequence[str], *, width_in: float) -> int:
    """Rows that a legend of these names takes below a plot of that width."""
    return -(-len(names) // _legend_columns(names, width_in=width_in))


def _legend_columns(names: Sequence[str], *, width_in: float) -> int:
    column = max(len(short(name)) for name in names) * CHARACTER_POINTS + 30
    return max(1, min(len(names), int((width_in - 0.2) * POINTS_PER_INCH // column)))


def axes_over_legend(
    figure: Figure, variants: Sequence[str], *, kinds: Sequence[str] = (), places: Sequence[int] | None = None
) -> Axes:
    """Axes above a legend of the variants, by colour and marker, and of `kinds` of points.

    `places` are the variants' places where not all of them are drawn, so that each keeps its colour.
    """
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches()
    names = [*variants, *kinds]
    below = BOTTOM_IN + legend_rows(names, width_in=width) * LEGEND_ROW_IN
    handles = [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=marker_of(index),
            markerfacecolor=colour_of(index),
            markeredgecolor=ink_of(index),
            markeredgewidth=0.7,
            label=short(name),
        )
        for index, name in zip(places or range(len(variants)), variants, strict=True)
    ]
    handles += [_kind_handle(kind) for kind in kinds]
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=_legend_columns(names, width_in=width),
        columnspacing=1.2,
        handletextpad=0.3,
    )
    box = (LEFT_IN / width, below / height, 1 - (LEFT_IN + RIGHT_IN) / width, 1 - (below + TOP_IN) / height)
    return figure.add_axes(box)


def _kind_handle(kind: str) -> Line2D:
    from matplotlib.lines import Line2D

    hollow = kind not in KINDS
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=KINDS.get(kind, "o"),
        color=INK,
        markerfacecolor="white" if hollow else INK,
        markeredgewidth=1.5 if hollow else 2,
        label=kind,
    )


def plain_ticks(axis: Axis, limits: tuple[float, float], form: Callable[[float], str]) -> None:
    """Ticks of a logarithmic axis at powers of ten, and at 2 and 5 of each where few are in sight.

    Within a factor of five, where less than three of those may be, ticks are evenly apart.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    span = limits[1] / limits[0]
    subs = (1, 2, 5) if span < 500 else (1,)
    spread = LogLocator(base=10, subs=subs, numticks=20) if span > 5 else MaxNLocator(6, steps=[1, 2, 5, 10])
    axis.set_major_locator(spread)
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axis.set_minor_locator(NullLocator())


def plain(value: float) -> str:
    """A tick's figure without exponent."""
    return f"{value:,.12g}"
