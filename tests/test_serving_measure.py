"""The clock around serving and the figures made of it, computed by hand on scripted clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.engines.base import ServedStep
from pipeline.fleet import Targets
from pipeline.scheduler import Serving
from pipeline.scripted_serving import ScriptedModel, ScriptedServing
from pipeline.serving_measure import (
    PrefixTrace,
    ServingTrace,
    prefill_with_prefix,
    prompts_of,
    serve_continuously,
    serve_statically,
)
from pipeline.serving_results import PrefixRow, ServingCell, ServingRow
from pipeline.serving_summary import (
    fit_serving_steps,
    gain_over_static,
    goodput,
    latency_shares,
    summarise_prefix,
    summarise_serving,
)
from pipeline.traffic import Request

LIMITS = Serving(max_batch_tokens=8, max_sequences=2, block_tokens=4, cache_blocks=16)
THREE = (Request(0.0, 2, 3), Request(0.0, 2, 1), Request(0.0, 2, 2))
CLOSED = ServingCell(mode="continuous", load="closed", concurrency=2)
STATIC = ServingCell(mode="static", load="closed", concurrency=2)
OPEN = ServingCell(mode="continuous", load="open", concurrency=2)


def served(
    requests: Sequence[Request],
    *,
    session: ScriptedServing | None = None,
    concurrency: int = 2,
    arrivals: bool = False,
    seed: int = 1,
) -> ServingTrace:
    """The requests through a scripted engine."""
    session = session or ScriptedServing(LIMITS)
    return serve_continuously(
        session,
        requests,
        prompts=prompts_of(requests, vocabulary_tokens=1000, seed=seed),
        concurrency=concurrency,
        clock=session.clock,
        wait_until=session.clock.wait_until if arrivals else None,
    )


def batched(
    requests: Sequence[Request], *, model: ScriptedModel | None = None, batch_size: int = 2
) -> ServingTrace:
    """The requests through static batches."""
    model = model or ScriptedModel()
    prompts = prompts_of(requests, vocabulary_tokens=1000, seed=1)
    return serve_statically(model, requests, prompts=prompts, batch_size=batch_size, clock=model.clock)


def row(*traces: ServingTrace, cell: ServingCell = CLOSED, **fields: Any) -> ServingRow:
    """Those repeats as a row."""
    settings: dict[str, Any] = {
        "targets": Targets(),
        "memory": None,
        "warmup_s": (),
        "max_cv_percent": 5.0,
        **fields,
    }
    return summarise_serving(traces, cell=cell, **settings)


# --- throughput and latency ------------------------------------------------------------------------------


def test_a_closed_loop_sends_the_next_request_when_one_ends() -> None:
    """Steps of 1 s. A and B at 0; B ends at 1, C is sent then; A and C end at 3."""
    trace = served(THREE)
    assert [one.arrival_s for one in trace.requests] == [0.0, 0.0, 1.0]
    assert [one.token_times_s for one in trace.requests] == [(1.0, 2.0, 3.0), (1.0,), (2.0, 3.0)]
    found = row(trace, trace, trace)
    assert found.outcome == "measured"
    assert found.duration_s is not None
    assert found.duration_s.samples == (3.0, 3.0, 3.0)
    assert found.output_tokens_per_s is not None
    assert found.output_tokens_per_s.median == 2.0
    assert (found.input_tokens_per_s, found.requests_per_s) == (2.0, 1.0)
    assert found.ttft_s is not None
    assert (found.ttft_s.count, found.ttft_s.mean, found.ttft_s.p99) == (9, 1.0, 1.0)
    assert found.tpot_s is not None
    assert found.tpot_s.count == 6, "a request of one token has no TPOT"
    assert found.itl_s is not None
    assert (found.itl_s.count, found.itl_s.p50) == (9, 1.0)
    assert found.latency_s is not None
    assert (found.latency_s.mean, found.latency_s.p50) == (2.0, 2.0)
    assert (found.steps, found.mean_batch, found.prefill_tokens, found.preemptions) == (3, 2.0, 6, 0)


def test_a_static_batch_runs_until_its_longest_answer_is_done_and_counts_wanted_tokens_only() -> None:
    """A and B: prefill to 1, steps to 2 and 3, B's extra tokens unwanted. C alone: 4 and 5. 6 tokens in 5 s."""
    trace = batched(THREE)
    assert [one.token_times_s for one in trace.requests] == [(1.0, 2.0, 3.0), (1.0,), (4.0, 5.0)]
    assert [one.arrival_s for one in trace.requests] == [0.0, 0.0, 3.0]
    found = row(trace, cell=STATIC)
    assert found.output_tokens_per_s is not None
    assert found.output_tokens_per_s.median == pytest.approx(1.2)
    assert found.input_tokens_per_s == pytest.approx(1.2)
    assert found.ttft_s is not None
    assert found.ttft_s.mean == 1.0, "from the start of the request's own batch"
    assert (found.steps, found.prefill_tokens) == (5, 6)
    assert found.mean_batch == pytest.approx(1.2)


def test_padding_of_shorter_prompts_is_in_no_figure() -> None:
    model = ScriptedModel()
    trace = batched((Request(0.0, 9, 1), Request(0.0, 1, 1)), model=model)
    assert model.batches == [(9, 1)]
    assert trace.input_tokens == 10
    assert row(trace, cell=STATIC).input_tokens_per_s == 10.0


def test_the_gain_is_the_ratio_of_output_rates_repeat_by_repeat() -> None:
    gain = gain_over_static([served(THREE)] * 3, [batched(THREE)] * 3)
    assert gain is not None
    assert gain.samples == pytest.approx((2 / 1.2,) * 3)
    assert gain_over_static([], []) is None


def test_a_longer_step_shows_in_the_gaps_of_those_that_decode() -> None:
    """0.5 s a prompt token. A's prompt to 2; B comes at 1.5, its 4 tokens make the next step 3 s long; then 1 s."""
    requests = (Request(0.0, 2, 3), Request(1.5, 4, 1))
    session = ScriptedServing(LIMITS, s_per_prompt_token=0.5)
    found = row(served(requests, session=session, arrivals=True), cell=OPEN)
    assert found.itl_s is not None
    assert (found.itl_s.p50, found.itl_s.p90, found.itl_s.p95, found.itl_s.p99) == pytest.approx(
        (2.0, 2.8, 2.9, 2.98)
    )
    assert found.ttft_s is not None
    assert (found.ttft_s.mean, found.ttft_s.p50) == (2.75, 2.75)
    assert found.wait_s is not None
    assert (found.wait_s.mean, found.wait_s.p99) == pytest.approx((0.25, 0.495))
    assert found.latency_s is not None
    assert found.latency_s.mean == (6.0 + 3.5) / 2


def test_nothing_is_timed_while_no_request_is_there() -> None:
    trace = served((Request(0.0, 2, 1), Request(10.0, 2, 1)), arrivals=True)
    assert [one.arrival_s for one in trace.requests] == [0.0, 10.0]
    assert [one.start_s for one in trace.requests] == [0.0, 10.0]
    assert [step.seconds for step in trace.steps] == [1.0, 1.0]
    assert trace.duration_s == 11.0
    assert trace.mean_batch == 1.0


def test_waiting_prefill_and_decode_are_shares_of_the_latency() -> None:
    """4 tokens a step. A's prompt of 6 takes two steps; B starts in the second and ends in the third."""
    limits = LIMITS.model_copy(update={"max_batch_tokens": 4})
    trace = served((Request(0.0, 6, 2), Request(0.0, 3, 1)), session=ScriptedServing(limits))
    assert [one.start_s for one in trace.requests] == [0.0, 1.0]
    assert [one.token_times_s for one in trace.requests] == [(2.0, 3.0), (3.0,)]
    shares = latency_shares(trace.requests)
    assert shares is not None
    assert (shares.waiting, shares.prefill, shares.decode) == pytest.approx((1 / 6, 4 / 6, 1 / 6))
    assert [step.prefill_tokens for step in trace.steps] == [4, 4, 1]


def test_an_engine_that_does_not_tell_starts_gives_no_wait_and_no_shares() -> None:
    found = row(served(THREE, session=ScriptedServing(LIMITS, tells_starts=False)))
    assert found.outcome == "measured"
    assert (found.wait_s, found.latency_shares) == (None, None)
    assert row(served(THREE), cell=CLOSED).wait_s is not None


def test_goodput_counts_requests_that_meet_every_target() -> None:
    """A: TTFT 2 s, TPOT 2 s; B: TTFT 3.5 s, no TPOT; 6 s in all."""
    requests = (Request(0.0, 2, 3), Request(1.5, 4, 1))
    session = ScriptedServing(LIMITS, s_per_prompt_token=0.5)
    trace = served(requests, session=session, arrivals=True)

    def share(**targets: float) -> tuple[float, float]:
        found = goodput([trace], targets=Targets(**targets))
        assert found is not None
        return found.share, found.requests_per_s

    assert share(ttft_s=3.0) == pytest.approx((0.5, 1 / 6))
    assert share(ttft_s=4.0) == pytest.approx((1.0, 2 / 6))
    assert share(ttft_s=4.0, tpot_s=1.9) == pytest.approx((0.5, 1 / 6))
    assert share(ttft_s=3.0, tpot_s=1.9) == (0.0, 0.0)
    assert goodput([trace], targets=Targets()) is None
    twice_as_slow = served(
        requests, session=ScriptedServing(LIMITS, step_s=2.0, s_per_prompt_token=1.0), arrivals=True
    )
    found = goodput([trace, twice_as_slow], targets=Targets(ttft_s=3.0))
    assert found is not None
    assert (found.share, found.requests_per_s) == pytest.approx((1 / 4, (1 / 6 + 0) / 2)), (
        "the median repeat's"
    )


def test_overload_is_a_queue_that_grows_as_long_as_requests_come() -> None:
    one_at_a_time = LIMITS.model_copy(update={"max_sequences": 1})

    def overloaded(gap_s: float) -> bool | None:
        requests = [Request(gap_s * place, 2, 1) for place in range(60)]
        session = ScriptedServing(one_at_a_time)
        found = row(served(requests, session=session, arrivals=True), cell=OPEN).overloaded

        requests_of_few = requests[:10]
        few = served(requests_of_few, session=ScriptedServing(one_at_a_time), arrivals=True)
        assert row(few, cell=OPEN).overloaded is None, "ten requests can't tell"
        return found

    assert overloaded(0.1) is True
    assert overloaded(2.0) is False
    assert row(served(THREE)).overloaded is None, "a closed loop waits for the engine"


def test_the_spread_over_repeats_marks_a_row_noisy() -> None:
    slower = served(THREE, session=ScriptedServing(LIMITS, step_s=1.5))
    noisy = row(served(THREE), slower)
    assert noisy.output_tokens_per_s is not None
    assert noisy.output_tokens_per_s.samples == pytest.approx((2.0, 6 / 4.5))
    assert noisy.output_tokens_per_s.cv_percent == pytest.approx(20.0)
    assert noisy.noisy
    assert not row(served(THREE), slower, max_cv_percent=21.0).noisy


def test_in_an_open_loop_the_latency_marks_a_row_noisy_because_arrivals_set_the_rate() -> None:
    requests = [Request(10.0 * place, 2, 2) for place in range(3)]
    quick = served(requests, session=ScriptedServing(LIMITS, step_s=1.0), arrivals=True)
    slow = served(requests, session=ScriptedServing(LIMITS, step_s=2.0), arrivals=True)
    found = row(quick, slow, cell=OPEN)
    assert found.output_tokens_per_s is not None
    assert found.output_tokens_per_s.cv_percent < 5.0
    assert found.noisy
    assert not row(quick, quick, cell=OPEN).noisy


def test_raw_times_of_every_request_and_repeat_are_kept() -> None:
    found = row(served(THREE), served(THREE))
    assert [len(repeat) for repeat in found.repeats] == [3, 3]
    last = found.repeats[0][2]
    assert (last.arrival_s, last.start_s, last.first_token_s, last.end_s) == (1.0, 1.0, 2.0, 3.0)
    assert (last.prompt_tokens, last.new_tokens) == (2, 2)


def test_prompts_are_those_of_the_seed_and_have_the_lengths_asked_for() -> None:
    first = prompts_of(THREE, vocabulary_tokens=1000, seed=1)
    assert first == prompts_of(THREE, vocabulary_tokens=1000, seed=1)
    assert first != prompts_of(THREE, vocabulary_tokens=1000, seed=2)
    assert [len(prompt) for prompt in first] == [2, 2, 2]


# --- void ------------------------------------------------------------------------------------------------


class Talkative(ScriptedServing):
    """Gives the first request one token too many."""

    def step(self) -> ServedStep | None:
        step = super().step()
        return step._replace(produced=(*step.produced, 0)) if step else None


class Hanging(ScriptedServing):
    """Always busy, never done."""

    def step(self) -> ServedStep | None:
        self.clock.now_s += 1.0
        return ServedStep((), prefill_tokens=0, decode_sequences=0, cached_tokens=0, pairs=0, preempted=0)


def test_a_request_that_never_finishes_makes_the_row_void() -> None:
    found = row(served(THREE, session=ScriptedServing(LIMITS, loses=1)))
    assert found.outcome == "void"
    assert found.because.startswith("1 of 3 requests never finished: ")
    assert found.output_tokens_per_s is None


def test_an_engine_that_hangs_is_given_up_and_its_row_void() -> None:
    trace = served(THREE, session=Hanging(LIMITS))
    assert len(trace.steps) == 100
    assert row(trace).because.startswith("3 of 3 requests never finished: 0 tokens")


def test_more_tokens_than_asked_for_make_the_row_void() -> None:
    found = row(served((Request(0.0, 2, 3),), session=Talkative(LIMITS)))
    assert (found.outcome, found.because) == ("void", "4 tokens were produced where 3 were asked for")


def test_a_step_that_takes_no_time_makes_the_row_void() -> None:
    found = row(served(THREE, session=ScriptedServing(LIMITS, step_s=0.0)))
    assert found.outcome == "void"
    assert "took no time" in found.because
    assert row(batched(THREE, model=ScriptedModel(step_s=0.0)), cell=STATIC).outcome == "void"


def test_a_prefix_cache_that_helps_makes_the_row_void() -> None:
    session = ScriptedServing(LIMITS, share_prefixes=True)
    requests = (Request(0.0, 8, 1),)
    assert row(served(requests, session=session)).outcome == "measured"
    again = row(served(requests, session=session))
    assert again.outcome == "void"
    assert again.because.startswith("4 prompt tokens were computed where the prompts have 8")


def test_a_void_repeat_gives_no_gain() -> None:
    lost = served(THREE, session=ScriptedServing(LIMITS, loses=1))
    assert gain_over_static([lost], [batched(THREE)]) is None


# --- a cached prefix -------------------------------------------------------------------------------------


def prefix_row(*, prompt_tokens: int = 13, earlier: bool = False, **play: Any) -> PrefixRow:
    """A prefix of 10 tokens and 3 fresh ones, blocks of 4; a step takes 1 s and 0.1 s a prompt token."""
    limits = LIMITS.model_copy(update={"max_batch_tokens": 64})
    session = ScriptedServing(limits, share_prefixes=True, s_per_prompt_token=0.1, **play)
    prompts = [[*range(10), *range(place, place + prompt_tokens - 10)] for place in (20, 30, 40)]
    if earlier:
        prefill_with_prefix(session, prompts=prompts[:1], clock=session.clock)
    trace = prefill_with_prefix(session, prompts=prompts, clock=session.clock)
    return summarise_prefix([trace], prefix_tokens=10, fresh_tokens=3, max_cv_percent=5.0)


def test_a_prefix_whose_times_spread_over_repeats_is_marked_noisy() -> None:
    def marked(cold_s: float, cached_s: float) -> bool:
        traces = [
            PrefixTrace(ttft_s=times_s, computed_tokens=(13, 3, 3), produced=(2, 2, 2))
            for times_s in ((1.0, 0.5, 0.5), (cold_s, cached_s, cached_s))
        ]
        found = summarise_prefix(traces, prefix_tokens=10, fresh_tokens=3, max_cv_percent=5.0)
        assert found.outcome == "measured"
        return found.noisy

    assert not marked(1.0, 0.5)
    assert marked(1.5, 0.5)
    assert marked(1.0, 0.75)


def test_a_cached_prefix_saves_its_whole_blocks() -> None:
    found = prefix_row()
    assert found.outcome == "measured"
    assert (found.cold_computed_tokens, found.cached_computed_tokens, found.reused_tokens) == (13, 5, 8)
    assert found.cold_ttft_s is not None
    assert found.cached_ttft_s is not None
    assert found.cold_ttft_s.samples == pytest.approx((2.3,))
    assert found.cached_ttft_s.samples == pytest.approx((1.5, 1.5))
    assert found.times_faster == pytest.approx(2.3 / 1.5)


def test_without_reuse_the_prefix_figure_is_void() -> None:
    found = prefix_row(reuses=False)
    assert found.outcome == "void"
    assert found.because == "no prefix was reused: a later request computed all of its 13 prompt tokens"


def test_a_first_request_that_is_not_cold_makes_the_prefix_figure_void() -> None:
    found = prefix_row(earlier=True)
    assert found.outcome == "void"
    assert "the first request computed 1 of its 13" in found.because


def test_a_prefix_request_without_an_answer_makes_the_figure_void() -> None:
    assert prefix_row(loses=1).because == "0 tokens were produced where 2 were asked for"


# --- step times ------------------------------------------------------------------------------------------


def test_step_times_are_found_again_from_the_steps() -> None:
    limits = LIMITS.model_copy(update={"max_batch_tokens": 16, "max_sequences": 4})
    session = ScriptedServing(limits, step_s=0.5, s_per_prompt_token=0.02, s_per_sequence=0.1)
    requests = [Request(0.0, 3 + place % 7, 2 + place % 5) for place in range(30)]
    trace = served(requests, session=session, concurrency=4)
    fitted = fit_serving_steps(trace.steps)
    assert fitted is not None
    assert fitted.seconds["step"] == pytest.approx(0.5, rel=1e-6)
    assert fitted.seconds["prefill_token"] == pytest.approx(0.02, rel=1e-6)
    assert fitted.seconds["decode_sequence"] == pytest.approx(0.1, rel=1e-6)
    assert fitted.median_error < 1e-9


def test_steps_that_are_all_alike_give_no_step_times() -> None:
    assert fit_serving_steps(served((Request(0.0, 2, 9),)).steps[1:2]) is None
