"""Which way a stored score is better, and whether it is what its documents say. Pure.

A direction that was swapped turns every loss into a gain, and a score beside other documents is another task's. Where
a metric's name leaves no doubt, the file's word isn't taken for it.

    score = usable_score("piqa", "acc", result, arm="candidate")
    score.higher_is_better
"""

from __future__ import annotations

import math

from pipeline.comparison import UnmeasuredError
from pipeline.results import MetricScore, TaskResult

SHARES_OF_RIGHT_ANSWERS = frozenset({"acc", "acc_norm", "acc_bytes", "exact_match"})
"""Metrics of lm-eval (0.4.13) that are the mean of a right or wrong a document, more being better."""
ROUNDED = 1e-6
"""How far a mean of up to some 100,000 documents may lie from another order of adding them."""


def usable_score(task: str, metric: str, result: TaskResult, *, arm: str) -> MetricScore:
    """The metric's score of an arm; UnmeasuredError where it is absent, not finite, or can't be true."""
    if metric not in result.metrics:
        known = ", ".join(sorted(result.metrics)) or "none"
        raise UnmeasuredError(f"{task}: the {arm} has no metric {metric}; it has {known}")
    score = result.metrics[metric]
    if score.score is None:
        raise UnmeasuredError(f"{task}: {metric} of the {arm} is not a finite number")
    if metric.partition(".")[0] in SHARES_OF_RIGHT_ANSWERS:
        _refuse_impossible(task, metric, result, score, arm=arm)
    return score


def _refuse_impossible(task: str, metric: str, result: TaskResult, score: MetricScore, *, arm: str) -> None:
    if not score.higher_is_better:
        raise UnmeasuredError(
            f"{task}: implausible, by the {arm}'s word less {metric} is better, but it is a share of right answers"
        )
    values = [sample.metrics[metric] for sample in result.samples if metric in sample.metrics]
    assert score.score is not None
    if values and not math.isclose(math.fsum(values) / len(values), score.score, abs_tol=ROUNDED):
        raise UnmeasuredError(
            f"{task}: implausible, {metric} of the {arm} is {score.score:.4g}, its {len(values)} documents come to "
            f"{math.fsum(values) / len(values):.4g}"
        )


def direction(task: str, metric: str, *, baseline: TaskResult, candidate: TaskResult) -> bool:
    """Whether more is better; UnmeasuredError when an arm has no such score, or the arms disagree."""
    directions = {
        usable_score(task, metric, result, arm=arm).higher_is_better
        for arm, result in (("baseline", baseline), ("candidate", candidate))
    }
    if len(directions) > 1:
        raise UnmeasuredError(f"{task}: the arms disagree on whether more {metric} is better")
    return directions.pop()
