"""One variant under one device's roof: what each pass reads and computes, and how long that takes at least.

The roofline's functions know bytes and FLOPs; this knows which bytes and FLOPs a model of given shapes has at
a batch and a depth of context. Pure.

    roof = Roof(facts, quantizer=quantizer, kv_element_bytes=2, bandwidth_bytes_per_s=3.35e12, …)
    roof.step_s(8, context_tokens=2048), roof.prefill_s(2048)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pipeline.footprint import (
    ShapeFacts,
    StoresWeights,
    WeightReads,
    kv_bytes,
    kv_bytes_per_token,
    weight_reads,
)
from pipeline.measured import Bound
from pipeline.roofline import attended_pairs, ops_per_byte, step_floor_s

LARGEST_BATCH = 65_536
"""Where the search for the compute-bound batch ends; no server holds more sequences."""


def head_flops(facts: ShapeFacts) -> float:
    """FLOPs of turning one state into logits, which only the last token of a prompt needs."""
    return 2.0 * facts.head_weights_read


def block_flops(facts: ShapeFacts) -> float:
    """FLOPs of one token in all weights but the head; 2 a weight, a multiply and an add
    (arXiv 2001.08361, section 2.1).
    """
    return 2.0 * (facts.weights_read_per_token - facts.head_weights_read)


def prefill_flops(facts: ShapeFacts, prompt_tokens: int) -> float:
    """FLOPs of a prompt: the blocks' weights for each token, causal attention's pairs, the head once."""
    attention = sum(
        span.flops_per_pair * attended_pairs(prompt_tokens, window_tokens=span.window_tokens)
        for span in facts.attention or ()
    )
    return block_flops(facts) * prompt_tokens + head_flops(facts) + attention


@dataclass(frozen=True)
class Roof:
    """Limits of one variant on one device whose bandwidth is known.

    `compute_bytes` is the size of the floats that an engine computes with where it isn't that of the stored ones.
    """

    facts: ShapeFacts
    quantizer: StoresWeights
    kv_element_bytes: int
    compute_bytes: int | None
    bandwidth_bytes_per_s: float
    peak_flops_per_s: float | None

    @cached_property
    def reads(self) -> WeightReads:
        """Weight bytes that a pass of any number of tokens reads."""
        return weight_reads(self.facts, quantizer=self.quantizer, compute_bytes=self.compute_bytes)

    def cache_bytes(self, context_tokens: int) -> int:
        """KV cache of one sequence; 0 where its shape is unknown, which leaves a floor a floor."""
        return kv_bytes(self.facts, context_tokens, element_bytes=self.kv_element_bytes) or 0

    @property
    def growing_bytes_per_token(self) -> int:
        """What a token adds to the cache of a long sequence, for ever: its layers without a window."""
        return kv_bytes_per_token(self.facts, element_bytes=self.kv_element_bytes) or 0

    def constant_bytes(self, context_tokens: int) -> int:
        """The rest of a sequence's cache at that depth: recurrent states, and windows as far as they are filled."""
        return self.cache_bytes(context_tokens) - context_tokens * self.growing_bytes_per_token

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of attention without a window, for each (query, key) pair."""
        return sum(span.flops_per_pair for span in self.facts.attention or () if span.window_tokens is None)

    def windowed_flops(self, context_tokens: int) -> int:
        """FLOPs of windowed attention for one token at that depth."""
        return sum(
            span.flops_per_pair * min(context_tokens, span.window_tokens)
            for span in self.facts.attention or ()
            if span.window_tokens is not None
        )

    @property
    def head_flops(self) -> float:
        """FLOPs of the head for one token."""
        return head_flops(self.facts)

    @property
    def block_flops(self) -> float:
        """FLOPs of one token in all weights but the head."""
        return block_flops(self.facts)

    def step_bytes(self, batch_size: int, *, context_tokens: int) -> float:
        """Bytes that a decode step reads: weights once, every sequence's cache at that depth."""
        return self.reads.bytes(batch_size) + batch_size * self.cache_bytes(context_tokens)

    def step_flops(self, batch_size: int, *, context_tokens: int) -> float:
        """FLOPs of a decode step: all weights and attention over the context, for each sequence."""
        attention = context_tokens * self.flops_per_pair + self.windowed_flops(context_tokens)
        return batch_size * (self.block_flops + self.head_flops + attention)

    def step_s(self, batch_size: int, *, context_tokens: int) -> float:
        """Shortest decode step of `batch_size` sequences at that depth."""
        return step_floor_s(
            read_bytes=self.step_bytes(batch_size, context_tokens=context_tokens),
            flops=self.step_flops(batch_size, context_tokens=context_tokens),
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            peak_flops_per_s=self.peak_flops_per_s,
        )

    def intensity(self, batch_size: int, *, context_tokens: int) -> float:
        """FLOPs of a decode step for each byte it reads."""
        flops = self.step_flops(batch_size, context_tokens=context_tokens)
        return flops / self.step_bytes(batch_size, context_tokens=context_tokens)

    def bound(self, batch_size: int, *, context_tokens: int) -> Bound:
        """What takes longer in a decode step; reading where the peak is unknown."""
        return self._bound_at(self.intensity(batch_size, context_tokens=context_tokens))

    def _bound_at(self, intensity_flops_per_byte: float) -> Bound:
        ridge = self._ridge
        return "compute" if ridge is not None and intensity_flops_per_byte >= ridge else "memory"

    @property
    def _ridge(self) -> float | None:
        """ops:byte, the intensity from which arithmetic takes longer; None without a known peak."""
        if self.peak_flops_per_s is None:
            return None
        return ops_per_byte(self.peak_flops_per_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)

    def compute_bound_batch(self, *, context_tokens: int) -> int | None:
        """Smallest batch whose step computes as long as it reads; None where no batch does.

        Intensity only rises with the batch: weights are shared, the cache's reading stays in proportion.
        """
        return _smallest(lambda batch: self.bound(batch, context_tokens=context_tokens) == "compute")

    def break_even_batch(self) -> float | None:
        """The same by weights alone, as ops:byte tells it; None without a known peak.

        Dense: ops:byte × bytes a weight ÷ 2. A mixture's batch touches more experts than one token does, so that
        the batch is searched for.
        """
        ridge = self._ridge
        if ridge is None:
            return None
        flops = self.block_flops + self.head_flops
        if not self.reads.experts:  # reads and FLOPs grow alike, so that the batch need not be whole
            return ridge * self.reads.bytes(1) / flops
        return _smallest(lambda batch: batch * flops >= ridge * self.reads.bytes(batch))

    def largest_batch_within(self, step_limit_s: float, *, context_tokens: int, at_most: int) -> int:
        """Largest batch whose step keeps the limit; 0 when even one sequence doesn't."""
        low, high = 0, at_most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.step_s(middle, context_tokens=context_tokens) <= step_limit_s:
                low = middle
            else:
                high = middle
        return low

    def prefill_flops(self, prompt_tokens: int) -> float:
        """FLOPs of a prompt."""
        return prefill_flops(self.facts, prompt_tokens)

    def prefill_intensity(self, prompt_tokens: int) -> float:
        """FLOPs of a prompt for each byte of weights that it reads."""
        return self.prefill_flops(prompt_tokens) / self.reads.bytes(prompt_tokens)

    def prefill_s(self, prompt_tokens: int, *, batch_size: int = 1) -> float:
        """Shortest prefill of `batch_size` prompts at once, which yields their first tokens: the floor of TTFT."""
        return step_floor_s(
            read_bytes=self.reads.bytes(batch_size * prompt_tokens),
            flops=batch_size * self.prefill_flops(prompt_tokens),
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            peak_flops_per_s=self.peak_flops_per_s,
        )

    def prefill_bound(self, prompt_tokens: int) -> Bound:
        """What takes longer in the prefill of one prompt."""
        return self._bound_at(self.prefill_intensity(prompt_tokens))

    def answer_bytes(self, prompt_tokens: int, *, new_tokens: int) -> int:
        """Bytes streamed for one request alone: one pass over the prompt, one for each further token."""
        depth = mean_depth_tokens(prompt_tokens, new_tokens)
        return round(
            self.reads.bytes(prompt_tokens) + (new_tokens - 1) * self.step_bytes(1, context_tokens=depth)
        )

    def answer_s(self, prompt_tokens: int, *, new_tokens: int) -> float:
        """Shortest time to the last token of one request alone, every step taken at the mean depth."""
        depth = mean_depth_tokens(prompt_tokens, new_tokens)
        return self.prefill_s(prompt_tokens) + (new_tokens - 1) * self.step_s(1, context_tokens=depth)


def _smallest(reached: Callable[[int], bool]) -> int | None:
    """Smallest batch for which `reached` holds, given that it holds for all larger ones; None if for none."""
    if not reached(LARGEST_BATCH):
        return None
    low, high = 0, LARGEST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def mean_depth_tokens(prompt_tokens: int, new_tokens: int) -> int:
    """Tokens in the cache of a request half-way through its answer."""
    return prompt_tokens + new_tokens // 2
