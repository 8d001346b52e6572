"""Which variant is picked of those that ship, and which trades nobody beats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.pick import pick_variant
from pipeline.pick_results import Preference
from pipeline.quality_change import HELD_PERPLEXITY, SCORES, TASK_PERPLEXITY, quality_change, shared_changes
from pipeline.results import CostResult, VariantReport
from tests import result_builders as build


def shipping(
    name: str, *, decode: float | None = 40.0, resident: int = 500, right: int = 80, **fields: Any
) -> VariantReport:
    """A candidate with `right` of 100 documents answered rightly, which ships unless told otherwise."""
    memory = build.memory("int8", weight_bytes_resident=resident)
    rows = [build.speed_row(1, decode)] if decode else [build.speed_row(1, None, outcome="void")]
    answers = build.task(values=[1.0] * right + [0.0] * (100 - right))
    results = build.variant(
        name,
        "int8",
        speed=build.speed("int8", rows=rows, memory=memory),
        memory=memory,
        quality=build.quality(answers),
    )
    return build.variant_report(results, **fields)


def picked(*candidates: VariantReport, prefer: Preference | None = None) -> Any:
    baseline = shipping("fp16", decode=20.0, resident=1000)
    return pick_variant((baseline, *candidates), baseline_name="fp16", prefer=prefer)


@pytest.mark.parametrize(
    ("prefer", "best"), [("fastest", "quick"), ("smallest", "small"), ("best_quality", "good")]
)
def test_each_preference_names_the_best_by_its_figure(prefer: Preference, best: str) -> None:
    candidates = (
        shipping("quick", decode=90.0, resident=900, right=60),
        shipping("small", decode=30.0, resident=300, right=60),
        shipping("good", decode=30.0, resident=900, right=79),
    )
    pick = picked(*candidates, prefer=prefer)
    assert (pick.variant, pick.tied) == (best, ())
    assert pick.front == ("quick", "small", "good")


def priced(name: str, dollars: float | None, *, decode: float = 40.0) -> VariantReport:
    """At the price of an hour that comes to so much at its rate."""
    hour = decode * 3600 * (dollars or 1.0) / 1e6
    cost = CostResult(dollars_per_hour=hour, batch_size=1, dollars_per_million_output_tokens=dollars)
    return shipping(name, decode=decode).model_copy(update={"cost": cost})


def test_the_cheapest_is_that_of_the_lowest_price_and_a_missing_price_never_wins() -> None:
    pick = picked(
        priced("none", None, decode=99.0), priced("dear", 3.0), priced("cheap", 1.0), prefer="cheapest"
    )
    assert pick.variant == "cheap"
    assert "$1" in pick.because


def test_a_stored_price_that_its_rate_denies_never_wins() -> None:
    wrong = priced("wrong", 1.0)
    assert wrong.cost is not None
    cheap = wrong.cost.model_copy(update={"dollars_per_million_output_tokens": 1e-4})
    pick = picked(wrong.model_copy(update={"cost": cheap}), priced("right", 3.0), prefer="cheapest")
    assert (pick.variant, pick.tied, pick.within_noise) == ("right", (), ())


@pytest.mark.parametrize("verdict", ["no-ship", "inconclusive", "error"])
def test_what_does_not_ship_is_never_picked(verdict: str) -> None:
    best = shipping("best", decode=900.0, verdict=verdict)
    assert picked(best, shipping("other"), prefer="fastest").variant == "other"
    nothing = picked(best, prefer="fastest")
    assert (nothing.variant, nothing.trades, nothing.because) == (None, (), "no candidate ships")


def test_the_baseline_is_never_picked_however_good_its_answers_are() -> None:
    assert picked(shipping("int8", right=70), prefer="best_quality").variant == "int8"


def test_an_optional_variant_that_ships_can_be_picked() -> None:
    optional = shipping("extra", decode=90.0).model_copy(update={"required": False})
    assert picked(optional, shipping("int8"), prefer="fastest").variant == "extra"


def test_void_and_implausible_figures_never_win() -> None:
    impossible = build.speed_row(1, 500.0, bandwidth_share=3.0)
    wrong = shipping("wrong")
    assert wrong.speed is not None
    wrong = wrong.model_copy(update={"speed": wrong.speed.model_copy(update={"rows": (impossible,)})})
    pick = picked(shipping("void", decode=None), wrong, shipping("honest", decode=21.0), prefer="fastest")
    assert pick.variant == "honest"
    assert {trade.variant: trade.decode_tokens_per_s for trade in pick.trades} == {
        "void": None,
        "wrong": None,
        "honest": 21.0,
    }


def test_a_preference_that_nobody_was_measured_for_picks_nothing_and_says_so() -> None:
    pick = picked(shipping("a", decode=None), shipping("b", decode=None), prefer="fastest")
    assert pick.variant is None
    assert "measured of no candidate" in pick.because


def test_a_tie_is_said_and_the_first_of_the_recipe_named() -> None:
    pick = picked(shipping("a", resident=500), shipping("b", resident=500), prefer="smallest")
    assert (pick.variant, pick.tied) == ("a", ("b",))
    assert "the same as b" in pick.because


def test_two_whose_figures_differ_within_noise_are_told_as_such() -> None:
    pick = picked(shipping("a", decode=40.0), shipping("b", decode=40.4), prefer="fastest")
    assert (pick.variant, pick.within_noise) == ("b", ("a",))
    assert "a within noise" in pick.because
    assert picked(shipping("a", decode=40.0), shipping("b", decode=60.0), prefer="fastest").within_noise == ()


def test_without_a_preference_only_the_front_is_told() -> None:
    pick = picked(shipping("a"), shipping("b", decode=80.0, resident=400))
    assert (pick.variant, pick.front) == (None, ("b",))
    assert {trade.variant: trade.beaten_by for trade in pick.trades} == {"a": "b", "b": None}


def test_the_only_one_that_ships_needs_no_preference() -> None:
    pick = picked(shipping("a"), shipping("b", verdict="no-ship"))
    assert (pick.variant, pick.because) == ("a", "the only candidate that ships")


def test_who_is_worse_within_noise_only_stays_on_the_front() -> None:
    assert picked(shipping("a", decode=40.0), shipping("b", decode=40.4)).front == ("a", "b")


def test_a_variant_without_a_figure_is_beaten_by_one_that_has_it() -> None:
    assert picked(shipping("a", decode=None), shipping("b")).front == ("b",)


# --- one figure for quality ------------------------------------------------------------------------------


def test_scores_are_the_mean_over_tasks_of_the_paired_difference_in_points() -> None:
    before = build.variant(
        "fp16", quality=build.quality(build.task("a", [1] * 10), build.task("b", [1] * 20))
    )
    after = build.variant(
        "int8",
        quality=build.quality(build.task("a", [1] * 9 + [0]), build.task("b", [1] * 15 + [0] * 5)),
    )
    change = quality_change(after, baseline=before)
    assert change is not None
    assert change.value == pytest.approx(-(10 + 25) / 2)
    assert change.unit == SCORES
    assert change.low is not None
    assert change.high is not None
    assert change.low < change.value < change.high


def test_the_tasks_of_a_group_count_as_one_by_their_documents() -> None:
    def arm(first: Sequence[float], second: Sequence[float], third: Sequence[float]) -> Any:
        tasks = [build.task(name, values) for name, values in zip("abc", (first, second, third), strict=True)]
        return build.quality(*tasks, groups={"g": ("a", "b")})

    before = build.variant("fp16", quality=arm([1] * 10, [1] * 30, [1] * 10))
    after = build.variant("int8", quality=arm([0] * 2 + [1] * 8, [1] * 30, [0] + [1] * 9))
    change = quality_change(after, baseline=before)
    assert change is not None
    assert change.value == pytest.approx(-(100 * 2 / 40 + 10) / 2)


def test_perplexity_stands_in_where_nothing_is_scored() -> None:
    before = build.variant("fp16", quality=build.quality(build.rolling_task(nats=(230.0, 345.0))))
    after = build.variant("int8", quality=build.quality(build.rolling_task(nats=(232.0, 347.0))))
    change = quality_change(after, baseline=before)
    assert change is not None
    assert change.unit == TASK_PERPLEXITY != HELD_PERPLEXITY
    assert change.value == pytest.approx(-2.0201, abs=1e-3)  # exp(4 nats ÷ 200 tokens) − 1


def test_the_unit_of_quality_is_the_one_that_most_candidates_have() -> None:
    passages = build.rolling_task(nats=(230.0, 345.0))
    before = build.variant("fp16", quality=build.quality(build.task("a", [1] * 10), passages))
    both = build.quality(build.task("a", [1] * 9 + [0]), build.rolling_task(nats=(232.0, 347.0)))
    void = build.quality(build.task("a", [1] * 10, void="cut"), build.rolling_task(nats=(240.0, 350.0)))
    arms = [
        build.variant_report(build.variant(name, "int8", quality=quality))
        for name, quality in (("scored", both), ("x", void), ("y", void))
    ]
    pick = pick_variant([build.variant_report(before), *arms], baseline_name="fp16", prefer="best_quality")
    assert pick.quality_unit == TASK_PERPLEXITY
    assert pick.variant == "scored"
    assert all(trade.quality is not None for trade in pick.trades)


def test_of_two_units_that_as_many_have_scores_are_shown() -> None:
    def quality(right: int, nats: float) -> Any:
        return build.quality(
            build.task("a", [1] * right + [0] * (10 - right)), build.rolling_task(nats=(nats, nats))
        )

    before = build.variant("fp16", quality=quality(10, 230.0))
    found = shared_changes([build.variant("int8", quality=quality(9, 231.0))], baseline=before)
    assert found["int8"].unit == SCORES
    found = shared_changes(
        [build.variant("int8", quality=quality(9, 231.0))], baseline=before, by_perplexity=True
    )
    assert found["int8"].unit == TASK_PERPLEXITY


def test_speed_is_that_of_the_smallest_batch_whatever_the_order_of_the_recipe() -> None:
    def arm(name: str, small: float, large: float) -> Any:
        rows = [build.speed_row(8, large), build.speed_row(1, small)]
        return build.variant_report(build.variant(name, "int8", speed=build.speed("int8", rows)))

    pick = pick_variant(
        [arm("fp16", 20.0, 80.0), arm("a", 40.0, 90.0), arm("b", 30.0, 200.0)],
        baseline_name="fp16",
        prefer="fastest",
    )
    assert pick.variant == "a"
    assert "at batch size 1" in pick.because


def test_what_was_asked_in_another_way_gives_no_figure() -> None:
    before = build.variant("fp16", quality=build.quality(build.task()))
    after = build.variant("int8", quality=build.quality(build.task(), seed=7))
    assert quality_change(after, baseline=before) is None
    assert quality_change(build.variant("int8"), baseline=before) is None
