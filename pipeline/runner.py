"""The life of a run: a loop over variants with content-addressed results.

    state = prepare(load_recipe(path), store=store, progress_stream=sys.stderr)
    run_stages(state)

Every stage runs in a fresh process; a result that is in the store is not measured again; a variant that fails
doesn't stop the others and never ships; an interruption keeps what is finished.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.capacity_results import CapacityResult
from pipeline.capacity_stage import is_whole, measure_capacity
from pipeline.checkpoint import read_manifest, verify
from pipeline.early_stopping import Stopping, plan_stopping
from pipeline.errors import PipelineError, StageError
from pipeline.measured import StageFailure
from pipeline.model_source import random_source_record, read_config, source_record, trained_folder
from pipeline.planning import MEASURED_DEVICE
from pipeline.processes import WorkerError, run_stage
from pipeline.recipe_sections import VariantSpec
from pipeline.reference_step import ensure_reference, with_reference
from pipeline.results import CheckpointManifest, QualityResult, SourceRecord
from pipeline.run_state import RunState, failure, null_step
from pipeline.serving_results import ServingResult, ServingStageResult
from pipeline.serving_stage import measure_serving
from pipeline.speed_results import SpeedStageResult
from pipeline.speed_stage import measure_speed
from pipeline.stage_keys import capacity_key, quality_key, quantize_key, random_key, serving_key, speed_key
from pipeline.stage_records import keep_result, stage_result, stored_stage
from pipeline.stages import (
    QualityStageRequest,
    QuantizeRequest,
    RandomVariantRequest,
)
from pipeline.store import Store
from pipeline.tasks import QualityRequest, inputs_digest
from pipeline.values import Value


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
            if variant.name == state.recipe.baseline:
                _null_run(state, variant)
    except KeyboardInterrupt:
        state.interrupted = True
        state.progress.say("interrupted: finished stages are kept; the same command goes on from here")


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
        state.store.result_path("quantize", key).unlink(missing_ok=True)
        with state.store.new_folder(folder) as partial:
            made = run_stage(
                worker, request(partial), CheckpointManifest, log=state.log, progress=state.progress.tell
            )
        keep_result(state, "quantize", key, made)
        return made

    stored = partial(_intact, folder, key=key, store=state.store)
    step = f"quantize {variant.name}"
    manifest = stage_result(state, "quantize", [variant.name], step=step, stored=stored, make=make)
    if manifest:
        state.manifests[variant.name] = manifest
        state.checkpoints[variant.name] = folder


def _intact(folder: Path, *, key: str, store: Store) -> CheckpointManifest | None:
    """The manifest of a finished checkpoint whose files are still those it names.

    It must be the one that was kept as the stage's result; where that is gone, the files speak for it.
    """
    try:
        manifest = read_manifest(folder)
        verify(folder, manifest, sha256_of=store.file_digest)
    except (PipelineError, OSError):
        return None
    kept = store.get("quantize", key, CheckpointManifest)
    return manifest if kept in (None, manifest) else None


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
            cache_bytes=state.speed_cache_bytes(members),
            device=state.device,
            log=state.log,
            progress=state.progress.tell,
        )
        keep_result(state, MEASURED_DEVICE, state.machine, result.device)
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


def _is_whole_set(result: SpeedStageResult | ServingStageResult) -> bool:
    """Whether nothing failed. A set with failures is measured again next time: what failed may have been mended.

    So is one of variants timed one after the other whose baseline couldn't be timed again: no rule can use it.
    """
    if (
        isinstance(result, SpeedStageResult)
        and not result.alternated
        and any(one.drift_percent is None for one in result.variants.values())
    ):
        return False
    outcomes = {row.outcome for one in result.variants.values() for row in one.rows}
    outcomes |= {
        one.prefix.outcome
        for one in result.variants.values()
        if isinstance(one, ServingResult) and one.prefix is not None
    }
    return not result.failures and "failed" not in outcomes


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
    names = [variant.name for variant in members]
    result = stored_stage(
        state, stage, names, key=key, kind=kind, measure=measure, step=stage, keeps=_is_whole_set
    )
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

    result = stored_stage(
        state,
        "capacity",
        [variant.name],
        key=key,
        kind=CapacityResult,
        measure=measure,
        step=f"capacity {variant.name}",
        keeps=is_whole,
    )
    if result:
        state.capacity[variant.name] = result


def _quality(state: RunState, variant: VariantSpec) -> None:
    request = state.ready.quality
    if request is None or _skips(state, variant, "quality"):
        return
    step, stopping = f"quality {variant.name}", _stopping(state, variant)
    result = _evaluated(state, variant, request, step=step, stopping=stopping)
    if result:
        state.quality[variant.name] = result


def _stopping(state: RunState, variant: VariantSpec) -> Stopping | None:
    """Where a candidate may stop; without the baseline's answers nothing can be decided early."""
    spec, baseline = state.recipe.quality, state.quality.get(state.recipe.baseline)
    if spec is None or not spec.sequential or baseline is None or variant.name == state.recipe.baseline:
        return None
    asked = {
        task: [rule.early_margins(task, baseline) for rule in state.recipe.gate] for task in baseline.tasks
    }
    return plan_stopping(baseline, asked=asked)


def _null_run(state: RunState, variant: VariantSpec) -> None:
    """The baseline again at another batch size; a baseline without quality has no noise to know."""
    spec, request = state.recipe.quality, state.ready.quality
    if spec is None or request is None or spec.null_batch_size is None or variant.name not in state.quality:
        return
    again = request.model_copy(update={"batch_size": spec.null_batch_size})
    state.null_quality = _evaluated(state, variant, again, step=null_step(variant.name))


def _evaluated(
    state: RunState,
    variant: VariantSpec,
    asked: QualityRequest,
    *,
    step: str,
    stopping: Stopping | None = None,
) -> QualityResult | None:
    """One checkpoint's answers, from the store or a worker; who asks for them, and why, isn't in the key.

    The answers of a worker that is stopped are kept for the run that goes on with it.
    """
    assert state.recipe.quality is not None
    request = QualityStageRequest(
        checkpoint=state.runnable(variant),
        compute_dtype=state.ready.quality_dtype(state.recipe.quality, folder=state.checkpoints[variant.name]),
        quality=asked,
        stopping=stopping,
        distribution=with_reference(state),
    )
    manifest, inputs = state.manifests[variant.name], inputs_digest(asked)
    key = quality_key(request, machine=state.machine, manifest=manifest, inputs=inputs)
    answers = state.store.answers_path(key)

    def measure() -> QualityResult:
        ensure_reference(state, request.distribution)
        keeping = request.model_copy(update={"answers": str(answers)})
        return run_stage("quality", keeping, QualityResult, log=state.log, progress=state.progress.tell)

    result = stored_stage(
        state, "quality", [variant.name], key=key, kind=QualityResult, measure=measure, step=step
    )
    if state.store.result_path("quality", key).exists():
        answers.unlink(missing_ok=True)
    return result


def _skips(state: RunState, variant: VariantSpec, stage: str) -> bool:
    if variant.name in state.checkpoints:
        return False
    state.fail(variant.name, _skipped(stage))
    return True


def _skipped(stage: str) -> StageFailure:
    return failure(stage, "skipped", "there is no checkpoint to run")
