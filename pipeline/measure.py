"""The clock: how prefill and decode are timed, and how raw times become figures.

Engines yield steps and never read a clock. The device is synchronised before each reading of a monotonic
clock; prompts are fresh for every repeat; produced tokens are counted, not assumed. Definitions:

- TTFT = time of the prefill with its first token;
- TPOT = (t_last − t_first) ÷ (n − 1), missing for a single token;
- aggregate decode rate = batch × (n − 1) ÷ (t_last − t_first); the first token belongs to the prefill;
- prefill rate = batch × prompt tokens ÷ TTFT.

    trace = time_generation(session, prompts=prompts, new_tokens=64, clock=time.perf_counter)
    row = summarise([trace, trace, trace], ...)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from pipeline.engines.base import Session
from pipeline.results import Distribution, SpeedRow
from pipeline.roofline import PLAUSIBLE_SHARE, bandwidth_share, plausible
from pipeline.values import Value

Clock = Callable[[], float]


class GenerationTrace(Value):
    """Raw times of one batch, in seconds from the start of the prefill.

    `token_times_s[0]` is the first token's; `produced` counts the tokens each step really returned.
    """

    batch_size: int
    prompt_tokens: int
    token_times_s: Annotated[tuple[float, ...], Field(min_length=1)]
    produced: tuple[int, ...]

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
    session: Session, *, prompts: Sequence[Sequence[int]], new_tokens: int, clock: Clock
) -> GenerationTrace:
    """Run one batch to exactly `new_tokens` tokens a sequence and time every step."""
    session.synchronize()
    start = clock()
    produced = [len(session.prefill(prompts, new_tokens=new_tokens))]
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


def summarise(
    traces: Sequence[GenerationTrace],
    *,
    new_tokens: int,
    warmup_s: Sequence[float],
    bytes_read_per_step: int | None,
    read_bandwidth_bytes_per_s: float | None,
    peak_memory_bytes: int | None,
    max_cv_percent: float,
    last_level_cache_bytes: int | None,
) -> SpeedRow:
    """One row from the timed repeats of one shape: medians, spread, share of the measured bandwidth.

    The share is decode steps per second × bytes read per step ÷ measured read bandwidth. A row is void when a
    token is missing, a step took no time or the share can't be true (see `roofline.plausible`).
    """
    first = traces[0]
    expected = first.batch_size * new_tokens
    produced = {trace.produced_tokens for trace in traces}
    tpot = [trace.tpot_s for trace in traces if trace.tpot_s is not None]
    rates = [rate for trace in traces if (rate := trace.decode_tokens_per_s) is not None]
    gaps = [gap for trace in traces for gap in trace.itl_s]
    decode = Distribution.of(rates).median if rates else None
    share = None
    believable = True
    if tpot and min(tpot) > 0 and bytes_read_per_step and read_bandwidth_bytes_per_s:
        share = bandwidth_share(
            1 / Distribution.of(tpot).median,
            read_bytes_per_step=bytes_read_per_step,
            bandwidth_bytes_per_s=read_bandwidth_bytes_per_s,
        )
        believable = plausible(
            share, read_bytes_per_step=bytes_read_per_step, last_level_cache_bytes=last_level_cache_bytes
        )
    because = _void_reason(produced, expected, traces)
    if share is not None and share > PLAUSIBLE_SHARE and believable:
        share = None  # the processor's cache serves a model this small: no share of the memory's bandwidth
    if not because and not believable:
        because = f"decoding would read {share:.2f} × the measured memory bandwidth, which can't be"
    return SpeedRow(
        batch_size=first.batch_size,
        prompt_tokens=first.prompt_tokens,
        new_tokens=new_tokens,
        outcome="void" if because else "measured",
        because=because,
        ttft_s=Distribution.of([trace.ttft_s for trace in traces]),
        tpot_s=Distribution.of(tpot) if tpot else None,
        itl_p50_s=percentile(gaps, 0.50),
        itl_p90_s=percentile(gaps, 0.90),
        itl_p99_s=percentile(gaps, 0.99),
        prefill_tokens_per_s=Distribution.of([trace.prefill_tokens_per_s for trace in traces]).median
        if all(trace.ttft_s > 0 for trace in traces)
        else None,
        decode_tokens_per_s=decode,
        decode_tokens_per_s_per_request=decode / first.batch_size if decode else None,
        produced_tokens=first.produced_tokens,
        bytes_read_per_step=bytes_read_per_step,
        bandwidth_share=share,
        peak_memory_bytes=peak_memory_bytes,
        warmup_s=tuple(warmup_s),
        noisy=is_noisy(traces, max_cv_percent=max_cv_percent),
    )


def _void_reason(produced: set[int], expected: int, traces: Sequence[GenerationTrace]) -> str:
    if produced != {expected}:
        return f"{min(produced)} tokens were produced where {expected} were asked for"
    if min(time for trace in traces for time in (trace.ttft_s, *trace.itl_s)) <= 0:
        return "a step took no time: the clock or the device's synchronisation is wrong"
    return ""
