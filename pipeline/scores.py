"""Scores of tasks and groups with their 95 % intervals, and beside the baseline's on the same documents. Pure.

    scores = paired_scores(candidate, baseline=baseline)
    scores["piqa", "acc"].change

A task that decides nothing (`void`) has no score to show, and neither has a group that holds one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from pipeline.comparison import UnmeasuredError, comparable_quality, comparable_task, metric_pairs
from pipeline.results import QualityResult, Sample, TaskResult, VariantResults
from pipeline.statistics import GroupScore, group_score, normal_interval, wilson_interval
from pipeline.values import Value

TOKEN_PERPLEXITY = "token_perplexity"
VOID = "void"
"""What stands in a table for the score of a task that decides nothing."""
ROUNDED = 1e-6
"""How far a mean of up to some 100,000 documents may lie from another order of adding them."""


class PairedScore(Value):
    """A score of both arms on `documents` that both answered; a task stopped early has fewer than the baseline."""

    before: float
    after: float
    documents: int

    @property
    def change(self) -> float:
        """Candidate minus baseline."""
        return self.after - self.before


def shown_metric(result: TaskResult) -> str:
    """Perplexity is shown per token, as the gate judges it; scores by the task's own first metric."""
    return TOKEN_PERPLEXITY if TOKEN_PERPLEXITY in result.metrics else result.primary_metric


def score_of(result: TaskResult | None, metric: str) -> float | None:
    """The score; None where it is missing or the task void."""
    found = result.metrics.get(metric) if result is not None and result.void is None else None
    return found.score if found else None


def score_interval(result: TaskResult, metric: str) -> tuple[float, float] | None:
    """The score's two-sided 95 % interval: Wilson's for right and wrong answers, else 1.96 standard errors."""
    values = [sample.metrics[metric] for sample in result.samples if metric in sample.metrics]
    score = result.metrics[metric]
    if values and len(values) == result.documents and all(value in (0, 1) for value in values):
        return wilson_interval(sum(values), documents=len(values))
    return None if score.score is None else normal_interval(score.score, score.stderr)


# --- beside the baseline ---------------------------------------------------------------------------------


def paired_scores(
    candidate: VariantResults, *, baseline: VariantResults | None
) -> dict[tuple[str, str], PairedScore]:
    """By task and metric, of all that can be compared; empty without a baseline, and for the baseline itself."""
    if baseline is None or baseline.name == candidate.name:
        return {}
    try:
        before, after = comparable_quality(baseline, candidate)
    except UnmeasuredError:
        return {}
    found = {}
    for task in after.tasks:
        with suppress(UnmeasuredError):
            first, second, pairs = comparable_task(task, before, after)
            for metric in second.metrics:
                if (scores := _on_both(metric, first, second, pairs)) is not None:
                    found[task, metric] = scores
    return found


def _on_both(
    metric: str, first: TaskResult, second: TaskResult, pairs: Sequence[tuple[Sample, Sample]]
) -> PairedScore | None:
    """The arms' own scores where both answered all documents, else the means over those that both answered."""
    before, after = score_of(first, metric), score_of(second, metric)
    if before is None or after is None:
        return None
    if second.look_confidence is None:
        return PairedScore(before=before, after=after, documents=second.documents)
    answered = [sample.metrics[metric] for sample in second.samples if metric in sample.metrics]
    # An F1 over all answers is no mean of what each document has under that name.
    if len(answered) != second.documents or abs(math.fsum(answered) / len(answered) - after) > ROUNDED:
        return None
    try:
        values = metric_pairs(second.task, metric, pairs)
    except UnmeasuredError:
        return None
    means = [math.fsum(arm) / len(values) for arm in zip(*values, strict=True)]
    return PairedScore(before=means[0], after=means[1], documents=len(values))


# --- groups ----------------------------------------------------------------------------------------------


def group_scores(quality: QualityResult) -> dict[str, tuple[str, GroupScore]]:
    """Metric and score of each group whose tasks were all answered, share their primary metric, and aren't void."""
    return {name: (metric, score) for name, metric, score in _scored_groups(quality)}


def paired_group(
    paired: Mapping[tuple[str, str], PairedScore], tasks: Sequence[str], metric: str
) -> PairedScore | None:
    """A group on the documents that both answered, each counting the same; None where a task of it doesn't compare."""
    found = [paired[task, metric] for task in tasks if (task, metric) in paired]
    if len(found) < len(tasks):
        return None
    total = sum(one.documents for one in found)
    before, after = (
        math.fsum(one.documents * value for one, value in zip(found, arm, strict=True)) / total
        for arm in ([one.before for one in found], [one.after for one in found])
    )
    return PairedScore(before=before, after=after, documents=total)


def has_void(quality: QualityResult, group: str) -> bool:
    """Whether a task of the group is void."""
    members = quality.groups.get(group, ())
    return any(quality.tasks[task].void is not None for task in members if task in quality.tasks)


def _scored_groups(quality: QualityResult) -> Iterator[tuple[str, str, GroupScore]]:
    for name, tasks in quality.groups.items():
        results = [quality.tasks[task] for task in tasks if task in quality.tasks]
        metrics = {result.primary_metric for result in results}
        if not results or len(results) < len(tasks) or len(metrics) > 1 or has_void(quality, name):
            continue
        (metric,) = metrics
        found = [result.metrics.get(metric) for result in results]
        scores = [one.score for one in found if one is not None and one.score is not None]
        if len(scores) == len(results):
            stderrs = [one.stderr if one else None for one in found]
            documents = [result.documents for result in results]
            yield name, metric, group_score(scores, documents=documents, stderrs=stderrs)
