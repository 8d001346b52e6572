"""Thresholds of speed, cost and energy: which side ships, what noise leaves open, and which readings can't be true."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.capacity_results import CapacityProbe
from pipeline.measured import Distribution
from pipeline.results import CostResult, Finding, VariantResults
from pipeline.roofline import dollars_per_million_tokens
from pipeline.rules.base import Rule
from pipeline.rules.max_cost import MaxCost
from pipeline.rules.max_energy import MaxEnergy
from pipeline.rules.max_memory import MaxMemory
from pipeline.rules.max_tpot import MaxTpot
from pipeline.rules.max_ttft import MaxTtft
from pipeline.rules.min_bandwidth_share import MinBandwidthShare
from pipeline.rules.min_capacity import MinCapacity
from pipeline.rules.min_serving_throughput import MinServingThroughput
from pipeline.rules.min_speedup import MinSpeedup
from pipeline.rules.min_throughput import MinThroughput
from pipeline.serving_results import ServedRequest, ServingResult, ServingRow
from tests import result_builders as build

BASELINE = build.variant("fp16")


def one(rule: Rule, candidate: VariantResults, baseline: VariantResults = BASELINE) -> Finding:
    (finding,) = rule.judge(baseline=baseline, candidate=candidate)
    return finding


def candidate(decode: float = 40.0, **row: Any) -> VariantResults:
    """int8 with one row of batch size 1, of which the fields named are replaced."""
    return build.variant("int8", speed=build.speed("int8", [build.speed_row(1, decode, **row)]))


SPREAD: dict[str, Any] = {"noisy": True, "tpot_s": Distribution.of([0.02, 0.025, 0.03])}
"""Of a row of 40 tok/s; quartiles of 22.5 and 27.5 ms."""


def test_a_fraction_in_percent_is_refused_since_it_would_never_be_reached() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 10"):
        MaxMemory(fraction=60)


# --- either side of the limit ---------------------------------------------------------------------------

EXACT = candidate(
    decode=32.0,
    tpot_s=Distribution.of([0.03125] * 3),
    ttft_s=Distribution.of([0.25] * 3),
    prefill_tokens_per_s=512.0,
    bandwidth_share=0.5,
    itl_p50_s=0.03125,
    itl_p90_s=0.0625,
    itl_p99_s=0.125,
    joules_per_output_token=Distribution.of([0.75] * 3),
)
"""Figures that a float holds exactly."""
SAME_MACHINE = build.variant("fp16", speed=None)

EDGES: list[tuple[type[Rule], str, float, dict[str, Any], str]] = [
    (MinThroughput, "tokens_per_s", 32.0, {}, "at least"),
    (MinThroughput, "tokens_per_s", 512.0, {"metric": "prefill"}, "at least"),
    (MaxTpot, "seconds", 0.03125, {}, "at most"),
    (MaxTpot, "seconds", 0.0625, {"percentile": "p90"}, "at most"),
    (MaxTpot, "seconds", 0.125, {"percentile": "p99"}, "at most"),
    (MaxTtft, "seconds", 0.25, {}, "at most"),
    (MinBandwidthShare, "share", 0.5, {}, "at least"),
    (MaxEnergy, "joules_per_output_token", 0.75, {}, "at most"),
]


@pytest.mark.parametrize(("kind", "field", "figure", "fields", "bound"), EDGES)
def test_the_limit_itself_is_within_and_one_ulp_beyond_is_not(
    kind: type[Rule], field: str, figure: float, fields: dict[str, Any], bound: str
) -> None:
    stricter = -math.inf if bound == "at most" else math.inf
    for limit, outcome in ((figure, "pass"), (math.nextafter(figure, stricter), "fail")):
        finding = one(kind.model_validate({field: limit, **fields}), EXACT, SAME_MACHINE)
        assert (finding.outcome, finding.observed, finding.limit) == (outcome, figure, limit)
        assert finding.unit
        assert finding.interval is None or finding.interval[0] <= figure <= finding.interval[1]
        assert bound in finding.because


@pytest.mark.parametrize(
    ("rule", "outcome"),
    [
        (MinThroughput(tokens_per_s=38.0), "inconclusive"),
        (MinThroughput(tokens_per_s=42.0), "inconclusive"),
        (MinThroughput(tokens_per_s=30.0), "pass"),
        (MinThroughput(tokens_per_s=60.0), "fail"),
        (MaxTpot(seconds=0.0255), "inconclusive"),
        (MaxTpot(seconds=0.03), "pass"),
        (MaxTpot(seconds=0.0255, percentile="p99"), "inconclusive"),
        (MaxTpot(seconds=0.04, percentile="p99"), "pass"),
        (MaxTpot(seconds=0.015, percentile="p99"), "fail"),
        (MinBandwidthShare(share=0.58), "inconclusive"),
        (MinBandwidthShare(share=0.3), "pass"),
        (MinSpeedup(factor=1.9), "inconclusive"),
        (MinSpeedup(factor=1.01), "pass"),
    ],
)
def test_noise_leaves_open_only_what_its_spread_reaches(rule: Rule, outcome: str) -> None:
    finding = one(
        rule,
        candidate(**SPREAD, bandwidth_share=0.6),
        SAME_MACHINE if rule.kind != "min_speedup" else BASELINE,
    )
    assert finding.outcome == outcome
    assert ("spread reaches across" in finding.because) == (outcome == "inconclusive")


def test_a_quiet_row_is_decided_by_its_median_alone() -> None:
    quiet = candidate(**{**SPREAD, "noisy": False})
    assert one(MinThroughput(tokens_per_s=38.0), quiet, SAME_MACHINE).outcome == "pass"


# --- what can't be true ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "row", "reason"),
    [
        (MaxTpot(seconds=9.0), {"tpot_s": None}, "was not measured"),
        (
            MaxTpot(seconds=9.0, percentile="p99"),
            {"itl_p99_s": None},
            "p99 of the gaps between tokens was not",
        ),
        (MaxTpot(seconds=9.0, percentile="p99"), {"itl_p99_s": 0.0}, "implausible"),
        (MaxTpot(seconds=9.0, percentile="p99"), {"itl_p99_s": 0.02}, "implausible, gaps of"),
        (
            MaxTpot(seconds=9.0, percentile="p90"),
            {"itl_p50_s": 1e-4, "itl_p90_s": 1e-3},
            "implausible, gaps of",
        ),
        (MinThroughput(tokens_per_s=1.0), {"outcome": "void", "because": "no sync"}, "void: no sync"),
        (MinThroughput(tokens_per_s=1.0), {"decode_tokens_per_s": 400.0}, "its times say"),
        (MinBandwidthShare(share=0.1), {"bandwidth_share": None}, "no share of the bandwidth"),
        (MinBandwidthShare(share=0.1), {"bandwidth_share": 1.06}, "1.06 times the measured memory bandwidth"),
        (MinBandwidthShare(share=0.1), {"bandwidth_share": -0.5}, "implausible"),
        (MaxEnergy(joules_per_output_token=9.0), {}, "no counter that can be read"),
        (
            MaxEnergy(joules_per_output_token=9.0),
            {"joules_per_output_token": Distribution.of([0.0, 0.0, 0.0])},
            "implausible, 0.0 J a token",
        ),
    ],
)
def test_a_reading_that_is_not_there_or_cannot_be_true_is_missing(
    rule: Rule, row: dict[str, Any], reason: str
) -> None:
    finding = one(rule, candidate(**row), SAME_MACHINE)
    assert finding.outcome == "missing"
    assert reason in finding.because


@pytest.mark.parametrize(
    ("in_turn", "drift_percent", "outcome"),
    [
        (True, 30.0, "pass"),
        (None, 30.0, "pass"),
        (False, 1.0, "pass"),
        (False, 30.0, "inconclusive"),
        (False, 100 * (1 / 1.3 - 1), "inconclusive"),
        (False, None, "missing"),
    ],
)
def test_a_speed_up_of_variants_timed_one_after_the_other_is_as_sure_as_the_machine_was_steady(
    in_turn: bool | None, drift_percent: float | None, outcome: str
) -> None:
    timed: dict[str, Any] = {"timed_in_turn": in_turn}
    before = build.variant("fp16", speed=build.speed("fp16", drift_percent=drift_percent, **timed))
    after = build.variant("int8", speed=build.speed("int8", drift_percent=drift_percent, **timed))
    finding = one(MinSpeedup(factor=1.9), after, before)
    assert finding.outcome == outcome
    if outcome == "inconclusive":
        assert finding.interval == pytest.approx((2 * 0.99 / 1.01 / 1.3, 2 * 1.01 / 0.99 * 1.3))
        assert "give or take 30.0 % by which the machine drifted" in finding.because
    if outcome == "missing":
        assert "the baseline couldn't be timed again at the end" in finding.because


def test_beside_another_run_what_both_runs_drifted_counts() -> None:
    arms = (("fp16", False, 10.0), ("int8", False, -20.0))
    before, after = (
        build.variant(name, speed=build.speed(name, timed_in_turn=in_turn, drift_percent=drift))
        for name, in_turn, drift in arms
    )
    finding = one(MinSpeedup(factor=1.5), after, before)
    assert finding.interval == pytest.approx((2 * 0.99 / 1.01 / 1.1 * 0.8, 2 * 1.01 / 0.99 * 1.1 / 0.8))
    assert finding.outcome == "inconclusive"


@pytest.mark.parametrize(
    "rule", [MinSpeedup(factor=1.5), MinThroughput(tokens_per_s=1.0), MaxTpot(seconds=9.0)]
)
def test_a_row_ten_times_over_the_roof_shows_by_the_baseline_s_even_with_its_share_left_alone(
    rule: Rule,
) -> None:
    """Rate and times agree with each other, and the share beside them is a plausible one."""
    fast = candidate(400.0, bandwidth_share=0.6, bytes_read_per_step=500_000_000)
    finding = one(rule, fast)
    assert finding.outcome == "missing"
    assert "mean a memory of 333.3 to 333.3 GB/s, fp16's one of 33.33" in finding.because


@pytest.mark.parametrize(
    "rule",
    [MinSpeedup(factor=1.0), MaxMemory(fraction=0.9), MinCapacity(factor=1.0)],
)
def test_other_library_versions_are_no_comparison(rule: Rule) -> None:
    other = build.variant(
        "int8", checkpoint=build.manifest("int8", versions={"torch": "2.12.0", "gguf": "0.1"})
    )
    finding = one(rule, other)
    assert finding.outcome == "missing"
    assert (
        "library versions: not comparable, baseline vs candidate: torch 2.13.0 vs 2.12.0" in finding.because
    )


# --- cost, serving, capacity ----------------------------------------------------------------------------


def priced(variant: VariantResults, dollars_per_hour: float = 3.6) -> VariantResults:
    """With what `run` works out at the better of batch sizes 1 and 8."""
    assert variant.speed is not None
    rate, size = max((row.decode_tokens_per_s or 0.0, row.batch_size) for row in variant.speed.of("batch"))
    cost = CostResult(
        dollars_per_hour=dollars_per_hour,
        batch_size=size,
        dollars_per_million_output_tokens=dollars_per_million_tokens(rate, dollars_per_hour=dollars_per_hour),
    )
    return variant.model_copy(update={"cost": cost})


def test_cost_is_the_hour_s_price_over_the_tokens_of_an_hour() -> None:
    int8 = priced(build.variant("int8"))  # 40 tok/s alone, 160 at batch size 8
    assert one(MaxCost(dollars_per_million_output_tokens=25.1, batch_size=1), int8).observed == pytest.approx(
        25.0
    )
    assert one(MaxCost(dollars_per_million_output_tokens=24.9, batch_size=1), int8).outcome == "fail"
    best = one(MaxCost(dollars_per_million_output_tokens=6.3), int8)
    assert best.outcome == "pass"
    assert best.observed == pytest.approx(6.25)
    assert "$6.25 for a million output tokens at batch size 8 (160 tok/s, $3.6 an hour)" in best.because
    assert best.interval is not None
    assert best.interval[0] < 6.25 < best.interval[1]


def test_a_price_that_was_not_worked_out_or_is_another_machine_s_is_missing() -> None:
    rule = MaxCost(dollars_per_million_output_tokens=100.0)
    assert "give cost.dollars_per_hour" in one(rule, build.variant("int8")).because
    int8 = priced(build.variant("int8"))
    assert "different prices" in one(rule, int8, priced(BASELINE, 7.2)).because
    assert int8.cost is not None
    cheaper = int8.cost.model_copy(update={"dollars_per_million_output_tokens": 0.01})
    finding = one(rule, int8.model_copy(update={"cost": cheaper}))
    assert (finding.outcome, "come to $6.25" in finding.because) == ("missing", True)


def served(rate: float = 80.0, **fields: Any) -> VariantResults:
    """Two requests at once of 40 tokens each, ended at the time that such a rate means."""
    end_s = 80 / rate
    request = ServedRequest(
        prompt_tokens=10, new_tokens=40, arrival_s=0.0, start_s=0.0, first_token_s=end_s / 40, end_s=end_s
    )
    row = ServingRow(
        **{
            "mode": "continuous",
            "load": "closed",
            "concurrency": 2,
            "outcome": "measured",
            "requests": 2,
            "output_tokens_per_s": Distribution.of([rate] * 3),
            "repeats": ((request, request),) * 3,
            **fields,
        }
    )
    serving = ServingResult(
        engine="transformers",
        device="cpu",
        compute_dtype="bfloat16",
        static_execution="eager",
        continuous_execution="eager",
        rows=(row,),
    )
    return build.variant("int8", serving=serving)


def test_serving_is_judged_at_its_own_concurrency_and_mode() -> None:
    rule = MinServingThroughput(tokens_per_s=80.0, concurrency=2)
    assert one(rule, served()).outcome == "pass"
    assert one(rule, served(79.0)).outcome == "fail"
    assert (
        "not among the measured ones (2)" in one(rule.model_copy(update={"concurrency": 4}), served()).because
    )
    assert "measured ones (none)" in one(rule.model_copy(update={"mode": "static"}), served()).because
    assert "the serving stage gave no result" in one(rule, build.variant("int8")).because


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"outcome": "void", "because": "tokens are missing"}, "void: tokens are missing"),
        ({"output_tokens_per_s": None}, "were not measured"),
        ({"output_tokens_per_s": Distribution.of([800.0] * 3)}, "the requests' own times say 80 to 80"),
        ({"repeats": ()}, "the requests' own times say nothing"),
    ],
)
def test_served_rates_that_the_requests_deny_are_missing(fields: dict[str, Any], reason: str) -> None:
    finding = one(MinServingThroughput(tokens_per_s=10.0, concurrency=2), served(**fields))
    assert finding.outcome == "missing"
    assert reason in finding.because


def test_more_sequences_than_ran_or_than_the_budget_holds_are_missing() -> None:
    rule = MinCapacity(sequences=1)
    probe = CapacityProbe(sequences=10, outcome="measured")
    for found in (build.capacity(11, probes=(probe,)), build.capacity(80)):
        finding = one(rule, build.variant("int8", capacity=found))
        assert finding.outcome == "missing"
        assert "implausible" in finding.because
    assert one(rule, build.variant("int8", capacity=build.capacity(10, probes=(probe,)))).outcome == "pass"
