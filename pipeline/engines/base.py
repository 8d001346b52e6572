"""The contract of an engine: load a checkpoint, yield token steps, static or continuous. Engines never read a clock.

A new engine is one file `KIND.py` in this package with one subclass of `Engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.capacity_results import PeakPrediction
from pipeline.errors import StageError
from pipeline.quantizers.base import Quantizer
from pipeline.results import Problem
from pipeline.scheduler import Serving
from pipeline.values import Value

if TYPE_CHECKING:
    import numpy


class SessionMemory(Value):
    """Bytes of a loaded session, from live tensors (each storage once) and the allocator or process.

    `weight_bytes_copied` of the resident ones lie in memory a second time, in another order for another use: a step
    reads one of the two. `kv_bytes_filled` is the part of the cache that holds tokens, where more was reserved for
    them; None where all does.
    """

    weight_bytes_resident: int
    weight_bytes_copied: int = 0
    kv_cache_bytes: int | None
    kv_bytes_filled: int | None = None
    peak_bytes: int
    reserved_bytes: int | None


class ServedStep(NamedTuple):
    """What one step of continuous batching did.

    `produced` names the requests that got a token, each once. `prefill_tokens` are prompt tokens that were
    computed (recomputed ones of preempted requests included), `decode_sequences` the sequences that decoded,
    `cached_tokens` the tokens that lay in the KV cache of all sequences of the step before it, `pairs` the
    (query, key) pairs that attention must look at. `started` names the requests of which a step computed
    something for the first time; without it waiting and prefill can't be told apart.
    """

    produced: tuple[int, ...]
    prefill_tokens: int
    decode_sequences: int
    cached_tokens: int
    pairs: int
    preempted: int
    started: tuple[int, ...] = ()


class ServingSession(ABC):
    """Continuous batching over a paged KV cache: requests join and leave at every step. Never reads a clock.

    `submit` any time, `step` as long as something is waiting or running.
    """

    execution: str
    """How steps run, in words for the report."""

    @abstractmethod
    def submit(self, request: int, prompt: Sequence[int], *, new_tokens: int) -> None:
        """Queue a request under a number of its own; it ends after exactly `new_tokens` tokens."""

    @abstractmethod
    def step(self) -> ServedStep | None:
        """One step of whatever is waiting and running; None when nothing is."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all queued work is done."""

    @abstractmethod
    def memory(self) -> SessionMemory:
        """Bytes now and the peak since the last `reset_peak`; `kv_cache_bytes` is the whole paged pool."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Forget the peak of memory."""

    @abstractmethod
    def forget(self) -> None:
        """Drop every request and every cached prefix."""

    @abstractmethod
    def close(self) -> None:
        """Free the paged cache; the weights stay with the session that this one came from."""

    def __enter__(self) -> ServingSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session(ABC):
    """A loaded model that runs one static batch at a time.

    `prefill` then any number of `decode_step`; `prefill` starts afresh, with an empty cache, in memory that the
    batch before it may have left: `release` hands that back to the device.
    """

    compute_dtype: str
    execution: str
    """How steps run, in words for the report: "eager, dynamic cache", "compiled, static cache" …"""
    vocabulary_tokens: int
    """Prompts may hold ids 0 … vocabulary_tokens − 1 (the smaller of tokenizer and embedding)."""

    @abstractmethod
    def prefill(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, chunk_tokens: int | None = None
    ) -> list[int]:
        """Process prompts, return each sequence's first new token; room for `new_tokens`.

        Shorter prompts are padded on the left and masked, so that a batch may hold unequal ones. With
        `chunk_tokens` the prompts go through the model in pieces of at most so many tokens a sequence.
        """

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

    def logits(self, tokens: Sequence[int]) -> numpy.ndarray:
        """FP32 logits [tokens, vocabulary] after each token of one sequence; the batch before it is dropped.

        For comparing what two engines make of one checkpoint, not for timing. Raises StageError when this engine
        doesn't hand them out.
        """
        del tokens
        raise StageError("this engine hands out no logits")

    @property
    def executions(self) -> tuple[str, ...]:
        """Every way in which it can run a batch, as `execution` would say it; the first one is the plain one."""
        return (self.execution,)

    def run_as(self, execution: str) -> None:
        """Run the batches that follow in one of `executions`; the batch before is dropped."""
        assert execution in self.executions

    def disagreement(
        self, prompts: Sequence[Sequence[int]], *, execution: str, room_tokens: int, steps: int
    ) -> str:
        """How the first `steps` tokens of `execution` differ from the plain way's, in a sentence; "" if they don't.

        The batch has room for `room_tokens` new tokens a sequence; it is dropped afterwards.
        """
        del prompts, room_tokens, steps
        assert execution in self.executions
        return ""

    def serving(self, limits: Serving, *, share_prefixes: bool) -> ServingSession:
        """Continuous batching on the same weights, within `limits`; cached prefixes are reused if wanted.

        Raises StageError when this engine has no continuous batching.
        """
        del limits, share_prefixes
        raise StageError("this engine has no continuous batching")

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

    def needs(self, quantizer: Quantizer) -> tuple[Problem, ...]:
        """What is missing besides to run what `quantizer` writes. Imports nothing heavy."""
        del quantizer
        return ()

    @property
    def serves(self) -> bool:
        """Whether its sessions batch continuously over a paged cache."""
        return False

    @property
    def fills_device(self) -> bool:
        """Whether a session takes the device's memory for itself, so that no other variant fits beside it."""
        return False

    @property
    def most_sequences(self) -> int | None:
        """How many sequences a static batch may have at most; None where only memory ends it."""
        return None

    def loaded_bytes(self, stored_bytes: int) -> float:
        """The most memory that weights of so many bytes on disk take, with a wider type and copies while loading."""
        return 2.0 * stored_bytes

    @abstractmethod
    def refuses(self, quantizer: Quantizer) -> str | None:
        """Why this engine can't run what `quantizer` writes, as it is on disk; None where it can."""

    def import_libraries(self) -> None:
        """Import what loading imports, so that its memory isn't taken for the weights'."""

    @abstractmethod
    def kv_element_bytes(self, quantizer: Quantizer) -> int:
        """Bytes of one cached value beside the weights of `quantizer`."""

    def float_bytes(self) -> int | None:
        """Bytes of the floats that weights are held and computed in; None for those that are stored."""
        return None

    def cache_tokens(self, tokens: int) -> int:
        """Tokens that a sequence's cache reserves memory for when it holds so many."""
        return tokens

    @abstractmethod
    def predicted_peak(self, checkpoint: Path, *, prompt_tokens: int, new_tokens: int) -> PeakPrediction:
        """The peak of prefill and decode over the number of sequences, KV cache included, weights excluded.

        Nothing of the size of the model is loaded. Raises whatever a library raises that can't tell.
        """

    @abstractmethod
    def open(self, checkpoint: Path, *, quantizer: Quantizer, device: str) -> Session:
        """Load the checkpoint and return a session. Raises CheckpointError, or the engine's own OOM."""
