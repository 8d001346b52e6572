"""The pick and the Pareto front for the terminal and for Markdown.

print("\\n".join(pick_text(report)))
"""

from __future__ import annotations

from pipeline.pick_results import Pick
from pipeline.results import Report
from pipeline.text_table import figure_cell, markdown_table


def pick_text(report: Report) -> tuple[str, ...]:
    """A line for the pick and one for the front; nothing where no candidate ships or an old report has no pick."""
    pick = report.pick
    if pick is None or not pick.trades:
        return ()
    return (
        _picked(pick),
        f"Pareto front of speed, memory and quality among those that ship: {', '.join(pick.front)}",
    )


def pick_markdown(report: Report) -> str:
    """The same as a section with each trade's figures; "" where there is nothing to choose from."""
    pick = report.pick
    if pick is None or not pick.trades:
        return ""
    rows = [
        (
            trade.variant,
            figure_cell(trade.decode_tokens_per_s, ".1f"),
            figure_cell(None if trade.resident_bytes is None else trade.resident_bytes / 1e6, ".1f"),
            figure_cell(trade.quality, "+.3g"),
            "on the front" if trade.beaten_by is None else f"beaten by {trade.beaten_by}",
        )
        for trade in pick.trades
    ]
    header = (
        "variant",
        "decode tok/s",
        "weights MB",
        f"quality, {pick.quality_unit or 'not measured'}",
        "front",
    )
    return f"## Pick\n\n{_picked(pick)}\n\n{markdown_table(header, rows, text_columns=('front',))}"


def _picked(pick: Pick) -> str:
    if pick.variant is None:
        return f"pick: none, {pick.because}"
    preferred = f"{pick.prefer.replace('_', ' ')}: " if pick.prefer else ""
    return f"pick: {pick.variant}, {preferred}{pick.because}"
