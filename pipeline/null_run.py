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
    if finding.outcome not in ("pass", "fail") or finding.observed is None or finding.limit is None:
        return finding
    try:
        noise = _pooled([_noise_of(task, baseline, metric) for task in tasks or (finding.subject,)])
    except UnmeasuredError as error:
        return finding.model_copy(update={"outcome": "missing", "because": str(error)})
    if noise is None:
        return finding
    told = f"{noise.floor_percent:.2g} {finding.unit} by the null run at another batch size"
    if finding.outcome == "fail" and finding.observed <= noise.floor_percent:
        reason = f"but the noise floor is {told}, so no regression can be claimed"
    elif finding.outcome == "pass" and finding.limit <= noise.floor_percent:
        reason = f"but the noise floor is {told}, so the limit can't be shown to be kept"
    else:
        return finding
    return finding.model_copy(update={"outcome": "inconclusive", "because": f"{finding.because}; {reason}"})


def _pooled(noises: Sequence[TaskNoise | None]) -> TaskNoise | None:
    """The noise of several tasks' documents together; None without a null run."""
    known = [noise for noise in noises if noise is not None]
    if len(known) < 2:
        return known[0] if known else None
    count = sum(noise.documents for noise in known)
    drift = math.fsum(noise.documents * noise.difference for noise in known) / count
    by_chance = math.sqrt(math.fsum((noise.documents * noise.floor) ** 2 for noise in known)) / count
    return known[0].model_copy(update={"difference": drift, "floor": max(abs(drift), by_chance)})


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
