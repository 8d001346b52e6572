"""The order of turns: warm-up, alternation, noise, failures and drift, on scripted sessions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.alternation import ShapeTiming, TimingPlan, TurnResult, drift_percent, time_in_turn
from pipeline.energy import Unmetered
from pipeline.measure import is_noisy
from pipeline.scripted_engine import ScriptedSession
from pipeline.speed_results import SpeedShape, SpeedTest
from pipeline.stages import take_turn


class ScriptedTurn:
    """A turn over a scripted session; `log` gets (name, batch size, seed) of every run."""

    def __init__(
        self,
        name: str,
        log: list[tuple[str, int, int]],
        *,
        session: ScriptedSession | None = None,
        refuses: Callable[[int, int], TurnResult | None] = lambda _batch, _run: None,
    ) -> None:
        self.name, self.log = name, log
        self.session = session or ScriptedSession()
        self._refuses = refuses

    def run(self, shape: SpeedShape, *, seed: int) -> TurnResult:
        self.log.append((self.name, shape.batch_size, seed))
        runs = sum(entry[:2] == (self.name, shape.batch_size) for entry in self.log)
        refused = self._refuses(shape.batch_size, runs)
        return refused or take_turn(
            self.session, shape=shape, seed=seed, clock=self.session.clock, meter=Unmetered("no device")
        )


def shape(
    batch_size: int = 1, *, prompt_tokens: int = 8, new_tokens: int = 3, test: SpeedTest = "batch"
) -> SpeedShape:
    return SpeedShape(batch_size=batch_size, prompt_tokens=prompt_tokens, new_tokens=new_tokens, test=test)


def plan(*sizes: int, **fields: object) -> TimingPlan:
    return TimingPlan.model_validate(
        {
            "shapes": tuple(shape(size) for size in sizes or (1, 4)),
            "warmup": 2,
            "repeats": 3,
            "min_seconds": 0.0,
            "max_cv_percent": 5.0,
            **fields,
        }
    )


def test_variants_take_turns_and_every_shape_is_warmed_up_first() -> None:
    log: list[tuple[str, int, int]] = []
    turns = {name: ScriptedTurn(name, log) for name in ("fp16", "int8")}
    told: list[str] = []
    timings = time_in_turn(turns, plan=plan(), progress=told.append)
    assert [entry[:2] for entry in log] == [
        (name, size) for size in (1, 4) for _ in range(5) for name in turns
    ]
    assert told[:4:2] == ["fp16: pp8+tg3, batch 1, warm-up"] * 2
    for timed in timings.values():
        assert [(len(timing.warmup_s), len(timing.traces)) for timing in timed] == [(2, 3), (2, 3)]


def test_no_two_runs_of_a_variant_share_a_prompt() -> None:
    log: list[tuple[str, int, int]] = []
    turn = ScriptedTurn("fp16", log)
    time_in_turn({"fp16": turn}, plan=plan(1, 2, 4), progress=lambda _: None)
    time_in_turn({"fp16": turn}, plan=plan(seed=1_000_000), progress=lambda _: None)
    assert len({seed for _, _, seed in log}) == len(log)
    prompts = [prompt for batch in turn.session.prompts for prompt in batch]
    assert len(set(prompts)) == len(prompts)


def test_a_prefix_cache_never_makes_a_repeat_cheaper() -> None:
    session = ScriptedSession(play="free_for_seen_prompts")
    turn = ScriptedTurn("fp16", [], session=session)
    timings = time_in_turn({"fp16": turn}, plan=plan(1, 2, 8), progress=lambda _: None)
    for timing in timings["fp16"]:
        assert [trace.ttft_s for trace in timing.traces] == pytest.approx([0.5] * 3)


def test_a_noisy_set_gets_as_many_repeats_again_and_is_then_left_noisy() -> None:
    session = ScriptedSession(prefill_s=[0.5, 1.5] * 20)
    turn = ScriptedTurn("int8", [], session=session)
    calm = ScriptedTurn("fp16", [])
    timings = time_in_turn({"fp16": calm, "int8": turn}, plan=plan(1), progress=lambda _: None)
    assert len(timings["int8"][0].traces) == 6
    assert is_noisy(timings["int8"][0].traces, max_cv_percent=5.0)
    assert len(timings["fp16"][0].traces) == 3


def test_repeats_go_on_until_the_minimum_time_is_reached() -> None:
    timings = time_in_turn(
        {"fp16": ScriptedTurn("fp16", [])},
        plan=plan(1, min_seconds=9.5 * 0.52),
        progress=lambda _: None,
    )
    assert len(timings["fp16"][0].traces) == 10


@pytest.mark.parametrize(
    ("second_s", "min_seconds", "repeats"),
    [
        (0.50, 0.0, 3),  # calm: as many as asked for
        (0.56, 0.0, 5),  # a spread of 5.4 %, of 5.04 % with one more, of 4.7 % with two more
        (0.50, 2.2, 5),  # calm, but too short until the fifth
        (0.56, 2.9, 6),  # both: calm with the fifth, long enough with the sixth
        (1.50, 0.0, 6),  # never calm: twice as many, and marked
    ],
)
def test_repeats_go_on_until_both_the_time_and_the_spread_are_enough(
    second_s: float, min_seconds: float, repeats: int
) -> None:
    times = [9.0, 9.0, 0.5, second_s, *[0.5] * 20]
    session = ScriptedSession(prefill_s=times)
    timings = time_in_turn(
        {"fp16": ScriptedTurn("fp16", [], session=session)},
        plan=plan(shapes=(shape(new_tokens=1, test="prefill"),), min_seconds=min_seconds),
        progress=lambda _: None,
    )["fp16"][0]
    assert [trace.ttft_s for trace in timings.traces] == pytest.approx(times[2 : 2 + repeats])
    assert timings.warmup_s == [9.0, 9.0], "compilation and cold caches stand apart"
    assert is_noisy(timings.traces, max_cv_percent=5.0) == (second_s == 1.5)


def test_the_minimum_time_is_no_reason_to_go_on_for_ever() -> None:
    timings = time_in_turn(
        {"fp16": ScriptedTurn("fp16", [])},
        plan=plan(1, min_seconds=1e9),
        progress=lambda _: None,
    )
    assert len(timings["fp16"][0].traces) == 50


def test_a_recipe_gets_all_the_repeats_it_asks_for() -> None:
    timings = time_in_turn(
        {"fp16": ScriptedTurn("fp16", [])}, plan=plan(1, repeats=130), progress=lambda _: None
    )
    assert len(timings["fp16"][0].traces) == 130


def test_a_failing_variant_does_not_stop_the_others() -> None:
    def breaks(_batch: int, run: int) -> TurnResult | None:
        return TurnResult(outcome="failed", because="ValueError: broken") if run == 4 else None

    log: list[tuple[str, int, int]] = []
    turns = {"int8": ScriptedTurn("int8", log, refuses=breaks), "fp16": ScriptedTurn("fp16", log)}
    timings = time_in_turn(turns, plan=plan(), progress=lambda _: None)
    for timing in timings["int8"]:
        assert timing.failure is not None
        assert timing.failure.because == "ValueError: broken"
    assert [len(timing.traces) for timing in timings["fp16"]] == [3, 3]
    assert (
        sum(entry[0] == "int8" for entry in log) == 8
    )  # four runs a shape: a failed shape isn't tried again


def test_out_of_memory_is_the_outcome_of_one_batch_size() -> None:
    def too_large(batch: int, _run: int) -> TurnResult | None:
        return TurnResult(outcome="out_of_memory", because="no room") if batch > 1 else None

    turn = ScriptedTurn("fp16", [], refuses=too_large)
    small, large = time_in_turn({"fp16": turn}, plan=plan(), progress=lambda _: None)["fp16"]
    assert small.failure is None
    assert len(small.traces) == 3
    assert large.failure is not None
    assert large.failure.outcome == "out_of_memory"
    assert not large.traces


def test_drift_is_how_much_slower_the_baseline_became() -> None:
    def timed(step_s: float) -> ShapeTiming:
        turn = ScriptedTurn("fp16", [], session=ScriptedSession(step_s=(step_s,)))
        return time_in_turn({"fp16": turn}, plan=plan(), progress=lambda _: None)["fp16"][0]

    assert drift_percent(timed(0.10), timed(0.11)) == pytest.approx(10.0)
    assert drift_percent(timed(0.10), timed(0.08)) == pytest.approx(-20.0)
    assert drift_percent(timed(0.10), ShapeTiming(shape())) is None


# --- prompt lengths and depths ---------------------------------------------------------------------------


def test_prefill_and_depth_are_timed_like_batches_at_their_own_lengths() -> None:
    """A prompt token takes 1 ms, a step 10 ms and 10 µs for each token held."""
    session = ScriptedSession(
        prefill_s=(0.0,), s_per_prompt_token=1e-3, step_s=(0.010,), s_per_held_token=1e-5
    )
    log: list[tuple[str, int, int]] = []
    shapes = (
        shape(2),
        shape(prompt_tokens=128, new_tokens=1, test="prefill"),
        shape(prompt_tokens=1000, new_tokens=3, test="depth"),
    )
    turns = {"fp16": ScriptedTurn("fp16", log, session=session), "int8": ScriptedTurn("int8", log)}
    batch, prefill, depth = time_in_turn(turns, plan=plan(shapes=shapes), progress=lambda _: None)["fp16"]
    assert [entry[0] for entry in log] == ["fp16", "int8"] * 15, "two warm-ups and three repeats of each"
    assert [len(timing.traces) for timing in (batch, prefill, depth)] == [3, 3, 3]
    assert [trace.ttft_s for trace in prefill.traces] == pytest.approx([0.128] * 3)
    assert [trace.tpot_s for trace in prefill.traces] == [None] * 3
    assert [trace.tpot_s for trace in depth.traces] == pytest.approx([0.010 + 1001.5e-5] * 3)
    prompts = [prompt for batch in session.prompts for prompt in batch]
    assert len(set(prompts)) == len(prompts)


def test_a_prefill_in_chunks_is_one_time_up_to_the_first_token() -> None:
    """A prompt token takes 1 ms, a piece 10 ms besides."""
    session = ScriptedSession(prefill_s=(0.0,), s_per_prompt_token=1e-3, s_per_chunk=0.010)
    whole = shape(prompt_tokens=1000, new_tokens=1, test="prefill")
    shapes = (whole, whole.model_copy(update={"chunk_tokens": 300}))
    timings = time_in_turn(
        {"fp16": ScriptedTurn("fp16", [], session=session)}, plan=plan(shapes=shapes), progress=lambda _: None
    )
    one, four = ([trace.ttft_s for trace in timing.traces] for timing in timings["fp16"])
    assert one == pytest.approx([1.010] * 3)
    assert four == pytest.approx([1.040] * 3)


def test_a_length_that_does_not_fit_is_out_of_memory_and_the_next_shape_runs() -> None:
    turn = ScriptedTurn("fp16", [], session=ScriptedSession(most_tokens=100))
    shapes = (shape(prompt_tokens=99, new_tokens=5, test="depth"), shape(prompt_tokens=99, new_tokens=2))
    late, fits = time_in_turn({"fp16": turn}, plan=plan(shapes=shapes), progress=lambda _: None)["fp16"]
    assert late.failure is not None
    assert (late.failure.outcome, late.traces) == ("out_of_memory", [])
    assert len(fits.traces) == 3
