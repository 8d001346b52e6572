"""Timing a set of variants in turn, so that drift of a shared machine falls on all of them alike.

Every variant sits loaded in a process of its own; this module passes the turn: warm-up for each, then one
timed repeat of each, round after round, until every one has enough repeats and enough time. When the set
doesn't fit into memory together, variants run one after the other and the baseline once more at the end.

    rows = time_in_turn({"fp16": turn, "int8": other}, plan=TimingPlan(...))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipeline.engines.base import SessionMemory
from pipeline.measure import GenerationTrace, is_noisy
from pipeline.measured import Distribution
from pipeline.speed_results import ExecutionChoice, SpeedShape
from pipeline.values import Value

MAX_ROUNDS = 50
"""Repeats after which a minimum time is no longer waited for."""


class TurnResult(Value):
    """One run of one shape by one variant, or why there is none."""

    outcome: Literal["measured", "out_of_memory", "failed"]
    because: str = ""
    trace: GenerationTrace | None = None
    memory: SessionMemory | None = None
    choice: ExecutionChoice | None = None


class Turn(Protocol):
    """A loaded variant that runs one shape when asked."""

    def run(self, shape: SpeedShape, *, seed: int) -> TurnResult:
        """One generation with fresh prompts from `seed`; failures come back as results."""


class TimingPlan(Value):
    """What, how often and how long; see `recipe.SpeedSpec`."""

    shapes: tuple[SpeedShape, ...]
    warmup: int
    repeats: int
    min_seconds: float
    max_cv_percent: float
    seed: int = 0


@dataclass
class ShapeTiming:
    """What one variant gave at one shape."""

    shape: SpeedShape
    warmup_s: list[float] = field(default_factory=list)
    traces: list[GenerationTrace] = field(default_factory=list)
    memory: SessionMemory | None = None
    choice: ExecutionChoice | None = None
    failure: TurnResult | None = None

    @property
    def total_s(self) -> float:
        """Time of all repeats."""
        return sum(trace.token_times_s[-1] for trace in self.traces)


Progress = Callable[[str], None]


def time_in_turn(
    turns: Mapping[str, Turn], *, plan: TimingPlan, progress: Progress
) -> dict[str, list[ShapeTiming]]:
    """All shapes of all variants, in alternation."""
    timings: dict[str, list[ShapeTiming]] = {name: [] for name in turns}
    # Never started anew: a seed used for two shapes would give both the same first prompts.
    seeds = itertools.count(plan.seed + 1)
    for shape in plan.shapes:
        timed = {name: ShapeTiming(shape) for name in turns}
        for name, timing in timed.items():
            timings[name].append(timing)
        _time_shape(turns, timed, plan=plan, seeds=seeds, progress=progress)
    return timings


def _time_shape(
    turns: Mapping[str, Turn],
    timed: Mapping[str, ShapeTiming],
    *,
    plan: TimingPlan,
    seeds: Iterator[int],
    progress: Progress,
) -> None:
    for round_number in itertools.count():
        warming = round_number < plan.warmup
        waiting = [
            name
            for name, timing in timed.items()
            if not timing.failure and (warming or not _done(timing, plan))
        ]
        if not waiting and not warming:
            return
        for name in waiting:
            timing = timed[name]
            doing = "warm-up" if warming else f"repeat {len(timing.traces) + 1}"
            progress(f"{name}: {timing.shape.name}, batch {timing.shape.batch_size}, {doing}")
            _take(timing, turns[name].run(timing.shape, seed=next(seeds)), warming=warming)


def _take(timing: ShapeTiming, result: TurnResult, *, warming: bool) -> None:
    if result.trace is None:
        timing.failure = result
        return
    timing.memory, timing.choice = result.memory, result.choice
    if warming:
        timing.warmup_s.append(result.trace.token_times_s[-1])
    else:
        timing.traces.append(result.trace)


def _done(timing: ShapeTiming, plan: TimingPlan) -> bool:
    """Enough repeats and enough time; a noisy set gets as many repeats again before it is marked."""
    count = len(timing.traces)
    if count < plan.repeats or (timing.total_s < plan.min_seconds and count < MAX_ROUNDS):
        return False
    return count >= 2 * plan.repeats or not is_noisy(timing.traces, max_cv_percent=plan.max_cv_percent)


def drift_percent(first: ShapeTiming, again: ShapeTiming) -> float | None:
    """How much slower (+) the baseline's tokens came at the end than at first; None without both."""
    before = [tpot for trace in first.traces if (tpot := trace.tpot_s) is not None]
    after = [tpot for trace in again.traces if (tpot := trace.tpot_s) is not None]
    if not before or not after:
        return None
    return 100 * (Distribution.of(after).median / Distribution.of(before).median - 1)
