"""A plan's figures as columns and cells, for its page; a question mark is what can't be known.

>>> shown(None, ".1f"), shown(0.0123, ".1f", unit=1e-3)
('?', '12.3')
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar

from pipeline.fleet import FleetSize
from pipeline.plan_values import BatchPlan, FleetPlan, Plan, QualityPlan, TrafficPlan, VariantPlan, WhatIf
from pipeline.reconciliation import HEADER, TEXT_COLUMNS, table_rows
from pipeline.simulation import Percentiles

Item = TypeVar("Item")


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column's title, its unit, and how one item is shown in it; a badge is a yes or a no."""

    label: str
    unit: str
    cell: Callable[[Item], str]
    text: bool = False
    badge: bool = False


@dataclass(frozen=True)
class Table:
    """What a page shows of a table: a row is its cells, each with its column; the first names the row."""

    title: str
    columns: Sequence[Column[Any]]
    rows: tuple[tuple[tuple[Column[Any], str], ...], ...]


def table(title: str, columns: Sequence[Column[Item]], items: Iterable[Item]) -> Table:
    """A row for each item."""
    rows = tuple(tuple((column, column.cell(item)) for column in columns) for item in items)
    return Table(title=title, columns=columns, rows=rows)


def shown(value: float | None, form: str, *, unit: float = 1) -> str:
    """`value` in `unit`, "?" for None; only here is anything rounded."""
    if value is None:
        return "?"
    return format(int(value) if form.endswith("d") else value / unit, form)


def decision_table(plan: Plan) -> Table:
    """What decides: fit, capacity, limits and price of each variant."""
    columns: list[Column[VariantPlan]] = [
        Column("variant", "", lambda one: one.name),
        Column("stored by", "", lambda one: one.quantizer, text=True),
        Column("fits", "", lambda one: {True: "yes", False: "no", None: "?"}[one.fits], badge=True),
        Column("devices to hold one", "", lambda one: shown(one.devices_to_hold, ",d")),
        Column("max batch", "sequences", lambda one: shown(one.max_batch, ",d")),
        Column("TTFT ≥", "ms", lambda one: shown(one.ttft_floor_s, ",.1f", unit=1e-3)),
        Column("TPOT ≥", "ms", lambda one: shown(one.tpot_floor_s, ",.2f", unit=1e-3)),
        Column("one request ≤", "tokens/s", lambda one: shown(one.decode_ceiling_tokens_per_s, ",.1f")),
        Column("best batch", "sequences", lambda one: shown(one.best_batch, ",d")),
        Column("best batch ≤", "tokens/s", lambda one: _if_held(one, shown(best_rate(one), ",.0f"))),
        Column("input ≥", "$/1M tokens", lambda one: shown(one.dollars_per_million_input_tokens, ",.3f")),
        Column(
            "output ≥",
            "$/1M tokens",
            lambda one: _if_held(one, shown(one.dollars_per_million_output_tokens, ",.3f")),
        ),
    ]
    title = "One row a variant, at its limits; ? can't be known, – doesn't arise"
    return table(title, columns, plan.variants)


def _if_held(variant: VariantPlan, text: str) -> str:
    """`text`, or a dash where not even one sequence is held."""
    return "–" if variant.best_batch == 0 else text


def best_rate(variant: VariantPlan) -> float | None:
    """Output tokens per second of all sequences at the best batch."""
    rates = (one.tokens_per_s for one in variant.batches if one.batch_size == variant.best_batch)
    return next(rates, None)


def memory_table(plan: Plan) -> Table:
    """Bytes of weights and cache, and how many sequences they leave room for."""
    columns: list[Column[VariantPlan]] = [
        Column("variant", "", lambda one: one.name),
        Column("weights on disk", "GB", lambda one: shown(one.weight_bytes_on_disk, ",.2f", unit=1e9)),
        Column("weights in memory", "GB", lambda one: shown(one.weight_bytes_resident, ",.2f", unit=1e9)),
        Column("stored", "bits/weight", lambda one: shown(one.bits_per_weight, ".2f")),
        Column("left for KV cache", "GB", lambda one: shown(one.kv_budget_bytes, ",.2f", unit=1e9)),
        Column("left", "× baseline", lambda one: _dashed(one.kv_budget_gain, ".2f")),
        Column("KV cache", "MB/sequence", lambda one: shown(one.kv_bytes_at_context, ",.1f", unit=1e6)),
        Column("max batch", "whole context", lambda one: shown(one.max_batch, ",d")),
        Column("max batch", "no headroom", _capacity("contiguous_without_headroom")),
        Column("max batch", "paged", _capacity("paged")),
        Column("max batch", "paged, no headroom", _capacity("paged_without_headroom")),
        Column("max batch", "FP8 cache", lambda one: shown(one.max_batch_fp8_kv, ",d")),
    ]
    return table(
        f"Memory; whole context is {plan.context_tokens:,} tokens a sequence{_paging(plan)}",
        columns,
        plan.variants,
    )


def _capacity(name: str) -> Callable[[VariantPlan], str]:
    return lambda one: shown(getattr(one.capacity, name) if one.capacity else None, ",d")


def _dashed(value: float | None, form: str) -> str:
    """A dash for what doesn't arise: a gain over a baseline that has no room."""
    return "–" if value is None else shown(value, form)


def _paging(plan: Plan) -> str:
    capacity = next((one.capacity for one in plan.variants if one.capacity), None)
    if capacity is None:
        return ""
    return f", paged {capacity.mean_sequence_tokens:,.0f} on average in blocks of {capacity.block_tokens}"


def speed_table(plan: Plan) -> Table:
    """What one request takes at least, and where batching stops paying."""
    columns: list[Column[VariantPlan]] = [
        Column("variant", "", lambda one: one.name),
        Column("prefill ≤", "tokens/s", lambda one: shown(one.prefill_ceiling_tokens_per_s, ",.0f")),
        Column("answer ≥", "s", lambda one: shown(one.answer_floor_s, ",.2f")),
        Column("passes", "per answer", lambda one: shown(one.passes_per_answer, ",d")),
        Column("read", "GB/token", lambda one: shown(one.bytes_read_per_token, ",.2f", unit=1e9)),
        Column("read", "GB/answer", lambda one: shown(one.bytes_per_answer, ",.0f", unit=1e9)),
        Column("break-even by weights alone", "batch", lambda one: shown(one.break_even_batch, ",.0f")),
        Column("break-even with KV cache", "batch", _compute_bound),
        Column("batching ends by", "", _ending, text=True),
    ]
    return table("One request alone, and where batching stops paying", columns, plan.variants)


def _compute_bound(variant: VariantPlan) -> str:
    if variant.break_even_batch is not None and variant.compute_bound_batch is None:
        return "never"
    return shown(variant.compute_bound_batch, ",d")


def _ending(variant: VariantPlan) -> str:
    if variant.max_batch == 0:
        return "–"
    if variant.limited_by == "compute":
        return f"arithmetic, at {shown(variant.compute_bound_batch, ',d')}"
    if variant.limited_by == "capacity":
        return f"memory, at {shown(variant.max_batch_paged, ',d')}"
    return "?"


@dataclass(frozen=True)
class _Step:
    variant: VariantPlan
    batch: BatchPlan


def batch_table(plan: Plan) -> Table:
    """Every point of the plots."""
    columns: list[Column[_Step]] = [
        Column("variant", "", lambda one: one.variant.name),
        Column("batch", "sequences", lambda one: f"{one.batch.batch_size:,}"),
        Column("fits", "", lambda one: {True: "yes", False: "no", None: "?"}[one.batch.fits], badge=True),
        Column("intensity", "FLOP/byte", lambda one: shown(one.batch.intensity_flops_per_byte, ",.2f")),
        Column("limited by", "", lambda one: one.batch.bound, text=True),
        Column("TPOT ≥", "ms", lambda one: shown(one.batch.step_floor_s, ",.2f", unit=1e-3)),
        Column("all sequences ≤", "tokens/s", lambda one: shown(one.batch.tokens_per_s, ",.1f")),
        Column(
            "output ≥",
            "$/1M tokens",
            lambda one: shown(one.batch.dollars_per_million_output_tokens, ",.3f"),
        ),
    ]
    steps = [_Step(variant, batch) for variant in plan.variants for batch in variant.batches]
    return table("Decode steps at the workload's mean depth of context", columns, steps)


@dataclass(frozen=True)
class _Fleet:
    name: str
    fleet: FleetPlan
    percentile: float

    @property
    def size(self) -> FleetSize:
        return self.fleet.size

    def shown(self, value: float | None, form: str, *, unit: float = 1) -> str:
        """A dash where no number of devices does, since nothing is then simulated."""
        return "–" if self.size.devices is None else shown(value, form, unit=unit)

    def waits(self, waits: Percentiles | None, *, at_target: float | None, unit: float = 1) -> str:
        """The median, the figure at the targets' percentile unless that is the 99th, and the 99th percentile."""
        ends = (waits.p50, waits.p99) if waits else (None, None)
        middle = () if self.percentile == 99 else (at_target,)
        return " / ".join(self.shown(one, ",.1f", unit=unit) for one in (ends[0], *middle, ends[1]))


def fleet_table(plan: Plan) -> Table | None:
    """Devices for the traffic and how requests fare on them; None without traffic."""
    if plan.traffic is None:
        return None
    percentile = plan.traffic.targets.percentile
    fleets = [_Fleet(one.name, one.fleet, percentile) for one in plan.variants if one.fleet]
    middle = "" if percentile == 99 else f"p{percentile:g} / "
    at = f"p50 / {middle}p99"
    columns: list[Column[_Fleet]] = [
        Column("variant", "", lambda one: one.name),
        Column("devices", "", lambda one: str(one.size.devices or "none")),
        Column("cost", "$/month", lambda one: one.shown(one.fleet.dollars_per_month, ",.0f")),
        Column(
            "output",
            "$/1M tokens",
            lambda one: one.shown(one.fleet.dollars_per_million_output_tokens, ",.3f"),
        ),
        Column("load", "% of capacity", lambda one: one.shown(one.size.load, ".0f", unit=0.01)),
        Column("mean batch", "sequences", lambda one: one.shown(one.size.mean_batch, ",.1f")),
        Column("each device", "tokens/s out", lambda one: one.shown(one.size.output_tokens_per_s, ",.0f")),
        Column(
            f"TTFT {at}",
            "ms",
            lambda one: one.waits(one.size.ttft_s, at_target=one.size.target_ttft_s, unit=1e-3),
        ),
        Column(
            f"TPOT {at}",
            "ms",
            lambda one: one.waits(one.size.tpot_s, at_target=one.size.target_tpot_s, unit=1e-3),
        ),
        Column(
            "whole request p50",
            "s",
            lambda one: one.shown(one.size.latency_s.p50 if one.size.latency_s else None, ",.1f"),
        ),
        Column(
            "whole request p99",
            "s",
            lambda one: one.shown(one.size.latency_s.p99 if one.size.latency_s else None, ",.1f"),
        ),
    ]
    if any(one.fleet.step_times == "measured" for one in fleets):
        columns.append(Column("step times", "", lambda one: _step_times(one.fleet), text=True))
    if any(one.size.reason for one in fleets):
        columns.append(Column("why none", "", lambda one: one.size.reason, text=True))
    return table(f"Fewest devices for {_traffic(plan.traffic)}, by simulation", columns, fleets)


def _traffic(traffic: TrafficPlan) -> str:
    """Requests and targets in words."""
    source = f"{traffic.requests_per_s:g} requests/s" if traffic.requests_per_s else f"{traffic.trace}"
    limits = {"TTFT": traffic.targets.ttft_s, "TPOT": traffic.targets.tpot_s}
    kept = [f"{name} ≤ {1e3 * limit:g} ms" for name, limit in limits.items() if limit is not None]
    targets = (
        f"with {' and '.join(kept)} for {traffic.targets.percentile:g} % of them" if kept else "kept up with"
    )
    return f"{source} {targets}"


def _step_times(fleet: FleetPlan) -> str:
    if fleet.median_error is None:
        return fleet.step_times
    return f"{fleet.step_times}, fitted within {100 * fleet.median_error:.0f} %"


def what_if_table(plan: Plan) -> Table | None:
    """The baseline under one change at a time; None where there is nothing to compare."""
    columns: list[Column[WhatIf]] = [
        Column("change", "", lambda one: one.change),
        Column("decode", "× as fast", lambda one: f"{one.decode_gain:.2f}"),
        Column("prefill", "× as fast", lambda one: f"{one.prefill_gain:.2f}"),
        Column("answer", "× as fast", lambda one: f"{one.answer_gain:.2f}"),
    ]
    title = f"What if: one request to {plan.variants[0].name} under one change"
    return table(title, columns, plan.what_ifs) if plan.what_ifs else None


def quality_table(plan: Plan) -> Table | None:
    """What the documents of each task can decide; None without a rule about accuracy."""
    columns: list[Column[QualityPlan]] = [
        Column("task", "", lambda one: one.task),
        Column("limit", "points", lambda one: f"{one.points:g}"),
        Column("flips", "%", lambda one: f"{100 * one.power.flip_rate:.3g} {one.flips}"),
        Column("documents", "", lambda one: shown(one.power.documents, ",d")),
        Column("decide at least", "points", lambda one: shown(one.power.detectable_points, ".2f")),
        Column("limit needs", "documents", lambda one: shown(one.power.documents_needed, ",d")),
        Column(
            "enough", "", lambda one: {True: "yes", False: "no", None: "?"}[one.power.decides], badge=True
        ),
        Column("a drop of the limit shows in", "documents", lambda one: shown(one.documents_to_find, ",d")),
    ]
    title = "What the documents decide with 80 % power: a limit when nothing is lost; a drop as large as the limit"
    return table(title, columns, plan.quality) if plan.quality else None


def measured_table(plan: Plan) -> Table | None:
    """Planned beside measured figures, with the reason for a difference; None where nothing was measured."""
    rows = table_rows((variant.name, variant.measured) for variant in plan.variants)
    columns: list[Column[tuple[str, ...]]] = [
        Column(name, "", itemgetter(place), text=name in TEXT_COLUMNS) for place, name in enumerate(HEADER)
    ]
    title = f"Planned and measured by {plan.measured_run}; the ratio is measured ÷ planned"
    return table(title, columns, rows) if rows else None
