"""One figure for how much better or worse a variant answers than the baseline, with its 95 % interval. Pure.

Scores come first, perplexity is taken where nothing is scored. Documents are paired, so that variants which stopped
at different documents compare with what the baseline said of the same ones.

    change = quality_change(candidate, baseline=baseline)
    change.value, change.unit
    changes = shared_changes(candidates, baseline=baseline)  # all in one unit
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipeline.comparison import UnmeasuredError, comparable_quality, comparable_task, metric_pairs
from pipeline.paired_drop import paired_drop
from pipeline.results import QualityResult, VariantResults
from pipeline.statistics import Z95, normal_interval, paired_bootstrap
from pipeline.values import Value

SCORES = "points of score, mean of tasks"
TASK_PERPLEXITY = "% less perplexity per token"
HELD_PERPLEXITY = "% less perplexity per token of the held text"


class QualityChange(Value):
    """Candidate minus baseline in `unit`, more being better; `low` and `high` are None without a spread."""

    value: float
    low: float | None
    high: float | None
    unit: str


def quality_change(candidate: VariantResults, *, baseline: VariantResults) -> QualityChange | None:
    """None where the two can't be compared, or nothing was measured that tells of quality."""
    return next(_changes(candidate, baseline), None)


def shared_changes(
    candidates: Sequence[VariantResults], *, baseline: VariantResults, by_perplexity: bool = False
) -> dict[str, QualityChange]:
    """By variant, all in the unit that most of them have; of two units that as many have, that of scores.

    A variant without a figure in that unit has none. `by_perplexity` leaves scores out: perplexity tells of smaller
    changes.
    """
    found = {
        one.name: {change.unit: change for change in _changes(one, baseline)}
        for one in candidates
        if one is not baseline
    }
    units = (
        (TASK_PERPLEXITY, HELD_PERPLEXITY) if by_perplexity else (SCORES, TASK_PERPLEXITY, HELD_PERPLEXITY)
    )
    unit = max(units, key=lambda one: sum(one in changes for changes in found.values()))
    return {name: changes[unit] for name, changes in found.items() if unit in changes}


def _changes(candidate: VariantResults, baseline: VariantResults) -> Iterator[QualityChange]:
    """Scores first, because they are what a model is for."""
    try:
        before, after = comparable_quality(baseline, candidate)
    except UnmeasuredError:
        return
    for change in (_scores(before, after), _task_perplexity(before, after), _held_perplexity(after)):
        if change is not None:
            yield change


def _scores(before: QualityResult, after: QualityResult) -> QualityChange | None:
    """The mean over tasks, those of a group counting as one task in proportion to their documents.

    None when a task of the two can't be compared: a mean over fewer tasks would be of something else.
    """
    drops: dict[str, list[tuple[int, float, float]]] = {}
    groups = {task: name for name, tasks in after.groups.items() for task in tasks}
    for task in _scored(before):
        try:
            _, result, pairs = comparable_task(task, before, after)
            values = metric_pairs(task, result.primary_metric, pairs)
        except UnmeasuredError:
            return None
        drop = paired_drop(result.primary_metric, values, confidence=0.95)
        found = (drop.documents, drop.drop, drop.variance / drop.documents)
        drops.setdefault(groups.get(task, task), []).append(found)
    if not drops:
        return None
    means = [_pooled(members) for members in drops.values()]
    value = -100 * sum(mean for mean, _ in means) / len(means)
    reach = 100 * Z95 * math.sqrt(sum(variance for _, variance in means)) / len(means)
    return QualityChange(value=value, low=value - reach, high=value + reach, unit=SCORES)


def _scored(quality: QualityResult) -> Iterator[str]:
    """Tasks whose primary metric is a score from 0 to 1, more being better."""
    for name, task in quality.tasks.items():
        score = task.metrics.get(task.primary_metric)
        values = [sample.metrics.get(task.primary_metric, -1.0) for sample in task.samples]
        if score is not None and score.higher_is_better and all(0 <= value <= 1 for value in values):
            yield name


def _pooled(members: list[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean drop and its variance over all documents of some tasks."""
    documents = sum(count for count, _, _ in members)
    mean = sum(count * drop for count, drop, _ in members) / documents
    return mean, sum(count**2 * variance for count, _, variance in members) / documents**2


def _task_perplexity(before: QualityResult, after: QualityResult) -> QualityChange | None:
    """Of the first rolling log-likelihood task."""
    rolling = (name for name, task in before.tasks.items() if task.output_type == "loglikelihood_rolling")
    task = next(rolling, None)
    if task is None:
        return None
    try:
        change = nats_per_token_change(task, before, after)
    except UnmeasuredError:
        return None
    return change.model_copy(update={"unit": TASK_PERPLEXITY})


def nats_per_token_change(task: str, before: QualityResult, after: QualityResult) -> QualityChange:
    """By how many percent perplexity per token falls on the same documents. Raises UnmeasuredError.

    exp of the difference of Σ nats ÷ Σ tokens; bounds by the paired bootstrap, together 95 %.
    """
    _, _, pairs = comparable_task(task, before, after)
    nats = metric_pairs(task, "log_likelihood_nats", pairs)
    tokens = metric_pairs(task, "tokens", pairs)
    if any(first != second or first <= 0 for first, second in tokens):
        raise UnmeasuredError(f"{task}: the arms cut the same documents into different numbers of tokens")
    first, second = ([-pair[arm] for pair in nats] for arm in (0, 1))
    found = paired_bootstrap(first, second, weights=[count for count, _ in tokens], confidence=0.975)
    if found.difference is None:
        raise UnmeasuredError(f"{task}: no documents")
    low, high = (found.interval.upper, found.interval.lower) if found.interval else (None, None)
    return QualityChange(
        value=_fall(found.difference),
        low=None if low is None else _fall(low),
        high=None if high is None else _fall(high),
        unit=TASK_PERPLEXITY,
    )


def _held_perplexity(after: QualityResult) -> QualityChange | None:
    distance = after.distribution.distance if after.distribution else None
    if distance is None:
        return None
    ratio = distance.log_perplexity_ratio
    low, high = normal_interval(ratio, distance.log_perplexity_ratio_stderr) or (None, None)
    return QualityChange(
        value=_fall(ratio),
        low=None if high is None else _fall(high),
        high=None if low is None else _fall(low),
        unit=HELD_PERPLEXITY,
    )


def _fall(log_ratio: float) -> float:
    """Percent by which perplexity falls at that difference of nats per token; negative where it rises."""
    return -100 * math.expm1(min(log_ratio, 700.0))
