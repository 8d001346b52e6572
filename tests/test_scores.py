"""Scores beside the baseline's: on the same documents, without void tasks, in every place that shows them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.figures import variant_figures
from pipeline.model_card import model_card
from pipeline.report_answers import answers
from pipeline.report_cards import variant_cards
from pipeline.results import Finding, MetricScore, TaskResult, VariantReport
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.scores import group_scores, paired_group, paired_scores, score_interval
from pipeline.tracked_labels import variant_params, variant_tags
from pipeline.tracked_values import variant_metrics
from pipeline.trade_plot import trade_points, trade_svg
from tests import result_builders as build


def asked(values: list[float], **fields: Any) -> TaskResult:
    """A task whose documents prove what was asked, as a sequential evaluation needs them to."""
    task = build.task("piqa", values, **fields)
    samples = tuple(one.model_copy(update={"prompt_hash": f"p{one.doc_hash}"}) for one in task.samples)
    return task.model_copy(update={"samples": samples})


def stopped(values: list[float], *, of: int) -> TaskResult:
    """A task that was stopped after the first documents of a number."""
    return asked(values, available_documents=of, look_confidence=0.99)


def arm(name: str, *tasks: TaskResult, **fields: Any) -> VariantReport:
    groups = fields.pop("groups", {})
    quality = build.quality(*tasks, groups=groups)
    return build.variant_report(build.variant(name, quality=quality, **fields))


def card(*variants: VariantReport) -> str:
    return model_card(build.report(*variants), variants[1], loading="…", recipe_text=None)


def row(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {start}"))


# --- a task that stopped early ---------------------------------------------------------------------------

EASY_FIRST = [1.0] * 50 + [0.0] * 50
"""The baseline's answers: whoever stops after 50 documents has seen the easy ones only."""


def test_a_task_stopped_early_compares_on_its_own_documents_in_cards_model_card_and_metrics() -> None:
    before, after = arm("fp16", asked(EASY_FIRST)), arm("int8", stopped([1.0] * 50, of=100))
    lines = [line for part in variant_cards(build.report(before, after))[0].parts for line in part.lines]
    (line,) = [one for one in lines if one.label.startswith("piqa")]
    assert (line.label, line.value, line.baseline, line.change) == (
        "piqa acc (50 of 100)",
        "1.000",
        "1.000",
        "+0.000",
    )
    assert row(card(before, after), "piqa").endswith("| 1 | +0 |")
    metrics = {one.name: one.value for one in variant_metrics(after, baseline=before)}
    assert metrics["vs_baseline.quality.piqa.acc_difference"] == 0.0


def test_a_loss_on_those_documents_is_one() -> None:
    before, after = arm("fp16", asked(EASY_FIRST)), arm("int8", stopped([1.0] * 40 + [0.0] * 10, of=100))
    scores = paired_scores(after, baseline=before)["piqa", "acc"]
    assert (scores.before, scores.after, scores.documents) == (1.0, 0.8, 50)
    assert scores.change == pytest.approx(-0.2)


def test_a_score_that_is_no_mean_of_its_documents_is_not_compared_on_some_of_them() -> None:
    f1 = {"acc": MetricScore(score=0.9, stderr=None, higher_is_better=True)}
    before = arm("fp16", asked(EASY_FIRST))
    assert paired_scores(arm("int8", stopped([1.0] * 50, of=100)), baseline=before)
    after = arm("int8", stopped([1.0] * 50, of=100).model_copy(update={"metrics": f1}))
    assert paired_scores(after, baseline=before) == {}


def test_documents_that_repeat_are_in_both_scores() -> None:
    twice = build.task("piqa", [1.0, 0.0, 1.0])
    samples = tuple(one.model_copy(update={"prompt_hash": "same"}) for one in twice.samples[:2])
    task = twice.model_copy(update={"samples": (*samples, twice.samples[2])})
    assert paired_scores(arm("int8", task), baseline=arm("fp16", task))["piqa", "acc"].change == 0.0


def test_a_group_compares_on_the_documents_that_both_answered() -> None:
    before = arm("fp16", asked(EASY_FIRST), build.task("b", [1.0] * 50), groups={"g": ("piqa", "b")})
    after = arm(
        "int8",
        stopped([1.0] * 50, of=100),
        build.task("b", [1.0] * 25 + [0.0] * 25),
        groups={"g": ("piqa", "b")},
    )
    found = paired_group(paired_scores(after, baseline=before), ("piqa", "b"), "acc")
    assert found is not None
    assert (found.before, found.after, found.documents) == (1.0, 0.75, 100)
    assert row(card(before, after), "g acc").endswith("| 0.75 | 1 | -0.25 |")


def test_what_does_not_compare_has_no_change() -> None:
    before, after = arm("fp16", build.task()), arm("int8", build.task(task_hash="another"))
    assert row(card(before, after), "piqa").endswith("| 0.5 | – |")


def test_perplexities_of_different_units_are_never_set_side_by_side() -> None:
    """8.79 a word beside 5.5 a token is no improvement."""

    def text(metric: str, value: float) -> TaskResult:
        score = MetricScore(score=value, stderr=None, higher_is_better=False)
        return build.rolling_task(primary_metric=metric, metrics={metric: score})

    before = arm("fp16", text("word_perplexity", 8.79))
    after = arm("int8", text("token_perplexity", 5.5))
    assert paired_scores(after, baseline=before) == {}
    same = arm("int8", text("word_perplexity", 5.5))
    assert paired_scores(same, baseline=before)["passages", "word_perplexity"].change == pytest.approx(-3.29)
    rule = MaxQualityDrop(points=2.0, tasks=("passages",), metric="word_perplexity")
    (finding,) = rule.judge(baseline=before, candidate=after)
    assert (finding.outcome, "no metric word_perplexity; it has token_perplexity" in finding.because) == (
        "missing",
        True,
    )


# --- void ------------------------------------------------------------------------------------------------


def test_a_void_task_has_a_reason_where_its_score_would_be() -> None:
    task = build.task("piqa", void="every prompt was cut")
    before, after = arm("fp16", task), arm("int8", task)
    text = card(before, after)
    assert "model-index" not in text
    assert "void: every prompt was cut" in row(text, "piqa")
    names = [one.name for one in variant_metrics(after, baseline=before) if "piqa" in one.name]
    assert names == ["quality.piqa.documents"]
    assert variant_tags(after, baseline_name="fp16")["void.piqa"] == "every prompt was cut"
    lines = [line for part in variant_cards(build.report(before, after))[0].parts for line in part.lines]
    (line,) = [one for one in lines if one.label.startswith("piqa")]
    assert (line.value, line.baseline, line.change) == ("void", "void", "–")


def test_a_group_with_a_void_task_has_no_score() -> None:
    quality = build.quality(build.task("a", void="…"), build.task("b"), groups={"g": ("a", "b"), "h": ("b",)})
    assert set(group_scores(quality)) == {"h"}


def test_all_right_answers_leave_room_for_a_wrong_one() -> None:
    low, high = score_interval(build.task("piqa", [1.0] * 10), "acc") or (0.0, 0.0)
    assert (round(low, 4), round(high, 4)) == (0.7225, 1.0)  # Wilson's for 10 of 10


# --- two engines -----------------------------------------------------------------------------------------


def test_ratios_of_two_engines_name_both_wherever_they_stand() -> None:
    before = arm("fp16", build.task("piqa", [1.0] * 10))
    after = arm("int8", build.task("piqa", [1.0] * 10), speed=build.speed("int8", engine="llama_cpp"))
    report, both = build.report(before, after), "llama_cpp against transformers"
    assert both in card(before, after)
    assert any(both in line for answer in answers(report) for line in answer.lines)
    labels = [line.label for part in variant_cards(report)[0].parts for line in part.lines]
    assert f"decode, batch 1 ({both})" in labels
    assert variant_params(after, report=report)["ratios_across_engines"] == both
    (points,) = trade_points(report)
    drawn = trade_svg(report, points, key="trade")
    assert "tok/s by llama_cpp" in drawn
    assert "engines differ: transformers, llama_cpp" in drawn


def test_ratios_of_one_engine_say_nothing_of_engines() -> None:
    before, after = arm("fp16", build.task()), arm("int8", build.task())
    report = build.report(before, after)
    assert "against transformers" not in card(before, after)
    assert "ratios_across_engines" not in variant_params(after, report=report)
    assert "(" not in next(line.label for line in variant_cards(report)[0].parts[0].lines)


# --- names and tags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outcomes", [("fail", "pass"), ("pass", "fail"), ("missing", "fail", "inconclusive")]
)
def test_a_rule_that_stands_twice_in_the_gate_is_tagged_with_its_worst_outcome(outcomes: Any) -> None:
    findings = tuple(
        Finding(rule="min_speedup", outcome=one, observed=1.0, limit=1.5, unit="x", because="…")
        for one in outcomes
    )
    tags = variant_tags(
        arm("int8", build.task()).model_copy(update={"findings": findings}), baseline_name="fp16"
    )
    assert tags["finding.min_speedup"] == ("missing" if "missing" in outcomes else "fail")


def test_a_figure_has_one_name_in_the_file_and_in_the_tracker() -> None:
    rows = [
        build.speed_row(1, 40.0),
        build.speed_row(1, None, test="prefill", prompt_tokens=512, new_tokens=1, tpot_s=None),
        build.speed_row(1, 30.0, test="depth", prompt_tokens=4096, new_tokens=64),
    ]
    variant = arm("int8", build.task(), speed=build.speed("int8", rows))
    figures = {one.name: one.value for one in variant_figures(variant)}
    metrics = {one.name: one.value for one in variant_metrics(variant, baseline=None)}
    by_length = {
        "speed.pp512.ttft_s",
        "speed.tg64_d4096.decode_tokens_per_s",
        "speed.batch_1.decode_tokens_per_s",
    }
    shared = by_length | {"quality.piqa.acc", "memory.weight_bytes_resident"}
    assert {name: metrics[name] for name in shared} == {name: figures[name] for name in shared}
    json.dumps(metrics, allow_nan=False)
