"""What pays, in the order in which it pays: batching, then quantization, then a bigger card. Pure.

Batching shares a weight read that is paid for anyway; quantization shortens the read and spends quality; a
bigger card costs money. Each comes with the gain that the roofline predicts, in output tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.data_sheet import DATA_SHEET, Device
from pipeline.plan_values import Advice, VariantPlan, WhatIf, WorkloadClass
from pipeline.quantizers.base import StoredBytes
from pipeline.recipe_sections import VariantSpec
from pipeline.roof import Roof
from pipeline.variant_plan import PlanSetting, arithmetic, roof_of, variant_plan

HEAVY_SHARE = 2 / 3
"""A phase with two thirds of the time gives the workload its name."""
BIGGER_CARDS = 2


def prefill_share(setting: PlanSetting, roof: Roof | None, *, batch_size: int) -> float | None:
    """Prefill's share of the roofline's time for `batch_size` requests that are answered together."""
    if roof is None or roof.peak_flops_per_s is None:
        return None
    prefill_s = roof.prefill_s(setting.prompt_tokens, batch_size=batch_size)
    decode_s = (setting.new_tokens - 1) * roof.step_s(batch_size, context_tokens=setting.depth_tokens)
    return prefill_s / (prefill_s + decode_s)


def workload_class(share: float | None) -> WorkloadClass | None:
    """The name of a workload by its prefill's share of the time."""
    if share is None:
        return None
    return (
        "prefill-heavy" if share > HEAVY_SHARE else "decode-heavy" if share < 1 - HEAVY_SHARE else "balanced"
    )


def first_that_fits(variants: Sequence[VariantPlan]) -> int:
    """The place of the first variant that isn't known to be too large, which a workload is classed by; else 0."""
    return next((place for place, one in enumerate(variants) if one.fits is not False), 0)


def advice(
    setting: PlanSetting, variants: tuple[VariantPlan, ...], specs: tuple[VariantSpec, ...]
) -> tuple[Advice, ...]:
    """Batching's gain is that of all requests together, the others' that of one request alone.

    At most one line for batching, one for each candidate, and two devices of the data sheet, the least that gain.
    """
    baseline = variants[0]
    if not baseline.decode_ceiling_tokens_per_s:
        return ()
    return (
        *_batching(setting, variants[first_that_fits(variants)]),
        *(_quantization(baseline, candidate) for candidate in variants[1:]),
        *_bigger_cards(setting, specs[0], baseline),
    )


def what_ifs(setting: PlanSetting, spec: VariantSpec) -> tuple[WhatIf, ...]:
    """One change at a time to the device or to the baseline's bytes, for one request alone."""
    roof = roof_of(setting, spec)
    if roof is None or roof.peak_flops_per_s is None:
        return ()
    changed = {
        "+50 % FLOP/s": replace(roof, peak_flops_per_s=1.5 * roof.peak_flops_per_s),
        "+50 % bandwidth": replace(roof, bandwidth_bytes_per_s=1.5 * roof.bandwidth_bytes_per_s),
        "all weights in 8 bits": replace(roof, quantizer=EveryWeight(bytes_each=1), compute_bytes=None),
    }
    if roof.kv_element_bytes > 1:
        changed["FP8 KV cache"] = replace(roof, kv_element_bytes=1)
    return tuple(_what_if(setting, change, before=roof, after=after) for change, after in changed.items())


@dataclass(frozen=True)
class EveryWeight:
    """All weights at one size: what no quantizer reaches, for its scales and the head that it spares."""

    bytes_each: int

    @property
    def other_bytes_per_weight(self) -> float:
        """The same outside the blocks."""
        return self.bytes_each

    def table_bytes_per_weight(self, columns: int, *, is_head: bool) -> float | None:
        """Embedding and head are as the rest."""
        del columns, is_head
        return None

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        """Nothing but weights."""
        return StoredBytes(packed=self.bytes_each * out_features * in_features)

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:
        """As stored, whatever computes with them."""
        del float_bytes
        return self.predicted_parts(out_features, in_features)


def _what_if(setting: PlanSetting, change: str, *, before: Roof, after: Roof) -> WhatIf:
    decode, prefill, answer = (
        slow_s / fast_s
        for slow_s, fast_s in zip(_times_s(setting, before), _times_s(setting, after), strict=True)
    )
    return WhatIf(change=change, decode_gain=decode, prefill_gain=prefill, answer_gain=answer)


def _times_s(setting: PlanSetting, roof: Roof) -> tuple[float, float, float]:
    """A decode step, the prefill and the whole answer of one request alone."""
    return (
        roof.step_s(1, context_tokens=setting.depth_tokens),
        roof.prefill_s(setting.prompt_tokens),
        roof.answer_s(setting.prompt_tokens, new_tokens=setting.new_tokens),
    )


def _batching(setting: PlanSetting, variant: VariantPlan) -> tuple[Advice, ...]:
    free = min(
        (size for size in (variant.compute_bound_batch, variant.best_batch) if size is not None), default=0
    )
    alone = variant.batches[0]
    at = next((batch for batch in reversed(variant.batches) if batch.batch_size <= free), None)
    if at is None or at.batch_size <= alone.batch_size:
        return ()
    why = {
        "compute": "arithmetic takes longer than reading beyond it",
        "capacity": "memory holds no more",
        None: "what fits isn't known",
    }[variant.limited_by]
    if setting.latency_limit_s is not None and variant.best_batch == free != variant.max_batch_paged:
        why = f"a step of more takes longer than {1e3 * setting.latency_limit_s:g} ms"
    return (
        Advice(
            step="batching",
            gain=at.tokens_per_s / alone.tokens_per_s,
            text=f"{variant.name}: {at.batch_size} requests at once share each weight read ({why})",
        ),
    )


def _quantization(baseline: VariantPlan, candidate: VariantPlan) -> Advice:
    ours, theirs = candidate.decode_ceiling_tokens_per_s, baseline.decode_ceiling_tokens_per_s
    assert ours is not None
    assert theirs is not None
    share = candidate.bytes_read_per_token / baseline.bytes_read_per_token
    return Advice(
        step="quantization",
        gain=ours / theirs,
        text=f"{candidate.name}, one request alone: {share:.2f} of the baseline's bytes a token"
        f"{_room(baseline, candidate)}; {_prefill_gain(baseline, candidate)}; "
        "quality must be measured",
    )


def _room(baseline: VariantPlan, candidate: VariantPlan) -> str:
    if candidate.max_batch is None:
        return ""
    if not candidate.fits:
        return f"; doesn't fit: {candidate.devices_to_hold} devices by memory"
    return f"; holds {candidate.max_batch} sequences instead of {baseline.max_batch}"


def _prefill_gain(baseline: VariantPlan, candidate: VariantPlan) -> str:
    """Weight-only formats multiply in 16 bits, so that only a prefill that is bound by reading gains from them."""
    if not baseline.ttft_floor_s or not candidate.ttft_floor_s:
        return "prefill unknown"
    gain = baseline.ttft_floor_s / candidate.ttft_floor_s
    return (
        f"prefill gains {gain:.2f} ×" if gain > 1.01 else "prefill is bound by arithmetic and gains nothing"
    )


def _bigger_cards(setting: PlanSetting, spec: VariantSpec, baseline: VariantPlan) -> list[Advice]:
    """The least of the devices of the same kind that hold the baseline and decode it faster."""
    here = baseline.decode_ceiling_tokens_per_s
    assert here is not None
    found = []
    for device in DATA_SHEET.values():
        if device.kind != setting.device.kind or not _is_bigger(device, setting.device, spec=spec):
            continue
        there = variant_plan(replace(setting, device=device), spec, baseline=None)
        rate = there.decode_ceiling_tokens_per_s
        if rate is None or rate <= here or there.fits is False:
            continue
        held = f"; holds {there.max_batch} sequences" if there.max_batch is not None else ""
        text = f"{baseline.name}, one request alone, on {device.name}{held}{_price(device)}"
        found.append(Advice(step="hardware", gain=rate / here, text=text))
    return sorted(found, key=lambda one: one.gain)[:BIGGER_CARDS]


def _is_bigger(device: Device, than: Device, *, spec: VariantSpec) -> bool:
    """More bandwidth and no less memory or arithmetic: what makes every phase at least as fast."""
    ours, theirs = arithmetic(spec, device=device), arithmetic(spec, device=than)
    return (
        (device.bandwidth_bytes_per_s or 0) > (than.bandwidth_bytes_per_s or 0)
        and device.memory_bytes >= than.memory_bytes
        and (ours.flops_per_s if ours else 0) >= (theirs.flops_per_s if theirs else 0)
    )


def _price(device: Device) -> str:
    return f"; ${device.dollars_per_hour:g} an hour" if device.dollars_per_hour else ""
