"""Every rule: what passes, what fails, what can't be told, and what must never count as a pass."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.measured import Distribution
from pipeline.plugins import kinds, plugin_class, plugin_classes
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import Rule
from pipeline.rules.max_memory import MaxMemory
from pipeline.rules.max_ttft import MaxTtft
from pipeline.rules.min_capacity import MinCapacity
from pipeline.rules.min_speedup import MinSpeedup
from tests import result_builders as build

EXAMPLES: dict[str, dict[str, Any]] = {
    "min_speedup": {"factor": 1.5},
    "max_memory": {"fraction": 0.6},
    "max_ttft": {"seconds": 0.5},
    "min_capacity": {"factor": 1.5},
    "max_quality_drop": {"points": 2.0},
    "max_perplexity_increase": {"percent": 1.0},
    "max_kl": {"mean_nats": 0.02},
    "min_top1_agreement": {"percent": 95.0},
    "max_tpot": {"seconds": 0.5},
    "min_throughput": {"tokens_per_s": 10.0},
    "min_serving_throughput": {"tokens_per_s": 10.0},
    "min_bandwidth_share": {"share": 0.5},
    "max_cost": {"dollars_per_million_output_tokens": 100.0},
    "max_energy": {"joules_per_output_token": 5.0},
    "max_length_drift": {"percent": 10.0},
    "no_regression": {"points": 2.0},
    "min_score": {"score": 0.6, "tasks": ("piqa",)},
}


def one(rule: Rule, candidate: VariantResults, baseline: VariantResults | None = None) -> Finding:
    (finding,) = rule.judge(baseline=baseline or build.variant("fp16"), candidate=candidate)
    return finding


# --- every kind -----------------------------------------------------------------------------------------


def test_every_kind_has_an_example_here() -> None:
    assert set(kinds("pipeline.rules")) == set(EXAMPLES)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_nothing_measured_is_missing_never_a_pass(kind: str) -> None:
    rule = plugin_class("pipeline.rules", kind).model_validate(EXAMPLES[kind])
    assert isinstance(rule, Rule)
    empty = {"checkpoint": None, "speed": None, "memory": None, "capacity": None, "quality": None}
    findings = rule.judge(baseline=build.variant("fp16", **empty), candidate=build.variant("int8", **empty))
    assert findings
    assert {finding.outcome for finding in findings} == {"missing"}
    assert all(finding.rule == kind and finding.because for finding in findings)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_a_baseline_without_results_is_missing_where_it_is_needed(kind: str) -> None:
    rule = plugin_class("pipeline.rules", kind).model_validate(EXAMPLES[kind])
    assert isinstance(rule, Rule)
    empty = {"checkpoint": None, "speed": None, "memory": None, "capacity": None, "quality": None}
    findings = rule.judge(baseline=build.variant("fp16", **empty), candidate=build.variant("int8"))
    of_the_candidate_alone = {"max_ttft", "max_tpot", "min_throughput", "min_bandwidth_share"}
    expected = "pass" if kind in of_the_candidate_alone else "missing"
    assert {finding.outcome for finding in findings} == {expected}


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), True, "2"])
def test_limits_are_finite_positive_numbers(kind: str, bad: object) -> None:
    field = next(iter(EXAMPLES[kind]))
    with pytest.raises(ValidationError, match=field):
        plugin_class("pipeline.rules", kind).model_validate({**EXAMPLES[kind], field: bad})


def test_every_rule_says_which_stages_it_reads() -> None:
    assert all(rule.needs for rule in plugin_classes("pipeline.rules"))


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        (MaxMemory, {}),
        (MaxMemory, {"fraction": 0.5, "bytes": 10}),
        (MinCapacity, {}),
        (MinCapacity, {"factor": 2.0, "sequences": 3}),
    ],
)
def test_alternative_limits_need_exactly_one(rule: type[Rule], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="needs exactly one of"):
        rule.model_validate(fields)


def test_a_boolean_is_no_batch_size() -> None:
    with pytest.raises(ValidationError, match="batch_size"):
        MinSpeedup.model_validate({"factor": 1.5, "batch_size": True})


# --- speed ----------------------------------------------------------------------------------------------


def test_speedup_is_the_ratio_of_rates_at_the_batch_size() -> None:
    finding = one(MinSpeedup(factor=1.5), build.variant("int8"))
    assert (finding.outcome, finding.limit) == ("pass", 1.5)
    assert finding.observed == pytest.approx(2.0)
    assert one(MinSpeedup(factor=2.5, batch_size=8), build.variant("int8")).outcome == "fail"


def test_speedup_compares_raw_numbers_not_rounded_ones() -> None:
    rows = [build.speed_row(1, 29.9999)]
    candidate = build.variant("int8", speed=build.speed("int8", rows))
    assert one(MinSpeedup(factor=1.5), candidate).outcome == "fail"


def test_a_baseline_held_in_float32_is_no_measure_for_memory() -> None:
    wide = build.memory("fp16", weight_bytes_resident=2 * build.memory("fp16").weight_bytes_on_disk)
    speed = build.speed("fp16", compute_dtype="float32", memory=wide)
    baseline = build.variant("fp16", memory=wide, speed=speed)
    (finding,) = MaxMemory(fraction=0.9).judge(baseline=baseline, candidate=build.variant("int8"))
    assert finding.outcome == "missing"
    assert "fp16 is held in float32" in finding.because
    for rule in (MaxMemory(fraction=0.9, of="on_disk"), MaxMemory(bytes=10**12)):
        (finding,) = rule.judge(baseline=baseline, candidate=build.variant("int8"))
        assert finding.outcome == "pass"


def test_peaks_of_two_engines_are_no_measure_for_each_other() -> None:
    candidate = build.variant("int8", speed=build.speed("int8", engine="llama_cpp"))
    finding = one(MaxMemory(fraction=0.9, of="peak"), candidate)
    assert finding.outcome == "missing"
    assert "fp16 ran on transformers, int8 on llama_cpp; compare of: resident" in finding.because
    assert one(MaxMemory(fraction=0.9, of="peak"), build.variant("int8")).outcome == "pass"
    for rule in (
        MaxMemory(fraction=0.9),
        MaxMemory(fraction=0.9, of="on_disk"),
        MaxMemory(bytes=10**12, of="peak"),
    ):
        assert one(rule, candidate).outcome == "pass"


def test_prefill_speedup_reads_the_prefill_rate() -> None:
    times = Distribution.of([128 / 300] * 3)
    rows = [build.speed_row(1, 40.0, prefill_tokens_per_s=300.0, ttft_s=times)]
    candidate = build.variant("int8", speed=build.speed("int8", rows))
    finding = one(MinSpeedup(factor=1.5, metric="prefill"), candidate)
    assert finding.outcome == "fail"
    assert finding.observed == pytest.approx(300 / (128 / 0.21))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"decode_tokens_per_s": 1e12}, "1e+12: implausible, its times say"),
        ({"tpot_s": None}, "the times behind it were not measured"),
        ({"tpot_s": Distribution.of([-1.0] * 3)}, "a time per token of -1.0 s"),
        ({"tpot_s": Distribution.of([0.025]).model_copy(update={"samples": ()})}, "a time per token"),
        ({"ttft_s": Distribution.of([0.2]).model_copy(update={"samples": ()})}, "a time to first token"),
        ({"ttft_s": Distribution.of([0.2]).model_copy(update={"median": 1e-9})}, "a time to first token"),
        ({"produced_tokens": 31}, "31 tokens were produced, 32 asked for"),
    ],
)
def test_a_rate_that_its_own_times_deny_is_missing(row: dict[str, Any], reason: str) -> None:
    candidate = build.variant("int8", speed=build.speed("int8", [build.speed_row(1, 40.0, **row)]))
    finding = one(MinSpeedup(factor=0.1), candidate)
    assert finding.outcome == "missing"
    assert reason in finding.because


def test_two_rows_of_one_batch_size_are_missing() -> None:
    rows = [build.speed_row(1, 40.0), build.speed_row(1, 20.0)]
    finding = one(MinSpeedup(factor=0.1), build.variant("int8", speed=build.speed("int8", rows)))
    assert (finding.outcome, "two rows of that batch size" in finding.because) == ("missing", True)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"outcome": "void", "because": "clock went back"}, "void: clock went back"),
        ({"outcome": "out_of_memory"}, "out of memory"),
        ({"bandwidth_share": 10.0}, "implausible, 10.00 times the measured memory bandwidth"),
        ({"prefill_flops_share": 1.2}, "implausible, 1.20 times the measured FLOP/s"),
        ({"ttft_s": Distribution.of([0.0])}, "implausible, a time to first token"),
        ({"decode_tokens_per_s": None}, "was not measured"),
        ({"decode_tokens_per_s": 0.0}, "implausible"),
        ({"prompt_tokens": 64}, "different workloads"),
    ],
)
def test_a_row_that_cannot_be_used_is_missing_with_its_reason(row: dict[str, Any], reason: str) -> None:
    candidate = build.variant("int8", speed=build.speed("int8", [build.speed_row(1, 40.0, **row)]))
    finding = one(MinSpeedup(factor=1.5), candidate)
    assert finding.outcome == "missing"
    assert reason in finding.because


def test_a_batch_size_that_was_not_measured_is_missing_and_named() -> None:
    finding = one(MinSpeedup(factor=1.5, batch_size=4), build.variant("int8"))
    assert finding.outcome == "missing"
    assert "batch size 4: not among the measured batch sizes (1, 8)" in finding.because


def test_speed_across_engines_must_be_asked_for() -> None:
    candidate = build.variant("int8", speed=build.speed("int8", engine="llama_cpp"))
    refused = one(MinSpeedup(factor=1.5), candidate)
    assert refused.outcome == "missing"
    assert "across_engines: true" in refused.because
    allowed = one(MinSpeedup(factor=1.5, across_engines=True), candidate)
    assert allowed.outcome == "pass"
    assert "llama_cpp against transformers" in allowed.because


def test_speed_on_another_device_is_missing() -> None:
    candidate = build.variant("int8", speed=build.speed("int8", device="cuda"))
    assert one(MinSpeedup(factor=1.5, across_engines=True), candidate).outcome == "missing"


def test_a_noisy_speedup_whose_spread_reaches_the_limit_is_inconclusive() -> None:
    row = build.speed_row(1, 40.0, noisy=True, tpot_s=Distribution.of([0.02, 0.025, 0.05]))
    candidate = build.variant("int8", speed=build.speed("int8", [row]))
    assert one(MinSpeedup(factor=1.5), candidate).outcome == "inconclusive"
    assert one(MinSpeedup(factor=1.01), candidate).outcome == "pass"


def test_ttft_is_judged_on_the_median() -> None:
    assert one(MaxTtft(seconds=0.21), build.variant("int8")).outcome == "pass"
    assert one(MaxTtft(seconds=0.2), build.variant("int8")).outcome == "fail"
    rows = [build.speed_row(1, 40.0, ttft_s=None)]
    candidate = build.variant("int8", speed=build.speed("int8", rows))
    assert one(MaxTtft(seconds=1.0), candidate).outcome == "missing"


# --- memory and capacity --------------------------------------------------------------------------------


def test_memory_is_a_fraction_of_the_baselines() -> None:
    finding = one(MaxMemory(fraction=0.6), build.variant("int8"))
    assert (finding.outcome, finding.observed) == ("pass", 0.5)
    assert one(MaxMemory(fraction=0.4), build.variant("int8")).outcome == "fail"
    assert one(MaxMemory(fraction=0.5), build.variant("int8")).outcome == "pass"


def test_memory_in_bytes_needs_no_baseline() -> None:
    finding = one(MaxMemory(bytes=499_999_999, of="on_disk"), build.variant("int8"))
    assert (finding.outcome, finding.observed, finding.unit) == ("fail", 500_000_000, "bytes")
    assert one(MaxMemory(bytes=550_000_000, of="peak"), build.variant("int8")).outcome == "pass"


def test_zero_bytes_of_memory_are_implausible() -> None:
    candidate = build.variant("int8", memory=build.memory("int8", weight_bytes_resident=0))
    finding = one(MaxMemory(fraction=0.6), candidate)
    assert finding.outcome == "missing"
    assert "implausible" in finding.because


def test_capacity_is_judged_on_what_really_ran() -> None:
    candidate = build.variant("int8", capacity=build.capacity(14, predicted_sequences=30))
    assert one(MinCapacity(sequences=14), candidate).outcome == "pass"
    assert one(MinCapacity(sequences=15), candidate).outcome == "fail"
    assert one(MinCapacity(factor=1.4), candidate).outcome == "pass"
    assert one(MinCapacity(factor=1.5), candidate).outcome == "fail"


@pytest.mark.parametrize(
    "fields",
    [{"sequences": None}, {"limited_by": "failure"}, {"context_tokens": 512}, {"budget_bytes": 1}],
)
def test_capacity_that_failed_or_had_other_conditions_is_missing(fields: dict[str, Any]) -> None:
    candidate = build.variant("int8", capacity=build.capacity(**{"sequences": 20, **fields}))
    assert one(MinCapacity(factor=1.5), candidate).outcome == "missing"


def test_a_search_that_ended_at_its_own_ceiling_is_only_a_lower_bound() -> None:
    ended = build.variant("int8", capacity=build.capacity(16, limited_by="ceiling"))
    assert one(MinCapacity(sequences=16), ended).outcome == "pass"
    assert one(MinCapacity(sequences=17), ended).outcome == "inconclusive"
    baseline = build.variant("fp16", capacity=build.capacity(10, limited_by="ceiling"))
    assert one(MinCapacity(factor=1.5), build.variant("int8"), baseline).outcome == "inconclusive"


@pytest.mark.parametrize("rule", [MinSpeedup(factor=1.5), MaxTtft(seconds=0.5)])
def test_rules_read_the_workload_s_rows_only(rule: Rule) -> None:
    """Prompt lengths and depths run at batch size 1, too, and come first here."""
    slow = Distribution.of([9.0, 9.0, 9.0])
    others = [build.speed_row(1, 1.0, test=test, ttft_s=slow, tpot_s=slow) for test in ("prefill", "depth")]
    rows = [*others, build.speed_row(1, 40.0)]
    assert one(rule, build.variant("int8", speed=build.speed("int8", rows))).outcome == "pass"
    without = one(rule, build.variant("int8", speed=build.speed("int8", others)))
    assert without.outcome == "missing"
    assert "not among the measured batch sizes (none)" in without.because


def test_capacity_across_engines_must_be_asked_for_and_names_both() -> None:
    """By the engine that held the sequences, else by the one that was timed; an unknown one is another one."""
    timed = build.variant("int8", speed=build.speed("int8", engine="llama_cpp"))
    held = build.variant("int8", capacity=build.capacity(20, engine="llama_cpp"))
    unknown = build.variant("int8", speed=None)
    for candidate, name in ((timed, "llama_cpp"), (held, "llama_cpp"), (unknown, "an unknown one")):
        refused = one(MinCapacity(factor=1.5), candidate)
        assert refused.outcome == "missing"
        assert f"transformers for the baseline and {name} for the candidate" in refused.because
        assert "across_engines: true" in refused.because
        assert one(MinCapacity(factor=1.5, across_engines=True), candidate).outcome == "pass"
        assert one(MinCapacity(sequences=15), candidate).outcome == "pass"
    allowed = one(MinCapacity(factor=1.5, across_engines=True), held)
    assert "engine llama_cpp against transformers" in allowed.because
    same = build.variant("int8", speed=None, capacity=build.capacity(20, engine="transformers"))
    assert one(MinCapacity(factor=1.5), same).outcome == "pass"
