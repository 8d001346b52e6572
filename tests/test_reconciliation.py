"""Planned and measured figures meet in one row, and a difference has a reason or is called unexplained."""

from __future__ import annotations

from typing import Any

from pipeline.capacity_results import PeakPrediction
from pipeline.measured import Distribution
from pipeline.plan_values import LengthPlan
from pipeline.reconciliation import UNEXPLAINED, reconcile, table_rows
from pipeline.results import Reconciliation
from tests import result_builders as results
from tests.plan_builders import CONTEXT, KV_PER_TOKEN, PARAMETERS, variant


def by_figure(items: tuple[Reconciliation, ...]) -> dict[str, Reconciliation]:
    return {item.figure: item for item in items}


def test_bytes_that_agree_need_no_reason() -> None:
    size = 2 * PARAMETERS
    measured = results.variant(
        "bf16",
        checkpoint=results.manifest(weight_bytes_on_disk=size),
        memory=results.memory(weight_bytes_resident=int(1.04 * size)),
        speed=None,
    )
    found = by_figure(reconcile(variant("bf16"), measured))
    assert found["weights on disk"].ratio == 1
    assert found["weights on disk"].because == ""
    assert found["weights resident"].ratio == 1.04
    assert found["weights resident"].because == "", "within a twentieth"
    heavier = results.variant(
        "bf16",
        memory=None,
        speed=None,
        capacity=results.capacity(weight_bytes_resident=int(1.06 * size)),
    )
    assert by_figure(reconcile(variant("bf16"), heavier))["weights resident"].because == UNEXPLAINED


def test_bytes_that_differ_are_unexplained() -> None:
    measured = results.variant(
        "bf16", memory=results.memory(weight_bytes_resident=3 * PARAMETERS), checkpoint=None, speed=None
    )
    found = by_figure(reconcile(variant("bf16"), measured))
    assert found["weights resident"].because == UNEXPLAINED


def test_decoding_stands_beside_its_ceiling_as_a_share_of_the_roof() -> None:
    plan = variant("bf16")
    ceiling = plan.batches[0].tokens_per_s
    rows = [
        results.speed_row(1, decode=0.6 * ceiling),
        results.speed_row(8, decode=2 * plan.batches[1].tokens_per_s),
    ]
    found = by_figure(reconcile(plan, results.variant("bf16", speed=results.speed(rows=rows))))
    one = found["decode at batch 1, at most"]
    assert one.predicted == ceiling
    assert one.because.startswith("60 % of the roof by bandwidth")
    assert "dequantizing" not in one.because, "these weights aren't quantized"
    assert found["decode at batch 8, at most"].because == f"200 % of the roof by bandwidth: {UNEXPLAINED}"


def test_far_below_the_roof_is_unexplained_and_quantized_weights_are_dequantized() -> None:
    plan = variant("int4", precision="int4")
    ceilings = [batch.tokens_per_s for batch in plan.batches]
    rows = [results.speed_row(1, decode=0.1 * ceilings[0]), results.speed_row(8, decode=0.5 * ceilings[1])]
    found = by_figure(reconcile(plan, results.variant("int4", speed=results.speed(rows=rows))))
    assert found["decode at batch 1, at most"].because.endswith(UNEXPLAINED)
    assert "dequantizing" in found["decode at batch 8, at most"].because


def test_void_rows_are_no_measurement() -> None:
    rows = [results.speed_row(1, decode=20.0, outcome="void")]
    found = by_figure(reconcile(variant("bf16"), results.variant("bf16", speed=results.speed(rows=rows))))
    assert not [figure for figure in found if figure.startswith(("decode", "TTFT"))]


def test_capacity_is_explained_by_what_a_sequence_really_took() -> None:
    plan = variant("bf16")
    cache = CONTEXT * KV_PER_TOKEN
    capacity = results.capacity(
        60, context_tokens=CONTEXT, kv_bytes_per_sequence=cache, peak_bytes_per_sequence=2.0 * cache
    )
    found = by_figure(reconcile(plan, results.variant("bf16", capacity=capacity, speed=None)))
    assert found["KV cache at 4096 tokens"].ratio == 1
    assert found["sequences at once"].predicted == plan.max_batch
    assert "819.20 MB at the peak, 409.60 MB of it KV cache" in found["sequences at once"].because
    ended = capacity.model_copy(update={"limited_by": "ceiling"})
    found = by_figure(reconcile(plan, results.variant("bf16", capacity=ended, speed=None)))
    assert "more may fit" in found["sequences at once"].because


def test_a_prediction_with_activations_agrees_or_tells_which_part_of_it_was_wrong() -> None:
    def found(held: int, taken: float, **fields: Any) -> dict[str, Reconciliation]:
        capacity = results.capacity(
            held,
            predicted_sequences=40,
            predicted_peak=PeakPrediction(fixed_bytes=1_000_000, bytes_per_sequence=20_000_000),
            peak_bytes_per_sequence=taken,
            peak_bytes_per_sequence_predicted=20_000_000,
            **fields,
        )
        return by_figure(reconcile(variant("bf16"), results.variant("bf16", capacity=capacity, speed=None)))

    agreed = found(41, 20.9e6)
    assert agreed["a sequence at the peak"].because == ""
    assert agreed["sequences at once, with activations"].because == ""
    larger = found(30, 26e6)
    assert larger["a sequence at the peak"].because == UNEXPLAINED
    assert "took 26.00 MB at the peak, 20.00 MB were predicted" in (
        larger["sequences at once, with activations"].because
    )
    assert "don't grow with the batch" in found(30, 20.1e6)["sequences at once, with activations"].because
    ended = found(30, 20.1e6, limited_by="ceiling")["sequences at once, with activations"]
    assert "more may fit" in ended.because


def test_a_paged_cache_is_compared_with_its_own_prediction() -> None:
    paged = results.capacity(
        10, predicted_sequences=20, layout="paged", peak_bytes_per_sequence=250e6, predicted_peak=None
    )
    capacity = results.capacity(paged=paged)
    found = by_figure(reconcile(variant("bf16"), results.variant("bf16", capacity=capacity, speed=None)))
    assert found["KV cache of a sequence, paged"].ratio == 1
    assert "250.00 MB at the peak, 100.00 MB of it KV cache" in found["sequences at once, paged"].because


def test_prompt_lengths_and_depths_stand_beside_their_own_floors() -> None:
    plan = variant(
        "bf16",
        lengths=(
            LengthPlan(test="prefill", prompt_tokens=128, floor_s=0.1, bound="compute"),
            LengthPlan(test="depth", prompt_tokens=128, floor_s=0.01, bound="memory"),
        ),
    )
    rows = [
        results.speed_row(1, test="prefill", new_tokens=1, ttft_s=Distribution.of([0.2])),
        results.speed_row(1, test="prefill", new_tokens=1, chunk_tokens=64),
        results.speed_row(1, test="depth", tpot_s=Distribution.of([0.02])),
        results.speed_row(1, test="depth", prompt_tokens=256),
    ]
    found = by_figure(reconcile(plan, results.variant("bf16", speed=results.speed(rows=rows))))
    lengths = {name: one for name, one in found.items() if "pp128" in name or "@" in name}
    assert set(lengths) == {"TTFT of pp128, at least", "TPOT of tg32 @ d128, at least"}
    prefill, depth = lengths.values()
    assert (prefill.predicted, prefill.measured, prefill.unit) == (100.0, 200.0, "ms")
    assert prefill.because.startswith("50 % of the roof by FLOP/s")
    assert depth.because.startswith("50 % of the roof by bandwidth")


def test_the_measured_break_even_stands_beside_the_predicted_one() -> None:
    plan = variant("int8", break_even_batch=50.0)
    speed = results.speed(measured_break_even_batch=20.0)
    found = by_figure(reconcile(plan, results.variant("int8", speed=speed)))["break-even batch"]
    assert (found.predicted, found.measured) == (50.0, 20.0)
    assert "0.40 × batch 1's" in found.because
    not_reached = results.variant("int8", speed=results.speed())
    assert "break-even batch" not in by_figure(reconcile(plan, not_reached))


def test_prompt_lengths_and_depths_are_no_batches_of_the_workload() -> None:
    rows = [results.speed_row(1, decode=20.0, test=test) for test in ("prefill", "depth")]
    found = by_figure(reconcile(variant("bf16"), results.variant("bf16", speed=results.speed(rows=rows))))
    assert not [figure for figure in found if figure.startswith(("decode", "TTFT"))]


def test_what_was_not_measured_has_no_row() -> None:
    nothing = results.variant("bf16", checkpoint=None, memory=None, speed=None, capacity=None)
    assert reconcile(variant("bf16"), nothing) == ()
    assert table_rows([("bf16", ())]) == []
