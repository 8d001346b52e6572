"""Planned figures beside measured ones, each difference with its reason. Pure.

A plan made from shapes and a measured one of the same variant must agree: exactly in bytes, to the achieved
share in speed. What is off by more than a tenth says why, or that it is unexplained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.capacity_results import CapacityResult
from pipeline.plan_values import VariantPlan
from pipeline.results import Reconciliation, VariantResults
from pipeline.roof import Bound
from pipeline.speed_results import SpeedResult, SpeedRow

HEADER = ("variant", "figure", "planned", "measured", "unit", "ratio", "because")
TEXT_COLUMNS = ("figure", "unit", "because")
TOLERANCE = 0.1
UNEXPLAINED = "unexplained"
USUAL_SHARE = 0.2
"""Below the least share of a roof that published engines reach (docs/predictions.md)."""
SIXTEEN_BITS = 16


def reconcile(plan: VariantPlan, results: VariantResults) -> tuple[Reconciliation, ...]:
    """Bytes, capacity and speed of one variant. Figures that weren't planned or measured are left out."""
    return tuple(item for item in _items(plan, results) if item.predicted)


def table_rows(variants: Iterable[tuple[str, tuple[Reconciliation, ...]]]) -> list[tuple[str, ...]]:
    """Rows under `HEADER` for (variant, its reconciled figures); the ratio is measured ÷ planned."""
    return [
        (
            name,
            one.figure,
            f"{one.predicted:.5g}",
            f"{one.measured:.5g}",
            one.unit,
            f"{one.ratio:.2f}",
            one.because,
        )
        for name, figures in variants
        for one in figures
    ]


def _items(plan: VariantPlan, results: VariantResults) -> Iterator[Reconciliation]:
    if results.checkpoint:
        yield _compared(
            "weights on disk",
            "MB",
            plan.weight_bytes_on_disk,
            results.checkpoint.weight_bytes_on_disk,
            scale=1e6,
        )
    memory = results.loaded_memory
    if memory:
        yield _compared(
            "weights resident", "MB", plan.weight_bytes_resident, memory.weight_bytes_resident, scale=1e6
        )
    if results.capacity:
        yield from _capacity(plan, results.capacity)
    for row in results.speed.of("batch") if results.speed else ():
        if row.outcome == "measured":
            yield from _speed(plan, row)
    if results.speed:
        yield from _break_even(plan, results.speed)


def _compared(
    figure: str, unit: str, predicted: float, measured: float, *, scale: float = 1, reason: str = UNEXPLAINED
) -> Reconciliation:
    agrees = bool(predicted) and abs(measured / predicted - 1) <= TOLERANCE
    return Reconciliation(
        figure=figure,
        unit=unit,
        predicted=predicted / scale,
        measured=measured / scale,
        because="" if agrees else reason,
    )


def _capacity(plan: VariantPlan, capacity: CapacityResult) -> Iterator[Reconciliation]:
    if plan.kv_bytes_at_context:
        yield _compared(
            f"KV cache at {capacity.context_tokens} tokens",
            "MB",
            plan.kv_bytes_at_context,
            capacity.kv_bytes_per_sequence,
            scale=1e6,
        )
    if plan.max_batch and capacity.measured_sequences is not None:
        yield _compared(
            "sequences at once",
            "",
            plan.max_batch,
            capacity.measured_sequences,
            reason=_capacity_reason(capacity),
        )


def _capacity_reason(capacity: CapacityResult) -> str:
    if capacity.limited_by == "ceiling":
        return "the search ended at its ceiling: more may fit"
    taken = capacity.peak_bytes_per_sequence
    if taken is None:
        return UNEXPLAINED
    cache = capacity.kv_bytes_per_sequence
    return (
        f"a sequence took {taken / 1e6:.2f} MB at the peak, {cache / 1e6:.2f} MB of it KV cache, "
        "the rest activations"
    )


def _speed(plan: VariantPlan, row: SpeedRow) -> Iterator[Reconciliation]:
    planned = next((batch for batch in plan.batches if batch.batch_size == row.batch_size), None)
    if planned and row.decode_tokens_per_s:
        share = row.decode_tokens_per_s / planned.tokens_per_s
        rate = _compared(
            f"decode at batch {row.batch_size}, at most",
            "tok/s",
            planned.tokens_per_s,
            row.decode_tokens_per_s,
            reason=_share_reason(share, bound=planned.bound, plan=plan),
        )
        yield rate.model_copy(update={"batch_size": row.batch_size})
    if row.batch_size == 1 and plan.ttft_floor_s and plan.prefill_bound and row.ttft_s:
        share = plan.ttft_floor_s / row.ttft_s.median
        yield _compared(
            "TTFT at batch 1, at least",
            "ms",
            plan.ttft_floor_s,
            row.ttft_s.median,
            scale=1e-3,
            reason=_share_reason(share, bound=plan.prefill_bound, plan=plan),
        )


def _break_even(plan: VariantPlan, speed: SpeedResult) -> Iterator[Reconciliation]:
    """Best rate ÷ single stream, beside peak ÷ bandwidth: their ratio is that of the shares reached of the two."""
    if plan.break_even_batch is None or speed.measured_break_even_batch is None:
        return
    ratio = speed.measured_break_even_batch / plan.break_even_batch
    yield _compared(
        "break-even batch",
        "",
        plan.break_even_batch,
        speed.measured_break_even_batch,
        reason=f"the best batch's share of the roof by FLOP/s is {ratio:.2f} × batch 1's of that by bandwidth",
    )


def _share_reason(share: float, *, bound: Bound, plan: VariantPlan) -> str:
    """A roof knows no launches and no dequantizing; beyond it, or far below what engines reach, something is wrong."""
    limit = {"memory": "bandwidth", "compute": "FLOP/s"}[bound]
    reached = f"{100 * share:.0f} % of the roof by {limit}"
    if share > 1:
        return f"{reached}: {UNEXPLAINED}"
    if share < USUAL_SHARE:
        return f"{reached}, below what engines usually reach: {UNEXPLAINED}"
    quantized = plan.bits_per_weight < SIXTEEN_BITS
    missing = "launches, dequantizing and sampling" if quantized else "launches and sampling"
    return f"{reached}: {missing} aren't in it"
