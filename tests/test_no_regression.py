"""A candidate is held against the version promoted last, on the same machine and the same documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UsageError
from pipeline.gate import judge
from pipeline.promoted import Promoted, keep_promoted, last_promoted, promoted_results
from pipeline.results import Finding, VariantResults
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
    found = rule.beside(before, machine=machine).judge(baseline=BASELINE, candidate=candidate)
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
        rules = with_promoted((MaxMemory(fraction=0.6), rule), promoted={}, machine=HERE)
        found, _ = judge(rules, baseline=BASELINE, candidate=faster(1.0))
        assert found == verdict


def test_a_rule_that_nobody_gave_a_version_to_is_missing() -> None:
    (finding,) = NoRegression().judge(baseline=BASELINE, candidate=build.variant("int8"))
    assert finding.outcome == "missing"


def test_each_rule_gets_the_version_of_its_own_alias() -> None:
    slow = shipped(faster(0.8), alias="champion", version="1")
    fast = shipped(faster(1.2), version="9")
    rules = with_promoted(
        (NoRegression(against="champion"), NoRegression()),
        promoted={"champion": slow, "shippable": fast},
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


def test_a_rule_that_judges_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one of"):
        NoRegression(slower_percent=None, larger_percent=None)
