"""From raw times of serving to rows: throughput, latencies, shares, goodput, gain, and what makes a row void. Pure.

row = summarise_serving(traces, cell=cell, targets=load.targets, ...)
row.output_tokens_per_s.median, row.ttft_s.p99
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from statistics import fmean

from pipeline.engines.base import SessionMemory
from pipeline.errors import StageError
from pipeline.fleet import Targets
from pipeline.measured import Distribution
from pipeline.roofline import dollars_per_million_tokens
from pipeline.serving_load import PREFIX_NEW_TOKENS
from pipeline.serving_measure import PrefixTrace, RequestTrace, ServingTrace
from pipeline.serving_results import (
    Goodput,
    LatencyShares,
    PrefixRow,
    ServedRequest,
    ServingCell,
    ServingCost,
    ServingResult,
    ServingRow,
)
from pipeline.simulation import Percentiles, Replay, percentiles
from pipeline.step_times import MeasuredSteps, StepSample, Term, fit_step_times

FIT_TERMS: tuple[Term, ...] = ("step", "prefill_token", "decode_sequence", "cached_token", "pair")
"""Of a serving engine's step, the surest first; the last ones are left out where the steps can't tell them apart."""


def summarise_serving(
    traces: Sequence[ServingTrace],
    *,
    cell: ServingCell,
    targets: Targets,
    memory: SessionMemory | None,
    warmup_s: Sequence[float],
    max_cv_percent: float,
    gain: Distribution | None = None,
) -> ServingRow:
    """One row from the timed repeats of one cell.

    Void when tokens or whole requests are missing, a step took no time, or fewer prompt tokens were computed than
    the prompts have.
    """
    fields = {
        **cell.model_dump(),
        "requests": len(traces[0].requests),
        "warmup_s": tuple(warmup_s),
        "peak_memory_bytes": memory.peak_bytes if memory else None,
        "kv_cache_bytes": memory.kv_cache_bytes if memory else None,
        "repeats": tuple(
            tuple(_served(one) for one in trace.requests if one.token_times_s) for trace in traces
        ),
    }
    because = next((reason for trace in traces if (reason := _void_reason(trace))), "")
    if because:
        return ServingRow(**fields, outcome="void", because=because)
    requests = [one for trace in traces for one in trace.requests]
    output = Distribution.of([trace.output_tokens_per_s for trace in traces])
    duration = Distribution.of([trace.duration_s for trace in traces])
    return ServingRow(
        **fields,
        outcome="measured",
        duration_s=duration,
        output_tokens_per_s=output,
        input_tokens_per_s=_median(trace.input_tokens / trace.duration_s for trace in traces),
        requests_per_s=_median(len(trace.requests) / trace.duration_s for trace in traces),
        gain=gain,
        ttft_s=_percentiles(one.ttft_s for one in requests),
        tpot_s=_percentiles(tpot for one in requests if (tpot := one.tpot_s) is not None),
        itl_s=_percentiles(gap for one in requests for gap in one.itl_s),
        latency_s=_percentiles(one.latency_s for one in requests),
        wait_s=_waits(requests),
        latency_shares=latency_shares(requests),
        goodput=goodput(traces, targets=targets),
        steps=round(_median(len(trace.steps) for trace in traces)),
        mean_batch=_median(trace.mean_batch for trace in traces),
        prefill_tokens=round(_median(sum(step.prefill_tokens for step in trace.steps) for trace in traces)),
        preemptions=max(trace.preemptions for trace in traces),
        overloaded=_overloaded(traces) if cell.load == "open" else None,
        noisy=is_noisy_serving(traces, max_cv_percent=max_cv_percent, arrivals=cell.load == "open"),
    )


def is_noisy_serving(traces: Sequence[ServingTrace], *, max_cv_percent: float, arrivals: bool) -> bool:
    """Whether output tokens a second spread more than the recipe allows; void repeats are no noise.

    With `arrivals` the rate is that of the requests, however slow the machine is: there the mean latency is judged.
    """
    finished = [trace for trace in traces if trace.duration_s > 0 and not _void_reason(trace)]
    figures = [
        fmean(one.latency_s for one in trace.requests) if arrivals else trace.output_tokens_per_s
        for trace in finished
    ]
    return bool(figures) and Distribution.of(figures).cv_percent > max_cv_percent


def is_noisy_prefix(traces: Sequence[PrefixTrace], *, max_cv_percent: float) -> bool:
    """The same of a cached prefix: of the cold TTFT, and of each repeat's median cached one."""
    cold = [trace.ttft_s[0] for trace in traces]
    cached = [_median(trace.ttft_s[1:]) for trace in traces]
    return any(one and Distribution.of(one).cv_percent > max_cv_percent for one in (cold, cached))


def gain_over_static(
    continuous: Sequence[ServingTrace], static: Sequence[ServingTrace]
) -> Distribution | None:
    """Continuous ÷ static output tokens a second, of repeats that ran one after the other; None without both."""
    pairs = list(zip(continuous, static, strict=False))
    if not pairs or any(_void_reason(trace) for pair in pairs for trace in pair):
        return None
    return Distribution.of([new.output_tokens_per_s / old.output_tokens_per_s for new, old in pairs])


def latency_shares(requests: Sequence[RequestTrace]) -> LatencyShares | None:
    """Waiting, prefill and decode as shares of all requests' latency; None where starts aren't known."""
    total_s = sum(one.latency_s for one in requests)
    starts_s = [one.start_s for one in requests if one.start_s is not None]
    if len(starts_s) < len(requests) or total_s <= 0:
        return None
    waiting_s = sum(start_s - one.arrival_s for start_s, one in zip(starts_s, requests, strict=True))
    first_s = sum(one.ttft_s for one in requests)
    return LatencyShares(
        waiting=waiting_s / total_s,
        prefill=(first_s - waiting_s) / total_s,
        decode=(total_s - first_s) / total_s,
    )


def goodput(traces: Sequence[ServingTrace], *, targets: Targets) -> Goodput | None:
    """Requests that met every target, each on its own: the targets' percentile is not used. None without any."""
    if targets.ttft_s is None and targets.tpot_s is None:
        return None
    good = [sum(_is_good(one, targets) for one in trace.requests) for trace in traces]
    rates = [count / trace.duration_s for count, trace in zip(good, traces, strict=True)]
    return Goodput(
        requests_per_s=_median(rates), share=sum(good) / sum(len(trace.requests) for trace in traces)
    )


def _is_good(request: RequestTrace, targets: Targets) -> bool:
    in_time = targets.ttft_s is None or request.ttft_s <= targets.ttft_s
    fluent = targets.tpot_s is None or request.tpot_s is None or request.tpot_s <= targets.tpot_s
    return in_time and fluent


def _served(request: RequestTrace) -> ServedRequest:
    return ServedRequest(
        prompt_tokens=request.prompt_tokens,
        new_tokens=len(request.token_times_s),
        arrival_s=request.arrival_s,
        start_s=request.start_s,
        first_token_s=request.token_times_s[0],
        end_s=request.token_times_s[-1],
    )


def _void_reason(trace: ServingTrace) -> str:
    asked = sum(one.new_tokens for one in trace.requests)
    unfinished = sum(not one.finished for one in trace.requests)
    if unfinished:
        return (
            f"{unfinished} of {len(trace.requests)} requests never finished: {trace.output_tokens} tokens were "
            f"produced where {asked} were asked for"
        )
    if trace.output_tokens != asked:
        return f"{trace.output_tokens} tokens were produced where {asked} were asked for"
    if min(step.seconds for step in trace.steps) <= 0:
        return "a step took no time: the clock or the device's synchronisation is wrong"
    computed = sum(step.prefill_tokens for step in trace.steps)
    if computed < trace.input_tokens:
        return (
            f"{computed} prompt tokens were computed where the prompts have {trace.input_tokens}: a cached prefix "
            "helped"
        )
    return ""


def _waits(requests: Sequence[RequestTrace]) -> Percentiles | None:
    waits_s = [one.start_s - one.arrival_s for one in requests if one.start_s is not None]
    return _percentiles(waits_s) if len(waits_s) == len(requests) else None


def _overloaded(traces: Sequence[ServingTrace]) -> bool | None:
    """None where it can't be told: the rule needs a queue of more than 3·√n, which few requests can't make."""
    if any(len(trace.requests) - 1 <= 3 * math.sqrt(len(trace.requests)) for trace in traces):
        return None
    found = [replay.overloaded for trace in traces if (replay := replay_of(trace)) is not None]
    return any(found) if len(found) == len(traces) else None


def replay_of(trace: ServingTrace) -> Replay | None:
    """The measured requests as a simulation's, for what is judged alike; None where starts aren't known.

    A request's first step is its start; the blocks in use are not told (0).
    """
    import numpy as np

    starts_s = [one.start_s for one in trace.requests if one.start_s is not None]
    if len(starts_s) < len(trace.requests):
        return None
    return Replay(
        served=np.arange(len(starts_s)),
        arrival_s=np.array([one.arrival_s for one in trace.requests]),
        start_s=np.array(starts_s),
        first_token_s=np.array([one.token_times_s[0] for one in trace.requests]),
        end_s=np.array([one.token_times_s[-1] for one in trace.requests]),
        new_tokens=np.array([one.new_tokens for one in trace.requests]),
        rejected=0,
        busy_s=sum(step.seconds for step in trace.steps),
        sequence_s=trace.mean_batch * sum(step.seconds for step in trace.steps),
        peak_blocks=0,
        preemptions=trace.preemptions,
        steps=len(trace.steps),
        prefill_tokens=sum(step.prefill_tokens for step in trace.steps),
    )


def _median(figures: Iterable[float]) -> float:
    return Distribution.of(list(figures)).median


def _percentiles(figures: Iterable[float]) -> Percentiles | None:
    import numpy as np

    return percentiles(np.array(list(figures), dtype=np.float64))


# --- the prefix, step times, cost ------------------------------------------------------------------------


def summarise_prefix(
    traces: Sequence[PrefixTrace], *, prefix_tokens: int, fresh_tokens: int, max_cv_percent: float
) -> PrefixRow:
    """The cold request and the later ones of each repeat; void unless the counts prove that the prefix was reused."""
    length = prefix_tokens + fresh_tokens
    later = max(count for trace in traces for count in trace.computed_tokens[1:])
    because = next((reason for trace in traces if (reason := _prefix_void(trace, prefix_tokens, length))), "")
    return PrefixRow(
        prefix_tokens=prefix_tokens,
        fresh_tokens=fresh_tokens,
        outcome="void" if because else "measured",
        because=because,
        cold_ttft_s=Distribution.of([trace.ttft_s[0] for trace in traces]),
        cached_ttft_s=Distribution.of([ttft_s for trace in traces for ttft_s in trace.ttft_s[1:]]),
        cold_computed_tokens=max(trace.computed_tokens[0] for trace in traces),
        cached_computed_tokens=later,
        reused_tokens=max(0, length - later),
        noisy=is_noisy_prefix(traces, max_cv_percent=max_cv_percent),
    )


def _prefix_void(trace: PrefixTrace, prefix_tokens: int, length: int) -> str:
    cold, *later = trace.computed_tokens
    if set(trace.produced) != {PREFIX_NEW_TOKENS}:
        return f"{min(trace.produced)} tokens were produced where {PREFIX_NEW_TOKENS} were asked for"
    if min(trace.ttft_s) <= 0:
        return "a step took no time: the clock or the device's synchronisation is wrong"
    if cold < length:
        return f"the first request computed {cold} of its {length} prompt tokens: it found something in the cache"
    if max(later) >= length:
        return f"no prefix was reused: a later request computed all of its {length} prompt tokens"
    if length - min(later) > prefix_tokens:
        return f"{length - min(later)} tokens were not computed, more than the prefix of {prefix_tokens} has"
    return ""


def fit_serving_steps(samples: Sequence[StepSample]) -> MeasuredSteps | None:
    """Step times of continuous batching with the most terms that its steps can tell apart; None with under three."""
    for count in range(len(FIT_TERMS), 2, -1):
        with suppress(StageError):
            return fit_step_times(samples, terms=FIT_TERMS[:count])
    return None


def serving_costs(
    serving: ServingResult | None, *, dollars_per_hour: float | None
) -> tuple[ServingCost, ...]:
    """What a million tokens cost at each measured cell; nothing without a price. An overloaded cell has one, too."""
    if serving is None or dollars_per_hour is None:
        return ()
    return tuple(
        ServingCost(
            **{name: getattr(row, name) for name in ServingCell.model_fields},
            dollars_per_million_output_tokens=dollars_per_million_tokens(
                row.output_tokens_per_s.median, dollars_per_hour=dollars_per_hour
            ),
            dollars_per_million_input_tokens=dollars_per_million_tokens(
                row.input_tokens_per_s, dollars_per_hour=dollars_per_hour
            ),
        )
        for row in serving.rows
        if row.outcome == "measured" and row.output_tokens_per_s and row.input_tokens_per_s
    )
