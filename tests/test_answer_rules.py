"""A floor for a task's score, and how far the length of answers may drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.measured import Distribution
from pipeline.results import Finding, MetricScore, TaskResult
from pipeline.rules.base import Rule
from pipeline.rules.max_length_drift import MaxLengthDrift
from pipeline.rules.min_score import MinScore
from tests import result_builders as build


def one(rule: Rule, candidate: TaskResult, baseline: TaskResult, **fields: Any) -> Finding:
    before, after = (
        build.variant(name, quality=build.quality(task, **fields))
        for name, task in (("fp16", baseline), ("int8", candidate))
    )
    (finding,) = rule.judge(baseline=before, candidate=after)
    return finding


def right(count: int, documents: int, **fields: Any) -> TaskResult:
    return build.task(values=[1.0] * count + [0.0] * (documents - count), **fields)


# --- min_score ------------------------------------------------------------------------------------------

FLOOR = MinScore(score=0.6, tasks=("piqa",))


@pytest.mark.parametrize(
    ("count", "documents", "outcome"),
    [
        (65, 100, "inconclusive"),  # Clopper and Pearson's lower bound is 0.5643
        (70, 100, "pass"),  # 0.6158
        (650, 1000, "pass"),
        (55, 100, "inconclusive"),
        (50, 100, "fail"),  # the upper bound is 0.5862
        (3, 3, "inconclusive"),  # three right answers prove little
    ],
)
def test_a_floor_is_reached_when_the_documents_say_so_surely(
    count: int, documents: int, outcome: str
) -> None:
    task = right(count, documents)
    finding = one(FLOOR, task, task)
    assert (finding.outcome, finding.observed, finding.limit) == (outcome, count / documents, 0.6)
    assert finding.interval is not None
    assert finding.interval[0] < finding.interval[1]
    assert ("documents would decide" in finding.because) == (outcome == "inconclusive")


def test_the_floor_is_the_candidate_s_whatever_the_baseline_reached() -> None:
    assert one(FLOOR, right(500, 1000), right(990, 1000)).outcome == "fail"
    assert one(FLOOR, right(900, 1000), right(100, 1000)).outcome == "pass"


def test_a_group_s_documents_are_pooled() -> None:
    tasks = {"easy": build.task("easy", [1.0] * 300), "hard": build.task("hard", [1.0] * 30 + [0.0] * 70)}
    quality = build.quality(*tasks.values(), groups={"both": ("easy", "hard")})
    baseline, candidate = (build.variant(name, quality=quality) for name in ("fp16", "int8"))
    rule = MinScore(score=0.75, tasks=("both", "hard"))
    findings = {finding.subject: finding for finding in rule.judge(baseline=baseline, candidate=candidate)}
    assert findings["both"].observed == 330 / 400
    assert (findings["both"].outcome, findings["hard"].outcome) == ("pass", "fail")
    assert rule.early_margins("easy", quality) is None, "a floor needs all documents of a group's tasks"
    assert rule.early_margins("other", quality) == ()


def test_graded_scores_get_an_interval_that_equal_ones_have_too() -> None:
    graded = build.task(values=[0.7 + 0.01 * (i % 10) for i in range(200)])
    assert one(FLOOR, graded, graded).outcome == "pass"
    flat = build.task(values=[0.7] * 200)
    interval = one(FLOOR, flat, flat).interval
    assert interval is not None
    assert interval[0] < 0.695 < 0.7 < interval[1]
    few = build.task(values=[0.7] * 5)
    assert one(FLOOR, few, few).outcome == "inconclusive"


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (build.task("copa", [1.0] * 100), "piqa: no result of the candidate; it has copa"),
        (right(90, 100, void="its prompts are empty"), "void, its prompts are empty"),
        (right(90, 100, look_confidence=0.99, available_documents=100), "stopped early"),
        (build.task(values=[]), "not a finite number"),
        (build.task(values=[7.0] * 10), "not a score from 0 to 1"),
        (build.rolling_task("piqa"), "less word_perplexity is better"),
        (right(90, 100, primary_metric="f1"), "has no metric f1; it has acc"),
        (
            right(90, 100, metrics={"acc": MetricScore(score=0.99, stderr=None, higher_is_better=True)}),
            "its 100 documents come to 0.9",
        ),
    ],
)
def test_a_score_that_decides_nothing_is_missing(task: TaskResult, reason: str) -> None:
    finding = one(FLOOR, task, right(90, 100))
    assert (finding.outcome, finding.subject) == ("missing", "piqa")
    assert reason in finding.because


# --- max_length_drift -----------------------------------------------------------------------------------

BEFORE = [20.0 + (i % 9) for i in range(60)]


def written(lengths: Sequence[float], *, cut: int = 0, **fields: Any) -> TaskResult:
    defaults: dict[str, Any] = {
        "output_type": "generate_until",
        "output_tokens": Distribution.of(list(lengths)),
        "truncated_outputs": cut,
    }
    return build.task("recite", [1.0] * len(lengths), **{**defaults, **fields})


def longer(percent: float) -> list[float]:
    return [length * (1 + percent / 100) + 0.5 * (i % 3 - 1) for i, length in enumerate(BEFORE)]


@pytest.mark.parametrize(
    ("percent", "outcome"),
    [(0.0, "pass"), (8.0, "pass"), (-8.0, "pass"), (10.0, "inconclusive"), (13.0, "fail"), (-13.0, "fail")],
)
def test_answers_may_become_neither_longer_nor_shorter_than_allowed(percent: float, outcome: str) -> None:
    finding = one(MaxLengthDrift(percent=10.0), written(longer(percent)), written(BEFORE))
    assert finding.outcome == outcome
    assert finding.observed is not None
    assert finding.observed == pytest.approx(percent, abs=0.2)
    assert finding.interval is not None
    assert finding.interval[0] <= finding.observed <= finding.interval[1]
    assert "tokens an answer on 60 documents" in finding.because


def test_the_ratio_is_that_of_all_tokens_not_of_documents() -> None:
    before, after = [100.0] * 20 + [1.0] * 20, [100.0] * 20 + [2.0] * 20
    finding = one(MaxLengthDrift(percent=10.0), written(after), written(before))
    assert finding.observed == pytest.approx(100 * 20 / 2020)


def test_lengths_are_paired_by_document_whatever_their_order() -> None:
    candidate = written(longer(3.0))
    assert candidate.output_tokens is not None
    turned = candidate.model_copy(
        update={
            "samples": candidate.samples[::-1],
            "output_tokens": Distribution.of(candidate.output_tokens.samples[::-1]),
        }
    )
    findings = [one(MaxLengthDrift(percent=10.0), task, written(BEFORE)) for task in (candidate, turned)]
    assert findings[0].interval == findings[1].interval


def test_answers_cut_more_often_than_the_baseline_s_prove_no_length() -> None:
    rule = MaxLengthDrift(percent=10.0)
    finding = one(rule, written(longer(1.0), cut=12), written(BEFORE, cut=2))
    assert finding.outcome == "inconclusive"
    assert "cut 16.7 % more of the candidate's answers than of the baseline's" in finding.because
    assert one(rule, written(longer(1.0), cut=4), written(BEFORE, cut=2)).outcome == "pass"


@pytest.mark.parametrize(
    ("candidate", "baseline", "reason"),
    [
        (written(BEFORE, output_tokens=None), written(BEFORE), "the candidate generated no text"),
        (
            written(BEFORE, output_tokens=Distribution.of(BEFORE[:9])),
            written(BEFORE),
            "9 lengths for 60 documents",
        ),
        (written([-1.0, *BEFORE[1:]]), written(BEFORE), "implausible, an answer of -1 tokens"),
        (written(BEFORE, cut=60), written(BEFORE, cut=60), "the length limit ended every answer of both"),
        (written(BEFORE), written([0.0] * 60), "every answer of the baseline is empty"),
        (written(BEFORE, prompts_hash="other"), written(BEFORE), "prompts_hash"),
    ],
)
def test_lengths_that_decide_nothing_are_missing(
    candidate: TaskResult, baseline: TaskResult, reason: str
) -> None:
    finding = one(MaxLengthDrift(percent=10.0), candidate, baseline)
    assert finding.outcome == "missing"
    assert reason in finding.because


def test_empty_answers_beside_others_are_judged() -> None:
    finding = one(MaxLengthDrift(percent=10.0), written([0.0, *BEFORE[1:]]), written([0.0, *BEFORE[1:]]))
    assert (finding.outcome, finding.observed) == ("pass", 0.0)


def test_without_generated_text_there_is_nothing_to_judge() -> None:
    task = build.task(values=[1.0] * 10)
    finding = one(MaxLengthDrift(percent=10.0), task, task)
    assert (finding.outcome, "no task generates text" in finding.because) == ("missing", True)


def test_lengths_need_all_documents_of_tasks_that_generate() -> None:
    quality = build.quality(written(BEFORE), build.task())
    rule = MaxLengthDrift(percent=10.0)
    assert rule.early_margins("recite", quality) is None
    assert rule.early_margins("piqa", quality) == ()


@pytest.mark.parametrize(
    ("percent", "cut", "before_cut", "outcome"),
    [
        (-2.2, 0, 60, "inconclusive"),  # the baseline's answers would have been longer, all of them
        (1.0, 60, 0, "inconclusive"),
        (13.0, 12, 0, "fail"),  # longer still without the limit
        (13.0, 0, 12, "inconclusive"),  # the baseline's might have been as long
        (-13.0, 12, 0, "inconclusive"),
        (-13.0, 0, 12, "fail"),
    ],
)
def test_answers_that_only_one_arm_s_limit_cut_decide_nothing_that_longer_ones_could_change(
    percent: float, cut: int, before_cut: int, outcome: str
) -> None:
    rule = MaxLengthDrift(percent=10.0)
    finding = one(rule, written(longer(percent), cut=cut), written(BEFORE, cut=before_cut))
    assert finding.outcome == outcome
    arm = "candidate" if cut else "baseline"
    assert (f"more of the {arm}'s answers" in finding.because) == (outcome == "inconclusive")


# --- several claims of one rule -------------------------------------------------------------------------


def several(rule: Rule, candidates: Sequence[TaskResult], baselines: Sequence[TaskResult]) -> list[Finding]:
    before, after = (
        build.variant(name, quality=build.quality(*tasks))
        for name, tasks in (("fp16", baselines), ("int8", candidates))
    )
    return list(rule.judge(baseline=before, candidate=after))


def test_one_of_many_floors_that_is_missed_by_chance_is_no_fail() -> None:
    """At 51 of 100 the bound at 95 % is 0.596, that at 99.5 % (a tenth of the error) 0.641: 0.6 lies between."""
    near = build.task("near", [1.0] * 51 + [0.0] * 49)
    others = [build.task(f"t{i}", [1.0] * 90 + [0.0] * 10) for i in range(9)]
    rule = MinScore(score=0.6, tasks=("near",))
    assert [found.outcome for found in several(rule, [near], [near])] == ["fail"]
    rule = MinScore(score=0.6, tasks=("near", *(task.task for task in others)))
    found = several(rule, [near, *others], [near, *others])
    assert [one.outcome for one in found] == ["inconclusive", *["pass"] * 9]
    assert "by itself only: undecided once all 10 are looked at (Holm)" in found[0].because


def test_floors_that_are_missed_by_far_fail_among_many_and_make_room_for_the_next() -> None:
    """Two tasks far under the floor: Holm's second step tests the third at the whole error."""
    far = [build.task(f"far{i}", [1.0] * 20 + [0.0] * 80) for i in range(2)]
    near = build.task("near", [1.0] * 51 + [0.0] * 49)
    tasks = [*far, near]
    found = several(MinScore(score=0.6, tasks=tuple(task.task for task in tasks)), tasks, tasks)
    assert [one.outcome for one in found] == ["fail"] * 3


def test_one_of_many_tasks_whose_answers_drift_by_chance_is_no_fail() -> None:
    def arm(lengths: Sequence[Sequence[float]]) -> list[TaskResult]:
        return [written(one).model_copy(update={"task": f"t{i}"}) for i, one in enumerate(lengths)]

    noisy = [length * (1.14 + 0.1 * (i % 5 - 2)) for i, length in enumerate(BEFORE)]
    rule = MaxLengthDrift(percent=10.0)
    (alone,) = several(rule, arm([noisy]), arm([BEFORE]))
    assert alone.outcome == "fail"
    found = several(rule, arm([noisy, *[longer(1.0)] * 9]), arm([BEFORE] * 10))
    assert [one.outcome for one in found] == ["inconclusive", *["pass"] * 9]


def test_what_would_decide_reckons_with_an_answer_that_was_not_seen() -> None:
    """10 of 10 right: Clopper and Pearson's bound is over 0.9 from 29 of 29 on (0.05 ** (1 / 29) = 0.902)."""
    task = right(10, 10)
    finding = one(MinScore(score=0.9, tasks=("piqa",)), task, task)
    assert "about 29 documents would decide" in finding.because
    for count, outcome in ((28, "inconclusive"), (29, "pass")):
        task = right(count, count)
        assert one(MinScore(score=0.9, tasks=("piqa",)), task, task).outcome == outcome
