"""How many devices a stream of requests needs, each serving its share, for the waits that users accept.

The smallest number is searched for by simulation: traffic over capacity can't be served by waiting longer, and
below capacity the wait for a first token grows steeply with the load, differently for every mix of lengths. A
device's capacity is the rate at which requests start when the queue is never empty. Pure.

    fleet = devices_needed(traffic, serving=serving, step_times=step_times, targets=Targets(ttft_s=1.0))
    fleet.devices, fleet.load
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline.scheduler import Serving
from pipeline.simulation import Percentiles, Replay, percentiles, replay
from pipeline.step_times import StepTimes
from pipeline.traffic import Request, Traffic, split_round_robin
from pipeline.values import Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LEAST_REQUESTS = 6_000
"""Simulated for the final figures."""
BEYOND_PERCENTILE = 50
"""So many of them lie beyond the targets' percentile at least."""
ROUGH_REQUESTS = 800
"""Simulated for each number that the search only passes by."""
TRACE_REQUESTS = 20_000
"""Of a trace's devices as many are simulated as get so many requests together: their shares are alike."""
MOST_PREFILL_STEPS = 30_000
"""Of a full trial."""
APART_S = 1e5
"""Between requests that are to have a device to themselves."""

Seconds = Annotated[float, Field(gt=0)]


class Targets(Value):
    """The longest waits allowed, at a percentile of the requests; None sets no limit."""

    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    percentile: Annotated[float, Field(gt=0, le=99.9)] = 99.0


class FleetSize(Value):
    """The smallest number of devices that meets the targets, and how it is there.

    `devices` is None when no number does, and `reason` says why; the figures of a loaded device are then None
    too. `load` is the traffic over what that many devices could serve; `mean_batch` the requests in a device at
    once, its rate × the mean time from start to end (Little's law).
    `unloaded_*` are the targets' percentile for requests that have a device to themselves. Percentiles are
    over the requests of all simulated devices; of Poisson traffic the first tenth or more, which found an
    empty device, is left out.
    """

    devices: int | None
    reason: str = ""
    capacity_requests_per_s: float | None = None
    load: float | None = None
    mean_batch: float | None = None
    output_tokens_per_s: float | None = None
    """Of one device, at this load."""
    ttft_s: Percentiles | None = None
    tpot_s: Percentiles | None = None
    latency_s: Percentiles | None = None
    target_ttft_s: float | None = None
    target_tpot_s: float | None = None
    """What stands beside the targets: the figures at their percentile."""
    unloaded_ttft_s: float | None = None
    unloaded_tpot_s: float | None = None
    preemptions: int = 0
    simulated_requests: int = 0


def devices_needed(
    traffic: Traffic | Sequence[Request],
    *,
    serving: Serving,
    step_times: StepTimes,
    targets: Targets,
    seed: int = 0,
) -> FleetSize:
    """The smallest number of equal devices for `traffic`, or why no number will do.

    Poisson traffic goes to the devices at random, a trace's requests in turn. Simulated per candidate are at
    least 6,000 requests and ten times as many as a device holds at once, which is at least ten times as long as
    a request stays; the search passes other numbers by with fewer. A 99th percentile near full load is still
    an estimate: other requests of the same kind can move the answer by one device in eight or so.
    """
    search = _Search(traffic, serving=serving, step_times=step_times, targets=targets, seed=seed)
    longest = search.longest
    if not serving.fits(longest):
        blocks = serving.blocks(longest.prompt_tokens + longest.new_tokens - 1)
        return FleetSize(
            devices=None,
            reason=f"a request of {longest.prompt_tokens} + {longest.new_tokens} tokens needs {blocks} blocks of "
            f"{serving.block_tokens} tokens; a device's KV cache has {serving.cache_blocks}",
        )
    ttft_s, tpot_s = search.at_target(search.unloaded(ROUGH_REQUESTS))
    if not search.allows(ttft_s, tpot_s):  # perhaps only by the sample's chance
        ttft_s, tpot_s = search.at_target(search.unloaded(search.full_count))
    for name, wait_s, limit_s in (("TTFT", ttft_s, targets.ttft_s), ("TPOT", tpot_s, targets.tpot_s)):
        if wait_s is not None and limit_s is not None and wait_s > limit_s:
            reason = (
                f"the {name} target of {limit_s:.4g} s is below the {wait_s:.4g} s that requests take with a "
                f"device to themselves (percentile {targets.percentile:g})"
            )
            return FleetSize(devices=None, reason=reason, unloaded_ttft_s=ttft_s, unloaded_tpot_s=tpot_s)
    found = search.smallest()
    return found.model_copy(update={"unloaded_ttft_s": ttft_s, "unloaded_tpot_s": tpot_s})


@dataclass(frozen=True)
class _Trial:
    """A number of devices, simulated."""

    devices: int
    replays: list[Replay]
    skip: int


class _Search:
    """The search's fixed inputs, and what follows from them alone."""

    def __init__(
        self,
        traffic: Traffic | Sequence[Request],
        *,
        serving: Serving,
        step_times: StepTimes,
        targets: Targets,
        seed: int,
    ) -> None:
        self.traffic, self.serving, self.step_times = traffic, serving, step_times
        self.targets, self.seed = targets, seed
        if isinstance(traffic, Traffic):
            self.longest = traffic.longest
            self.requests_per_s: float | None = traffic.requests_per_s
            self.sample = traffic.requests(ROUGH_REQUESTS, seed=seed)
        else:
            if not traffic:
                raise ValueError("the trace holds no request")
            self.longest = max(traffic, key=lambda one: one.prompt_tokens + one.new_tokens)
            span_s = traffic[-1].arrival_s - traffic[0].arrival_s
            self.requests_per_s = (len(traffic) - 1) / span_s if span_s > 0 else None
            self.sample = list(traffic[:ROUGH_REQUESTS])
        tokens = sum(one.prompt_tokens + one.new_tokens / 2 for one in self.sample) / len(self.sample)
        held = math.ceil(serving.cache_blocks * serving.block_tokens / tokens)
        self.held = max(1, min(serving.max_sequences, held))
        """Sequences that a full device holds at once."""

    @property
    def full_count(self) -> int:
        """Requests of a full trial, of which enough lie beyond the percentile when a tenth is left out."""
        beyond = BEYOND_PERCENTILE / (1 - self.targets.percentile / 100) / 0.9
        count = max(LEAST_REQUESTS, math.ceil(beyond), 10 * self.held)
        # Prompts of many steps each are simulated step by step: fewer of them, or a plan would take a minute.
        mean_prompt = sum(one.prompt_tokens for one in self.sample) / len(self.sample)
        steps = mean_prompt / self.serving.max_batch_tokens
        return min(count, max(ROUGH_REQUESTS, math.ceil(MOST_PREFILL_STEPS / steps)))

    def unloaded(self, count: int) -> _Trial:
        """`count` requests (or as many as a trace has) that never meet."""
        if isinstance(self.traffic, Traffic):
            source: Sequence[Request] = self.traffic.requests(count, seed=self.seed)
        else:
            source = self.traffic[:count]
        apart = [
            Request(place * APART_S, one.prompt_tokens, one.new_tokens) for place, one in enumerate(source)
        ]
        return _Trial(0, [self._replay(apart)], 0)

    def capacity_requests_per_s(self) -> float:
        """Requests that a device starts a second when all of them wait from the beginning.

        The slope of starts over time (least squares) once the device has been filled twice.
        """
        import numpy as np

        count = max(LEAST_REQUESTS // 2, 8 * self.held)
        if isinstance(self.traffic, Traffic):
            source: Sequence[Request] = self.traffic.requests(count, seed=self.seed)
        else:
            source = self.traffic
        burst = [
            Request(0.0, one.prompt_tokens, one.new_tokens)
            for one in (source[place % len(source)] for place in range(count))
        ]
        start_s = np.sort(self._replay(burst).start_s)[2 * self.held :]
        order = np.arange(len(start_s))
        return float(np.cov(start_s, order)[0, 1] / np.var(start_s, ddof=1))

    def smallest(self) -> FleetSize:
        """The smallest number that passes: found roughly, then around there in full."""
        capacity = self.capacity_requests_per_s()
        enough = 1 if self.requests_per_s is None else math.floor(self.requests_per_s / capacity) + 1
        if not isinstance(self.traffic, Traffic):
            enough = min(enough, len(self.traffic))
        # Traffic without an end can't exceed what is served; a trace ends, and may be waited for.
        least = enough if isinstance(self.traffic, Traffic) else 1
        most = self._most(enough)
        full: dict[int, _Trial] = {}

        def rough_passes(devices: int) -> bool:
            return self.passes(self.trial(devices, full=False))

        def full_passes(devices: int) -> bool:
            full[devices] = self.trial(devices, full=True)
            return self.passes(full[devices])

        rough = _smallest_passing(rough_passes, least=least, most=most, start=enough)
        found = _smallest_passing(full_passes, least=least, most=most, start=rough or most)
        if found is None:
            reason = f"the targets aren't met even with {most} devices, which leave each nearly idle"
            return FleetSize(devices=None, reason=reason, capacity_requests_per_s=capacity)
        return self._size(full[found], capacity)

    def _most(self, enough: int) -> int:
        """Devices on which requests hardly ever meet: each idle for 99 % of the time, or with one request."""
        each_alone = math.inf if isinstance(self.traffic, Traffic) else len(self.traffic)
        if self.requests_per_s is None:
            return int(each_alone)
        latency_s = float(self.unloaded(ROUGH_REQUESTS).replays[0].latency_s.mean())
        return max(enough, int(min(each_alone, math.ceil(self.requests_per_s * latency_s * 100))))

    def trial(self, devices: int, *, full: bool) -> _Trial:
        """Simulate that many devices; one stands for all where the traffic is Poisson."""
        if isinstance(self.traffic, Traffic):
            count = self.full_count if full else max(ROUGH_REQUESTS, 4 * self.held)
            skip = max(count // 10, min(self.held, count // 4))
            requests = self.traffic.requests(count, seed=self.seed, devices=devices)
            return _Trial(devices, [self._replay(requests)], skip)
        shares = split_round_robin(self.traffic, devices=devices)
        simulated = math.ceil(min(1.0, TRACE_REQUESTS / len(self.traffic)) * devices)
        return _Trial(devices, [self._replay(share) for share in shares[:simulated] if share], 0)

    def passes(self, trial: _Trial) -> bool:
        """Whether both targets are met; without any, whether the devices keep up."""
        if self.targets.ttft_s is None and self.targets.tpot_s is None:
            return not any(one.overloaded for one in trial.replays)
        return self.allows(*self.at_target(trial))

    def allows(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Whether these waits, at the targets' percentile, are within the targets."""
        return all(
            wait_s is None or limit_s is None or wait_s <= limit_s
            for wait_s, limit_s in ((ttft_s, self.targets.ttft_s), (tpot_s, self.targets.tpot_s))
        )

    def at_target(self, trial: _Trial) -> tuple[float | None, float | None]:
        """TTFT and TPOT at the targets' percentile."""
        import numpy as np

        ttft_s, tpot_s = _pooled(trial)[:2]
        at = self.targets.percentile
        return (
            float(np.percentile(ttft_s, at)) if len(ttft_s) else None,
            float(np.percentile(tpot_s, at)) if len(tpot_s) else None,
        )

    def _replay(self, requests: Sequence[Request]) -> Replay:
        return replay(requests, serving=self.serving, step_times=self.step_times)

    def _size(self, trial: _Trial, capacity: float) -> FleetSize:
        ttft_s, tpot_s, latency_s = _pooled(trial)
        target_ttft_s, target_tpot_s = self.at_target(trial)
        rate = self.requests_per_s
        each = None if rate is None else rate / trial.devices
        stays_s, tokens = _stays(trial)
        return FleetSize(
            devices=trial.devices,
            capacity_requests_per_s=capacity,
            load=None if each is None else each / capacity,
            mean_batch=None if each is None else each * stays_s,
            output_tokens_per_s=None if each is None else each * tokens,
            ttft_s=percentiles(ttft_s),
            tpot_s=percentiles(tpot_s),
            latency_s=percentiles(latency_s),
            target_ttft_s=target_ttft_s,
            target_tpot_s=target_tpot_s,
            preemptions=sum(one.preemptions for one in trial.replays),
            simulated_requests=sum(len(one.served) for one in trial.replays),
        )


def _stays(trial: _Trial) -> tuple[float, float]:
    """Mean seconds from start to end, and mean tokens of an answer."""
    import numpy as np

    stays_s = np.concatenate([(one.end_s - one.start_s)[trial.skip :] for one in trial.replays])
    tokens = np.concatenate([one.new_tokens[trial.skip :] for one in trial.replays])
    return float(stays_s.mean()), float(tokens.mean())


def _pooled(trial: _Trial) -> tuple[Floats, Floats, Floats]:
    """TTFT, TPOT and latency of the requests of all simulated devices."""
    import numpy as np

    return (
        np.concatenate([one.ttft_s[trial.skip :] for one in trial.replays]),
        np.concatenate([one.tpot_s(skip=trial.skip) for one in trial.replays]),
        np.concatenate([one.latency_s[trial.skip :] for one in trial.replays]),
    )


def _smallest_passing(passes: Callable[[int], bool], *, least: int, most: int, start: int) -> int | None:
    """The smallest number from `least` to `most` that passes, given that all above one that passes do.

    Looks around `start` first, ever further, then halves what is left. None when not even `most` passes.
    """
    failed, passed = least - 1, most + 1
    candidate, stride = start, 1
    while failed < candidate < passed:
        if passes(candidate):
            passed, candidate = candidate, max(candidate - stride, failed + 1)
        else:
            failed, candidate = candidate, min(candidate + stride, passed - 1)
        stride *= 2
        if failed >= least and passed <= most:
            candidate = (failed + passed) // 2
    return passed if passed <= most else None
