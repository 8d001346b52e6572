"""The life of a run: a loop over variants with content-addressed results.

    outcome = run(load_recipe(path), store=store, progress_stream=sys.stderr)

Every stage runs in a fresh process; a result that is in the store is not measured again; a variant that fails
doesn't stop the others and never ships; an interruption keeps what is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from pipeline.capacity_results import CapacityResult
from pipeline.checkpoint import read_manifest, verify
from pipeline.errors import PipelineError, PrerequisiteError, StageError
from pipeline.hardware import Device, detect, fingerprint
from pipeline.measured import StageFailure
from pipeline.model_source import read_config, source_record, trained_folder
from pipeline.planning import MEASURED_DEVICE
from pipeline.preflight import Preflight, preflight
from pipeline.processes import WorkerError, run_stage
from pipeline.progress import Progress, Step
from pipeline.recipe import ExpandedRecipe, LoadedRecipe, VariantSpec
from pipeline.results import CheckpointManifest, QualityResult, SourceRecord
from pipeline.speed_results import SpeedStageResult
from pipeline.speed_stage import measure_speed
from pipeline.stage_keys import capacity_key, quality_key, quantize_key, source_key, speed_key
from pipeline.stages import (
    CapacityRequest,
    QualityStageRequest,
    QuantizeRequest,
    RandomSource,
    RandomSourceRequest,
    RunnableCheckpoint,
)
from pipeline.store import Store
from pipeline.tasks import inputs_digest
from pipeline.values import AnyValue, Value


@dataclass
class RunState:
    """What a run has so far; the report is made from it even when the run is cut short."""

    loaded: LoadedRecipe
    recipe: ExpandedRecipe
    device: Device
    store: Store
    folder: Path
    log: Path
    progress: Progress
    ready: Preflight
    manifests: dict[str, CheckpointManifest] = field(default_factory=dict)
    checkpoints: dict[str, Path] = field(default_factory=dict)
    speed: SpeedStageResult | None = None
    capacity: dict[str, CapacityResult] = field(default_factory=dict)
    quality: dict[str, QualityResult] = field(default_factory=dict)
    failures: dict[str, list[StageFailure]] = field(default_factory=dict)
    reused: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def machine(self) -> str:
        """Fingerprint of the machine the numbers belong to."""
        return fingerprint(self.device)

    def fail(self, variant: str, failure: StageFailure) -> None:
        """Remember that a stage gave nothing for a variant."""
        self.failures.setdefault(variant, []).append(failure)

    def runnable(self, variant: VariantSpec) -> RunnableCheckpoint:
        """The finished checkpoint of a variant and how to run it."""
        assert variant.engine is not None
        return RunnableCheckpoint(
            folder=str(self.checkpoints[variant.name]),
            quantizer=variant.quantizer,
            engine=variant.engine,
            device=self.device.kind,
        )


def prepare(loaded: LoadedRecipe, *, store: Store, progress_stream: TextIO) -> RunState:
    """Everything that must hold before any work; `store` is prepared and held.

    Raises PrerequisiteError listing all that is missing.
    """
    device = detect()
    recipe = loaded.recipe.expand(device=device.kind)
    ready = preflight(loaded, recipe=recipe, device=device, store=store)
    if ready.problems:
        raise PrerequisiteError(ready.message(str(loaded.path)))
    folder = _run_folder(store, loaded)
    return RunState(
        loaded=loaded,
        recipe=recipe,
        device=device,
        store=store,
        folder=folder,
        log=folder / "stages.log",
        progress=Progress(progress_stream, steps=step_names(recipe), durations_s=store.durations_s()),
        ready=ready,
    )


def step_names(recipe: ExpandedRecipe) -> tuple[str, ...]:
    """The steps of a run, in order."""
    names = [variant.name for variant in recipe.ordered()]
    return (
        "source",
        *(f"quantize {name}" for name in names),
        *(["speed"] if recipe.speed else []),
        *(f"capacity {name}" for name in names if recipe.capacity),
        *(f"quality {name}" for name in names if recipe.quality),
    )


def run_stages(state: RunState) -> None:
    """Run every stage that the recipe asks for. An interruption is recorded in `state`, not raised."""
    try:
        found = _source(state)
        if found is None:
            return
        source_folder, source = found
        for variant in state.recipe.ordered():
            _quantize(state, variant, source_folder=source_folder, source=source)
        _speed(state)
        for variant in state.recipe.ordered():
            _capacity(state, variant)
        for variant in state.recipe.ordered():
            _quality(state, variant)
    except KeyboardInterrupt:
        state.interrupted = True
        state.progress.say("interrupted: finished stages are kept; the same command goes on from here")


def _run_folder(store: Store, loaded: LoadedRecipe) -> Path:
    """A new folder; its name sorts by time and holds no path of the model."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    for attempt in range(1000):
        folder = store.root / "runs" / f"{stamp}-{loaded.path.stem}{f'-{attempt}' if attempt else ''}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder.resolve()
    raise PrerequisiteError(f"no free folder name under {store.root / 'runs'}")


# --- stages ----------------------------------------------------------------------------------------------


def _source(state: RunState) -> tuple[Path, SourceRecord] | None:
    """The folder of the weights; None when it could not be made, which fails every variant."""
    with state.progress.step("source") as step:
        try:
            if state.loaded.recipe.model.weights == "random":
                folder = _random_source(state, step)
            else:
                step.begins()
                step.tell("finding and hashing the weights")
                folder = trained_folder(state.loaded)
            return folder, source_record(state.loaded, folder, store=state.store)
        except StageError as error:
            step.failed(str(error))
            reason = error.reason if isinstance(error, WorkerError) else "failed"
            for variant in state.recipe.variants:
                state.fail(variant.name, failure("quantize", reason, f"no source to quantize: {error}"))
            return None


def _random_source(state: RunState, step: Step) -> Path:
    architecture = read_config(state.loaded)
    assert architecture is not None, "the preflight has read it"
    seed = state.recipe.model.seed
    folder = state.store.root / "sources" / source_key(config=architecture.config, seed=seed)
    if folder.is_dir():
        step.reused()
        return folder
    step.begins()
    with state.store.new_folder(folder) as partial:
        request = RandomSourceRequest(config=architecture.config, seed=seed, out=str(partial))
        run_stage("source", request, RandomSource, log=state.log, progress=step.tell)
    return folder


def _quantize(state: RunState, variant: VariantSpec, *, source_folder: Path, source: SourceRecord) -> None:
    key = quantize_key(source=source, quantizer=variant.quantizer)
    folder = state.store.checkpoint_folder(key)

    def make() -> CheckpointManifest:
        with state.store.new_folder(folder) as partial:
            request = QuantizeRequest(
                source_folder=str(source_folder),
                source=source,
                quantizer=variant.quantizer,
                device=state.device.kind,
                out=str(partial),
            )
            return run_stage(
                "quantize", request, CheckpointManifest, log=state.log, progress=state.progress.tell
            )

    manifest = _stage(
        state, "quantize", variant.name, stored=lambda: _intact(folder, store=state.store), make=make
    )
    if manifest:
        state.manifests[variant.name] = manifest
        state.checkpoints[variant.name] = folder


def _intact(folder: Path, *, store: Store) -> CheckpointManifest | None:
    """The manifest of a finished checkpoint whose files are still those it names."""
    try:
        manifest = read_manifest(folder)
        verify(folder, manifest, sha256_of=store.file_digest)
    except (PipelineError, OSError):
        return None
    return manifest


def _speed(state: RunState) -> None:
    spec = state.recipe.speed
    if spec is None:
        return
    members = [variant for variant in state.recipe.ordered() if variant.name in state.checkpoints]
    for variant in state.recipe.variants:
        if variant not in members:
            state.fail(variant.name, _skipped("speed"))
    if not members:
        return
    described = {
        variant.name: (state.manifests[variant.name], variant.engine.model_dump(mode="json"))
        for variant in members
        if variant.engine
    }
    key = speed_key(
        machine=state.machine,
        workload=state.recipe.workload,
        spec=spec,
        variants=described,
        baseline=state.recipe.baseline,
    )
    with state.progress.step("speed") as step:
        state.speed = state.store.get("speed", key, SpeedStageResult)
        if state.speed:
            step.reused()
            state.reused.append("speed")
        else:
            _measure_speed(state, members, step=step, key=key)
    for name, told in (state.speed.failures if state.speed else {}).items():
        state.fail(name, told)


def _measure_speed(state: RunState, members: list[VariantSpec], *, step: Step, key: str) -> None:
    start = time.monotonic()
    spec = state.recipe.speed
    assert spec is not None
    step.begins()
    try:
        state.speed = measure_speed(
            {variant.name: state.runnable(variant) for variant in members},
            manifests=state.manifests,
            facts=state.ready.facts,
            baseline=state.recipe.baseline,
            spec=spec,
            workload=state.recipe.workload,
            device=state.device,
            log=state.log,
            progress=step.tell,
        )
    except KeyboardInterrupt:
        for variant in members:
            state.fail(variant.name, _interrupted("speed"))
        raise
    except PipelineError as error:
        step.failed(str(error))
        for variant in members:
            state.fail(variant.name, StageFailure(stage="speed", reason="failed", message=str(error)))
        return
    _keep(state, MEASURED_DEVICE, state.machine, state.speed.device)
    # A set with failures is measured again next time: what failed may have been mended.
    if not state.speed.failures:
        _keep(state, "speed", key, state.speed)
        _remember_duration(state, "speed", time.monotonic() - start)


def _capacity(state: RunState, variant: VariantSpec) -> None:
    spec = state.recipe.capacity
    if spec is None or _skips(state, variant, "capacity"):
        return
    budget, source = state.ready.capacity_budget(spec)
    request = CapacityRequest(
        checkpoint=state.runnable(variant),
        context_tokens=spec.context_tokens,
        new_tokens=state.recipe.workload.new_tokens,
        budget_bytes=budget,
        budget_source=source,
        max_sequences=spec.max_sequences,
        kv_bytes_per_sequence_predicted=state.ready.kv_bytes(spec.context_tokens, variant=variant),
    )
    key = capacity_key(request, machine=state.machine, manifest=state.manifests[variant.name])
    result = _stored_stage(state, "capacity", variant.name, key=key, request=request, kind=CapacityResult)
    if result:
        state.capacity[variant.name] = result


def _quality(state: RunState, variant: VariantSpec) -> None:
    if state.recipe.quality is None or _skips(state, variant, "quality"):
        return
    assert state.ready.quality is not None
    request = QualityStageRequest(
        checkpoint=state.runnable(variant),
        compute_dtype=state.ready.quality_dtype(state.recipe.quality, folder=state.checkpoints[variant.name]),
        quality=state.ready.quality,
    )
    key = quality_key(
        request,
        machine=state.machine,
        manifest=state.manifests[variant.name],
        inputs=inputs_digest(state.ready.quality),
    )
    result = _stored_stage(state, "quality", variant.name, key=key, request=request, kind=QualityResult)
    if result:
        state.quality[variant.name] = result


def _stored_stage(
    state: RunState, stage: str, variant: str, *, key: str, request: Value, kind: type[AnyValue]
) -> AnyValue | None:
    def make() -> AnyValue:
        result = run_stage(stage, request, kind, log=state.log, progress=state.progress.tell)
        _keep(state, stage, key, result)
        return result

    return _stage(state, stage, variant, stored=lambda: state.store.get(stage, key, kind), make=make)


def _stage(
    state: RunState,
    stage: str,
    variant: str,
    *,
    stored: Callable[[], AnyValue | None],
    make: Callable[[], AnyValue],
) -> AnyValue | None:
    """The stored result, or a new one; a failure is recorded and gives None."""
    name = f"{stage} {variant}"
    start = time.monotonic()
    with state.progress.step(name) as step:
        found = stored()
        if found is not None:
            step.reused()
            state.reused.append(name)
            return found
        step.begins()
        try:
            result = make()
        except KeyboardInterrupt:
            state.fail(variant, _interrupted(stage))
            raise
        except PipelineError as error:
            step.failed(str(error))
            reason = error.reason if isinstance(error, WorkerError) else "failed"
            state.fail(variant, failure(stage, reason, str(error)))
            return None
    _remember_duration(state, name, time.monotonic() - start)
    return result


def _keep(state: RunState, stage: str, key: str, result: Value) -> None:
    """Store a result; where the disk is full this run still has it, and the next one measures again."""
    try:
        state.store.put(stage, key, result)
    except StageError as error:
        state.progress.say(f"the result of {stage} is not kept for the next run: {error}")


def _remember_duration(state: RunState, name: str, seconds: float) -> None:
    """For the time left, which a run can do without."""
    with suppress(StageError):
        state.store.remember_duration(name, seconds)


def _skips(state: RunState, variant: VariantSpec, stage: str) -> bool:
    if variant.name in state.checkpoints:
        return False
    state.fail(variant.name, _skipped(stage))
    return True


def failure(stage: str, reason: str, message: str) -> StageFailure:
    """A stage that gave nothing, told in the words of `results.StageFailure`."""
    return StageFailure.model_validate({"stage": stage, "reason": reason, "message": message})


def _skipped(stage: str) -> StageFailure:
    return failure(stage, "skipped", "there is no checkpoint to run")


def _interrupted(stage: str) -> StageFailure:
    return failure(stage, "interrupted", "the run was stopped during this stage")
