"""What a million tokens cost, from the best measured rates; input and output apart."""

from __future__ import annotations

import pytest

from pipeline.results import CostResult
from pipeline.run_results import cost_of
from pipeline.speed_results import SpeedRow
from tests import result_builders as build


def cost(*rows: SpeedRow, dollars_per_hour: float | None = 3.6) -> CostResult | None:
    return cost_of(build.speed("int8", rows), dollars_per_hour=dollars_per_hour)


def test_input_and_output_are_priced_apart_each_at_its_best_batch() -> None:
    found = cost(
        build.speed_row(1, 40.0, prefill_tokens_per_s=500.0),
        build.speed_row(4, 100.0, prefill_tokens_per_s=2000.0),
        build.speed_row(8, 250.0, prefill_tokens_per_s=1000.0),
    )
    assert found is not None
    # $3.6 an hour are $0.001 a second: a million tokens at 250 tok/s take 4000 s, at 2000 tok/s 500 s.
    assert found.dollars_per_million_output_tokens == pytest.approx(4.0)
    assert found.dollars_per_million_input_tokens == pytest.approx(0.5)
    assert (found.batch_size, found.input_batch_size) == (8, 4)


def test_a_row_that_is_void_or_failed_prices_nothing() -> None:
    honest = build.speed_row(1, 40.0, prefill_tokens_per_s=500.0)
    for outcome in ("void", "failed", "out_of_memory"):
        too_good = build.speed_row(8, 9e9, prefill_tokens_per_s=9e9, outcome=outcome)
        assert cost(honest, too_good) == cost(honest)
        assert cost(too_good) is None


def test_without_a_decode_rate_only_input_has_a_price_and_the_other_way_round() -> None:
    prefill_only = cost(build.speed_row(1, None, tpot_s=None, prefill_tokens_per_s=1000.0))
    assert prefill_only == CostResult(
        dollars_per_hour=3.6,
        batch_size=None,
        dollars_per_million_output_tokens=None,
        input_batch_size=1,
        dollars_per_million_input_tokens=1.0,
    )
    decode_only = cost(build.speed_row(2, 1000.0, prefill_tokens_per_s=None))
    assert decode_only is not None
    assert (decode_only.batch_size, decode_only.input_batch_size) == (2, None)
    assert decode_only.dollars_per_million_input_tokens is None


def test_nothing_has_a_price_without_a_machine_s_price_or_a_measured_speed() -> None:
    assert cost(build.speed_row(1, 40.0), dollars_per_hour=None) is None
    assert cost_of(None, dollars_per_hour=3.6) is None


def test_a_stored_cost_without_an_input_price_is_still_read() -> None:
    stored = '{"dollars_per_hour": 2.0, "batch_size": 8, "dollars_per_million_output_tokens": 5.0}'
    assert CostResult.model_validate_json(stored).dollars_per_million_input_tokens is None
