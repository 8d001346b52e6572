"""One variant before it exists: bytes, floors, ceilings, capacity and price on one device. Pure.

setting = PlanSetting(recipe=recipe, device=device, facts=facts)
variant_plan(setting, variant, baseline=None)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pipeline.data_sheet import Device
from pipeline.footprint import ShapeFacts, WeightBytes, kv_bytes, kv_bytes_per_token, weight_bytes
from pipeline.measured import Bound
from pipeline.plan_values import BatchPlan, CapacityPlan, LengthPlan, VariantPlan
from pipeline.recipe import ExpandedRecipe
from pipeline.recipe_sections import VariantSpec
from pipeline.roof import Roof, mean_depth_tokens
from pipeline.roofline import capacity, dollars_per_million_tokens
from pipeline.traffic import Request

USABLE_MEMORY_SHARE = 0.9
"""Share of a device's memory that a run may use when the recipe names no budget."""
APPLE_MEMORY_SHARE = 0.75
"""What macOS lets the GPU have of a large shared memory unless it is told otherwise (docs/hardware.md)."""
DEFAULT_BLOCK_TOKENS = 16
"""Tokens of a page of a paged KV cache where the recipe's traffic names none; vLLM's default on GPUs."""
FP8_BYTES = 1


@dataclass(frozen=True)
class PlanSetting:
    """What every variant of a plan has in common."""

    recipe: ExpandedRecipe
    device: Device
    facts: ShapeFacts
    dollars_per_hour: float | None
    trace: tuple[Request, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Prompt of the workload."""
        return self.recipe.workload.prompt_tokens

    @property
    def new_tokens(self) -> int:
        """Answer of the workload."""
        return self.recipe.workload.new_tokens

    @property
    def depth_tokens(self) -> int:
        """Cached tokens of a request half-way through its answer: where its mean step is taken."""
        return mean_depth_tokens(self.prompt_tokens, self.new_tokens)

    @property
    def context_tokens(self) -> int:
        """Length that a sequence may grow to: the capacity section's, else the workload's."""
        spec = self.recipe.capacity
        return spec.context_tokens if spec else self.prompt_tokens + self.new_tokens

    @property
    def budget_bytes(self) -> int:
        """Memory that a variant may use."""
        return budget_bytes(self.recipe, device=self.device)

    @property
    def latency_limit_s(self) -> float | None:
        """Longest time between two tokens that the traffic's targets allow."""
        return self.recipe.traffic.targets.tpot_s if self.recipe.traffic else None

    @cached_property
    def mean_sequence_tokens(self) -> float:
        """Full length of a mean request: of the trace or the traffic's distributions, else of the workload."""
        traffic = self.recipe.traffic
        if self.trace:
            return sum(one.prompt_tokens + one.new_tokens for one in self.trace) / len(self.trace)
        if traffic and traffic.prompt_tokens and traffic.new_tokens:
            return traffic.prompt_tokens.mean_tokens + traffic.new_tokens.mean_tokens
        return self.prompt_tokens + self.new_tokens

    @cached_property
    def longest_request_tokens(self) -> int:
        """The longest sequence that can come, by trace, distributions or workload."""
        traffic = self.recipe.traffic
        if self.trace:
            return max(one.prompt_tokens + one.new_tokens for one in self.trace)
        if traffic and traffic.prompt_tokens and traffic.new_tokens:
            return traffic.prompt_tokens.longest_tokens + traffic.new_tokens.longest_tokens
        return self.prompt_tokens + self.new_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens of a page."""
        return self.recipe.traffic.block_tokens if self.recipe.traffic else DEFAULT_BLOCK_TOKENS


def budget_bytes(recipe: ExpandedRecipe, *, device: Device) -> int:
    """Memory a variant may use: the recipe's budget, but never more than there is; else a share of the memory."""
    named = recipe.capacity.memory_budget_bytes if recipe.capacity else None
    share = APPLE_MEMORY_SHARE if device.kind == "mps" else USABLE_MEMORY_SHARE
    return min(named, device.memory_bytes) if named else int(share * device.memory_bytes)


def kv_element_bytes(variant: VariantSpec) -> int:
    """Bytes of one cached value in the variant's engine."""
    assert variant.engine is not None
    return variant.engine.kv_element_bytes(variant.quantizer)


def compute_bytes(variant: VariantSpec) -> int | None:
    """Bytes of the floats that the engine computes with; None for those that are stored."""
    assert variant.engine is not None
    return variant.engine.float_bytes()


@dataclass(frozen=True)
class Arithmetic:
    """The type that a variant multiplies in, by its name in the data sheet, and the device's dense peak for it."""

    type: str
    flops_per_s: float


def arithmetic(variant: VariantSpec, *, device: Device) -> Arithmetic | None:
    """What limits a variant's arithmetic on `device`; None where that peak isn't known.

    Weight-only quantization multiplies in 16 bits, LLM.int8 in INT8, a 32-bit engine in FP32. A CPU's fastest type
    stands for all of its own: which one a kernel uses there isn't told by the variant.
    """
    peaks = device.peak_flops_per_s
    if device.kind == "cpu":
        names = sorted(peaks, key=lambda name: -peaks[name])
    elif variant.quantizer.integer_arithmetic:
        names = ["int8"]
    elif compute_bytes(variant) == 4 or variant.quantizer.precision == "fp32":
        names = ["fp32"]
    else:
        names = ["fp16", "bf16"]
    return next((Arithmetic(name, peaks[name]) for name in names if name in peaks), None)


def roof_of(setting: PlanSetting, variant: VariantSpec) -> Roof | None:
    """The variant's roof; None where the device's bandwidth isn't known."""
    if not setting.device.bandwidth_bytes_per_s:
        return None
    multiplied = arithmetic(variant, device=setting.device)
    return Roof(
        facts=setting.facts,
        quantizer=variant.quantizer,
        kv_element_bytes=kv_element_bytes(variant),
        compute_bytes=compute_bytes(variant),
        bandwidth_bytes_per_s=setting.device.bandwidth_bytes_per_s,
        peak_flops_per_s=multiplied.flops_per_s if multiplied else None,
    )


def variant_plan(setting: PlanSetting, variant: VariantSpec, *, baseline: VariantPlan | None) -> VariantPlan:
    """Every figure of one variant; `baseline` is None for the baseline itself."""
    weights = weight_bytes(setting.facts, quantizer=variant.quantizer, compute_bytes=compute_bytes(variant))
    return _Variant(setting=setting, variant=variant, weights=weights).plan(baseline)


@dataclass(frozen=True)
class _Variant:
    setting: PlanSetting
    variant: VariantSpec
    weights: WeightBytes

    def plan(self, baseline: VariantPlan | None) -> VariantPlan:
        setting, weights = self.setting, self.weights
        roof = roof_of(setting, self.variant)
        at_context = self.cache_bytes(setting.context_tokens)
        at_context_fp8 = self.cache_bytes(setting.context_tokens, element_bytes=FP8_BYTES)
        held = self.held(at_context)
        served = self.held(self.cache_bytes(self.in_blocks(setting.prompt_tokens + setting.new_tokens)))
        ending = _ending(setting, roof, served)
        best = self.best_batch(roof, served)
        limits = self.limits(roof)
        batches = self.batches(roof, held=served, best=best)
        kv_budget = max(0, setting.budget_bytes - weights.resident)
        assert self.variant.engine is not None
        return VariantPlan(
            name=self.variant.name,
            precision=self.variant.quantizer.precision,
            quantizer=self.variant.quantizer.kind,
            engine=self.variant.engine.kind,
            required=self.variant.required,
            weight_bytes_on_disk=weights.on_disk,
            weight_bytes_resident=weights.resident,
            weight_parts=weights.parts,
            bits_per_weight=weights.bits_per_weight,
            bytes_read_per_token=weights.read_per_token,
            kv_bytes_per_token=kv_bytes_per_token(
                setting.facts, element_bytes=kv_element_bytes(self.variant)
            ),
            kv_bytes_at_context=at_context,
            kv_bytes_at_context_fp8=at_context_fp8,
            kv_budget_bytes=kv_budget,
            kv_budget_gain=_gain(kv_budget, baseline),
            fits=None if held is None else held >= 1,
            devices_to_hold=None if at_context is None else self.devices_to_hold(at_context),
            max_batch=held,
            max_batch_fp8_kv=self.held(at_context_fp8),
            max_batch_paged=served,
            capacity=self.capacity_plan(),
            passes_per_answer=setting.new_tokens,
            best_batch=best,
            compute_bound_batch=ending.compute_bound_batch,
            limited_by=ending.limited_by,
            batches=batches,
            lengths=self.lengths(roof),
            dollars_per_million_output_tokens=next(
                (one.dollars_per_million_output_tokens for one in batches if one.batch_size == best), None
            ),
            dollars_per_million_input_tokens=self.input_price(limits),
            **vars(limits),
        )

    def cache_bytes(self, tokens: int, *, element_bytes: int | None = None) -> int | None:
        assert self.variant.engine is not None
        element = element_bytes or kv_element_bytes(self.variant)
        return kv_bytes(self.setting.facts, self.variant.engine.cache_tokens(tokens), element_bytes=element)

    def held(self, sequence_bytes: float | None, *, budget: int | None = None) -> int | None:
        """Sequences that fit beside the weights; None where a sequence's bytes aren't known."""
        if not sequence_bytes:
            return None
        budget = self.setting.budget_bytes if budget is None else budget
        return capacity(budget, weight_bytes=self.weights.resident, kv_bytes_per_sequence=sequence_bytes)

    def devices_to_hold(self, at_context: int) -> int:
        return math.ceil((self.weights.resident + at_context) / self.setting.budget_bytes)

    def in_blocks(self, tokens: float) -> int:
        """Tokens of the whole blocks that a sequence fills."""
        return self.setting.block_tokens * math.ceil(tokens / self.setting.block_tokens)

    def capacity_plan(self) -> CapacityPlan | None:
        setting = self.setting
        memory = setting.device.memory_bytes
        whole = self.cache_bytes(setting.context_tokens)
        paged = self.cache_bytes(self.in_blocks(setting.mean_sequence_tokens))
        if not whole or not paged:
            return None
        return CapacityPlan(
            block_tokens=setting.block_tokens,
            mean_sequence_tokens=setting.mean_sequence_tokens,
            contiguous_without_headroom=self.held(whole, budget=memory) or 0,
            paged=self.held(paged) or 0,
            paged_without_headroom=self.held(paged, budget=memory) or 0,
        )

    def best_batch(self, roof: Roof | None, held: int | None) -> int | None:
        """The largest batch that a paged cache holds and the latency limit allows; None where that can't be told."""
        limit_s = self.setting.latency_limit_s
        if not held or roof is None:
            return held
        if limit_s is None:
            return held
        return roof.largest_batch_within(limit_s, context_tokens=self.setting.depth_tokens, at_most=held)

    def limits(self, roof: Roof | None) -> _Limits:
        """Floors and ceilings of one request alone."""
        setting = self.setting
        if roof is None:
            return _Limits()
        multiplied = arithmetic(self.variant, device=setting.device)
        known = multiplied is not None  # without a peak, what may be bound by arithmetic has no floor
        step_s = roof.step_s(1, context_tokens=setting.depth_tokens)
        prefill_s = roof.prefill_s(setting.prompt_tokens) if known else None
        answer_s = roof.answer_s(setting.prompt_tokens, new_tokens=setting.new_tokens)
        return _Limits(
            arithmetic_type=multiplied.type if multiplied else None,
            arithmetic_flops_per_s=multiplied.flops_per_s if multiplied else None,
            decode_ceiling_tokens_per_s=1 / step_s,
            tpot_floor_s=step_s,
            prefill_ceiling_tokens_per_s=prefill_s and setting.prompt_tokens / prefill_s,
            prefill_intensity_flops_per_byte=roof.prefill_intensity(setting.prompt_tokens),
            prefill_bound=roof.prefill_bound(setting.prompt_tokens) if known else None,
            ttft_floor_s=prefill_s,
            answer_floor_s=answer_s if known else None,
            bytes_per_answer=roof.answer_bytes(setting.prompt_tokens, new_tokens=setting.new_tokens),
            break_even_batch=roof.break_even_batch(),
        )

    def batches(self, roof: Roof | None, *, held: int | None, best: int | None) -> tuple[BatchPlan, ...]:
        """The recipe's batch sizes, powers of two up to what fits, and the best batch."""
        if roof is None:
            return ()
        sizes = set(self.setting.recipe.speed.batch_sizes if self.setting.recipe.speed else (1,))
        sizes |= {2**power for power in range(12) if 2**power <= (held or 1)}
        sizes |= {best} if best else set()
        return tuple(self.batch(roof, size, held=held) for size in sorted(sizes))

    def batch(self, roof: Roof, size: int, *, held: int | None) -> BatchPlan:
        depth = self.setting.depth_tokens
        step_s = roof.step_s(size, context_tokens=depth)
        fits = None if held is None else size <= held
        price = self.setting.dollars_per_hour if fits is not False else None
        return BatchPlan(
            batch_size=size,
            intensity_flops_per_byte=roof.intensity(size, context_tokens=depth),
            step_floor_s=step_s,
            tokens_per_s=size / step_s,
            bound=roof.bound(size, context_tokens=depth),
            fits=fits,
            dollars_per_million_output_tokens=price
            and dollars_per_million_tokens(size / step_s, dollars_per_hour=price),
        )

    def lengths(self, roof: Roof | None) -> tuple[LengthPlan, ...]:
        """Floors at the prompt lengths (where the arithmetic's peak is known) and depths of the speed section."""
        spec = self.setting.recipe.speed
        if roof is None or spec is None:
            return ()
        known = roof.peak_flops_per_s is not None
        prefill = [
            LengthPlan(
                test="prefill",
                prompt_tokens=tokens,
                floor_s=roof.prefill_s(tokens),
                bound=roof.prefill_bound(tokens),
            )
            for tokens in (spec.prompt_tokens or () if known else ())
        ]
        depths = {
            tokens: mean_depth_tokens(tokens, self.setting.new_tokens) for tokens in spec.context_tokens or ()
        }
        decode = [
            LengthPlan(
                test="depth",
                prompt_tokens=tokens,
                floor_s=roof.step_s(1, context_tokens=depth),
                bound=roof.bound(1, context_tokens=depth),
            )
            for tokens, depth in depths.items()
        ]
        return (*prefill, *decode)

    def input_price(self, limits: _Limits) -> float | None:
        """Dollars per million prompt tokens at the prefill's ceiling, on a machine kept busy."""
        price, rate = self.setting.dollars_per_hour, limits.prefill_ceiling_tokens_per_s
        return dollars_per_million_tokens(rate, dollars_per_hour=price) if price and rate else None


@dataclass(frozen=True)
class _Limits:
    """One request alone; all None where the device's bandwidth isn't known. Fields as in `VariantPlan`."""

    arithmetic_type: str | None = None
    arithmetic_flops_per_s: float | None = None
    decode_ceiling_tokens_per_s: float | None = None
    tpot_floor_s: float | None = None
    prefill_ceiling_tokens_per_s: float | None = None
    prefill_intensity_flops_per_byte: float | None = None
    prefill_bound: Bound | None = None
    ttft_floor_s: float | None = None
    answer_floor_s: float | None = None
    bytes_per_answer: int | None = None
    break_even_batch: float | None = None


def _gain(kv_budget: int, baseline: VariantPlan | None) -> float | None:
    if baseline is None:
        return 1.0 if kv_budget else None
    return kv_budget / baseline.kv_budget_bytes if baseline.kv_budget_bytes else None


@dataclass(frozen=True)
class _Ending:
    """What ends the batching."""

    compute_bound_batch: int | None
    limited_by: Literal["compute", "capacity"] | None


def _ending(setting: PlanSetting, roof: Roof | None, held: int | None) -> _Ending:
    if roof is None or roof.peak_flops_per_s is None:
        return _Ending(compute_bound_batch=None, limited_by=None)
    batch = roof.compute_bound_batch(context_tokens=setting.depth_tokens)
    if held is None:
        return _Ending(compute_bound_batch=batch, limited_by=None)
    return _Ending(
        compute_bound_batch=batch,
        limited_by="compute" if batch is not None and batch <= held else "capacity",
    )
