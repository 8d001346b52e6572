"""A candidate is held against the version promoted last, on the same machine and the same documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.errors import UsageError
from pipeline.gate import judge
from pipeline.promoted import (
    Promoted,
    PromotedBefore,
    keep_promoted,
    last_promoted,
    promoted_noise,
    promoted_results,
)
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import LEAST_LIMIT
from pipeline.rules.max_memory import MaxMemory
from pipeline.rules.no_regression import NoRegression, with_promoted
from pipeline.store import Store
from tests import result_builders as build
from tests.promotion_support import quality

BASELINE = build.variant("fp16")
HERE = "machine-a"


def shipped(results: VariantResults, **fields: Any) -> Promoted:
    values: dict[str, Any] = {
        "name": "tiny.tiny--model",
        "version": "3",
        "alias": "shippable",
        "promoted_at": "2026-02-03T04:05:06+00:00",
        "run_started_at": "2026-02-03T03:05:06+00:00",
        "run_key": "d" * 64,
        "machine": HERE,
        "results": promoted_results(build.variant_report(results)),
    }
    return Promoted(**{**values, **fields})


def findings(
    rule: NoRegression, before: Promoted | None, candidate: VariantResults, machine: str | None = HERE
) -> dict[str, Finding]:
    versions = {} if before is None else {before.alias: before}
    bound = rule.beside(PromotedBefore(versions=versions), machine=machine)
    found = bound.judge(baseline=BASELINE, candidate=candidate)
    assert {one.rule for one in found} == {"no_regression"}
    return {one.subject: one for one in found}


def faster(factor: float) -> VariantResults:
    row = build.speed_row(1, 40.0 * factor)
    return build.variant("int8", speed=build.speed("int8", rows=(row,)))


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.5, "pass"), (1.0, "pass"), (0.96, "pass"), (0.94, "fail"), (0.5, "fail")]
)
def test_decoding_may_be_slower_by_the_tolerance_only(factor: float, outcome: str) -> None:
    found = findings(NoRegression(), shipped(faster(1.0)), faster(factor))
    assert (found["speed"].outcome, found["memory"].outcome) == (outcome, "pass")
    assert found["speed"].observed == pytest.approx(factor)
    assert found["speed"].because.startswith("with int8 promoted as version 3 on 2026-02-03 as the baseline")


def test_weights_may_not_grow_beyond_the_tolerance() -> None:
    larger = build.variant("int8", memory=build.memory("int8", weight_bytes_resident=510_000_000))
    before = shipped(build.variant("int8"))
    assert findings(NoRegression(), before, larger)["memory"].outcome == "fail"
    assert findings(NoRegression(larger_percent=3.0), before, larger)["memory"].outcome == "pass"
    assert set(findings(NoRegression(larger_percent=None), before, larger)) == {"speed"}


def test_quality_is_judged_on_the_promoted_versions_own_answers() -> None:
    old, same = build.paired_answers(both_right=380, lost=1, gained=1, both_wrong=118)
    _, worse = build.paired_answers(both_right=330, lost=51, gained=1, both_wrong=118)
    before = shipped(build.variant("int8", quality=quality(old)))
    rule = NoRegression(points=2.0)
    for answers, outcome in ((same, "pass"), (worse, "fail")):
        found = findings(rule, before, build.variant("int8", quality=quality(answers)))
        assert found["piqa"].outcome == outcome
    other = build.variant("int8", quality=quality(old, name="copa"))
    assert {one.outcome for one in findings(rule, before, other).values()} == {"pass", "missing"}
    assert findings(rule, before, build.variant("int8"))[""].outcome == "missing"


@pytest.mark.parametrize("machine", ["machine-b", None])
def test_speed_of_another_machine_is_missing_and_never_a_pass(machine: str | None) -> None:
    found = findings(NoRegression(), shipped(faster(1.0)), faster(3.0), machine=machine)
    assert (found["speed"].outcome, found["memory"].outcome) == ("missing", "pass")
    unknown = shipped(faster(1.0), machine=None)
    assert findings(NoRegression(), unknown, faster(3.0), machine=None)["speed"].outcome == "missing"


def test_a_loss_that_came_with_a_new_library_is_found_and_the_library_named() -> None:
    old = build.manifest("int8", versions={"torch": "2.12.0"})
    before = shipped(faster(1.0).model_copy(update={"checkpoint": old}))
    found = findings(NoRegression(), before, faster(0.9))
    assert found["speed"].outcome == "fail"
    assert "on 2026-02-03 (with torch 2.12.0) as the baseline" in found["speed"].because


def test_without_a_promoted_version_nothing_ships_unless_the_recipe_says_it_is_the_first() -> None:
    for rule, verdict in ((NoRegression(), "error"), (NoRegression(first="pass"), "ship")):
        rules = with_promoted((MaxMemory(fraction=0.6), rule), promoted=PromotedBefore(), machine=HERE)
        found, _ = judge(rules, baseline=BASELINE, candidate=faster(1.0))
        assert found == verdict


def test_a_registry_that_cannot_be_asked_is_told_and_never_taken_for_a_first_time() -> None:
    away = PromotedBefore(not_asked="the registry at http://there:1 couldn't be asked: no route")
    first = NoRegression(first="pass").beside(away, machine=HERE)
    (finding,) = first.judge(baseline=BASELINE, candidate=faster(1.0))
    assert finding.outcome == "missing"
    assert "no route" in finding.because
    kept = away.model_copy(update={"versions": {"shippable": shipped(faster(1.0))}})
    for finding in NoRegression().beside(kept, machine=HERE).judge(baseline=BASELINE, candidate=faster(1.0)):
        assert finding.outcome == "pass"
        assert "no route; this is the last one promoted with this store" in finding.because


def test_another_model_of_the_same_name_is_never_a_predecessor() -> None:
    """Two folders of weights may have one name; a smaller model is neither faster nor worse than it was before."""
    other = build.manifest("int8", parameters=build.PARAMETERS // 2)
    before = shipped(faster(1.0).model_copy(update={"checkpoint": other}))
    for rule in (NoRegression(), NoRegression(first="pass"), NoRegression(points=2.0)):
        found = findings(rule, before, faster(3.0))
        assert [one.outcome for one in found.values()] == ["missing"]
        assert "another model: 250,000,000 parameters there, 500,000,000 here" in found[""].because


def test_a_rule_that_nobody_gave_a_version_to_is_missing() -> None:
    (finding,) = NoRegression().judge(baseline=BASELINE, candidate=build.variant("int8"))
    assert finding.outcome == "missing"


def test_each_rule_gets_the_version_of_its_own_alias() -> None:
    slow = shipped(faster(0.8), alias="champion", version="1")
    fast = shipped(faster(1.2), version="9")
    rules = with_promoted(
        (NoRegression(against="champion"), NoRegression()),
        promoted=PromotedBefore(versions={"champion": slow, "shippable": fast}),
        machine=HERE,
    )
    outcomes = [rule.judge(baseline=BASELINE, candidate=faster(1.0))[0].outcome for rule in rules]
    assert outcomes == ["pass", "fail"]


def test_what_is_kept_is_read_back_equal_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    store, one = Store(tmp_path), shipped(build.variant("int8"))
    path = keep_promoted(store, one)
    assert last_promoted(store, recipe="recipes/tiny.yaml", model="tiny/model") == {"shippable": one}
    assert last_promoted(store, recipe="recipes/other.yaml", model="tiny/model") == {}
    path.write_text(path.read_text("utf-8")[:-20], encoding="utf-8")
    with pytest.raises(UsageError, match=r"shippable\.json"):
        last_promoted(store, recipe="recipes/tiny.yaml", model="tiny/model")


def test_tolerances_at_their_ends_are_judged() -> None:
    before = shipped(build.variant("int8", quality=quality([1.0] * 380 + [0.0] * 120)))
    candidate = build.variant("int8", quality=quality([1.0] * 379 + [0.0] * 121))
    rule = NoRegression(slower_percent=0.0, larger_percent=899.0, points=LEAST_LIMIT)
    found = findings(rule, before, candidate)
    assert {name: one.outcome for name, one in found.items()} == {
        "speed": "pass",
        "memory": "pass",
        "piqa": "inconclusive",
    }
    for field in ({"points": LEAST_LIMIT / 2}, {"larger_percent": 900.0}):
        with pytest.raises(ValidationError):
            NoRegression.model_validate(field)


def test_a_rule_that_judges_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one of"):
        NoRegression(slower_percent=None, larger_percent=None)


def noisy_baseline(right: list[float], again: list[float]) -> VariantResults:
    return build.variant(
        "fp16", quality=quality(right), null_quality=quality(again).model_copy(update={"batch_size": 1})
    )


def test_a_drop_within_the_noise_of_either_run_decides_nothing() -> None:
    right, again = build.paired_answers(both_right=370, lost=12, gained=0, both_wrong=118)
    noisy, quiet = noisy_baseline(right, again), build.variant("fp16", quality=quality(right))
    candidate = build.variant("int8", quality=quality(right))
    report = build.report(build.variant_report(noisy), build.variant_report(candidate))
    kept = promoted_noise(report)
    assert kept is not None
    assert [one.floor for one in kept] == [12 / 500]
    for noise, now, points, outcome in (
        ((), quiet, 2.0, "pass"),
        (kept, quiet, 2.0, "inconclusive"),
        ((), noisy, 2.0, "inconclusive"),
        (kept, noisy, 3.0, "pass"),
    ):
        bound = NoRegression(points=points).beside(
            PromotedBefore(versions={"shippable": shipped(candidate, noise=noise)}), machine=HERE
        )
        found = {one.subject: one for one in bound.judge(baseline=now, candidate=candidate)}
        assert (found["speed"].outcome, found["memory"].outcome) == ("pass", "pass")
        assert found["piqa"].outcome == outcome
        assert ("noise floor is 2.4 points" in found["piqa"].because) == (outcome == "inconclusive")


def test_a_record_from_before_noise_was_kept_is_read_and_says_that_it_is_unknown(tmp_path: Path) -> None:
    right, _ = build.paired_answers(both_right=380, lost=1, gained=1, both_wrong=118)
    candidate = build.variant("int8", quality=quality(right))
    store = Store(tmp_path)
    path = keep_promoted(store, shipped(candidate))
    data = json.loads(path.read_text("utf-8"))
    del data["noise"]
    path.write_text(json.dumps(data), encoding="utf-8")
    (old,) = last_promoted(store, recipe="recipes/tiny.yaml", model="tiny/model").values()
    assert old.noise is None
    found = findings(NoRegression(points=2.0), old, candidate)
    assert "noise of the promoted version's run isn't known" in found["piqa"].because
    assert "noise" not in found["speed"].because + found["memory"].because
    known = findings(NoRegression(points=2.0), shipped(candidate, noise=()), candidate)
    assert "isn't known" not in known["piqa"].because
