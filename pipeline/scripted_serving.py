"""A serving session that plays step times on its own clock, so that the arithmetic of serving is checked exactly.

Its scheduler is real and small: first come, first served, decoding sequences first, prompts in pieces of what is left
of a step's tokens. It can reuse prefixes, run out of memory, fail, lose a request and take no time, as real engines
do. It is no engine kind; no recipe can name it.

>>> from pipeline.scheduler import Serving
>>> limits = Serving(max_batch_tokens=8, max_sequences=2, block_tokens=4, cache_blocks=8)
>>> serving = ScriptedServing(limits, step_s=1.0)
>>> serving.submit(0, [5, 6, 7], new_tokens=2)
>>> serving.step().produced, serving.step().produced, serving.step(), serving.clock()
((0,), (0,), None, 2.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.engines.base import ServedStep, ServingSession, Session, SessionMemory
from pipeline.scheduler import Serving


class ScriptedClock:
    """Seconds that pass when somebody says so; shared by sessions of one device."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Seconds of work that is done."""
        return self.now_s

    def wait_until(self, time_s: float) -> None:
        """Sleep; a time that has passed is no wait."""
        self.now_s = max(self.now_s, time_s)


@dataclass
class _Sequence:
    request: int
    prompt: tuple[int, ...]
    new_tokens: int
    computed: int = 0
    produced: int = 0

    @property
    def decodes(self) -> bool:
        return self.computed == len(self.prompt)


class ScriptedServing(ServingSession):
    """A step takes `step_s`, and `s_per_prompt_token` and `s_per_sequence` for what it computes.

    `failure` is raised at step `fails_at_step`, counted from 1. `loses` is a request that leaves without an answer
    when its prompt is done. With `share_prefixes` whole blocks of an earlier prompt's start are not computed again,
    if `reuses` is true.
    """

    execution = "scripted, paged cache"

    def __init__(
        self,
        limits: Serving,
        *,
        share_prefixes: bool = False,
        clock: ScriptedClock | None = None,
        step_s: float = 1.0,
        s_per_prompt_token: float = 0.0,
        s_per_sequence: float = 0.0,
        failure: Exception | None = None,
        fails_at_step: int | None = None,
        loses: int | None = None,
        reuses: bool = True,
        tells_starts: bool = True,
        kv_bytes_per_token: int = 0,
    ) -> None:
        self.limits, self.clock = limits, clock or ScriptedClock()
        self.prompts: list[tuple[int, ...]] = []
        """Every prompt so far."""
        self.closed = False
        self._step_s, self._s_per_prompt_token, self._s_per_sequence = (
            step_s,
            s_per_prompt_token,
            s_per_sequence,
        )
        self._failure, self._fails_at_step = failure, fails_at_step
        self._loses, self._reuses, self._tells_starts = loses, share_prefixes and reuses, tells_starts
        self._kv_bytes_per_token = kv_bytes_per_token
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._cached: list[tuple[int, ...]] = []
        self._steps = 0

    def submit(self, request: int, prompt: Sequence[int], *, new_tokens: int) -> None:
        """Behind all that wait."""
        self.prompts.append(tuple(prompt))
        self._waiting.append(_Sequence(request, tuple(prompt), new_tokens))

    def step(self) -> ServedStep | None:
        """Every decoding sequence gets a token, what is left of the step's tokens goes to prompts in order."""
        if not self._waiting and not self._running:
            return None
        self._steps += 1
        if self._failure is not None and self._steps == self._fails_at_step:
            raise self._failure
        decoding = [one for one in self._running if one.decodes]
        cached = sum(one.computed + one.produced - 1 for one in decoding)
        pairs = cached + len(decoding)
        left = self.limits.max_batch_tokens - len(decoding)
        started: list[int] = []
        pieces = 0
        while left and (sequence := self._prefilling(started)) is not None:
            piece = min(left, len(sequence.prompt) - sequence.computed)
            cached += sequence.computed
            pairs += piece * sequence.computed + piece * (piece + 1) // 2
            sequence.computed += piece
            left -= piece
            pieces += piece
            if sequence.decodes:
                decoding.append(sequence)
        decode_sequences = sum(one.produced > 0 for one in decoding)
        produced = self._give_tokens(decoding)
        self.clock.now_s += (
            self._step_s + pieces * self._s_per_prompt_token + decode_sequences * self._s_per_sequence
        )
        return ServedStep(
            produced=produced,
            prefill_tokens=pieces,
            decode_sequences=decode_sequences,
            cached_tokens=cached,
            pairs=pairs,
            preempted=0,
            started=tuple(started) if self._tells_starts else (),
        )

    def synchronize(self) -> None:
        """Work is done when a step returns."""

    def memory(self) -> SessionMemory:
        """The whole pool."""
        pool = self.limits.cache_blocks * self.limits.block_tokens * self._kv_bytes_per_token
        return SessionMemory(
            weight_bytes_resident=0, kv_cache_bytes=pool, peak_bytes=pool, reserved_bytes=None
        )

    def reset_peak(self) -> None:
        """The pool is all there is."""

    def forget(self) -> None:
        """No request and no prefix."""
        self._waiting, self._running, self._cached = [], [], []

    def close(self) -> None:
        """Nothing to free."""
        self.closed = True

    def _prefilling(self, started: list[int]) -> _Sequence | None:
        """The sequence whose prompt goes on, or the next one to be admitted."""
        for sequence in self._running:
            if not sequence.decodes:
                return sequence
        if not self._waiting or len(self._running) >= self.limits.max_sequences:
            return None
        sequence = self._waiting.pop(0)
        sequence.computed = self._found(sequence.prompt)
        self._running.append(sequence)
        started.append(sequence.request)
        return sequence

    def _found(self, prompt: tuple[int, ...]) -> int:
        """Tokens of whole blocks that an earlier prompt shares with this one; its last token is always computed."""
        block, found = self.limits.block_tokens, 0
        for earlier in self._cached if self._reuses else ():
            same = next(
                (i for i, (a, b) in enumerate(zip(earlier, prompt, strict=False)) if a != b), len(prompt)
            )
            found = max(found, min(same, len(earlier), len(prompt) - 1) // block * block)
        return found

    def _give_tokens(self, decoding: list[_Sequence]) -> tuple[int, ...]:
        """A token for each; sequences that have all of theirs leave, and their prompt stays in the cache."""
        produced = []
        for sequence in decoding:
            if sequence.request == self._loses:
                self._running.remove(sequence)
                continue
            sequence.produced += 1
            produced.append(sequence.request)
            if sequence.produced == sequence.new_tokens:
                self._running.remove(sequence)
                self._cached.append(sequence.prompt)
        return tuple(produced)


class ScriptedModel(Session):
    """Static batches and continuous ones on one clock: a prefill takes `prefill_s`, a step of either kind `step_s`.

    A paged cache of more than `most_blocks` blocks raises MemoryError, a static batch of more than `most_sequences`,
    too. `play` goes to every `ScriptedServing`.
    """

    compute_dtype = "float32"
    execution = "scripted, static cache"

    def __init__(
        self,
        *,
        prefill_s: float = 1.0,
        step_s: float = 1.0,
        vocabulary_tokens: int = 1000,
        most_blocks: int | None = None,
        most_sequences: int | None = None,
        **play: Any,
    ) -> None:
        self.vocabulary_tokens = vocabulary_tokens
        self.clock = ScriptedClock()
        self.opened: list[ScriptedServing] = []
        """Every serving session so far."""
        self.batches: list[tuple[int, ...]] = []
        """The prompt lengths of every static batch so far."""
        self._prefill_s, self._step_s = prefill_s, step_s
        self._most_blocks, self._most_sequences, self._play = most_blocks, most_sequences, play
        self._batch_size = 0

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, chunk_tokens: int | None = None
    ) -> list[int]:
        """One token a sequence."""
        del new_tokens, chunk_tokens
        if self._most_sequences is not None and len(prompts) > self._most_sequences:
            raise MemoryError(f"{len(prompts)} sequences don't fit")
        self.batches.append(tuple(len(prompt) for prompt in prompts))
        self._batch_size = len(prompts)
        self.clock.now_s += self._prefill_s
        return [0] * self._batch_size

    def decode_step(self) -> list[int]:
        """One more token a sequence, whether anybody wants it or not."""
        self.clock.now_s += self._step_s
        return [0] * self._batch_size

    def synchronize(self) -> None:
        """Work is done when a call returns."""

    def memory(self) -> SessionMemory:
        """A byte for each sequence."""
        held = self._batch_size
        return SessionMemory(
            weight_bytes_resident=0, kv_cache_bytes=held, peak_bytes=held, reserved_bytes=None
        )

    def reset_peak(self) -> None:
        """What is held is the peak."""

    def release(self) -> None:
        """Hold nothing."""
        self._batch_size = 0

    def serving(self, limits: Serving, *, share_prefixes: bool) -> ScriptedServing:
        """A session on the same clock."""
        if self._most_blocks is not None and limits.cache_blocks > self._most_blocks:
            raise MemoryError(f"{limits.cache_blocks} blocks don't fit")
        play = {"step_s": self._step_s, **self._play}
        session = ScriptedServing(limits, share_prefixes=share_prefixes, clock=self.clock, **play)
        self.opened.append(session)
        return session
