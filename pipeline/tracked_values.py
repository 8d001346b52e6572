"""What a variant's figures become in an experiment tracker: metrics with legal names. Pure.

A metric's name is the field's name in `report.json`, so that one word leads from the recipe to the dashboard.
Figures by batch size are series whose step is the batch size. What wasn't measured has no metric; what isn't
finite becomes a tag, because trackers store infinity as a huge number and match NaN in searches.

>>> legal_name("acc,none")
'acc_none'
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.comparison import UnmeasuredError, comparable_quality, comparable_task, metric_pairs
from pipeline.distribution_results import DistributionResult
from pipeline.measured import Distribution
from pipeline.null_run import null_noise
from pipeline.paired_drop import paired_drop
from pipeline.results import TaskResult, VariantResults
from pipeline.scores import group_scores, paired_scores, score_interval
from pipeline.serving_results import ServingRow
from pipeline.speed_results import SpeedResult, SpeedRow
from pipeline.statistics import normal_interval

LONGEST_NAME = 250
LONGEST_PARAM = 6000
LONGEST_TAG = 8000
METRICS_PER_BATCH = 1000
PARAMS_PER_BATCH = 100
CUT = "… (cut; all of it is in report.md)"

Item = TypeVar("Item")

SPEED_FIELDS = (
    "decode_tokens_per_s",
    "prefill_tokens_per_s",
    "bandwidth_share",
    "sheet_bandwidth_share",
    "prefill_flops_share",
    "itl_p50_s",
    "itl_p90_s",
    "itl_p99_s",
    "peak_memory_bytes",
)
PREFILL_FIELDS = ("prefill_tokens_per_s", "ttft_s", "prefill_flops_share")
DEPTH_FIELDS = ("decode_tokens_per_s", "tpot_s", "bandwidth_share")
SWEEP_FIELDS = ("drift_percent", "measured_break_even_batch", "free_lunch_batch")
SERVING_FIELDS = (
    *("output_tokens_per_s", "input_tokens_per_s", "requests_per_s", "gain", "mean_batch", "preemptions"),
    "peak_memory_bytes",
)
SERVING_TIMES = ("ttft_s", "tpot_s", "itl_s", "latency_s", "wait_s")
PREFIX_FIELDS = ("cold_ttft_s", "cached_ttft_s", "reused_tokens", "times_faster")
CAPACITY_FIELDS = (
    *("measured_sequences", "predicted_sequences", "context_tokens"),
    *("kv_bytes_per_sequence", "peak_bytes_per_sequence"),
)
DISTRIBUTION_FIELDS = (
    "scored_tokens",
    *(
        f"{name}{suffix}"
        for name in ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
        for suffix in ("", "_stderr")
    ),
)
CHECKPOINT_FIELDS = ("bits_per_weight", "bits_per_block_weight", "weight_bytes_on_disk", "parameters")


@dataclass(frozen=True)
class TrackedMetric:
    """One point; `value` may be anything a float can be, see `split_finite`."""

    name: str
    value: float
    step: int = 0


def legal_name(text: str) -> str:
    """`text` with every character a tracker refuses replaced by `_`; long names keep a digest of the rest."""
    name = re.sub(r"[^A-Za-z0-9_.\- ]", "_", text).strip(". ") or "_"
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def shortened(text: str, longest: int) -> str:
    """`text`, cut with a note when it is longer than a tracker stores."""
    return text if len(text) <= longest else text[: longest - len(CUT)] + CUT


def batches(items: Sequence[Item], size: int) -> tuple[Sequence[Item], ...]:
    """`items` in slices of at most `size`."""
    return tuple(items[start : start + size] for start in range(0, len(items), size))


def split_finite(
    metrics: Iterable[TrackedMetric],
) -> tuple[tuple[TrackedMetric, ...], dict[str, str]]:
    """Metrics that may be sent, and tags `metric.NAME` = nan, inf or -inf for those that may not."""
    kept, tags = [], {}
    for metric in metrics:
        if math.isfinite(metric.value):
            kept.append(metric)
        else:
            tags[f"metric.{metric.name}"[:LONGEST_NAME]] = str(float(metric.value))
    return tuple(kept), tags


def variant_metrics(variant: VariantResults, *, baseline: VariantResults | None) -> tuple[TrackedMetric, ...]:
    """Every measured figure of a variant, then its ratios to the baseline (none for the baseline itself)."""
    metrics = [*_checkpoint(variant), *_speed(variant), *_memory(variant), *_capacity(variant)]
    metrics += [*_serving(variant), *_quality(variant), *_null_run(variant), *_cost(variant)]
    if baseline is not None and baseline.name != variant.name:
        metrics += [*_speedups(variant, baseline), *_memory_fraction(variant, baseline)]
        metrics += _quality_differences(variant, baseline)
    return tuple(_unique(metrics))


# --- measured figures -----------------------------------------------------------------------------------


def _checkpoint(variant: VariantResults) -> Iterator[TrackedMetric]:
    if variant.checkpoint is not None:
        yield from _fields("checkpoint", variant.checkpoint, CHECKPOINT_FIELDS)
        yield TrackedMetric("checkpoint.coverage_share", variant.checkpoint.coverage.share)


def _speed(variant: VariantResults) -> Iterator[TrackedMetric]:
    for row in _measured_rows(variant.speed):
        yield from _fields("speed", row, SPEED_FIELDS, step=row.batch_size)
        # Run tables and searches see a series' last step only, the largest batch: each size has its own name too.
        yield from _fields(f"speed.{speed_place(row)}", row, ("decode_tokens_per_s", "prefill_tokens_per_s"))
        repeated = {
            "ttft_s": row.ttft_s,
            "tpot_s": row.tpot_s,
            "joules_per_output_token": row.joules_per_output_token,
        }
        for name, samples in repeated.items():
            if samples is not None:
                yield TrackedMetric(f"speed.{name}", samples.median, row.batch_size)
    if variant.speed is not None:
        yield from _fields("speed", variant.speed, SWEEP_FIELDS)
        yield from _lengths(variant.speed)


def _lengths(speed: SpeedResult) -> Iterator[TrackedMetric]:
    """Prefill by length and decode by depth under names of their own: `pp512.ttft_s`, `tg64_d4096.tpot_s`."""
    rows = [(row, PREFILL_FIELDS) for row in speed.of("prefill")]
    rows += [(row, DEPTH_FIELDS) for row in speed.of("depth")]
    for row, names in rows:
        for name in names if row.outcome == "measured" else ():
            value = getattr(row, name)
            number = value.median if isinstance(value, Distribution) else value
            if number is not None:
                yield TrackedMetric(f"speed.{speed_place(row)}.{name}", number)


def speed_place(row: SpeedRow) -> str:
    """A row's part of a metric's name: batch_8, pp512, pp2048_chunk256, tg64_d4096."""
    if row.test == "batch":
        return f"batch_{row.batch_size}"
    return row.name.replace(" @ ", "_").replace(" in chunks of ", "_chunk")


def _serving(variant: VariantResults) -> Iterator[TrackedMetric]:
    """`serving.static_ttft_p99_s`, `serving.continuous_gain` … by concurrency; `serving.open_…` as they came."""
    if variant.serving is None:
        return
    for row in variant.serving.rows:
        if row.outcome != "measured":
            continue
        prefix = f"serving.{'open' if row.load == 'open' else row.mode}"
        for name, number in _serving_figures(row):
            yield TrackedMetric(f"{prefix}_{name}", number, row.concurrency)
    prefix_row = variant.serving.prefix
    if prefix_row is not None and prefix_row.outcome == "measured":
        for name in PREFIX_FIELDS:
            yield from _number(f"serving.prefix_{name}", getattr(prefix_row, name))


def _serving_figures(row: ServingRow) -> Iterator[tuple[str, float]]:
    for metric in (one for name in SERVING_FIELDS for one in _number(name, getattr(row, name))):
        yield metric.name, metric.value
    for name in SERVING_TIMES:
        times = getattr(row, name)
        if times is not None:
            yield from (
                (percentile_name(name, figure), getattr(times, figure))
                for figure in ("mean", "p50", "p90", "p99")
            )
    if row.goodput is not None:
        yield from (
            ("goodput_requests_per_s", row.goodput.requests_per_s),
            ("goodput_share", row.goodput.share),
        )


def percentile_name(field: str, figure: str) -> str:
    """The unit ends the name.

    >>> percentile_name("ttft_s", "p99")
    'ttft_p99_s'
    """
    return f"{field.removesuffix('_s')}_{figure}_s"


def _number(name: str, value: Distribution | float | None) -> Iterator[TrackedMetric]:
    """A figure, or a distribution's median; nothing where it is missing."""
    if value is not None:
        yield TrackedMetric(name, float(value.median if isinstance(value, Distribution) else value))


def _measured_rows(speed: SpeedResult | None) -> tuple[SpeedRow, ...]:
    """The workload's rows whose figures hold; the numbers of a void row are no measurement."""
    return tuple(row for row in speed.of("batch") if row.outcome == "measured") if speed is not None else ()


def _memory(variant: VariantResults) -> Iterator[TrackedMetric]:
    memory = variant.loaded_memory
    if memory is not None:
        yield from _fields("memory", memory, tuple(type(memory).model_fields))


def _capacity(variant: VariantResults) -> Iterator[TrackedMetric]:
    if variant.capacity is not None:
        yield from _fields("capacity", variant.capacity, CAPACITY_FIELDS)
        if variant.capacity.paged is not None:
            yield from _fields("capacity.paged", variant.capacity.paged, CAPACITY_FIELDS)


def _quality(variant: VariantResults) -> Iterator[TrackedMetric]:
    if variant.quality is None:
        return
    for task, result in variant.quality.tasks.items():
        yield from _task(task, result)
    for group, (metric, pooled) in group_scores(variant.quality).items():
        yield TrackedMetric(f"quality.{group}.documents", pooled.documents)
        yield TrackedMetric(f"quality.{group}.{metric}", pooled.weighted)
        yield TrackedMetric(f"quality.{group}.{metric}_plain", pooled.plain)
        if pooled.weighted_stderr is not None:
            yield TrackedMetric(f"quality.{group}.{metric}_stderr", pooled.weighted_stderr)
            interval = normal_interval(pooled.weighted, pooled.weighted_stderr)
            yield from _bounds(f"quality.{group}.{metric}", interval)
    if variant.quality.agreement is not None:
        names = ("kl_mean_nats", "kl_p99_nats", "same_top1_share", "same_greedy_tokens")
        yield from _fields("quality.engines", variant.quality.agreement, names)
    if variant.quality.distribution is not None:
        yield from _distribution(variant.quality.distribution)


def _task(task: str, result: TaskResult) -> Iterator[TrackedMetric]:
    """A task's scores, each with its standard error and its 95 % interval where there is one; none of a void task."""
    yield TrackedMetric(f"quality.{task}.documents", result.documents)
    if result.available_documents is not None:
        yield from _fields(f"quality.{task}", result, ("available_documents", "look_confidence"))
    for metric, score in result.metrics.items():
        if score.score is None or result.void is not None:
            continue
        yield TrackedMetric(f"quality.{task}.{metric}", score.score)
        if score.stderr is not None:
            yield TrackedMetric(f"quality.{task}.{metric}_stderr", score.stderr)
        yield from _bounds(f"quality.{task}.{metric}", score_interval(result, metric))


def _bounds(name: str, interval: tuple[float, float] | None) -> Iterator[TrackedMetric]:
    if interval is not None:
        yield TrackedMetric(f"{name}_ci_low", interval[0])
        yield TrackedMetric(f"{name}_ci_high", interval[1])


def _distribution(result: DistributionResult) -> Iterator[TrackedMetric]:
    """Perplexities of the held text and, unless there is none, the distance from the baseline's distribution."""
    yield from _fields("quality.distribution", result, DISTRIBUTION_FIELDS)
    if result.distance is not None:
        yield from _fields("quality.distribution", result.distance, tuple(type(result.distance).model_fields))


def _null_run(variant: VariantResults) -> Iterator[TrackedMetric]:
    """What differs between the baseline and itself at another batch size, by task."""
    try:
        found = null_noise(variant)
    except UnmeasuredError:
        return
    for noise in found:
        yield TrackedMetric(f"null_run.{noise.task}.{noise.metric}_floor_percent", noise.floor_percent)
        yield from _fields(
            f"null_run.{noise.task}",
            noise,
            ("difference", "lost", "gained", "largest_nats", "perplexity_percent"),
        )


def _cost(variant: VariantResults) -> Iterator[TrackedMetric]:
    cost = variant.cost
    if cost is not None:
        for name, size in (("output", cost.batch_size), ("input", cost.input_batch_size)):
            yield from _fields("cost", cost, (f"dollars_per_million_{name}_tokens",), step=size or 0)
        for row in cost.serving:
            prefix = f"cost.serving_{'open' if row.load == 'open' else row.mode}"
            for name in ("output", "input"):
                price = getattr(row, f"dollars_per_million_{name}_tokens")
                yield TrackedMetric(f"{prefix}_dollars_per_million_{name}_tokens", price, row.concurrency)


def _fields(prefix: str, value: object, names: Iterable[str], *, step: int = 0) -> Iterator[TrackedMetric]:
    for name in names:
        number = getattr(value, name)
        if number is not None:
            yield TrackedMetric(f"{prefix}.{name}", float(number), step)


# --- against the baseline -------------------------------------------------------------------------------


def _speedups(variant: VariantResults, baseline: VariantResults) -> Iterator[TrackedMetric]:
    if variant.speed is None or baseline.speed is None or variant.speed.device != baseline.speed.device:
        return
    before = {row.batch_size: row for row in _measured_rows(baseline.speed)}
    for row in _measured_rows(variant.speed):
        for name in ("decode", "prefill"):
            fast = getattr(row, f"{name}_tokens_per_s")
            slow = getattr(before.get(row.batch_size), f"{name}_tokens_per_s", None)
            if fast is not None and slow:
                yield TrackedMetric(f"vs_baseline.{name}_speedup", fast / slow, row.batch_size)
                yield TrackedMetric(f"vs_baseline.batch_{row.batch_size}.{name}_speedup", fast / slow)


def _memory_fraction(variant: VariantResults, baseline: VariantResults) -> Iterator[TrackedMetric]:
    after, before = (
        {metric.name: metric.value for metric in _memory(each)}.get("memory.weight_bytes_resident")
        for each in (variant, baseline)
    )
    if after and before:
        yield TrackedMetric("vs_baseline.memory_fraction", after / before)


def _quality_differences(variant: VariantResults, baseline: VariantResults) -> Iterator[TrackedMetric]:
    """Candidate minus baseline of every score, where both answered the same documents in the same way."""
    for (task, metric), scores in paired_scores(variant, baseline=baseline).items():
        name = f"vs_baseline.quality.{task}.{metric}_difference"
        yield TrackedMetric(name, scores.change)
        assert variant.quality is not None, "it was compared"
        if metric == variant.quality.tasks[task].primary_metric:
            yield from _bounds(name, _difference_interval(task, metric, variant, baseline))


def _difference_interval(
    task: str, metric: str, variant: VariantResults, baseline: VariantResults
) -> tuple[float, float] | None:
    """Bounds of the paired difference, each one-sided at 95 % as the gate's; None for metrics that are no scores."""
    try:
        _, _, pairs = comparable_task(task, *comparable_quality(baseline, variant))
        values = metric_pairs(task, metric, pairs)
    except UnmeasuredError:
        return None
    if not all(0 <= value <= 1 for pair in values for value in pair):
        return None
    drop = paired_drop(metric, values, confidence=0.95)
    return None if drop.lower is None or drop.upper is None else (-drop.upper, -drop.lower)


def _unique(metrics: Iterable[TrackedMetric]) -> Iterator[TrackedMetric]:
    """Legal names; two names that become the same one keep a digest of what they were."""
    owner: dict[str, str] = {}
    for metric in metrics:
        name = legal_name(metric.name)
        if owner.setdefault(name, metric.name) != metric.name:
            name = legal_name(f"{name}-{hashlib.sha256(metric.name.encode()).hexdigest()[:8]}")
        yield TrackedMetric(name, metric.value, metric.step)
