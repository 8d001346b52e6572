"""One variant under one roof: floors of steps, prompts and answers, and where batching ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.footprint import ShapeFacts, shape_facts
from pipeline.quantizers.native import Native
from pipeline.roof import Roof

ARCHITECTURES = Path(__file__).parent.parent / "recipes" / "architectures"


@pytest.fixture(scope="module")
def facts() -> ShapeFacts:
    return shape_facts(json.loads((ARCHITECTURES / "qwen3.6-27b.json").read_text("utf-8")))


@pytest.fixture(scope="module")
def roof(facts: ShapeFacts) -> Roof:
    """The 27B model in BF16 on an H100 SXM."""
    return Roof(
        facts=facts,
        quantizer=Native(dtype="bf16"),
        kv_element_bytes=2,
        compute_bytes=None,
        bandwidth_bytes_per_s=3.35e12,
        peak_flops_per_s=989e12,
    )


def test_a_step_reads_the_weights_once_and_every_cache(roof: Roof) -> None:
    weights = 2 * (26_895_998_464 - 1_271_398_400)
    assert roof.step_bytes(1, context_tokens=1000) == weights + roof.cache_bytes(1000)
    assert roof.step_bytes(8, context_tokens=1000) == weights + 8 * roof.cache_bytes(1000)
    assert roof.step_s(1, context_tokens=1000) == pytest.approx(
        roof.step_bytes(1, context_tokens=1000) / 3.35e12
    )


def test_more_arithmetic_leaves_decoding_as_it_is_and_more_bandwidth_speeds_it_up(roof: Roof) -> None:
    def step_s(changed: Roof) -> float:
        return changed.step_s(1, context_tokens=2176)

    assert roof.peak_flops_per_s is not None
    assert step_s(replace(roof, peak_flops_per_s=1.5 * roof.peak_flops_per_s)) == step_s(roof)
    wider = replace(roof, bandwidth_bytes_per_s=1.5 * roof.bandwidth_bytes_per_s)
    assert step_s(roof) / step_s(wider) == pytest.approx(1.5)


def test_more_bandwidth_leaves_a_long_prompt_as_it_is(roof: Roof) -> None:
    wider = replace(roof, bandwidth_bytes_per_s=1.5 * roof.bandwidth_bytes_per_s)
    assert wider.prefill_s(2048) == roof.prefill_s(2048)
    assert wider.prefill_s(8) < roof.prefill_s(8), (
        "a prompt shorter than the ridge reads longer than it computes"
    )


def test_a_prompt_costs_two_operations_a_weight_and_its_attention(roof: Roof, facts: ShapeFacts) -> None:
    blocks = facts.weights_read_per_token - facts.head_weights
    full_layers, heads, head_size = 16, 24, 256
    attention = full_layers * heads * 2 * (head_size + head_size) * 2048 * 2049 // 2
    expected = 2 * (2048 * blocks + facts.head_weights) + attention
    assert roof.prefill_flops(2048) == pytest.approx(expected, rel=1e-12)


def test_the_batch_at_which_a_step_computes_as_long_as_it_reads(roof: Roof) -> None:
    batch = roof.compute_bound_batch(context_tokens=1)
    assert batch is not None
    assert batch > 295, "the cache is read, too"
    assert roof.bound(batch, context_tokens=1) == "compute"
    assert roof.bound(batch - 1, context_tokens=1) == "memory"
    assert roof.compute_bound_batch(context_tokens=100_000) is None, (
        "long caches read longer than they compute"
    )


def test_the_largest_batch_that_keeps_a_limit(roof: Roof) -> None:
    limit_s = 1.2 * roof.step_s(1, context_tokens=2176)
    batch = roof.largest_batch_within(limit_s, context_tokens=2176, at_most=10_000)
    assert roof.step_s(batch, context_tokens=2176) <= limit_s < roof.step_s(batch + 1, context_tokens=2176)
    assert roof.largest_batch_within(limit_s, context_tokens=2176, at_most=3) == 3
    too_short_s = 0.5 * roof.step_s(1, context_tokens=2176)
    assert roof.largest_batch_within(too_short_s, context_tokens=2176, at_most=10_000) == 0


def test_an_answer_of_500_tokens_streams_the_weights_500_times(roof: Roof) -> None:
    weights = roof.reads.bytes(1)
    streamed = roof.answer_bytes(1, new_tokens=500)
    assert 500 * weights < streamed < 500 * weights + 500 * roof.cache_bytes(500)
    assert roof.answer_s(1, new_tokens=500) == pytest.approx(streamed / 3.35e12, rel=1e-3)
