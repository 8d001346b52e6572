"""What a plan says, as values: `plan --json`, the table and the page are all made from these.

A figure is None where it can't be known (a device without a known bandwidth, a cache of unknown shape, no
price); floors are the shortest times and ceilings the highest rates that the device's limits allow.

>>> Advice(step="batching", gain=8.0, text="8 requests share a weight read").gain
8.0
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.fleet import FleetSize, Targets
from pipeline.footprint import WeightParts
from pipeline.measured import Bound
from pipeline.results import Power, Reconciliation
from pipeline.scheduler import Serving
from pipeline.values import Value

WorkloadClass = Literal["prefill-heavy", "decode-heavy", "balanced"]


class HardwarePlan(Value):
    """The device a plan is for.

    `dollars_per_hour` is the recipe's price, else the data sheet's.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float | None
    peak_flops_per_s: dict[str, float]
    ops_per_byte: dict[str, float]
    dollars_per_hour: float | None
    price_source: str
    source: str


class BatchPlan(Value):
    """One decode step of `batch_size` sequences at the workload's mean depth, at the roof.

    `intensity_flops_per_byte` is FLOPs ÷ bytes read, KV cache included; `bound` says which of the two takes
    longer; `fits` is None where the cache's shape is unknown.
    """

    batch_size: int
    intensity_flops_per_byte: float
    step_floor_s: float
    tokens_per_s: float
    bound: Bound
    fits: bool | None
    dollars_per_million_output_tokens: float | None


class LengthPlan(Value):
    """A length of the recipe's speed section at batch 1: the shortest prefill, or the shortest step at that depth."""

    test: Literal["prefill", "depth"]
    prompt_tokens: int
    floor_s: float
    bound: Bound


class CapacityPlan(Value):
    """Sequences that fit at once, beside `max_batch`, which reserves the whole context for each, with headroom.

    Paged takes only what a sequence of the traffic's (else the workload's) mean length fills, in whole blocks.
    Headroom is what the budget leaves of the device.
    """

    block_tokens: int
    mean_sequence_tokens: float
    contiguous_without_headroom: int
    paged: int
    paged_without_headroom: int


class TrafficPlan(Value):
    """What the fleet serves: `requests_per_s` drawn requests, or the `trace_requests` of a trace; and its targets."""

    requests_per_s: float | None
    trace: str | None
    trace_requests: int | None
    mean_sequence_tokens: float
    targets: Targets


class FleetPlan(Value):
    """The devices that the recipe's traffic needs. `step_times` says where their times come from: the roofline at
    the recipe's efficiency, or a run on this device, fitted with `median_error` (relative). `serving` is what
    one device's scheduler may hold. The price of output tokens is that of the whole fleet: prompts, waits and
    idle time included.
    """

    size: FleetSize
    serving: Serving | None
    dollars_per_month: float | None
    dollars_per_million_output_tokens: float | None = None
    step_times: Literal["roofline", "measured"]
    median_error: float | None


class VariantPlan(Value):
    """One variant before it exists.

    `arithmetic_type` is what its products are computed in, with the device's dense peak for it.

    `kv_budget_bytes` is what the weights leave of the budget, `kv_budget_gain` that over the baseline's.
    `passes_per_answer` are forward passes for one request alone: the prefill, then one for each further
    token; `bytes_per_answer` is what they stream. `compute_bound_batch` is the batch at which a step at the
    workload's mean depth computes as long as it reads (None: the cache's reading outgrows the computing);
    `limited_by` tells whether that or memory ends the batching first. `max_batch_paged` counts
    sequences of the workload's full length in a paged cache; `best_batch` is the largest of them that keeps the
    latency limit. `devices_to_hold` counts devices by memory
    alone, for weights and one sequence.
    """

    name: str
    precision: str
    quantizer: str
    engine: str
    required: bool
    weight_bytes_on_disk: int
    weight_bytes_resident: int
    weight_parts: WeightParts
    bits_per_weight: float
    bytes_read_per_token: int
    kv_bytes_per_token: int | None
    kv_bytes_at_context: int | None
    kv_bytes_at_context_fp8: int | None
    kv_budget_bytes: int
    kv_budget_gain: float | None
    fits: bool | None
    devices_to_hold: int | None
    max_batch: int | None
    max_batch_fp8_kv: int | None
    max_batch_paged: int | None
    capacity: CapacityPlan | None
    arithmetic_type: str | None
    arithmetic_flops_per_s: float | None
    decode_ceiling_tokens_per_s: float | None
    tpot_floor_s: float | None
    prefill_ceiling_tokens_per_s: float | None
    prefill_intensity_flops_per_byte: float | None
    prefill_bound: Bound | None
    ttft_floor_s: float | None
    answer_floor_s: float | None
    passes_per_answer: int
    bytes_per_answer: int | None
    break_even_batch: float | None
    compute_bound_batch: int | None
    limited_by: Literal["compute", "capacity"] | None
    batches: tuple[BatchPlan, ...]
    lengths: tuple[LengthPlan, ...] = ()
    best_batch: int | None
    dollars_per_million_output_tokens: float | None
    dollars_per_million_input_tokens: float | None
    fleet: FleetPlan | None = None
    measured: tuple[Reconciliation, ...] = ()


class TaskSizes(Value):
    """The quality section's tasks and groups, and the documents that are judged of each task, where that is known.

    `rolling` are those that measure perplexity.
    """

    tasks: tuple[str, ...]
    documents: dict[str, int] = Field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    rolling: tuple[str, ...] = ()


class QualityPlan(Value):
    """What the documents of one task, or pooled group, can decide under one rule's limit of `points`.

    `flips` tells whether the flip rate is assumed or that of the last run. `documents_to_find` are those with which a
    true drop as large as the limit shows in McNemar's two-sided test, with 80 % power.
    """

    task: str
    rule: str
    points: float
    confidence: float
    flips: Literal["assumed", "measured"]
    power: Power
    documents_to_find: int


class WhatIf(Value):
    """How decoding one stream, its prefill and the whole answer speed up under one change, as factors."""

    change: str
    decode_gain: float
    prefill_gain: float
    answer_gain: float


class Advice(Value):
    """One thing to do, in the order in which things pay: batching, quantization, a bigger card.

    `gain` is the predicted factor in output tokens per second at the roof.
    """

    step: Literal["batching", "quantization", "hardware"]
    gain: float
    text: str


class Plan(Value):
    """`plan --json`."""

    recipe: str
    model: str
    hardware: HardwarePlan
    parameters: dict[str, int]
    traffic: TrafficPlan | None
    context_tokens: int
    prompt_tokens: int
    new_tokens: int
    budget_bytes: int
    latency_limit_s: float | None
    planned_batch: int
    workload_class: WorkloadClass | None
    prefill_share: float | None
    advice: tuple[Advice, ...]
    what_ifs: tuple[WhatIf, ...]
    notes: tuple[str, ...]
    variants: tuple[VariantPlan, ...]
    quality: tuple[QualityPlan, ...] = ()
    measured_run: str | None = Field(default=None, description="folder of the run whose figures stand beside")
