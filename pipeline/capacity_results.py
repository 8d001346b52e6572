"""What the capacity stage measures: tries at holding sequences, and how many fit."""

from __future__ import annotations

from typing import Literal

from pipeline.measured import Outcome
from pipeline.values import Value


class CapacityProbe(Value):
    """One try at holding `sequences` sequences of full length at once, prefill and decode included."""

    sequences: int
    outcome: Outcome
    because: str = ""
    peak_bytes: int | None = None


class CapacityResult(Value):
    """How many sequences of `context_tokens` fit at once into `budget_bytes`.

    Predicted from resident weights and KV cache alone; measured by really running prefill and decode with
    that many, activations included (on a CPU: resident weights + growth of the process over its idle state).
    `limited_by` says what ended the search; `peak_bytes_per_sequence` is what one more sequence took, its KV
    cache and its activations, between the smallest and the largest batch that ran.
    """

    context_tokens: int
    budget_bytes: int
    budget_source: str
    weight_bytes_resident: int
    kv_bytes_per_sequence: int
    kv_bytes_per_sequence_predicted: int | None
    predicted_sequences: int | None
    measured_sequences: int | None
    peak_bytes_per_sequence: float | None = None
    limited_by: Literal["memory", "ceiling", "failure"]
    because: str = ""
    probes: tuple[CapacityProbe, ...] = ()
