"""What a report's own recipe declares and its results don't hold, so that nothing ships by absence. Pure.

A result that was dropped shortens the list of what is judged instead of failing: a gate that judges every task finds no
fault with a task that nobody measured. So the declared set is compared with the set that was found.

    for name, gaps in missing_results(report).items():
        print(name, gaps)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.readings import bandwidths
from pipeline.results import QualityResult, Report, VariantResults

SECTIONS = ("speed", "serving", "capacity", "quality")
"""Sections of a recipe that give every variant a result of the same name, or a failure."""
SAME_AS_DECLARED = ("limit", "limits", "seed")
"""Of the quality section: what a result made for another recipe differs in."""
ROUNDED = 1e-3
"""How far apart the same bandwidth may lie after a few divisions and the rounding of whoever copied it."""


def missing_results(report: Report) -> dict[str, tuple[str, ...]]:
    """By variant what is declared and not there, one sentence each; variants without a gap are left out.

    A report that doesn't keep its recipe's variants is taken as it is.
    """
    recipe = report.resolved_recipe
    declared = recipe.get("variants")
    if not isinstance(declared, list):
        return {}
    found = {variant.name: variant for variant in report.variants}
    gaps: dict[str, list[str]] = {}
    for entry in declared:
        name = str(entry.get("name")) if isinstance(entry, dict) else ""
        variant = found.pop(name, None)
        if variant is None:
            whose = report.baseline if _is_required(entry) else name
            gaps.setdefault(whose, []).append(f"{name}: the recipe's variant has no results in the report")
            continue
        gaps.setdefault(name, []).extend((*_gaps(entry, variant, recipe), *_other_device(variant, report)))
        if variant.required != _is_required(entry):
            told = (
                f"{name}: required is {variant.required} in its results, {_is_required(entry)} in the recipe"
            )
            gaps.setdefault(report.baseline, []).append(told)
    for name in found:
        gaps.setdefault(name, []).append(f"{name}: is no variant of the report's recipe")
    if recipe.get("baseline") not in (None, report.baseline):
        told = f"{report.baseline}: the recipe's baseline is {recipe['baseline']}"
        gaps.setdefault(report.baseline, []).append(told)
    return {name: tuple(some) for name, some in gaps.items() if some}


def _is_required(entry: Any) -> bool:
    return not (isinstance(entry, dict) and entry.get("required") is False)


def _gaps(entry: Mapping[str, Any], variant: VariantResults, recipe: Mapping[str, Any]) -> Iterator[str]:
    quantizer = entry.get("quantizer")
    if quantizer is not None and quantizer != variant.quantizer:
        yield f"{variant.name}: was made by the quantizer {variant.quantizer}, the recipe's is {quantizer}"
    failed = {failure.stage for failure in variant.failures}
    for section in SECTIONS:
        asked = recipe.get(section)
        if isinstance(asked, dict) and getattr(variant, section) is None and section not in failed:
            yield f"{variant.name}: no result of the {section} stage, and no failure that says why"
    yield from _speed_gaps(variant, recipe.get("speed"), recipe.get("workload"))
    if variant.quality is not None and isinstance(recipe.get("quality"), dict):
        yield from _quality_gaps(variant.name, variant.quality, recipe["quality"])
        if variant.name == recipe.get("baseline") and _lacks_null_run(variant, recipe["quality"]):
            yield f"{variant.name}: no null run, which the recipe asks for, so its noise isn't known"


def _lacks_null_run(variant: VariantResults, asked: Mapping[str, Any]) -> bool:
    """Without it rules judge as if there were no noise; a null run that failed is a failure of the quality stage."""
    failed = any(failure.stage == "quality" for failure in variant.failures)
    return asked.get("null_batch_size") is not None and variant.null_quality is None and not failed


def _speed_gaps(variant: VariantResults, asked: Any, workload: Any) -> Iterator[str]:
    """Batch sizes without a row, measured or not, and rows of another workload."""
    if variant.speed is None or not isinstance(asked, dict):
        return
    rows = variant.speed.of("batch")
    for size in asked.get("batch_sizes") or ():
        if size not in {row.batch_size for row in rows}:
            yield f"{variant.name}: no speed row of batch size {size}, which the recipe asks for"
    for field in ("prompt_tokens", "new_tokens") if isinstance(workload, dict) else ():
        other = sorted({getattr(row, field) for row in rows} - {workload.get(field)})
        if field in workload and other:
            yield f"{variant.name}: timed with {field} {other[0]}, the recipe's workload has {workload[field]}"


def _other_device(variant: VariantResults, report: Report) -> Iterator[str]:
    """Rows whose times, bytes and share come to another bandwidth than the one measured in the report's speed stage."""
    if report.device is None:
        return
    measured = report.device.read_bandwidth_bytes_per_s
    other = [one for one in bandwidths(variant) if not math.isclose(one, measured, rel_tol=ROUNDED)]
    if other:
        yield (
            f"{variant.name}: its times and shares mean a memory of {other[0] / 1e9:.4g} GB/s, the report's device has "
            f"{measured / 1e9:.4g}: they are of another stage or machine"
        )


def _quality_gaps(name: str, quality: QualityResult, asked: Mapping[str, Any]) -> Iterator[str]:
    """Tasks without a result, and results of another limit or seed."""
    held = {*quality.tasks, *quality.groups}
    members = {task for tasks in quality.groups.values() for task in tasks}
    declared = [str(task) for task in asked.get("tasks") or ()]
    absent = [task for task in declared if task not in held]
    # A tag of the harness is opened into tasks of other names, which nothing else explains.
    opened = quality.tasks.keys() - {*declared, *members}
    if absent and not opened:
        yield f"{name}: no result of the task {', '.join(absent)}, which the recipe asks for"
    lost = sorted(members - quality.tasks.keys())
    if lost:
        yield f"{name}: no result of {', '.join(lost)}, which a group of the recipe holds"
    for field in SAME_AS_DECLARED:
        if field in asked and asked[field] != getattr(quality, field):
            yield f"{name}: evaluated with {field} {getattr(quality, field)}, the recipe's is {asked[field]}"
