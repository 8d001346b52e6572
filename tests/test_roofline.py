"""Floors, capacity and price against figures worked by hand."""

from __future__ import annotations

import math

import pytest

from pipeline import roofline

GIB = 2**30


def test_ops_to_byte_is_peak_over_bandwidth() -> None:
    assert roofline.ops_per_byte(989e12, bandwidth_bytes_per_s=3.35e12) == pytest.approx(295.2, abs=0.05)


def test_a_token_attends_to_itself_and_to_what_came_before() -> None:
    assert [roofline.attended_pairs(tokens) for tokens in (1, 2, 3, 1000)] == [1, 3, 6, 500_500]
    assert roofline.attended_pairs(5, window_tokens=2) == 1 + 2 + 2 + 2 + 2
    assert roofline.attended_pairs(5, window_tokens=9) == roofline.attended_pairs(5)


def test_a_pass_takes_the_longer_of_reading_and_computing() -> None:
    def floor_s(flops: float, peak: float | None = 100.0) -> float:
        return roofline.step_floor_s(
            read_bytes=20, flops=flops, bandwidth_bytes_per_s=10, peak_flops_per_s=peak
        )

    assert floor_s(150) == 2.0
    assert floor_s(300) == 3.0
    assert floor_s(300, None) == 2.0


def test_faster_than_the_memory_is_implausible() -> None:
    def judged(tokens_per_s: float) -> bool:
        share = roofline.bandwidth_share(tokens_per_s, read_bytes_per_step=54e9, bandwidth_bytes_per_s=4.8e12)
        return roofline.plausible(share, read_bytes_per_step=54e9, last_level_cache_bytes=50 * 2**20)

    assert not judged(120)
    assert judged(88.9)
    assert judged(1.05 * 4.8e12 / 54e9)
    assert not judged(1.051 * 4.8e12 / 54e9)
    assert not judged(math.nan)


def test_a_model_that_a_cache_can_hold_may_beat_the_memory() -> None:
    cache_bytes = 32 * 2**20
    assert roofline.plausible(
        3.0, read_bytes_per_step=4 * cache_bytes - 1, last_level_cache_bytes=cache_bytes
    )
    assert not roofline.plausible(
        3.0, read_bytes_per_step=4 * cache_bytes, last_level_cache_bytes=cache_bytes
    )
    assert not roofline.plausible(3.0, read_bytes_per_step=1, last_level_cache_bytes=None)


def test_capacity_counts_whole_sequences_beside_weights_and_reserve() -> None:
    budget_bytes = 80 * GIB * 9 / 10
    assert budget_bytes - 54e9 == pytest.approx(23_309_411_328)

    def fit(kv_bytes_per_token: int) -> int:
        return roofline.capacity(
            80 * GIB,
            weight_bytes=54e9,
            kv_bytes_per_sequence=4096 * kv_bytes_per_token,
            reserve_bytes=80 * GIB / 10,
        )

    assert fit(65_536) == 86
    assert fit(262_144) == 21


def test_weights_that_do_not_fit_leave_room_for_no_sequence() -> None:
    assert roofline.capacity(80e9, weight_bytes=83e9, kv_bytes_per_sequence=1e9) == 0
    assert roofline.capacity(80e9, weight_bytes=79.5e9, kv_bytes_per_sequence=1e9) == 0


def test_bytes_are_compared_with_bytes_whatever_the_label_says() -> None:
    assert pytest.approx(50.29, abs=0.005) == 27e9 * 2 / GIB
    assert pytest.approx(77.30, abs=0.005) == 83e9 / GIB
    fits = roofline.capacity(80 * GIB, weight_bytes=83e9, kv_bytes_per_sequence=2**30)
    assert fits == 2  # 80 GiB hold 83 GB and 2.7 GiB more; a card of 80e9 bytes does not


def test_price_is_hourly_rate_over_tokens_an_hour() -> None:
    price = roofline.dollars_per_million_tokens(100, dollars_per_hour=3.60)
    assert price == pytest.approx(10.0)


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
def test_a_figure_that_is_no_measurement_makes_no_ceiling(wrong: float) -> None:
    with pytest.raises(ValueError, match="read_bytes"):
        roofline.step_floor_s(read_bytes=wrong, flops=1.0, bandwidth_bytes_per_s=1e12, peak_flops_per_s=None)
    with pytest.raises(ValueError, match="tokens_per_s"):
        roofline.dollars_per_million_tokens(wrong, dollars_per_hour=1.0)
