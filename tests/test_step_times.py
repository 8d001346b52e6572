"""Times of steps: closed forms equal sums, the roofline equals hand calculation, a fit finds what was put in."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from pipeline.errors import StageError
from pipeline.step_times import (
    TERMS,
    BatchTimes,
    MeasuredSteps,
    RooflineSteps,
    StepSample,
    StepTimes,
    Term,
    fit_step_times,
    step_times_of_batches,
)


@dataclass
class Weights:
    """A dense part, and experts of which more are touched by more tokens."""

    dense: float
    experts: float = 0.0

    def bytes(self, tokens: int) -> float:
        return self.dense + self.experts * (1 - (1 - 8 / 256) ** tokens)


def h100(**changes: object) -> RooflineSteps:
    fields: dict[str, object] = {
        "weights": Weights(54e9),
        "kv_bytes_per_token": 0.0,
        "flops_per_token": 54e9,
        "bandwidth_bytes_per_s": 3.35e12,
        "peak_flops_per_s": 989e12,
    }
    return RooflineSteps(**(fields | changes))  # type: ignore[arg-type]


def decode_s(times: StepTimes, sequences: int, cached: int = 0) -> float:
    return times.step_s(
        prefill_tokens=0, decode_sequences=sequences, cached_tokens=cached, pairs=cached + sequences
    )


# --- roofline --------------------------------------------------------------------------------------------


def test_a_27b_model_in_16_bits_decodes_62_tokens_a_second_and_a_batch_is_free_up_to_295() -> None:
    assert 1 / decode_s(h100(), 1) == pytest.approx(62.0, abs=0.05)
    assert decode_s(h100(), 295) == decode_s(h100(), 1)
    assert decode_s(h100(), 590) == pytest.approx(2 * decode_s(h100(), 295), rel=0.002)


def test_a_long_prompt_takes_its_arithmetic_and_half_the_memory_does_not_help_it() -> None:
    def prefill_s(times: RooflineSteps) -> float:
        return times.step_s(prefill_tokens=8000, decode_sequences=0, cached_tokens=0, pairs=0)

    assert prefill_s(h100()) == pytest.approx(8000 * 54e9 / 989e12)
    assert prefill_s(h100(weights=Weights(27e9))) == prefill_s(h100())
    assert prefill_s(h100(flops_efficiency=0.5)) == pytest.approx(2 * prefill_s(h100()))


def test_reading_counts_the_cache_the_state_and_the_experts_that_a_batch_touches() -> None:
    times = h100(
        weights=Weights(2e9, experts=600e9), kv_bytes_per_token=1e5, state_bytes=3e6, flops_per_token=1.0
    )
    experts = 600e9 * (1 - (1 - 8 / 256) ** 4)
    expected = 2e9 + experts + 1e5 * 7000 + 4 * 3e6
    assert decode_s(times, 4, 7000) == pytest.approx(expected / 3.35e12)


def test_efficiency_and_overhead_add_up_as_said() -> None:
    slow = h100(bandwidth_efficiency=0.8, overhead_s=0.002)
    assert decode_s(slow, 1) == pytest.approx(decode_s(h100(), 1) / 0.8 + 0.002)


@pytest.mark.parametrize(
    "changes",
    [
        {"bandwidth_bytes_per_s": 0.0},
        {"peak_flops_per_s": -1.0},
        {"flops_per_token": float("nan")},
        {"kv_bytes_per_token": -1.0},
        {"overhead_s": float("inf")},
        {"bandwidth_efficiency": 0.0},
        {"flops_efficiency": 1.01},
    ],
)
def test_a_figure_out_of_range_is_named(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        h100(**changes)


# --- many steps at once ----------------------------------------------------------------------------------


def random_roofline(draw: random.Random) -> RooflineSteps:
    return RooflineSteps(
        weights=Weights(draw.choice([0.0, 10.0, 100.0]), draw.choice([0.0, 50.0])),
        kv_bytes_per_token=draw.choice([0.0, 0.01, 0.2]),
        flops_per_token=draw.choice([0.1, 5.0, 20.0]),
        bandwidth_bytes_per_s=draw.choice([1.0, 10.0]),
        peak_flops_per_s=draw.choice([1.0, 10.0]),
        state_bytes=draw.choice([0.0, 1.0]),
        flops_per_pair=draw.choice([0.0, 0.01, 0.2]),
        overhead_s=draw.choice([0.0, 0.5]),
    )


def test_many_decode_steps_take_the_sum_of_their_times_on_both_sides_of_the_roof() -> None:
    draw = random.Random(4)
    changed = 0
    for _ in range(3_000):
        times = random_roofline(draw)
        steps, sequences, cached = draw.randint(1, 60), draw.randint(1, 9), draw.randint(1, 800)
        each = [decode_s(times, sequences, cached + sequences * step) for step in range(steps)]
        assert times.decode_steps_s(steps, sequences=sequences, cached_tokens=cached) == pytest.approx(
            sum(each)
        )
        growth = {round(after - before, 9) for before, after in pairwise(each)}
        changed += len(growth) > 1
    assert changed > 50, "the roof must be crossed within a stretch often enough to show something"


def test_many_measured_decode_steps_take_the_sum_of_their_times() -> None:
    draw = random.Random(5)
    for _ in range(300):
        seconds: dict[Term, float] = {term: draw.random() for term in TERMS}
        times = measured(seconds)
        steps, sequences, cached = draw.randint(1, 60), draw.randint(1, 9), draw.randint(0, 800)
        each = [decode_s(times, sequences, cached + sequences * step) for step in range(steps)]
        assert times.decode_steps_s(steps, sequences=sequences, cached_tokens=cached) == pytest.approx(
            sum(each)
        )


# --- fits ------------------------------------------------------------------------------------------------


def measured(seconds: dict[Term, float]) -> MeasuredSteps:
    return MeasuredSteps(seconds=seconds, samples=1, median_error=0.0, p90_error=0.0, total_error=0.0)


TRUE: dict[Term, float] = {
    "step": 0.05,
    "batched": 0.04,
    "prefill_token": 3e-3,
    "decode_sequence": 4e-3,
    "cached_token": 2e-5,
    "masked_pair": 1e-6,
}


def samples_of(times: StepTimes, *, noise: float = 0.0, count: int = 200) -> list[StepSample]:
    draw = random.Random(6)
    found = []
    for _ in range(count):
        prefill, decode = draw.choice(
            [(0, 1), (0, draw.randint(1, 16)), (draw.randint(2, 256), draw.randint(0, 16))]
        )
        cached = draw.randint(0, 300) * decode
        pairs = cached + decode + prefill * (prefill + 1) // 2
        seconds = times.step_s(
            prefill_tokens=prefill, decode_sequences=decode, cached_tokens=cached, pairs=pairs
        )
        found.append(
            StepSample(
                seconds=seconds * (1 + noise * draw.uniform(-1, 1)),
                prefill_tokens=prefill,
                decode_sequences=decode,
                cached_tokens=cached,
                pairs=pairs,
            )
        )
    return found


def test_a_fit_finds_the_terms_that_made_the_times() -> None:
    found = fit_step_times(samples_of(measured(TRUE)), terms=TERMS)
    assert found.seconds == pytest.approx(TRUE | {"pair": 0.0}, rel=1e-6, abs=1e-12)
    assert found.median_error < 1e-9
    assert abs(found.total_error) < 1e-9
    assert MeasuredSteps.model_validate_json(found.to_json()) == found


def test_noise_leaves_the_fit_unbiased_and_is_reported() -> None:
    found = fit_step_times(samples_of(measured(TRUE), noise=0.3, count=3_000), terms=tuple(TRUE))
    assert 0.1 < found.median_error < 0.2
    assert found.p90_error > found.median_error
    assert abs(found.total_error) < 0.02
    assert found.seconds["step"] == pytest.approx(0.05, rel=0.05)


def test_no_term_is_below_zero_even_where_that_would_fit_better() -> None:
    falling = [
        StepSample(seconds=2.0 - 0.01 * n, prefill_tokens=n, decode_sequences=0, cached_tokens=0, pairs=n)
        for n in range(1, 50)
    ]
    found = fit_step_times(falling, terms=("step", "prefill_token"))
    assert found.seconds["prefill_token"] == 0.0
    assert found.median_error > 0.05


def test_terms_that_the_samples_can_not_tell_apart_are_named() -> None:
    alike = [
        StepSample(seconds=1.0 + n, prefill_tokens=0, decode_sequences=4, cached_tokens=n, pairs=n + 4)
        for n in range(20)
    ]
    with pytest.raises(StageError, match="tell these apart: decode_sequence, pair"):
        fit_step_times(alike, terms=("step", "decode_sequence", "cached_token", "pair"))
    with pytest.raises(StageError, match="0 timed steps can't tell these apart: step"):
        fit_step_times([], terms=("step",))


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_without_a_duration_is_refused(seconds: float) -> None:
    sample = StepSample(seconds=seconds, prefill_tokens=1, decode_sequences=0, cached_tokens=0, pairs=1)
    with pytest.raises(StageError, match="finite and above 0"):
        fit_step_times([sample], terms=("step",))


def batch_times(times: StepTimes, batch: int, prompt: int, new: int) -> BatchTimes:
    ttft_s = times.step_s(
        prefill_tokens=batch * prompt,
        decode_sequences=0,
        cached_tokens=0,
        pairs=batch * prompt * (prompt + 1) // 2,
    )
    decoding_s = (
        times.decode_steps_s(new - 1, sequences=batch, cached_tokens=batch * prompt) if new > 1 else 0.0
    )
    return BatchTimes(
        batch_size=batch,
        prompt_tokens=prompt,
        new_tokens=new,
        ttft_s=ttft_s,
        tpot_s=decoding_s / (new - 1) if new > 1 else None,
    )


def test_static_batches_of_several_lengths_give_back_the_step_times_behind_them() -> None:
    true: dict[Term, float] = {
        "step": 0.05,
        "prefill_token": 3e-3,
        "decode_sequence": 4e-3,
        "cached_token": 2e-5,
        "pair": 1e-6,
    }
    rows = [batch_times(measured(true), batch, prompt, 33) for batch in (1, 4, 16) for prompt in (100, 900)]
    assert step_times_of_batches(rows).seconds == pytest.approx(true, rel=1e-6)


def test_one_prompt_length_leaves_depth_inside_the_other_terms() -> None:
    rows = [
        batch_times(measured({"step": 0.05, "cached_token": 1e-4}), batch, 100, 21) for batch in (1, 4, 16)
    ]
    found = step_times_of_batches([*rows, batch_times(measured({"step": 0.05}), 2, 100, 1)])
    assert set(found.seconds) == {"step", "prefill_token", "decode_sequence"}
    assert decode_s(found, 4, 440) == pytest.approx(0.05 + 4 * 109.5 * 1e-4, rel=0.02)


def test_one_batch_size_is_refused() -> None:
    with pytest.raises(StageError, match="can't tell these apart: decode_sequence"):
        step_times_of_batches([batch_times(measured({"step": 0.05}), 1, 100, 21)])
    with pytest.raises(StageError, match="0 timed steps"):
        step_times_of_batches([])
