"""Sessions on vLLM: static batches and continuous batching on one scheduler and one cache.

engine = SteppedEngine(library, llm_engine)
with VllmSession(engine, compute_dtype="bfloat16", vocabulary_tokens=32000, runtime=runtime) as session:
    session.prefill([[1, 2, 3]], new_tokens=8)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.device_runtime import DeviceRuntime
from pipeline.engines.base import ServedStep, ServingSession, Session, SessionMemory
from pipeline.errors import StageError
from pipeline.live_tensors import parameter_bytes
from pipeline.scheduler import Serving
from pipeline.traffic import Request
from pipeline.vllm_stepping import NOTHING, SteppedEngine

if TYPE_CHECKING:
    import numpy


class VllmSession(Session):
    """Static batches on vLLM's scheduler.

    A prompt set that doesn't fit into one step takes several, in which the sequences that are through already decode.
    Those tokens are kept and handed out in their turn, and the sequences decode on, so that every decode step really
    computes one token for each sequence; its context is longer by the few tokens it is ahead.
    """

    def __init__(
        self, engine: SteppedEngine, *, compute_dtype: str, vocabulary_tokens: int, runtime: DeviceRuntime
    ) -> None:
        self.engine, self.compute_dtype, self.vocabulary_tokens = engine, compute_dtype, vocabulary_tokens
        self.execution = (
            f"vLLM {engine.library.version} in this process, compiled with CUDA graphs, paged cache of "
            f"{engine.block_tokens}-token blocks, no shared prefixes, up to {engine.most_batch_tokens} tokens a step, "
            "no step scheduled ahead"
        )
        self._runtime = runtime
        self._weight_bytes = parameter_bytes(engine.model)
        self._ahead: list[deque[int]] = []

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, chunk_tokens: int | None = None
    ) -> list[int]:
        """Prompts [batch][tokens] → first tokens [batch]; unequal ones need no padding.

        With `chunk_tokens` no step computes more than so many tokens a sequence of the batch. Raises MemoryError when
        the sequences don't fit into the cache together, StageError when there are more than vLLM was started for.
        """
        engine = self.engine
        engine.forget()
        if len(prompts) > engine.most_sequences:
            raise StageError(
                f"a batch of {len(prompts)}: vLLM was started for {engine.most_sequences} sequences; raise "
                "engine.max_sequences"
            )
        budget = min(engine.most_batch_tokens, (chunk_tokens or engine.most_batch_tokens) * len(prompts))
        engine.limit(sequences=engine.most_sequences, batch_tokens=budget)
        steps = _prefill_steps(sum(map(len, prompts)), sequences=len(prompts), budget=budget)
        for number, prompt in enumerate(prompts):
            engine.submit(number, prompt, most_tokens=new_tokens + steps)
        self._ahead = [deque() for _ in prompts]
        while not all(self._ahead):
            self._step(prompts_left=True)
        return self._handed_out()

    def decode_step(self) -> list[int]:
        """One more greedy token for every sequence. Raises MemoryError when one had to give its blocks back."""
        assert self._ahead, "prefill comes first"
        self._step(prompts_left=False)
        return self._handed_out()

    def _step(self, *, prompts_left: bool) -> None:
        stepped = self.engine.step()
        facts = stepped.facts if stepped else NOTHING
        stuck = facts.preempted or (
            not facts.prefill_tokens if prompts_left else len(facts.produced) < len(self._ahead)
        )
        if stepped is None or stuck:
            raise MemoryError(
                f"{len(self._ahead)} sequences don't fit into vLLM's cache of {self.engine.blocks} blocks of "
                f"{self.engine.block_tokens} tokens at once"
            )
        for number, token in stepped.tokens.items():
            self._ahead[number].append(token)

    def _handed_out(self) -> list[int]:
        return [tokens.popleft() for tokens in self._ahead]

    def synchronize(self) -> None:
        """Wait for the device; a step has already waited for its own tokens."""
        self._runtime.synchronize()

    def memory(self) -> SessionMemory:
        """The cache counts as far as sequences have blocks of it: vLLM makes all of it when it starts."""
        engine = self.engine
        return SessionMemory(
            weight_bytes_resident=self._weight_bytes,
            kv_cache_bytes=engine.held_blocks * engine.block_bytes if self._ahead else None,
            peak_bytes=self._runtime.peak_bytes()
            - engine.pool_bytes
            + engine.most_held_blocks * engine.block_bytes,
            reserved_bytes=self._runtime.reserved_bytes(),
        )

    def reset_peak(self) -> None:
        """Start the peak anew from what is held now."""
        self._runtime.reset_peak()
        self.engine.most_held_blocks = self.engine.held_blocks

    def release(self) -> None:
        """End the batch; cache and weights stay with vLLM."""
        self.engine.forget()
        self._ahead = []

    def logits(self, tokens: Sequence[int]) -> numpy.ndarray:
        """FP32 logits [tokens, vocabulary], caught where vLLM computes those of one request and its prompt.

        Raises StageError for a text that one step doesn't take, whose pieces would come in another order.
        """
        if len(tokens) > self.engine.most_batch_tokens:
            most = self.engine.most_batch_tokens
            raise StageError(
                f"a text of {len(tokens)} tokens in steps of {most}: raise engine.max_batch_tokens"
            )
        self.release()
        rows: list[numpy.ndarray] = []
        model = self.engine.model
        compute = model.compute_logits

        def caught(hidden_states: Any, *arguments: Any, **named: Any) -> Any:
            made = compute(hidden_states, *arguments, **named)
            rows.append(made.float().cpu().numpy())
            return made

        model.compute_logits = caught
        try:
            self.engine.limit(
                sequences=self.engine.most_sequences, batch_tokens=self.engine.most_batch_tokens
            )
            self.engine.submit(0, tokens, most_tokens=1, prompt_logprobs=1)
            while self.engine.step() is not None:
                pass
        finally:
            model.compute_logits = compute
        return _in_order(rows, tokens=len(tokens), columns=self.vocabulary_tokens)

    def serving(self, limits: Serving, *, share_prefixes: bool) -> VllmServing:
        """Continuous batching on the same engine. Raises StageError for what it wasn't started for."""
        if share_prefixes:
            raise StageError(
                "vLLM was started without prefix caching, so that no timed prompt is cheaper than it is"
            )
        self.release()
        return VllmServing(self.engine, limits=limits, weight_bytes=self._weight_bytes, runtime=self._runtime)


class VllmServing(ServingSession):
    """Requests that join and leave vLLM's own batch at every step, within limits that may be tighter than vLLM's."""

    def __init__(
        self, engine: SteppedEngine, *, limits: Serving, weight_bytes: int, runtime: DeviceRuntime
    ) -> None:
        """Raises StageError for limits beyond what vLLM was started with, MemoryError for more cache than it has."""
        for asked, most, name in (
            (limits.max_sequences, engine.most_sequences, "max_sequences"),
            (limits.max_batch_tokens, engine.most_batch_tokens, "max_batch_tokens"),
        ):
            if asked > most:
                raise StageError(f"{name} {asked}: vLLM was started for {most}; raise engine.{name}")
        held, pool = (
            limits.cache_blocks * limits.block_tokens,
            engine.blocks * engine.block_tokens,
        )
        if held > pool:
            raise MemoryError(f"a cache of {held} tokens: vLLM's has room for {pool}")
        self.engine, self.limits = engine, limits
        self.answers: dict[int, tuple[int, ...]] = {}
        """The tokens of every request so far, until `forget`."""
        self._cache_bytes = -(-held // engine.block_tokens) * engine.block_bytes
        self._weight_bytes, self._runtime = weight_bytes, runtime
        self.execution = (
            f"vLLM {engine.library.version}'s scheduler, compiled with CUDA graphs, paged cache of "
            f"{engine.block_tokens}-token blocks, no shared prefixes, no step scheduled ahead"
        )
        engine.limit(sequences=limits.max_sequences, batch_tokens=limits.max_batch_tokens)

    def submit(self, request: int, prompt: Sequence[int], *, new_tokens: int) -> None:
        """Raises StageError for a request that even an empty cache couldn't hold to its end."""
        assert request not in self.answers, f"request {request} stands twice"
        if not self.limits.fits(Request(0.0, len(prompt), new_tokens)):
            raise StageError(
                f"request {request} of {len(prompt)} + {new_tokens} tokens never fits the paged cache of "
                f"{self.limits.cache_blocks} blocks of {self.limits.block_tokens} tokens: give it more blocks"
            )
        self.answers[request] = ()
        self.engine.submit(request, prompt, most_tokens=new_tokens)

    def step(self) -> ServedStep | None:
        """One step of vLLM's scheduler."""
        stepped = self.engine.step()
        if stepped is None:
            return None
        for number, token in stepped.tokens.items():
            self.answers[number] += (token,)
        return stepped.facts

    def synchronize(self) -> None:
        """Wait for the device."""
        self._runtime.synchronize()

    def memory(self) -> SessionMemory:
        """The pool is what the limits allow of vLLM's cache, the rest of which counts as reserved only."""
        return SessionMemory(
            weight_bytes_resident=self._weight_bytes,
            kv_cache_bytes=self._cache_bytes,
            peak_bytes=self._runtime.peak_bytes() - self.engine.pool_bytes + self._cache_bytes,
            reserved_bytes=self._runtime.reserved_bytes(),
        )

    def reset_peak(self) -> None:
        """Start the peak anew."""
        self._runtime.reset_peak()

    def forget(self) -> None:
        """Every request and answer is gone."""
        self.engine.forget()
        self.answers.clear()

    def close(self) -> None:
        """End every request; vLLM's cache stays with it. A second time does nothing."""
        self.forget()


def _prefill_steps(prompt_tokens: int, *, sequences: int, budget: int) -> int:
    """Steps that prompts take at most when all but one sequence decode beside them."""
    left = budget - (sequences - 1)
    if left < 1:
        raise StageError(
            f"{sequences} sequences leave no room for prompts in steps of {budget} tokens; raise "
            "engine.max_batch_tokens"
        )
    return -(-prompt_tokens // left) + 1


def _in_order(rows: Sequence[Any], *, tokens: int, columns: int) -> numpy.ndarray:
    """Logits of all tokens from those of the last one, which are computed first, and those of the prompt."""
    import numpy

    last, *prompt = rows
    before = numpy.concatenate([last[:0], *prompt])[: tokens - 1]
    if len(last) != 1 or len(before) != tokens - 1:
        shapes = ", ".join(str(row.shape) for row in rows)
        raise StageError(f"vLLM computed logits of {shapes} for a prompt of {tokens} tokens")
    ordered: numpy.ndarray = numpy.concatenate([before, last])[:, :columns]
    return ordered
