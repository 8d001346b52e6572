"""The null run: what the baseline's own noise forbids to claim of a candidate."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipeline.comparison import UnmeasuredError
from pipeline.gate import judge_beside
from pipeline.null_run import null_noise
from pipeline.quality_tables import quality_markdown
from pipeline.results import Finding, TaskResult, VariantResults
from pipeline.rules.base import Rule
from pipeline.rules.max_perplexity_increase import MaxPerplexityIncrease
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.tracked_values import variant_metrics
from tests import result_builders as build

DOCUMENTS = 1000


def answers(*, lost: int = 0, gained: int = 0, right: int = 800) -> tuple[list[float], list[float]]:
    """Of a thousand documents, as one run and as another one answers them."""
    return build.paired_answers(
        both_right=right - lost, lost=lost, gained=gained, both_wrong=DOCUMENTS - right - gained
    )


def baseline(task: TaskResult, null: TaskResult | None, **fields: Any) -> VariantResults:
    """fp16 at batch size 8, and the same at batch size 1."""
    again = build.quality(null, **{"batch_size": 1, **fields}) if null else None
    return build.variant("fp16", quality=build.quality(task), null_quality=again)


def judged(candidate: list[float], of: VariantResults, *, points: float = 2.0) -> Finding:
    other = build.variant("int8", quality=build.quality(build.task(values=candidate)))
    (finding,) = MaxQualityDrop(points=points).judge(baseline=of, candidate=other)
    return finding


def test_a_run_that_repeats_itself_has_no_noise_and_changes_no_verdict() -> None:
    first, candidate = answers(lost=3, gained=1)
    task = build.task(values=first)
    (noise,) = null_noise(baseline(task, task))
    assert (noise.floor, noise.difference, noise.lost, noise.gained) == (0.0, 0.0, 0, 0)
    assert judged(candidate, baseline(task, task)) == judged(candidate, baseline(task, None))


def test_a_limit_within_the_noise_can_not_be_shown_to_be_kept() -> None:
    first, again = answers(lost=25)
    of = baseline(build.task(values=first), build.task(values=again))
    assert judged(first, of.model_copy(update={"null_quality": None})).outcome == "pass"
    finding = judged(first, of)
    assert finding.outcome == "inconclusive"
    assert "noise floor is 2.5 points" in finding.because
    assert judged(first, of, points=3.0).outcome == "pass"


def test_a_loss_within_the_noise_is_no_regression() -> None:
    first, worse = answers(lost=60)
    for moved, outcome in ((70, "inconclusive"), (50, "fail")):
        _, again = answers(lost=moved)
        of = baseline(build.task(values=first), build.task(values=again))
        finding = judged(worse, of)
        assert finding.outcome == outcome
        assert finding.observed == pytest.approx(6.0)


def test_changes_that_cancel_are_noise_all_the_same() -> None:
    first, again = answers(lost=18, gained=18)
    (noise,) = null_noise(baseline(build.task(values=first), build.task(values=again)))
    assert (noise.difference, noise.lost, noise.gained) == (0.0, 18, 18)
    assert noise.floor == pytest.approx(6 / DOCUMENTS)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"batch_size": 8}, "batch size 8"), ({"compute_dtype": "bfloat16"}, "compute_dtype")],
)
def test_two_runs_that_are_no_null_run_decide_nothing(fields: dict[str, Any], reason: str) -> None:
    first, _ = answers()
    task = build.task(values=first)
    of = baseline(task, task, **fields)
    with pytest.raises(UnmeasuredError, match=reason):
        null_noise(of)
    finding = judged(first, of)
    assert finding.outcome == "missing"
    assert reason in finding.because


def test_the_noise_of_perplexity_is_relative_and_bounds_what_may_be_claimed() -> None:
    """Four documents of 100 tokens; the null run's are 0.02 nats a token more likely."""
    nats = [230.0, 231.0, 229.0, 230.0]
    of = baseline(build.rolling_task(nats=nats), build.rolling_task(nats=[one - 2 for one in nats]))
    (noise,) = null_noise(of)
    assert noise.difference == pytest.approx(0.02)
    assert noise.perplexity_percent == pytest.approx(100 * math.expm1(0.02))
    assert noise.largest_nats == pytest.approx(2.0)
    worse = build.variant("int8", quality=build.quality(build.rolling_task(nats=[one + 1 for one in nats])))
    rule = MaxPerplexityIncrease(percent=0.5)
    (alone,) = rule.judge(baseline=of.model_copy(update={"null_quality": None}), candidate=worse)
    (finding,) = rule.judge(baseline=of, candidate=worse)
    assert (alone.outcome, finding.outcome) == ("fail", "inconclusive")
    assert "2 percent by the null run" in finding.because


def test_the_report_and_the_tracker_show_the_null_run() -> None:
    first, again = answers(lost=5, gained=2)
    of = baseline(build.task(values=first), build.task(values=again))
    text = quality_markdown(build.report(build.variant_report(of)))
    assert "fp16 again at batch size 1 instead of 8" in text
    assert "| piqa | acc | 1000 | 0.8000 | 0.7970 | +0.30 points | 0.30 points | 5 | 2 |" in text
    metrics = {metric.name: metric.value for metric in variant_metrics(of, baseline=of)}
    assert metrics["null_run.piqa.acc_floor_percent"] == pytest.approx(0.3)
    assert (metrics["null_run.piqa.lost"], metrics["null_run.piqa.gained"]) == (5, 2)
    assert not any(name.startswith("null_run") for name in metrics_of_a_run_without(of))


def metrics_of_a_run_without(of: VariantResults) -> list[str]:
    alone = of.model_copy(update={"null_quality": None})
    return [metric.name for metric in variant_metrics(alone, baseline=alone)]


# --- beside an earlier run ------------------------------------------------------------------------------


def beside(then: VariantResults, now: VariantResults, *rules: Rule) -> list[list[str]]:
    """Outcomes of fp16 and int8, each beside its namesake of a run whose baseline is `then`; int8 answers as fp16."""
    old, new = (build.variant("int8", quality=one.quality) for one in (then, now))
    reports, _, _ = judge_beside(
        rules or (MaxQualityDrop(points=2.0),),
        earlier={"fp16": then, "int8": old},
        baseline_name="fp16",
        variants=(now, new),
    )
    return [[finding.outcome for finding in one.findings] for one in reports]


def test_the_noise_of_either_run_s_baseline_counts_beside_an_earlier_run() -> None:
    first, again = answers(lost=25)
    task, null = build.task(values=first), build.task(values=again)
    quiet, noisy = baseline(task, None), baseline(task, null)
    assert beside(quiet, quiet) == [["pass"], ["pass"]]
    assert beside(noisy, quiet) == [["inconclusive"], ["inconclusive"]]
    assert beside(quiet, noisy) == [["inconclusive"], ["inconclusive"]]
    assert beside(noisy, noisy, MaxQualityDrop(points=3.0)) == [["pass"], ["pass"]]


def test_the_noise_of_perplexity_counts_beside_an_earlier_run() -> None:
    nats = [230.0, 231.0, 229.0, 230.0]
    task, null = build.rolling_task(nats=nats), build.rolling_task(nats=[one - 2 for one in nats])
    rule = MaxPerplexityIncrease(percent=0.5)
    then, now = baseline(task, null), baseline(task, None)
    new = build.variant("int8", quality=build.quality(build.rolling_task(nats=[one + 1 for one in nats])))
    for noisy, outcome in ((then, "inconclusive"), (now, "fail")):
        reports, _, _ = judge_beside(
            (rule,),
            earlier={"fp16": noisy, "int8": build.variant("int8", quality=build.quality(task))},
            baseline_name="fp16",
            variants=(now, new),
        )
        assert [finding.outcome for finding in reports[1].findings] == [outcome]
