"""What makes a measurement usable and two measurements comparable. Pure.

A gate must not compare what wasn't measured, what can't be true, or what was measured under other conditions.
These functions hand out comparable pairs or raise `UnmeasuredError`, whose message a rule reports as it is.

>>> from pipeline.results import Sample
>>> pair_samples("piqa", (Sample(doc_hash="a", metrics={}),), ())
Traceback (most recent call last):
    ...
pipeline.comparison.UnmeasuredError: piqa: 1 vs 0 documents (baseline vs candidate)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from pipeline.measured import Distribution
from pipeline.results import (
    MAX_ENGINE_KL_NATS,
    MAX_ENGINE_KL_P99_NATS,
    QualityResult,
    Sample,
    TaskResult,
    VariantResults,
)
from pipeline.roofline import PLAUSIBLE_SHARE
from pipeline.speed_results import MemoryResult, SpeedResult, SpeedRow
from pipeline.values import Value

SAME_FOR_QUALITY = (
    "engine",
    "device",
    "compute_dtype",
    "batch_size",
    "seed",
    "limit",
    "limits",
    "chat_template_hash",
    "tokenizer_hash",
    "adds_bos_token",
    "harness_version",
)
SAME_FOR_TASK = ("output_type", "task_version", "task_hash", "num_fewshot", "prompts_hash", "data_hash")


class UnmeasuredError(Exception):
    """A measurement is missing, void, implausible or not comparable; the message is one sentence."""


# --- speed and memory -----------------------------------------------------------------------------------


def speed_of(variant: VariantResults) -> SpeedResult:
    """The variant's speed result, or UnmeasuredError."""
    if variant.speed is None:
        raise UnmeasuredError(f"{variant.name}: the speed stage gave no result")
    return variant.speed


def usable_row(variant: VariantResults, batch_size: int) -> SpeedRow:
    """The measured, plausible speed row of `batch_size`, or UnmeasuredError saying why there is none."""
    where = f"{variant.name} at batch size {batch_size}"
    row = speed_of(variant).row(batch_size)
    if row is None:
        sizes = ", ".join(str(row.batch_size) for row in speed_of(variant).of("batch")) or "none"
        raise UnmeasuredError(f"{where}: not among the measured batch sizes ({sizes})")
    if row.outcome != "measured":
        reason = f": {row.because}" if row.because else ""
        raise UnmeasuredError(f"{where}: {row.outcome.replace('_', ' ')}{reason}")
    shares = ((row.bandwidth_share, "memory bandwidth"), (row.prefill_flops_share, "FLOP/s"))
    for share, limit in shares:
        if share is not None and share > PLAUSIBLE_SHARE:
            raise UnmeasuredError(f"{where}: implausible, {share:.2f} times the measured {limit}")
    if sum(other.batch_size == batch_size for other in speed_of(variant).of("batch")) > 1:
        raise UnmeasuredError(f"{where}: two rows of that batch size")
    for what, times in (("time to first token", row.ttft_s), ("time per token", row.tpot_s)):
        if times is not None and not 0 < min(times.samples, default=0) <= times.median <= max(times.samples):
            raise UnmeasuredError(f"{where}: implausible, a {what} of {times.median} s")
    return row


def usable_rate(
    row: SpeedRow, rate: float | None, *, times: Distribution | None, tokens: int, what: str
) -> float:
    """`rate` when the times it comes from say the same: `tokens` ÷ the fastest and the slowest sample."""
    found = usable_number(rate, what)
    if times is None:
        raise UnmeasuredError(f"{what}: the times behind it were not measured")
    slowest, fastest = tokens / max(times.samples), tokens / min(times.samples)
    if not 0.99 * slowest <= found <= 1.01 * fastest:
        raise UnmeasuredError(
            f"{what} is {found:.4g}: implausible, its times say {slowest:.4g} to {fastest:.4g} tok/s"
        )
    if row.produced_tokens != row.batch_size * row.new_tokens:
        raise UnmeasuredError(
            f"{what}: {row.produced_tokens} tokens were produced, {row.batch_size * row.new_tokens} asked for"
        )
    return found


def usable_number(value: float | None, what: str) -> float:
    """`value` when it is a finite number above zero; UnmeasuredError otherwise."""
    if value is None:
        raise UnmeasuredError(f"{what} was not measured")
    if not math.isfinite(value) or value <= 0:
        raise UnmeasuredError(f"{what} is {value}: implausible")
    return value


def memory_of(variant: VariantResults) -> MemoryResult:
    """The variant's memory result, or UnmeasuredError."""
    if variant.loaded_memory is None:
        raise UnmeasuredError(f"{variant.name}: memory was not measured")
    return variant.loaded_memory


# --- quality --------------------------------------------------------------------------------------------


def comparable_quality(
    baseline: VariantResults, candidate: VariantResults
) -> tuple[QualityResult, QualityResult]:
    """Both quality results when they were made under the same conditions; UnmeasuredError otherwise."""
    for variant in (baseline, candidate):
        if variant.quality is None:
            raise UnmeasuredError(f"{variant.name}: the quality stage gave no result")
        if not variant.quality.logits_finite:
            raise UnmeasuredError(f"{variant.name}: the model's logits are not finite")
        agreement = variant.quality.agreement
        if agreement is not None and not agreement.holds:
            raise UnmeasuredError(
                f"{variant.name}: the quality isn't that of what is timed, because the engines compute different "
                f"models: {agreement.text}; at most {MAX_ENGINE_KL_NATS} nats in the mean and "
                f"{MAX_ENGINE_KL_P99_NATS} at p99 are rounding"
            )
    assert baseline.quality is not None
    assert candidate.quality is not None
    _refuse_differences("quality", baseline.quality, candidate.quality, SAME_FOR_QUALITY)
    return baseline.quality, candidate.quality


def comparable_task(
    task: str, baseline: QualityResult, candidate: QualityResult
) -> tuple[TaskResult, TaskResult, tuple[tuple[Sample, Sample], ...]]:
    """One task of both arms with its samples paired by document; UnmeasuredError otherwise."""
    for arm, quality in (("baseline", baseline), ("candidate", candidate)):
        if task not in quality.tasks:
            known = ", ".join(sorted(quality.tasks)) or "none"
            raise UnmeasuredError(f"{task}: no result of the {arm}; it has {known}")
    before, after = baseline.tasks[task], candidate.tasks[task]
    for arm, result in (("baseline", before), ("candidate", after)):
        if result.documents != len(result.samples):
            raise UnmeasuredError(
                f"{task}: the {arm} counts {result.documents} documents but holds "
                f"{len(result.samples)} samples"
            )
    pairs = pair_samples(task, before.samples, after.samples)
    _refuse_differences(task, before, after, SAME_FOR_TASK)
    if not pairs:
        raise UnmeasuredError(f"{task}: no documents")
    return before, after, pairs


def pair_samples(
    task: str, baseline: Sequence[Sample], candidate: Sequence[Sample]
) -> tuple[tuple[Sample, Sample], ...]:
    """Join by document hash, whatever the order; documents that occur n times are paired n times.

    Raises UnmeasuredError unless both sides hold the same documents.
    """
    if len(baseline) != len(candidate):
        raise UnmeasuredError(
            f"{task}: {len(baseline)} vs {len(candidate)} documents (baseline vs candidate)"
        )
    counts = Counter(sample.doc_hash for sample in baseline)
    counts.subtract(sample.doc_hash for sample in candidate)
    strangers = sum(count for count in counts.values() if count > 0)
    if strangers:
        raise UnmeasuredError(f"{task}: {strangers} of {len(baseline)} documents differ (by hash)")
    by_hash: dict[str, list[Sample]] = defaultdict(list)
    for sample in reversed(candidate):
        by_hash[sample.doc_hash].append(sample)
    return tuple((sample, by_hash[sample.doc_hash].pop()) for sample in baseline)


def metric_pairs(
    task: str, metric: str, pairs: Sequence[tuple[Sample, Sample]]
) -> tuple[tuple[float, float], ...]:
    """Each document's value of `metric` with baseline and candidate; UnmeasuredError when one is missing."""
    for arm in (0, 1):
        absent = sum(metric not in pair[arm].metrics for pair in pairs)
        if absent:
            name = ("baseline", "candidate")[arm]
            raise UnmeasuredError(
                f"{task}: {absent} of {len(pairs)} documents of the {name} have no {metric}"
            )
    return tuple((before.metrics[metric], after.metrics[metric]) for before, after in pairs)


def _refuse_differences(what: str, baseline: Value, candidate: Value, fields: Sequence[str]) -> None:
    """UnmeasuredError naming every field in which the two arms differ."""
    different = [
        f"{field} {getattr(baseline, field)!r} vs {getattr(candidate, field)!r}"
        for field in fields
        if getattr(baseline, field) != getattr(candidate, field)
    ]
    if different:
        raise UnmeasuredError(f"{what}: not comparable, baseline vs candidate: {'; '.join(different)}")
