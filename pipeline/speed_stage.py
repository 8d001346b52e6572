"""The speed stage over a set of variants: load them, pass the turn, turn raw times into rows.

    result = measure_speed({"fp16": runnable, "int8": other}, baseline="fp16", ...)

The device's read bandwidth and FLOP/s are measured in the same stage, before the variants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.alternation import ShapeTiming, TimingPlan, drift_percent, time_in_turn
from pipeline.footprint import ShapeFacts, WeightReads, weight_reads
from pipeline.hardware import Device, machine_state
from pipeline.measure import Ceilings, Work, break_even_batch, free_lunch_batch, summarise
from pipeline.measured import StageFailure
from pipeline.processes import WorkerError, WorkerTurn, run_stage
from pipeline.recipe_sections import SpeedSpec, Workload
from pipeline.results import CheckpointManifest
from pipeline.roof import prefill_flops
from pipeline.side_by_side import fit_together
from pipeline.speed_results import (
    DeviceSpeed,
    MemoryResult,
    SpeedResult,
    SpeedRow,
    SpeedShape,
    SpeedStageResult,
)
from pipeline.stages import DeviceSpeedRequest, Progress, RunnableCheckpoint, SpeedOpened, SpeedRequest


def measure_speed(
    checkpoints: Mapping[str, RunnableCheckpoint],
    *,
    manifests: Mapping[str, CheckpointManifest],
    facts: ShapeFacts | None,
    baseline: str,
    spec: SpeedSpec,
    workload: Workload,
    cache_bytes: int,
    device: Device,
    log: Path,
    progress: Progress,
) -> SpeedStageResult:
    """Time every variant at every shape. A variant that can't be loaded is among the failures.

    `facts` are the model's shapes, for the FLOPs of its prompts; None where they aren't known. `cache_bytes` are the
    KV caches of all variants at their largest shape: each keeps its last batch while another one has the turn.
    """
    before = machine_state(device)
    limits = run_stage(
        "device-speed",
        DeviceSpeedRequest(device=device.kind, dtypes=_dtypes(device)),
        DeviceSpeed,
        log=log,
        progress=progress,
    )
    stage = _SpeedStage(
        checkpoints=checkpoints,
        manifests=manifests,
        facts=facts,
        baseline=baseline,
        spec=spec,
        workload=workload,
        device=device,
        limits=limits,
        log=log,
        progress=progress,
    )
    sizes = [
        checkpoint.engine.loaded_bytes(manifests[name].weight_bytes_on_disk)
        for name, checkpoint in checkpoints.items()
    ]
    alone = any(checkpoint.engine.fills_device for checkpoint in checkpoints.values())
    together = not alone and fit_together(sizes, device=device, cache_bytes=cache_bytes)
    drift = stage.together() if together else stage.one_by_one()
    after = machine_state(device)
    return SpeedStageResult(
        device=limits,
        machine_before=before,
        machine_after=after,
        alternated=together,
        variants={
            name: result.model_copy(
                update={
                    "notes": (*result.notes, *after.notes),
                    "timed_in_turn": together,
                    # Of variants that took turns it fell on all alike, and tells of the baseline's own figures only.
                    "drift_percent": drift if name == baseline or not together else None,
                }
            )
            for name, result in stage.results.items()
        },
        failures=stage.failures,
    )


def _dtypes(device: Device) -> tuple[str, ...]:
    return ("float32", "bfloat16", "float16") if device.kind == "cpu" else ("bfloat16", "float16")


@dataclass
class _SpeedStage:
    """What is timed, how, and what came of it so far."""

    checkpoints: Mapping[str, RunnableCheckpoint]
    manifests: Mapping[str, CheckpointManifest]
    facts: ShapeFacts | None
    baseline: str
    spec: SpeedSpec
    workload: Workload
    device: Device
    limits: DeviceSpeed
    log: Path
    progress: Progress
    results: dict[str, SpeedResult] = field(default_factory=dict)
    failures: dict[str, StageFailure] = field(default_factory=dict)

    def together(self) -> float | None:
        """All loaded at once, timed in alternation; the baseline's first shape once more at the end: its drift in %."""
        with ExitStack() as stack:
            turns = {name: turn for name in self.checkpoints if (turn := self._open(name, stack))}
            timings = time_in_turn(turns, plan=self._plan(), progress=self.progress)
            again = {}
            if self.baseline in turns:
                again = time_in_turn(
                    {self.baseline: turns[self.baseline]},
                    plan=self._plan(again=True),
                    progress=self.progress,
                )
            for name, turn in turns.items():
                self._keep(name, turn.opened, timings[name])
        return drift_percent(timings[self.baseline][0], again[self.baseline][0]) if again else None

    def one_by_one(self) -> float | None:
        """Each alone, because they don't fit together; the baseline again at the end: its drift in %."""
        first: dict[str, ShapeTiming] = {}
        for name in self.checkpoints:
            with ExitStack() as stack:
                turn = self._open(name, stack)
                if turn:
                    timings = time_in_turn({name: turn}, plan=self._plan(), progress=self.progress)
                    self._keep(name, turn.opened, timings[name])
                    first[name] = timings[name][0]
        return self._drift(first[self.baseline]) if self.baseline in self.results else None

    def _drift(self, first: ShapeTiming) -> float | None:
        """How the baseline's first shape came out when it's loaded and timed again; None where that fails."""
        name = self.baseline
        with ExitStack() as stack:
            turn = self._open(name, stack)
            if turn is None:
                return None
            again = time_in_turn({name: turn}, plan=self._plan(again=True), progress=self.progress)
        return drift_percent(first, again[name][0])

    def _plan(self, *, again: bool = False) -> TimingPlan:
        spec = self.spec
        shapes = timed_shapes(spec, workload=self.workload)
        return TimingPlan(
            shapes=shapes[:1] if again else shapes,
            warmup=1 if again else spec.warmup,
            repeats=spec.repeats,
            min_seconds=0.0 if again else spec.min_seconds,
            max_cv_percent=spec.max_cv_percent,
            seed=1_000_000 if again else 0,
        )

    def _open(self, name: str, stack: ExitStack) -> WorkerTurn | None:
        self.progress(f"{name}: loading")
        request = SpeedRequest(checkpoint=self.checkpoints[name])
        try:
            turn = WorkerTurn(request, log=self.log, progress=self.progress)
        except WorkerError as error:
            self.failures[name] = StageFailure(stage="speed", reason=error.reason, message=str(error))
            return None
        return stack.enter_context(turn)

    def _keep(self, name: str, opened: SpeedOpened, timings: list[ShapeTiming]) -> None:
        rows = tuple(self._row(name, opened, timing) for timing in timings)
        if not any(timing.traces for timing in timings):
            reason: Literal["out_of_memory", "failed"] = (
                "out_of_memory" if rows[0].outcome == "out_of_memory" else "failed"
            )
            self.failures[name] = StageFailure(stage="speed", reason=reason, message=rows[0].because)
            return
        self.results[name] = SpeedResult(
            engine=self.checkpoints[name].engine.kind,
            device=self.device.name,
            compute_dtype=opened.compute_dtype,
            execution="; ".join(dict.fromkeys(_execution(opened, timing) for timing in timings)),
            rows=rows,
            memory=_memory(
                opened,
                timings,
                manifest=self.manifests[name],
                weights_read_bytes=self._weights_read(name, opened, tokens=1),
            ),
            measured_break_even_batch=break_even_batch(rows),
            free_lunch_batch=free_lunch_batch(rows),
            notes=(opened.energy_source, *_choice_notes(timings)),
        )

    def _row(self, name: str, opened: SpeedOpened, timing: ShapeTiming) -> SpeedRow:
        shape = timing.shape
        if timing.failure:
            return SpeedRow(
                **shape.model_dump(),
                outcome="out_of_memory" if timing.failure.outcome == "out_of_memory" else "failed",
                because=timing.failure.because,
                warmup_s=tuple(timing.warmup_s),
            )
        return summarise(
            timing.traces,
            shape=shape,
            warmup_s=timing.warmup_s,
            work=Work(
                bytes_read_per_step=self._step_bytes(name, opened, timing),
                prefill_flops=self._prefill_flops(name, shape),
            ),
            ceilings=Ceilings(
                read_bandwidth_bytes_per_s=self.limits.read_bandwidth_bytes_per_s,
                sheet_bandwidth_bytes_per_s=self.device.bandwidth_bytes_per_s,
                matmul_flops_per_s=self.limits.matmul_flops_per_s.get(opened.compute_dtype),
                fastest_flops_per_s=max(self.limits.matmul_flops_per_s.values(), default=None),
                last_level_cache_bytes=self.device.last_level_cache_bytes,
            ),
            peak_memory_bytes=timing.memory.peak_bytes if timing.memory else None,
            max_cv_percent=self.spec.max_cv_percent,
        ).model_copy(update={"choice": timing.choice})

    def _step_bytes(self, name: str, opened: SpeedOpened, timing: ShapeTiming) -> int | None:
        """Weights and the cache of the middle decode step; None for a prefill alone, which has no such step."""
        if timing.shape.new_tokens < 2:
            return None
        memory = timing.memory
        at_end = (memory.kv_bytes_filled or memory.kv_cache_bytes or 0) if memory else 0
        weights_read = self._weights_read(name, opened, tokens=timing.shape.batch_size)
        return weights_read + mean_kv_bytes(at_end, timing.shape)

    def _weights_read(self, name: str, opened: SpeedOpened, *, tokens: int) -> int:
        """Of experts only those that `tokens` tokens touch; all of them where the shapes aren't known."""
        share = 1.0
        if self.facts is not None:
            quantizer = self.checkpoints[name].quantizer
            compute_bytes = 4 if opened.compute_dtype == "float32" else 2
            share = touched_share(
                weight_reads(self.facts, quantizer=quantizer, compute_bytes=compute_bytes), tokens=tokens
            )
        return round(share * read_per_token_resident(opened, self.manifests[name]))

    def _prefill_flops(self, name: str, shape: SpeedShape) -> float | None:
        """None where shapes or attention aren't known: a share of less than the whole work would mislead.

        So would one of float FLOP/s where products are computed in INT8, which a GPU does twice as fast.
        """
        if self.facts is None or self.facts.attention is None:
            return None
        if self.checkpoints[name].quantizer.integer_arithmetic:
            return None
        return shape.batch_size * prefill_flops(self.facts, shape.prompt_tokens)


def _execution(opened: SpeedOpened, timing: ShapeTiming) -> str:
    return timing.choice.kept if timing.choice else opened.execution


def _choice_notes(timings: Sequence[ShapeTiming]) -> tuple[str, ...]:
    """How each shape's way to run was chosen, where the engine had two."""
    return tuple(
        f"{timing.shape.name}, batch {timing.shape.batch_size}: {timing.choice.text}"
        for timing in timings
        if timing.choice
    )


def timed_shapes(spec: SpeedSpec, *, workload: Workload) -> tuple[SpeedShape, ...]:
    """The workload's batches, then prompt lengths with one token each, then depths of context.

    A prompt length that is longer than a chunk comes once more in such chunks, next to the whole one.
    """
    prompt_tokens, new_tokens = workload.prompt_tokens, workload.new_tokens
    batches = [
        SpeedShape(batch_size=size, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        for size in spec.batch_sizes
    ]
    prefills = [
        SpeedShape(batch_size=1, prompt_tokens=tokens, new_tokens=1, test="prefill", chunk_tokens=chunk)
        for tokens in spec.prompt_tokens or ()
        for chunk in (None, *(size for size in spec.prefill_chunk_tokens or () if size < tokens))
    ]
    depths = [
        SpeedShape(batch_size=1, prompt_tokens=tokens, new_tokens=new_tokens, test="depth")
        for tokens in spec.context_tokens or ()
    ]
    return (*batches, *prefills, *depths)


def read_per_token_resident(opened: SpeedOpened, manifest: CheckpointManifest) -> int:
    """Weight bytes a decode step reads, every expert included: the checkpoint's share, at the size it has when loaded.

    An engine that expands weights on loading reads more than the file holds.
    """
    held_once = opened.weight_bytes_resident - opened.weight_bytes_copied
    return round(held_once * manifest.weight_bytes_read_per_token / manifest.weight_bytes_on_disk)


def touched_share(reads: WeightReads, *, tokens: int) -> float:
    """Of the weights that a step over very many tokens reads, those that one over `tokens` does: 1 without experts.

    Both at the format's sizes; see `WeightReads.bytes` for which experts are touched.
    """
    every = reads.dense_bytes + sum(expert.count * expert.bytes_each for expert in reads.experts)
    return reads.bytes(tokens) / every


def mean_kv_bytes(kv_bytes_at_end: int, shape: SpeedShape) -> int:
    """KV cache bytes of the middle decode step, from those at the end: the cache grows token by token."""
    end = shape.prompt_tokens + shape.new_tokens - 1
    middle = shape.prompt_tokens + shape.new_tokens / 2
    return round(kv_bytes_at_end * middle / end)


def _memory(
    opened: SpeedOpened,
    timings: list[ShapeTiming],
    *,
    manifest: CheckpointManifest,
    weights_read_bytes: int,
) -> MemoryResult:
    measured = [timing.memory for timing in timings if timing.memory]
    reserved = [memory.reserved_bytes for memory in measured if memory.reserved_bytes is not None]
    return MemoryResult(
        weight_bytes_on_disk=manifest.weight_bytes_on_disk,
        weight_bytes_resident=opened.weight_bytes_resident,
        weight_bytes_read_per_token=weights_read_bytes,
        kv_cache_bytes=measured[0].kv_cache_bytes if measured else None,
        peak_bytes=max([opened.peak_load_bytes, *(memory.peak_bytes for memory in measured)]),
        process_bytes_before_load=opened.process_bytes_before_load,
        process_bytes_after_load=opened.process_bytes_after_load,
        allocator_reserved_bytes=max(reserved) if reserved else None,
    )
