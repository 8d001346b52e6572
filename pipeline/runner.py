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
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pipeline.capacity_results import CapacityResult
from pipeline.capacity_stage import is_whole, measure_capacity
from pipeline.checkpoint import read_manifest, verify
from pipeline.errors import PipelineError, PrerequisiteError, StageError
from pipeline.hardware import Device, detect, fingerprint
from pipeline.measured import StageFailure
from pipeline.model_source import random_source_record, read_config, source_record, trained_folder
from pipeline.planning import MEASURED_DEVICE
from pipeline.preflight import Preflight, preflight
from pipeline.processes import WorkerError, run_stage
from pipeline.progress import Progress
from pipeline.recipe import ExpandedRecipe, LoadedRecipe, VariantSpec
from pipeline.results import CheckpointManifest, QualityResult, SourceRecord
from pipeline.serving_results import ServingStageResult
from pipeline.serving_stage import measure_serving
from pipeline.speed_results import SpeedStageResult
from pipeline.speed_stage import measure_speed
from pipeline.stage_keys import capacity_key, quality_key, quantize_key, random_key, serving_key, speed_key
from pipeline.stages import (
    QualityStageRequest,
    QuantizeRequest,
    RandomVariantRequest,
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
    serving: ServingStageResult | None = None
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
        *(["source"] if recipe.model.weights == "trained" else []),
        *(f"quantize {name}" for name in names),
        *(["speed"] if recipe.speed else []),
        *(["serving"] if recipe.serving else []),
        *(f"capacity {name}" for name in names if recipe.capacity),
        *(f"quality {name}" for name in names if recipe.quality),
    )


def run_stages(state: RunState) -> None:
    """Run every stage that the recipe asks for. An interruption is recorded in `state`, not raised."""
    try:
        if state.recipe.model.weights == "random":
            for variant in state.recipe.ordered():
                _random_variant(state, variant)
        else:
            found = _source(state)
            if found is None:
                return
            for variant in state.recipe.ordered():
                _quantize(state, variant, source_folder=found[0], source=found[1])
        _speed(state)
        _serving(state)
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
    """The folder of trained weights; None when there is none, which fails every variant."""
    with state.progress.step("source") as step:
        try:
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


def _random_variant(state: RunState, variant: VariantSpec) -> None:
    architecture = read_config(state.loaded)
    assert architecture is not None, "the preflight has read it"
    config, seed = architecture.config, state.recipe.model.seed
    source = random_source_record(state.loaded)
    key = random_key(config=config, seed=seed, source=source, quantizer=variant.quantizer)

    def request(out: Path) -> RandomVariantRequest:
        return RandomVariantRequest(
            config=config, seed=seed, source=source, quantizer=variant.quantizer, out=str(out)
        )

    _checkpoint(state, variant, key=key, worker="random-weights", request=request)


def _quantize(state: RunState, variant: VariantSpec, *, source_folder: Path, source: SourceRecord) -> None:
    def request(out: Path) -> QuantizeRequest:
        return QuantizeRequest(
            source_folder=str(source_folder),
            source=source,
            quantizer=variant.quantizer,
            device=state.device.kind,
            out=str(out),
        )

    key = quantize_key(source=source, quantizer=variant.quantizer)
    _checkpoint(state, variant, key=key, worker="quantize", request=request)


def _checkpoint(
    state: RunState, variant: VariantSpec, *, key: str, worker: str, request: Callable[[Path], Value]
) -> None:
    """The variant's folder, from the store or made by a `worker` stage."""
    folder = state.store.checkpoint_folder(key)

    def make() -> CheckpointManifest:
        with state.store.new_folder(folder) as partial:
            return run_stage(
                worker, request(partial), CheckpointManifest, log=state.log, progress=state.progress.tell
            )

    stored = partial(_intact, folder, store=state.store)
    step = f"quantize {variant.name}"
    manifest = _stage(state, "quantize", [variant.name], step=step, stored=stored, make=make)
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
    if spec is None or not (members := _members(state, "speed")):
        return
    key = speed_key(
        machine=state.machine,
        workload=state.recipe.workload,
        spec=spec,
        variants=_described(state, members),
        baseline=state.recipe.baseline,
    )

    def measure() -> SpeedStageResult:
        result = measure_speed(
            {variant.name: state.runnable(variant) for variant in members},
            manifests=state.manifests,
            facts=state.ready.facts,
            baseline=state.recipe.baseline,
            spec=spec,
            workload=state.recipe.workload,
            device=state.device,
            log=state.log,
            progress=state.progress.tell,
        )
        _keep(state, MEASURED_DEVICE, state.machine, result.device)
        return result

    state.speed = _stage_of_all(state, "speed", members, key=key, kind=SpeedStageResult, measure=measure)


def _serving(state: RunState) -> None:
    spec, load = state.recipe.serving, state.ready.load
    if spec is None or load is None or not (members := _members(state, "serving")):
        return
    key = serving_key(machine=state.machine, load=load, spec=spec, variants=_described(state, members))

    def measure() -> ServingStageResult:
        return measure_serving(
            {variant.name: state.runnable(variant) for variant in members},
            manifests=state.manifests,
            load=load,
            spec=spec,
            cache_bytes=sum(
                2 * (state.ready.kv_bytes(load.most_cached_tokens, variant=variant) or 0)
                for variant in members
            ),
            device=state.device,
            log=state.log,
            progress=state.progress.tell,
        )

    state.serving = _stage_of_all(
        state, "serving", members, key=key, kind=ServingStageResult, measure=measure
    )


SetResult = TypeVar("SetResult", SpeedStageResult, ServingStageResult)


def _members(state: RunState, stage: str) -> list[VariantSpec]:
    """The variants that there is a checkpoint of; the others fail the stage."""
    for variant in state.recipe.variants:
        if variant.name not in state.checkpoints:
            state.fail(variant.name, _skipped(stage))
    return [variant for variant in state.recipe.ordered() if variant.name in state.checkpoints]


def _described(
    state: RunState, members: list[VariantSpec]
) -> dict[str, tuple[CheckpointManifest, dict[str, Any]]]:
    return {
        variant.name: (state.manifests[variant.name], variant.engine.model_dump(mode="json"))
        for variant in members
        if variant.engine
    }


def _stage_of_all(
    state: RunState,
    stage: str,
    members: list[VariantSpec],
    *,
    key: str,
    kind: type[SetResult],
    measure: Callable[[], SetResult],
) -> SetResult | None:
    """A stage over the set of variants, from the store or measured now; variants that failed are recorded."""

    def make() -> SetResult:
        result = measure()
        # A set with failures is measured again next time: what failed may have been mended.
        if not result.failures:
            _keep(state, stage, key, result)
        return result

    names = [variant.name for variant in members]
    stored = partial(state.store.get, stage, key, kind)
    result = _stage(state, stage, names, step=stage, stored=stored, make=make)
    for name, told in (result.failures if result else {}).items():
        state.fail(name, told)
    return result


def _capacity(state: RunState, variant: VariantSpec) -> None:
    spec = state.recipe.capacity
    if spec is None or _skips(state, variant, "capacity"):
        return
    request = state.ready.capacity_request(spec, variant=variant, checkpoint=state.runnable(variant))
    key = capacity_key(request, machine=state.machine, manifest=state.manifests[variant.name])

    def measure() -> CapacityResult:
        return measure_capacity(request, log=state.log, progress=state.progress.tell)

    result = _stored_stage(
        state, "capacity", variant.name, key=key, kind=CapacityResult, measure=measure, keeps=is_whole
    )
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

    def measure() -> QualityResult:
        return run_stage("quality", request, QualityResult, log=state.log, progress=state.progress.tell)

    result = _stored_stage(state, "quality", variant.name, key=key, kind=QualityResult, measure=measure)
    if result:
        state.quality[variant.name] = result


def _stored_stage(
    state: RunState,
    stage: str,
    variant: str,
    *,
    key: str,
    kind: type[AnyValue],
    measure: Callable[[], AnyValue],
    keeps: Callable[[AnyValue], bool] = lambda _: True,
) -> AnyValue | None:
    def make() -> AnyValue:
        result = measure()
        if keeps(result):
            _keep(state, stage, key, result)
        return result

    stored = partial(state.store.get, stage, key, kind)
    return _stage(state, stage, [variant], step=f"{stage} {variant}", stored=stored, make=make)


def _stage(
    state: RunState,
    stage: str,
    variants: list[str],
    *,
    step: str,
    stored: Callable[[], AnyValue | None],
    make: Callable[[], AnyValue],
) -> AnyValue | None:
    """The stored result, or a new one; a failure is recorded for all `variants` and gives None."""
    start = time.monotonic()
    with state.progress.step(step) as shown:
        found = stored()
        if found is not None:
            shown.reused()
            state.reused.append(step)
            return found
        shown.begins()
        try:
            result = make()
        except KeyboardInterrupt:
            for variant in variants:
                state.fail(variant, _interrupted(stage))
            raise
        except PipelineError as error:
            shown.failed(str(error))
            reason = error.reason if isinstance(error, WorkerError) else "failed"
            for variant in variants:
                state.fail(variant, failure(stage, reason, str(error)))
            return None
    _remember_duration(state, step, time.monotonic() - start)
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
