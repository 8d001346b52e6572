"""How many devices a variant needs for the recipe's traffic, and what they cost a month. Pure.

Step times come from the roofline at the recipe's efficiency, or from a run that measured this variant; pages
of the KV cache from the memory that the weights leave.
"""

from __future__ import annotations

import math

from pipeline.fleet import FleetSize, devices_needed
from pipeline.footprint import kv_bytes, kv_bytes_per_token
from pipeline.plan_values import FleetPlan, VariantPlan
from pipeline.recipe import TrafficSpec, VariantSpec
from pipeline.scheduler import Serving
from pipeline.step_times import MeasuredSteps, RooflineSteps, StepTimes
from pipeline.traffic import Request, Traffic
from pipeline.variant_plan import PlanSetting, kv_element_bytes, roof_of

HOURS_PER_MONTH = 730
"""8,760 hours a year ÷ 12."""


def planned_fleet(
    setting: PlanSetting, spec: VariantSpec, *, plan: VariantPlan, measured: MeasuredSteps | None
) -> FleetPlan | None:
    """The fleet of one variant; None where the recipe has no traffic."""
    traffic = setting.recipe.traffic
    if traffic is None:
        return None
    size = _size(setting, spec, traffic=traffic, plan=plan, measured=measured)
    price = setting.dollars_per_hour
    monthly = size.devices * price * HOURS_PER_MONTH if size.devices and price else None
    return FleetPlan(
        size=size,
        dollars_per_month=monthly,
        step_times="measured" if measured else "roofline",
        median_error=measured.median_error if measured else None,
    )


def _size(
    setting: PlanSetting,
    spec: VariantSpec,
    *,
    traffic: TrafficSpec,
    plan: VariantPlan,
    measured: MeasuredSteps | None,
) -> FleetSize:
    if plan.fits is None:
        return _none("the shape of the KV cache isn't known")
    serving = _serving(setting, spec, traffic=traffic, plan=plan)
    if serving is None:
        return _none("weights and one request don't fit into the memory budget of one device")
    steps: StepTimes | None = measured or _roofline_steps(setting, spec, traffic)
    if steps is None:
        return _none(
            "the device's bandwidth or FLOP/s aren't known; measure them (`doctor`) or name a device"
        )
    return devices_needed(
        setting.trace or _drawn(traffic),
        serving=serving,
        step_times=steps,
        targets=traffic.targets,
        seed=traffic.seed,
    )


def _none(reason: str) -> FleetSize:
    return FleetSize(devices=None, reason=reason)


def _drawn(traffic: TrafficSpec) -> Traffic | list[Request]:
    assert traffic.requests_per_s is not None
    assert traffic.prompt_tokens is not None
    assert traffic.new_tokens is not None
    return Traffic(
        requests_per_s=traffic.requests_per_s,
        prompt_tokens=traffic.prompt_tokens,
        new_tokens=traffic.new_tokens,
    )


def _serving(
    setting: PlanSetting, spec: VariantSpec, *, traffic: TrafficSpec, plan: VariantPlan
) -> Serving | None:
    """The scheduler's limits; None where not even one page beside one sequence's constant state fits.

    What doesn't grow with the context (recurrent states, full windows) is set aside for as many sequences as
    a mean request leaves room for; pages of growing layers take the rest.
    """
    element = kv_element_bytes(spec)
    growing = kv_bytes_per_token(setting.facts, element_bytes=element) or 0
    constant = _constant_bytes(setting, element_bytes=element)
    mean_bytes = constant + growing * setting.mean_sequence_tokens
    room = plan.kv_budget_bytes
    if not room or not mean_bytes:
        return None
    sequences = min(traffic.max_sequences, max(1, math.floor(room / mean_bytes)))
    if growing:
        blocks = math.floor((room - sequences * constant) / (growing * traffic.block_tokens))
    else:  # nothing grows: pages are never what ends the batch
        blocks = sequences * math.ceil(setting.longest_request_tokens / traffic.block_tokens)
    if blocks < 1:
        return None
    return Serving(
        max_batch_tokens=traffic.max_batch_tokens,
        max_sequences=sequences,
        block_tokens=traffic.block_tokens,
        cache_blocks=blocks,
    )


def _constant_bytes(setting: PlanSetting, *, element_bytes: int) -> int:
    """Of one sequence's cache, what doesn't grow with the mean request: states, and windows as far as filled."""
    tokens = math.ceil(setting.mean_sequence_tokens)
    whole = kv_bytes(setting.facts, tokens, element_bytes=element_bytes) or 0
    growing = kv_bytes_per_token(setting.facts, element_bytes=element_bytes) or 0
    return whole - tokens * growing


def _roofline_steps(setting: PlanSetting, spec: VariantSpec, traffic: TrafficSpec) -> RooflineSteps | None:
    roof = roof_of(setting, spec)
    if roof is None or roof.peak_flops_per_s is None:
        return None
    element = kv_element_bytes(spec)
    spans = setting.facts.attention or ()
    depth = math.ceil(setting.mean_sequence_tokens)
    windowed = sum(
        span.flops_per_pair * min(depth, span.window_tokens) for span in spans if span.window_tokens
    )
    return RooflineSteps(
        weights=roof.reads,
        kv_bytes_per_token=kv_bytes_per_token(setting.facts, element_bytes=element) or 0,
        state_bytes=_constant_bytes(setting, element_bytes=element),
        flops_per_token=2.0 * setting.facts.weights_read_per_token + windowed,
        flops_per_pair=sum(span.flops_per_pair for span in spans if span.window_tokens is None),
        bandwidth_bytes_per_s=roof.bandwidth_bytes_per_s,
        peak_flops_per_s=roof.peak_flops_per_s,
        bandwidth_efficiency=traffic.efficiency.bandwidth,
        flops_efficiency=traffic.efficiency.flops,
        overhead_s=traffic.efficiency.overhead_s_per_layer * setting.facts.layers,
    )
