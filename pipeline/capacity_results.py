"""What the capacity stage measures: tries at holding sequences, how many fit, and what filled the memory."""

from __future__ import annotations

from typing import Literal

from pipeline.measured import Outcome
from pipeline.values import Value

Layout = Literal["contiguous", "paged"]
"""Where keys and values of a sequence lie: in a piece, or in blocks of one pool."""


class CapacityProbe(Value):
    """One try at holding `sequences` sequences of full length at once, prefill and decode included.

    `peak_bytes` is what counts against the budget, `kv_cache_bytes` the cache at the end (paged: the pool),
    `reserve_bytes` what a GPU's allocator had reserved beyond the peak of its tensors.
    """

    sequences: int
    outcome: Outcome
    because: str = ""
    peak_bytes: int | None = None
    kv_cache_bytes: int | None = None
    reserve_bytes: int | None = None


class PeakPrediction(Value):
    """Peak beside the weights, from shapes alone: `fixed_bytes` + sequences × `bytes_per_sequence`.

    The latter is a sequence's KV cache and its activations. `beyond` is the line that holds from `from_sequences` on,
    where work buffers stop growing because prompts pass through the model in pieces.
    """

    fixed_bytes: int
    bytes_per_sequence: int
    from_sequences: int = 1
    beyond: PeakPrediction | None = None

    @classmethod
    def through(cls, few_sequences: int, few_bytes: int, next_bytes: int) -> PeakPrediction:
        """The line through the peaks of `few_sequences` and of one more."""
        each = next_bytes - few_bytes
        return cls(fixed_bytes=max(0, few_bytes - few_sequences * each), bytes_per_sequence=each)

    def bytes_at(self, sequences: int) -> int:
        """The peak of so many sequences."""
        if self.beyond and sequences >= self.beyond.from_sequences:
            return self.beyond.bytes_at(sequences)
        return self.fixed_bytes + sequences * self.bytes_per_sequence

    def sequences_within(self, held_bytes: int) -> int:
        """The most sequences whose peak isn't above `held_bytes`; 0 when not even one fits."""
        if self.beyond and self.beyond.bytes_at(self.beyond.from_sequences) <= held_bytes:
            return self.beyond.sequences_within(held_bytes)
        most = max(0, (held_bytes - self.fixed_bytes) // self.bytes_per_sequence)
        return min(most, self.beyond.from_sequences - 1) if self.beyond else most

    def bytes_per_sequence_between(self, few: int, many: int) -> float:
        """What one more sequence takes on the way from `few` to `many`."""
        return (self.bytes_at(many) - self.bytes_at(few)) / (many - few)


class MemorySplit(Value):
    """What the memory was used for at the largest batch that ran.

    `activation_bytes` is peak − weights − KV cache. Not in the peak: `reserve_bytes` (a GPU's allocator: reserved −
    peak of its tensors) and `process_bytes` (resident set of the idle process, on a CPU without the weights).
    """

    sequences: int
    weight_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    reserve_bytes: int | None
    process_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What counts against the budget."""
        return self.weight_bytes + self.kv_cache_bytes + self.activation_bytes


class CapacityResult(Value):
    """How many sequences of `context_tokens` fit at once into `budget_bytes`.

    Measured by really running prefill and decode with that many, activations included (on a CPU: resident weights
    + growth of the process over its idle state). Predicted from resident weights and `predicted_peak`; where that
    isn't known, and for the paged layout, from weights and KV cache alone.
    `limited_by` says what ended the search; `peak_bytes_per_sequence` is what one more sequence took, its KV
    cache and its activations, among the upper half of the batches that ran, and `…_predicted` what `predicted_peak`
    says of the same batches: small batches may reach their peak elsewhere in the model, where a weight is dequantized.
    `paged` is the same for a paged cache, where the recipe asks for it. `engine` is the kind that held the sequences,
    None in results from before it was kept.
    """

    layout: Layout = "contiguous"
    engine: str | None = None
    context_tokens: int
    budget_bytes: int
    budget_source: str
    weight_bytes_resident: int
    kv_bytes_per_sequence: int | None
    kv_bytes_per_sequence_predicted: int | None
    predicted_peak: PeakPrediction | None = None
    predicted_sequences: int | None
    measured_sequences: int | None
    peak_bytes_per_sequence: float | None = None
    peak_bytes_per_sequence_predicted: float | None = None
    memory: MemorySplit | None = None
    limited_by: Literal["memory", "ceiling", "failure"]
    because: str = ""
    notes: tuple[str, ...] = ()
    probes: tuple[CapacityProbe, ...] = ()
    paged: CapacityResult | None = None
