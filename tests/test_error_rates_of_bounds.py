"""How often bounds without counts of flips err: graded scores, perplexity and distances, simulated with known truths.

Allowed is the nominal rate, or the one that docs/gate.md states instead, + half a point + two standard errors of the
simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.distribution import clustered_share_bounds, mean_bounds, share_bounds
from pipeline.paired_drop import paired_drop, surely_above, surely_under
from pipeline.rules.min_score import MinScore
from pipeline.statistics import holm_claims, non_inferiority, paired_bootstrap
from tests import result_builders as build

ERROR = 0.05
Floats = NDArray[np.float64]


def allowed(draws: int, *, nominal: float = ERROR) -> float:
    return nominal + 0.005 + 2 * math.sqrt(nominal * (1 - nominal) / draws)


# --- graded scores --------------------------------------------------------------------------------------

GRADED = [
    # documents, true drop = margin, and the differences that come, each with its probability.
    # Few documents lose all of their score, the others nothing or next to nothing: what a small sample seldom shows.
    (20, 0.05, {1.0: 0.05, 0.0: 0.95}),
    (20, 0.10, {1.0: 0.10, 0.01: 0.30, -0.01: 0.30, 0.0: 0.30}),
    (50, 0.03, {1.0: 0.03, 0.0: 0.97}),
    (100, 0.02, {1.0: 0.02, 0.01: 0.40, -0.01: 0.40, 0.0: 0.18}),
    # Many documents move a little, both ways.
    (50, 0.05, {0.3: 0.35, -0.2: 0.35, 0.05: 0.30}),
    (200, 0.02, {0.4: 0.15, -0.3: 0.15, 0.05: 0.10, 0.0: 0.60}),
    # Few documents gain much, the others lose a little: what a small sample shows too bad.
    (50, 0.05, {0.1: 0.95, -0.9: 0.05}),
]


def _graded_setting(margin: float, chances: dict[float, float]) -> tuple[Floats, Floats]:
    differences, weights = np.array(list(chances)), np.array(list(chances.values()))
    assert weights.sum() == pytest.approx(1.0)
    assert (differences * weights).sum() == pytest.approx(margin)
    return differences, weights


@pytest.mark.parametrize(("documents", "margin", "chances"), GRADED)
def test_a_graded_drop_as_large_as_the_margin_ships_and_fails_no_more_often_than_stated(
    documents: int, margin: float, chances: dict[float, float]
) -> None:
    differences, weights = _graded_setting(margin, chances)
    generator = np.random.default_rng(documents)
    samples = generator.multinomial(documents, weights, size=600)
    tables, frequency = np.unique(samples, axis=0, return_counts=True)
    passed = failed = 0
    for table, times in zip(tables, frequency, strict=True):
        pairs = _pairs(differences, table)
        drop = paired_drop("rouge", pairs, confidence=1 - ERROR)
        passed += times * surely_under(drop, margin=margin)
        failed += times * surely_above(drop, pairs, margin=margin, tests=1)
    assert passed / 600 <= allowed(600)
    assert failed / 600 <= allowed(600)


def _pairs(differences: Floats, table: NDArray[np.int64]) -> list[tuple[float, float]]:
    """Scores with these differences, so many of each; the halves keep them graded."""
    return [
        (0.5 + difference / 2, 0.5 - difference / 2)
        for difference, times in zip(differences.tolist(), table.tolist(), strict=True)
        for _ in range(times)
    ]


def test_one_tiny_difference_doesn_t_make_equal_documents_a_proof() -> None:
    equal = [(0.5, 0.5)] * 20
    moved = [(0.5, 0.49), *equal[1:]]
    for pairs in (equal, moved):
        drop = paired_drop("rouge", pairs, confidence=0.95)
        assert not surely_under(drop, margin=0.10)
        assert drop.upper is not None
        assert drop.upper > 0.13  # 1 − 0.05^(1/20): what twenty documents can't rule out
    assert surely_under(paired_drop("rouge", equal * 3, confidence=0.95), margin=0.10)


def test_graded_bounds_of_right_and_wrong_are_clopper_and_pearson_s() -> None:
    drop = paired_drop("rouge", [(0.5, 0.5)] * 99 + [(1.0, 0.5)], confidence=0.95)
    assert drop.upper is not None
    # Half a point lost once in a hundred: between one whole loss (4.66 points) and none (2.95).
    assert 0.0295 < drop.upper < 0.0466
    assert drop.lower is not None
    assert drop.lower < 0 < drop.drop < drop.upper


def test_many_graded_documents_decide_almost_as_sharply_as_the_normal_approximation() -> None:
    generator = np.random.default_rng(4)
    pairs = [(0.5, 0.5 - one) for one in np.round(generator.normal(0.0, 0.1, size=2000), 2).tolist()]
    drop = paired_drop("rouge", pairs, confidence=0.95)
    assert drop.upper is not None
    normal = 1.645 * 0.1 / math.sqrt(2000)
    assert drop.upper - drop.drop == pytest.approx(normal, rel=0.2)


# --- perplexity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spread", "documents", "stated"),
    [("symmetric", 32, ERROR), ("symmetric", 100, ERROR), ("skewed", 32, 0.065), ("skewed", 100, ERROR)],
)
def test_an_increase_of_perplexity_as_large_as_the_limit_ships_no_more_often_than_stated(
    spread: str, documents: int, stated: float
) -> None:
    """NLL per token rises by 0.02 nats in truth, by document normally or exponentially spread."""
    generator = np.random.default_rng(documents)
    rates = {"pass": 0, "fail": 0, "inconclusive": 0}
    for _ in range(400):
        tokens = generator.integers(50, 200, size=documents).astype(float)
        rise = (
            generator.normal(0.02, 0.04, size=documents)
            if spread == "symmetric"
            else generator.exponential(0.04, size=documents) - 0.02
        )
        interval = paired_bootstrap(
            [0.0] * documents, (rise * tokens).tolist(), weights=tokens.tolist(), resamples=2000
        ).interval
        assert interval is not None
        rates[non_inferiority(interval.lower, interval.upper, 0.02)] += 1
    assert rates["pass"] / 400 <= allowed(400, nominal=stated)
    assert rates["fail"] / 400 <= allowed(400)


# --- distances ------------------------------------------------------------------------------------------


def window_sums(windows: int, *, draws: int, token_spread: float, window_spread: float) -> Iterator[Floats]:
    """Mean KL of windows of 128 tokens whose logarithms are normal within and between windows."""
    generator = np.random.default_rng(windows)
    for _ in range(draws):
        level = window_spread * generator.standard_normal((windows, 1))
        tokens = level + token_spread * generator.standard_normal((windows, 128))
        yield np.exp(tokens).mean(axis=1)


@pytest.mark.parametrize(
    ("windows", "token_spread", "window_spread", "stated"),
    [
        (4, 1.25, 0.3, ERROR),
        (8, 1.25, 0.3, ERROR),
        (16, 1.25, 0.3, ERROR),
        (16, 1.5, 0.3, ERROR),
        (8, 2.0, 0.5, 0.08),
        (16, 2.0, 1.0, 0.08),
    ],
)
def test_a_mean_kl_at_the_limit_ships_no_more_often_than_stated(
    windows: int, token_spread: float, window_spread: float, stated: float
) -> None:
    truth = math.exp((token_spread**2 + window_spread**2) / 2)
    draws = 400
    passed = failed = 0
    for means in window_sums(windows, draws=draws, token_spread=token_spread, window_spread=window_spread):
        low, high = mean_bounds(means.tolist(), weights=[1.0] * windows, confidence=1 - ERROR)
        passed += high < truth
        failed += low >= truth
    assert passed / draws <= allowed(draws, nominal=stated)
    assert failed / draws <= allowed(draws)


def window_counts(windows: int, *, share: float, window_spread: float, draws: int) -> NDArray[np.int64]:
    """Tokens of 128 in each window beyond a limit: `share` in the mean, the windows' log odds spread normally."""
    generator = np.random.default_rng(windows)
    level = np.quantile(generator.standard_normal(100_000), np.linspace(0.0005, 0.9995, 1000))
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = (1 / (1 + np.exp(-(middle + window_spread * level)))).mean()
        low, high = (middle, high) if mean < share else (low, middle)
    shares = 1 / (1 + np.exp(-(low + window_spread * generator.standard_normal((draws, windows)))))
    return generator.binomial(128, shares)


@pytest.mark.parametrize(
    ("share", "windows", "window_spread", "stated"),
    [
        *((0.01, windows, spread, ERROR) for windows in (2, 8, 16, 64) for spread in (0.0, 0.3, 0.6)),
        *((0.05, windows, spread, ERROR) for windows in (2, 8, 16, 64) for spread in (0.0, 0.3)),
        *((0.05, windows, 0.6, 0.065) for windows in (8, 16, 64)),
        (0.01, 16, 1.2, 0.10),
        (0.05, 8, 1.2, 0.13),
        (0.05, 64, 1.2, 0.085),
    ],
)
def test_a_share_of_tokens_at_the_limit_ships_and_fails_no_more_often_than_stated(
    share: float, windows: int, window_spread: float, stated: float
) -> None:
    """1 % above the limit is p99 at the limit; 5 % other tokens than the baseline's is an agreement of 95 %."""
    draws = 2000
    counts = window_counts(windows, share=share, window_spread=window_spread, draws=draws)
    bounds = np.array(
        [clustered_share_bounds(row, trials=[128] * windows, confidence=1 - ERROR) for row in counts.tolist()]
    )
    under, above = (bounds[:, 1] < share).mean(), (bounds[:, 0] >= share).mean()
    assert under <= allowed(draws, nominal=stated)
    assert above <= allowed(draws, nominal=stated)


# --- several claims of one rule -------------------------------------------------------------------------


@cache
def upper_bound(right: int, tests: int) -> float:
    """Of the share of right answers, of which a hundred were seen, at a part of the error."""
    return share_bounds(right, trials=100, confidence=1 - ERROR / tests)[1]


def under_floor(counts: Sequence[int], floor: float) -> frozenset[str]:
    """Numbers of the tasks that surely are under the floor, all together."""

    def holds(right: int, tests: int) -> bool:
        return upper_bound(right, tests) <= floor

    return holm_claims({str(task): partial(holds, right) for task, right in enumerate(counts)})


@pytest.mark.parametrize("tasks", [2, 6, 20])
def test_any_of_several_floors_is_falsely_missed_no_more_often_than_stated(tasks: int) -> None:
    counts = np.random.default_rng(tasks).binomial(100, 0.6, size=(4000, tasks)).tolist()
    assert sum(bool(under_floor(row, 0.6)) for row in counts) / 4000 <= allowed(4000)
    alone = sum(any(upper_bound(right, 1) <= 0.6 for right in row) for row in counts) / 4000
    assert alone > 0.07, "uncorrected it would err more often"


def test_the_rule_fails_those_floors_that_hold_together() -> None:
    rule = MinScore(score=0.6, tasks=tuple("0123"))
    some = 0
    for row in np.random.default_rng(7).binomial(100, 0.49, size=(30, 4)).tolist():
        tasks = [
            build.task(str(task), [1.0] * right + [0.0] * (100 - right)) for task, right in enumerate(row)
        ]
        arms = [build.variant(name, quality=build.quality(*tasks)) for name in ("fp16", "int8")]
        findings = rule.judge(baseline=arms[0], candidate=arms[1])
        failed = {finding.subject for finding in findings if finding.outcome == "fail"}
        assert failed == under_floor(row, 0.6)
        some += failed != {str(task) for task, right in enumerate(row) if upper_bound(right, 1) <= 0.6}
    assert some > 3
