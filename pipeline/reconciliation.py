"""Planned figures beside measured ones, each difference with its reason. Pure.

A plan made from shapes and a measured one of the same variant must agree: exactly in bytes, to the achieved
share in speed. Bytes and capacity that are off by more than a twentieth, and speeds by more than a tenth, say why, or
that it is unexplained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.capacity_results import CapacityResult
from pipeline.measured import Bound
from pipeline.plan_values import LengthPlan, VariantPlan
from pipeline.results import Reconciliation, VariantResults
from pipeline.speed_results import SpeedResult, SpeedRow

HEADER = ("variant", "figure", "planned", "measured", "unit", "ratio", "because")
TEXT_COLUMNS = ("figure", "unit", "because")
BYTES_TOLERANCE, SPEED_TOLERANCE = 0.05, 0.1
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


def agrees(predicted: float, measured: float, *, tolerance: float = BYTES_TOLERANCE) -> bool:
    """Whether a measured figure needs no reason."""
    return bool(predicted) and abs(measured / predicted - 1) <= tolerance


def capacity_reason(capacity: CapacityResult) -> str:
    """Why the number of sequences differs from the predicted one; "" where they agree, to the sequence or to 5 %."""
    predicted, held = capacity.predicted_sequences, capacity.measured_sequences
    if predicted is None or held is None or abs(predicted - held) <= 1 or agrees(predicted, held):
        return ""
    if capacity.limited_by == "ceiling":
        return "the search ended at its ceiling: more may fit"
    if not held:
        return capacity.because
    foreseen, taken = capacity.peak_bytes_per_sequence_predicted, capacity.peak_bytes_per_sequence
    if foreseen is None or taken is None:
        return _activations_reason(capacity)
    if agrees(foreseen, taken):
        constant = _constant_bytes(capacity) / 1e6
        return f"a sequence took what was predicted; {constant:.1f} MB more don't grow with the batch"
    return f"a sequence took {taken / 1e6:.2f} MB at the peak, {foreseen / 1e6:.2f} MB were predicted"


def _items(plan: VariantPlan, results: VariantResults) -> Iterator[Reconciliation]:
    if results.checkpoint:
        yield _bytes_compared(
            "weights on disk", plan.weight_bytes_on_disk, results.checkpoint.weight_bytes_on_disk
        )
    holder = results.loaded_memory or results.capacity
    if holder:
        yield _bytes_compared("weights resident", plan.weight_bytes_resident, holder.weight_bytes_resident)
    if results.capacity:
        yield from _capacity(plan, results.capacity)
        if results.capacity.paged:
            yield from _predicted_capacity(results.capacity.paged)
    for row in results.speed.of("batch") if results.speed else ():
        if row.outcome == "measured":
            yield from _speed(plan, row)
    if results.speed:
        yield from _lengths(plan, results.speed)
        yield from _break_even(plan, results.speed)


def _compared(
    figure: str,
    unit: str,
    predicted: float,
    measured: float,
    *,
    scale: float = 1,
    reason: str = UNEXPLAINED,
    tolerance: float = SPEED_TOLERANCE,
) -> Reconciliation:
    return Reconciliation(
        figure=figure,
        unit=unit,
        predicted=predicted / scale,
        measured=measured / scale,
        because="" if agrees(predicted, measured, tolerance=tolerance) else reason,
    )


def _bytes_compared(
    figure: str, predicted: float, measured: float, *, reason: str = UNEXPLAINED
) -> Reconciliation:
    return _compared(figure, "MB", predicted, measured, scale=1e6, reason=reason, tolerance=BYTES_TOLERANCE)


def _capacity(plan: VariantPlan, capacity: CapacityResult) -> Iterator[Reconciliation]:
    """The plan's figures, which know no activations, then the stage's own prediction, which does."""
    if plan.kv_bytes_at_context and capacity.kv_bytes_per_sequence:
        yield _bytes_compared(
            f"KV cache at {capacity.context_tokens} tokens",
            plan.kv_bytes_at_context,
            capacity.kv_bytes_per_sequence,
        )
    if plan.max_batch and capacity.measured_sequences is not None:
        at_ceiling = capacity.limited_by == "ceiling"
        reason = (
            "the search ended at its ceiling: more may fit" if at_ceiling else _activations_reason(capacity)
        )
        yield _compared(
            "sequences at once",
            "",
            plan.max_batch,
            capacity.measured_sequences,
            reason=reason,
            tolerance=BYTES_TOLERANCE,
        )
    if capacity.predicted_peak:
        yield from _predicted_capacity(capacity)


def _predicted_capacity(capacity: CapacityResult) -> Iterator[Reconciliation]:
    """What the stage predicted of itself, in the words of its layout."""
    paged = capacity.layout == "paged"
    if paged and capacity.kv_bytes_per_sequence and capacity.kv_bytes_per_sequence_predicted:
        yield _bytes_compared(
            "KV cache of a sequence, paged",
            capacity.kv_bytes_per_sequence_predicted,
            capacity.kv_bytes_per_sequence,
        )
    foreseen, taken = capacity.peak_bytes_per_sequence_predicted, capacity.peak_bytes_per_sequence
    if foreseen is not None and taken is not None:
        yield _bytes_compared("a sequence at the peak", foreseen, taken)
    if capacity.predicted_sequences and capacity.measured_sequences is not None:
        yield Reconciliation(
            figure="sequences at once, paged" if paged else "sequences at once, with activations",
            unit="",
            predicted=capacity.predicted_sequences,
            measured=capacity.measured_sequences,
            because=capacity_reason(capacity),
        )


def _activations_reason(capacity: CapacityResult) -> str:
    """What was left out of a prediction by weights and KV cache."""
    taken, cache = capacity.peak_bytes_per_sequence, capacity.kv_bytes_per_sequence
    if taken is None or cache is None:
        return UNEXPLAINED
    constant = _constant_bytes(capacity)
    beside = f"; {constant / 1e6:.1f} MB beside them, whatever the batch" if constant > 0 else ""
    return (
        f"a sequence took {taken / 1e6:.2f} MB at the peak, {cache / 1e6:.2f} MB of it KV cache, "
        f"the rest activations{beside}"
    )


def _constant_bytes(capacity: CapacityResult) -> float:
    """What the peak of the largest batch held that doesn't grow with it, weights excluded."""
    split, taken = capacity.memory, capacity.peak_bytes_per_sequence
    if split is None or taken is None:
        return 0.0
    return max(0.0, split.peak_bytes - split.weight_bytes - split.sequences * taken)


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
        yield rate.model_copy(update={"batch_size": row.batch_size, "bound": planned.bound})
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


def _lengths(plan: VariantPlan, speed: SpeedResult) -> Iterator[Reconciliation]:
    """Prefill over prompt lengths and decode over depths, whole prompts at batch 1, beside their floors."""
    floors: dict[tuple[str, int], LengthPlan] = {(one.test, one.prompt_tokens): one for one in plan.lengths}
    for row in (*speed.of("prefill"), *speed.of("depth")):
        floor = floors.get((row.test, row.prompt_tokens))
        if floor is None or row.outcome != "measured" or row.chunk_tokens is not None:
            continue
        measured = row.ttft_s if row.test == "prefill" else row.tpot_s
        if measured:
            yield _compared(
                f"{'TTFT' if row.test == 'prefill' else 'TPOT'} of {row.name}, at least",
                "ms",
                floor.floor_s,
                measured.median,
                scale=1e-3,
                reason=_share_reason(floor.floor_s / measured.median, bound=floor.bound, plan=plan),
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
