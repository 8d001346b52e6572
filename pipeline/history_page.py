"""Runs over time as one HTML file: the runs, a trend of each variant, what changed and what moved at each step.

The file fetches nothing and runs nothing; the same history gives the same bytes.

    path.write_text(history_page(history), encoding="utf-8")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.history_plots import trend_plot
from pipeline.html_page import html_page
from pipeline.plan_tables import Table
from pipeline.report_blocks import rows_table
from pipeline.run_history import RunHistory, Step, rest, value_cell
from pipeline.text_table import figure_cell

if TYPE_CHECKING:
    from markupsafe import Markup

CAPTION = (
    "Bars are the quartiles of repeats, or a score's 95 % interval. A filled point is apart from the run before it by "
    "more than its noise; a hollow one isn't, or was measured once. The figures stand in the table below."
)


@dataclass(frozen=True)
class _Plot:
    heading: str
    svg: Markup
    caption: str = ""


@dataclass(frozen=True)
class _Step:
    title: str
    changes: Table | None
    moves: Table | None
    rest: tuple[str, ...]


def history_page(history: RunHistory) -> str:
    """The whole page. Every text of the runs is escaped, in tables, captions and plots."""
    return html_page(
        "history.html.j2",
        title=f"{history.model}: {len(history.runs)} runs",
        runs=_runs(history),
        plots=_plots(history),
        caption=CAPTION,
        series=_series(history),
        steps=[_step(step) for step in reversed(history.steps)],
        left_out=history.left_out,
    )


def _runs(history: RunHistory) -> Table:
    header = ("", "run", "started", "verdict", "recipe", "machine", "commit")
    rows = [
        (
            *(str(place + 1), run.name, run.started_at, run.verdict, run.recipe_digest[:8], run.machine),
            (run.commit or "–")[:8],
        )
        for place, run in enumerate(history.runs)
    ]
    return rows_table("Runs, in the order of their starts", header, rows, text_columns=header)


def _plots(history: RunHistory) -> list[_Plot]:
    """The only text that isn't escaped is an `<svg>` whose texts an XML writer has escaped."""
    from markupsafe import Markup

    variants = dict.fromkeys(series.variant for series in history.series)
    drawn = ((name, trend_plot(history, name, place=place)) for place, name in enumerate(variants))
    return [_Plot(name, Markup(svg)) for name, svg in drawn if svg is not None]


def _series(history: RunHistory) -> Table:
    header = ("variant", "metric", "unit", *(str(place + 1) for place in range(len(history.runs))))
    rows = [
        (
            *(series.variant, series.name, series.unit),
            *(value_cell(point.value) + ("*" if point.moved else "") for point in series.points),
        )
        for series in history.series
    ]
    title = "Main figures by run; * is apart from the run before by more than noise"
    return rows_table(title, header, rows, text_columns=("metric", "unit"))


def _step(step: Step) -> _Step:
    changes = [(one.what, one.before or "–", one.after or "–") for one in (*step.changes, *step.verdicts)]
    moves = [
        (
            *(move.variant, f"{move.section}.{move.metric}"),
            *(value_cell(move.before), value_cell(move.after), move.unit),
            *(figure_cell(move.change_percent, "+.1f"), move.because),
        )
        for move in step.moves
        if move.outcome == "moved"
    ]
    header = ("variant", "metric", "before", "after", "unit", "change %", "how it is known")
    return _Step(
        title=f"{step.before + 1} → {step.after + 1}",
        changes=rows_table(
            "What changed", ("what", "before", "after"), changes, text_columns=("before", "after")
        )
        if changes
        else None,
        moves=rows_table("What moved", header, moves, text_columns=("metric", "unit", header[-1]))
        if moves
        else None,
        rest=tuple(rest(step.moves)),
    )
