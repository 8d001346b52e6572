"""What a threshold is held against: one figure of a variant, how far it spread, and a sentence that says it. Pure.

A rate's spread is that of the quartiles of the times behind it. A row that its own times deny, or that no memory of
this machine could serve, raises `UnmeasuredError`.

    reading = rate(candidate, batch_size=8, metric="decode")
    reading.value, reading.interval
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from pipeline.comparison import (
    UnmeasuredError,
    refuse_other_versions,
    speed_of,
    usable_number,
    usable_rate,
    usable_row,
)
from pipeline.measured import Distribution
from pipeline.results import VariantResults
from pipeline.roofline import dollars_per_million_tokens
from pipeline.speed_results import SpeedRow
from pipeline.values import Value

RateMetric = Literal["decode", "prefill"]
Percentile = Literal["median", "p90", "p99"]

OTHER_BANDWIDTH = 1.5
"""Ratio of what two variants' rows say of the memory's bandwidth from which one of them can't be true.

Both shares are of one measurement, so that the ratio is 1; of two runs on one machine it is within a few percent.
"""
LEAST_TAIL = 0.5
"""Of the fastest repeat's TPOT, under which a tail of its own gaps can't lie."""


class Reading(Value):
    """A figure, the interval of its quartiles where it has one, whether it was noisy, and a sentence's beginning."""

    value: float
    what: str
    interval: tuple[float, float] | None = None
    noisy: bool = False


def rate(variant: VariantResults, *, batch_size: int, metric: RateMetric) -> Reading:
    """Tokens a second of the whole batch: after the first token (decode), or of the prompts (prefill)."""
    row = usable_row(variant, batch_size)
    if metric == "decode":
        found, times, tokens = row.decode_tokens_per_s, row.tpot_s, row.batch_size
    else:
        found, times, tokens = row.prefill_tokens_per_s, row.ttft_s, row.batch_size * row.prompt_tokens
    what = f"{variant.name}: {metric} rate at batch size {batch_size}"
    value = usable_rate(row, found, times=times, tokens=tokens, what=what)
    assert times is not None, "usable_rate has looked"
    return Reading(
        value=value,
        what=f"{metric} at batch size {batch_size}: {value:.4g} tok/s",
        interval=rate_quartiles(times, tokens=tokens),
        noisy=row.noisy,
    )


def price(variant: VariantResults, *, batch_size: int | None = None) -> Reading:
    """Dollars for a million output tokens at the decode rate of a batch size, by default the one that decodes fastest.

    Raises UnmeasuredError for a stored price that isn't the one that the rate and the price of an hour come to, too.
    """
    cost = variant.cost
    if cost is None:
        raise UnmeasuredError(f"{variant.name}: no price was worked out; give cost.dollars_per_hour")
    hour = usable_number(cost.dollars_per_hour, f"{variant.name}: price of the machine in $/h")
    size = batch_size or cost.batch_size
    if size is None:
        raise UnmeasuredError(f"{variant.name}: no decode rate was measured, so no token has a price")
    decode = rate(variant, batch_size=size, metric="decode")
    assert decode.interval is not None, "rates have quartiles"
    value, low, high = (
        dollars_per_million_tokens(tokens_per_s, dollars_per_hour=hour)
        for tokens_per_s in (decode.value, *reversed(decode.interval))
    )
    if size == cost.batch_size:
        _refuse_other_price(
            cost.dollars_per_million_output_tokens, value, f"{variant.name} at batch size {size}"
        )
    return Reading(
        value=value,
        what=f"${value:.4g} for a million output tokens at batch size {size} ({decode.value:.4g} tok/s, ${hour:g} an "
        "hour)",
        interval=(low, high),
        noisy=decode.noisy,
    )


def _refuse_other_price(told: float | None, price: float, where: str) -> None:
    if told is None or not math.isclose(told, price, rel_tol=1e-6):
        raise UnmeasuredError(
            f"{where}: implausible, ${told} is stored for a million output tokens, the rate and the price of an hour "
            f"come to ${price:.6g}"
        )


def rate_quartiles(times: Distribution, *, tokens: int) -> tuple[float, float]:
    """Quartiles of the rate of `tokens` in such times, all of which are above 0."""
    return tokens / times.upper_quartile, tokens / times.lower_quartile


def decode_rate(variant: VariantResults | None, batch_size: int | None) -> float | None:
    """Tokens a second of the whole batch; None where it wasn't measured, or is void.

    For showing: unlike `rate` it believes what the file says, the interval and the times behind it aren't looked at.
    """
    row = variant.speed.row(batch_size) if variant and variant.speed and batch_size is not None else None
    return row.decode_tokens_per_s if row is not None and row.outcome == "measured" else None


def row_is_noisy(variant: VariantResults | None, batch_size: int | None) -> bool:
    """Whether that rate's times spread more than the recipe allows."""
    row = variant.speed.row(batch_size) if variant and variant.speed and batch_size is not None else None
    return row is not None and row.outcome == "measured" and row.noisy


def smallest_batch(variants: Iterable[VariantResults]) -> int | None:
    """The smallest batch of the workload that was run: one stream's speed, where it holds 1."""
    sizes = [row.batch_size for one in variants if one.speed for row in one.speed.of("batch")]
    return min(sizes, default=None)


def engines_apart(baseline: VariantResults | None, candidate: VariantResults) -> str:
    """Both engines where they differ, "" where not: a ratio across them holds the engines' difference, too."""
    engines = [one.speed.engine if one and one.speed else None for one in (candidate, baseline)]
    return "" if None in engines or engines[0] == engines[1] else f"{engines[0]} against {engines[1]}"


def latency(variant: VariantResults, *, batch_size: int, percentile: Percentile) -> Reading:
    """Seconds a token: the median TPOT of the repeats, or a percentile of all gaps between tokens (ITL).

    A percentile is taken over the gaps of all repeats and has no quartiles; where the row is noisy it is given the
    whole spread of TPOT over the repeats.
    """
    row = usable_row(variant, batch_size)
    where = f"{variant.name} at batch size {batch_size}"
    if row.tpot_s is None:
        raise UnmeasuredError(f"{where}: time per output token was not measured")
    times = row.tpot_s
    if percentile == "median":
        return Reading(
            value=times.median,
            what=f"{times.median:.4g} s a token (median TPOT) at batch size {batch_size}",
            interval=(times.lower_quartile, times.upper_quartile),
            noisy=row.noisy,
        )
    value = _tail(row, times, percentile=percentile, where=where)
    spread = (min(times.samples) / times.median, max(times.samples) / times.median)
    return Reading(
        value=value,
        what=f"{percentile} of the gaps between tokens {value:.4g} s at batch size {batch_size}",
        interval=(value * spread[0], value * spread[1]) if row.noisy else None,
        noisy=row.noisy,
    )


def _tail(row: SpeedRow, times: Distribution, *, percentile: Percentile, where: str) -> float:
    found = row.itl_p90_s if percentile == "p90" else row.itl_p99_s
    value = usable_number(found, f"{where}: {percentile} of the gaps between tokens")
    known = [one for one in (row.itl_p50_s, row.itl_p90_s, row.itl_p99_s) if one is not None]
    if known != sorted(known) or value < LEAST_TAIL * min(times.samples):
        raise UnmeasuredError(
            f"{where}: implausible, gaps of {', '.join(f'{one:.4g}' for one in known)} s at p50, p90 and p99 beside "
            f"{min(times.samples):.4g} s a token of the fastest repeat"
        )
    return value


def first_token(variant: VariantResults, *, batch_size: int) -> Reading:
    """Median time to first token in seconds."""
    row = usable_row(variant, batch_size)
    if row.ttft_s is None:
        raise UnmeasuredError(
            f"{variant.name} at batch size {batch_size}: time to first token was not measured"
        )
    times = row.ttft_s
    return Reading(
        value=times.median,
        what=f"first token after {times.median:.4g} s (median) for {row.prompt_tokens} prompt tokens at batch size "
        f"{batch_size}",
        interval=(times.lower_quartile, times.upper_quartile),
        noisy=row.noisy,
    )


def refuse_other_bandwidth(baseline: VariantResults, candidate: VariantResults) -> None:
    """UnmeasuredError when the candidate's shares of the bandwidth belong to another memory than the baseline's.

    A row's bytes ÷ time ÷ share is the bandwidth that it was held against, and one stage measures that once: a rate
    ten times the device's shows here even where the share beside it was left as it was.
    """
    before, after = (bandwidths(variant) for variant in (baseline, candidate))
    if before and after and max(*before, *after) > OTHER_BANDWIDTH * min(*before, *after):
        raise UnmeasuredError(
            f"{candidate.name}: implausible, its times and shares mean a memory of {min(after) / 1e9:.4g} to "
            f"{max(after) / 1e9:.4g} GB/s, {baseline.name}'s one of {min(before) / 1e9:.4g} to {max(before) / 1e9:.4g}"
        )


def bandwidths(variant: VariantResults) -> list[float]:
    """Bytes a second of the memory that each measured row of the workload was held against."""
    rows = variant.speed.of("batch") if variant.speed else ()
    return [
        row.bytes_read_per_step / row.tpot_s.median / row.bandwidth_share
        for row in rows
        if row.outcome == "measured"
        and row.bytes_read_per_step
        and row.bandwidth_share
        and row.tpot_s is not None
        and row.tpot_s.median > 0
    ]


def drift_share(baseline: VariantResults, candidate: VariantResults) -> float:
    """By how much the machine's own change may have made a ratio of two speeds, as a share; 0 where they took turns.

    In a set timed one after the other every variant may be off by what the baseline had drifted in the end, up or down:
    UnmeasuredError where it couldn't be timed again. Two variants of one run share a drift, those of two runs have two.
    """
    alone = [one for one in map(speed_of, (baseline, candidate)) if one.timed_in_turn is False]
    drifts = {one.drift_percent for one in alone}
    if None in drifts:
        raise UnmeasuredError(
            "timed one after the other, and the baseline couldn't be timed again at the end: a speed-up can't be told "
            "from a machine that changed; run the recipe again"
        )
    times = [1 + drift / 100 for drift in drifts if drift is not None]
    if any(time <= 0 for time in times):
        raise UnmeasuredError("a baseline whose tokens took no time when it was timed again is none")
    return math.prod(max(time, 1 / time) for time in times) - 1


def refuse_other_conditions(
    baseline: VariantResults, candidate: VariantResults, *, across_engines: bool
) -> None:
    """UnmeasuredError when two speeds are of other devices, or of other engines where the rule doesn't allow it."""
    refuse_other_versions(baseline, candidate)
    before, after = speed_of(baseline), speed_of(candidate)
    if before.device != after.device:
        raise UnmeasuredError(f"different devices: {before.device} and {after.device}")
    if before.engine != after.engine and not across_engines:
        raise UnmeasuredError(
            f"different engines, {before.engine} for the baseline and {after.engine} for the candidate; "
            "set across_engines: true in the rule to compare them all the same"
        )
