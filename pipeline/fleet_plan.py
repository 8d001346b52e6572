"""How many devices a variant needs for the recipe's traffic, and what they cost a month. Pure.

Step times come from the roofline at the recipe's efficiency, or from a run that measured this variant; blocks
of the KV cache from the memory that the weights leave.
"""

from __future__ import annotations

import math

from pipeline.fleet import FleetSize, devices_needed
from pipeline.plan_values import FleetPlan, VariantPlan
from pipeline.recipe_sections import TrafficSpec, VariantSpec
from pipeline.roof import Roof
from pipeline.roofline import dollars_per_million_tokens
from pipeline.scheduler import Serving
from pipeline.step_times import MeasuredSteps, RooflineSteps, StepTimes
from pipeline.traffic import Traffic
from pipeline.variant_plan import PlanSetting, roof_of

HOURS_PER_MONTH = 730
"""8,760 hours a year ÷ 12."""


def planned_fleet(
    setting: PlanSetting, spec: VariantSpec, *, plan: VariantPlan, measured: MeasuredSteps | None
) -> FleetPlan | None:
    """The fleet of one variant; None where the recipe has no traffic."""
    traffic = setting.recipe.traffic
    if traffic is None:
        return None
    if plan.fits is None:
        return _no_fleet("the shape of the KV cache isn't known")
    roof = roof_of(setting, spec)
    steps: StepTimes | None = measured or (_roofline_steps(setting, roof, traffic) if roof else None)
    if roof is None or steps is None:
        return _no_fleet("the device's bandwidth or FLOP/s aren't known: measure them (`doctor`)")
    serving = _serving(setting, roof, traffic=traffic, plan=plan)
    if serving is None:
        return _no_fleet("weights and one request don't fit into the memory budget of one device")
    size = devices_needed(
        setting.trace or _drawn(traffic),
        serving=serving,
        step_times=steps,
        targets=traffic.targets,
        seed=traffic.seed,
    )
    price = setting.dollars_per_hour
    rate = size.output_tokens_per_s
    return FleetPlan(
        size=size,
        serving=serving,
        dollars_per_month=size.devices * price * HOURS_PER_MONTH if size.devices and price else None,
        dollars_per_million_output_tokens=dollars_per_million_tokens(rate, dollars_per_hour=price)
        if rate and price
        else None,
        step_times="measured" if measured else "roofline",
        median_error=measured.median_error if measured and _is_tested(measured) else None,
    )


def _is_tested(measured: MeasuredSteps) -> bool:
    """Whether there were enough samples for the fit's error to say anything."""
    return measured.samples >= 2 * len(measured.seconds)


def _no_fleet(reason: str) -> FleetPlan:
    size = FleetSize(devices=None, reason=reason)
    return FleetPlan(
        size=size, serving=None, dollars_per_month=None, step_times="roofline", median_error=None
    )


def _drawn(traffic: TrafficSpec) -> Traffic:
    assert traffic.requests_per_s is not None
    assert traffic.prompt_tokens is not None
    assert traffic.new_tokens is not None
    return Traffic(
        requests_per_s=traffic.requests_per_s,
        prompt_tokens=traffic.prompt_tokens,
        new_tokens=traffic.new_tokens,
    )


def _serving(setting: PlanSetting, roof: Roof, *, traffic: TrafficSpec, plan: VariantPlan) -> Serving | None:
    """The scheduler's limits; None where not even one block beside one sequence's constant state fits.

    What doesn't grow with the context (recurrent states, full windows) is set aside for as many sequences as
    requests of mean length leave room for; blocks of growing layers take the rest.
    """
    growing = roof.growing_bytes_per_token
    constant = roof.constant_bytes(math.ceil(setting.mean_sequence_tokens))
    room, sequences = plan.kv_budget_bytes, traffic.max_sequences
    if not room or not (growing or constant):
        return None
    if constant:
        mean_bytes = constant + growing * setting.mean_sequence_tokens
        sequences = min(sequences, max(1, math.floor(room / mean_bytes)))
        longest = (
            growing * traffic.block_tokens * math.ceil(setting.longest_request_tokens / traffic.block_tokens)
        )
        if longest + constant <= room:  # the longest request must fit beside the others' states
            sequences = min(sequences, math.floor((room - longest) / constant))
    if growing:
        blocks = math.floor((room - sequences * constant) / (growing * traffic.block_tokens))
    else:  # nothing grows: blocks are never what ends the batch
        blocks = sequences * math.ceil(setting.longest_request_tokens / traffic.block_tokens)
    if blocks < 1:
        return None
    return Serving(
        max_batch_tokens=traffic.max_batch_tokens,
        max_sequences=sequences,
        block_tokens=traffic.block_tokens,
        cache_blocks=blocks,
    )


def _roofline_steps(setting: PlanSetting, roof: Roof, traffic: TrafficSpec) -> RooflineSteps | None:
    """Step times of a device at the recipe's efficiency; windows count as full as at a mean request's half."""
    if roof.peak_flops_per_s is None:
        return None
    depth = math.ceil(setting.mean_sequence_tokens / 2)
    return RooflineSteps(
        weights=roof.reads,
        kv_bytes_per_token=roof.growing_bytes_per_token,
        state_bytes=roof.constant_bytes(depth),
        flops_per_token=roof.block_flops + roof.windowed_flops(depth),
        head_flops=roof.head_flops,
        flops_per_pair=roof.flops_per_pair,
        bandwidth_bytes_per_s=roof.bandwidth_bytes_per_s,
        peak_flops_per_s=roof.peak_flops_per_s,
        bandwidth_efficiency=traffic.efficiency.bandwidth,
        flops_efficiency=traffic.efficiency.flops,
        overhead_s=traffic.efficiency.overhead_s_per_layer * setting.facts.layers,
    )
