"""Which metrics, parameters, tags and states a report becomes, and under which names."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pipeline.measured import Distribution, StageFailure
from pipeline.results import CostResult, MetricScore
from pipeline.statistics import tango_interval
from pipeline.tracked_labels import run_key, run_params, run_status, run_tags, variant_params, variant_status
from pipeline.tracked_values import TrackedMetric, legal_name, shortened, split_finite, variant_metrics
from tests import result_builders as build


def test_metric_names_are_made_legal() -> None:
    assert legal_name("quality.piqa.acc,none") == "quality.piqa.acc_none"
    assert legal_name("a/b%c:d") == "a_b_c_d"
    assert legal_name("../x") == "_x"
    assert len(legal_name("x" * 400)) <= 250
    assert legal_name("x" * 400) != legal_name("x" * 401)


def test_two_metrics_that_would_share_a_legal_name_stay_apart() -> None:
    scores = {
        name: MetricScore(score=value, stderr=None, higher_is_better=True)
        for name, value in (("acc,none", 0.1), ("acc_none", 0.2))
    }
    variant = build.variant("int8", quality=build.quality(build.task(metrics=scores)))
    values = [
        m.value for m in variant_metrics(variant, baseline=None) if m.name.startswith("quality.piqa.acc")
    ]
    names = {m.name for m in variant_metrics(variant, baseline=None)}
    assert sorted(values) == [0.1, 0.2]
    assert "quality.piqa.acc_none" in names


def test_values_that_are_not_finite_become_tags() -> None:
    kept, tags = split_finite(
        [TrackedMetric("a", 1.0), TrackedMetric("b", math.nan), TrackedMetric("c", -math.inf)]
    )
    assert kept == (TrackedMetric("a", 1.0),)
    assert tags == {"metric.b": "nan", "metric.c": "-inf"}


def test_figures_by_batch_size_are_series_and_ratios_stand_beside_them() -> None:
    metrics = variant_metrics(build.variant("int8"), baseline=build.variant("fp16"))
    values = {(metric.name, metric.step): metric.value for metric in metrics}
    assert values["speed.decode_tokens_per_s", 1] == 40.0
    assert values["speed.decode_tokens_per_s", 8] == 160.0
    assert values["speed.ttft_s", 1] == 0.21
    assert values["vs_baseline.decode_speedup", 8] == pytest.approx(2.0)
    assert values["vs_baseline.memory_fraction", 0] == 0.5
    assert values["capacity.measured_sequences", 0] == 20.0
    assert ("capacity.paged.measured_sequences", 0) not in values
    assert values["checkpoint.bits_per_weight", 0] == 8.0


def test_energy_and_both_prices_are_sent_at_their_batch_size_and_a_missing_one_is_not() -> None:
    row = build.speed_row(8, 160.0, joules_per_output_token=Distribution.of([0.4, 0.5, 0.9]))
    price: dict[str, Any] = {
        "dollars_per_hour": 2.0,
        "batch_size": 8,
        "dollars_per_million_output_tokens": 3.5,
    }
    both = CostResult(**price, input_batch_size=4, dollars_per_million_input_tokens=0.25)
    for cost, input_price in ((both, {4: 0.25}), (CostResult(**price), {})):
        variant = build.variant("int8", speed=build.speed("int8", [build.speed_row(1, 40.0), row]), cost=cost)
        found: dict[str, dict[int, float]] = {}
        for metric in variant_metrics(variant, baseline=None):
            found.setdefault(metric.name, {})[metric.step] = metric.value
        assert found["speed.joules_per_output_token"] == {8: 0.5}
        assert found["cost.dollars_per_million_output_tokens"] == {8: 3.5}
        assert found.get("cost.dollars_per_million_input_tokens", {}) == input_price


def test_prompt_lengths_and_depths_have_names_of_their_own_and_stay_out_of_the_batches() -> None:
    rows = [
        build.speed_row(1, 40.0),
        build.speed_row(1, None, tpot_s=None, prompt_tokens=512, new_tokens=1, test="prefill"),
        build.speed_row(
            *(1, None), tpot_s=None, prompt_tokens=512, new_tokens=1, test="prefill", chunk_tokens=64
        ),
        build.speed_row(1, 20.0, prompt_tokens=4096, new_tokens=16, test="depth"),
        build.speed_row(1, 99.0, prompt_tokens=8192, new_tokens=16, test="depth", outcome="void"),
    ]
    speed = build.speed("int8", rows, measured_break_even_batch=4.5, free_lunch_batch=4)
    metrics = variant_metrics(build.variant("int8", speed=speed), baseline=None)
    values = {metric.name: metric.value for metric in metrics}
    assert values["speed.pp512.prefill_tokens_per_s"] == pytest.approx(128 / 0.21)
    assert values["speed.pp512.ttft_s"] == 0.21
    assert values["speed.pp512_chunk64.ttft_s"] == 0.21
    assert values["speed.tg16_d4096.tpot_s"] == 0.05
    assert values["speed.tg16_d4096.decode_tokens_per_s"] == 20.0
    assert not [name for name in values if "8192" in name or name == "speed.pp512.tpot_s"]
    assert [m.value for m in metrics if m.name == "speed.decode_tokens_per_s"] == [40.0]
    assert (values["speed.measured_break_even_batch"], values["speed.free_lunch_batch"]) == (4.5, 4.0)


def test_the_baseline_has_no_ratio_to_itself() -> None:
    baseline = build.variant("fp16")
    names = {metric.name for metric in variant_metrics(baseline, baseline=baseline)}
    assert not any(name.startswith("vs_baseline") for name in names)


def test_void_rows_and_missing_figures_are_not_sent() -> None:
    rows = [build.speed_row(1, 40.0, outcome="void"), build.speed_row(8, 40.0, prefill_tokens_per_s=None)]
    variant = build.variant("int8", speed=build.speed("int8", rows), capacity=build.capacity(None))
    found = {(metric.name, metric.step) for metric in variant_metrics(variant, baseline=None)}
    assert ("speed.decode_tokens_per_s", 1) not in found
    assert ("speed.decode_tokens_per_s", 8) in found
    assert ("speed.prefill_tokens_per_s", 8) not in found
    assert ("capacity.measured_sequences", 0) not in found


def test_a_quality_difference_needs_the_same_documents() -> None:
    baseline = build.variant("fp16", quality=build.quality(build.task(values=[1.0, 0.0])))
    for values, expected in (([1.0, 1.0], [0.5]), ([1.0, 1.0, 1.0], [])):
        candidate = build.variant("int8", quality=build.quality(build.task(values=values)))
        metrics = variant_metrics(candidate, baseline=baseline)
        assert [m.value for m in metrics if m.name == "vs_baseline.quality.piqa.acc_difference"] == expected


def test_params_tell_recipe_quantizer_model_seed_and_versions() -> None:
    report = build.report(resolved_recipe={"model": {"id": "tiny/model"}, "quality": {"seed": 7}})
    assert run_params(report)["seed"] == "7"
    params = variant_params(report.variants[1], report=report)
    assert params["model"] == "tiny/model"
    assert params["recipe_digest"] == "d" * 64
    assert (params["quantizer.kind"], params["quantizer.weights"]) == ("quanto", "int8")
    assert params["versions.torch"] == "2.13.0"


def test_long_texts_are_cut_and_say_so() -> None:
    cut = shortened("x" * 9000, 8000)
    assert len(cut) == 8000
    assert cut.endswith("(cut; all of it is in report.md)")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"verdict": "ship"}, "FINISHED"),
        ({"verdict": "no-ship"}, "FINISHED"),
        ({"verdict": "inconclusive"}, "FINISHED"),
        ({"verdict": "error"}, "FAILED"),
        ({"verdict": "error", "interrupted": True}, "KILLED"),
    ],
)
def test_the_status_tells_whether_a_verdict_was_reached(fields: dict[str, Any], status: str) -> None:
    assert run_status(build.report(**fields)) == status


@pytest.mark.parametrize(("reason", "status"), [("failed", "FAILED"), ("interrupted", "KILLED")])
def test_a_variant_with_a_failed_stage_is_not_finished(reason: Any, status: str) -> None:
    failure = StageFailure(stage="speed", reason=reason, message="gone")
    assert variant_status(build.variant_report(build.variant("int8", failures=(failure,)))) == status


def test_a_field_that_a_later_release_adds_makes_no_report_another_one() -> None:
    report = build.report()
    written = report.model_dump(mode="json", exclude_defaults=True)
    assert "pick" not in written, "a field that older reports lack"
    assert run_key(type(report).model_validate_json(json.dumps(written))) == run_key(report)
    assert run_key(build.report(seconds=91.0)) != run_key(report)


def test_the_commit_is_a_tag_where_it_is_known() -> None:
    report = build.report(provenance={"git": {"commit": "abc", "dirty": True}, "packages": {"torch": None}})
    assert run_tags(report)["mlflow.source.git.commit"] == "abc"
    assert run_tags(report)["git_dirty"] == "true"
    assert "versions.torch" not in run_params(report)
    assert "git_dirty" not in run_tags(build.report(provenance={"git": None}))


def test_scores_have_intervals_that_are_never_empty_and_groups_are_pooled() -> None:
    right, mixed = build.task("a", values=(1.0,) * 10), build.task("b", values=(1.0, 0.0, 0.0, 0.0, 0.0))
    found = build.quality(right, mixed, groups={"both": ("a", "b")})
    values = {m.name: m.value for m in variant_metrics(build.variant("int8", quality=found), baseline=None)}
    assert values["quality.a.acc"] == 1.0
    # Wilson's interval of 10 right answers of 10, as in the literature: 0.7225 to 1.
    assert values["quality.a.acc_ci_low"] == pytest.approx(0.7225, abs=1e-4)
    assert values["quality.a.acc_ci_high"] == pytest.approx(1.0)
    assert values["quality.both.acc"] == pytest.approx(11 / 15)
    assert values["quality.both.acc_plain"] == pytest.approx(0.6)
    assert values["quality.both.documents"] == 15


def test_a_difference_has_the_gates_bounds() -> None:
    before, after = build.paired_answers(both_right=380, lost=5, gained=5, both_wrong=110)
    baseline, candidate = (
        build.variant(name, quality=build.quality(build.task(values=values)))
        for name, values in (("fp16", before), ("int8", after))
    )
    values = {m.name: m.value for m in variant_metrics(candidate, baseline=baseline)}
    name = "vs_baseline.quality.piqa.acc_difference"
    bounds = tango_interval(lost=5, gained=5, documents=500)
    assert values[name] == 0.0
    assert (values[f"{name}_ci_low"], values[f"{name}_ci_high"]) == (-bounds.upper, -bounds.lower)
