"""One variant under one roof: floors of steps, prompts and answers, and where batching ends."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.architecture import LinearShape
from pipeline.footprint import ShapeFacts, shape_facts
from pipeline.quantizers.base import StoredBytes
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


@dataclass(frozen=True)
class EveryWeight:
    """All weights at so many bytes, of which a model of 27e9 makes 54, 27 and 13.5 GB."""

    bytes_each: float

    @property
    def other_bytes_per_weight(self) -> float:
        return self.bytes_each

    def table_bytes_per_weight(self, columns: int, *, is_head: bool) -> float | None:
        del columns, is_head
        return None

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        return StoredBytes(packed=round(self.bytes_each * out_features * in_features))

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:
        del float_bytes
        return self.predicted_parts(out_features, in_features)


def dense(facts: ShapeFacts, *, bytes_each: float, bandwidth_bytes_per_s: float = 3.35e12) -> Roof:
    """27e9 weights that every token reads, without head, cache or attention."""
    matrix = LinearShape(kind="linear", out_features=270_000, in_features=100_000, count=1, read_per_token=1)
    only_weights = {
        **{"parameters": matrix.elements, "linears": (matrix,), "embedding_weights": 0, "head_weights": 0},
        **{"other_weights": 0, "unread_weights": 0, "cache": None, "attention": ()},
    }
    return Roof(
        facts=facts.model_copy(update=only_weights),
        quantizer=EveryWeight(bytes_each),
        kv_element_bytes=2,
        compute_bytes=None,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        peak_flops_per_s=989e12,
    )


@pytest.mark.parametrize(
    ("bandwidth_bytes_per_s", "bytes_each", "tokens_per_s"),
    [(4.8e12, 2, 88.9), (4.8e12, 1, 177.8), (4.8e12, 4.125 / 8, 344.8), (3.35e12, 2, 62.0)],
)
def test_one_stream_decodes_no_faster_than_bandwidth_over_bytes_read(
    facts: ShapeFacts, bandwidth_bytes_per_s: float, bytes_each: float, tokens_per_s: float
) -> None:
    roof = dense(facts, bytes_each=bytes_each, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    assert 1 / roof.step_s(1, context_tokens=1) == pytest.approx(tokens_per_s, abs=0.05)


@pytest.mark.parametrize(("bytes_each", "batch_size"), [(2, 295), (1, 148), (0.5, 74)])
def test_in_sixteen_bit_arithmetic_fewer_bits_break_even_at_smaller_batches(
    facts: ShapeFacts, bytes_each: float, batch_size: int
) -> None:
    roof = dense(facts, bytes_each=bytes_each)
    broken_even = roof.break_even_batch()
    assert broken_even is not None
    assert round(broken_even) == batch_size
    for size in (1, 7, batch_size):
        assert roof.intensity(size, context_tokens=1) == pytest.approx(size * 2 / bytes_each)
    assert roof.bound(math.floor(broken_even), context_tokens=1) == "memory"
    assert roof.bound(math.ceil(broken_even), context_tokens=1) == "compute"


def test_a_batch_is_free_until_the_arithmetic_takes_longer_than_the_reading(facts: ShapeFacts) -> None:
    roof = dense(facts, bytes_each=2)

    def rate(batch_size: int) -> float:
        return batch_size / roof.step_s(batch_size, context_tokens=1)

    assert rate(32) == pytest.approx(32 * rate(1))
    most = 1000 / roof.prefill_s(1000)
    assert most == pytest.approx(18_314.8, abs=0.1), "989e12 over 2 FLOPs for each of 27e9 weights"
    assert rate(1000) == pytest.approx(most)
    assert rate(295) == pytest.approx(most, rel=0.01)


def test_intensity_rises_with_the_batch_for_mixtures_too() -> None:
    mixture = shape_facts(json.loads((ARCHITECTURES / "mixtral-8x7b.json").read_text("utf-8")))
    roof = Roof(
        facts=mixture,
        quantizer=Native(dtype="bf16"),
        kv_element_bytes=2,
        compute_bytes=None,
        bandwidth_bytes_per_s=3.35e12,
        peak_flops_per_s=989e12,
    )
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 256, 1024, 65_536]
    found = [roof.intensity(size, context_tokens=500) for size in sizes]
    assert found == sorted(found)


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
