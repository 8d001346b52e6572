"""The quality rules: paired on the same documents, three outcomes, and what must never count as a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.results import Finding, MetricScore, Sample, TaskResult, VariantResults
from pipeline.rules.base import LEAST_LIMIT, Rule
from pipeline.rules.max_perplexity_increase import MaxPerplexityIncrease
from pipeline.rules.max_quality_drop import MaxQualityDrop
from tests import result_builders as build

QUALITY = MaxQualityDrop(points=2.0)
PERPLEXITY = MaxPerplexityIncrease(percent=1.0)


def one(rule: Rule, candidate: VariantResults, baseline: VariantResults) -> Finding:
    (finding,) = rule.judge(baseline=baseline, candidate=candidate)
    return finding


def answers(rule: Rule, *, both_right: int, lost: int, gained: int, both_wrong: int) -> Finding:
    before, after = build.paired_answers(
        both_right=both_right, lost=lost, gained=gained, both_wrong=both_wrong
    )
    return one(
        rule, with_tasks("int8", build.task(values=after)), with_tasks("fp16", build.task(values=before))
    )


def with_tasks(name: str, *tasks: Any, **fields: Any) -> VariantResults:
    return build.variant(name, quality=build.quality(*tasks, **fields))


# --- right/wrong quality --------------------------------------------------------------------------------


def test_a_paired_drop_is_found_where_an_unpaired_test_sees_nothing() -> None:
    finding = answers(QUALITY, both_right=70, lost=10, gained=2, both_wrong=18)
    assert finding.outcome == "fail"
    assert (finding.subject, finding.limit) == ("piqa", 2.0)
    assert finding.observed == pytest.approx(8.0)
    assert "80.0% → 72.0% on 100 documents" in finding.because
    assert "10 right → wrong and 2 wrong → right" in finding.because
    assert "p = 0.03857" in finding.because


def test_no_change_in_many_documents_passes() -> None:
    assert answers(QUALITY, both_right=700, lost=0, gained=0, both_wrong=300).outcome == "pass"


def test_no_change_in_few_documents_proves_nothing() -> None:
    finding = answers(QUALITY, both_right=30, lost=0, gained=0, both_wrong=10)
    assert finding.outcome == "inconclusive"
    assert "documents would decide" in finding.because
    assert finding.interval is not None
    assert finding.interval[1] > 2.0


def test_one_document_is_inconclusive() -> None:
    assert answers(QUALITY, both_right=1, lost=0, gained=0, both_wrong=0).outcome == "inconclusive"


def test_flips_that_cancel_are_shown_and_not_taken_for_no_change() -> None:
    finding = answers(QUALITY, both_right=30, lost=30, gained=30, both_wrong=10)
    assert finding.outcome == "inconclusive"
    assert finding.observed == 0.0
    assert "30 right → wrong and 30 wrong → right (exact McNemar p = 1" in finding.because


def test_a_gain_of_thirty_points_is_implausible() -> None:
    finding = answers(QUALITY, both_right=40, lost=0, gained=30, both_wrong=30)
    assert finding.outcome == "missing"
    assert "implausible" in finding.because


def test_the_order_of_documents_does_not_matter() -> None:
    before, after = build.paired_answers(both_right=70, lost=10, gained=2, both_wrong=18)
    baseline = with_tasks("fp16", build.task(values=before))
    plain = build.task(values=after)
    shuffled = plain.model_copy(update={"samples": tuple(reversed(plain.samples))})
    assert one(QUALITY, with_tasks("int8", plain), baseline) == one(
        QUALITY, with_tasks("int8", shuffled), baseline
    )


def test_a_lost_document_is_refused_with_both_counts() -> None:
    baseline = with_tasks("fp16", build.task(values=[1.0] * 99))
    finding = one(QUALITY, with_tasks("int8", build.task(values=[1.0] * 100)), baseline)
    assert finding.outcome == "missing"
    assert "99 vs 100 documents" in finding.because


def test_another_document_in_the_same_place_is_refused() -> None:
    plain = build.task(values=[1.0] * 100)
    stranger = Sample(doc_hash="other", metrics={"acc": 1.0})
    other = plain.model_copy(update={"samples": (stranger, *plain.samples[1:])})
    finding = one(QUALITY, with_tasks("int8", other), with_tasks("fp16", plain))
    assert finding.outcome == "missing"
    assert "1 of 100 documents differ" in finding.because


@pytest.mark.parametrize("copies", [2, 34])
def test_documents_that_occur_several_times_are_judged_once(copies: int) -> None:
    by_document = tuple(
        Sample(doc_hash=f"d{i}" + (f"#{turn + 1}" if turn else ""), metrics={"acc": 1.0})
        for i in range(3)
        for turn in range(copies)
    )
    by_prompt = tuple(
        Sample(doc_hash=f"e{i}", prompt_hash=f"asked {i % 3}", metrics={"acc": 1.0})
        for i in range(3 * copies)
    )
    for samples in (by_document, by_prompt):
        many = build.task(values=[1.0] * len(samples)).model_copy(update={"samples": samples})
        finding = one(QUALITY, with_tasks("int8", many), with_tasks("fp16", many))
        assert finding.outcome == "inconclusive", finding.because
        assert "on 3 documents" in finding.because


@pytest.mark.parametrize(
    "field",
    [
        {"batch_size": 4},
        {"compute_dtype": "bfloat16"},
        {"engine": "llama_cpp"},
        {"chat_template_hash": "other"},
        {"tokenizer_hash": "other"},
        {"harness_version": "0.4.12"},
        {"limit": 50},
        {"seed": 1},
        {"adds_bos_token": True},
        {"max_length_tokens": 64},
    ],
)
def test_quality_under_other_conditions_is_missing_and_names_them(field: dict[str, Any]) -> None:
    task = build.task(values=[1.0] * 400)
    finding = one(QUALITY, with_tasks("int8", task, **field), with_tasks("fp16", task))
    assert finding.outcome == "missing"
    assert next(iter(field)) in finding.because


@pytest.mark.parametrize(
    "field",
    [
        {"prompts_hash": "x"},
        {"data_hash": "x"},
        {"task_hash": "x"},
        {"num_fewshot": 5},
        {"task_version": "2"},
        {"truncated_prompts": 3},
    ],
)
def test_a_task_asked_in_another_way_is_missing_and_says_how(field: dict[str, Any]) -> None:
    values = [1.0] * 400
    finding = one(
        QUALITY,
        with_tasks("int8", build.task(values=values, **field)),
        with_tasks("fp16", build.task(values=values)),
    )
    assert finding.outcome == "missing"
    assert next(iter(field)) in finding.because


def test_a_named_task_without_results_is_missing_by_name() -> None:
    task = build.task(values=[1.0] * 400)
    rule = MaxQualityDrop(points=2.0, tasks=("piqa", "arc_easy"))
    findings = rule.judge(baseline=with_tasks("fp16", task), candidate=with_tasks("int8", task))
    assert [(finding.subject, finding.outcome) for finding in findings] == [
        ("piqa", "pass"),
        ("arc_easy", "missing"),
    ]
    assert "arc_easy" in findings[1].because


@pytest.mark.parametrize("short", ["baseline", "candidate"])
def test_a_task_that_only_one_arm_has_is_missing(short: str) -> None:
    both = (build.task(values=[1.0] * 400), build.task("sciq", values=[1.0] * 400))
    arms = {"baseline": both, "candidate": both, short: both[:1]}
    findings = QUALITY.judge(
        baseline=with_tasks("fp16", *arms["baseline"]), candidate=with_tasks("int8", *arms["candidate"])
    )
    assert {finding.subject: finding.outcome for finding in findings} == {"piqa": "pass", "sciq": "missing"}


def test_a_score_that_is_not_finite_is_missing() -> None:
    score = {"acc": MetricScore(score=None, stderr=None, higher_is_better=True)}
    values = [1.0] * 400
    finding = one(
        QUALITY,
        with_tasks("int8", build.task(values=values, metrics=score)),
        with_tasks("fp16", build.task(values=values)),
    )
    assert finding.outcome == "missing"
    assert "not a finite number" in finding.because


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "0.7", True])
def test_a_score_that_is_no_number_cannot_even_be_stored(score: object) -> None:
    with pytest.raises(ValidationError):
        MetricScore.model_validate({"score": score, "stderr": None, "higher_is_better": True})


def test_logits_that_are_not_finite_make_every_task_missing() -> None:
    task = build.task(values=[1.0] * 400)
    finding = one(QUALITY, with_tasks("int8", task, logits_finite=False), with_tasks("fp16", task))
    assert finding.outcome == "missing"


def of_errors(values: Sequence[float]) -> TaskResult:
    """A task of which less is better; each document is 1.0 for an error."""
    metrics = {"error_rate": MetricScore(score=0.5, stderr=None, higher_is_better=False)}
    samples = tuple(
        Sample(doc_hash=f"piqa-{index}", metrics={"error_rate": value}) for index, value in enumerate(values)
    )
    return build.task(values=values, primary_metric="error_rate", metrics=metrics, samples=samples)


def test_an_error_rate_is_judged_in_its_own_direction() -> None:
    before, after = [0.0] * 400, [0.0] * 300 + [1.0] * 100
    arms = with_tasks("int8", of_errors(after)), with_tasks("fp16", of_errors(before))
    rising = one(QUALITY, *arms)
    assert (rising.outcome, rising.observed) == ("fail", 25.0)
    relative = one(MaxQualityDrop(percent=2.0), *arms)
    assert (relative.outcome, "give points" in relative.because) == ("missing", True)


@pytest.mark.parametrize("swapped", [("fp16",), ("int8",), ("fp16", "int8")])
def test_a_direction_that_was_swapped_turns_no_loss_into_a_gain(swapped: tuple[str, ...]) -> None:
    before, after = build.paired_answers(both_right=300, lost=60, gained=0, both_wrong=40)
    arms = []
    for name, values in (("int8", after), ("fp16", before)):
        score = MetricScore(
            score=sum(values) / len(values), stderr=None, higher_is_better=name not in swapped
        )
        arms.append(with_tasks(name, build.task(values=values, metrics={"acc": score})))
    finding = one(QUALITY, *arms)
    assert finding.outcome == "missing"
    assert "implausible" in finding.because


def test_a_score_that_its_documents_deny_is_missing() -> None:
    right = build.task(values=[1.0] * 400)
    denied = build.task(
        values=[1.0] * 400, metrics={"acc": MetricScore(score=0.9, stderr=None, higher_is_better=True)}
    )
    finding = one(QUALITY, with_tasks("int8", denied), with_tasks("fp16", right))
    assert (finding.outcome, "its 400 documents come to 1" in finding.because) == ("missing", True)


def test_a_limit_in_percent_is_that_share_of_the_baseline_s_score() -> None:
    before, after = build.paired_answers(both_right=1480, lost=20, gained=10, both_wrong=490)
    arms = with_tasks("int8", build.task(values=after)), with_tasks("fp16", build.task(values=before))
    finding = one(MaxQualityDrop(percent=2.0), *arms)
    assert (finding.outcome, finding.unit) == ("pass", "points")
    assert finding.limit == pytest.approx(1.5)
    assert "surely under the limit of 1.5 (2 % of the baseline's score)" in finding.because
    assert one(MaxQualityDrop(points=1.5), *arms).outcome == "pass"
    assert one(MaxQualityDrop(percent=0.2), *arms).outcome == one(MaxQualityDrop(points=0.15), *arms).outcome


@pytest.mark.parametrize("field", ["points", "percent"])
def test_the_smallest_limit_is_undecided_and_one_that_nothing_decides_is_refused(field: str) -> None:
    before, after = build.paired_answers(both_right=300, lost=0, gained=1, both_wrong=99)
    arms = with_tasks("int8", build.task(values=after)), with_tasks("fp16", build.task(values=before))
    smallest = MaxQualityDrop.model_validate({field: LEAST_LIMIT})
    assert one(smallest, *arms).outcome == "inconclusive"
    for limit in (1e-300, 5e-324, LEAST_LIMIT / 2):
        with pytest.raises(ValidationError):
            MaxQualityDrop.model_validate({field: limit})


def test_one_member_of_a_group_may_be_judged_by_itself() -> None:
    before, after = build.paired_answers(both_right=280, lost=100, gained=0, both_wrong=20)
    tasks = [[build.task("easy", values=before), build.task("hard", values=arm)] for arm in (before, after)]
    groups = {"both": ("easy", "hard")}
    arms = [
        with_tasks(name, *some, groups=groups) for name, some in zip(("fp16", "int8"), tasks, strict=True)
    ]
    findings = {
        name: MaxQualityDrop(points=2.0, tasks=(name,)).judge(baseline=arms[0], candidate=arms[1])[0]
        for name in ("easy", "hard", "both")
    }
    assert {name: finding.outcome for name, finding in findings.items()} == {
        "easy": "pass",
        "hard": "fail",
        "both": "fail",
    }


def test_a_metric_without_direction_is_refused() -> None:
    task = build.task(values=[1.0] * 400)
    rule = MaxQualityDrop(points=2.0, metric="exact_match")
    finding = one(rule, with_tasks("int8", task), with_tasks("fp16", task))
    assert finding.outcome == "missing"
    assert "no metric exact_match; it has acc" in finding.because


def test_several_tasks_carry_holm_adjusted_p_values() -> None:
    before, after = build.paired_answers(both_right=70, lost=10, gained=2, both_wrong=18)
    findings = QUALITY.judge(
        baseline=with_tasks("fp16", build.task(values=before), build.task("sciq", values=before)),
        candidate=with_tasks("int8", build.task(values=after), build.task("sciq", values=before)),
    )
    assert "p = 0.03857, 0.07715 after Holm over 2 tasks" in findings[0].because


def test_graded_scores_are_judged_by_the_bootstrap() -> None:
    before = [0.5 + 0.001 * (i % 100) for i in range(300)]
    after = [value - 0.1 - 0.0001 * (i % 7) for i, value in enumerate(before)]
    worse = one(
        QUALITY,
        with_tasks("int8", build.task(values=after)),
        with_tasks("fp16", build.task(values=before)),
    )
    assert worse.outcome == "fail"
    assert worse.observed == pytest.approx(10.03, abs=0.01)
    same = one(
        QUALITY,
        with_tasks("int8", build.task(values=before[:5])),
        with_tasks("fp16", build.task(values=before[:5])),
    )
    assert same.outcome == "inconclusive"


def test_a_baseline_that_gets_nothing_right_makes_the_task_void() -> None:
    finding = answers(MaxQualityDrop(points=20), both_right=0, lost=0, gained=0, both_wrong=100)
    assert finding.outcome == "missing"
    assert "void, acc of the baseline is 0, so no drop could show" in finding.because


def test_only_perplexity_tasks_leave_a_quality_rule_nothing_to_judge() -> None:
    task = build.rolling_task()
    finding = one(QUALITY, with_tasks("int8", task), with_tasks("fp16", task))
    assert finding.outcome == "missing"
    assert "nothing to judge" in finding.because


# --- perplexity -----------------------------------------------------------------------------------------

NATS = [230.0 + (7 * i) % 40 for i in range(50)]


def perplexity(shift: float, *, spread: float = 0.0, count: int = 50, percent: float = 1.0) -> Finding:
    """Judge a candidate whose NLL per token is `shift` higher, ± `spread` by document."""
    before = NATS[:count]
    after = [nats + 100 * (shift + spread * (-1) ** i) for i, nats in enumerate(before)]
    return one(
        MaxPerplexityIncrease(percent=percent),
        with_tasks("int8", build.rolling_task(nats=after)),
        with_tasks("fp16", build.rolling_task(nats=before)),
    )


def test_perplexity_ten_to_twenty_is_a_regression_of_a_hundred_percent() -> None:
    finding = perplexity(0.693147181)
    assert finding.outcome == "fail"
    assert finding.observed == pytest.approx(100.0, abs=1e-4)


def test_perplexity_twenty_to_ten_is_an_improvement() -> None:
    finding = perplexity(-0.693147180, spread=1e-6)
    assert finding.outcome == "pass"
    assert finding.observed == pytest.approx(-50.0, abs=1e-3)


def test_documents_that_all_changed_alike_are_no_proof_of_a_pass() -> None:
    finding = perplexity(0.009)
    assert finding.outcome == "inconclusive"
    assert "changed by the same" in finding.because
    assert perplexity(0.009, spread=1e-4).outcome == "pass"


def test_perplexity_that_collapses_is_implausible() -> None:
    finding = perplexity(-1.2)
    assert finding.outcome == "missing"
    assert "implausible" in finding.because


def test_perplexity_inside_outside_and_across_the_limit() -> None:
    assert perplexity(0.002, spread=0.003).outcome == "pass"
    assert perplexity(0.02, spread=0.003).outcome == "fail"
    undecided = perplexity(0.008, spread=0.02)
    assert undecided.outcome == "inconclusive"
    assert "documents would decide" in undecided.because


def test_perplexity_of_one_document_is_inconclusive() -> None:
    finding = perplexity(0.002, count=1)
    assert finding.outcome == "inconclusive"
    assert finding.interval is None


def test_equal_log_likelihoods_of_a_quantized_model_are_implausible() -> None:
    finding = perplexity(0.0)
    assert finding.outcome == "missing"
    assert "to the last bit" in finding.because


def test_a_null_run_of_the_same_precision_passes() -> None:
    task = build.rolling_task(nats=NATS)
    candidate = build.variant("again", "fp16", quality=build.quality(task))
    assert one(PERPLEXITY, candidate, with_tasks("fp16", task)).outcome == "pass"


def test_perplexity_over_other_tokens_is_missing() -> None:
    finding = one(
        PERPLEXITY,
        with_tasks("int8", build.rolling_task(nats=NATS, tokens=101)),
        with_tasks("fp16", build.rolling_task(nats=NATS)),
    )
    assert finding.outcome == "missing"
    assert "different numbers of tokens" in finding.because


def test_a_positive_log_likelihood_is_implausible() -> None:
    finding = one(
        PERPLEXITY,
        with_tasks("int8", build.rolling_task(nats=[-1.0, 200.0])),
        with_tasks("fp16", build.rolling_task(nats=[230.0, 200.0])),
    )
    assert finding.outcome == "missing"


def test_a_log_likelihood_beyond_any_arithmetic_is_implausible() -> None:
    task = build.rolling_task()
    samples = tuple(
        sample.model_copy(update={"metrics": {**sample.metrics, "log_likelihood_nats": -1e308}})
        for sample in task.samples
    )
    broken = with_tasks("int8", task.model_copy(update={"samples": samples}))
    finding = one(PERPLEXITY, broken, with_tasks("fp16", task))
    assert (finding.outcome, "under -1e+40 nats" in finding.because) == ("missing", True)


def test_no_perplexity_task_leaves_a_perplexity_rule_nothing_to_judge() -> None:
    task = build.task(values=[1.0] * 10)
    assert one(PERPLEXITY, with_tasks("int8", task), with_tasks("fp16", task)).outcome == "missing"
