"""Requests served by a simulated engine: each one's times, their percentiles and rates.

Means hide what users wait for: a percentile of the time to the first token depends on how requests collide. So
the engine's scheduler is played through (`scheduler`), from event to event, over all requests. Pure and
deterministic: four requests of one token each, all there at once, served one after the other:

>>> class OneSecond:
...     def step_s(self, **step: int) -> float:
...         return 1.0
...     def decode_steps_s(self, steps: int, **state: int) -> float:
...         return float(steps)
>>> serving = Serving(max_batch_tokens=8, max_sequences=1, block_tokens=16, cache_blocks=1)
>>> simulate([Request(0.0, 8, 1)] * 4, serving=serving, step_times=OneSecond()).ttft_s.p50
2.5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.scheduler import Scheduler, Serving
from pipeline.step_times import StepTimes
from pipeline.traffic import Request
from pipeline.values import Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Whole = NDArray[np.int64]

__all__ = [
    "Percentiles",
    "Replay",
    "Request",
    "Serving",
    "SimulationResult",
    "percentiles",
    "replay",
    "simulate",
]


class Percentiles(Value):
    """Mean and percentiles in seconds, interpolated between neighbours, of `count` figures."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class SimulationResult(Value):
    """What a run of requests came to. Percentiles are None where no request has the figure.

    `wait_s` is the time until the first piece of the prompt is computed, `ttft_s` until the first token,
    both from the arrival; a request of one token has no TPOT. Rates count from the first arrival to the last
    token. `busy` is the share of that time in which a step ran; `mean_batch` the mean number of
    sequences in a step, weighted by time. `rejected` requests could never fit into the cache and are in no
    other figure. `overloaded`: see `Replay.overloaded`.
    """

    requests: int
    rejected: int
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    latency_s: Percentiles | None
    wait_s: Percentiles | None
    output_tokens: int
    output_tokens_per_s: float | None
    requests_per_s: float | None
    busy: float | None
    mean_batch: float | None
    peak_blocks: int
    preemptions: int
    steps: int
    prefill_tokens: int
    overloaded: bool


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Every served request's times, and the sums over steps.

    The arrays are aligned, in order of arrival; `served` are positions in the list that was simulated.
    `prefill_tokens` counts recomputed tokens too.
    """

    served: Whole
    arrival_s: Floats
    start_s: Floats
    first_token_s: Floats
    end_s: Floats
    new_tokens: Whole
    rejected: int
    busy_s: float
    sequence_s: float
    peak_blocks: int
    preemptions: int
    steps: int
    prefill_tokens: int

    @property
    def ttft_s(self) -> Floats:
        """From the arrival to the first token, of each request."""
        return self.first_token_s - self.arrival_s

    @property
    def latency_s(self) -> Floats:
        """From the arrival to the last token, of each request."""
        return self.end_s - self.arrival_s

    @property
    def wait_s(self) -> Floats:
        """From the arrival to the start of the step that first computes something of the request."""
        return self.start_s - self.arrival_s

    def tpot_s(self, *, skip: int = 0) -> Floats:
        """Seconds a token after the first, of each request from `skip` on with more than one token."""
        many = self.new_tokens[skip:] > 1
        gaps = (self.end_s - self.first_token_s)[skip:][many]
        result: Floats = gaps / (self.new_tokens[skip:][many] - 1)
        return result

    @property
    def overloaded(self) -> bool:
        """Whether requests came faster than they were served for as long as they came.

        The queue that each arrival finds must have grown in the long run (last quarter of the arrivals
        against the second) and at the last arrival be longer than chance makes it at exactly full load: with
        Poisson arrivals and equal services n arrivals leave more than 3·√n waiting in about one case of 370.
        """
        import numpy as np

        count = len(self.served)
        started = np.searchsorted(np.sort(self.start_s), self.arrival_s, side="right")
        queue = np.maximum(np.arange(count) - started, 0)
        if count < 8 or queue[-1] <= 3 * math.sqrt(count):
            return False
        quarter = count // 4
        return bool(queue[-quarter:].mean() > 1.5 * queue[quarter : 2 * quarter].mean())

    def result(self, *, skip: int = 0) -> SimulationResult:
        """The figures; percentiles leave the first `skip` served requests out, which found an empty machine."""
        empty = len(self.served) == 0
        span_s = 0.0 if empty else float(self.end_s.max() - self.arrival_s[0])
        tokens = int(self.new_tokens.sum())
        return SimulationResult(
            requests=len(self.served),
            rejected=self.rejected,
            ttft_s=percentiles(self.ttft_s[skip:]),
            tpot_s=percentiles(self.tpot_s(skip=skip)),
            latency_s=percentiles(self.latency_s[skip:]),
            wait_s=percentiles(self.wait_s[skip:]),
            output_tokens=tokens,
            output_tokens_per_s=None if empty else tokens / span_s,
            requests_per_s=None if empty else len(self.served) / span_s,
            busy=None if empty else self.busy_s / span_s,
            mean_batch=None if empty else self.sequence_s / self.busy_s,
            peak_blocks=self.peak_blocks,
            preemptions=self.preemptions,
            steps=self.steps,
            prefill_tokens=self.prefill_tokens,
            overloaded=self.overloaded,
        )


def percentiles(figures: Floats) -> Percentiles | None:
    """Mean and percentiles of an array of seconds; None of an empty one."""
    import numpy as np

    if len(figures) == 0:
        return None
    p50, p90, p95, p99 = np.percentile(figures, (50, 90, 95, 99)).tolist()
    return Percentiles(count=len(figures), mean=float(figures.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


def simulate(requests: Sequence[Request], *, serving: Serving, step_times: StepTimes) -> SimulationResult:
    """Serve `requests` and sum up. Raises ValueError unless they are in order of arrival and of at least one token."""
    return replay(requests, serving=serving, step_times=step_times).result()


def replay(requests: Sequence[Request], *, serving: Serving, step_times: StepTimes) -> Replay:
    """Serve `requests` and keep each one's times. Raises ValueError as `simulate` does."""
    import numpy as np

    _check(requests)
    served = [place for place, request in enumerate(requests) if serving.fits(request)]
    engine = Scheduler([requests[place] for place in served], serving=serving, step_times=step_times)
    engine.run()
    return Replay(
        served=np.array(served, dtype=np.int64),
        arrival_s=np.array(engine.arrival, dtype=np.float64),
        start_s=np.array(engine.start, dtype=np.float64),
        first_token_s=np.array(engine.first, dtype=np.float64),
        end_s=np.array(engine.end, dtype=np.float64),
        new_tokens=np.array(engine.new, dtype=np.int64),
        rejected=len(requests) - len(served),
        busy_s=engine.busy_s,
        sequence_s=engine.sequence_s,
        peak_blocks=engine.peak,
        preemptions=engine.preemptions,
        steps=engine.steps,
        prefill_tokens=engine.prefill_tokens,
    )


def _check(requests: Sequence[Request]) -> None:
    before = 0.0
    for place, request in enumerate(requests):
        if not (math.isfinite(request.arrival_s) and request.arrival_s >= before):
            raise ValueError(f"request {place} comes at {request.arrival_s} s, after one at {before} s")
        if request.prompt_tokens < 1 or request.new_tokens < 1:
            raise ValueError(f"request {place} has no token to read or none to write: {request}")
        before = request.arrival_s
