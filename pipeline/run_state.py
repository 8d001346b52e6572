"""What a run has so far, and how it begins: device, recipe written out, preflight, a folder of its own.

state = prepare(load_recipe(path), store=store, progress_stream=sys.stderr)
state.runnable(state.recipe.ordered()[0])
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from pipeline.capacity_results import CapacityResult
from pipeline.errors import PrerequisiteError
from pipeline.hardware import Device, detect, fingerprint
from pipeline.measured import StageFailure
from pipeline.planning import expand_here
from pipeline.preflight import Preflight, preflight
from pipeline.progress import Progress
from pipeline.recipe import ExpandedRecipe, LoadedRecipe
from pipeline.recipe_sections import VariantSpec
from pipeline.results import CheckpointManifest, QualityResult
from pipeline.serving_results import ServingStageResult
from pipeline.speed_results import SpeedStageResult
from pipeline.speed_stage import timed_shapes
from pipeline.stages import RunnableCheckpoint
from pipeline.store import Store


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
    null_quality: QualityResult | None = None
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

    def speed_cache_bytes(self, variants: Sequence[VariantSpec]) -> int:
        """KV caches of these variants, each at the shape of the speed stage that holds the most."""
        assert self.recipe.speed is not None
        shapes = timed_shapes(self.recipe.speed, workload=self.recipe.workload)
        return sum(
            max(
                shape.batch_size
                * (self.ready.kv_bytes(shape.prompt_tokens + shape.new_tokens, variant=variant) or 0)
                for shape in shapes
            )
            for variant in variants
        )


def prepare(loaded: LoadedRecipe, *, store: Store, progress_stream: TextIO) -> RunState:
    """Everything that must hold before any work; `store` is prepared and held.

    Raises PrerequisiteError listing all that is missing.
    """
    device = detect()
    recipe = expand_here(loaded, device=device, store=store)
    ready = preflight(loaded, recipe=recipe, device=device, store=store)
    if ready.problems:
        raise PrerequisiteError(ready.message(str(loaded.path)))
    folder = new_run_folder(store, loaded.path)
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
        *(_quality_steps(recipe) if recipe.quality else []),
    )


def null_step(variant: str) -> str:
    """The step in which the baseline is evaluated again."""
    return f"null run {variant}"


def _quality_steps(recipe: ExpandedRecipe) -> list[str]:
    steps = [f"quality {variant.name}" for variant in recipe.ordered()]
    if recipe.quality and recipe.quality.null_batch_size:
        steps.insert(1, null_step(recipe.baseline))
    return steps


def new_run_folder(store: Store, recipe_path: Path) -> Path:
    """A new folder; its name sorts by time, and holds nothing that a shell or a path pattern reads otherwise."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    recipe = re.sub(r"[^\w.\-]", "_", recipe_path.stem)
    for attempt in range(1000):
        folder = store.root / "runs" / f"{stamp}-{recipe}{f'-{attempt}' if attempt else ''}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder.resolve()
    raise PrerequisiteError(f"no free folder name under {store.root / 'runs'}")


def failure(stage: str, reason: str, message: str) -> StageFailure:
    """A stage that gave nothing, told in the words of `results.StageFailure`."""
    return StageFailure.model_validate({"stage": stage, "reason": reason, "message": message})
