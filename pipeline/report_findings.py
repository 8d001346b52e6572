"""What a report's findings are about, in plain words: speed, memory or quality, beside their limits. Pure.

>>> limit_text(Finding(rule="min_speedup", outcome="pass", observed=1.4, limit=1.2, unit="x", because="…"))
'at least 1.2 ×'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipeline.plugins import kinds, plugin_class
from pipeline.results import Finding, FindingOutcome, Report, VariantReport, Verdict
from pipeline.rules.base import Rule

Concern = Literal["speed", "memory", "quality", "other"]
CONCERNS: dict[Concern, str] = {
    "speed": "Speed and cost",
    "memory": "Memory",
    "quality": "Quality",
    "other": "Other checks",
}
MARKS: dict[FindingOutcome, str] = {"pass": "✓", "fail": "✗", "inconclusive": "?", "missing": "!"}
OUTCOMES: dict[FindingOutcome, str] = {
    "pass": "kept",
    "fail": "broken",
    "inconclusive": "undecided",
    "missing": "missing",
}
MISSING = "missing"
VERDICT_MARKS: dict[Verdict, str] = {"ship": "✓", "no-ship": "✗", "inconclusive": "?", "error": "!"}
_SAYS: dict[Verdict, tuple[str, str]] = {
    "ship": ("ships", "ship"),
    "no-ship": ("doesn't ship", "don't ship"),
    "inconclusive": ("is undecided", "are undecided"),
    "error": ("can't be judged", "can't be judged"),
}
_UNITS = {"x": "×", "percent": "%", "fraction": "×", "usd": "$"}


def concern(rule: str) -> Concern:
    """What a rule is about, by the stages that it reads; checks that are no rule of the gate are `other`."""
    if rule not in kinds("pipeline.rules"):
        return "other"
    found = plugin_class("pipeline.rules", rule)
    assert issubclass(found, Rule)
    if "quality" in found.needs:
        return "quality"
    in_bytes = getattr(found, "unit", "") == "bytes"
    return "memory" if in_bytes or "capacity" in found.needs else "speed"


def findings_about(variant: VariantReport, about: Concern) -> tuple[Finding, ...]:
    """A variant's findings of one kind, in the gate's order."""
    return tuple(finding for finding in variant.findings if concern(finding.rule) == about)


def figure_text(value: float | None, unit: str) -> str:
    """A finding's figure with its unit; "missing" for None."""
    if value is None:
        return MISSING
    if unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,.4g} {_UNITS.get(unit, unit)}".rstrip()


def limit_text(finding: Finding) -> str:
    """A finding's limit in words; rules are named `min_…` and `max_…` after the side that is allowed."""
    if finding.limit is None:
        return "–"
    side = {"min": "at least ", "max": "at most "}.get(finding.rule.partition("_")[0], "limit ")
    return f"{side}{figure_text(finding.limit, finding.unit)}"


def interval_text(finding: Finding) -> str:
    """The interval, or a dash where there is none."""
    if finding.interval is None:
        return "–"
    low, high = finding.interval
    return f"{low:,.3g} … {high:,.3g}"


def rule_name(finding: Finding) -> str:
    """Rule and subject, with spaces."""
    return f"{finding.rule.replace('_', ' ')} {finding.subject}".rstrip()


# --- sentences -------------------------------------------------------------------------------------------


def candidates(report: Report) -> tuple[VariantReport, ...]:
    """Every variant but the baseline."""
    return tuple(variant for variant in report.variants if variant.name != report.baseline)


def what_ships(report: Report) -> tuple[str, ...]:
    """Which variants ship and which don't, those that the verdict counts first."""
    lines = []
    for required, aside in ((True, ""), (False, " (optional: told, not counted)")):
        for verdict, (one, many) in _SAYS.items():
            names = [v.name for v in candidates(report) if v.required is required and v.verdict == verdict]
            if names:
                lines.append(f"{listed(names)} {one if len(names) == 1 else many}{aside}.")
    if report.interrupted:
        lines.insert(0, "The run was interrupted before it was complete.")
    return tuple(lines) or ("There is no candidate, so nothing ships.",)


def why(variant: VariantReport) -> str:
    """One sentence of a variant's verdict: how many limits it keeps and which it doesn't."""
    says = _SAYS[variant.verdict][0]
    if not variant.findings:
        return f"{variant.name} {says}: no rule could be applied."
    kept = sum(finding.outcome == "pass" for finding in variant.findings)
    if kept == len(variant.findings) and variant.verdict == "ship":
        return f"{variant.name} {says}: it keeps every limit ({kept} of {kept})."
    if kept == len(variant.findings):
        return f"{variant.name} {says}: what was measured keeps its {kept} limits, but the results aren't complete."
    parts = [
        f"{OUTCOMES[outcome]}: {listed([_beside_limit(one) for one in variant.findings if one.outcome == outcome])}"
        for outcome in ("fail", "missing", "inconclusive")
        if any(one.outcome == outcome for one in variant.findings)
    ]
    return f"{variant.name} {says}: {kept} of {len(variant.findings)} limits kept; {'; '.join(parts)}."


def _beside_limit(finding: Finding) -> str:
    if finding.observed is None:
        return rule_name(finding)
    return f"{rule_name(finding)} {figure_text(finding.observed, finding.unit)} ({limit_text(finding)})"


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
