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
Side = Literal["at least", "at most", "within ±", "limit"]
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
_ABOUT: dict[str, Concern] = {"points": "quality", "fraction": "memory", "bytes": "memory"}
"""What a finding's unit tells, of a rule that judges more than one thing."""
_SIDES: dict[str, Side] = {"min": "at least", "max": "at most"}
_SPELT = {"kl": "KL", "ttft": "TTFT", "tpot": "TPOT"}
TOLD = 3
"""A sentence names so many findings of one outcome; the card of the variant shows all of them."""


def concern(finding: Finding) -> Concern:
    """What a finding is about, by the stages that its rule reads; checks that are no rule of the gate are `other`.

    `no_regression` judges speed, memory and quality: there the unit tells.
    """
    found = _rule_of(finding)
    if found is None:
        return "other"
    if "quality" in found.needs:
        return "quality"
    if getattr(found, "unit", "") == "bytes" or "capacity" in found.needs:
        return "memory"
    return _ABOUT.get(finding.unit, "speed")


def _rule_of(finding: Finding) -> type[Rule] | None:
    """The rule of the gate that made it, None for a check that is none."""
    if finding.rule not in kinds("pipeline.rules"):
        return None
    found = plugin_class("pipeline.rules", finding.rule)
    assert issubclass(found, Rule)
    return found


def side_of(finding: Finding) -> Side:
    """On which side of the limit a figure is allowed; rules are named `min_…` and `max_…` after it.

    What `no_regression` judges is a ratio of speeds, of bytes, or points lost: only the first must be large.
    """
    found = _rule_of(finding)
    if found is not None and found.two_sided:
        return "within ±"
    prefix = finding.rule.partition("_")[0]
    if prefix in _SIDES:
        return _SIDES[prefix]
    if found is None:
        return "limit"
    return "at least" if finding.unit == "x" else "at most"


def findings_about(variant: VariantReport, about: Concern) -> tuple[Finding, ...]:
    """A variant's findings of one kind, in the gate's order."""
    return tuple(finding for finding in variant.findings if concern(finding) == about)


def figure_text(value: float | None, unit: str) -> str:
    """A finding's figure with its unit; "missing" for None."""
    if value is None:
        return MISSING
    if unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,.4g} {_UNITS.get(unit, unit)}".rstrip()


def limit_text(finding: Finding) -> str:
    """A finding's limit in words."""
    if finding.limit is None:
        return "–"
    side = side_of(finding)
    return f"{side}{'' if side == 'within ±' else ' '}{figure_text(finding.limit, finding.unit)}"


def interval_text(finding: Finding) -> str:
    """The interval, or a dash where there is none."""
    if finding.interval is None:
        return "–"
    low, high = finding.interval
    return f"{low:,.3g} … {high:,.3g}"


def figure_name(finding: Finding) -> str:
    """What the rule looks at, in words: `min` and `max` are said by `limit_text`.

    >>> figure_name(Finding(rule="max_kl", subject="mean", outcome="missing", because="…"))
    'mean KL'
    """
    side, _, figure = finding.rule.partition("_")
    if side not in _SIDES:
        return f"{finding.rule.replace('_', ' ')} {finding.subject}".rstrip()
    words = " ".join(_SPELT.get(word, word) for word in figure.split("_"))
    return f"{finding.subject} {words}".lstrip()


# --- sentences -------------------------------------------------------------------------------------------


def candidates(report: Report) -> tuple[VariantReport, ...]:
    """Every variant but the baseline."""
    return tuple(variant for variant in report.variants if variant.name != report.baseline)


def judged(report: Report) -> tuple[VariantReport, ...]:
    """Every variant that has a verdict of its own: beside an earlier run the baseline, too."""
    return report.variants if report.baseline_run else candidates(report)


def what_ships(report: Report) -> tuple[str, ...]:
    """Which variants ship and which don't, those that the verdict counts first."""
    lines = []
    for required, aside in ((True, ""), (False, " (optional: told, not counted)")):
        for verdict, (one, many) in _SAYS.items():
            names = [v.name for v in judged(report) if v.required is required and v.verdict == verdict]
            if names:
                lines.append(f"{listed(names)} {one if len(names) == 1 else many}{aside}.")
    if report.interrupted:
        lines.insert(0, "The run was interrupted before it was complete.")
    return tuple(lines) or ("There is no candidate, so nothing ships.",)


def why(variant: VariantReport) -> str:
    """One sentence of a variant's verdict: how many limits it keeps and which it doesn't."""
    says = _SAYS[variant.verdict][0]
    stopped = listed([f"{one.stage} {one.reason.replace('_', ' ')}" for one in variant.failures])
    if not variant.findings:
        return f"{variant.name} {says}: {stopped or 'no rule could be applied'}."
    kept = sum(finding.outcome == "pass" for finding in variant.findings)
    if kept == len(variant.findings) and variant.verdict == "ship":
        return f"{variant.name} {says}: it keeps every limit ({kept} of {kept})."
    if kept == len(variant.findings):
        lacking = f"the results aren't complete{f': {stopped}' if stopped else ''}"
        return f"{variant.name} {says}: what was measured keeps its {kept} limits, but {lacking}."
    parts = [stopped] if stopped else []
    for outcome in ("fail", "missing", "inconclusive"):
        found = [_beside_limit(one) for one in variant.findings if one.outcome == outcome]
        if found:
            more = [f"{len(found) - TOLD} more"] if len(found) > TOLD + 1 else []
            parts.append(f"{OUTCOMES[outcome]}: {listed([*found[:TOLD], *more] if more else found)}")
    return f"{variant.name} {says}: {kept} of {len(variant.findings)} limits kept; {'; '.join(parts)}."


def _beside_limit(finding: Finding) -> str:
    if finding.observed is None:
        return figure_name(finding)
    return f"{figure_name(finding)} {figure_text(finding.observed, finding.unit)} ({limit_text(finding)})"


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them."""
    return "".join(names) if len(names) < 2 else f"{', '.join(names[:-1])} and {names[-1]}"
