"""How often the gate errs: simulated pairs of models whose true drop is known.

A setting draws 10,000 pairs of models. Each pair's answers come down to two counts, answers lost and gained, so that a
decision is computed once for each pair of counts that comes up. Allowed is the nominal rate + half a point + two
standard errors of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, partial

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.paired_margin import margin_decision, margin_p
from pipeline.results import TaskResult
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.sequential import decide, looks
from pipeline.statistics import Decision, holm_claims, tango_interval
from tests import result_builders as build

PAIRS = 10_000
ERROR = 0.05

SETTINGS = [
    # documents, flip rate, margin: few and many documents, few and many flips, all of them losses (rate = margin).
    (10, 0.40, 0.02),
    (30, 0.15, 0.10),
    (50, 0.10, 0.05),
    (100, 0.03, 0.03),
    (100, 0.044, 0.03),
    (100, 0.10, 0.02),
    (100, 0.10, 0.10),
    (200, 0.03, 0.03),
    (400, 0.05, 0.02),
    (400, 0.05, 0.05),
    (773, 0.05, 0.02),
    (1000, 0.01, 0.01),
    (3092, 0.05, 0.01),
    (3092, 0.20, 0.01),
    (3092, 0.02, 0.005),
    (14042, 0.08, 0.05),
]


def allowed(nominal: float) -> float:
    """Nominal rate + 0.5 point + two standard errors of a rate over 10,000 draws."""
    return nominal + 0.005 + 2 * math.sqrt(nominal * (1 - nominal) / PAIRS)


def drawn(
    documents: int, flip_rate: float, *, drop: float, seed: int, pairs: int = PAIRS
) -> NDArray[np.int64]:
    """Answers (lost, gained) of pairs of models whose true drop is `drop`: an array pairs × 2."""
    lost, gained = (flip_rate + drop) / 2, max(0.0, (flip_rate - drop) / 2)
    generator = np.random.default_rng(seed)
    return generator.multinomial(documents, [lost, gained, 1 - lost - gained], size=pairs)[:, :2]


@cache
def decision(lost: int, gained: int, documents: int, margin: float, confidence: float) -> Decision:
    return margin_decision(
        lost=lost, gained=gained, documents=documents, margin=margin, confidence=confidence
    )


def rate(outcome: Decision, counts: NDArray[np.int64], *, documents: int, margin: float) -> float:
    tables, frequency = np.unique(counts, axis=0, return_counts=True)
    decided = [
        decision(int(lost), int(gained), documents, margin, 1 - ERROR) == outcome for lost, gained in tables
    ]
    return float(frequency[np.array(decided)].sum() / frequency.sum())


@pytest.mark.parametrize(("documents", "flip_rate", "margin"), SETTINGS)
def test_a_drop_as_large_as_the_margin_ships_and_fails_no_more_often_than_stated(
    documents: int, flip_rate: float, margin: float
) -> None:
    counts = drawn(documents, flip_rate, drop=margin, seed=documents)
    assert rate("pass", counts, documents=documents, margin=margin) <= allowed(ERROR)
    assert rate("fail", counts, documents=documents, margin=margin) <= allowed(ERROR)


@pytest.mark.parametrize(("documents", "flip_rate", "margin"), SETTINGS)
def test_a_model_that_lost_nothing_is_blocked_no_more_often_than_stated(
    documents: int, flip_rate: float, margin: float
) -> None:
    counts = drawn(documents, flip_rate, drop=0.0, seed=documents)
    assert rate("fail", counts, documents=documents, margin=margin) <= allowed(ERROR)


def test_the_score_interval_alone_would_err_more_often_where_flips_are_few() -> None:
    counts = drawn(100, 0.044, drop=0.03, seed=1)
    tables, frequency = np.unique(counts, axis=0, return_counts=True)
    failed = [
        tango_interval(lost=int(lost), gained=int(gained), documents=100, confidence=1 - ERROR).lower >= 0.03
        for lost, gained in tables
    ]
    assert frequency[np.array(failed)].sum() / PAIRS > 0.08
    assert rate("fail", counts, documents=100, margin=0.03) <= ERROR + 0.005


def test_the_exactness_costs_little_power() -> None:
    counts = drawn(773, 0.05, drop=0.0, seed=3)
    assert rate("pass", counts, documents=773, margin=0.02) >= 0.77
    counts = drawn(3092, 0.05, drop=0.0, seed=3)
    assert rate("pass", counts, documents=3092, margin=0.01) >= 0.78


def _exact_rates(documents: int, margin: float) -> Iterator[tuple[float, float]]:
    """False passes and fails at a true drop of the margin, summed over all tables, for several flip rates."""
    tables = [(lost, gained) for lost in range(documents + 1) for gained in range(documents + 1 - lost)]
    p = [margin_p(lost=one, gained=other, documents=documents, margin=margin) for one, other in tables]
    for flip_rate in (margin, margin + 0.02, margin + 0.1, 0.5, 0.9):
        chances = [(flip_rate + margin) / 2, (flip_rate - margin) / 2, 1 - flip_rate]
        weights = [_multinomial(documents, *table, chances) for table in tables]
        yield (
            sum(w for w, one in zip(weights, p, strict=True) if one.inside <= ERROR),
            sum(w for w, one in zip(weights, p, strict=True) if one.outside <= ERROR),
        )


def _multinomial(documents: int, lost: int, gained: int, chances: list[float]) -> float:
    same = documents - lost - gained
    ways = math.comb(documents, lost) * math.comb(documents - lost, gained)
    return float(ways * chances[0] ** lost * chances[1] ** gained * chances[2] ** same)


@pytest.mark.parametrize(("documents", "margin"), [(1, 0.02), (12, 0.1), (40, 0.05)])
def test_the_error_of_a_decision_is_at_most_nominal_without_any_simulation(
    documents: int, margin: float
) -> None:
    for passes, fails in _exact_rates(documents, margin):
        # A thousandth is left for flip rates between those that the p values try.
        assert passes <= ERROR + 0.001
        assert fails <= ERROR + 0.001


def test_one_document_never_decides() -> None:
    for lost, gained in ((0, 0), (1, 0), (0, 1)):
        assert decision(lost, gained, 1, 0.02, 1 - ERROR) == "inconclusive"
    assert decision(0, 0, 0, 0.02, 1 - ERROR) == "inconclusive"


@pytest.mark.parametrize("margin", [0.02, 0.05])
def test_the_rule_decides_as_the_exact_test_does(margin: float) -> None:
    rule = MaxQualityDrop(points=100 * margin)
    for lost, gained in {(int(a), int(b)) for a, b in drawn(300, 0.06, drop=margin, seed=5, pairs=150)}:
        before, after = build.paired_answers(
            both_right=200 - lost, lost=lost, gained=gained, both_wrong=100 - gained
        )
        (finding,) = rule.judge(
            baseline=build.variant("fp16", quality=build.quality(build.task(values=before))),
            candidate=build.variant("int8", quality=build.quality(build.task(values=after))),
        )
        assert finding.outcome == decision(lost, gained, 300, margin, 1 - ERROR)


# --- several tasks --------------------------------------------------------------------------------------


@cache
def outside(lost: int, gained: int, documents: int, margin: float) -> float:
    return margin_p(lost=lost, gained=gained, documents=documents, margin=margin).outside


def claimed(tables: NDArray[np.int64], *, documents: int, margin: float) -> frozenset[str]:
    """Numbers of the tasks that Holm's procedure fails together, from each one's answers lost and gained."""

    def holds(lost: int, gained: int, tests: int) -> bool:
        return outside(lost, gained, documents, margin) <= ERROR / tests

    return holm_claims(
        {str(task): partial(holds, lost, gained) for task, (lost, gained) in enumerate(tables.tolist())}
    )


@pytest.mark.parametrize(("documents", "flip_rate", "margin"), [(100, 0.10, 0.03), (400, 0.05, 0.02)])
@pytest.mark.parametrize("tasks", [2, 6, 20])
def test_any_of_several_tasks_is_falsely_failed_no_more_often_than_stated(
    tasks: int, documents: int, flip_rate: float, margin: float
) -> None:
    counts = drawn(documents, flip_rate, drop=margin, seed=tasks, pairs=PAIRS * tasks)
    draws = counts.reshape(PAIRS, tasks, 2)
    false = sum(bool(claimed(tables, documents=documents, margin=margin)) for tables in draws)
    assert false / PAIRS <= allowed(ERROR)
    alone = sum(
        any(outside(*table, documents, margin) <= ERROR for table in tables) for tables in draws.tolist()
    )
    assert alone / PAIRS > ERROR, "uncorrected it would err more often"


def test_tasks_that_really_fell_don_t_make_others_falsely_failed() -> None:
    """Three of six lost far more than the margin: Holm's later steps test the others at larger errors."""
    fallen = drawn(400, 0.12, drop=0.10, seed=1, pairs=PAIRS * 3).reshape(PAIRS, 3, 2)
    at_margin = drawn(400, 0.05, drop=0.02, seed=2, pairs=PAIRS * 3).reshape(PAIRS, 3, 2)
    false = found = 0
    for tables in np.concatenate((fallen, at_margin), axis=1):
        claims = claimed(tables, documents=400, margin=0.02)
        false += bool(claims & {"3", "4", "5"})
        found += claims >= {"0", "1", "2"}
    assert false / PAIRS <= allowed(ERROR)
    assert found / PAIRS > 0.95


def test_the_rule_fails_those_tasks_of_several_that_hold_together() -> None:
    rule = MaxQualityDrop(points=3.0)
    counts = drawn(100, 0.10, drop=0.08, seed=4, pairs=40 * 4).reshape(40, 4, 2)
    some = 0
    for tables in counts:
        arms: tuple[list[TaskResult], list[TaskResult]] = ([], [])
        for task, (lost, gained) in enumerate(tables.tolist()):
            answers = build.paired_answers(
                both_right=70 - lost, lost=lost, gained=gained, both_wrong=30 - gained
            )
            for arm, values in zip(arms, answers, strict=True):
                arm.append(build.task(str(task), values))
        findings = rule.judge(
            baseline=build.variant("fp16", quality=build.quality(*arms[0])),
            candidate=build.variant("int8", quality=build.quality(*arms[1])),
        )
        failed = {finding.subject for finding in findings if finding.outcome == "fail"}
        assert failed == claimed(tables, documents=100, margin=0.03)
        some += 0 < len(failed) < 4
    assert some > 10


def test_holm_claims_are_those_of_the_adjusted_p_values() -> None:
    p_values = {"a": 0.001, "b": 0.013, "c": 0.02, "d": 0.04}

    def holds(p: float, tests: int) -> bool:
        return p <= ERROR / tests

    claims = {name: partial(holds, p) for name, p in p_values.items()}
    assert holm_claims(claims) == {"a", "b", "c", "d"}
    assert holm_claims(claims | {"c": partial(holds, 0.026)}) == {"a", "b"}
    assert holm_claims({}) == frozenset()


def test_a_variant_as_bad_as_the_margin_on_one_task_ships_no_more_often_than_stated() -> None:
    """All tasks must pass, each uncorrected: the worst case is one bad task among others that surely pass."""
    bad = drawn(400, 0.05, drop=0.02, seed=8)
    good = drawn(400, 0.01, drop=-0.01, seed=9)
    shipped = sum(
        decision(int(a[0]), int(a[1]), 400, 0.02, 1 - ERROR) == "pass"
        and decision(int(b[0]), int(b[1]), 400, 0.02, 1 - ERROR) == "pass"
        for a, b in zip(bad, good, strict=True)
    )
    assert shipped / PAIRS <= allowed(ERROR)


# --- stopping early -------------------------------------------------------------------------------------


def stopped(
    documents: int, flip_rate: float, *, drop: float, margin: float, tests: int = 1
) -> tuple[dict[Decision, float], float]:
    """Shares of the outcomes of a task that stops at the first look that decides, and the share of documents used."""
    plan = looks(documents, confidence=1 - ERROR)
    counts, used, ended = np.zeros((PAIRS, 2), dtype=np.int64), np.zeros(PAIRS), np.zeros(PAIRS, dtype=bool)
    shares: dict[Decision, float] = {"pass": 0.0, "fail": 0.0, "inconclusive": 0.0}
    seen = 0
    for look in plan:
        counts = counts + drawn(look.documents - seen, flip_rate, drop=drop, seed=look.documents)
        seen = look.documents
        tables, places = np.unique(counts, axis=0, return_inverse=True)
        outcomes = np.array(
            [decide(look, lost=int(a), gained=int(b), margin=margin, tests=tests) for a, b in tables]
        )[places.reshape(-1)]
        used[~ended] = seen
        for outcome in ("pass", "fail"):
            shares[outcome] += float((~ended & (outcomes == outcome)).mean())
        ended |= outcomes != "inconclusive"
    shares["inconclusive"] = float((~ended).mean())
    return shares, float(used.mean() / documents)


@pytest.mark.parametrize(
    ("documents", "flip_rate", "margin"),
    [(100, 0.05, 0.05), (400, 0.05, 0.02), (1000, 0.05, 0.03), (4000, 0.10, 0.01), (10_000, 0.05, 0.02)],
)
def test_stopping_early_errs_no_more_often_than_stated(
    documents: int, flip_rate: float, margin: float
) -> None:
    shares, _ = stopped(documents, flip_rate, drop=margin, margin=margin)
    assert shares["pass"] <= allowed(ERROR)
    assert shares["fail"] <= allowed(ERROR)
    unharmed, _ = stopped(documents, flip_rate, drop=0.0, margin=margin)
    assert unharmed["fail"] <= allowed(ERROR)


def test_stopping_early_saves_most_documents_of_a_clear_case_and_decides_it_as_often() -> None:
    shares, used = stopped(10_000, 0.05, drop=0.0, margin=0.02)
    assert used < 0.35
    assert shares["pass"] > 0.99
    shares, used = stopped(4000, 0.2, drop=0.15, margin=0.02)
    assert used == pytest.approx(0.125)
    assert shares["fail"] == pytest.approx(1.0)


def test_any_of_several_sequential_tasks_is_falsely_failed_no_more_often_than_stated() -> None:
    tasks = 6
    shares, _ = stopped(400, 0.05, drop=0.02, margin=0.02, tests=tasks)
    one = ERROR / tasks
    assert tasks * shares["fail"] <= ERROR + 0.005 + 2 * tasks * math.sqrt(one * (1 - one) / PAIRS)


def test_looks_spend_the_whole_error_and_end_with_all_documents() -> None:
    for documents in (1, 2, 5, 8, 100, 14042):
        plan = looks(documents, confidence=0.95)
        assert plan[-1].documents == documents
        assert sum(1 - look.confidence for look in plan) == pytest.approx(0.05)
        assert [look.documents for look in plan] == sorted({look.documents for look in plan})
    with pytest.raises(ValueError, match="0 documents"):
        looks(0)
