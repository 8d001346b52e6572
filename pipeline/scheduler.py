"""The scheduler of a serving engine with continuous batching and a paged KV cache, played through.

It follows vLLM's and transformers': in each step every decoding sequence gets one token, what is left of the
token budget goes to prompts in order of arrival, in pieces where one doesn't fit; a sequence takes cache
blocks as it grows; when none is free the youngest one gives its blocks back, goes to the head of the queue
and is computed again. A prompt enters when all its blocks are free and are then its own, so that a prefill
never starves. Pure and deterministic.

>>> class OneSecond:
...     def step_s(self, **step: int) -> float:
...         return 1.0
...     def decode_steps_s(self, steps: int, **state: int) -> float:
...         return float(steps)
>>> serving = Serving(max_batch_tokens=8, max_sequences=1, block_tokens=16, cache_blocks=1)
>>> scheduler = Scheduler([Request(0.0, 8, 1), Request(0.0, 8, 3)], serving=serving, step_times=OneSecond())
>>> scheduler.run()
>>> scheduler.first, scheduler.end
([1.0, 2.0], [1.0, 4.0])
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Annotated, Self

from pydantic import Field, model_validator

from pipeline.step_times import StepTimes
from pipeline.traffic import Request
from pipeline.values import Value

Positive = Annotated[int, Field(gt=0)]


class Serving(Value):
    """How the engine schedules.

    `max_batch_tokens` a step (vLLM: max_num_batched_tokens), at most `max_sequences` at once (max_num_seqs), a
    KV cache of `cache_blocks` blocks of `block_tokens` tokens each.
    """

    max_batch_tokens: Positive
    max_sequences: Positive
    block_tokens: Positive
    cache_blocks: Positive

    @model_validator(mode="after")
    def _every_sequence_decodes(self) -> Self:
        if self.max_sequences > self.max_batch_tokens:
            raise ValueError(
                f"max_sequences ({self.max_sequences}) must be at most max_batch_tokens "
                f"({self.max_batch_tokens}): every sequence decodes a token a step"
            )
        return self

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens of one sequence."""
        return -(-tokens // self.block_tokens)

    def fits(self, request: Request) -> bool:
        """Whether the empty cache could hold the request to its end; its last token is never cached."""
        return self.blocks(request.prompt_tokens + request.new_tokens - 1) <= self.cache_blocks


class Scheduler:
    """The state between two steps of serving `requests`, which are in order of arrival and each fit the cache.

    `start`, `first` and `end` are when each request first ran, gave its first and its last token, in seconds.
    Only sums over the decoding sequences are kept, so that a step costs no loop over them: as all of them
    decode in every step, one that joins when `decodes` decode steps are done and has r tokens to go ends at
    decode step `decodes` + r, and it takes a new block at every decode step of the same remainder modulo
    the block size.
    """

    def __init__(self, requests: Sequence[Request], *, serving: Serving, step_times: StepTimes) -> None:
        self.serving, self.step_times = serving, step_times
        self.block_tokens, self.cache_blocks = serving.block_tokens, serving.cache_blocks
        self.count = len(requests)
        self.arrival = [request.arrival_s for request in requests]
        self.prompt = [request.prompt_tokens for request in requests]
        self.new = [request.new_tokens for request in requests]
        self.start = [-1.0] * self.count
        self.first = [-1.0] * self.count
        self.end = [-1.0] * self.count
        self.generated = [0] * self.count
        """Tokens of a sequence when its prefill began: 0 unless it was preempted."""
        self.ends_at = [-1] * self.count
        """The decode step after which a decoding sequence ends; -1 for all others."""
        self.now = 0.0
        self.following = 0
        """The first request that never ran."""
        self.preempted: deque[int] = deque()
        self.running: dict[int, None] = {}
        """In order of admission; all decode but perhaps the last one."""
        self.partial = -1
        """The running sequence whose prefill goes on, with `computed` of its tokens done."""
        self.computed = 0
        self.decodes = self.decoding = self.cached = self.used = 0
        self.renewals = [0] * serving.block_tokens
        """How many sequences take a block at a decode step of each remainder."""
        self.ending: list[int] = []
        """A heap of decode step × count + sequence; preempted ones stay in until they come up."""
        self.busy_s = self.sequence_s = 0.0
        self.peak = self.preemptions = self.steps = self.prefill_tokens = 0

    def run(self) -> None:
        """Until every request has ended."""
        while self.running or self.preempted or self.following < self.count:
            head = self._head()
            if head < 0 and not self.running:
                self.now = self.arrival[self.following]
                head = self.following
            prefills = self.partial >= 0 or not self.decoding or (head >= 0 and self._admissible(head))
            if prefills or not self._jump(waits=head >= 0):
                self._step()

    # --- the queue ---

    def _head(self) -> int:
        """The next sequence to admit, or -1 when none is there."""
        if self.preempted:
            return self.preempted[0]
        if self.following < self.count and self.arrival[self.following] <= self.now:
            return self.following
        return -1

    def _admissible(self, head: int) -> bool:
        """Whether a place and blocks are free, beside those that the decoding sequences take in this step."""
        if len(self.running) >= self.serving.max_sequences:
            return False
        taken = self.used + self.renewals[self.decodes % self.block_tokens]
        return taken + self._prefill_blocks(head) <= self.cache_blocks

    def _prefill_blocks(self, sequence: int) -> int:
        return -(-(self.prompt[sequence] + self.generated[sequence]) // self.block_tokens)

    def _admit(self, head: int) -> None:
        if self.preempted:
            self.preempted.popleft()
        else:
            self.following += 1
            self.start[head] = self.now
        self.running[head] = None
        self.used += self._prefill_blocks(head)
        self.partial, self.computed = head, 0

    # --- one step ---

    def _step(self) -> None:
        """One step of decoding sequences and pieces of prompts."""
        room = self._make_room()
        decoding, left = self.decoding, self.serving.max_batch_tokens - self.decoding
        prefill, cached, pairs = 0, self.cached, self.cached + decoding
        done: list[int] = []
        while left:
            if self.partial < 0:
                head = self._head() if room else -1
                if head < 0 or not self._admissible(head):
                    break
                self._admit(head)
            sequence, before = self.partial, self.computed
            piece = min(left, self.prompt[sequence] + self.generated[sequence] - before)
            left -= piece
            prefill += piece
            cached += before
            pairs += piece * before + piece * (piece + 1) // 2
            self.computed += piece
            if self.computed == self.prompt[sequence] + self.generated[sequence]:
                done.append(sequence)
                self.partial = -1
        self.prefill_tokens += prefill
        self._pass(
            self.step_times.step_s(
                prefill_tokens=prefill, decode_sequences=decoding, cached_tokens=cached, pairs=pairs
            ),
            steps=1,
        )
        for sequence in done:
            self._prefilled(sequence)

    def _make_room(self) -> bool:
        """Preempt the youngest until every decoding sequence has its block; whether none had to go."""
        preempted = False
        while True:
            needed = self.renewals[self.decodes % self.block_tokens]
            if self.used + needed <= self.cache_blocks:
                return not preempted
            self._preempt()
            preempted = True

    def _preempt(self) -> None:
        youngest, _ = self.running.popitem()
        if youngest == self.partial:
            self.partial = -1
            self.used -= self._prefill_blocks(youngest)
        else:
            self.generated[youngest] = self.new[youngest] - (self.ends_at[youngest] - self.decodes)
            self._leave(youngest, generated=self.generated[youngest])
        self.preempted.appendleft(youngest)
        self.preemptions += 1

    def _pass(self, seconds: float, *, steps: int) -> None:
        """Let `steps` steps of equal composition go by: every decoding sequence has as many tokens more."""
        self.now += seconds
        self.busy_s += seconds
        self.sequence_s += seconds * len(self.running)
        self.steps += steps
        if self.decoding:
            self.used += self._renewed(steps)
            self.cached += steps * self.decoding
            self.decodes += steps
        self.peak = max(self.peak, self.used)
        self._end_decoded()

    def _end_decoded(self) -> None:
        limit = (self.decodes + 1) * self.count
        while self.ending and self.ending[0] < limit:
            step, sequence = divmod(heappop(self.ending), self.count)
            if self.ends_at[sequence] == step:
                self.end[sequence] = self.now
                self._leave(sequence, generated=self.new[sequence])
                del self.running[sequence]

    def _prefilled(self, sequence: int) -> None:
        """A prefill's end gives a token: the first, or the next one of a preempted sequence."""
        if self.first[sequence] < 0:
            self.first[sequence] = self.now
        generated = self.generated[sequence] + 1
        length = self.prompt[sequence] + generated - 1
        if generated == self.new[sequence]:
            self.end[sequence] = self.now
            self.used -= self.serving.blocks(length)
            del self.running[sequence]
            return
        self.ends_at[sequence] = self.decodes + self.new[sequence] - generated
        heappush(self.ending, self.ends_at[sequence] * self.count + sequence)
        self.decoding += 1
        self.cached += length
        self.renewals[(self.decodes - length) % self.block_tokens] += 1

    def _leave(self, sequence: int, *, generated: int) -> None:
        """Take a decoding sequence with so many tokens out of the sums."""
        length = self.prompt[sequence] + generated - 1
        self.ends_at[sequence] = -1
        self.decoding -= 1
        self.cached -= length
        self.renewals[(self.decodes - length) % self.block_tokens] -= 1
        self.used -= self.serving.blocks(length)

    # --- many steps ---

    def _jump(self, *, waits: bool) -> bool:
        """Decode until a sequence ends, blocks run out or a request that could start comes; False if no step can.

        `waits`: a request is at the head of the queue and can't start, so that those behind it can't either.
        """
        while self.ends_at[self.ending[0] % self.count] != self.ending[0] // self.count:
            heappop(self.ending)
        steps = self._affordable(self.ending[0] // self.count - self.decodes)
        if steps == 0:
            return False
        seconds = self.step_times.decode_steps_s(steps, sequences=self.decoding, cached_tokens=self.cached)
        free = len(self.running) < self.serving.max_sequences
        if not waits and free and self.following < self.count:
            left_s = self.arrival[self.following] - self.now
            if seconds > left_s:
                steps, seconds = self._until(left_s, most=steps, most_s=seconds)
        self._pass(seconds, steps=steps)
        return True

    def _until(self, left_s: float, *, most: int, most_s: float) -> tuple[int, float]:
        """The fewest decode steps, at most `most`, that last at least `left_s`, and their seconds."""
        few, few_s = 0, 0.0
        while most - few > 1:
            # Where a straight line between both meets it; steps grow little, so this is nearly always it.
            guess = few + math.ceil((left_s - few_s) / (most_s - few_s) * (most - few))
            steps = min(max(guess, few + 1), most - 1)
            seconds = self.step_times.decode_steps_s(
                steps, sequences=self.decoding, cached_tokens=self.cached
            )
            if seconds >= left_s:
                most, most_s = steps, seconds
            else:
                few, few_s = steps, seconds
        return most, most_s

    def _renewed(self, steps: int) -> int:
        """Blocks that the decoding sequences take in their next `steps` steps."""
        size = self.block_tokens
        cycles, rest = divmod(steps, size)
        first = self.decodes % size
        part = self.renewals[first : first + rest]
        wrapped = first + rest - size
        return cycles * self.decoding + sum(part) + (sum(self.renewals[:wrapped]) if wrapped > 0 else 0)

    def _affordable(self, steps: int) -> int:
        """How many of the next `steps` decode steps find enough free blocks."""
        size = self.block_tokens
        free = self.cache_blocks - self.used
        if -(-steps // size) * self.decoding <= free or self._renewed(steps) <= free:
            return steps
        affordable = free // self.decoding * size
        free -= free // self.decoding * self.decoding
        while (needed := self.renewals[(self.decodes + affordable) % size]) <= free:
            free -= needed
            affordable += 1
        return affordable
