"""No task may lose more than a number of percentage points, judged on the same documents.

>>> MaxQualityDrop(points=2.0).confidence
0.95
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, comparable_quality, comparable_task, metric_pairs
from pipeline.results import Finding, QualityResult, TaskResult, VariantResults
from pipeline.rules.base import Rule
from pipeline.statistics import (
    Decision,
    Flips,
    documents_for_distance,
    documents_to_decide,
    holm,
    mcnemar_exact_p,
    non_inferiority,
    paired_bootstrap,
    paired_flips,
    tango_interval,
)
from pipeline.values import Value

IMPLAUSIBLE_GAIN = 0.2
"""A candidate this much better than the 16-bit baseline, beyond chance, was not measured rightly."""


class TaskDrop(Value):
    """The paired drop of one task, as shares of documents; `flips` only for right/wrong metrics."""

    metric: str
    documents: int
    baseline_score: float
    candidate_score: float
    drop: float
    lower: float | None
    upper: float | None
    variance: float
    flips: Flips | None
    p: float | None


class MaxQualityDrop(Rule):
    """Non-inferiority of every task with a score from 0 to 1.

    Right/wrong metrics get Tango's interval of the paired difference and an exact McNemar test, graded ones
    the paired bootstrap. The bound of each side is one-sided at `confidence`: the drop is inside the limit
    when its upper bound is, outside when its lower bound is, and otherwise nothing is decided.
    """

    kind: Literal["max_quality_drop"] = "max_quality_drop"
    points: float = Field(gt=0, lt=100)
    """Percentage points."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    """None: every task whose metric is a score from 0 to 1."""
    metric: str | None = None
    """None: each task's primary metric."""

    needs = frozenset({"quality"})
    unit: ClassVar[str] = "points"

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """One finding for each task."""
        try:
            before, after = comparable_quality(baseline, candidate)
        except UnmeasuredError as reason:
            return (self.finding("missing", str(reason), unit=self.unit),)
        drops = {task: self._drop_or_reason(task, before, after) for task in self._tasks(before, after)}
        if not drops:
            nothing = "no task has a metric from 0 to 1, so there is nothing to judge"
            return (self.finding("missing", nothing, unit=self.unit),)
        tested = {task: drop.p for task, drop in drops.items() if isinstance(drop, TaskDrop)}
        p_values = {task: p for task, p in tested.items() if p is not None}
        adjusted = dict(zip(p_values, holm(tuple(p_values.values())), strict=True))
        return tuple(
            self._finding(task, drop, holm_p=adjusted.get(task), tests=len(adjusted))
            for task, drop in drops.items()
        )

    def _tasks(self, before: QualityResult, after: QualityResult) -> tuple[str, ...]:
        """The named tasks, or every one of either arm that isn't known to have another kind of metric."""
        if self.tasks is not None:
            return tuple(dict.fromkeys(self.tasks))
        names = dict.fromkeys((*before.tasks, *after.tasks))
        return tuple(
            name
            for name in names
            if not any(self._other_scale(quality.tasks.get(name)) for quality in (before, after))
        )

    def _other_scale(self, result: TaskResult | None) -> bool:
        """Whether the task's samples show a metric that isn't a score from 0 to 1."""
        if result is None:
            return False
        if result.output_type == "loglikelihood_rolling":
            return True
        metric = self.metric or result.primary_metric
        return any(not 0 <= sample.metrics.get(metric, 0.0) <= 1 for sample in result.samples)

    def _drop_or_reason(self, task: str, before: QualityResult, after: QualityResult) -> TaskDrop | str:
        try:
            return self._drop(task, before, after)
        except UnmeasuredError as reason:
            return str(reason)

    def _drop(self, task: str, before: QualityResult, after: QualityResult) -> TaskDrop:
        first, second, pairs = comparable_task(task, before, after)
        metric = self.metric or first.primary_metric
        higher_is_better = _direction(task, metric, first, second)
        values = metric_pairs(task, metric, pairs)
        if not all(0 <= value <= 1 for pair in values for value in pair):
            raise UnmeasuredError(f"{task}: {metric} is not a score from 0 to 1, points don't apply to it")
        good = tuple((b, c) if higher_is_better else (1 - b, 1 - c) for b, c in values)
        drop = (self._binary if all(v in (0, 1) for pair in good for v in pair) else self._graded)(
            metric, good
        )
        if drop.baseline_score == 0:
            raise UnmeasuredError(f"{task}: void, {metric} of the baseline is 0, so no drop could show")
        self._refuse_implausible(task, drop)
        return drop

    def _binary(self, metric: str, good: tuple[tuple[float, float], ...]) -> TaskDrop:
        flips = paired_flips([(b == 1, c == 1) for b, c in good])
        interval = tango_interval(
            lost=flips.lost, gained=flips.gained, documents=flips.documents, confidence=self.confidence
        )
        drop = (flips.lost - flips.gained) / flips.documents
        return TaskDrop(
            metric=metric,
            documents=flips.documents,
            baseline_score=(flips.both_right + flips.lost) / flips.documents,
            candidate_score=(flips.both_right + flips.gained) / flips.documents,
            drop=drop,
            lower=interval.lower,
            upper=interval.upper,
            variance=flips.smoothed_flip_rate,
            flips=flips,
            p=mcnemar_exact_p(lost=flips.lost, gained=flips.gained),
        )

    def _graded(self, metric: str, good: tuple[tuple[float, float], ...]) -> TaskDrop:
        before, after = ([pair[arm] for pair in good] for arm in (0, 1))
        result = paired_bootstrap(after, before, confidence=self.confidence)
        assert result.difference is not None
        # Equal differences everywhere give a bootstrap no width; unseen documents may still differ.
        unseen = tango_interval(lost=0, gained=0, documents=len(good), confidence=self.confidence).upper
        reach = 0.0 if result.standard_error else unseen
        return TaskDrop(
            metric=metric,
            documents=len(good),
            baseline_score=sum(before) / len(good),
            candidate_score=sum(after) / len(good),
            drop=result.difference,
            lower=result.interval.lower - reach if result.interval else None,
            upper=result.interval.upper + reach if result.interval else None,
            variance=len(good) * result.standard_error**2 if result.standard_error else 1.0,
            flips=None,
            p=None,
        )

    def _refuse_implausible(self, task: str, drop: TaskDrop) -> None:
        by_chance = drop.p >= 0.05 if drop.p is not None else drop.upper is None or drop.upper >= 0
        if drop.drop <= -IMPLAUSIBLE_GAIN and not by_chance:
            raise UnmeasuredError(
                f"{task}: implausible, {drop.metric} rose from {drop.baseline_score:.1%} to "
                f"{drop.candidate_score:.1%} by quantizing"
            )

    def _finding(self, task: str, drop: TaskDrop | str, *, holm_p: float | None, tests: int) -> Finding:
        if isinstance(drop, str):
            return self.finding("missing", drop, unit=self.unit, subject=task, limit=self.points)
        outcome: Decision = "inconclusive"
        interval = None
        if drop.lower is not None and drop.upper is not None:
            outcome = non_inferiority(drop.lower, drop.upper, self.points / 100)
            interval = (100 * drop.lower, 100 * drop.upper)
        sentence = f"{_scores(drop)}{_flips(drop, holm_p, tests)}; {self._bounds(drop, outcome)}"
        return self.finding(
            outcome,
            sentence,
            unit=self.unit,
            subject=task,
            observed=100 * drop.drop,
            limit=self.points,
            interval=interval,
        )

    def _bounds(self, drop: TaskDrop, outcome: Decision) -> str:
        verdict = {
            "pass": f"surely under the limit of {self.points:g}",
            "fail": f"surely above the limit of {self.points:g}",
            "inconclusive": f"undecided against the limit of {self.points:g}; {self._needed(drop)}",
        }[outcome]
        if drop.lower is None or drop.upper is None:
            return f"{drop.documents} document gives no interval, {verdict}"
        return (
            f"the drop of {100 * drop.drop:.2f} points lies in {100 * drop.lower:.2f} … "
            f"{100 * drop.upper:.2f} ({100 * self.confidence:g} % bounds), {verdict}"
        )

    def _needed(self, drop: TaskDrop) -> str:
        margin = self.points / 100
        if drop.flips is None:
            count = documents_for_distance(
                margin - drop.drop, variance=drop.variance, confidence=self.confidence
            )
        else:
            count = documents_to_decide(
                margin, flip_rate=drop.variance, true_drop=drop.drop, confidence=self.confidence
            )
        if count is None:
            return "no number of documents decides a drop that equals the limit"
        return f"about {max(count, drop.documents + 1):,} documents would decide if it goes on like this"


def _direction(task: str, metric: str, first: TaskResult, second: TaskResult) -> bool:
    """Whether more is better; UnmeasuredError when the metric is absent, has no score, or arms disagree."""
    for arm, result in (("baseline", first), ("candidate", second)):
        if metric not in result.metrics:
            known = ", ".join(sorted(result.metrics)) or "none"
            raise UnmeasuredError(f"{task}: the {arm} has no metric {metric}; it has {known}")
        if result.metrics[metric].score is None:
            raise UnmeasuredError(f"{task}: {metric} of the {arm} is not a finite number")
    directions = {result.metrics[metric].higher_is_better for result in (first, second)}
    if len(directions) > 1:
        raise UnmeasuredError(f"{task}: the arms disagree on whether more {metric} is better")
    return directions.pop()


def _scores(drop: TaskDrop) -> str:
    return (
        f"{drop.metric}: {drop.baseline_score:.1%} → {drop.candidate_score:.1%} on {drop.documents} documents"
    )


def _flips(drop: TaskDrop, holm_p: float | None, tests: int) -> str:
    if drop.flips is None or drop.p is None:
        return ""
    several = f", {holm_p:.4g} after Holm over {tests} tasks" if tests > 1 and holm_p is not None else ""
    return (
        f", {drop.flips.lost} right → wrong and {drop.flips.gained} wrong → right "
        f"(exact McNemar p = {drop.p:.4g}{several})"
    )
