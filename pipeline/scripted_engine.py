"""A session that plays a script against its own clock, so that timing arithmetic is checked exactly.

No model stands behind it: every prefill and step takes the seconds it is told to, on a clock that moves for
nothing else. It can also do what real engines do wrong: answer a seen prompt for free, end early, fail
late, or only queue its work until it is synchronised. It is no engine kind; no recipe can name it.

>>> from pipeline.measure import time_generation
>>> session = ScriptedSession(prefill_s=(1.0,), step_s=(0.01,))
>>> time_generation(session, prompts=[[1, 2]], new_tokens=101, clock=session.clock).ttft_s
1.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipeline.engines.base import Session, SessionMemory

Play = Literal["right", "free_for_seen_prompts", "queues_work"]


class ScriptedSession(Session):
    """Plays `prefill_s` (one for each prefill) and `step_s` (one for each step); the last one goes on.

    `failure` is raised at decode step `fails_at_step` of every batch, counted from 1. A sequence ends after
    `ends_after_tokens` tokens, its first included, although more are asked for. Memory is
    `weight_bytes` and `kv_bytes_per_token` for every token held.
    A prefill takes `s_per_prompt_token` for each of its tokens and `s_per_chunk` for each piece besides, a step
    `s_per_held_token` for each one held. Holding more than `most_tokens` raises MemoryError.
    """

    compute_dtype = "float32"
    execution = "scripted"

    def __init__(
        self,
        *,
        prefill_s: Sequence[float] = (0.5,),
        step_s: Sequence[float] = (0.01,),
        play: Play = "right",
        failure: Exception | None = None,
        fails_at_step: int | None = None,
        ends_after_tokens: int | None = None,
        vocabulary_tokens: int = 1000,
        weight_bytes: int = 0,
        kv_bytes_per_token: int = 0,
        s_per_prompt_token: float = 0.0,
        s_per_chunk: float = 0.0,
        s_per_held_token: float = 0.0,
        most_tokens: int | None = None,
    ) -> None:
        self.vocabulary_tokens = vocabulary_tokens
        self.prompts: list[tuple[tuple[int, ...], ...]] = []
        """Every batch of prompts so far."""
        self.calls: list[str] = []
        """`prefill`, `decode_step` and `synchronize` in the order they were called, and `clock` readings."""
        self.batch_size = 0
        self.held_tokens = 0
        self._prefill_s, self._step_s = tuple(prefill_s), tuple(step_s)
        self._s_per_prompt_token, self._s_per_held_token = s_per_prompt_token, s_per_held_token
        self._s_per_chunk = s_per_chunk
        self._most_tokens = most_tokens
        self._play = play
        self._failure, self._fails_at_step = failure, fails_at_step
        self._ends_after_tokens = ends_after_tokens
        self._weight_bytes, self._kv_bytes_per_token = weight_bytes, kv_bytes_per_token
        self._now_s = self._queued_s = 0.0
        self._steps = 0
        self._peak_bytes = weight_bytes

    def clock(self) -> float:
        """Seconds of work that is done."""
        self.calls.append("clock")
        return self._now_s

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, chunk_tokens: int | None = None
    ) -> list[int]:
        """One token a sequence; takes the next of `prefill_s`."""
        del new_tokens
        self.calls.append("prefill")
        seconds = self._prefill_s[min(len(self.prompts), len(self._prefill_s) - 1)]
        batch = tuple(tuple(prompt) for prompt in prompts)
        seen = {prompt for earlier in self.prompts for prompt in earlier}
        free = self._play == "free_for_seen_prompts" and seen.issuperset(batch)
        self.prompts.append(batch)
        self.batch_size, self._steps = len(batch), 0
        self._hold(sum(len(prompt) for prompt in batch))
        width = max(map(len, batch))
        pieces = -(-width // (chunk_tokens or width))
        seconds += self._s_per_prompt_token * self.held_tokens + self._s_per_chunk * pieces
        self._work(0.0 if free else seconds)
        return self._tokens()

    def decode_step(self) -> list[int]:
        """One more token a sequence that hasn't ended; raises `failure` when the script says so."""
        self.calls.append("decode_step")
        self._steps += 1
        if self._failure is not None and self._steps == self._fails_at_step:
            raise self._failure
        self._hold(self.held_tokens + self.batch_size)
        step_s = self._step_s[min(self._steps, len(self._step_s)) - 1]
        self._work(step_s + self._s_per_held_token * self.held_tokens)
        return self._tokens()

    def synchronize(self) -> None:
        """Let queued work take its time."""
        self.calls.append("synchronize")
        self._now_s += self._queued_s
        self._queued_s = 0.0

    def memory(self) -> SessionMemory:
        """Weights, the tokens held and the most that was held."""
        return SessionMemory(
            weight_bytes_resident=self._weight_bytes,
            kv_cache_bytes=self.held_tokens * self._kv_bytes_per_token,
            peak_bytes=self._peak_bytes,
            reserved_bytes=None,
        )

    def reset_peak(self) -> None:
        """The peak starts at what is held."""
        self._peak_bytes = self._weight_bytes + self.held_tokens * self._kv_bytes_per_token

    def release(self) -> None:
        """Hold no token."""
        self.held_tokens = 0

    def _work(self, seconds: float) -> None:
        self._queued_s += seconds
        if self._play != "queues_work":
            self._now_s, self._queued_s = self._now_s + self._queued_s, 0.0

    def _hold(self, tokens: int) -> None:
        if self._most_tokens is not None and tokens > self._most_tokens:
            raise MemoryError(f"{tokens} tokens don't fit")
        self.held_tokens = tokens
        self._peak_bytes = max(self._peak_bytes, self._weight_bytes + tokens * self._kv_bytes_per_token)

    def _tokens(self) -> list[int]:
        ended = self._ends_after_tokens is not None and self._steps >= self._ends_after_tokens
        return [] if ended else [0] * self.batch_size
