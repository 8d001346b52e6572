"""The null run: the baseline against itself at another batch size, and what its noise forbids to claim. Pure.

Nothing but the order of additions differs between the two runs, so whatever changes is noise of the arithmetic.
A drop that isn't larger says nothing of a candidate, and a limit that isn't larger can't be shown to be kept.

    for noise in null_noise(baseline):
        print(noise.task, noise.difference, noise.floor)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.comparison import (
    SAME_FOR_QUALITY,
    UnmeasuredError,
    comparable_task,
    metric_pairs,
    refuse_differences,
)
from pipeline.results import Finding, QualityResult, Sample, VariantResults
from pipeline.values import Value

LOG_LIKELIHOOD = "log_likelihood_nats"


class TaskNoise(Value):
    """One task's null run. `difference` and `floor` are shares of a score, or nats per token of a rolling task.

    `difference` is the run at the recipe's batch size minus the null run. `floor` is the larger of its amount and of
    √Σd² ÷ n over the documents' differences d (÷ Σ tokens): what as many changes amount to where their signs are
    chance, so that changes which happen to cancel don't pass for none. `lost` answers are right at the recipe's batch
    size and wrong in the null run, `gained` the reverse, None where a metric isn't right or wrong; `largest_nats` is
    the largest difference of a document's log-likelihood.
    """

    task: str
    metric: str
    documents: int
    score: float
    null_score: float
    difference: float
    floor: float
    lost: int | None = None
    gained: int | None = None
    largest_nats: float | None = None

    @property
    def perplexity_percent(self) -> float | None:
        """Relative difference of perplexity, for rolling tasks."""
        return None if self.largest_nats is None else 100 * math.expm1(self.difference)

    @property
    def floor_percent(self) -> float:
        """`floor` as a percentage: points of a score, percent of a perplexity."""
        return 100 * (self.floor if self.largest_nats is None else math.expm1(self.floor))


def null_noise(baseline: VariantResults) -> tuple[TaskNoise, ...]:
    """Every task of the null run by its primary metric; empty without a null run.

    Raises UnmeasuredError when the two runs differ in more than their batch size.
    """
    if baseline.quality is None or baseline.null_quality is None:
        return ()
    _refuse_other_conditions(baseline.quality, baseline.null_quality)
    return tuple(
        _task_noise(name, result.primary_metric, baseline.quality, baseline.null_quality)
        for name, result in baseline.quality.tasks.items()
    )


def above_noise(
    finding: Finding, *, baseline: VariantResults, metric: str | None = None, tasks: Sequence[str] = ()
) -> Finding:
    """`finding` about a task, as far as the null run lets it be claimed; unchanged without a null run.

    A loss no larger than the noise floor is no regression, and a limit no larger can't be shown to be kept: both
    become inconclusive. `metric` is the judged one, None the task's primary. The finding counts points or percent;
    it is about the documents of all `tasks` where a group is judged as one.
    """
    if finding.outcome not in ("pass", "fail"):
        return finding
    try:
        noises = [_noise_of(task, baseline, metric) for task in tasks or (finding.subject,)]
    except UnmeasuredError as error:
        return finding.model_copy(update={"outcome": "missing", "because": str(error)})
    return above_known_noise(finding, [noise for noise in noises if noise is not None])


def above_known_noise(finding: Finding, noises: Sequence[TaskNoise]) -> Finding:
    """As `above_noise`, by the noise of each task that the finding is about; unchanged without any."""
    if not noises or finding.observed is None or finding.limit is None:
        return finding
    floor = _pooled(noises).floor_percent
    told = f"the noise floor is {floor:.2g} {finding.unit} by the null run at another batch size"
    return above_floor(finding, loss=finding.observed, allowed=finding.limit, floor=floor, told=told)


def above_floor(finding: Finding, *, loss: float, allowed: float, floor: float, told: str) -> Finding:
    """`finding` of a loss against what is allowed, inconclusive where what it claims isn't larger than the noise.

    `loss`, `allowed` and the noise `floor` are in one unit; `told` says the floor.
    """
    if finding.outcome == "fail" and loss <= floor:
        reason = "no regression can be claimed"
    elif finding.outcome == "pass" and allowed <= floor:
        reason = "the limit can't be shown to be kept"
    else:
        return finding
    because = f"{finding.because}; but {told}, so {reason}"
    return finding.model_copy(update={"outcome": "inconclusive", "because": because})


def _pooled(noises: Sequence[TaskNoise]) -> TaskNoise:
    """The noise of the documents of at least one task together."""
    if len(noises) == 1:
        return noises[0]
    count = sum(noise.documents for noise in noises)
    drift = math.fsum(noise.documents * noise.difference for noise in noises) / count
    by_chance = math.sqrt(math.fsum((noise.documents * noise.floor) ** 2 for noise in noises)) / count
    return noises[0].model_copy(update={"difference": drift, "floor": max(abs(drift), by_chance)})


def _noise_of(subject: str, baseline: VariantResults, metric: str | None) -> TaskNoise | None:
    """The null run of the task that a finding is about; None without a null run."""
    quality, null = baseline.quality, baseline.null_quality
    if quality is None or null is None:
        return None
    _refuse_other_conditions(quality, null)
    if subject not in quality.tasks:
        raise UnmeasuredError(f"null run: no result of {subject}")
    return _task_noise(subject, metric or quality.tasks[subject].primary_metric, quality, null)


def _refuse_other_conditions(quality: QualityResult, null: QualityResult) -> None:
    fields = [field for field in SAME_FOR_QUALITY if field != "batch_size"]
    refuse_differences("null run", quality, null, fields)
    if quality.batch_size == null.batch_size:
        raise UnmeasuredError(
            f"null run: both ran at batch size {quality.batch_size}, so nothing could differ"
        )


def _task_noise(task: str, metric: str, quality: QualityResult, null: QualityResult) -> TaskNoise:
    try:
        first, _, pairs = comparable_task(task, quality, null)
        if first.output_type == "loglikelihood_rolling":
            return _rolling_noise(task, pairs)
        values = metric_pairs(task, metric, pairs)
    except UnmeasuredError as error:
        raise UnmeasuredError(f"null run: {error}") from None
    differences = [one - other for one, other in values]
    right_or_wrong = all(value in (0, 1) for pair in values for value in pair)
    count = len(values)
    return TaskNoise(
        task=task,
        metric=metric,
        documents=count,
        score=math.fsum(one for one, _ in values) / count,
        null_score=math.fsum(other for _, other in values) / count,
        difference=math.fsum(differences) / count,
        floor=_floor(differences, count),
        lost=sum(one > other for one, other in values) if right_or_wrong else None,
        gained=sum(one < other for one, other in values) if right_or_wrong else None,
    )


def _rolling_noise(task: str, pairs: Sequence[tuple[Sample, Sample]]) -> TaskNoise:
    nats = [(-one, -other) for one, other in metric_pairs(task, LOG_LIKELIHOOD, pairs)]
    tokens = math.fsum(one for one, _ in metric_pairs(task, "tokens", pairs))
    differences = [one - other for one, other in nats]
    return TaskNoise(
        task=task,
        metric="token_perplexity",
        documents=len(nats),
        score=math.exp(min(700.0, math.fsum(one for one, _ in nats) / tokens)),
        null_score=math.exp(min(700.0, math.fsum(other for _, other in nats) / tokens)),
        difference=math.fsum(differences) / tokens,
        floor=_floor(differences, tokens),
        largest_nats=max(map(abs, differences)),
    )


def _floor(differences: Sequence[float], units: float) -> float:
    by_chance = math.sqrt(math.fsum(difference**2 for difference in differences))
    return max(abs(math.fsum(differences)), by_chance) / units
