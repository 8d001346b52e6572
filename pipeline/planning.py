"""A plan for a recipe file: its device, shapes, trace and what was measured before, brought together.

plan = plan_recipe(Path("recipes/27b.yaml"), hardware="h200-sxm", store=store)
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeline.data_sheet import HOST, Device
from pipeline.device_file import device_named
from pipeline.errors import PrerequisiteError, StageError
from pipeline.footprint import ShapeFacts, cached_shape_facts
from pipeline.hardware import detect, fingerprint, with_measured
from pipeline.model_source import read_config
from pipeline.plan import make_plan
from pipeline.plan_values import Plan
from pipeline.recipe import ExpandedRecipe, LoadedRecipe, load_recipe
from pipeline.reconciliation import reconcile
from pipeline.results import DeviceSpeed, Report, SpeedRow, VariantResults
from pipeline.step_times import BatchTimes, MeasuredSteps, step_times_of_batches
from pipeline.store import Store
from pipeline.traffic import Request, read_trace

MEASURED_DEVICE = "measured-device"
"""Where the store keeps a machine's last measured limits, which only `plan` reads."""


def plan_recipe(path: Path, *, hardware: str | None, store: Store) -> Plan:
    """Plan for the recipe's hardware, or for `hardware`; beside it the newest run of the same recipe here.

    Loads no weight. Raises RecipeError, UsageError or PrerequisiteError.
    """
    loaded = load_recipe(path)
    name = hardware or loaded.recipe.hardware
    device = _device(name, folder=Path.cwd() if hardware else path.resolve().parent, store=store)
    recipe = loaded.recipe.expand(device=device.kind)
    last = _newest_run(loaded, store=store) if name == HOST else None
    plan = make_plan(
        loaded,
        recipe=recipe,
        device=device,
        facts=_facts(loaded, store=store),
        trace=_trace(loaded),
        measured_steps=_measured_steps(last.report) if last else None,
    )
    return _beside(plan, last.report.variants, folder=last.folder) if last else plan


def plan_beside_results(
    loaded: LoadedRecipe,
    *,
    recipe: ExpandedRecipe,
    device: Device,
    speed: DeviceSpeed | None,
    variants: tuple[VariantResults, ...],
    store: Store,
) -> tuple[VariantResults, ...]:
    """`variants` of a run just made, each with its planned figures, at the limits measured in that run."""
    plan = make_plan(
        loaded,
        recipe=recipe.model_copy(update={"traffic": None}),
        device=with_measured(device, speed) if speed else device,
        facts=_facts(loaded, store=store),
    )
    planned = {variant.name: variant for variant in plan.variants}
    return tuple(
        variant.model_copy(update={"planned": reconcile(planned[variant.name], variant)})
        for variant in variants
    )


@dataclass(frozen=True)
class _StoredRun:
    folder: Path
    report: Report


def _device(name: str, *, folder: Path, store: Store) -> Device:
    """A data sheet's or file's device, or this machine with the limits that `doctor` or a run last measured."""
    if name != HOST:
        return device_named(name, folder=folder)
    device = detect()
    measured = store.get(MEASURED_DEVICE, fingerprint(device), DeviceSpeed)
    return with_measured(device, measured) if measured else device


def _facts(loaded: LoadedRecipe, *, store: Store) -> ShapeFacts:
    architecture = read_config(loaded)
    if architecture is None:
        raise PrerequisiteError(_no_architecture(loaded))
    return cached_shape_facts(
        architecture.config, cache_folder=store.root / "shapes", source=architecture.source
    )


def _no_architecture(loaded: LoadedRecipe) -> str:
    model = loaded.recipe.model
    if model.is_local:
        return f"{loaded.path}: model: there is no {loaded.resolve(model.id) / 'config.json'}"
    return (
        f"{loaded.path}: model: the architecture of {model.id} is not here; "
        f"name its config.json as model.config, or download it (`hf download {model.id} config.json`)"
    )


def _trace(loaded: LoadedRecipe) -> list[Request]:
    traffic = loaded.recipe.traffic
    return read_trace(loaded.resolve(traffic.trace)) if traffic and traffic.trace else []


def _newest_run(loaded: LoadedRecipe, *, store: Store) -> _StoredRun | None:
    """The newest finished run of this very recipe; reports of other recipes or versions are passed over."""
    wanted = loaded.recipe.digest()
    for file in sorted((store.root / "runs").glob("*/report.json"), reverse=True):
        try:
            content = file.read_bytes()
            if wanted.encode() not in content:
                continue
            report = Report.model_validate_json(content)
        except (OSError, ValidationError):
            continue
        if report.recipe_digest == wanted and not report.interrupted:
            return _StoredRun(folder=file.parent, report=report)
    return None


def _measured_steps(report: Report) -> dict[str, MeasuredSteps]:
    """Step times by variant, of those that were measured at enough batch sizes to tell."""
    found = {}
    for variant in report.variants:
        rows = variant.speed.rows if variant.speed else ()
        with suppress(StageError):
            found[variant.name] = step_times_of_batches(
                [_times(row) for row in rows if row.outcome == "measured"]
            )
    return found


def _times(row: SpeedRow) -> BatchTimes:
    assert row.ttft_s is not None
    return BatchTimes(
        batch_size=row.batch_size,
        prompt_tokens=row.prompt_tokens,
        new_tokens=row.new_tokens,
        ttft_s=row.ttft_s.median,
        tpot_s=row.tpot_s.median if row.tpot_s else None,
    )


def _beside(plan: Plan, results: tuple[VariantResults, ...], *, folder: Path) -> Plan:
    measured = {variant.name: variant for variant in results}
    return plan.model_copy(
        update={
            "measured_run": str(folder),
            "variants": tuple(
                variant.model_copy(update={"measured": reconcile(variant, measured[variant.name])})
                if variant.name in measured
                else variant
                for variant in plan.variants
            ),
        }
    )
