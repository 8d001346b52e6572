"""A plan for a recipe file: its device, shapes, trace and what was measured before, brought together.

plan = plan_recipe(Path("recipes/27b.yaml"), hardware="h200-sxm", store=store)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.best_paths import ENGINE_RANKING, EngineRanking, Wanted, best_ways, ranking_key
from pipeline.data_sheet import HOST, Device, sheet_of
from pipeline.device_file import device_named
from pipeline.errors import PrerequisiteError, StageError
from pipeline.footprint import ShapeFacts, cached_shape_facts
from pipeline.hardware import detect, fingerprint, with_measured
from pipeline.model_source import fetch_description, read_config
from pipeline.plan import make_plan
from pipeline.plan_values import Plan, QualityPlan
from pipeline.quality_power import observed_flip_rates, quality_plan
from pipeline.recipe import ExpandedRecipe, LoadedRecipe, load_recipe
from pipeline.recipe_sections import WayToRun
from pipeline.reconciliation import reconcile
from pipeline.results import Report, VariantReport
from pipeline.speed_results import DeviceSpeed, SpeedRow
from pipeline.step_times import BatchTimes, MeasuredSteps, step_times_of_batches
from pipeline.store import Store
from pipeline.task_sizes import quality_request, task_sizes
from pipeline.traffic import Request, read_trace

MEASURED_DEVICE = "measured-device"
"""Where the store keeps a machine's last measured limits, which only `plan` reads."""


def plan_recipe(path: Path, *, hardware: str | None, store: Store) -> Plan:
    """Plan for the recipe's hardware, or for `hardware`; beside it the newest run of the same recipe here.

    Loads no weight. Raises RecipeError, UsageError or PrerequisiteError.
    """
    loaded = load_recipe(path)
    asked = hardware is not None
    name = hardware if hardware is not None else loaded.recipe.hardware
    device = _device(name, folder=Path.cwd() if asked else path.resolve().parent, store=store)
    best = best_for(loaded, device=device, store=store) if _is_here(device) else {}
    recipe = loaded.recipe.expand(device=device.kind, best=best)
    if asked and name != recipe.hardware:
        recipe = recipe.model_copy(update={"cost": None})  # that price is of another machine
    last = _newest_run(recipe, device=device, store=store)
    steps = _measured_steps(last.report) if last else {}
    plan = make_plan(
        loaded,
        recipe=recipe,
        device=device,
        facts=_facts(loaded, store=store),
        trace=_trace(loaded),
        measured_steps=steps,
        quality=_quality(loaded, recipe, last),
    )
    plan = plan.model_copy(update={"notes": (*plan.notes, *_choice_notes(recipe, best))})
    return _beside(plan, last, steps=steps) if last else plan


def plan_beside_results(
    loaded: LoadedRecipe, *, recipe: ExpandedRecipe, device: Device, report: Report, store: Store
) -> Report:
    """The report of a run just made, each variant with its planned figures, at the limits measured in that run."""
    plan = make_plan(
        loaded,
        recipe=recipe.model_copy(update={"traffic": None}),
        device=with_measured(device, report.device) if report.device else device,
        facts=_facts(loaded, store=store),
    )
    planned = {variant.name: variant for variant in plan.variants}
    variants = tuple(
        variant.model_copy(update={"planned": reconcile(planned[variant.name], variant)})
        for variant in report.variants
    )
    return report.model_copy(update={"variants": variants})


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


def best_for(loaded: LoadedRecipe, *, device: Device, store: Store) -> dict[str, WayToRun]:
    """What the short form means on `device`, which is this machine's; empty where the architecture isn't known."""
    recipe, architecture = loaded.recipe, read_config(loaded)
    if recipe.precisions is None or architecture is None:
        return {}
    named = recipe.speed.engine if recipe.speed else None
    paged = recipe.capacity is not None and "paged" in recipe.capacity.layouts
    wanted = Wanted(
        precisions=tuple(name.lower() for name in recipe.precisions),
        config=architecture.config,
        weights=recipe.model.weights,
        folder=Path(architecture.source).parent,
        engine=named.kind if named else None,
        serving=paged or recipe.serving is not None,
    )
    return best_ways(device, wanted, ranking=store.get(ENGINE_RANKING, ranking_key(device), EngineRanking))


def expand_here(loaded: LoadedRecipe, *, device: Device, store: Store) -> ExpandedRecipe:
    """The recipe with the defaults of this machine's `device`; a hub model's config and tokenizer are fetched first.

    Without them the first run of a model would mean other pairs than the second.
    """
    if loaded.recipe.precisions is not None:
        fetch_description(loaded)
    return loaded.recipe.expand(device=device.kind, best=best_for(loaded, device=device, store=store))


def _is_here(device: Device) -> bool:
    return _same_device(detect(), device)


def _choice_notes(recipe: ExpandedRecipe, best: Mapping[str, WayToRun]) -> list[str]:
    """Why each precision of the short form means what it does."""
    chosen = [(variant, best[variant.name]) for variant in recipe.variants if variant.name in best]
    return [
        f"{variant.name} is {way.because}" for variant, way in chosen if variant.quantizer == way.quantizer
    ]


def known_shapes(loaded: LoadedRecipe, *, store: Store) -> ShapeFacts | None:
    """The shapes of the recipe's model, kept in the store; None where its architecture isn't on this machine."""
    architecture = read_config(loaded)
    if architecture is None:
        return None
    return cached_shape_facts(
        architecture.config, cache_folder=store.root / "shapes", source=architecture.source
    )


def _facts(loaded: LoadedRecipe, *, store: Store) -> ShapeFacts:
    facts = known_shapes(loaded, store=store)
    if facts is None:
        raise PrerequisiteError(_no_architecture(loaded))
    return facts


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


def _quality(
    loaded: LoadedRecipe, recipe: ExpandedRecipe, last: _StoredRun | None
) -> tuple[QualityPlan, ...]:
    """What the gate's accuracy limits can decide, at the last run's flip rates where there was one."""
    request = quality_request(loaded, recipe)
    if request is None:
        return ()
    rates = observed_flip_rates(last.report) if last else {}
    return quality_plan(recipe, sizes=task_sizes(request), flip_rates=rates)


def _newest_run(recipe: ExpandedRecipe, *, device: Device, store: Store) -> _StoredRun | None:
    """The newest finished run on `device` that measured what this recipe asks for; all else is passed over."""
    wanted = _measured_part(recipe.model_dump(mode="json"))
    for file in sorted((store.root / "runs").glob("*/report.json"), reverse=True):
        if not file.is_file():
            continue
        try:
            content = file.read_bytes()
            if json.dumps(recipe.model.id, ensure_ascii=False).encode() not in content:
                continue
            report = Report.model_validate_json(content)
            measured_on = Device.model_validate_json(json.dumps(report.provenance.get("device")))
        except (OSError, ValidationError):
            continue
        same = _measured_part(report.resolved_recipe) == wanted and not report.interrupted
        if same and _same_device(measured_on, device):
            return _StoredRun(folder=file.parent, report=report)
    return None


def _measured_part(recipe: dict[str, Any]) -> dict[str, Any]:
    """What speed and capacity depend on: prices, traffic, rules and tasks can change without a new run."""
    return {
        name: recipe.get(name) for name in ("model", "baseline", "variants", "workload", "speed", "capacity")
    }


def _same_device(measured_on: Device, planned: Device) -> bool:
    """Whether a run's device is the planned one: alike in every fact, or the card of the planned data sheet."""
    sheet = sheet_of(measured_on.name)
    return fingerprint(measured_on) == fingerprint(planned) or (
        sheet is not None and sheet.name == planned.name
    )


def _measured_steps(report: Report) -> dict[str, MeasuredSteps]:
    """Step times by variant: those of continuous batching, or of static batches of enough sizes to tell."""
    found = {}
    for variant in report.variants:
        if variant.serving and variant.serving.step_times:
            found[variant.name] = variant.serving.step_times
            continue
        rows = variant.speed.rows if variant.speed else ()
        with suppress(StageError):
            found[variant.name] = step_times_of_batches(
                # A prefill in chunks is several steps: it tells nothing of one.
                [_times(row) for row in rows if row.outcome == "measured" and row.chunk_tokens is None]
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


def _beside(plan: Plan, last: _StoredRun, *, steps: Mapping[str, MeasuredSteps]) -> Plan:
    measured = {variant.name: variant for variant in last.report.variants}
    notes = [_fit_note(measured[name], fitted) for name, fitted in steps.items() if plan.traffic]
    return plan.model_copy(
        update={
            "measured_run": str(last.folder),
            "notes": (*plan.notes, *notes),
            "variants": tuple(
                variant.model_copy(update={"measured": reconcile(variant, measured[variant.name])})
                if variant.name in measured
                else variant
                for variant in plan.variants
            ),
        }
    )


def _fit_note(variant: VariantReport, fitted: MeasuredSteps) -> str:
    if variant.serving and variant.serving.step_times == fitted:
        most = max(row.concurrency for row in variant.serving.rows if row.mode == "continuous")
        return (
            f"{variant.name}: the fleet's step times are fitted to {fitted.samples:,} measured steps of continuous "
            f"batching, of up to {most} sequences (median error {100 * fitted.median_error:.0f} %); more are "
            "extrapolated"
        )
    rows = [
        row
        for row in (variant.speed.rows if variant.speed else ())
        if row.outcome == "measured" and row.chunk_tokens is None
    ]
    sizes = ", ".join(map(str, sorted({row.batch_size for row in rows})))
    prompts = ", ".join(map(str, sorted({row.prompt_tokens for row in rows})))
    return (
        f"{variant.name}: the fleet's step times are fitted to {fitted.samples} measured ones (batches of {sizes}, "
        f"prompts of {prompts} tokens); larger batches and other lengths are extrapolated"
    )
