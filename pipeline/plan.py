"""What can be known before anything is loaded: footprints, ceilings, fit, what the gate can decide.

plan = make_plan(loaded, recipe=expanded, device=device, facts=facts)
print(plan_table(plan))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.advice import advice, first_that_fits, prefill_share, what_ifs, workload_class
from pipeline.data_sheet import Device
from pipeline.errors import RecipeError
from pipeline.fleet_plan import planned_fleet
from pipeline.footprint import ShapeFacts, kv_bytes, unreached_weights
from pipeline.kv_cache import CacheShape
from pipeline.plan_values import HardwarePlan, Plan, QualityPlan, TrafficPlan, VariantPlan
from pipeline.quality_power import quality_notes
from pipeline.recipe import ExpandedRecipe, LoadedRecipe
from pipeline.roofline import ops_per_byte
from pipeline.step_times import MeasuredSteps
from pipeline.traffic import Request
from pipeline.variant_plan import PlanSetting, roof_of, variant_plan

FULL_LOAD = 0.95
"""Above it the queue of Poisson arrivals is so long that no simulation of a plan's length settles."""


def make_plan(
    loaded: LoadedRecipe,
    *,
    recipe: ExpandedRecipe,
    device: Device,
    facts: ShapeFacts,
    trace: Sequence[Request] = (),
    measured_steps: Mapping[str, MeasuredSteps] | None = None,
    quality: tuple[QualityPlan, ...] = (),
) -> Plan:
    """Every variant on `device`, and the fleet where the recipe has traffic. Pure.

    `trace` are the requests of the file that `traffic.trace` names; `measured_steps` are step times by
    variant from a run on this device, which take the place of the roofline's in the fleet; `quality` is what the
    gate's accuracy limits can decide (`quality_power`). Raises RecipeError when a sequence is longer than the
    model allows.
    """
    setting = PlanSetting(
        recipe=recipe,
        device=device,
        facts=facts,
        trace=tuple(trace),
        dollars_per_hour=recipe.cost.dollars_per_hour if recipe.cost else device.dollars_per_hour,
    )
    _check_lengths(loaded, setting)
    specs = recipe.ordered()
    variants = _variants(setting, measured_steps or {})
    place = first_that_fits(variants)
    planned_batch = _planned_batch(recipe, variants[place])
    share = prefill_share(setting, roof_of(setting, specs[place]), batch_size=planned_batch)
    return Plan(
        recipe=str(loaded.path),
        model=recipe.model.id,
        hardware=_hardware(setting),
        parameters=_parameters(facts),
        traffic=_traffic(setting),
        context_tokens=setting.context_tokens,
        prompt_tokens=setting.prompt_tokens,
        new_tokens=setting.new_tokens,
        budget_bytes=setting.budget_bytes,
        latency_limit_s=setting.latency_limit_s,
        planned_batch=planned_batch,
        workload_class=workload_class(share),
        prefill_share=share,
        advice=advice(setting, variants, specs),
        what_ifs=what_ifs(setting, specs[0]),
        notes=(
            *_setting_notes(setting),
            *_cache_notes(facts, context_tokens=setting.context_tokens),
            *facts.notes,
            *_fit_notes(setting, variants),
            *_load_notes(variants),
            *_reach_notes(setting),
            *quality_notes(quality),
        ),
        variants=variants,
        quality=quality,
    )


def _variants(setting: PlanSetting, measured_steps: Mapping[str, MeasuredSteps]) -> tuple[VariantPlan, ...]:
    planned: list[VariantPlan] = []
    for spec in setting.recipe.ordered():
        one = variant_plan(setting, spec, baseline=planned[0] if planned else None)
        fleet = planned_fleet(setting, spec, plan=one, measured=measured_steps.get(spec.name))
        planned.append(one.model_copy(update={"fleet": fleet}))
    return tuple(planned)


def _check_lengths(loaded: LoadedRecipe, setting: PlanSetting) -> None:
    """Sequences beyond the model's limit; GPT-2 and the like would fail on them after hours of work."""
    limit = setting.facts.context_tokens
    if limit is None:
        return
    lengths = {
        "capacity.context_tokens": setting.context_tokens,
        "workload.prompt_tokens + workload.new_tokens": setting.prompt_tokens + setting.new_tokens,
    }
    if setting.recipe.traffic:
        lengths["traffic (longest request)"] = setting.longest_request_tokens
    if setting.recipe.speed:
        lengths |= setting.recipe.speed.sequence_tokens(new_tokens=setting.new_tokens)
    wrong = [f"{key} is {tokens}" for key, tokens in lengths.items() if tokens > limit]
    if wrong:
        raise RecipeError(
            f"{loaded.path}: {'; '.join(wrong)}: longer than the model's limit of {limit} tokens "
            "(max_position_embeddings); shorten it"
        )


def _planned_batch(recipe: ExpandedRecipe, variant: VariantPlan) -> int:
    """The largest of the recipe's batch sizes that the variant holds: of the first one that fits."""
    sizes = recipe.speed.batch_sizes if recipe.speed else (1,)
    held = max(sizes) if variant.max_batch is None else variant.max_batch
    return max((size for size in sizes if size <= held), default=1)


def _parameters(facts: ShapeFacts) -> dict[str, int]:
    return {
        "total": facts.parameters,
        **facts.parts.model_dump(),
        "linear": facts.linear_weights,
        "read_per_token": facts.weights_read_per_token,
    }


def _hardware(setting: PlanSetting) -> HardwarePlan:
    device = setting.device
    ratios = {}
    if device.bandwidth_bytes_per_s:
        ratios = {
            name: ops_per_byte(flops, bandwidth_bytes_per_s=device.bandwidth_bytes_per_s)
            for name, flops in device.peak_flops_per_s.items()
        }
    return HardwarePlan(
        name=device.name,
        memory_bytes=device.memory_bytes,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        peak_flops_per_s=device.peak_flops_per_s,
        ops_per_byte=ratios,
        dollars_per_hour=setting.dollars_per_hour,
        price_source="the recipe" if setting.recipe.cost else device.price_source,
        source=device.source,
    )


def _traffic(setting: PlanSetting) -> TrafficPlan | None:
    traffic = setting.recipe.traffic
    if traffic is None:
        return None
    return TrafficPlan(
        requests_per_s=traffic.requests_per_s,
        trace=traffic.trace,
        trace_requests=len(setting.trace) if traffic.trace else None,
        mean_sequence_tokens=setting.mean_sequence_tokens,
        targets=traffic.targets,
    )


def _cache_notes(facts: ShapeFacts, *, context_tokens: int) -> list[str]:
    notes = []
    if facts.cache is None:
        notes.append(f"KV cache: estimate unavailable: {facts.cache_unavailable}")
    else:
        notes.extend(_window_notes(facts, facts.cache, context_tokens))
    if facts.attention is None:
        notes.append("attention's own arithmetic isn't known for this model and isn't in the floors")
    return notes


def _window_notes(facts: ShapeFacts, cache: CacheShape, context_tokens: int) -> list[str]:
    """What is taken of layers with a window, and what an engine needs that reserves the context for them, too."""
    windowed = sum(window.values_per_token for window in cache.windows)
    growing = cache.growing_values_per_token + windowed
    reserving = cache.model_copy(update={"windows": (), "growing_values_per_token": growing})
    kept = kv_bytes(facts, context_tokens)
    reserved = kv_bytes(facts.model_copy(update={"cache": reserving}), context_tokens)
    if kept == reserved:
        return []
    layers = sum(window.layers for window in cache.windows)
    tokens = ", ".join(str(window.tokens) for window in cache.windows)
    return [
        f"KV cache: {layers} layers are taken to keep no more than their window ({tokens} tokens): {kept:,} B a "
        f"sequence of {context_tokens} tokens at 16 bits; an engine that reserves the whole context for them, too, "
        f"needs {reserved:,} B"
    ]


def _setting_notes(setting: PlanSetting) -> list[str]:
    """What of recipe and device doesn't go together, or isn't known yet."""
    notes = []
    spec, memory = setting.recipe.capacity, setting.device.memory_bytes
    if setting.device.bandwidth_bytes_per_s is None:
        notes.append(
            "this machine's bandwidth and FLOP/s aren't known yet: run `python -m pipeline doctor` once"
        )
    if spec and spec.memory_budget_bytes and spec.memory_budget_bytes > memory:
        notes.append(
            f"capacity.memory_budget_bytes is {spec.memory_budget_bytes / 1e9:.1f} GB, more than the device has: "
            f"{memory / 1e9:.1f} GB are planned with"
        )
    longest = setting.prompt_tokens + setting.new_tokens
    if longest > setting.context_tokens:
        notes.append(
            f"the workload's sequences of {longest} tokens are longer than capacity.context_tokens "
            f"({setting.context_tokens}), which `max batch` is counted with"
        )
    return notes


def _load_notes(variants: tuple[VariantPlan, ...]) -> list[str]:
    """Fleets so full that their waits depend on how long the traffic lasts."""
    return [
        f"{one.name}: {one.fleet.size.devices} devices are {100 * one.fleet.size.load:.0f} % full: their waits grow "
        "for as long as such traffic lasts; set targets, or take more"
        for one in variants
        if one.fleet and one.fleet.size.load and one.fleet.size.load > FULL_LOAD
    ]


def _fit_notes(setting: PlanSetting, variants: tuple[VariantPlan, ...]) -> list[str]:
    """What is too large for one device, and how many hold it."""
    return [_fit_note(setting, one) for one in variants if one.fits is False]


def _fit_note(setting: PlanSetting, variant: VariantPlan) -> str:
    many = (
        f"{variant.devices_to_hold} of {setting.device.name} hold it by memory alone "
        "(a device file can describe such a box as one device)"
    )
    if variant.kv_budget_bytes and variant.kv_bytes_at_context:
        return (
            f"{variant.name}: the weights leave {variant.kv_budget_bytes / 1e9:.2f} GB of the budget, one sequence of "
            f"{setting.context_tokens} tokens takes {variant.kv_bytes_at_context / 1e9:.2f} GB: shorten it, or {many}"
        )
    return f"{variant.name}: the weights don't fit into the budget; {many}"


def _reach_notes(setting: PlanSetting) -> list[str]:
    """Quantizers that would leave a part of the model's block weights as they are."""
    notes = []
    for spec in setting.recipe.ordered():
        unreached = unreached_weights(setting.facts, quantizer=spec.quantizer)
        if unreached:
            share = unreached / setting.facts.linear_weights
            notes.append(
                f"{spec.name}: {spec.quantizer.kind} leaves {100 * share:.0f} % of the block weights as they are "
                "(experts in one tensor); the sizes are those of its format over all of them"
            )
    return notes
