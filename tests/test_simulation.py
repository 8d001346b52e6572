"""The simulated engine against closed forms, and against one that goes token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from pipeline.scheduler import Scheduler
from pipeline.simulation import Replay, Request, Serving, replay, simulate
from pipeline.step_times import MeasuredSteps, RooflineSteps, StepTimes
from pipeline.traffic import poisson_requests


@dataclass
class Weights:
    """Weights of which each token touches a little more, as in a mixture of experts."""

    dense: float = 4.0

    def bytes(self, tokens: int) -> float:
        return self.dense + 3.0 * (1 - 0.9**tokens)


MEASURED = MeasuredSteps(
    seconds={
        "step": 1.0,
        "batched": 0.5,
        "prefill_token": 0.01,
        "decode_sequence": 0.02,
        "cached_token": 1e-3,
        "pair": 1e-5,
        "masked_pair": 1e-6,
    },
    samples=7,
    median_error=0.0,
    p90_error=0.0,
    total_error=0.0,
)
ROOFLINE = RooflineSteps(
    weights=Weights(),
    kv_bytes_per_token=0.05,
    flops_per_token=1.0,
    bandwidth_bytes_per_s=7.0,
    peak_flops_per_s=9.0,
    state_bytes=0.1,
    flops_per_pair=0.02,
    bandwidth_efficiency=0.8,
    flops_efficiency=0.7,
    overhead_s=0.05,
)
WIDE = Serving(max_batch_tokens=2048, max_sequences=64, block_tokens=16, cache_blocks=100_000)


def decode_s(times: StepTimes, cached: int, *, sequences: int = 1) -> float:
    return times.step_s(
        prefill_tokens=0, decode_sequences=sequences, cached_tokens=cached, pairs=cached + sequences
    )


def prefill_s(times: StepTimes, tokens: int, *, before: int = 0) -> float:
    pairs = tokens * before + tokens * (tokens + 1) // 2
    return times.step_s(prefill_tokens=tokens, decode_sequences=0, cached_tokens=before, pairs=pairs)


# --- closed forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [MEASURED, ROOFLINE])
def test_a_single_request_takes_its_prefill_and_a_step_for_each_further_token(times: StepTimes) -> None:
    found = replay([Request(3.0, 100, 50)], serving=WIDE, step_times=times)
    decoding_s = sum(decode_s(times, 100 + step) for step in range(49))
    assert found.ttft_s.tolist() == pytest.approx([prefill_s(times, 100)])
    assert found.latency_s.tolist() == pytest.approx([prefill_s(times, 100) + decoding_s])
    assert found.tpot_s().tolist() == pytest.approx([decoding_s / 49])
    assert found.steps == 50
    assert found.result().busy == pytest.approx(1.0)


def test_a_prompt_over_the_token_budget_is_computed_in_pieces() -> None:
    serving = WIDE.model_copy(update={"max_batch_tokens": 64})
    found = replay([Request(0.0, 150, 1)], serving=serving, step_times=MEASURED)
    pieces = [
        prefill_s(MEASURED, 64),
        prefill_s(MEASURED, 64, before=64),
        prefill_s(MEASURED, 22, before=128),
    ]
    assert found.ttft_s.tolist() == pytest.approx([sum(pieces)])
    assert found.prefill_tokens == 150


def test_decoding_sequences_go_before_prompts_in_a_step() -> None:
    serving = WIDE.model_copy(update={"max_batch_tokens": 64})
    requests = [Request(0.0, 10, 40), Request(0.1, 100, 1)]
    found = replay(requests, serving=serving, step_times=MEASURED)
    mixed = [
        MEASURED.step_s(prefill_tokens=63, decode_sequences=1, cached_tokens=10, pairs=11 + 63 * 64 // 2),
        MEASURED.step_s(
            prefill_tokens=37, decode_sequences=1, cached_tokens=11 + 63, pairs=12 + 37 * 63 + 37 * 38 // 2
        ),
    ]
    assert found.start_s[1] == pytest.approx(prefill_s(MEASURED, 10))
    assert found.first_token_s[1] == pytest.approx(prefill_s(MEASURED, 10) + sum(mixed))


def test_regular_requests_under_capacity_never_wait() -> None:
    """D/D/1: arrivals every 2 s, each served in 1.6 s."""
    requests = [Request(2.0 * place, 10, 1) for place in range(200)]
    found = simulate(requests, serving=WIDE, step_times=MEASURED)
    assert found.wait_s is not None
    assert found.wait_s.p99 == 0.0
    assert found.busy == pytest.approx(prefill_s(MEASURED, 10) / 2.0, rel=0.01)
    assert not found.overloaded


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_the_mean_wait_of_one_token_requests_is_pollaczek_and_khinchine_s(load: float) -> None:
    """M/D/1 with service time s: mean wait load · s ÷ (2 · (1 − load)), within four standard errors."""
    serving = WIDE.model_copy(update={"max_sequences": 1})
    service_s = prefill_s(MEASURED, 10)
    means = []
    for seed in range(20):
        requests = poisson_requests(load / service_s, prompt=10, new=1, count=8_000, seed=seed)
        means.append(replay(requests, serving=serving, step_times=MEASURED).wait_s[500:].mean())
    expected = load * service_s / (2 * (1 - load))
    error = np.std(means, ddof=1) / np.sqrt(len(means))
    assert abs(np.mean(means) - expected) < 4 * error
    assert error < 0.05 * expected


def test_a_full_batch_of_equal_requests_decodes_as_one() -> None:
    found = simulate([Request(0.0, 32, 11)] * 8, serving=WIDE, step_times=MEASURED)
    decoding_s = [decode_s(MEASURED, 8 * (32 + step), sequences=8) for step in range(10)]
    assert found.tpot_s is not None
    assert found.tpot_s.p50 == pytest.approx(sum(decoding_s) / 10)
    assert found.tpot_s.p99 == pytest.approx(found.tpot_s.p50)
    assert found.mean_batch == pytest.approx(8.0)
    assert found.output_tokens_per_s == pytest.approx(
        88
        / (
            sum(decoding_s)
            + MEASURED.step_s(prefill_tokens=256, decode_sequences=0, cached_tokens=0, pairs=8 * 528)
        )
    )


def test_a_request_of_one_token_has_no_tpot() -> None:
    found = simulate([Request(0.0, 5, 1), Request(0.0, 5, 3)], serving=WIDE, step_times=MEASURED)
    assert found.tpot_s is not None
    assert found.tpot_s.count == 1
    assert simulate([Request(0.0, 5, 1)], serving=WIDE, step_times=MEASURED).tpot_s is None


def test_no_request_has_no_figures() -> None:
    found = simulate([], serving=WIDE, step_times=MEASURED)
    assert (found.requests, found.ttft_s, found.requests_per_s, found.busy) == (0, None, None, None)


# --- the cache -------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_rejected_and_the_others_go_on() -> None:
    serving = Serving(max_batch_tokens=64, max_sequences=4, block_tokens=16, cache_blocks=4)
    requests = [Request(0.0, 50, 16), Request(0.0, 50, 15), Request(0.0, 64, 1), Request(0.0, 65, 1)]
    found = replay(requests, serving=serving, step_times=MEASURED)
    assert found.rejected == 2
    assert found.served.tolist() == [1, 2], "50 + 15 − 1 tokens are four blocks: the last one is never cached"


def test_the_youngest_gives_way_when_blocks_run_out_and_is_computed_again() -> None:
    serving = Serving(max_batch_tokens=64, max_sequences=4, block_tokens=4, cache_blocks=5)
    requests = [Request(0.0, 8, 6), Request(0.0, 8, 6)]
    found = replay(requests, serving=serving, step_times=MEASURED)
    assert found.preemptions == 1
    assert found.end_s[0] < found.end_s[1]
    assert found.prefill_tokens == 16 + 8 + 1, "its prompt and the one token it had, but not the other's"
    assert found.ttft_s[0] == found.ttft_s[1], "the first token was there before"
    assert found.peak_blocks <= 5


def test_a_waiting_prompt_leaves_the_decoding_sequences_their_next_blocks() -> None:
    """Four blocks: the first sequence holds two, full; the step that could admit a prompt of two gives it a third."""
    serving = Serving(max_batch_tokens=64, max_sequences=4, block_tokens=4, cache_blocks=4)
    found = replay([Request(0.0, 8, 3), Request(0.5, 8, 1)], serving=serving, step_times=MEASURED)
    assert found.preemptions == 0
    assert found.start_s[1] == found.end_s[0]


# --- load ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "overloaded"), [(0.5, False), (0.9, False), (1.2, True), (3.0, True)])
def test_overload_is_told_from_a_full_machine(load: float, overloaded: bool) -> None:
    serving = WIDE.model_copy(update={"max_sequences": 1})
    for seed in range(5):
        requests = poisson_requests(load / prefill_s(MEASURED, 10), prompt=10, new=1, count=4_000, seed=seed)
        assert simulate(requests, serving=serving, step_times=MEASURED).overloaded is overloaded


def test_requests_present_are_their_rate_times_their_stay() -> None:
    """Little's law, with the number present counted by the steps' own sum and the stays request by request."""
    requests = poisson_requests(0.4, prompt=20, new=30, count=3_000, seed=5)
    found = replay(requests, serving=WIDE, step_times=MEASURED)
    stays_s = (found.end_s - found.start_s).sum()
    assert found.sequence_s == pytest.approx(stays_s)
    result = found.result()
    assert result.mean_batch is not None
    assert result.mean_batch * found.busy_s == pytest.approx(stays_s)
    assert 1 < result.mean_batch < 64


# --- token by token --------------------------------------------------------------------------------------


@dataclass
class Played:
    """A request of the engine below: `length` tokens computed, `produced` of the answer."""

    request: Request
    length: int = 0
    target: int = 0
    produced: int = 0
    times: list[float] = field(default_factory=list)


def step_by_step(
    requests: list[Request], serving: Serving, times: StepTimes
) -> tuple[list[Played], dict[str, float]]:
    """The same rules, one step and one sequence at a time, blocks counted from lengths."""
    size, most = serving.block_tokens, serving.cache_blocks
    coming = [Played(request, target=request.prompt_tokens) for request in requests]
    everyone = list(coming)
    waiting: list[Played] = []
    running: list[Played] = []
    now, sums = 0.0, {"preemptions": 0.0, "peak": 0.0, "prefill": 0.0, "busy": 0.0, "steps": 0.0}

    def held(sequence: Played) -> int:
        return -(-max(sequence.length, sequence.target) // size)

    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].request.arrival_s)
        while coming and coming[0].request.arrival_s <= now:
            waiting.append(coming.pop(0))
        decoding = [one for one in running if one.length >= one.target]
        room = True
        while sum(map(held, running)) + sum(one.length % size == 0 for one in decoding) > most:
            youngest = running.pop()
            if youngest in decoding:
                decoding.remove(youngest)
            youngest.length, youngest.target = 0, youngest.request.prompt_tokens + youngest.produced
            waiting.insert(0, youngest)
            sums["preemptions"] += 1
            room = False
        left = serving.max_batch_tokens - len(decoding)
        next_blocks = sum(one.length % size == 0 for one in decoding)
        pieces: list[tuple[Played, int]] = []
        if running and running[-1] not in decoding:
            pieces.append((running[-1], min(left, running[-1].target - running[-1].length)))
        while room and waiting and left > sum(piece for _, piece in pieces):
            taken = sum(map(held, running)) + next_blocks + held(waiting[0])
            if len(running) >= serving.max_sequences or taken > most:
                break
            running.append(waiting.pop(0))
            pieces.append((running[-1], min(left - sum(piece for _, piece in pieces), running[-1].target)))
        cached = sum(one.length for one in decoding)
        seconds = times.step_s(
            prefill_tokens=sum(piece for _, piece in pieces),
            decode_sequences=len(decoding),
            cached_tokens=cached + sum(one.length for one, _ in pieces),
            pairs=cached
            + len(decoding)
            + sum(one.length + place + 1 for one, piece in pieces for place in range(piece)),
        )
        now += seconds
        sums["busy"] += seconds
        sums["steps"] += 1
        sums["prefill"] += sum(piece for _, piece in pieces)
        for one in decoding:
            one.length += 1
            one.times.append(now)
        for one, piece in pieces:
            one.length += piece
            if one.length == one.target:
                one.times.append(now)
        sums["peak"] = max(sums["peak"], sum(map(held, running)))
        for one in running:
            one.produced = len(one.times)
        running = [one for one in running if one.produced < one.request.new_tokens]
    return everyone, sums


def random_case(seed: int) -> tuple[list[Request], Serving]:
    draw = random.Random(seed)
    size = draw.choice([1, 2, 4, 16])
    serving = Serving(
        max_batch_tokens=draw.choice([4, 8, 30, 200]),
        max_sequences=draw.choice([1, 2, 4]),
        block_tokens=size,
        cache_blocks=draw.choice([40, 60, 150, 1000]) // size + 1,
    )
    now, requests = 0.0, []
    gap_s = draw.choice([0.0, 2.0, 20.0, 60.0])
    for _ in range(draw.randint(1, 25)):
        now += draw.random() * gap_s
        requests.append(Request(now, draw.randint(1, 30), draw.choice([1, 1, 2, 5, 30, 60])))
    return requests, serving


@pytest.mark.parametrize("times", [MEASURED, ROOFLINE], ids=["measured", "roofline"])
def test_jumping_from_event_to_event_equals_going_token_by_token(times: StepTimes) -> None:
    preemptions = rejections = 0
    for seed in range(400):
        requests, serving = random_case(seed)
        found = replay(requests, serving=serving, step_times=times)
        sequences, sums = step_by_step([one for one in requests if serving.fits(one)], serving, times)
        assert found.first_token_s.tolist() == pytest.approx([one.times[0] for one in sequences]), seed
        assert found.end_s.tolist() == pytest.approx([one.times[-1] for one in sequences]), seed
        assert found.busy_s == pytest.approx(sums["busy"])
        assert (found.preemptions, found.peak_blocks, found.steps, found.prefill_tokens) == (
            sums["preemptions"],
            sums["peak"],
            sums["steps"],
            sums["prefill"],
        ), seed
        assert found.peak_blocks <= serving.cache_blocks
        preemptions += found.preemptions
        rejections += found.rejected
    assert preemptions > 100, "the cases must run out of blocks often enough to show something"
    assert rejections > 50


def test_the_end_state_is_empty_and_every_token_was_made_once() -> None:
    for seed in range(100):
        requests, serving = random_case(seed)
        fitting = [one for one in requests if serving.fits(one)]
        scheduler = Scheduler(fitting, serving=serving, step_times=MEASURED)
        scheduler.run()
        left = (
            scheduler.used,
            scheduler.decoding,
            scheduler.cached,
            scheduler.partial,
            sum(scheduler.renewals),
        )
        assert left == (0, 0, 0, -1, 0)
        computed = sum(one.prompt_tokens for one in fitting)
        assert scheduler.prefill_tokens >= computed
        assert (scheduler.prefill_tokens == computed) is (scheduler.preemptions == 0)
        for start, first, end in zip(scheduler.start, scheduler.first, scheduler.end, strict=True):
            assert 0 <= start < first <= end


def test_two_runs_are_equal_to_the_last_bit() -> None:
    requests = poisson_requests(0.5, prompt=30, new=40, count=500, seed=9)
    assert simulate(requests, serving=WIDE, step_times=ROOFLINE) == simulate(
        requests, serving=WIDE, step_times=ROOFLINE
    )


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "requests",
    [
        [Request(1.0, 5, 5), Request(0.5, 5, 5)],
        [Request(-1.0, 5, 5)],
        [Request(float("nan"), 5, 5)],
        [Request(float("inf"), 5, 5)],
        [Request(0.0, 0, 5)],
        [Request(0.0, 5, 0)],
    ],
)
def test_requests_out_of_order_or_empty_are_refused(requests: list[Request]) -> None:
    with pytest.raises(ValueError, match=r"request [01] "):
        simulate(requests, serving=WIDE, step_times=MEASURED)


def test_more_sequences_than_tokens_in_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="must be at most max_batch_tokens"):
        Serving(max_batch_tokens=8, max_sequences=9, block_tokens=16, cache_blocks=1)


def test_results_read_back_equal() -> None:
    found = simulate([Request(0.0, 5, 3)], serving=WIDE, step_times=MEASURED)
    assert type(found).model_validate_json(found.to_json()) == found
    assert isinstance(replay([], serving=WIDE, step_times=MEASURED), Replay)
