"""Verdicts: precedence, what counts as an error, labels, and the whole run."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.gate import dequantized_at_load, exit_code, judge, judge_all, judge_beside, label_order, overall
from pipeline.measured import StageFailure
from pipeline.results import Coverage, Finding, VariantResults, Verdict
from pipeline.rules.base import Rule
from pipeline.rules.max_memory import MaxMemory
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.rules.min_speedup import MinSpeedup
from tests import result_builders as build

BASELINE = build.variant("fp16")
PASSES = MinSpeedup(factor=1.5)
FAILS = MinSpeedup(factor=3.9)
MISSING = MinSpeedup(factor=1.5, batch_size=4)


class Silent(Rule):
    """A rule that finds nothing at all."""

    kind: str = "silent"

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:  # noqa: ARG002
        return ()


def undecided() -> tuple[VariantResults, VariantResults, Rule]:
    """Baseline and candidate with too few documents, and the rule that can't decide on them."""
    quality = build.quality(build.task(values=[1.0] * 20))
    return (
        build.variant("fp16", quality=quality),
        build.variant("int8", quality=quality),
        MaxQualityDrop(points=2.0),
    )


@pytest.mark.parametrize(
    ("rules", "verdict"),
    [
        ((PASSES, MaxMemory(fraction=0.6)), "ship"),
        ((PASSES, FAILS), "no-ship"),
        ((FAILS, MISSING), "error"),
        ((PASSES, MISSING), "error"),
        ((), "error"),
        ((Silent(),), "error"),
        ((PASSES, Silent()), "error"),
    ],
)
def test_the_worst_finding_makes_the_verdict(rules: tuple[Rule, ...], verdict: Verdict) -> None:
    found, findings = judge(rules, baseline=BASELINE, candidate=build.variant("int8"))
    assert found == verdict
    assert len(findings) == sum(not isinstance(rule, Silent) for rule in rules)


def test_inconclusive_stands_between_ship_and_no_ship() -> None:
    baseline, candidate, rule = undecided()
    assert judge((PASSES, rule), baseline=baseline, candidate=candidate)[0] == "inconclusive"
    assert judge((FAILS, rule), baseline=baseline, candidate=candidate)[0] == "no-ship"
    assert judge((MISSING, rule), baseline=baseline, candidate=candidate)[0] == "error"


@pytest.mark.parametrize("arm", ["baseline", "candidate"])
def test_a_failed_stage_is_an_error_even_when_every_rule_passes(arm: str) -> None:
    failure = StageFailure(stage="quality", reason="failed", message="worker died")
    arms = {"baseline": BASELINE, "candidate": build.variant("int8")}
    arms[arm] = arms[arm].model_copy(update={"failures": (failure,)})
    assert judge((PASSES,), **arms)[0] == "error"


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        (("ship", "ship"), "ship"),
        (("ship", "inconclusive"), "inconclusive"),
        (("inconclusive", "no-ship", "ship"), "no-ship"),
        (("no-ship", "error"), "error"),
        ((), "error"),
    ],
)
def test_the_run_is_as_good_as_its_worst_candidate(verdicts: tuple[Verdict, ...], worst: Verdict) -> None:
    assert overall(verdicts) == worst


def test_every_verdict_has_its_own_exit_code() -> None:
    verdicts: tuple[Verdict, ...] = ("ship", "no-ship", "inconclusive", "error")
    assert [exit_code(verdict) for verdict in verdicts] == [0, 1, 5, 4]


# --- the whole run --------------------------------------------------------------------------------------


def test_the_baseline_is_judged_for_completeness_only() -> None:
    reports, verdict, because = judge_all(
        (PASSES,), baseline_name="fp16", variants=(BASELINE, build.variant("int8"))
    )
    assert verdict == "ship"
    assert [(report.name, report.verdict, len(report.findings)) for report in reports] == [
        ("fp16", "ship", 0),
        ("int8", "ship", 1),
    ]
    assert because == ("int8: ship",)


def test_optional_candidates_are_judged_but_do_not_count() -> None:
    slow = build.variant("int4", speed=build.speed("fp16"), required=False)
    reports, verdict, because = judge_all(
        (PASSES,), baseline_name="fp16", variants=(BASELINE, build.variant("int8"), slow)
    )
    assert verdict == "ship"
    assert reports[2].verdict == "no-ship"
    assert "int4: no-ship (optional, not counted)" in because


def test_without_a_required_candidate_nothing_ships() -> None:
    only_optional = (BASELINE, build.variant("int8", required=False))
    for variants in ((BASELINE,), only_optional):
        _, verdict, because = judge_all((PASSES,), baseline_name="fp16", variants=variants)
        assert verdict == "error"
        assert "no required candidate was judged" in because


def test_without_rules_nothing_ships() -> None:
    _, verdict, because = judge_all((), baseline_name="fp16", variants=(BASELINE, build.variant("int8")))
    assert verdict == "error"
    assert "the gate has no rules" in because


@pytest.mark.parametrize(
    "broken",
    [
        {"failures": (StageFailure(stage="speed", reason="out_of_memory", message="killed"),), "speed": None},
        {"capacity": None},
    ],
)
def test_an_incomplete_baseline_makes_everything_an_error(broken: dict[str, Any]) -> None:
    baseline = build.variant("fp16", **broken)
    reports, verdict, because = judge_all(
        (MaxMemory(bytes=600_000_000),), baseline_name="fp16", variants=(baseline, build.variant("int8"))
    )
    assert verdict == "error"
    assert {report.verdict for report in reports} == {"error"}
    assert because[0].startswith("fp16: ")


def test_a_baseline_that_is_not_there_is_an_error() -> None:
    reports, verdict, because = judge_all((PASSES,), baseline_name="fp16", variants=(build.variant("int8"),))
    assert (verdict, reports[0].verdict) == ("error", "error")
    assert "fp16: the baseline has no results" in because


def test_the_reasons_name_rule_outcome_and_failure() -> None:
    failure = StageFailure(stage="capacity", reason="out_of_memory", message="killed at 9 sequences")
    candidate = build.variant("int8", failures=(failure,), capacity=None)
    _, verdict, because = judge_all((FAILS,), baseline_name="fp16", variants=(BASELINE, candidate))
    assert verdict == "error"
    assert "int8: capacity out of memory: killed at 9 sequences" in because
    assert any(reason.startswith("int8: min_speedup fail: decode at batch size 1") for reason in because)


def test_two_variants_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="share a name"):
        judge_all((PASSES,), baseline_name="fp16", variants=(BASELINE, BASELINE))


# --- labels ---------------------------------------------------------------------------------------------


def sized(name: str, size: int, **fields: Any) -> VariantResults:
    """A variant whose file and memory hold `size` bytes of weights."""
    memory = build.memory(name, weight_bytes_on_disk=size, weight_bytes_resident=size)
    checkpoint = build.manifest(name, weight_bytes_on_disk=size)
    return build.variant(name, checkpoint=checkpoint, memory=memory, **fields)


def test_int4_that_is_not_smaller_than_int8_does_not_ship() -> None:
    variants = (BASELINE, build.variant("int8"), sized("int4", 500_000_000))
    reports, verdict, _ = judge_all((PASSES,), baseline_name="fp16", variants=variants)
    assert [report.verdict for report in reports] == ["ship", "ship", "no-ship"]
    assert verdict == "no-ship"
    assert "not fewer than the 500,000,000 of int8" in reports[2].validity[0]


def test_a_quantized_file_as_large_as_the_baseline_does_not_ship() -> None:
    verdict, findings = judge((PASSES,), baseline=BASELINE, candidate=sized("int8", 1_000_000_000))
    assert verdict == "no-ship"
    assert findings[-1].rule == "label"


@pytest.mark.parametrize(("size", "earned"), [(250_000_000, True), (200_000_000, False), (11_000_000, False)])
def test_a_saving_beyond_the_ratio_of_bits_is_implausible(size: int, earned: bool) -> None:
    verdict, findings = judge((PASSES,), baseline=BASELINE, candidate=sized("int4", size))
    assert verdict == ("ship" if earned else "error")
    assert earned or "implausible" in findings[-1].because


def test_a_baseline_computed_in_float32_allows_twice_the_saving_in_memory() -> None:
    wide = build.memory("fp16", weight_bytes_resident=2_000_000_000)
    baseline = build.variant("fp16", memory=wide, speed=build.speed("fp16", compute_dtype="float32"))
    assert label_order((baseline, build.variant("int8")), baseline_name="fp16") == {}
    without_reason = build.variant("fp16", memory=wide)
    assert label_order((without_reason, build.variant("int8")), baseline_name="fp16") != {}


def test_variants_without_bytes_or_with_equal_bits_are_not_ordered() -> None:
    bare = build.variant("int4", checkpoint=None, memory=None, speed=None)
    twin = build.variant("other", "int8")
    assert label_order((BASELINE, build.variant("int8"), twin, bare), baseline_name="fp16") == {}


def test_weights_expanded_at_load_are_flagged() -> None:
    expanded = build.memory("int4", weight_bytes_resident=1_000_000_000)
    (note,) = dequantized_at_load(build.variant("int4", memory=expanded))
    assert note.startswith("dequantized at load: 1,000,000,000 bytes")
    reports, _, _ = judge_all(
        (PASSES,), baseline_name="fp16", variants=(BASELINE, build.variant("int4", memory=expanded))
    )
    assert note in reports[1].validity


def test_a_wider_compute_type_explains_unquantized_weights() -> None:
    wide = build.memory("fp16", weight_bytes_resident=2_000_000_000)
    computed = build.speed("fp16", compute_dtype="float32")
    assert dequantized_at_load(build.variant("fp16", memory=wide)) != ()
    assert dequantized_at_load(build.variant("fp16", memory=wide, speed=computed)) == ()


def test_a_wider_compute_type_explains_only_what_stayed_unquantized() -> None:
    coverage = Coverage(
        linear_weights=400_000_000,
        quantized_weights=400_000_000,
        head_weights=0,
        head_quantized=False,
        embedding_weights=100_000_000,
    )
    checkpoint = build.manifest("int4", coverage=coverage, weight_bytes_on_disk=400_000_000)
    computed = build.speed("int4", compute_dtype="float32")
    for resident, notes in ((650_000_000, 0), (2_000_000_000, 1)):
        memory = build.memory("int4", weight_bytes_resident=resident)
        variant = build.variant("int4", checkpoint=checkpoint, memory=memory, speed=computed)
        assert len(dequantized_at_load(variant)) == notes


def test_a_quantized_baseline_judges_nothing() -> None:
    variants = (build.variant("int8"), build.variant("fp16"))
    _, verdict, because = judge_all((PASSES,), baseline_name="int8", variants=variants)
    assert verdict == "error"
    assert any("int8 can't be the baseline" in reason for reason in because)


def test_a_label_that_is_not_the_checkpoint_s_own_does_not_ship() -> None:
    candidate = build.variant("int4", checkpoint=build.manifest("int8"))
    verdict, findings = judge((PASSES,), baseline=BASELINE, candidate=candidate)
    assert verdict == "no-ship"
    assert any("labelled int4, its checkpoint int8" in finding.because for finding in findings)


def test_a_result_that_the_baseline_is_known_to_lack_is_an_error_beside_an_earlier_run_too() -> None:
    """An optional baseline doesn't count as a candidate there, yet nothing can be said without it."""
    baseline, candidate = build.variant("fp16", required=False), build.variant("int8")
    reports, verdict, because = judge_beside(
        (MinSpeedup(factor=0.9),),
        earlier={"fp16": baseline, "int8": candidate},
        baseline_name="fp16",
        variants=(baseline, candidate),
        missing={"fp16": ("int4: lost",)},
    )
    assert verdict == "error"
    assert {report.verdict for report in reports} == {"error"}
    assert because.count("int4: lost") == 1
