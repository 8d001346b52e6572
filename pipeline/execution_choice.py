"""Which of an engine's ways to run a shape is timed: measured before the first warm-up, on the same clock.

Compiling pays on some devices, models and shapes, and costs on others. So both ways run the shape, the plain one first;
the other must make the same tokens, and is kept only if it decodes faster. What that took is in no figure.

    choice = choose_execution(session, shape=shape, seed=1, clock=time.perf_counter)
    session.run_as(choice.kept)
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline.engines.base import Session
from pipeline.measure import Clock, GenerationTrace, random_prompts, time_generation
from pipeline.speed_results import ExecutionChoice, SpeedShape

LEAST_STEPS = 4
"""New tokens under which a shape runs the plain way: a CUDA graph is recorded in the first steps."""
CHECKED_STEPS = 16
ROUNDS = 3
LIMIT_S = 600.0
"""For the other way's first run, most of which is compiling."""
_OTHER_PROMPTS = 2**41
"""Added to a seed: prompts that no timed run gets."""


class UnfinishedError(BaseException):
    """The limit came first. No Exception, because compilers catch those and raise something of their own instead."""


class _Trial(NamedTuple):
    """TPOT of both ways, round by round, and seconds of the other way's runs."""

    plain_tpot_s: list[float]
    other_tpot_s: list[float]
    other_run_s: list[float]


def choose_execution(
    session: Session, *, shape: SpeedShape, seed: int, clock: Clock, limit_s: float = LIMIT_S
) -> ExecutionChoice | None:
    """The choice between the session's two ways; None where there is one, or the shape hardly decodes.

    The session is left to run what was kept. Whatever goes wrong in the other way is a reason to keep the plain one.
    What goes wrong in the plain one is left to the timed run, which fails in the same way and says so.
    """
    plain, *others = session.executions
    if not others or shape.new_tokens < LEAST_STEPS:
        session.run_as(plain)
        return None
    (other,) = others
    prompts = _Prompts(session, shape, seed=seed)
    session.run_as(plain)
    try:
        prompts.timed(clock)
    except Exception:  # noqa: BLE001  (the timed run will raise it again)
        session.release()
        return None
    try:
        choice = _compared(session, prompts, plain=plain, other=other, clock=clock, limit_s=limit_s)
    except (Exception, UnfinishedError) as error:  # noqa: BLE001  (compilers raise anything; it is reported)
        unfinished = isinstance(error, UnfinishedError)
        text = (str(error).strip().splitlines() or ["no message"])[0][:300]
        choice = ExecutionChoice(
            plain=plain,
            other=other,
            kept=plain,
            outcome="unfinished" if unfinished else "failed",
            because=text if unfinished else f"failed: {type(error).__name__}: {text}",
        )
    if choice.kept == plain:
        session.release()  # graphs and their cache are of no more use
    session.run_as(choice.kept)
    return choice


def _compared(
    session: Session, prompts: _Prompts, *, plain: str, other: str, clock: Clock, limit_s: float
) -> ExecutionChoice:
    session.run_as(other)
    with _at_most(limit_s):
        first_s = prompts.timed(clock).token_times_s[-1]
    wrong = session.disagreement(
        prompts.fresh(),
        execution=other,
        room_tokens=prompts.shape.new_tokens,
        steps=min(CHECKED_STEPS, prompts.shape.new_tokens),
    )
    if wrong:
        return ExecutionChoice(plain=plain, other=other, kept=plain, outcome="differs", because=wrong)
    trial = _alternate(session, prompts, plain=plain, other=other, clock=clock)
    ratios = [one / two for one, two in zip(trial.plain_tpot_s, trial.other_tpot_s, strict=True)]
    speedup = statistics.median(ratios)
    return ExecutionChoice(
        plain=plain,
        other=other,
        kept=other if speedup > 1 else plain,
        outcome="compared",
        compile_s=max(0.0, first_s - statistics.median(trial.other_run_s)),
        speedup=speedup,
    )


def _alternate(session: Session, prompts: _Prompts, *, plain: str, other: str, clock: Clock) -> _Trial:
    trial = _Trial([], [], [])
    for _ in range(ROUNDS):
        session.run_as(plain)
        trial.plain_tpot_s.append(_tpot_s(prompts.timed(clock)))
        session.run_as(other)
        trace = prompts.timed(clock)
        trial.other_tpot_s.append(_tpot_s(trace))
        trial.other_run_s.append(trace.token_times_s[-1])
    return trial


def _tpot_s(trace: GenerationTrace) -> float:
    assert trace.tpot_s is not None, "shapes with too few steps are not tried"
    return trace.tpot_s


class _Prompts:
    """Prompts of one shape, others at every call."""

    def __init__(self, session: Session, shape: SpeedShape, *, seed: int) -> None:
        self.shape = shape
        self._session, self._seed, self._drawn = session, seed, 0

    def fresh(self) -> list[list[int]]:
        self._drawn += 1
        return random_prompts(
            batch_size=self.shape.batch_size,
            prompt_tokens=self.shape.prompt_tokens,
            vocabulary_tokens=self._session.vocabulary_tokens,
            seed=self._seed + self._drawn * _OTHER_PROMPTS,
        )

    def timed(self, clock: Clock) -> GenerationTrace:
        """One generation by the way that the session is set to."""
        return time_generation(
            self._session,
            prompts=self.fresh(),
            new_tokens=self.shape.new_tokens,
            clock=clock,
            chunk_tokens=self.shape.chunk_tokens,
        )


@contextlib.contextmanager
def _at_most(limit_s: float) -> Iterator[None]:
    """Raise UnfinishedError in the block once the system's timer runs out; where there is none, wait for ever.

    Whatever the block makes of that error, it is UnfinishedError that leaves it.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    late = UnfinishedError(f"was not ready after {limit_s:.0f} s")
    has_run_out = False

    def give_up(_signal: int, _frame: Any) -> None:
        nonlocal has_run_out
        has_run_out = True
        raise late

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except Exception as error:
        if has_run_out:
            raise late from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if has_run_out:
        raise late
