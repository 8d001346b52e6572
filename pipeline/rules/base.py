"""The contract of a gate rule: a frozen value that judges a candidate against the baseline, purely.

A new rule is one file `KIND.py` in this package with one subclass. A missing, failed, void or non-finite
measurement gives the outcome `missing`, never `pass`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from pipeline.comparison import UnmeasuredError
from pipeline.early_stopping import Margin
from pipeline.results import Finding, FindingOutcome, Power, QualityResult, VariantResults
from pipeline.values import Value


class Rule(Value, ABC):
    """One condition for shipping."""

    kind: str
    needs: ClassVar[frozenset[Literal["speed", "capacity", "quality"]]] = frozenset()
    """Stages whose results the rule reads; a recipe without such a section is refused."""
    quality_blocks: ClassVar[frozenset[str]] = frozenset()
    """Blocks of the quality section that the rule reads besides; a recipe without them is refused."""

    @abstractmethod
    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """At least one finding; rules over tasks give one for each task."""

    def early_margins(self, task: str, baseline: QualityResult) -> tuple[Margin, ...] | None:
        """What decides this rule on a task, for rules that can be decided before all its documents are answered.

        Empty where the rule doesn't judge the task, None where it needs all documents.
        """
        del task, baseline
        return ()

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

    @abstractmethod
    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """The finding; raises UnmeasuredError when a measurement it needs isn't there or can't be true."""

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """One finding."""
        try:
            return (self.compare(baseline=baseline, candidate=candidate),)
        except UnmeasuredError as reason:
            return (self.finding("missing", str(reason), unit=self.unit),)


def exactly_one(kind: str, **fields: float | None) -> None:
    """Raise ValueError unless exactly one of the rule's alternative fields is set."""
    given = [name for name, value in fields.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "neither"
        raise ValueError(f"{kind} needs exactly one of {' or '.join(fields)}; {found} is given")
