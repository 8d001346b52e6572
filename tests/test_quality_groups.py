"""The quality rule over groups, over several tasks, and over tasks that were stopped early."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.results import Finding, MetricScore, VariantResults
from pipeline.rules.base import Rule
from pipeline.rules.max_perplexity_increase import MaxPerplexityIncrease
from pipeline.rules.max_quality_drop import MaxQualityDrop
from tests import result_builders as build

QUALITY = MaxQualityDrop(points=2.0)


def one(rule: Rule, candidate: VariantResults, baseline: VariantResults) -> Finding:
    (finding,) = rule.judge(baseline=baseline, candidate=candidate)
    return finding


def with_tasks(name: str, *tasks: Any, **fields: Any) -> VariantResults:
    return build.variant(name, quality=build.quality(*tasks, **fields))


def arms(rule: Rule, *tables: tuple[int, int, int, int], **fields: Any) -> tuple[Finding, ...]:
    """Findings about tasks a, b, … with these paired tables (both right, lost, gained, both wrong)."""
    answered = [
        build.paired_answers(both_right=one, lost=lost, gained=gained, both_wrong=wrong)
        for one, lost, gained, wrong in tables
    ]
    names = "abcdefgh"
    tasks = [
        [build.task(name, values=pair[arm]) for name, pair in zip(names, answered, strict=False)]
        for arm in (0, 1)
    ]
    return rule.judge(
        baseline=with_tasks("fp16", *tasks[0], **fields), candidate=with_tasks("int8", *tasks[1], **fields)
    )


def test_a_group_is_judged_by_its_documents_pooled_with_the_plain_mean_beside() -> None:
    groups = {"mmlu": ("a", "b")}
    (finding,) = arms(QUALITY, (1600, 60, 40, 676), (440, 16, 20, 696), groups=groups)
    assert (finding.subject, finding.outcome) == ("mmlu", "pass")
    assert finding.observed == pytest.approx(100 * (76 - 60) / (2376 + 1172))
    assert "59.6% → 59.2% on 3548 documents of 2 tasks, each document counting the same" in finding.because
    assert "(plain mean of the tasks: 54.4% → 54.1%)" in finding.because
    assert "76 right → wrong and 60 wrong → right" in finding.because


def test_tasks_of_a_group_are_judged_alone_where_the_rule_names_them_or_does_not_pool() -> None:
    groups = {"mmlu": ("a", "b")}
    tables = ((700, 0, 0, 300), (60, 20, 2, 18), (700, 0, 0, 300))
    pooled = arms(QUALITY, *tables, groups=groups)
    assert [finding.subject for finding in pooled] == ["mmlu", "c"]
    alone = arms(MaxQualityDrop(points=2.0, pool_groups=False), *tables, groups=groups)
    assert [(finding.subject, finding.outcome) for finding in alone] == [
        ("a", "pass"),
        ("b", "fail"),
        ("c", "pass"),
    ]
    named = arms(MaxQualityDrop(points=2.0, tasks=("b", "mmlu")), *tables, groups=groups)
    assert [finding.subject for finding in named] == ["b", "mmlu"]


def test_a_group_that_lacks_a_task_is_missing() -> None:
    (finding,) = arms(QUALITY, (700, 0, 0, 300), groups={"mmlu": ("a", "b")})
    assert (finding.subject, finding.outcome) == ("mmlu", "missing")
    assert "b: no result of the baseline" in finding.because


def test_a_group_of_other_metrics_is_missing_and_says_what_to_do() -> None:
    before = build.quality(
        build.task("a", values=[1.0, 0.0]), build.task("b", values=[1.0, 0.0]), groups={"both": ("a", "b")}
    )
    exact = before.tasks["b"].model_copy(
        update={
            "primary_metric": "exact_match",
            "metrics": {"exact_match": MetricScore(score=0.5, stderr=None, higher_is_better=True)},
            "samples": tuple(
                sample.model_copy(update={"metrics": {"exact_match": sample.metrics["acc"]}})
                for sample in before.tasks["b"].samples
            ),
        }
    )
    quality = before.model_copy(update={"tasks": {**before.tasks, "b": exact}})
    finding = one(QUALITY, build.variant("int8", quality=quality), build.variant("fp16", quality=quality))
    assert finding.outcome == "missing"
    assert "different metrics (acc, exact_match); set metric, or pool_groups: false" in finding.because


def test_a_regression_that_shows_alone_is_no_claim_among_many_tasks() -> None:
    worse = (600, 34, 8, 358)
    (alone,) = arms(QUALITY, worse)
    assert alone.outcome == "inconclusive"
    worse = (600, 40, 8, 352)
    (alone,) = arms(QUALITY, worse)
    assert alone.outcome == "fail"
    same = (700, 0, 0, 300)
    many = arms(QUALITY, worse, *[same] * 7)
    assert [finding.outcome for finding in many] == ["inconclusive", *["pass"] * 7]
    assert "above it by itself, but not surely once 8 tasks are looked at (Holm)" in many[0].because
    clear = arms(QUALITY, (600, 70, 8, 322), *[same] * 7)
    assert clear[0].outcome == "fail"


def test_shipping_corrects_for_no_number_of_tasks() -> None:
    near = (700, 6, 4, 290)
    assert [finding.outcome for finding in arms(QUALITY, near)] == ["pass"]
    assert {finding.outcome for finding in arms(QUALITY, *[near] * 8)} == {"pass"}


def test_a_bound_that_the_exact_test_does_not_confirm_decides_nothing() -> None:
    """With few flips the score interval errs more often than it says."""
    (finding,) = arms(MaxQualityDrop(points=3.0), (60, 6, 0, 34))
    assert finding.outcome == "inconclusive"
    assert finding.interval is not None
    assert finding.interval[0] > 3.0
    assert "since the exact test gives p = 0.0" in finding.because
    assert "where 0.05 is needed" in finding.because


def test_an_undecided_drop_says_how_many_documents_are_missing() -> None:
    (finding,) = arms(QUALITY, (30, 0, 0, 10))
    assert "documents would decide if it goes on like this" in finding.because
    assert finding.power is not None
    assert f"{finding.power.documents_needed - 40:,} more than now" in finding.because


def _stopped(rule: Rule, *, confidence: float, answered: int = 100) -> Finding:
    before = build.task(values=[1.0] * 560 + [0.0] * 240)
    chosen = [
        sample.model_copy(update={"prompt_hash": f"prompt of {sample.doc_hash}"})
        for sample in (*before.samples[: answered * 7 // 10], *before.samples[560:])
    ][:answered]
    after = build.task(values=[sample.metrics["acc"] for sample in chosen]).model_copy(
        update={
            "samples": tuple(chosen),
            "documents": answered,
            "available_documents": 800,
            "look_confidence": confidence,
        }
    )
    asked = tuple(
        sample.model_copy(update={"prompt_hash": f"prompt of {sample.doc_hash}"}) for sample in before.samples
    )
    return one(
        rule,
        with_tasks("int8", after),
        with_tasks("fp16", before.model_copy(update={"samples": asked})),
    )


def test_a_task_that_was_stopped_early_is_judged_at_its_look_s_confidence() -> None:
    finding = _stopped(MaxQualityDrop(points=10.0), confidence=0.995)
    assert finding.outcome == "pass"
    assert "(99.5 % bounds)" in finding.because
    fixed = MaxQualityDrop(points=5.0)
    assert _stopped(fixed, confidence=0.995).outcome == "inconclusive"


def test_a_task_that_was_stopped_for_another_confidence_is_refused() -> None:
    for rule, confidence, answered in (
        (MaxQualityDrop(points=10.0, confidence=0.99), 0.995, 100),
        (MaxQualityDrop(points=10.0), 0.95, 100),
        (MaxQualityDrop(points=10.0), 0.995, 90),
    ):
        finding = _stopped(rule, confidence=confidence, answered=answered)
        assert finding.outcome == "missing"
        assert "looks that weren't planned for" in finding.because


def test_claims_of_higher_perplexity_are_corrected_for_the_number_of_tasks() -> None:
    before = [230.0 + (7 * i) % 40 for i in range(50)]
    worse = [nats + 100 * (0.0155 + 0.02 * (-1) ** i) for i, nats in enumerate(before)]
    same = [nats + 0.01 * (-1) ** i for i, nats in enumerate(before)]
    rule = MaxPerplexityIncrease(percent=1.0)

    def outcomes(*after: list[float]) -> list[str]:
        findings = rule.judge(
            baseline=with_tasks(
                "fp16", *(build.rolling_task(f"t{i}", nats=before) for i in range(len(after)))
            ),
            candidate=with_tasks(
                "int8", *(build.rolling_task(f"t{i}", nats=nats) for i, nats in enumerate(after))
            ),
        )
        return [finding.outcome for finding in findings]

    assert outcomes(worse) == ["fail"]
    assert outcomes(worse, *[same] * 9) == ["inconclusive", *["pass"] * 9]
