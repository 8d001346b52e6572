"""Every figure of a variant in one long list: its name, unit, value, spread and how it came out. Pure.

A name is SECTION.METRIC, where METRIC is the field's name in `report.json` after the row it stands in, so that one
word leads from a report to `figures.csv`, to `compare` and to the dashboard: `speed.batch_8.decode_tokens_per_s`,
`quality.piqa.acc`. A row that is void, failed or out of memory keeps its outcome and has no value.

>>> unit_of("decode_tokens_per_s"), unit_of("peak_memory_bytes"), unit_of("token_perplexity")
('tokens/s', 'bytes', '')
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from pipeline.capacity_results import CapacityResult
from pipeline.csv_text import csv_text
from pipeline.distribution_results import DistributionResult
from pipeline.measured import Distribution
from pipeline.readings import rate_quartiles
from pipeline.results import Report, VariantReport, VariantResults, told_apart
from pipeline.scores import group_scores, score_interval
from pipeline.serving_results import ServingRow
from pipeline.speed_results import SpeedRow
from pipeline.statistics import normal_interval
from pipeline.tracked_values import percentile_name, speed_place
from pipeline.values import Value

Section = Literal["checkpoint", "memory", "speed", "serving", "capacity", "quality", "cost", "gate"]
Spread = Literal["quartiles", "95 % interval", "bounds", "counted", "unknown"]
"""What `low` and `high` are; `bounds` are a rule's own, counted figures have none because they can't spread."""

COLUMNS = ("variant", "section", "metric", "unit", "value", "low", "high", "spread", "outcome")

_UNITS = (
    ("_tokens_per_s", "tokens/s"),
    ("requests_per_s", "requests/s"),
    ("_million_output_tokens", "$/1M tokens"),
    ("_million_input_tokens", "$/1M tokens"),
    ("dollars_per_hour", "$/h"),
    ("joules_per_output_token", "J/token"),
    ("_bytes", "bytes"),
    ("_bytes_on_disk", "bytes"),
    ("_bytes_resident", "bytes"),
    ("_bytes_read_per_token", "bytes"),
    ("_bytes_per_sequence", "bytes"),
    ("_bytes_before_load", "bytes"),
    ("_bytes_after_load", "bytes"),
    ("_nats", "nats"),
    ("_percent", "percent"),
    ("_share", "share"),
    ("_sequences", "sequences"),
    ("_tokens", "tokens"),
    ("bits_per_byte", "bits/byte"),
    ("bits_per_weight", "bits"),
    ("bits_per_block_weight", "bits"),
    ("_s", "s"),
)
_COUNTED = ("weight_bytes_on_disk", "weight_bytes_resident", "weight_bytes_read_per_token")
_SPEED_ALONE = (
    "itl_p50_s",
    "itl_p90_s",
    "itl_p99_s",
    "bandwidth_share",
    "prefill_flops_share",
    "peak_memory_bytes",
)
_SERVING_TIMES = ("ttft_s", "tpot_s", "itl_s", "latency_s", "wait_s")
_SERVED = ("duration_s", "output_tokens_per_s", "gain")
_SERVED_ALONE = ("input_tokens_per_s", "requests_per_s", "mean_batch", "peak_memory_bytes")
_PERPLEXITIES = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
_DISTANCES = ("kl_mean_nats", "kl_p99_nats", "kl_max_nats", "top1_agreement_share")


class Figure(Value):
    """One figure. `low` and `high` are what `spread` says; a figure without `value` says why in `outcome`.

    `samples` are the repeats behind a median with quartiles.
    """

    section: Section
    metric: str
    unit: str
    value: float | None
    low: float | None = None
    high: float | None = None
    spread: Spread = "unknown"
    outcome: str = "measured"
    samples: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """SECTION.METRIC."""
        return f"{self.section}.{self.metric}"


def unit_of(field: str) -> str:
    """The unit that ends a field's name; "" for one without."""
    found = [unit for ending, unit in _UNITS if field.endswith(ending)]
    return found[0] if found else ""


def variant_figures(variant: VariantResults) -> tuple[Figure, ...]:
    """Every measured figure of a variant, by section in the order of a run."""
    found = [*_checkpoint(variant), *_memory(variant), *_speed(variant), *_serving(variant)]
    return (*found, *_capacity(variant), *_quality(variant), *_cost(variant))


def figures_csv(report: Report) -> str:
    """All figures of a run, one a line, with the gate's findings: RFC 4180, what is missing is an empty cell."""
    rows = (
        (
            *(variant.name, one.section, one.metric, one.unit),
            *(_shortest(value) for value in (one.value, one.low, one.high)),
            *(one.spread, one.outcome),
        )
        for variant in report.variants
        for one in (*variant_figures(variant), *_findings(variant))
    )
    return csv_text(COLUMNS, rows)


def _shortest(value: float | None) -> float | int | None:
    """Whole numbers without a point, so that counts of bytes stay readable."""
    return int(value) if value is not None and value.is_integer() and abs(value) < 2**53 else value


# --- what was measured ---------------------------------------------------------------------------------------


def _checkpoint(variant: VariantResults) -> Iterator[Figure]:
    block = variant.checkpoint
    if block is not None:
        for name in ("parameters", "bits_per_weight", "bits_per_block_weight", "weight_bytes_on_disk"):
            yield _counted("checkpoint", name, getattr(block, name))
        yield _counted("checkpoint", "coverage_share", block.coverage.share)


def _memory(variant: VariantResults) -> Iterator[Figure]:
    memory = variant.loaded_memory
    for name in type(memory).model_fields if memory is not None else ():
        value = getattr(memory, name)
        if value is not None:
            yield _alone("memory", name, value) if name not in _COUNTED else _counted("memory", name, value)


def _speed(variant: VariantResults) -> Iterator[Figure]:
    for row in variant.speed.rows if variant.speed else ():
        place = speed_place(row)
        if row.outcome != "measured":
            what = "ttft_s" if row.test == "prefill" else "decode_tokens_per_s"
            yield _unmeasured("speed", f"{place}.{what}", row.outcome)
            continue
        outcome = "noisy" if row.noisy else "measured"
        figures = [*_row_rates(row, place), *_alone_of("speed", place, row, _SPEED_ALONE)]
        yield from (one.model_copy(update={"outcome": outcome}) for one in figures)


def _row_rates(row: SpeedRow, place: str) -> Iterator[Figure]:
    """Times with their quartiles, and rates with the quartiles of the times behind them."""
    prompts, step = row.batch_size * row.prompt_tokens, row.batch_size
    timed = [("ttft_s", row.ttft_s), ("joules_per_output_token", row.joules_per_output_token)]
    rates = [("prefill_tokens_per_s", row.prefill_tokens_per_s, row.ttft_s, prompts)]
    if row.test != "prefill":
        timed.append(("tpot_s", row.tpot_s))
        rates.append(("decode_tokens_per_s", row.decode_tokens_per_s, row.tpot_s, step))
    if row.test == "depth":  # what a depth's prompt takes is the prefill rows' business
        timed, rates = timed[1:], rates[1:]
    for name, times in timed:
        if times is not None:
            yield _repeated("speed", f"{place}.{name}", times)
    for name, rate, times, tokens in rates:
        if rate is not None:
            yield _rate(f"{place}.{name}", rate, times, tokens)


def _rate(metric: str, rate: float, times: Distribution | None, tokens: int) -> Figure:
    """A rate with the quartiles of tokens ÷ time; one sample has none that tell anything."""
    figure = _alone("speed", metric, rate)
    if times is None or len(times.samples) < 2:
        return figure
    if min(*times.samples, times.lower_quartile, times.upper_quartile) <= 0:
        return figure
    low, high = rate_quartiles(times, tokens=tokens)
    return figure.model_copy(
        update={
            "low": low,
            "high": high,
            "spread": "quartiles",
            "samples": tuple(tokens / time for time in times.samples),
        }
    )


def _serving(variant: VariantResults) -> Iterator[Figure]:
    for row in variant.serving.rows if variant.serving else ():
        place = f"{'open' if row.load == 'open' else row.mode}_{row.concurrency}"
        if row.outcome != "measured":
            yield _unmeasured("serving", f"{place}.output_tokens_per_s", row.outcome)
            continue
        outcome = "noisy" if row.noisy else "measured"
        yield from (one.model_copy(update={"outcome": outcome}) for one in _served(row, place))


def _served(row: ServingRow, place: str) -> Iterator[Figure]:
    for name in _SERVED:
        times = getattr(row, name)
        if times is not None:
            yield _repeated("serving", f"{place}.{name}", times)
    yield from _alone_of("serving", place, row, _SERVED_ALONE)
    for name in _SERVING_TIMES:
        times = getattr(row, name)
        for percentile in ("p50", "p90", "p99") if times is not None else ():
            metric = f"{place}.{percentile_name(name, percentile)}"
            yield _alone("serving", metric, getattr(times, percentile))
    if row.goodput is not None:
        yield _alone("serving", f"{place}.goodput_requests_per_s", row.goodput.requests_per_s)
        yield _alone("serving", f"{place}.goodput_share", row.goodput.share)


def _capacity(variant: VariantResults) -> Iterator[Figure]:
    if variant.capacity is not None:
        yield from _held(variant.capacity, "")
        if variant.capacity.paged is not None:
            yield from _held(variant.capacity.paged, "paged.")


def _held(result: CapacityResult, place: str) -> Iterator[Figure]:
    outcome = {"memory": "measured", "ceiling": "at the search's ceiling", "failure": "failed"}[
        result.limited_by
    ]
    figure = _alone("capacity", f"{place}measured_sequences", result.measured_sequences)
    yield figure.model_copy(update={"outcome": outcome})
    for name in ("predicted_sequences", "kv_bytes_per_sequence", "peak_bytes_per_sequence"):
        if getattr(result, name) is not None:
            yield _alone("capacity", f"{place}{name}", getattr(result, name))


def _quality(variant: VariantResults) -> Iterator[Figure]:
    quality = variant.quality
    if quality is None:
        return
    for task, result in quality.tasks.items():
        outcome = "void" if result.void else "measured"
        for metric, score in result.metrics.items():
            interval = score_interval(result, metric)
            value = None if result.void else score.score
            yield _between("quality", f"{task}.{metric}", value, interval, outcome=outcome)
        yield _counted("quality", f"{task}.documents", result.documents)
    for group, (metric, pooled) in group_scores(quality).items():
        yield _between(
            "quality",
            f"{group}.{metric}",
            pooled.weighted,
            normal_interval(pooled.weighted, pooled.weighted_stderr),
        )
    if quality.distribution is not None:
        yield from _distribution(quality.distribution)


def _distribution(result: DistributionResult) -> Iterator[Figure]:
    sources = [(result, _PERPLEXITIES)]
    for source, names in [*sources, *([(result.distance, _DISTANCES)] if result.distance else [])]:
        for name in names:
            value = getattr(source, name)
            if value is not None:
                interval = normal_interval(value, getattr(source, f"{name}_stderr", None))
                yield _between("quality", f"distribution.{name}", value, interval)


def _cost(variant: VariantResults) -> Iterator[Figure]:
    cost = variant.cost
    if cost is None:
        return
    yield _counted("cost", "dollars_per_hour", cost.dollars_per_hour)
    for name, size in (("output", cost.batch_size), ("input", cost.input_batch_size)):
        price = getattr(cost, f"dollars_per_million_{name}_tokens")
        if price is not None and size is not None:
            yield cost_figure(variant, f"dollars_per_million_{name}_tokens", price, batch_size=size)
    for row in cost.serving:
        place = f"{'open' if row.load == 'open' else row.mode}_{row.concurrency}"
        for name in ("dollars_per_million_output_tokens", "dollars_per_million_input_tokens"):
            yield _alone("cost", f"serving_{place}.{name}", getattr(row, name))


def cost_figure(variant: VariantResults, metric: str, price: float, *, batch_size: int) -> Figure:
    """A price with the quartiles of the times that its rate comes from: it is in proportion to them."""
    row = variant.speed.row(batch_size) if variant.speed else None
    times = None if row is None else row.tpot_s if "output" in metric else row.ttft_s
    figure = _alone("cost", metric, price)
    if times is None or len(times.samples) < 2 or times.median <= 0:
        return figure
    dollars_per_s = price / times.median
    return figure.model_copy(
        update={
            "low": dollars_per_s * times.lower_quartile,
            "high": dollars_per_s * times.upper_quartile,
            "spread": "quartiles",
            "samples": tuple(dollars_per_s * time for time in times.samples),
        }
    )


def _findings(variant: VariantReport) -> Iterator[Figure]:
    """What each rule observed; its limit stands in the report."""
    names = told_apart([one.metric for one in variant.findings])
    for name, finding in zip(names, variant.findings, strict=True):
        low, high = finding.interval or (None, None)
        yield Figure(
            section="gate",
            metric=name,
            unit=finding.unit,
            value=finding.observed,
            low=low,
            high=high,
            spread="bounds" if finding.interval else "unknown",
            outcome=finding.outcome,
        )


# --- figures of a kind -----------------------------------------------------------------------------------


def _alone(section: Section, metric: str, value: float | None) -> Figure:
    return Figure(section=section, metric=metric, unit=unit_of(metric), value=value)


def _alone_of(section: Section, place: str, row: Value, names: Iterable[str]) -> Iterator[Figure]:
    for name in names:
        value = getattr(row, name)
        if value is not None:
            yield _alone(section, f"{place}.{name}", value)


def _counted(section: Section, metric: str, value: float) -> Figure:
    return _alone(section, metric, value).model_copy(update={"spread": "counted"})


def _unmeasured(section: Section, metric: str, outcome: str) -> Figure:
    return _alone(section, metric, None).model_copy(update={"outcome": outcome})


def _repeated(section: Section, metric: str, times: Distribution) -> Figure:
    """A median with its quartiles; one sample has no spread that tells anything."""
    figure = _alone(section, metric, times.median)
    if len(times.samples) < 2:
        return figure
    return figure.model_copy(
        update={
            "low": times.lower_quartile,
            "high": times.upper_quartile,
            "spread": "quartiles",
            "samples": times.samples,
        }
    )


def _between(
    section: Section,
    metric: str,
    value: float | None,
    interval: tuple[float, float] | None,
    *,
    outcome: str = "measured",
) -> Figure:
    figure = _alone(section, metric, value).model_copy(update={"outcome": outcome})
    if value is None or interval is None:
        return figure
    return figure.model_copy(update={"low": interval[0], "high": interval[1], "spread": "95 % interval"})
