"""Distances between distributions: exact where they can be, as close as stated where 16 bits stand for a value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.distribution import (
    RANGE_NATS,
    STEPS,
    Block,
    TokenDistances,
    clustered_share_bounds,
    compare,
    encode,
    mean_bounds,
    perplexity_figures,
    quantile_bounds,
    ratio,
    share_above,
    share_bounds,
    summarise,
    target_log_probs,
)
from pipeline.distribution_results import DistributionWindow

HALF_STEP = RANGE_NATS / STEPS / 2


def block_of(logits: np.ndarray, targets: np.ndarray | None = None) -> Block:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_probs = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)
    top = np.argsort(-log_probs, axis=1, kind="stable")[:, :5]
    chosen = targets if targets is not None else np.zeros(len(logits), dtype=np.int64)
    return Block(log_probs=log_probs, targets=chosen, top=top)


def logits(seed: int, *, scale: float, positions: int = 40, vocabulary: int = 3000) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(positions, vocabulary)) * scale


# --- KL --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("moved", [0.001, 0.1, 1.0])
def test_kl_from_16_bits_is_the_exact_one_within_the_stated_error(scale: float, moved: float) -> None:
    import torch

    first = logits(1, scale=scale)
    second = first + logits(2, scale=moved)
    measured = compare(block_of(second), encode(block_of(first))).kl_nats
    log_p, log_q = (
        torch.log_softmax(torch.tensor(one, dtype=torch.float64), dim=-1) for one in (first, second)
    )
    p, difference = log_p.exp(), log_p - log_q
    exact = (p * difference).sum(-1)
    spread = (p * (difference - exact[:, None]).abs()).sum(-1)
    rounding = 2e-6  # of FP32 arithmetic, which the stated error leaves out
    allowed = HALF_STEP * spread + HALF_STEP**2 + rounding
    assert (abs(measured - exact.numpy()) <= allowed.numpy()).all()


def test_a_model_is_at_no_distance_from_what_it_wrote_down() -> None:
    own = block_of(logits(3, scale=5.0))
    found = compare(own, encode(own))
    assert abs(found.kl_nats).max() < 2e-6
    assert found.same_top1.all()
    assert (found.top5_share == 1.0).all()
    assert (found.probability_difference == 0.0).all()


def test_stored_values_are_off_by_half_a_step_at_most_unless_they_lie_below_the_range() -> None:
    own = block_of(logits(4, scale=8.0))
    coded = encode(own)
    read = coded.codes * coded.step[:, None] + coded.floor[:, None]
    lowest = own.log_probs.max(axis=1, keepdims=True) - np.float32(RANGE_NATS)
    expected = np.maximum(own.log_probs, lowest)
    assert (coded.step <= RANGE_NATS / STEPS * 1.0001).all()
    assert (abs(read - expected) <= coded.step[:, None] / 2 + 1e-5).all()
    assert (own.log_probs < lowest).any(), "no value lies below the range, so that nothing of it is tested"


def test_a_vocabulary_of_262_144_impossible_tokens_adds_no_divergence() -> None:
    one = np.full((1, 262_144), -60.0)
    one[0, 7] = 0.0
    found = compare(block_of(one), encode(block_of(one)))
    assert abs(found.kl_nats[0]) < 1e-6


def test_equal_probabilities_have_no_steps_and_no_divergence() -> None:
    uniform = block_of(np.zeros((2, 32_000)))
    assert abs(compare(uniform, encode(uniform)).kl_nats).max() < 1e-6


def test_top_figures_count_the_likeliest_tokens_that_are_the_same() -> None:
    first, second = np.zeros((1, 10)), np.zeros((1, 10))
    first[0, :5] = [5, 4, 3, 2, 1]
    second[0, 3:8] = [5, 4, 3, 2, 1]
    found = compare(block_of(second), encode(block_of(first)))
    assert not found.same_top1[0]
    assert found.top5_share[0] == pytest.approx(2 / 5)


def test_probability_differences_are_the_candidate_s_minus_the_baseline_s() -> None:
    first, second = np.log([[0.5, 0.3, 0.2]]), np.log([[0.4, 0.5, 0.1]])
    found = compare(block_of(second), encode(block_of(first)))
    assert found.probability_difference[0] == pytest.approx(-0.1, abs=1e-6)
    assert found.nats[0] - found.baseline_nats[0] == pytest.approx(math.log(0.5 / 0.4), abs=1e-6)


# --- perplexity ------------------------------------------------------------------------------------------


def test_a_uniform_model_s_perplexity_is_its_vocabulary() -> None:
    nats = -target_log_probs(block_of(np.zeros((4, 32_000)))).astype(float)
    assert nats[0] == pytest.approx(10.37349, abs=1e-5)
    found = perplexity_figures([nats.sum()], units=[4.0])
    assert found.value == pytest.approx(32_000.0, rel=1e-5)


def test_perplexity_by_token_word_and_byte_differ_as_their_units_do() -> None:
    nats = [15 * math.log(256)]
    assert perplexity_figures(nats, units=[15]).value == pytest.approx(256)
    assert perplexity_figures(nats, units=[10]).value == pytest.approx(4096)
    assert perplexity_figures(nats, units=[60]).value == pytest.approx(4)
    assert ratio([nats[0] / math.log(2)], weights=[60]).value == pytest.approx(2.0)
    per_byte = [1000 * math.log(1.50158)]
    assert perplexity_figures(per_byte, units=[1000]).value == pytest.approx(1.50158)
    assert ratio([per_byte[0] / math.log(2)], weights=[1000]).value == pytest.approx(0.58649, abs=1e-5)


def test_perplexity_is_the_exponential_of_the_mean_not_the_mean_of_exponentials() -> None:
    found = perplexity_figures([1.0, 5.0], units=[1, 1])
    assert found.value == pytest.approx(math.exp(3.0))


def test_a_perplexity_beyond_any_number_is_missing() -> None:
    assert perplexity_figures([1e6], units=[1.0]) == (None, None)
    assert perplexity_figures([1.0], units=[0.0]) == (None, None)


def test_a_standard_error_is_that_of_window_means_where_windows_are_alike() -> None:
    found = ratio([10.0, 12.0, 14.0], weights=[2.0, 2.0, 2.0])
    assert found.value == 6.0
    assert found.stderr == pytest.approx(1.0 / math.sqrt(3))
    assert ratio([10.0], weights=[2.0]).stderr is None


# --- sums ------------------------------------------------------------------------------------------------


def distances(kl: list[float]) -> TokenDistances:
    size = len(kl)
    return TokenDistances(
        nats=np.full(size, 2.5),
        baseline_nats=np.full(size, 2.0),
        kl_nats=np.array(kl),
        same_top1=np.arange(size) % 4 > 0,
        top5_share=np.full(size, 0.8),
        probability_difference=np.where(np.arange(size) % 2, 0.3, -0.1),
    )


def test_a_summary_holds_means_percentiles_and_the_ratio_of_perplexities() -> None:
    found = summarise(distances([0.01 * value for value in range(100)]), window_tokens=50)
    assert found.kl_mean_nats == pytest.approx(0.495)
    assert found.kl_mean_nats_stderr == pytest.approx(0.25)
    assert found.kl_median_nats == pytest.approx(0.495)
    assert found.kl_p99_nats == pytest.approx(0.9801)
    assert found.kl_max_nats == pytest.approx(0.99)
    assert found.top1_agreement_share == pytest.approx(0.75)
    assert found.probability_difference_mean == pytest.approx(0.1)
    assert found.probability_difference_rms == pytest.approx(math.sqrt(0.05))
    assert found.log_perplexity_ratio == pytest.approx(0.5)
    assert found.log_perplexity_ratio_stderr == pytest.approx(0.0, abs=1e-12)
    assert found.baseline_token_perplexity == pytest.approx(math.exp(2.0))


def windows_of(*kl: Sequence[float]) -> list[DistributionWindow]:
    return [
        DistributionWindow(
            tokens=len(values), nats=1.0, words=1, utf8_bytes=1, kl_nats=tuple(float(one) for one in values)
        )
        for values in kl
    ]


def test_a_percentile_s_bounds_hold_it_and_agree_with_the_share_of_tokens_above_a_limit() -> None:
    windows = windows_of(*np.random.default_rng(5).exponential(size=(12, 200)))
    whole = float(np.quantile(np.concatenate([window.kl_nats for window in windows]), 0.99))
    for limit in (2.0, 3.0, whole, 4.5, 5.5, 6.5, 9.0):
        share_low, share_high = share_above(windows, limit, confidence=0.95)
        low, high = quantile_bounds(windows, 0.99, limit_nats=limit, confidence=0.95)
        assert high is not None
        assert low < whole < high
        assert (high <= limit) == (share_high < 0.01)
        assert (low >= limit) == (share_low >= 0.01)


def test_a_percentile_of_a_short_text_has_no_upper_bound() -> None:
    windows = windows_of(*np.random.default_rng(5).exponential(size=(2, 100)))
    _, high = quantile_bounds(windows, 0.99, limit_nats=1e9, confidence=0.95)
    assert high is None
    assert share_above(windows, 1e9, confidence=0.95)[1] > 0.01


def test_a_share_is_less_certain_where_windows_differ() -> None:
    alike = clustered_share_bounds([2] * 16, trials=[200] * 16, confidence=0.95)
    apart = clustered_share_bounds([0] * 12 + [8] * 4, trials=[200] * 16, confidence=0.95)
    single = share_bounds(32, trials=3200, confidence=0.95)
    assert apart[0] < alike[0] <= single[0] < 0.01 < single[1] <= alike[1] < apart[1]
    none = clustered_share_bounds([0] * 8, trials=[200] * 8, confidence=0.95)
    assert none[0] == 0.0 < share_bounds(0, trials=1600, confidence=0.95)[1] < none[1] < 0.003


def test_a_mean_of_few_skewed_windows_reaches_far_up() -> None:
    low, high = mean_bounds([1.0, 1.2, 0.9, 6.0], weights=[1.0] * 4, confidence=0.95)
    assert 0 <= low < 2.275 < 2.275 + 2.35 * 1.24 < high
    assert mean_bounds([0.0] * 4, weights=[1.0] * 4, confidence=0.95) == (0.0, 0.0)
    low, high = mean_bounds([0.0, 0.0, 1.0, 2.0], weights=[1.0] * 4, confidence=0.95)
    assert low == 0.0 < 0.75 < high < math.inf


def test_a_share_of_all_is_not_certain() -> None:
    low, high = share_bounds(100, trials=100, confidence=0.95)
    assert low == pytest.approx(0.05 ** (1 / 100))
    assert high == 1.0
    assert share_bounds(0, trials=100, confidence=0.95) == pytest.approx((0.0, 1 - 0.05 ** (1 / 100)))
