"""The worker's side of the serving stage: one loaded variant that serves the load when it has the turn.

A paged cache stays open between the turns of one concurrency, so that its first steps are over when it is timed; it is
closed before static batches are warmed up, whose memory is read then.

    turns = ServingTurns(session, load=load, clock=time.perf_counter, wait_until=wait_until)
    turns.run(ServingQuestion(cell=load.cells[0], seed=1)).trace
"""

from __future__ import annotations

import time
from typing import Literal

from pipeline.engines.base import ServingSession, Session, SessionMemory
from pipeline.measure import Clock
from pipeline.scheduler import Serving
from pipeline.serving_load import CACHED_REQUESTS, ServingLoad
from pipeline.serving_measure import (
    PrefixTrace,
    ServingTrace,
    WaitUntil,
    prefill_with_prefix,
    prompts_of,
    serve_continuously,
    serve_statically,
)
from pipeline.serving_results import ServingCell
from pipeline.stages import RunnableCheckpoint, first_line, is_out_of_memory
from pipeline.traffic import Request
from pipeline.values import Value

_OTHER_PROMPTS = 2**40
"""Added to a seed: prompts of a run that nobody reads a clock for."""


class ServingRequest(Value):
    """What a serving worker loads, and what it will be asked to serve."""

    checkpoint: RunnableCheckpoint
    load: ServingLoad


class ServingOpened(Value):
    """Facts of a loaded serving worker."""

    compute_dtype: str
    execution: str


class ServingQuestion(Value):
    """One turn: a cell of the load, or the cached prefix where `cell` is None, with prompts from `seed`.

    A warm-up serves all requests as fast as they can be, whenever they arrive.
    """

    cell: ServingCell | None
    seed: int
    warmup: bool = False


class ServingTurnResult(Value):
    """One run over all requests, or why there is none; `execution` is the serving session's."""

    outcome: Literal["measured", "out_of_memory", "failed"]
    because: str = ""
    trace: ServingTrace | None = None
    prefix: PrefixTrace | None = None
    memory: SessionMemory | None = None
    execution: str = ""


class ServingTurns:
    """A loaded session, and its paged cache while one is open."""

    def __init__(self, session: Session, *, load: ServingLoad, clock: Clock, wait_until: WaitUntil) -> None:
        self._session, self._load = session, load
        self._clock, self._wait_until = clock, wait_until
        self._paged: ServingSession | None = None
        self._limits: Serving | None = None

    def run(self, question: ServingQuestion) -> ServingTurnResult:
        """One turn; what goes wrong is a result."""
        try:
            return self._run(question)
        except Exception as error:  # noqa: BLE001  (classified and reported as this cell's outcome)
            self._close()
            self._session.release()
            return ServingTurnResult(
                outcome="out_of_memory" if is_out_of_memory(error) else "failed",
                because=f"{type(error).__name__}: {first_line(error)}",
            )

    def _run(self, question: ServingQuestion) -> ServingTurnResult:
        if question.cell is None:
            return self._prefix(question.seed)
        if question.cell.mode == "continuous":
            return self._continuous(question.cell, question)
        if question.warmup:
            self._close()
        try:
            return self._static(question.cell, question.seed)
        except Exception as error:
            if self._paged is None or not is_out_of_memory(error):
                raise
        self._close()  # static batches alone may fit where they don't beside a paged cache
        return self._static(question.cell, question.seed)

    def _static(self, cell: ServingCell, seed: int) -> ServingTurnResult:
        self._session.release()
        self._session.reset_peak()
        trace = serve_statically(
            self._session,
            self._load.requests,
            prompts=self._prompts(seed),
            batch_size=cell.concurrency,
            clock=self._clock,
        )
        # What is in the cache now is that of the last batch, which may be a small one.
        memory = self._session.memory().model_copy(update={"kv_cache_bytes": None})
        self._session.release()
        return ServingTurnResult(outcome="measured", trace=trace, memory=memory)

    def _continuous(self, cell: ServingCell, question: ServingQuestion) -> ServingTurnResult:
        limits = self._load.limits(concurrency=cell.concurrency)
        opened = limits != self._limits
        paged = self._open(limits, share_prefixes=False)
        if opened and not question.warmup:
            self._serve(paged, cell, seed=question.seed + _OTHER_PROMPTS, arrivals=False)
        arrivals = cell.load == "open" and not question.warmup
        paged.reset_peak()
        trace = self._serve(paged, cell, seed=question.seed, arrivals=arrivals)
        return ServingTurnResult(
            outcome="measured", trace=trace, memory=paged.memory(), execution=paged.execution
        )

    def _serve(self, paged: ServingSession, cell: ServingCell, *, seed: int, arrivals: bool) -> ServingTrace:
        paged.forget()
        return serve_continuously(
            paged,
            self._load.requests,
            prompts=self._prompts(seed),
            concurrency=cell.concurrency,
            clock=self._clock,
            wait_until=self._wait_until if arrivals else None,
        )

    def _prefix(self, seed: int) -> ServingTurnResult:
        load = self._load
        paged = self._open(load.prefix_limits(), share_prefixes=True)
        paged.forget()
        lengths = [load.prefix_tokens or 0] + [load.fresh_tokens] * (1 + CACHED_REQUESTS)
        prefix, *rests = prompts_of(
            [Request(0.0, length, 1) for length in lengths],
            vocabulary_tokens=self._session.vocabulary_tokens,
            seed=seed,
        )
        found = prefill_with_prefix(paged, prompts=[prefix + rest for rest in rests], clock=self._clock)
        return ServingTurnResult(outcome="measured", prefix=found, execution=paged.execution)

    def _prompts(self, seed: int) -> list[list[int]]:
        return prompts_of(self._load.requests, vocabulary_tokens=self._session.vocabulary_tokens, seed=seed)

    def _open(self, limits: Serving, *, share_prefixes: bool) -> ServingSession:
        """The open paged cache if it has these limits, else a new one; cells share none with the prefix."""
        key = None if share_prefixes else limits
        if self._paged is None or self._limits != key:
            self._close()
            self._session.release()
            self._paged = self._session.serving(limits, share_prefixes=share_prefixes)
            self._limits = key
        return self._paged

    def _close(self) -> None:
        paged, self._paged, self._limits = self._paged, None, None
        if paged is not None:
            paged.close()


class ServingWorker:
    """The same for a checkpoint, loaded once."""

    def __init__(self, request: ServingRequest) -> None:
        session = request.checkpoint.open()
        self.opened = ServingOpened(compute_dtype=session.compute_dtype, execution=session.execution)
        self._turns = ServingTurns(
            session, load=request.load, clock=time.perf_counter, wait_until=sleep_until
        )

    def answer(self, question: str) -> ServingTurnResult:
        """The result of a `ServingQuestion` as JSON."""
        return self._turns.run(ServingQuestion.model_validate_json(question))


def sleep_until(time_s: float) -> None:
    """Sleep until `time.perf_counter` shows so many seconds."""
    time.sleep(max(0.0, time_s - time.perf_counter()))
