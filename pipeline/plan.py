"""What can be known before anything is loaded: footprints, ceilings, fit, what the gate can decide.

plan = make_plan(loaded, recipe=expanded, device=device, facts=facts)
print(plan_table(plan))
"""

from __future__ import annotations

from typing import Literal

from pipeline.footprint import ShapeFacts, kv_bytes, kv_bytes_per_token, weight_bytes
from pipeline.hardware import Device
from pipeline.recipe import ExpandedRecipe, LoadedRecipe, VariantSpec
from pipeline.roofline import (
    break_even_batch,
    capacity,
    decode_ceiling_tokens_per_s,
    dollars_per_million_tokens,
    ops_per_byte,
    prefill_ceiling_tokens_per_s,
)
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.statistics import detectable_drop, documents_to_decide
from pipeline.text_table import text_table
from pipeline.values import Value

USABLE_MEMORY_SHARE = 0.9
"""Share of a device's memory that a run may use when the recipe names no budget."""


ASSUMED_FLIP_RATE = 0.05
"""Share of answers that quantizing is taken to flip before anything is measured."""


class HardwarePlan(Value):
    """The device a plan is for."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float | None
    peak_flops_per_s: dict[str, float]
    ops_per_byte: dict[str, float]
    source: str


class VariantPlan(Value):
    """One variant before it exists; a figure is None where the device's limit isn't known."""

    name: str
    precision: str
    quantizer: str
    engine: str
    required: bool
    weight_bytes_on_disk: int
    weight_bytes_resident: int
    bits_per_weight: float
    bytes_read_per_token: int
    kv_bytes_per_token: int | None
    kv_bytes_at_context: int | None
    fits: bool | None
    max_batch: int | None
    decode_ceiling_tokens_per_s: float | None
    prefill_ceiling_tokens_per_s: float | None
    break_even_batch: float | None
    dollars_per_million_output_tokens: float | None


class Plan(Value):
    """`plan --json`."""

    recipe: str
    model: str
    hardware: HardwarePlan
    parameters: dict[str, int]
    context_tokens: int
    budget_bytes: int
    workload_class: Literal["prefill-heavy", "decode-heavy", "balanced"] | None
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    variants: tuple[VariantPlan, ...]


def make_plan(loaded: LoadedRecipe, *, recipe: ExpandedRecipe, device: Device, facts: ShapeFacts) -> Plan:
    """Footprints and ceilings of every variant on `device`. Pure."""
    context = recipe.capacity.context_tokens if recipe.capacity else _tokens(recipe)
    budget = budget_bytes(recipe, device=device)
    variants = tuple(
        _variant_plan(variant, recipe=recipe, device=device, facts=facts, context=context, budget=budget)
        for variant in recipe.ordered()
    )
    return Plan(
        recipe=str(loaded.path),
        model=recipe.model.id,
        hardware=_hardware(device),
        parameters={
            "total": facts.parameters,
            "embedding": facts.embedding_weights,
            "head": facts.head_weights,
            "linear": facts.linear_weights,
            "other": facts.other_weights,
            "read_per_token": facts.weights_read_per_token,
        },
        context_tokens=context,
        budget_bytes=budget,
        workload_class=_workload_class(recipe, variants[0]),
        advice=_advice(variants),
        notes=(*_cache_notes(facts), *_context_notes(facts, context), *quality_notes(recipe)),
        variants=variants,
    )


def budget_bytes(recipe: ExpandedRecipe, *, device: Device) -> int:
    """Memory a variant may use: the recipe's budget, else 0.9 × the device's memory."""
    named = recipe.capacity.memory_budget_bytes if recipe.capacity else None
    return named or int(USABLE_MEMORY_SHARE * device.memory_bytes)


def kv_element_bytes(variant: VariantSpec) -> int:
    """Bytes of one cached value: the engine's arithmetic type, or the variant's own 32 or 16 bits."""
    dtype = getattr(variant.engine, "compute_dtype", "auto")
    return 4 if dtype == "float32" or (dtype == "auto" and variant.quantizer.precision == "fp32") else 2


def _variant_plan(
    variant: VariantSpec,
    *,
    recipe: ExpandedRecipe,
    device: Device,
    facts: ShapeFacts,
    context: int,
    budget: int,
) -> VariantPlan:
    weights = weight_bytes(facts, quantizer=variant.quantizer)
    element = kv_element_bytes(variant)
    at_context = kv_bytes(facts, context, element_bytes=element)
    held = None
    if at_context:
        held = capacity(budget, weight_bytes=weights.resident, kv_bytes_per_sequence=at_context)
    flops = _flops(device)
    reading = weights.read_per_token + (kv_bytes(facts, _tokens(recipe), element_bytes=element) or 0)
    decode = None
    if device.bandwidth_bytes_per_s:
        decode = decode_ceiling_tokens_per_s(device.bandwidth_bytes_per_s, read_bytes_per_step=reading)
    full_batch_bytes = weights.read_per_token + (held or 0) * (at_context or 0)
    assert variant.engine is not None
    return VariantPlan(
        name=variant.name,
        precision=variant.quantizer.precision,
        quantizer=variant.quantizer.kind,
        engine=variant.engine.kind,
        required=variant.required,
        weight_bytes_on_disk=weights.on_disk,
        weight_bytes_resident=weights.resident,
        bits_per_weight=weights.bits_per_weight,
        bytes_read_per_token=weights.read_per_token,
        kv_bytes_per_token=kv_bytes_per_token(facts, element_bytes=element),
        kv_bytes_at_context=at_context,
        fits=None if held is None else held >= 1,
        max_batch=held,
        decode_ceiling_tokens_per_s=decode,
        prefill_ceiling_tokens_per_s=prefill_ceiling_tokens_per_s(
            flops, weights_read_per_token=facts.weights_read_per_token
        )
        if flops
        else None,
        break_even_batch=_break_even(device, flops, bits=weights.bits_per_weight),
        dollars_per_million_output_tokens=_price(
            recipe, device=device, facts=facts, batch_size=held, read_bytes_per_step=full_batch_bytes
        ),
    )


def _price(
    recipe: ExpandedRecipe,
    *,
    device: Device,
    facts: ShapeFacts,
    batch_size: int | None,
    read_bytes_per_step: int,
) -> float | None:
    """Dollars per million output tokens when the largest batch that fits decodes at its ceiling."""
    if recipe.cost is None or not device.bandwidth_bytes_per_s or not batch_size:
        return None
    best = decode_ceiling_tokens_per_s(
        device.bandwidth_bytes_per_s,
        read_bytes_per_step=read_bytes_per_step,
        batch_size=batch_size,
        peak_flops_per_s=_flops(device),
        weights_read_per_token=facts.weights_read_per_token,
    )
    return dollars_per_million_tokens(best, dollars_per_hour=recipe.cost.dollars_per_hour)


def _break_even(device: Device, flops: float | None, *, bits: float) -> float | None:
    if not flops or not device.bandwidth_bytes_per_s:
        return None
    ridge = ops_per_byte(flops, bandwidth_bytes_per_s=device.bandwidth_bytes_per_s)
    return break_even_batch(ridge, bytes_per_weight=bits / 8)


def _hardware(device: Device) -> HardwarePlan:
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
        source=device.source,
    )


def _flops(device: Device) -> float | None:
    """Peak of the 16-bit arithmetic that weight-only quantization computes in; a CPU's fastest type."""
    peaks = device.peak_flops_per_s
    if device.kind == "cpu":
        return max(peaks.values(), default=None)
    return peaks.get("fp16") or peaks.get("bf16")


def _tokens(recipe: ExpandedRecipe) -> int:
    return recipe.workload.prompt_tokens + recipe.workload.new_tokens


def _workload_class(
    recipe: ExpandedRecipe, baseline: VariantPlan
) -> Literal["prefill-heavy", "decode-heavy", "balanced"] | None:
    """By the roofline's time at batch 1; two thirds of the time make a phase the heavy one."""
    if not baseline.prefill_ceiling_tokens_per_s or not baseline.decode_ceiling_tokens_per_s:
        return None
    prefill_s = recipe.workload.prompt_tokens / baseline.prefill_ceiling_tokens_per_s
    decode_s = recipe.workload.new_tokens / baseline.decode_ceiling_tokens_per_s
    share = prefill_s / (prefill_s + decode_s)
    return "prefill-heavy" if share > 2 / 3 else "decode-heavy" if share < 1 / 3 else "balanced"


def _advice(variants: tuple[VariantPlan, ...]) -> tuple[str, ...]:
    baseline, *candidates = variants
    advice = []
    if baseline.break_even_batch and baseline.max_batch:
        useful = max(1, min(int(baseline.break_even_batch), baseline.max_batch))
        limit = "memory" if baseline.max_batch < baseline.break_even_batch else "arithmetic"
        advice.append(f"batching: up to {useful} requests share a weight read ({limit} ends it), nearly free")
    for variant in candidates:
        gain = baseline.bytes_read_per_token / variant.bytes_read_per_token
        held = (
            f", {variant.max_batch} sequences instead of {baseline.max_batch}"
            if variant.max_batch is not None
            else ""
        )
        advice.append(
            f"{variant.name}: reads {gain:.2f} × fewer bytes a token{held}; quality must be measured"
        )
    return tuple(advice)


def _cache_notes(facts: ShapeFacts) -> tuple[str, ...]:
    return (f"KV cache: estimate unavailable: {facts.cache_unavailable}",) if facts.cache is None else ()


def _context_notes(facts: ShapeFacts, context: int) -> tuple[str, ...]:
    if facts.context_tokens is None or context <= facts.context_tokens:
        return ()
    return (f"the context of {context} tokens is longer than the model's limit of {facts.context_tokens}",)


def quality_notes(recipe: ExpandedRecipe) -> tuple[str, ...]:
    """What the gate's accuracy margins can decide with the recipe's number of documents.

    Assumes that 5 % of the answers flip and that there is no true drop; one line for each margin and number.
    """
    if recipe.quality is None:
        return ()
    notes = []
    for rule in recipe.gate:
        if isinstance(rule, MaxQualityDrop):
            numbers: dict[int | None, list[str]] = {}
            for task in rule.tasks or recipe.quality.tasks:
                limit = recipe.quality.limits.get(task, recipe.quality.limit)
                numbers.setdefault(limit, []).append(task)
            notes += [_margin_note(rule, limit, tasks) for limit, tasks in numbers.items()]
    return tuple(notes)


def _margin_note(rule: MaxQualityDrop, limit: int | None, tasks: list[str]) -> str:
    needed = documents_to_decide(rule.points / 100, flip_rate=ASSUMED_FLIP_RATE, confidence=rule.confidence)
    start = (
        f"{rule.kind} {rule.points:g} points on {', '.join(tasks)}: about {needed} documents decide it "
        f"({100 * ASSUMED_FLIP_RATE:g} % flips, 80 % power)"
    )
    if limit is None:
        return f"{start}; all documents are used"
    if needed is not None and limit >= needed:
        return f"{start}; {limit} are used: enough"
    margin = detectable_drop(limit, flip_rate=ASSUMED_FLIP_RATE, confidence=rule.confidence)
    decides = f", they decide a margin of {100 * margin:.1f} points" if margin is not None else ""
    return f"{start}; {limit} are used: likely inconclusive{decides}. Raise quality.limit or the margin"


# --- for people ------------------------------------------------------------------------------------------


def plan_table(plan: Plan) -> str:
    """The plan as text for a terminal."""
    hardware = plan.hardware
    lines = [
        f"{plan.model} on {hardware.name}: {hardware.memory_bytes / 1e9:.1f} GB memory"
        + (f", {hardware.bandwidth_bytes_per_s / 1e9:.0f} GB/s" if hardware.bandwidth_bytes_per_s else "")
        + f" ({hardware.source})",
        f"{plan.parameters['total']:,} parameters; budget {plan.budget_bytes / 1e9:.2f} GB; "
        f"context {plan.context_tokens} tokens" + (f"; {plan.workload_class}" if plan.workload_class else ""),
        "",
        text_table(
            (
                "variant",
                "stored by",
                "weights GB",
                "bits/weight",
                "KV MB/seq",
                "fits",
                "max batch",
                "decode ≤ tok/s",
                "break-even batch",
            ),
            [
                (
                    variant.name,
                    variant.quantizer,
                    f"{variant.weight_bytes_resident / 1e9:.2f}",
                    f"{variant.bits_per_weight:.2f}",
                    _shown(variant.kv_bytes_at_context, 1e6, ".1f"),
                    {True: "yes", False: "no", None: "?"}[variant.fits],
                    _shown(variant.max_batch, 1, "d"),
                    _shown(variant.decode_ceiling_tokens_per_s, 1, ".1f"),
                    _shown(variant.break_even_batch, 1, ".0f"),
                )
                for variant in plan.variants
            ],
        ),
    ]
    for title, items in (("Advice", plan.advice), ("Notes", plan.notes)):
        if items:
            lines += ["", f"{title}:", *(f"  - {item}" for item in items)]
    return "\n".join(lines)


def _shown(value: float | None, unit: float, form: str) -> str:
    if value is None:
        return "?"
    return format(int(value) if form == "d" else value / unit, form)
