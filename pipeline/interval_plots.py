"""What quality changed, with its interval and the limit: a forest plot for each rule of the gate.

for plot in margin_plots(report):
    print(plot.rule, plot.svg())
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.inline_svg import FAINT, INK, inline_svg
from pipeline.plot_marks import COLOURS, INKS, LABEL_POINTS
from pipeline.report_findings import (
    MARKS,
    Side,
    concern,
    figure_name,
    figure_text,
    interval_text,
    limit_text,
    side_of,
)
from pipeline.results import Finding, FindingOutcome, Report
from pipeline.row_axes import mark_height, row_axes, rows_size_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ABOVE_IN = 0.3
_MARKERS: dict[FindingOutcome, str] = {"pass": "o", "fail": "X", "inconclusive": "d", "missing": ""}
_PLACE: dict[FindingOutcome, int] = {"pass": 2, "fail": 1, "inconclusive": 4, "missing": 6}
"""Places in the palette: green, red, yellow, black."""
_FORBIDDEN = "#f1e4de"


@dataclass(frozen=True)
class MarginPlot:
    """Findings of one rule against one limit, each with its variant's name."""

    key: str
    rule: str
    rows: tuple[tuple[str, Finding], ...]

    @property
    def first(self) -> Finding:
        """Any of them: rule, limit and unit are the same for all."""
        return self.rows[0][1]

    @property
    def limit(self) -> float:
        """What may be reached at most, or must be at least."""
        assert self.first.limit is not None
        return self.first.limit

    @property
    def side(self) -> Side:
        """On which side of the limit a figure is allowed."""
        return side_of(self.first)

    @property
    def heading(self) -> str:
        """Rule and limit in words."""
        return f"{self._figure}: {limit_text(self.first)}"

    def svg(self) -> str:
        """The plot."""
        return inline_svg(
            self.key,
            size_in=rows_size_in(len(self.rows), above_in=ABOVE_IN),
            title=f"{self.heading}. " + "; ".join(self._told(name, one) for name, one in self.rows),
            paint=self._paint,
        )

    def _told(self, name: str, finding: Finding) -> str:
        what = f"{name} {finding.subject}".rstrip()
        interval = f" in {interval_text(finding)}" if finding.interval else ""
        return f"{what} {figure_text(finding.observed, finding.unit)}{interval}, {finding.outcome}"

    def _paint(self, figure: Figure) -> dict[str, str]:
        rows = [
            (f"{name} {one.subject}".rstrip(), f"{MARKS[one.outcome]} {figure_text(one.observed, one.unit)}")
            for name, one in self.rows
        ]
        axes = row_axes(figure, rows, label=self._label, above_in=ABOVE_IN)
        axes.set_xlim(*self._limits())
        self._draw_limit(axes)
        tips: dict[str, str] = {}
        for place, (name, finding) in enumerate(self.rows):
            if finding.observed is None:
                continue
            gid = f"finding-{place}"
            self._draw_finding(axes, place, finding, gid=gid)
            tips[gid] = self._told(name, finding)
        return tips

    @property
    def _label(self) -> str:
        unit = figure_text(0, self.first.unit).removeprefix("0").strip()
        return f"{self._figure}{f', {unit}' if unit else ''}"

    @property
    def _figure(self) -> str:
        return figure_name(self.first.model_copy(update={"subject": ""}))

    def _limits(self) -> tuple[float, float]:
        values = [self.limit, *(one.observed for _, one in self.rows if one.observed is not None)]
        values += [bound for _, one in self.rows for bound in one.interval or ()]
        if self.side != "at least":
            values.append(0.0)
        if self.side == "within ±":
            values.append(-self.limit)
        values = [value for value in values if math.isfinite(value)]
        low, high = min(values), max(values)
        room = 0.06 * (high - low or abs(high) or 1)
        return low - room, high + room

    def _draw_limit(self, axes: Axes) -> None:
        low, high = axes.get_xlim()
        at_least, both = self.side == "at least", self.side == "within ±"
        forbidden = [(low, self.limit) if at_least else (self.limit, high)]
        forbidden += [(low, -self.limit)] if both else []
        for start, end in forbidden:
            axes.axvspan(start, end, color=_FORBIDDEN, linewidth=0, zorder=0)
        axes.axvline(self.limit, color=INK, linewidth=1.2, linestyle="--", gid="limit")
        if both:
            axes.axvline(-self.limit, color=INK, linewidth=1.2, linestyle="--", gid="lower-limit")
        if low < 0 < high and not at_least:
            axes.axvline(0, color=FAINT, linewidth=0.9, gid="no-change")
        at_left = (self.limit - low) / (high - low) > 0.5
        axes.annotate(
            f"limit {'±' if both else ''}{figure_text(self.limit, self.first.unit)}",
            (self.limit, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if at_left else 3, 4),
            textcoords="offset points",
            ha="right" if at_left else "left",
            fontsize=LABEL_POINTS,
        )

    def _draw_finding(self, axes: Axes, place: int, finding: Finding, *, gid: str) -> None:
        assert finding.observed is not None
        at, ink = mark_height(place), INKS[_PLACE[finding.outcome]]
        if finding.interval:
            low, high = axes.get_xlim()
            ends = [min(max(bound, low), high) for bound in finding.interval]
            axes.plot(ends, [at, at], color=ink, linewidth=2, solid_capstyle="butt")
            axes.plot(ends, [at, at], color=ink, linestyle="none", marker="|", markersize=8)
        axes.plot(
            [finding.observed],
            [at],
            marker=_MARKERS[finding.outcome],
            markersize=7,
            markerfacecolor="white"
            if finding.outcome == "inconclusive"
            else COLOURS[_PLACE[finding.outcome]],
            markeredgecolor=ink,
            linestyle="none",
            gid=gid,
            zorder=3,
        )


def margin_plots(report: Report) -> tuple[MarginPlot, ...]:
    """A plot for each quality rule and limit, where anything was observed."""
    groups: dict[tuple[str, float, str], list[tuple[str, Finding]]] = {}
    for variant in report.variants:
        for finding in variant.findings:
            limit = finding.limit
            if limit is not None and math.isfinite(limit) and concern(finding) == "quality":
                groups.setdefault((finding.rule, limit, finding.unit), []).append((variant.name, finding))
    seen = {key: rows for key, rows in groups.items() if any(one.observed is not None for _, one in rows)}
    return tuple(
        MarginPlot(key=f"margin-{place}", rule=rule, rows=tuple(rows))
        for place, ((rule, _, _), rows) in enumerate(seen.items())
    )
