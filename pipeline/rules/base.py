"""The contract of a gate rule: a frozen value that judges a candidate against the baseline, purely.

A new rule is one file `KIND.py` in this package with one subclass. A missing, failed, void or non-finite
measurement gives the outcome `missing`, never `pass`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Literal, Self

from pydantic import Field

from pipeline.comparison import UnmeasuredError
from pipeline.early_stopping import Margin
from pipeline.readings import Reading
from pipeline.results import Finding, FindingOutcome, Power, QualityResult, VariantResults
from pipeline.statistics import Decision, holm_claims
from pipeline.values import Value

Section = Literal["speed", "serving", "capacity", "quality", "cost"]
SCORED_OUTPUT_TYPES = frozenset({"loglikelihood", "multiple_choice", "generate_until"})
"""lm-eval's kinds of tasks whose documents have a score of their own; the other kind is a text's perplexity."""

LEAST_LIMIT = 0.001
"""Percent, or points, that no number of documents decides: some 10⁹ of them at 5 % flips."""


class Rule(Value, ABC):
    """One condition for shipping."""

    kind: str
    needs: ClassVar[frozenset[Section]] = frozenset()
    """Sections whose results the rule reads; a recipe without such a section is refused."""
    quality_blocks: ClassVar[frozenset[str]] = frozenset()
    """Blocks of the quality section that the rule reads besides; a recipe without them is refused."""
    output_types: ClassVar[frozenset[str]] = frozenset()
    """Kinds of lm-eval tasks that the rule judges; a recipe without such a task is refused. Empty: none, or any."""
    two_sided: ClassVar[bool] = False
    """Whether a figure may stray from 0 in either direction, by as much as the limit."""
    stops_early: ClassVar[bool] = False
    """Whether `early_margins` can end a task before all its documents are answered."""

    @abstractmethod
    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """At least one finding; rules over tasks give one for each task."""

    def early_margins(self, task: str, baseline: QualityResult) -> tuple[Margin, ...] | None:
        """What decides this rule on a task, for rules that can be decided before all its documents are answered.

        Empty where the rule doesn't judge the task, None where it needs all documents.
        """
        del task, baseline
        return ()

    def above_noise(self, finding: Finding, *, baseline: VariantResults) -> Finding:
        """This rule's finding, as far as the null run of `baseline` lets it be claimed; for rules that look at one."""
        del baseline
        return finding

    def finding(
        self,
        outcome: FindingOutcome,
        because: str,
        *,
        unit: str,
        subject: str = "",
        observed: float | None = None,
        limit: float | None = None,
        interval: tuple[float, float] | None = None,
        power: Power | None = None,
    ) -> Finding:
        """A finding in this rule's name."""
        return Finding(
            rule=self.kind,
            subject=subject,
            outcome=outcome,
            observed=observed,
            limit=limit,
            unit=unit,
            interval=interval,
            because=because,
            power=power,
        )


class ThresholdRule(Rule):
    """A rule with one comparison; whatever can't be compared becomes the outcome `missing`."""

    unit: ClassVar[str]
    bound: ClassVar[Literal["at most", "at least"]]

    @abstractmethod
    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """The finding; raises UnmeasuredError when a measurement it needs isn't there or can't be true."""

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """One finding."""
        try:
            return (self.compare(baseline=baseline, candidate=candidate),)
        except UnmeasuredError as reason:
            return (self.finding("missing", str(reason), unit=self.unit),)

    def held_against(
        self,
        reading: Reading,
        limit: float,
        *,
        unit: str | None = None,
        limit_text: str | None = None,
        note: str = "",
    ) -> Finding:
        """The reading against the limit, which itself is within; both raw, rounded in the sentence only.

        `limit_text` stands for the limit with its unit, `note` comes after it.

        Inconclusive when the measurement was noisy and its interval reaches across the limit, or has no interval.
        """
        unit = self.unit if unit is None else unit
        at_most = self.bound == "at most"
        outcome: FindingOutcome = (
            "pass" if (reading.value <= limit if at_most else reading.value >= limit) else "fail"
        )
        noise = "; a noisy measurement" if reading.noisy else ""
        if reading.noisy and (reading.interval is None or _reaches(reading.interval, limit, at_most=at_most)):
            outcome = "inconclusive"
            noise += " whose spread reaches across the limit"
        allowed = (
            f"{self.bound} {limit_text or f'{limit:g} {unit}'} is {'allowed' if at_most else 'asked for'}"
        )
        return self.finding(
            outcome,
            f"{reading.what}; {allowed}{note}{noise}",
            unit=unit,
            observed=reading.value,
            limit=limit,
            interval=reading.interval,
        )


class SureRule(Rule):
    """A rule that decides by bounds, each one-sided at `confidence`, and leaves open what they don't show.

    A pass needs everything that the rule judges, each at `confidence`: an intersection-union test, which needs no
    correction (Berger, Technometrics 24, 1982, 295-300). A fail is a claim, and several claims are corrected by Holm's
    procedure (`held_together`).
    """

    confidence: float = Field(default=0.95, gt=0.5, lt=1)

    sides: ClassVar[tuple[str, str]] = ("under", "above")
    """On which side of its limit a figure may be, and on which it mustn't, as words."""

    def held_together(
        self, findings: Mapping[str, Finding], judge: Callable[[Self, str], Finding]
    ) -> tuple[Finding, ...]:
        """The findings by subject, of their fails those that hold together; the other ones become inconclusive.

        `judge` gives the finding of a subject by another rule, which is this one at a higher confidence.
        """

        def still_fails(subject: str, tests: int) -> bool:
            if findings[subject].outcome != "fail" or tests == 1:
                return findings[subject].outcome == "fail"
            stricter = self.model_copy(update={"confidence": 1 - (1 - self.confidence) / tests})
            return judge(stricter, subject).outcome == "fail"

        judged = [subject for subject, finding in findings.items() if finding.outcome != "missing"]
        failed = holm_claims({subject: partial(still_fails, subject) for subject in judged})
        reason = f", but by itself only: undecided once all {len(judged)} are looked at (Holm)"
        return tuple(
            finding
            if finding.outcome != "fail" or subject in failed
            else finding.model_copy(update={"outcome": "inconclusive", "because": finding.because + reason})
            for subject, finding in findings.items()
        )

    def told(self, outcome: Decision, limit: str, *, needed: str) -> str:
        """The end of a finding's sentence; `limit` names it, `needed` says what would decide."""
        if outcome == "inconclusive":
            return f"undecided against {limit}; {needed}"
        return f"surely {self.sides[outcome == 'fail']} {limit}"


def would_decide(count: int | None, *, answered: int, of: str = "documents") -> str:
    """How many documents decide where `answered` didn't; `count` is what their spread asks for, None for no number."""
    if count is None:
        return f"no number of {of} decides what equals the limit"
    return f"about {max(count, answered + 1):,} {of} would decide if it goes on like this"


def _reaches(interval: tuple[float, float], limit: float, *, at_most: bool) -> bool:
    low, high = interval
    return low <= limit < high if at_most else low < limit <= high


def exactly_one(kind: str, **fields: float | None) -> None:
    """Raise ValueError unless exactly one of the rule's alternative fields is set."""
    given = [name for name, value in fields.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "neither"
        raise ValueError(f"{kind} needs exactly one of {' or '.join(fields)}; {found} is given")
