"""Groups' pooled scores and what the documents could decide at the observed flip rates: tables for the report.

print(groups_markdown(report), power_markdown(report))
"""

from __future__ import annotations

from pipeline.results import Report
from pipeline.scores import group_scores
from pipeline.text_table import markdown_table

_GROUPS = (
    "variant",
    "group",
    "metric",
    "tasks",
    "documents",
    "by documents",
    "± stderr",
    "plain mean of tasks",
)
_POWER = (
    *("variant", "task", "limit, points", "flips %", "documents", "decide at least, points"),
    *("limit needs, documents", "enough"),
)


def groups_markdown(report: Report) -> str:
    """Each group's score with every document counting the same, and the plain mean beside it; "" without groups."""
    rows = [
        (
            variant.name,
            name,
            metric,
            str(len(variant.quality.groups[name])),
            str(score.documents),
            f"{score.weighted:.4f}",
            "–" if score.weighted_stderr is None else f"{score.weighted_stderr:.4f}",
            f"{score.plain:.4f}",
        )
        for variant in report.variants
        if variant.quality
        for name, (metric, score) in group_scores(variant.quality).items()
    ]
    return f"### Groups\n\n{markdown_table(_GROUPS, rows, text_columns=('group', 'metric'))}" if rows else ""


def power_markdown(report: Report) -> str:
    """What each judged task's documents could decide, at 80 % power when nothing is lost; "" without such a rule."""
    rows = [
        (
            variant.name,
            finding.subject,
            "–" if finding.limit is None else f"{finding.limit:g}",
            f"{100 * power.flip_rate:.2f}",
            "–" if power.documents is None else str(power.documents),
            "–" if power.detectable_points is None else f"{power.detectable_points:.2f}",
            f"{power.documents_needed:,}",
            {True: "yes", False: "no", None: "?"}[power.decides],
        )
        for variant in report.variants
        for finding in variant.findings
        if (power := finding.power) is not None
    ]
    if not rows:
        return ""
    text = (
        "At the flip rates of this run (half a flip and one document more than were seen: none seen isn't none), with "
        "80 % power when nothing is lost in truth."
    )
    table = markdown_table(_POWER, rows, text_columns=("task", "enough"))
    return f"### What the documents can decide\n\n{text}\n\n{table}"
