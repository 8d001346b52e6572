"""A task must surely reach a score, whatever the baseline reached.

>>> MinScore(score=0.6, tasks=("piqa",)).confidence
0.95
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, comparable_quality, distinct_samples, refuse_void
from pipeline.distribution import share_bounds
from pipeline.early_stopping import Margin
from pipeline.results import Finding, QualityResult, VariantResults
from pipeline.rules.base import SCORED_OUTPUT_TYPES, SureRule, would_decide
from pipeline.sample_sizes import documents_for_distance
from pipeline.score_checks import usable_score
from pipeline.statistics import Decision, bounded_mean_interval, non_inferiority


class MinScore(SureRule):
    """The candidate's score of each named task or group, with a one-sided bound at `confidence`.

    Right/wrong answers get Clopper and Pearson's bounds, graded scores Gaffke's (`bounded_mean_interval`). A group's
    documents are pooled. It says what the documents say of all documents like them; where only these count, choose the
    floor accordingly.
    """

    kind: Literal["min_score"] = "min_score"
    score: float = Field(gt=0, lt=1)
    """Share, 0 to 1."""
    tasks: tuple[str, ...] = Field(min_length=1)
    """Tasks or groups: a floor for one says nothing of another."""
    metric: str | None = None
    """None: each task's primary metric."""

    needs = frozenset({"quality"})
    output_types = SCORED_OUTPUT_TYPES
    unit: ClassVar[str] = "share"
    sides = ("over", "under")

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """One finding for each named task or group; the baseline only vouches for the conditions."""
        findings = {name: self._judge_task(name, baseline, candidate) for name in self.tasks}
        return self.held_together(findings, lambda rule, name: rule._judge_task(name, baseline, candidate))

    def early_margins(self, task: str, baseline: QualityResult) -> tuple[Margin, ...] | None:
        """A floor needs all documents: looks are planned for drops."""
        named = {member for name in self.tasks for member in baseline.groups.get(name, (name,))}
        return None if task in named else ()

    def _judge_task(self, name: str, baseline: VariantResults, candidate: VariantResults) -> Finding:
        try:
            _, quality = comparable_quality(baseline, candidate)
            values = [
                value for task in quality.groups.get(name, (name,)) for value in self._values(task, quality)
            ]
            if not values:
                raise UnmeasuredError(f"{name}: no documents")
        except UnmeasuredError as reason:
            return self.finding("missing", str(reason), unit=self.unit, subject=name, limit=self.score)
        return self._finding(name, values)

    def _values(self, task: str, quality: QualityResult) -> list[float]:
        """The metric's value of every document."""
        if task not in quality.tasks:
            known = ", ".join(sorted(quality.tasks)) or "none"
            raise UnmeasuredError(f"{task}: no result of the candidate; it has {known}")
        result = quality.tasks[task]
        refuse_void(task, result, arm="candidate")
        if result.look_confidence is not None:
            raise UnmeasuredError(f"{task}: stopped early by looks at its drop; a floor needs all documents")
        metric = self.metric or result.primary_metric
        if not usable_score(task, metric, result, arm="candidate").higher_is_better:
            raise UnmeasuredError(f"{task}: less {metric} is better, a floor doesn't apply to it")
        values = [sample.metrics.get(metric) for sample in distinct_samples(result.samples)]
        known_values = [value for value in values if value is not None]
        if len(known_values) < len(values):
            raise UnmeasuredError(f"{task}: {len(values) - len(known_values)} documents have no {metric}")
        if not all(0 <= value <= 1 for value in known_values):
            raise UnmeasuredError(f"{task}: {metric} is not a score from 0 to 1")
        return known_values

    def _finding(self, name: str, values: Sequence[float]) -> Finding:
        low, high = _bounds(values, confidence=self.confidence)
        observed = math.fsum(values) / len(values)
        outcome: Decision = non_inferiority(-high, -low, -self.score)
        told = self.told(outcome, f"the floor of {self.score:.4g}", needed=self._needed(values, observed))
        return self.finding(
            outcome,
            f"{observed:.4g} on {len(values)} documents; it lies in {low:.4g} … {high:.4g} "
            f"({100 * self.confidence:g} % bounds), {told}",
            unit=self.unit,
            subject=name,
            observed=observed,
            limit=self.score,
            interval=(low, high),
        )

    def _needed(self, values: Sequence[float], observed: float) -> str:
        # Half an answer more than was seen: none wrong among few documents doesn't mean that none comes.
        variance = (math.fsum((value - observed) ** 2 for value in values) + 0.5) / (len(values) + 1)
        count = documents_for_distance(observed - self.score, variance=variance, confidence=self.confidence)
        return would_decide(count, answered=len(values))


def _bounds(values: Sequence[float], *, confidence: float) -> tuple[float, float]:
    """One-sided bounds of the mean of scores of 0 to 1."""
    right = sum(value == 1 for value in values)
    if all(value in (0, 1) for value in values):
        return share_bounds(right, trials=len(values), confidence=confidence)
    bounds = bounded_mean_interval(values, lowest=0.0, highest=1.0, confidence=confidence)
    return bounds.lower, bounds.upper
