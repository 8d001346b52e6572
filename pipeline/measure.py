"""The clock: how prefill and decode are timed, and how raw times become figures.

Engines yield steps and never read a clock. The device is synchronised before each reading of a monotonic
clock; prompts are fresh for every repeat; produced tokens are counted, not assumed. Definitions:

- TTFT = time of the prefill with its first token;
- TPOT = (t_last − t_first) ÷ (n − 1), missing for a single token;
- aggregate decode rate = batch × (n − 1) ÷ (t_last − t_first); the first token belongs to the prefill;
- prefill rate = batch × prompt tokens ÷ TTFT.

    trace = time_generation(session, prompts=prompts, new_tokens=64, clock=time.perf_counter)
    row = summarise([trace, trace, trace], shape=shape, ...)
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from pipeline.engines.base import Session
from pipeline.measured import Distribution
from pipeline.roofline import PLAUSIBLE_SHARE, bandwidth_share, plausible
from pipeline.speed_results import SpeedRow, SpeedShape
from pipeline.values import Value

Clock = Callable[[], float]

SATURATED_GAIN = 1.2
"""A doubled batch that decodes less than this much faster has reached the arithmetic."""
FREE_STEP = 1.25
"""A step that takes at most this much longer than a single stream's is part of batching's free lunch."""


class GenerationTrace(Value):
    """Raw times of one batch, in seconds from the start of the prefill.

    `token_times_s[0]` is the first token's; `produced` counts the tokens each step really returned; `energy_j` are
    the joules of all of it, None where the device doesn't tell.
    """

    batch_size: int
    prompt_tokens: int
    token_times_s: Annotated[tuple[float, ...], Field(min_length=1)]
    produced: tuple[int, ...]
    energy_j: float | None = None

    @property
    def ttft_s(self) -> float:
        """Prefill, first token included."""
        return self.token_times_s[0]

    @property
    def produced_tokens(self) -> int:
        """Tokens of the whole batch, first ones included."""
        return sum(self.produced)

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None when there is only one."""
        steps = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / steps if steps else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between tokens."""
        times = self.token_times_s
        return tuple(after - before for before, after in itertools.pairwise(times))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens of the batch ÷ TTFT."""
        return self.batch_size * self.prompt_tokens / self.ttft_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens produced after the first of each sequence ÷ the time they took."""
        span = self.token_times_s[-1] - self.token_times_s[0]
        return sum(self.produced[1:]) / span if len(self.token_times_s) > 1 and span > 0 else None


def random_prompts(
    *, batch_size: int, prompt_tokens: int, vocabulary_tokens: int, seed: int
) -> list[list[int]]:
    """Uniform token ids [batch][tokens] in 0 … vocabulary_tokens − 1; another seed gives other prompts."""
    generator = random.Random(seed)
    return [[generator.randrange(vocabulary_tokens) for _ in range(prompt_tokens)] for _ in range(batch_size)]


def time_generation(
    session: Session,
    *,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    clock: Clock,
    chunk_tokens: int | None = None,
) -> GenerationTrace:
    """Run one batch to exactly `new_tokens` tokens a sequence and time every step; a prefill in chunks is one."""
    session.synchronize()
    start = clock()
    produced = [len(session.prefill(prompts, new_tokens=new_tokens, chunk_tokens=chunk_tokens))]
    session.synchronize()
    times = [clock() - start]
    for _ in range(new_tokens - 1):
        produced.append(len(session.decode_step()))
        session.synchronize()
        times.append(clock() - start)
    return GenerationTrace(
        batch_size=len(prompts),
        prompt_tokens=len(prompts[0]),
        token_times_s=tuple(times),
        produced=tuple(produced),
    )


def percentile(samples: Sequence[float], share: float) -> float | None:
    """Linear interpolation between order statistics (NumPy's default); None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def is_noisy(traces: Sequence[GenerationTrace], *, max_cv_percent: float) -> bool:
    """Whether TTFT or TPOT spreads more than the recipe allows."""
    tpot = [trace.tpot_s for trace in traces if trace.tpot_s is not None]
    spreads = [Distribution.of([trace.ttft_s for trace in traces]).cv_percent]
    if tpot:
        spreads.append(Distribution.of(tpot).cv_percent)
    return max(spreads) > max_cv_percent


class Work(Value):
    """What the steps of one shape must read and compute; None where unknown.

    `prefill_flops` are those of the whole batch's prompts.
    """

    bytes_read_per_step: int | None
    prefill_flops: float | None


class Ceilings(Value):
    """What the device can do, for the shares of it that are reached; None where unknown.

    The bandwidth and the FLOP/s (at the type of the arithmetic, and of the fastest type) are measured, the sheet's
    bandwidth is published.
    """

    read_bandwidth_bytes_per_s: float | None
    sheet_bandwidth_bytes_per_s: float | None
    matmul_flops_per_s: float | None
    fastest_flops_per_s: float | None
    last_level_cache_bytes: int | None


class _Reached(NamedTuple):
    """A share of a ceiling; None when it can't be told. `because` says why it can't be true."""

    share: float | None = None
    because: str = ""


def summarise(
    traces: Sequence[GenerationTrace],
    *,
    shape: SpeedShape,
    warmup_s: Sequence[float],
    work: Work,
    ceilings: Ceilings,
    peak_memory_bytes: int | None,
    max_cv_percent: float,
) -> SpeedRow:
    """One row from the timed repeats of one shape: medians, spread, shares of what the device can do.

    A row is void when a token is missing, a step took no time, or it would have read more than the measured
    bandwidth (see `roofline.plausible`) or computed more than the FLOP/s measured at any type.
    """
    tpots = [trace.tpot_s for trace in traces if trace.tpot_s is not None]
    ttft = Distribution.of([trace.ttft_s for trace in traces])
    tpot = Distribution.of(tpots) if tpots else None
    rates = [rate for trace in traces if (rate := trace.decode_tokens_per_s) is not None]
    gaps = [gap for trace in traces for gap in trace.itl_s]
    decode = Distribution.of(rates).median if rates else None
    reading = _bandwidth_reached(tpot, read_bytes=work.bytes_read_per_step, ceilings=ceilings)
    computing = _flops_reached(ttft, flops=work.prefill_flops, ceilings=ceilings)
    because = _void_reason(traces, expected=shape.batch_size * shape.new_tokens)
    because = because or reading.because or computing.because
    return SpeedRow(
        **shape.model_dump(),
        outcome="void" if because else "measured",
        because=because,
        ttft_s=ttft,
        tpot_s=tpot,
        itl_p50_s=percentile(gaps, 0.50),
        itl_p90_s=percentile(gaps, 0.90),
        itl_p99_s=percentile(gaps, 0.99),
        prefill_tokens_per_s=_prefill_rate(traces),
        decode_tokens_per_s=decode,
        decode_tokens_per_s_per_request=decode / shape.batch_size if decode else None,
        produced_tokens=traces[0].produced_tokens,
        bytes_read_per_step=work.bytes_read_per_step,
        bandwidth_share=reading.share,
        sheet_bandwidth_share=_sheet_share(reading.share, ceilings),
        prefill_flops_share=computing.share,
        peak_memory_bytes=peak_memory_bytes,
        warmup_s=tuple(warmup_s),
        noisy=is_noisy(traces, max_cv_percent=max_cv_percent),
        joules_per_output_token=_joules_per_output_token(traces),
    )


def _joules_per_output_token(traces: Sequence[GenerationTrace]) -> Distribution | None:
    """Of whole repeats; missing unless all of them have it, and for a prefill alone, where it would mislead.

    Leaving out repeats over which a coarse counter stood still would keep those that it moved for too far.
    """
    samples = [
        trace.energy_j / trace.produced_tokens
        for trace in traces
        if trace.energy_j is not None and trace.tpot_s is not None and trace.produced_tokens
    ]
    return Distribution.of(samples) if samples and len(samples) == len(traces) else None


def _prefill_rate(traces: Sequence[GenerationTrace]) -> float | None:
    if min(trace.ttft_s for trace in traces) <= 0:
        return None
    return Distribution.of([trace.prefill_tokens_per_s for trace in traces]).median


def _bandwidth_reached(tpot: Distribution | None, *, read_bytes: int | None, ceilings: Ceilings) -> _Reached:
    """Decode steps per second × bytes read per step ÷ measured read bandwidth."""
    bandwidth = ceilings.read_bandwidth_bytes_per_s
    if tpot is None or min(tpot.samples) <= 0 or not read_bytes or not bandwidth:
        return _Reached()
    share = bandwidth_share(1 / tpot.median, read_bytes_per_step=read_bytes, bandwidth_bytes_per_s=bandwidth)
    if share <= PLAUSIBLE_SHARE:
        return _Reached(share)
    cache_bytes = ceilings.last_level_cache_bytes
    if plausible(share, read_bytes_per_step=read_bytes, last_level_cache_bytes=cache_bytes):
        # The processor's cache serves a model this small: no share of the memory's bandwidth.
        return _Reached()
    return _Reached(share, f"decoding would read {share:.2f} × the measured memory bandwidth, which can't be")


def _sheet_share(share: float | None, ceilings: Ceilings) -> float | None:
    """The same steps as a share of the published bandwidth."""
    measured, sheet = ceilings.read_bandwidth_bytes_per_s, ceilings.sheet_bandwidth_bytes_per_s
    return share * measured / sheet if share is not None and measured and sheet else None


def _flops_reached(ttft: Distribution, *, flops: float | None, ceilings: Ceilings) -> _Reached:
    """The prompts' FLOPs ÷ TTFT ÷ FLOP/s measured in a linear layer at the type of the arithmetic.

    Kernels for quantized weights may compute in another type than they are given: a CPU without 16-bit arithmetic
    multiplies INT8 weights faster than 16-bit ones. So only more than the fastest type can't be true.
    """
    if min(ttft.samples) <= 0 or not flops or not ceilings.matmul_flops_per_s:
        return _Reached()
    flops_per_s = flops / ttft.median
    share = flops_per_s / ceilings.matmul_flops_per_s
    if share <= PLAUSIBLE_SHARE:
        return _Reached(share)
    fastest = flops_per_s / max(ceilings.matmul_flops_per_s, ceilings.fastest_flops_per_s or 0.0)
    if fastest <= PLAUSIBLE_SHARE:
        return _Reached()  # arithmetic of another type: no share of this one's
    return _Reached(
        fastest, f"the prefill would compute {fastest:.2f} × the fastest measured FLOP/s, which can't be"
    )


def _void_reason(traces: Sequence[GenerationTrace], *, expected: int) -> str:
    produced = {trace.produced_tokens for trace in traces}
    if produced != {expected}:
        return f"{min(produced)} tokens were produced where {expected} were asked for"
    if min(time for trace in traces for time in (trace.ttft_s, *trace.itl_s)) <= 0:
        return "a step took no time: the clock or the device's synchronisation is wrong"
    return ""


# --- the batch sweep -------------------------------------------------------------------------------------


class _Batch(NamedTuple):
    """A measured batch of the workload: sequences, tokens per second of all of them, seconds a step."""

    size: int
    tokens_per_s: float
    step_s: float


def break_even_batch(rows: Sequence[SpeedRow]) -> float | None:
    """How many single streams the best batch is worth: highest aggregate decode rate ÷ that of batch 1.

    Under a roofline this is the batch from which a step computes longer than it reads. None when batch 1 or a
    second size wasn't measured, and when the sweep didn't reach it: when its two largest sizes still gain 20 %
    or more a doubling.
    """
    sweep = _sweep(rows)
    if not sweep:
        return None
    before, last = sweep[-2:]
    gain = last.tokens_per_s / before.tokens_per_s
    if gain ** (1 / math.log2(last.size / before.size)) >= SATURATED_GAIN:
        return None
    return max(batch.tokens_per_s for batch in sweep) / sweep[0].tokens_per_s


def free_lunch_batch(rows: Sequence[SpeedRow]) -> int | None:
    """Largest measured batch whose step takes at most 1.25 × that of batch 1.

    None when batch 1 or a second size wasn't measured.
    """
    sweep = _sweep(rows)
    if not sweep:
        return None
    return max(batch.size for batch in sweep if batch.step_s <= FREE_STEP * sweep[0].step_s)


def _sweep(rows: Sequence[SpeedRow]) -> list[_Batch]:
    """The workload's measured batches by size; empty without batch 1 and a second one."""
    sweep = sorted(
        _Batch(row.batch_size, row.decode_tokens_per_s, row.tpot_s.median)
        for row in rows
        if row.test == "batch" and row.outcome == "measured" and row.decode_tokens_per_s and row.tpot_s
    )
    return sweep if len(sweep) > 1 and sweep[0].size == 1 else []
