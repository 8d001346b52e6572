"""The serving stage over a set of variants: the turn passed between variants and modes, raw times turned into rows.

Static and continuous batches of the same requests alternate in every repeat, of every variant in turn where all fit
into memory together, else one variant after the other.

    result = measure_serving({"fp16": runnable, "int8": other}, load=load, spec=recipe.serving, ...)
    result.variants["int8"].row("continuous", "closed", 4).gain
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pipeline.engines.base import SessionMemory
from pipeline.hardware import Device, machine_state
from pipeline.measured import StageFailure
from pipeline.processes import Conversation, WorkerError
from pipeline.recipe_sections import ServingSpec
from pipeline.results import CheckpointManifest
from pipeline.serving_load import ServingLoad
from pipeline.serving_measure import PrefixTrace, ServingTrace
from pipeline.serving_results import PrefixRow, ServingCell, ServingResult, ServingRow, ServingStageResult
from pipeline.serving_summary import (
    fit_serving_steps,
    gain_over_static,
    is_noisy_prefix,
    is_noisy_serving,
    summarise_prefix,
    summarise_serving,
)
from pipeline.serving_turns import ServingOpened, ServingQuestion, ServingRequest, ServingTurnResult
from pipeline.side_by_side import fit_together
from pipeline.stages import Progress, RunnableCheckpoint


class ServingTurn(Protocol):
    """A loaded variant that serves the load when asked."""

    def run(self, question: ServingQuestion) -> ServingTurnResult:
        """One turn; failures come back as results."""


@dataclass
class CellTiming:
    """What one variant gave at one cell, or with the prefix where `cell` is None."""

    cell: ServingCell | None
    warmup_s: list[float] = field(default_factory=list)
    traces: list[ServingTrace] = field(default_factory=list)
    prefixes: list[PrefixTrace] = field(default_factory=list)
    memory: SessionMemory | None = None
    execution: str = ""
    failure: ServingTurnResult | None = None

    def take(self, result: ServingTurnResult, *, warmup: bool) -> None:
        """Keep what a turn gave. Memory is the warm-up's: static batches then have the device to themselves."""
        if result.outcome != "measured":
            self.failure = result
            return
        self.execution = result.execution
        if warmup:
            self.memory = result.memory
            self.warmup_s += [result.trace.duration_s] if result.trace else []
            return
        self.traces += [result.trace] if result.trace else []
        self.prefixes += [result.prefix] if result.prefix else []

    def is_noisy(self, *, max_cv_percent: float) -> bool:
        """Whether the repeats so far spread more than that."""
        if self.cell is None:
            return is_noisy_prefix(self.prefixes, max_cv_percent=max_cv_percent)
        arrivals = self.cell.load == "open"
        return is_noisy_serving(self.traces, max_cv_percent=max_cv_percent, arrivals=arrivals)


# --- turns -----------------------------------------------------------------------------------------------


def serve_in_turn(
    turns: Mapping[str, ServingTurn], *, load: ServingLoad, spec: ServingSpec, progress: Progress
) -> dict[str, list[CellTiming]]:
    """All cells of all variants, and the prefix if one is asked for."""
    timings: dict[str, list[CellTiming]] = {name: [] for name in turns}
    seeds = itertools.count(load.seed)
    for cells in _groups(load):
        group = {name: [CellTiming(cell) for cell in cells] for name in turns}
        for name, timed in group.items():
            timings[name] += timed
        _time_group(turns, group, spec=spec, seeds=seeds, progress=progress)
    return timings


def _groups(load: ServingLoad) -> Iterator[tuple[ServingCell | None, ...]]:
    """Cells that alternate: both modes of one concurrency; every other one alone; the prefix last."""
    by_place = itertools.groupby(load.cells, key=lambda cell: (cell.load, cell.concurrency))
    for _, cells in by_place:
        yield tuple(cells)
    if load.prefix_tokens:
        yield (None,)


def _time_group(
    turns: Mapping[str, ServingTurn],
    group: Mapping[str, Sequence[CellTiming]],
    *,
    spec: ServingSpec,
    seeds: Iterator[int],
    progress: Progress,
) -> None:
    for repeat in itertools.count():
        waiting = {name: timed for name, timed in group.items() if not _done(timed, repeat, spec=spec)}
        if not waiting:
            return
        seed = next(seeds)  # the same requests for all, fresh ones every time
        for name, timed in waiting.items():
            for timing in timed:
                if timing.failure:
                    continue
                doing = f"repeat {repeat}" if repeat else "warm-up"
                progress(f"{name}: {timing.cell.name if timing.cell else 'cached prefix'}, {doing}")
                question = ServingQuestion(cell=timing.cell, seed=seed, warmup=not repeat)
                timing.take(turns[name].run(question), warmup=not repeat)


def _done(timed: Sequence[CellTiming], repeat: int, *, spec: ServingSpec) -> bool:
    """Enough repeats; while any of the cells is noisy, up to as many again. The first turn is the warm-up."""
    going_on = [timing for timing in timed if not timing.failure]
    if not going_on or repeat > 2 * spec.repeats:
        return True
    return repeat > spec.repeats and not any(
        timing.is_noisy(max_cv_percent=spec.max_cv_percent) for timing in going_on
    )


class ServingProcess:
    """A variant loaded in a process of its own; one that dies is loaded anew for the next turn."""

    def __init__(self, request: ServingRequest, *, log: Path, progress: Progress) -> None:
        """Raises WorkerError when it can't be loaded."""
        self._request, self._log, self._progress = request, log, progress
        self._conversation: Conversation | None = self._load()
        assert self._conversation is not None
        self.opened = ServingOpened.model_validate_json(self._conversation.opened_json)

    def __enter__(self) -> ServingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._conversation:
            self._conversation.__exit__()
        self._conversation = None

    def run(self, question: ServingQuestion) -> ServingTurnResult:
        """One turn; a worker that dies gives a failed result."""
        try:
            if self._conversation is None:
                self._conversation = self._load()
                if not question.warmup:
                    self._ask(question.model_copy(update={"warmup": True}))
            return self._ask(question)
        except WorkerError as error:
            self.__exit__()
            return ServingTurnResult(outcome=error.reason, because=str(error))

    def _load(self) -> Conversation:
        return Conversation("serving", self._request, log=self._log, progress=self._progress)

    def _ask(self, question: ServingQuestion) -> ServingTurnResult:
        assert self._conversation is not None
        return self._conversation.ask(question, ServingTurnResult, progress=lambda _: None)


# --- the stage -------------------------------------------------------------------------------------------


def measure_serving(
    checkpoints: Mapping[str, RunnableCheckpoint],
    *,
    manifests: Mapping[str, CheckpointManifest],
    load: ServingLoad,
    spec: ServingSpec,
    cache_bytes: int,
    device: Device,
    log: Path,
    progress: Progress,
) -> ServingStageResult:
    """Serve the load with every variant. One that can't be loaded, or gives no row, is among the failures.

    `cache_bytes` are those of the KV caches that all variants need together, as far as they are known.
    """
    before = machine_state(device)
    stage = _ServingStage(checkpoints, load=load, spec=spec, device=device, log=log, progress=progress)
    alone = any(checkpoint.engine.fills_device for checkpoint in checkpoints.values())
    together = not alone and fit_together(
        [
            checkpoint.engine.loaded_bytes(manifests[name].weight_bytes_on_disk)
            for name, checkpoint in checkpoints.items()
        ],
        device=device,
        cache_bytes=cache_bytes,
    )
    for names in [tuple(checkpoints)] if together else [(name,) for name in checkpoints]:
        stage.serve(names)
    after = machine_state(device)
    return ServingStageResult(
        machine_before=before,
        machine_after=after,
        alternated=together,
        requests=load.requests,
        variants={
            name: result.model_copy(update={"notes": (*result.notes, *after.notes)})
            for name, result in stage.results.items()
        },
        failures=stage.failures,
    )


class _ServingStage:
    """What is served, how, and what came of it so far."""

    def __init__(
        self,
        checkpoints: Mapping[str, RunnableCheckpoint],
        *,
        load: ServingLoad,
        spec: ServingSpec,
        device: Device,
        log: Path,
        progress: Progress,
    ) -> None:
        self._checkpoints, self._load, self._spec = checkpoints, load, spec
        self._device, self._log, self._progress = device, log, progress
        self.results: dict[str, ServingResult] = {}
        self.failures: dict[str, StageFailure] = {}

    def serve(self, names: Sequence[str]) -> None:
        """These variants, loaded at the same time."""
        with ExitStack() as stack:
            turns = {name: turn for name in names if (turn := self._open(name, stack))}
            timings = serve_in_turn(turns, load=self._load, spec=self._spec, progress=self._progress)
            for name, turn in turns.items():
                self._keep(name, turn.opened, timings[name])

    def _open(self, name: str, stack: ExitStack) -> ServingProcess | None:
        self._progress(f"{name}: loading")
        request = ServingRequest(checkpoint=self._checkpoints[name], load=self._load)
        try:
            turn = ServingProcess(request, log=self._log, progress=self._progress)
        except WorkerError as error:
            self.failures[name] = StageFailure(stage="serving", reason=error.reason, message=str(error))
            return None
        return stack.enter_context(turn)

    def _keep(self, name: str, opened: ServingOpened, timings: Sequence[CellTiming]) -> None:
        failed = [timing.failure for timing in timings if timing.failure]
        if len(failed) == len(timings):
            reason = failed[0].outcome if failed[0].outcome != "measured" else "failed"
            self.failures[name] = StageFailure(stage="serving", reason=reason, message=failed[0].because)
            return
        self.results[name] = serving_result(
            timings,
            opened=opened,
            load=self._load,
            spec=self._spec,
            engine=self._checkpoints[name].engine.kind,
            device=self._device.name,
        )


def serving_result(
    timings: Sequence[CellTiming],
    *,
    opened: ServingOpened,
    load: ServingLoad,
    spec: ServingSpec,
    engine: str,
    device: str,
) -> ServingResult:
    """Rows, the prefix and fitted step times of one variant. Pure."""
    cells = [timing for timing in timings if timing.cell]
    prefix = next((timing for timing in timings if timing.cell is None), None)
    samples = [
        step
        for timing in cells
        if timing.cell and timing.cell.mode == "continuous"
        for trace in timing.traces
        for step in trace.steps
        if step.seconds > 0
    ]
    return ServingResult(
        engine=engine,
        device=device,
        compute_dtype=opened.compute_dtype,
        static_execution=opened.execution,
        continuous_execution=next((timing.execution for timing in timings if timing.execution), ""),
        rows=tuple(_row(timing, cells=cells, load=load, spec=spec) for timing in cells),
        prefix=_prefix_row(prefix, load=load, spec=spec) if prefix else None,
        step_times=fit_serving_steps(samples),
    )


def _row(
    timing: CellTiming, *, cells: Sequence[CellTiming], load: ServingLoad, spec: ServingSpec
) -> ServingRow:
    cell = timing.cell
    assert cell is not None
    if timing.failure:
        return ServingRow(
            **cell.model_dump(),
            outcome="out_of_memory" if timing.failure.outcome == "out_of_memory" else "failed",
            because=timing.failure.because,
            requests=len(load.requests),
            warmup_s=tuple(timing.warmup_s),
        )
    static = cell.model_copy(update={"mode": "static"})
    beside = next((other for other in cells if other is not timing and other.cell == static), None)
    return summarise_serving(
        timing.traces,
        cell=cell,
        targets=load.targets,
        memory=timing.memory,
        warmup_s=timing.warmup_s,
        max_cv_percent=spec.max_cv_percent,
        gain=gain_over_static(timing.traces, beside.traces) if beside and not beside.failure else None,
    )


def _prefix_row(timing: CellTiming, *, load: ServingLoad, spec: ServingSpec) -> PrefixRow:
    prefix_tokens = load.prefix_tokens or 0
    if timing.failure:
        return PrefixRow(
            prefix_tokens=prefix_tokens,
            fresh_tokens=load.fresh_tokens,
            outcome="out_of_memory" if timing.failure.outcome == "out_of_memory" else "failed",
            because=timing.failure.because,
        )
    return summarise_prefix(
        timing.prefixes,
        prefix_tokens=prefix_tokens,
        fresh_tokens=load.fresh_tokens,
        max_cv_percent=spec.max_cv_percent,
    )
