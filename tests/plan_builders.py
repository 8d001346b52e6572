"""Plans for tests of what is made from them: consistent figures of a 10-billion-parameter model on an 80 GB card.

>>> plan(variant("bf16"), variant("int4")).variants[1].name
'int4'
"""

from __future__ import annotations

from typing import Any

from pipeline.footprint import WeightParts
from pipeline.plan_values import BatchPlan, CapacityPlan, HardwarePlan, Plan, VariantPlan

PARAMETERS = 10_000_000_000
BANDWIDTH, PEAK, MEMORY, BUDGET = 2e12, 400e12, 80_000_000_000, 72_000_000_000
KV_PER_TOKEN, CONTEXT, DEPTH = 100_000, 4096, 1024
BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}


def hardware(**fields: Any) -> HardwarePlan:
    """A card with 16-bit and FP8 arithmetic and a price."""
    defaults: dict[str, Any] = {
        "name": "card-80",
        "memory_bytes": MEMORY,
        "bandwidth_bytes_per_s": BANDWIDTH,
        "peak_flops_per_s": {"fp32": PEAK / 10, "fp16": PEAK, "bf16": PEAK, "fp8": 2 * PEAK},
        "ops_per_byte": {"fp32": 20.0, "fp16": 200.0, "bf16": 200.0, "fp8": 400.0},
        "dollars_per_hour": 2.0,
        "price_source": "a price list",
        "source": "a data sheet",
    }
    return HardwarePlan(**{**defaults, **fields})


def batch(size: int, *, weight_bytes: float, fits: bool | None = True) -> BatchPlan:
    """One step at the roof, priced if it fits."""
    read, flops = weight_bytes + size * DEPTH * KV_PER_TOKEN, 2.0 * PARAMETERS * size
    step_s = max(read / BANDWIDTH, flops / PEAK)
    return BatchPlan(
        batch_size=size,
        intensity_flops_per_byte=flops / read,
        step_floor_s=step_s,
        tokens_per_s=size / step_s,
        bound="compute" if flops / PEAK >= read / BANDWIDTH else "memory",
        fits=fits,
        dollars_per_million_output_tokens=None if fits is False else 2.0 / (size / step_s * 3600) * 1e6,
    )


def variant(name: str, *, precision: str = "bf16", copies: float = 1, **fields: Any) -> VariantPlan:
    """A variant that stores each weight at its precision; `copies` of it make a model too large."""
    size = int(copies * PARAMETERS * BYTES[precision])
    packed = 0 if precision == "bf16" else size - size // 5
    cache = CONTEXT * KV_PER_TOKEN
    held = max(0, (BUDGET - size) // cache)
    sizes = sorted({1, 8, 32} | ({held} if held else set()))
    prefill_s = 2.0 * PARAMETERS * DEPTH / PEAK
    step_s = (size + DEPTH * KV_PER_TOKEN) / BANDWIDTH
    best = batch(held, weight_bytes=size) if held else None
    defaults: dict[str, Any] = {
        "name": name,
        "precision": precision,
        "quantizer": "none" if precision == "bf16" else "quanto",
        "engine": "transformers",
        "required": True,
        "weight_bytes_on_disk": size,
        "weight_bytes_resident": size,
        "weight_parts": WeightParts(
            packed=packed,
            scales=size // 25 if packed else 0,
            zero_points=0,
            codebooks=0,
            metadata=0,
            unquantized=size - packed - (size // 25 if packed else 0),
        ),
        "bits_per_weight": 8 * BYTES[precision],
        "bytes_read_per_token": size,
        "kv_bytes_per_token": KV_PER_TOKEN,
        "kv_bytes_at_context": cache,
        "kv_bytes_at_context_fp8": cache // 2,
        "kv_budget_bytes": max(0, BUDGET - size),
        "kv_budget_gain": 1.0,
        "fits": held >= 1,
        "devices_to_hold": -(-(size + cache) // BUDGET),
        "max_batch": held,
        "max_batch_fp8_kv": 2 * held,
        "max_batch_paged": held,
        "capacity": CapacityPlan(
            block_tokens=16,
            mean_sequence_tokens=2048.0,
            contiguous_without_headroom=held,
            paged=2 * held,
            paged_without_headroom=2 * held,
        ),
        "arithmetic_type": "fp16",
        "arithmetic_flops_per_s": PEAK,
        "decode_ceiling_tokens_per_s": 1 / step_s,
        "tpot_floor_s": step_s,
        "prefill_ceiling_tokens_per_s": DEPTH / prefill_s,
        "prefill_intensity_flops_per_byte": 2.0 * PARAMETERS * DEPTH / size,
        "prefill_bound": "compute",
        "ttft_floor_s": prefill_s,
        "answer_floor_s": prefill_s + 99 * step_s,
        "passes_per_answer": 100,
        "bytes_per_answer": round(size + 99 * step_s * BANDWIDTH),
        "break_even_batch": 200.0 * (size / PARAMETERS) / 2,
        "compute_bound_batch": None,
        "limited_by": "capacity",
        "batches": tuple(batch(one, weight_bytes=size, fits=one <= held) for one in sizes),
        "best_batch": held,
        "dollars_per_million_output_tokens": best and best.dollars_per_million_output_tokens,
        "dollars_per_million_input_tokens": 2.0 / (DEPTH / prefill_s * 3600) * 1e6,
    }
    return VariantPlan(**{**defaults, **fields})


def plan(*variants: VariantPlan, **fields: Any) -> Plan:
    """A plan of these variants, by default of bf16, int8 and int4."""
    defaults: dict[str, Any] = {
        "recipe": "recipes/some.yaml",
        "model": "some/model-10b",
        "hardware": hardware(),
        "parameters": {
            **{"total": PARAMETERS, "embedding": 0, "head": 0, "attention": PARAMETERS // 4, "experts": 0},
            **{"mlp": PARAMETERS - PARAMETERS // 4, "norms": 0, "vision": 0, "other": 0},
            **{"linear": PARAMETERS, "read_per_token": PARAMETERS},
        },
        "traffic": None,
        "context_tokens": CONTEXT,
        "prompt_tokens": DEPTH,
        "new_tokens": 100,
        "budget_bytes": BUDGET,
        "latency_limit_s": None,
        "planned_batch": 32,
        "workload_class": "balanced",
        "prefill_share": 0.4,
        "advice": (),
        "what_ifs": (),
        "notes": (),
        "variants": variants or tuple(variant(name, precision=name) for name in BYTES),
    }
    return Plan(**{**defaults, **fields})


def unknown_device_plan() -> Plan:
    """Variants on a device of which only the memory is known, with a cache of unknown shape and no price."""
    nothing = (
        *("kv_bytes_per_token", "kv_bytes_at_context", "kv_bytes_at_context_fp8", "kv_budget_gain", "fits"),
        *(
            "devices_to_hold",
            "max_batch",
            "max_batch_fp8_kv",
            "max_batch_paged",
            "capacity",
            "decode_ceiling_tokens_per_s",
        ),
        *(
            "tpot_floor_s",
            "prefill_ceiling_tokens_per_s",
            "prefill_intensity_flops_per_byte",
            "prefill_bound",
            "arithmetic_type",
            "arithmetic_flops_per_s",
            "ttft_floor_s",
            "answer_floor_s",
            "bytes_per_answer",
        ),
        *("break_even_batch", "limited_by", "best_batch", "dollars_per_million_output_tokens"),
        "dollars_per_million_input_tokens",
    )
    absent: dict[str, Any] = dict.fromkeys(nothing)
    unknown = variant("bf16", batches=(), **absent)
    return plan(
        unknown,
        hardware=hardware(
            bandwidth_bytes_per_s=None,
            peak_flops_per_s={},
            ops_per_byte={},
            dollars_per_hour=None,
            price_source="",
        ),
        workload_class=None,
        prefill_share=None,
    )
