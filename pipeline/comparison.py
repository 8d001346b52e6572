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

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from pipeline.distribution_results import BaselineDistance, DistributionResult
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
from pipeline.task_validity import CHANCE_SIGNIFICANCE, chance_p
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
    "chat_template_applied",
    "tokenizer_hash",
    "adds_bos_token",
    "max_length_tokens",
    "harness_version",
)
SAME_FOR_TASK = (
    *("output_type", "task_version", "task_hash", "num_fewshot", "fewshot_source", "scoring"),
    *("prompts_hash", "data_hash", "truncated_prompts"),
)
_OF_ALL_DOCUMENTS = {"prompts_hash", "data_hash", "truncated_prompts"}
"""Of a task that stopped early they can't be the baseline's."""

SAME_FOR_DISTRIBUTION = (
    *("text_sha256", "context_tokens", "bos_first", "vocabulary_tokens", "scored_tokens", "reference_key"),
)
MAX_OWN_KL_NATS = 1e-3
"""Of the baseline against what it wrote down: 16-bit steps make 3e-8, adding in another order 1e-6 in FP32."""
NOT_COMPARED = frozenset({"tokenizers"})
"""Packages whose version may differ: what they do is compared itself, by the hash of the tokenizer."""
LEAST_KL_NATS = 1e-4
"""How far below 0 rounding in FP32 may put a divergence; what is further isn't one."""


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
        if times is not None and not _in_order(times):
            raise UnmeasuredError(f"{where}: implausible, a {what} of {times.median} s")
    return row


def _in_order(times: Distribution) -> bool:
    """Whether smallest, quartiles, median and largest are above 0 and follow each other, but for rounding."""
    if not times.samples:
        return False
    ends = (min(times.samples), times.lower_quartile, times.median, times.upper_quartile, max(times.samples))
    return ends[0] > 0 and all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(ends))


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
    refuse_other_versions(baseline, candidate)
    refuse_differences("quality", baseline.quality, candidate.quality, SAME_FOR_QUALITY)
    _refuse_borrowed_answers(baseline, candidate)
    return baseline.quality, candidate.quality


def _refuse_borrowed_answers(baseline: VariantResults, candidate: VariantResults) -> None:
    """UnmeasuredError when other weights gave log-likelihoods that are all equal to the last bit."""
    if not _weights_differ(baseline, candidate):
        return
    before, after = _answer_hashes(baseline), _answer_hashes(candidate)
    shared = before.keys() & after.keys()
    if shared and all(before[document] == after[document] for document in shared):
        raise UnmeasuredError(
            f"{candidate.name}: void, every log-likelihood of {len(shared)} documents equals {baseline.name}'s to the "
            "last bit, though their weights differ: one model answered for both"
        )


def _weights_differ(baseline: VariantResults, candidate: VariantResults) -> bool:
    """By the share that is quantized: one model in two formats may well compute the same to the last bit."""
    return len({each.checkpoint.coverage.share for each in (baseline, candidate) if each.checkpoint}) == 2


def _answer_hashes(variant: VariantResults) -> dict[tuple[str, str], str]:
    """Digests of log-likelihoods by task and document."""
    tasks = variant.quality.tasks if variant.quality else {}
    return {
        (name, sample.doc_hash): sample.answer_hash
        for name, task in tasks.items()
        for sample in task.samples
        if sample.answer_hash is not None
    }


def comparable_distribution(
    baseline: VariantResults, candidate: VariantResults
) -> tuple[DistributionResult, BaselineDistance]:
    """The candidate's distribution on held text and its distance from the baseline's; UnmeasuredError otherwise."""
    before, after = (
        _distribution_of(variant, quality)
        for variant, quality in zip(
            (baseline, candidate), comparable_quality(baseline, candidate), strict=True
        )
    )
    refuse_differences("distribution", before, after, SAME_FOR_DISTRIBUTION)
    if after.distance is None:
        raise UnmeasuredError(f"{candidate.name}: its distribution was compared with none of the baseline's")
    if before.distance is None or before.distance.kl_mean_nats > MAX_OWN_KL_NATS:
        own = "nothing" if before.distance is None else f"{before.distance.kl_mean_nats:.2g} nats"
        raise UnmeasuredError(
            f"{baseline.name}: void, against its own stored distribution it shows {own}, at most {MAX_OWN_KL_NATS} "
            "are rounding"
        )
    if _weights_differ(baseline, candidate) and [one.nats for one in before.windows] == [
        one.nats for one in after.windows
    ]:
        raise UnmeasuredError(
            f"{candidate.name}: void, the text is as likely as by {baseline.name} to the last bit, though their "
            "weights differ: one model answered for both"
        )
    return after, after.distance


def own_distances(baseline: VariantResults) -> tuple[BaselineDistance, ...]:
    """The baseline against its own stored distribution: in the same way, and in the null run where there is one."""
    runs = (baseline.quality, baseline.null_quality)
    found = (quality.distribution for quality in runs if quality and quality.distribution)
    return tuple(one.distance for one in found if one.distance is not None)


def _distribution_of(variant: VariantResults, quality: QualityResult) -> DistributionResult:
    found = quality.distribution
    if found is None:
        raise UnmeasuredError(f"{variant.name}: no distribution on held text was measured")
    if not found.finite:
        raise UnmeasuredError(f"{variant.name}: on the held text a logit is not finite")
    tokens = sum(window.tokens for window in found.windows)
    compared = [window for window in found.windows if window.kl_sum_nats is not None]
    whole = all(
        len(one.kl_nats) == one.tokens and one.same_top1 is not None and 0 <= one.same_top1 <= one.tokens
        for one in compared
    )
    if tokens != found.scored_tokens or len(found.windows) < 2 or not whole:
        raise UnmeasuredError(
            f"{variant.name}: implausible, its windows don't hold the tokens that were scored"
        )
    if found.distance is not None:
        total = math.fsum(one.kl_sum_nats for one in compared if one.kl_sum_nats is not None)
        mean, least = (
            found.distance.kl_mean_nats,
            min((min(one.kl_nats) for one in compared), default=-math.inf),
        )
        if len(compared) != len(found.windows) or abs(total / tokens - mean) > 1e-9 or least < -LEAST_KL_NATS:
            raise UnmeasuredError(f"{variant.name}: implausible, KL divergences of {least:.2g} nats and more")
    return found


def comparable_task(
    task: str, baseline: QualityResult, candidate: QualityResult
) -> tuple[TaskResult, TaskResult, tuple[tuple[Sample, Sample], ...]]:
    """One task of both arms with its samples paired by document, repeated ones once; UnmeasuredError otherwise.

    A candidate that was evaluated sequentially answers some of the baseline's documents, and is paired with those.
    """
    for arm, quality in (("baseline", baseline), ("candidate", candidate)):
        if task not in quality.tasks:
            known = ", ".join(sorted(quality.tasks)) or "none"
            raise UnmeasuredError(f"{task}: no result of the {arm}; it has {known}")
    before, after = baseline.tasks[task], candidate.tasks[task]
    for arm, result in (("baseline", before), ("candidate", after)):
        refuse_void(task, result, arm=arm)
    if after.look_confidence is not None:
        pairs = _answered_pairs(task, before, after)
        fields = tuple(field for field in SAME_FOR_TASK if field not in _OF_ALL_DOCUMENTS)
    else:
        pairs, fields = pair_samples(task, before.samples, after.samples), SAME_FOR_TASK
    refuse_differences(task, before, after, fields)
    if not pairs:
        raise UnmeasuredError(f"{task}: no documents")
    return before, after, tuple(itertools.compress(pairs, _first_times([sample for sample, _ in pairs])))


def distinct_samples(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The first of each document and of each question: what is asked again is answered again, no new evidence."""
    return tuple(itertools.compress(samples, _first_times(samples)))


def _first_times(samples: Sequence[Sample]) -> Iterator[bool]:
    seen: set[str] = set()
    for sample in samples:
        keys = {
            sample.doc_hash.partition("#")[0]
        }  # equal documents are told apart by their turn (`task_scores`)
        if sample.prompt_hash is not None:
            keys.add(sample.prompt_hash)
        yield keys.isdisjoint(seen)
        seen |= keys


def refuse_void(task: str, result: TaskResult, *, arm: str) -> None:
    """UnmeasuredError when the task decides nothing, or holds other documents than it counts."""
    if result.documents != len(result.samples):
        raise UnmeasuredError(
            f"{task}: the {arm} counts {result.documents} documents but holds {len(result.samples)} samples"
        )
    if result.void is not None:
        raise UnmeasuredError(f"{task}: void, {result.void} ({arm})")


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


def _answered_pairs(
    task: str, baseline: TaskResult, candidate: TaskResult
) -> tuple[tuple[Sample, Sample], ...]:
    """The documents that a sequential evaluation reached, each asked as the baseline was asked.

    Hashes of all documents or prompts would differ for a part of them, so that each document proves its own.
    """
    if candidate.available_documents != baseline.documents:
        raise UnmeasuredError(
            f"{task}: the candidate's documents were drawn from {candidate.available_documents}, the baseline has "
            f"{baseline.documents}"
        )
    by_hash = {sample.doc_hash: sample for sample in baseline.samples}
    if (
        len(by_hash) != baseline.documents
        or len({s.doc_hash for s in candidate.samples}) != candidate.documents
    ):
        raise UnmeasuredError(f"{task}: a document stands twice")
    strangers = sum(sample.doc_hash not in by_hash for sample in candidate.samples)
    if strangers:
        raise UnmeasuredError(
            f"{task}: {strangers} of {candidate.documents} documents aren't the baseline's (by hash)"
        )
    pairs = tuple((by_hash[sample.doc_hash], sample) for sample in candidate.samples)
    other = sum(
        before.prompt_hash is None or before.prompt_hash != after.prompt_hash for before, after in pairs
    )
    if other:
        raise UnmeasuredError(
            f"{task}: {other} of {len(pairs)} documents were asked in other words (by hash)"
        )
    return pairs


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


def refuse_chance_level(task: str, metric: str, baseline: Sequence[float], *, chance: float | None) -> None:
    """UnmeasuredError when right/wrong answers of the baseline are no better than guessing: no drop could show.

    `baseline` holds 1.0 for a right answer, one a document; other metrics, and tasks without a `chance`, pass.
    """
    if chance is None or not all(value in (0, 1) for value in baseline):
        return
    right, documents = int(sum(baseline)), len(baseline)
    p = chance_p(right, documents=documents, chance=chance)
    if p >= CHANCE_SIGNIFICANCE:
        raise UnmeasuredError(
            f"{task}: void, the baseline is at chance: {metric} {right / documents:.1%} on {documents} documents, "
            f"guessing gets {chance:.1%} (p = {p:.2g}), so no drop could show; raise quality.limit "
            "(more documents) or take another task"
        )


def refuse_guessing(
    task: str, metric: str, baseline: Sequence[float], *, chance: float | None, margin: float
) -> None:
    """UnmeasuredError when a model that only guesses would keep within the margin: the limit couldn't find it.

    `baseline` holds a score from 0 to 1 for each document, more being better, `margin` a share of documents. Where
    guessing isn't known to get more, for want of a `chance` or of right/wrong answers, it gets 0.
    """
    score = sum(baseline) / len(baseline)
    guessed = chance if chance is not None and all(value in (0, 1) for value in baseline) else 0.0
    if score - guessed <= margin:
        raise UnmeasuredError(
            f"{task}: void for this limit, the baseline's {metric} of {score:.1%} is {100 * (score - guessed):.1f} "
            f"points over guessing ({guessed:.1%}), so a model that only guesses would keep within a limit of "
            f"{100 * margin:.4g} points; set a smaller limit or take another task"
        )


def refuse_other_versions(baseline: VariantResults, candidate: VariantResults) -> None:
    """UnmeasuredError when the two were made with other versions of a library that both were made with."""
    before, after = (
        variant.checkpoint.versions if variant.checkpoint else {} for variant in (baseline, candidate)
    )
    other = [
        f"{name} {before[name]} vs {after[name]}"
        for name in sorted(before.keys() & after.keys() - NOT_COMPARED)
        if before[name] != after[name]
    ]
    if other:
        raise UnmeasuredError(f"library versions: not comparable, baseline vs candidate: {'; '.join(other)}")


def refuse_differences(what: str, baseline: Value, candidate: Value, fields: Sequence[str]) -> None:
    """UnmeasuredError naming every field in which the two arms differ."""
    different = [
        f"{field} {getattr(baseline, field)!r} vs {getattr(candidate, field)!r}"
        for field in fields
        if getattr(baseline, field) != getattr(candidate, field)
    ]
    if different:
        raise UnmeasuredError(f"{what}: not comparable, baseline vs candidate: {'; '.join(different)}")
