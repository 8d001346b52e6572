"""Right values of the paired statistics, from published examples and from brute force."""

from __future__ import annotations

import math
import random

import pytest

from pipeline.sample_sizes import detectable_drop, documents_to_decide, documents_to_detect
from pipeline.statistics import (
    group_score,
    holm,
    mcnemar_exact_p,
    non_inferiority,
    normal_interval,
    paired_bootstrap,
    paired_flips,
    ratio_standard_error,
    tango_interval,
)


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [
        (10, 2, 158 / 4096),
        (5, 0, 0.0625),
        (6, 0, 0.03125),
        (9, 1, 0.021484375),
        (15, 5, 0.041389),
        (40, 20, 0.013489),
        (30, 30, 1.0),
        (1, 0, 1.0),
        (0, 0, 1.0),
    ],
)
def test_mcnemar_is_exact_and_two_sided(lost: int, gained: int, p: float) -> None:
    assert mcnemar_exact_p(lost=lost, gained=gained) == pytest.approx(p, abs=5e-7)
    assert mcnemar_exact_p(lost=gained, gained=lost) == mcnemar_exact_p(lost=lost, gained=gained)


def test_mcnemar_agrees_with_the_binomial_test_for_thousands_of_flips() -> None:
    from scipy.stats import binomtest

    assert mcnemar_exact_p(lost=5100, gained=4900) == pytest.approx(binomtest(4900, 10000).pvalue, rel=1e-9)


def test_pairing_finds_what_two_separate_samples_would_not() -> None:
    """80 and 72 of 100 right, 10 lost and 2 gained; z of the difference from the arms' own standard errors."""
    errors = [ratio_standard_error([1.0] * n + [0.0] * (100 - n), [1.0] * 100) for n in (80, 72)]
    z = 0.08 / math.hypot(*errors)
    assert math.erfc(z / math.sqrt(2)) == pytest.approx(0.1856, abs=5e-5)
    assert mcnemar_exact_p(lost=10, gained=2) == pytest.approx(0.038574, abs=5e-7)


def test_flips_both_ways_are_counted_even_when_they_cancel() -> None:
    pairs = [(True, False)] * 30 + [(False, True)] * 30 + [(True, True)] * 40
    flips = paired_flips(pairs)
    assert (flips.lost, flips.gained, flips.flips, flips.documents) == (30, 30, 60, 100)


@pytest.mark.parametrize(
    ("lost", "gained", "documents", "confidence", "lower", "upper"),
    [
        # Soft contact lens disinfection, 90 % interval (Tango 1998).
        (0, 1, 44, 0.95, -0.096, 0.037),
        # Airway hyper-responsiveness (Bentur et al. 2009), 95 % interval (Fagerland, Lydersen, Laake 2014).
        (1, 7, 21, 0.975, -0.517, -0.026),
        # Complete response after consolidation therapy (Cavo et al. 2012), 95 % interval (Fagerland et al., Statistical
        # Analysis of Contingency Tables, 2017, chapter 8).
        (6, 16, 161, 0.975, -0.1240, -0.0054),
        # R's PropCIs 0.3, scoreci.mp(25, 28, 618), 90 % interval.
        (28, 25, 618, 0.95, -0.0148, 0.0247),
    ],
)
def test_tango_interval_matches_published_examples(
    lost: int, gained: int, documents: int, confidence: float, lower: float, upper: float
) -> None:
    interval = tango_interval(lost=lost, gained=gained, documents=documents, confidence=confidence)
    assert (interval.lower, interval.upper) == pytest.approx((lower, upper), abs=5e-4)


def _score_by_search(drop: float, *, lost: int, gained: int, documents: int) -> float:
    """The score statistic with the constrained likelihood maximised by golden-section search."""
    same = documents - lost - gained

    def log_likelihood(q: float) -> float:
        cells = ((lost, q + drop), (gained, q), (same, 1 - 2 * q - drop))
        return sum(n * math.log(max(probability, 1e-300)) for n, probability in cells if n)

    low, high = max(0.0, -drop), (1 - drop) / 2
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(200):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if log_likelihood(left) > log_likelihood(right) else (left, high)
    q = (low + high) / 2
    return (lost - gained - documents * drop) / math.sqrt(documents * (2 * q + drop - drop**2))


@pytest.mark.parametrize(("lost", "gained", "documents"), [(10, 2, 100), (3, 9, 40), (1, 1, 12), (7, 0, 30)])
def test_tango_bounds_are_where_the_score_test_turns(lost: int, gained: int, documents: int) -> None:
    interval = tango_interval(lost=lost, gained=gained, documents=documents, confidence=0.95)
    table = {"lost": lost, "gained": gained, "documents": documents}
    assert _score_by_search(interval.lower, **table) == pytest.approx(1.6448536, abs=1e-4)
    assert _score_by_search(interval.upper, **table) == pytest.approx(-1.6448536, abs=1e-4)


def test_tango_interval_mirrors_when_the_arms_swap() -> None:
    one = tango_interval(lost=10, gained=2, documents=100)
    other = tango_interval(lost=2, gained=10, documents=100)
    assert (one.lower, one.upper) == pytest.approx((-other.upper, -other.lower))


def test_no_flip_in_a_hundred_documents_still_leaves_an_interval() -> None:
    interval = tango_interval(lost=0, gained=0, documents=100, confidence=0.975)
    z_squared = 1.959964**2
    assert interval.upper == pytest.approx(z_squared / (100 + z_squared), abs=1e-6)
    assert interval.lower == pytest.approx(-interval.upper)


def test_no_and_one_document_claim_next_to_nothing() -> None:
    none = tango_interval(lost=0, gained=0, documents=0)
    one = tango_interval(lost=0, gained=0, documents=1)
    assert (none.lower, none.upper) == (-1.0, 1.0)
    assert one.lower < -0.7
    assert one.upper > 0.7
    lost = tango_interval(lost=1, gained=0, documents=1)
    assert lost.lower < 0
    assert lost.upper == 1.0


def test_a_table_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="8 lost and 3 gained in 10"):
        tango_interval(lost=8, gained=3, documents=10)


def test_tango_bounds_hold_about_as_often_as_they_say() -> None:
    generator = random.Random(7)
    true_drop, held = 0.02, 0
    for _ in range(400):
        draws = generator.choices(("lost", "gained", "same"), weights=(0.06, 0.04, 0.90), k=300)
        interval = tango_interval(lost=draws.count("lost"), gained=draws.count("gained"), documents=300)
        held += interval.lower <= true_drop <= interval.upper
    assert 0.86 <= held / 400 <= 0.94


def _documents(count: int, *, shift: float, seed: int = 3) -> tuple[list[float], list[float], list[float]]:
    generator = random.Random(seed)
    tokens = [float(generator.randint(50, 400)) for _ in range(count)]
    before = [3.0 * n for n in tokens]
    after = [nats + n * generator.gauss(shift, 0.05) for nats, n in zip(before, tokens, strict=True)]
    return before, after, tokens


def test_bootstrap_difference_is_the_ratio_of_document_totals() -> None:
    result = paired_bootstrap([100.0, 10.0], [200.0, 10.0], weights=[50.0, 5.0])
    assert result.difference == pytest.approx(100 / 55)


def test_bootstrap_is_seeded_and_brackets_the_difference() -> None:
    before, after, tokens = _documents(60, shift=0.2)
    one, two = (paired_bootstrap(before, after, weights=tokens) for _ in range(2))
    assert one == two
    assert one.interval is not None
    assert one.difference is not None
    assert one.interval.lower < one.difference < one.interval.upper
    assert one.interval.lower == pytest.approx(0.2, abs=0.03)


def test_bootstrap_bounds_hold_about_as_often_as_they_say() -> None:
    held = 0
    for seed in range(150):
        before, after, tokens = _documents(12, shift=0.1, seed=seed)
        result = paired_bootstrap(before, after, weights=tokens, resamples=2000, seed=seed)
        assert result.interval is not None
        held += result.interval.lower <= 0.1 <= result.interval.upper
    assert held / 150 >= 0.85


def test_bootstrap_of_no_or_one_document_has_no_interval() -> None:
    assert paired_bootstrap([], []).difference is None
    one = paired_bootstrap([3.0], [3.5])
    assert (one.difference, one.interval, one.standard_error) == (0.5, None, None)


def test_bootstrap_of_two_documents_is_wider_than_what_was_seen() -> None:
    interval = paired_bootstrap([0.0, 0.0], [0.1, 0.3]).interval
    assert interval is not None
    assert interval.lower < 0 < 0.3 < interval.upper


def test_units_of_one_ratio_have_no_standard_error_made_of_rounding() -> None:
    weights = [3.0, 7.0, 11.0, 13.0]
    totals = [0.1 * weight for weight in weights]
    assert ratio_standard_error(totals, weights) == 0.0
    found = paired_bootstrap([0.0] * 4, totals, weights=weights)
    assert found.standard_error == 0.0
    # By hand: r = 2, residuals −1 and 1 with weights 1 and 1, so √(2 ÷ 1 × 2) ÷ 2.
    assert ratio_standard_error([1.0, 3.0], [1.0, 1.0]) == pytest.approx(1.0)


def test_a_share_of_right_answers_is_as_sure_as_its_documents_are_many() -> None:
    """√(p (1 − p) ÷ n), of 1,172 in 1,318 and of 70 in 100; the latter's 95 % interval reaches 9 points either way."""

    def stderr(right: int, documents: int) -> float:
        return ratio_standard_error([1.0] * right + [0.0] * (documents - right), [1.0] * documents)

    assert stderr(1172, 1318) == pytest.approx(math.sqrt(0.8893 * 0.1107 / 1318), rel=1e-3)
    assert stderr(1172, 1318) == pytest.approx(0.00864, abs=1e-5)
    low, high = normal_interval(0.7, stderr(70, 100)) or (0.0, 0.0)
    assert ((high - low) / 2, (high + low) / 2) == pytest.approx((0.0903, 0.7), abs=5e-5)


def test_bootstrap_refuses_too_few_resamples_and_uneven_arms() -> None:
    with pytest.raises(ValueError, match="2000"):
        paired_bootstrap([1.0, 2.0], [1.0, 2.0], resamples=100)
    with pytest.raises(ValueError, match="one number for each document"):
        paired_bootstrap([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="finite"):
        paired_bootstrap([1.0, 2.0], [1.0, math.nan])


def test_holm_rejects_what_bonferroni_would_not() -> None:
    assert holm([0.001, 0.013, 0.02, 0.04]) == pytest.approx((0.004, 0.039, 0.04, 0.04))
    assert holm([0.04, 0.001, 0.02, 0.013]) == pytest.approx((0.04, 0.004, 0.04, 0.039))
    assert holm([0.9, 0.8]) == (1.0, 1.0)
    assert holm([]) == ()


def test_a_group_s_score_counts_documents_with_the_plain_mean_beside_it() -> None:
    score = group_score([0.713384, 0.389078], documents=[2376, 1172], stderrs=[0.0093, None])
    assert score.documents == 3548
    assert score.weighted == pytest.approx(0.606257, abs=1e-6)
    assert score.plain == pytest.approx(0.551231, abs=1e-6)
    assert score.weighted_stderr is None


def test_a_group_s_standard_error_shrinks_with_its_documents() -> None:
    score = group_score([0.5, 0.6], documents=[100, 100], stderrs=[0.04, 0.04])
    assert score.weighted_stderr == pytest.approx(0.028284, abs=1e-6)
    with pytest.raises(ValueError, match="for each task"):
        group_score([0.5], documents=[100, 100], stderrs=[0.04])


def test_non_inferiority_has_three_outcomes() -> None:
    assert non_inferiority(-0.01, 0.019, 0.02) == "pass"
    assert non_inferiority(0.021, 0.05, 0.02) == "fail"
    assert non_inferiority(0.0, 0.05, 0.02) == "inconclusive"


def test_nan_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        non_inferiority(math.nan, math.nan, 0.02)


def test_documents_needed_for_a_one_point_drop() -> None:
    assert documents_to_detect(0.01, flip_rate=0.05) == pytest.approx(3922, abs=1)
    assert documents_to_detect(0.01, flip_rate=0.10) == pytest.approx(7847, abs=1)
    assert documents_to_decide(0.01, flip_rate=0.05) == pytest.approx(3092, abs=1)


def test_no_number_of_documents_decides_a_drop_at_the_margin() -> None:
    assert documents_to_decide(0.02, flip_rate=0.05, true_drop=0.02) is None


def test_detectable_drop_inverts_the_documents_needed() -> None:
    documents = documents_to_decide(0.01, flip_rate=0.05)
    assert documents is not None
    assert detectable_drop(documents, flip_rate=0.05) == pytest.approx(0.01, rel=1e-3)
    assert detectable_drop(0, flip_rate=0.05) is None


def test_documents_that_decide_do_decide_four_times_in_five() -> None:
    documents = documents_to_decide(0.05, flip_rate=0.1)
    assert documents is not None
    generator = random.Random(11)
    decided = 0
    for _ in range(300):
        draws = generator.choices(("lost", "gained", "same"), weights=(0.05, 0.05, 0.90), k=documents)
        interval = tango_interval(lost=draws.count("lost"), gained=draws.count("gained"), documents=documents)
        decided += non_inferiority(interval.lower, interval.upper, 0.05) == "pass"
    assert 0.72 <= decided / 300 <= 0.88
