"""What a quality limit can't be shown to be kept by: guessing, a scale of the candidate's, one tiny difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.results import Finding
from pipeline.rules.max_quality_drop import MaxQualityDrop
from tests import result_builders as build


def judged(
    rule: MaxQualityDrop, before: Sequence[float], after: Sequence[float], **fields: Any
) -> tuple[Finding, ...]:
    return rule.judge(
        baseline=build.variant("fp16", quality=build.quality(build.task(values=before, **fields))),
        candidate=build.variant("int8", quality=build.quality(build.task(values=after, **fields))),
    )


@pytest.mark.parametrize(
    ("documents", "right", "guessed", "chance", "points"),
    [
        (1319, 13, 0, None, 2.0),
        (1000, 276, 251, 0.25, 5.0),
        (1000, 561, 496, 0.5, 12.0),
        (100, 62, 50, 0.5, 15.0),
    ],
)
def test_a_limit_that_a_guessing_model_would_keep_is_void(
    documents: int, right: int, guessed: int, chance: float | None, points: float
) -> None:
    before = [1.0] * right + [0.0] * (documents - right)
    after = [0.0] * (documents - guessed) + [1.0] * guessed
    (finding,) = judged(MaxQualityDrop(points=points), before, after, chance_score=chance)
    assert finding.outcome == "missing"
    assert "a model that only guesses would keep within a limit" in finding.because
    assert f"of {points:g} points" in finding.because
    lead = 100 * (right / documents - (chance or 0.0))
    (finding,) = judged(MaxQualityDrop(points=0.9 * lead), before, after, chance_score=chance)
    assert finding.outcome != "missing", "a smaller limit is judged"


def test_a_pooled_group_is_held_against_the_guesses_of_all_its_documents() -> None:
    def arm(right: tuple[int, int], precision: str) -> Any:
        tasks = [
            build.task(name, [1.0] * count + [0.0] * (500 - count), chance_score=chance)
            for name, count, chance in zip(("two", "four"), right, (0.5, 0.25), strict=True)
        ]
        groups = {"both": ("two", "four")}
        return build.variant(precision, quality=build.quality(*tasks, groups=groups))

    # 45 % in the mean, guessing gets 37.5.
    arms = {"baseline": arm((280, 170), "fp16"), "candidate": arm((280, 170), "int8")}
    (finding,) = MaxQualityDrop(points=8).judge(**arms)
    assert (finding.subject, finding.outcome) == ("both", "missing")
    (finding,) = MaxQualityDrop(points=7).judge(**arms)
    assert (finding.subject, finding.outcome) == ("both", "pass")


def test_a_limit_in_percent_of_a_score_without_known_guesses_is_judged() -> None:
    answers = [1.0] * 300 + [0.0] * 300
    (finding,) = judged(MaxQualityDrop(percent=20), answers, answers)
    assert finding.outcome == "pass"
    (finding,) = judged(MaxQualityDrop(percent=60), answers, answers, chance_score=0.25)
    assert finding.outcome == "missing"


@pytest.mark.parametrize("strange", [1.5, -0.1])
def test_one_strange_value_of_the_candidate_takes_no_task_from_the_gate(strange: float) -> None:
    before = [1.0] * 70 + [0.0] * 30
    (finding,) = judged(MaxQualityDrop(points=5), before, [strange, *before[1:]])
    assert (finding.subject, finding.outcome) == ("piqa", "missing")


def test_a_baseline_on_another_scale_is_not_judged_in_points() -> None:
    scores = build.task("bleu", [31.0, 28.5] * 20)
    answers = build.task("piqa", [1.0] * 90 + [0.0] * 10)
    arms = {
        name: build.variant(precision, quality=build.quality(scores, answers))
        for name, precision in (("baseline", "fp16"), ("candidate", "int8"))
    }
    assert [finding.subject for finding in MaxQualityDrop(points=12).judge(**arms)] == ["piqa"]


def test_a_tiny_difference_among_equal_graded_scores_proves_nothing() -> None:
    before = [0.5] * 20
    for after in (before, [0.49, *before[1:]]):
        (finding,) = judged(MaxQualityDrop(points=10), before, after)
        assert finding.outcome == "inconclusive"
        assert "about" in finding.because
    (finding,) = judged(MaxQualityDrop(points=10), before * 3, [0.49, *before[1:]] + before * 2)
    assert finding.outcome == "pass"
