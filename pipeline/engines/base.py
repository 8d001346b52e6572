"""The contract of an engine: load a checkpoint, yield token steps. Engines never read a clock.

A new engine is one file `KIND.py` in this package with one subclass of `Engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from pipeline.quantizers.base import Quantizer
from pipeline.results import Problem
from pipeline.values import Value


class SessionMemory(Value):
    """Bytes of a loaded session, from live tensors (each storage once) and the allocator or process."""

    weight_bytes_resident: int
    kv_cache_bytes: int | None
    peak_bytes: int
    reserved_bytes: int | None


class Session(ABC):
    """A loaded model that runs one static batch at a time.

    `prefill` then any number of `decode_step`; `prefill` starts afresh, with an empty cache.
    """

    compute_dtype: str
    execution: str
    """How steps run, in words for the report: "eager, dynamic cache", "compiled, static cache" …"""
    vocabulary_tokens: int
    """Prompts may hold ids 0 … vocabulary_tokens − 1 (the smaller of tokenizer and embedding)."""

    @abstractmethod
    def prefill(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> list[int]:
        """Process equally long prompts, return each sequence's first new token; room for `new_tokens`."""

    @abstractmethod
    def decode_step(self) -> list[int]:
        """One further token for every sequence of the batch."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all queued work is done."""

    @abstractmethod
    def memory(self) -> SessionMemory:
        """Bytes now and the peak since the last `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Forget the peak of memory."""

    @abstractmethod
    def release(self) -> None:
        """Drop the batch and its cache; the weights stay."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Engine(Value, ABC):
    """Settings of a way to run a checkpoint."""

    kind: str

    @abstractmethod
    def check(self, *, device: str) -> tuple[Problem, ...]:
        """What is missing to run on `device`. Imports nothing heavy."""

    @abstractmethod
    def open(self, checkpoint: Path, *, quantizer: Quantizer, device: str) -> Session:
        """Load the checkpoint and return a session. Raises CheckpointError, or the engine's own OOM."""
