"""How raw times become figures, on a scripted clock whose right answers are known to the last digit."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import pipeline
from pipeline.measure import (
    Ceilings,
    GenerationTrace,
    Work,
    break_even_batch,
    free_lunch_batch,
    is_noisy,
    percentile,
    random_prompts,
    summarise,
    time_generation,
)
from pipeline.measured import Distribution
from pipeline.scripted_engine import ScriptedSession
from pipeline.speed_results import SpeedRow, SpeedShape
from pipeline.values import Value
from tests import result_builders as build


def timed(session: ScriptedSession, *, new_tokens: int, batch_size: int = 1, prompt_tokens: int = 4) -> Any:
    prompts = random_prompts(
        batch_size=batch_size, prompt_tokens=prompt_tokens, vocabulary_tokens=1000, seed=len(session.prompts)
    )
    return time_generation(session, prompts=prompts, new_tokens=new_tokens, clock=session.clock)


def row(traces: Sequence[GenerationTrace], *, new_tokens: int, **fields: Any) -> SpeedRow:
    """`fields` are those of what is read and computed, of the ceilings, or of the row itself."""

    def chosen(kind: type[Value]) -> dict[str, Any]:
        return {name: fields.pop(name, None) for name in kind.model_fields}

    shape = SpeedShape(
        batch_size=traces[0].batch_size, prompt_tokens=traces[0].prompt_tokens, new_tokens=new_tokens
    )
    work, ceilings = Work(**chosen(Work)), Ceilings(**chosen(Ceilings))
    settings: dict[str, Any] = {"warmup_s": (), "peak_memory_bytes": None, "max_cv_percent": 5.0, **fields}
    return summarise(traces, shape=shape, work=work, ceilings=ceilings, **settings)


# --- prefill and decode apart ----------------------------------------------------------------------------


def test_decode_time_leaves_out_the_prefill() -> None:
    trace = timed(ScriptedSession(prefill_s=(1.0,), step_s=(0.01,)), new_tokens=101)
    assert trace.ttft_s == 1.0
    assert trace.decode_tokens_per_s == pytest.approx(100.0)
    assert trace.tpot_s == pytest.approx(0.01)
    assert len(trace.itl_s) == 100


def test_the_first_token_is_counted_in_the_prefill_only() -> None:
    trace = timed(ScriptedSession(prefill_s=(0.5,), step_s=(0.1,)), new_tokens=2)
    assert trace.ttft_s == 0.5
    assert trace.decode_tokens_per_s == pytest.approx(10.0)
    assert trace.produced_tokens == 2


def test_a_single_token_has_no_decode_rate() -> None:
    trace = timed(ScriptedSession(), new_tokens=1)
    found = row([trace], new_tokens=1)
    assert found.outcome == "measured"
    assert (found.tpot_s, found.decode_tokens_per_s, found.itl_p50_s) == (None, None, None)


def test_prefill_counts_prompt_tokens_not_prompts() -> None:
    trace = timed(ScriptedSession(prefill_s=(0.5,)), new_tokens=2, batch_size=4, prompt_tokens=512)
    assert trace.prefill_tokens_per_s == 4096.0
    found = row([trace], new_tokens=2)
    assert found.prefill_tokens_per_s == 4096.0, "8 prompts a second are no rate of tokens"


def test_a_batch_decodes_its_size_per_step_and_each_request_its_share() -> None:
    found = row([timed(ScriptedSession(step_s=(0.1,)), new_tokens=11, batch_size=8)], new_tokens=11)
    assert found.decode_tokens_per_s == pytest.approx(80.0)
    assert found.decode_tokens_per_s_per_request == pytest.approx(10.0)
    assert found.produced_tokens == 88


def test_tokens_that_were_not_produced_are_not_counted() -> None:
    """160 sequences of 1024 asked for; 123,383 tokens came in 171.55 s: 719.2 tok/s, not 955.1."""
    steps = 1023
    produced = [121] * steps
    produced[0] += 123_383 - sum(produced)
    trace = GenerationTrace(
        batch_size=160,
        prompt_tokens=8,
        token_times_s=tuple(1.0 + 171.55 * step / steps for step in range(steps + 1)),
        produced=(160, *produced),
    )
    assert trace.decode_tokens_per_s == pytest.approx(719.2, abs=0.05)
    found = row([trace], new_tokens=1024)
    assert found.outcome == "void"
    assert "163840 were asked for" in found.because


def test_a_sequence_that_ends_early_makes_the_row_void() -> None:
    session = ScriptedSession(ends_after_tokens=5)
    traces = [timed(session, new_tokens=10, batch_size=2) for _ in range(3)]
    found = row(traces, new_tokens=10)
    assert found.outcome == "void"
    assert "10 tokens were produced where 20 were asked for" in found.because
    assert found.produced_tokens == 10


# --- the clock -------------------------------------------------------------------------------------------


def test_queued_work_is_waited_for_before_every_reading_of_the_clock() -> None:
    session = ScriptedSession(prefill_s=(1.0,), step_s=(0.01,), play="queues_work")
    session.decode_step()  # work left over from before
    session.calls.clear()
    trace = timed(session, new_tokens=101)
    assert trace.ttft_s == pytest.approx(1.0)
    assert trace.decode_tokens_per_s == pytest.approx(100.0)
    before = [
        earlier for earlier, call in zip(session.calls, session.calls[1:], strict=False) if call == "clock"
    ]
    assert set(before) == {"synchronize"}
    assert len(before) == 1 + 101


def test_a_step_that_took_no_time_makes_the_row_void() -> None:
    found = row([timed(ScriptedSession(step_s=(0.0,)), new_tokens=4)], new_tokens=4)
    assert found.outcome == "void"
    assert "took no time" in found.because
    assert found.bandwidth_share is None


def test_a_clock_that_was_set_back_never_gives_a_figure() -> None:
    times = iter([0.0, 0.5, -3599.5, -3599.4])
    trace = time_generation(ScriptedSession(), prompts=[[1]], new_tokens=3, clock=lambda: next(times))
    assert trace.decode_tokens_per_s is None
    assert row([trace], new_tokens=3).outcome == "void"


def test_work_is_timed_by_a_clock_that_nobody_can_set_back() -> None:
    """Every clock that the package hands to what times work, in its sources."""
    sources = list(Path(pipeline.__file__).parent.rglob("*.py"))
    handed = {
        ast.unparse(keyword.value)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "clock"
    }
    timing = [text for path in sources if "perf_counter" in (text := path.read_text("utf-8"))]
    assert timing
    assert not any("time.time()" in text for text in timing), (
        "one that can be set back, beside one that can't"
    )
    passed_on = {"clock", "self._clock"}
    assert handed - passed_on == {"time.perf_counter", "self.clock"}, "self.clock is the scripted one"
    assert time.get_clock_info("perf_counter").monotonic
    assert not time.get_clock_info("perf_counter").adjustable


# --- repeats ---------------------------------------------------------------------------------------------


def test_the_median_stands_though_the_first_run_took_seven_hundred_times_longer() -> None:
    times = [79.075, 0.607, 0.115, 0.106, 0.100]
    session = ScriptedSession(prefill_s=times, step_s=(0.1,))
    found = row([timed(session, new_tokens=3) for _ in times], new_tokens=3, warmup_s=(80.0, 0.7))
    assert found.ttft_s is not None
    assert found.ttft_s.median == pytest.approx(0.115)
    assert (found.ttft_s.lower_quartile, found.ttft_s.upper_quartile) == pytest.approx((0.106, 0.607))
    assert found.ttft_s.samples == pytest.approx(times)
    assert found.warmup_s == (80.0, 0.7)
    assert found.noisy


def test_another_seed_gives_other_prompts_and_the_same_seed_the_same() -> None:
    def prompts(seed: int) -> list[list[int]]:
        return random_prompts(batch_size=3, prompt_tokens=16, vocabulary_tokens=300, seed=seed)

    assert prompts(1) == prompts(1)
    flat = [tuple(prompt) for seed in range(20) for prompt in prompts(seed)]
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize("vocabulary", [1, 2, 300])
def test_prompts_have_the_exact_length_and_stay_inside_the_vocabulary(vocabulary: int) -> None:
    prompts = random_prompts(batch_size=5, prompt_tokens=77, vocabulary_tokens=vocabulary, seed=3)
    assert [len(prompt) for prompt in prompts] == [77] * 5
    assert {token for prompt in prompts for token in prompt} <= set(range(vocabulary))


def test_noise_in_either_phase_marks_the_row() -> None:
    calm = [timed(ScriptedSession(prefill_s=(0.5,)), new_tokens=4) for _ in range(3)]
    slow_prefill = timed(ScriptedSession(prefill_s=(0.7,)), new_tokens=4)
    slow_steps = timed(ScriptedSession(step_s=(0.02,)), new_tokens=4)
    assert not is_noisy(calm, max_cv_percent=1.0)
    assert is_noisy([*calm, slow_prefill], max_cv_percent=5.0)
    assert is_noisy([*calm, slow_steps], max_cv_percent=5.0)


def test_percentiles_interpolate_between_samples() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0], 0.99) == 1.0
    assert percentile([], 0.5) is None
    assert percentile(list(range(101)), 0.99) == pytest.approx(99.0)


def test_a_distribution_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Distribution.of([])


# --- the limit of the memory -----------------------------------------------------------------------------

H200_BYTES_PER_S = 4.8e12


@pytest.mark.parametrize(("read_bytes", "ceiling"), [(54e9, 88.9), (27e9, 177.8), (13.92e9, 344.8)])
def test_decoding_at_the_ceiling_is_believed_and_beyond_it_is_void(read_bytes: float, ceiling: float) -> None:
    def at(rate: float) -> SpeedRow:
        trace = timed(ScriptedSession(step_s=(1 / rate,)), new_tokens=5)
        return row(
            [trace],
            new_tokens=5,
            bytes_read_per_step=int(read_bytes),
            read_bandwidth_bytes_per_s=H200_BYTES_PER_S,
            last_level_cache_bytes=50 * 2**20,
        )

    assert at(ceiling).bandwidth_share == pytest.approx(1.0, abs=0.001)
    assert at(ceiling).outcome == "measured"
    too_fast = at(ceiling * 120 / 88.9)
    assert too_fast.outcome == "void"
    assert "1.35 × the measured memory bandwidth" in too_fast.because


def test_a_model_that_the_processor_cache_holds_has_no_share_of_the_memory_bandwidth() -> None:
    trace = timed(ScriptedSession(step_s=(1e-6,)), new_tokens=5)
    found = row(
        [trace],
        new_tokens=5,
        bytes_read_per_step=60_000,
        read_bandwidth_bytes_per_s=20e9,
        last_level_cache_bytes=32 * 2**20,
    )
    assert found.outcome == "measured"
    assert found.bandwidth_share is None


def test_the_data_sheet_s_share_stands_beside_the_measured_one() -> None:
    found = row(
        [timed(ScriptedSession(step_s=(0.01,)), new_tokens=5)],
        new_tokens=5,
        bytes_read_per_step=27_000_000_000,
        read_bandwidth_bytes_per_s=3e12,
        sheet_bandwidth_bytes_per_s=H200_BYTES_PER_S,
    )
    assert found.bandwidth_share == pytest.approx(0.9)
    assert found.sheet_bandwidth_share == pytest.approx(27e9 / 0.01 / 4.8e12)
    assert row([timed(ScriptedSession(), new_tokens=5)], new_tokens=5).sheet_bandwidth_share is None


# --- the limit of the arithmetic -------------------------------------------------------------------------


@pytest.mark.parametrize(("ttft_s", "share"), [(0.5, 0.5), (0.25, 1.0), (0.2, 1.25)])
def test_a_prefill_is_a_share_of_the_measured_flops_and_beyond_them_void(ttft_s: float, share: float) -> None:
    """Prompts of 250 GFLOP in all, on a device that does 1 TFLOP/s."""
    session = ScriptedSession(prefill_s=(ttft_s,))
    found = row(
        [timed(session, new_tokens=1, batch_size=2) for _ in range(3)],
        new_tokens=1,
        prefill_flops=250e9,
        matmul_flops_per_s=1e12,
    )
    assert found.prefill_flops_share == pytest.approx(share)
    assert found.outcome == ("measured" if share <= 1.05 else "void")
    assert ("1.25 × the fastest measured FLOP/s" in found.because) == (share > 1.05)


def test_a_kernel_that_computes_in_a_faster_type_has_no_share_and_is_no_impossibility() -> None:
    """quanto's INT8 on a CPU without 16-bit arithmetic: 13.8 GFLOP/s, BF16 4.4, FP32 49.0."""
    found = row(
        [timed(ScriptedSession(prefill_s=(1.0,)), new_tokens=1)],
        new_tokens=1,
        prefill_flops=13.8e9,
        matmul_flops_per_s=4.4e9,
        fastest_flops_per_s=49.0e9,
    )
    assert (found.prefill_flops_share, found.outcome) == (None, "measured")


def test_without_known_work_or_a_measured_type_there_is_no_share_of_the_flops() -> None:
    trace = timed(ScriptedSession(), new_tokens=2)
    for known in ({"prefill_flops": 1e9}, {"matmul_flops_per_s": 1e12}, {}):
        found = row([trace], new_tokens=2, **known)
        assert (found.prefill_flops_share, found.outcome) == (None, "measured")


# --- the batch sweep -------------------------------------------------------------------------------------


def sweep(rates: dict[int, float]) -> list[SpeedRow]:
    """Measured batches in any order, and a depth row at batch 1 that is no part of the sweep."""
    rows = [build.speed_row(size, rate) for size, rate in rates.items()]
    return [*reversed(rows), build.speed_row(1, 1000.0, test="depth")]


def test_the_break_even_is_the_best_batch_s_rate_over_the_single_stream_s() -> None:
    """A step is 50 ms up to batch 4; from there on it grows with the batch."""
    assert break_even_batch(sweep({1: 20.0, 4: 80.0, 8: 80.0, 16: 76.0})) == pytest.approx(4.0)


@pytest.mark.parametrize(("last", "reached"), [(191.0, True), (193.0, False)])
def test_a_sweep_that_still_gains_a_fifth_a_doubling_has_not_reached_it(last: float, reached: bool) -> None:
    """One doubling from 160 tok/s; then two at once, which count as two."""
    found = break_even_batch(sweep({1: 20.0, 8: 160.0, 16: last}))
    assert found == (pytest.approx(last / 20.0) if reached else None)
    steps_of_four = sweep({1: 20.0, 8: 160.0, 32: 160.0 * (last / 160.0) ** 2})
    assert (break_even_batch(steps_of_four) is not None) == reached


def test_the_free_lunch_ends_at_the_last_batch_whose_step_is_a_quarter_longer_at_most() -> None:
    steps_s = {1: 0.050, 2: 0.051, 4: 0.0624, 8: 0.064, 16: 0.100}
    assert free_lunch_batch(sweep({size: size / step_s for size, step_s in steps_s.items()})) == 4
    assert free_lunch_batch(sweep({1: 20.0, 2: 20.0})) == 1


def test_without_batch_1_or_a_second_size_the_sweep_tells_nothing() -> None:
    void = build.speed_row(8, 160.0, outcome="void")
    for rows in (sweep({1: 20.0}), sweep({4: 80.0, 8: 90.0}), [*sweep({1: 20.0}), void], []):
        assert (break_even_batch(rows), free_lunch_batch(rows)) == (None, None)
