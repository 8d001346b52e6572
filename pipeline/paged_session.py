"""Continuous batching through transformers' own scheduler and paged KV cache, one step at a time in our thread.

The library runs its loop in a thread of its own and tells afterwards when tokens came. A clock has to stand between
two steps, so its batch processor is stepped here instead, synchronously: nothing else of it is changed.

    with session.serving(limits, share_prefixes=False) as serving:
        serving.submit(0, [1, 2, 3], new_tokens=8)
        while (step := serving.step()) is not None:
            print(step.produced)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from pipeline.device_runtime import DeviceRuntime
from pipeline.engines.base import ServedStep, ServingSession, SessionMemory
from pipeline.errors import StageError
from pipeline.live_tensors import resident_bytes
from pipeline.scheduler import Serving
from pipeline.traffic import Request

if TYPE_CHECKING:
    import torch

_UNPAGEABLE = (RuntimeError, ValueError, AttributeError, LookupError, TypeError)
"""What models and the library raise, as they please, when they don't fit each other."""


class PagedSession(ServingSession):
    """The requests of one loaded model, its paged cache, and the scheduler between them.

    First come, first served; a decoding sequence never waits for a prompt. No margin of the cache is kept free and
    nothing is offloaded: a sequence that lacks a block is preempted and computed again later; `ServedStep.preempted`
    counts it in the step that starts it again. Attention stays what the model was loaded with: nothing is switched to
    flash attention, on a GPU neither. With SDPA or eager attention the library gathers the pages of all sequences of a
    step and masks, for every query, those of the others; a static batch of equal prompts needs no mask. Until `close`
    the model serves nobody else. Tokens are greedy, and no end-of-sequence token ends a request.

    Every logit that chooses a token is looked at: the highest one of a step isn't finite when any is NaN.
    """

    def __init__(self, model: Any, *, limits: Serving, share_prefixes: bool, runtime: DeviceRuntime) -> None:
        """Raises StageError when the library can't page this model's cache, MemoryError when it doesn't fit."""
        self.model, self.limits = model, limits
        self.answers: dict[int, tuple[int, ...]] = {}
        """The tokens of every request that ended, until `forget`."""
        self._runtime = runtime
        self._attention: str = model.config._attn_implementation
        self._highest: torch.Tensor | None = None
        self._requests: dict[str, _Submitted] = {}
        self._manager: Any = None
        self._processor: Any = None
        try:
            self._open(share_prefixes=share_prefixes)
        except BaseException:
            self.close()
            raise

    def _open(self, *, share_prefixes: bool) -> None:
        """Make the pool and try it once: some models fail only there, others would leave it alone."""
        kind = self.model.config.model_type
        try:
            self._manager = _manager(self.model, limits=self.limits, share_prefixes=share_prefixes)
            self._processor = self._manager._create_batch_processor()
            self.submit(0, [1, 2], new_tokens=2)  # 0 may be padding, whose embedding is zero
            while self.step() is not None:
                pass
        except _UNPAGEABLE as error:
            if isinstance(error, RuntimeError) and "memory" in str(error).lower():
                raise
            raise StageError(
                f"transformers' continuous batching can't page the cache of a {kind!r} model: {error}"
            ) from error
        if not bool(self._processor.cache.cache_tensor.any()):
            raise StageError(
                f"a {kind!r} model leaves transformers' paged cache alone: it would forget its prompt"
            )
        self.forget()
        prefixes = "shared prefixes" if self._processor.cache.use_prefix_sharing else "no shared prefixes"
        self.execution = f"eager, paged cache, {self._attention} attention over gathered pages, {prefixes}"

    def __enter__(self) -> Self:
        return self

    def submit(self, request: int, prompt: Sequence[int], *, new_tokens: int) -> None:
        """Raises StageError for a request that even an empty cache couldn't hold to its end."""
        assert prompt, "a prompt holds at least one token"
        assert new_tokens > 0, "at least one token is asked for"
        name = str(request)
        assert name not in self._requests, f"request {request} stands twice"
        assert request not in self.answers, f"request {request} has ended already"
        if not self.limits.fits(Request(0.0, len(prompt), new_tokens)):
            raise StageError(
                f"request {request} of {len(prompt)} + {new_tokens} tokens never fits the paged cache of "
                f"{self.limits.cache_blocks} blocks of {self.limits.block_tokens} tokens: give it more blocks"
            )
        self._requests[name] = _Submitted(new_tokens)
        if (
            self._manager.add_request(prompt, request_id=name, max_new_tokens=new_tokens, eos_token_id=-1)
            is None
        ):
            raise StageError(f"transformers' continuous batching did not take request {request}")

    def step(self) -> ServedStep | None:
        """Raises StageError when the library failed a request or a logit isn't finite, MemoryError when the cache
        is full and no sequence can give way."""
        processor = self._processor
        try:
            prepared = processor.prepare_next_batch()
        except RuntimeError as error:
            if "can be scheduled" not in str(error):
                raise
            raise MemoryError(f"the paged cache is full and no sequence can give way: {error}") from error
        self._collect()
        if not prepared:
            if self._requests:
                raise StageError(f"transformers scheduled none of {len(self._requests)} waiting requests")
            return None
        self._highest = None
        with self.model.register_forward_hook(self._keep_highest):
            processor._generation_step(self.model)
        if self._highest is None or not math.isfinite(float(self._highest)):
            raise StageError("the model's logits are not finite: it can't be used at this precision")
        # The list is the next batch's once the states are updated.
        batch = list(processor.inputs_and_outputs.requests_in_batch)
        processor.update_batch()
        found = self._count(batch)
        self._collect()
        return found

    def _count(self, batch: Sequence[Any]) -> ServedStep:
        prefill = decode = cached = pairs = preempted = 0
        produced, started = [], []
        for entry in batch:
            state, query = entry.state, entry.query_length
            # The library has moved the sequence's position on by what the step computed.
            before = state.position_offset - query
            if before >= len(state.initial_tokens):
                decode += 1
            else:
                prefill += query
            cached += before
            pairs += query * before + query * (query + 1) // 2
            submitted = self._requests[state.request_id]
            if submitted.state is None:
                started.append(int(state.request_id))
            elif submitted.state is not state:
                # A preempted sequence comes back as another state, whose prompt holds what it had produced.
                preempted += 1
            submitted.state = state
            if entry.has_new_token:
                produced.append(int(state.request_id))
        return ServedStep(
            produced=tuple(produced),
            prefill_tokens=prefill,
            decode_sequences=decode,
            cached_tokens=cached,
            pairs=pairs,
            preempted=preempted,
            started=tuple(started),
        )

    def _collect(self) -> None:
        """Take what the library has delivered: it reports a failed request there, and raises nothing."""
        while not (delivered := self._manager.output_router.output_queue).empty():
            output = delivered.get_nowait()
            submitted = self._requests.pop(output.request_id)
            if output.error:
                raise StageError(f"request {output.request_id} failed: {output.error}")
            tokens = tuple(output.generated_tokens)
            if len(tokens) != submitted.new_tokens:
                raise StageError(
                    f"request {output.request_id} got {len(tokens)} tokens, not {submitted.new_tokens}"
                )
            self.answers[int(output.request_id)] = tokens

    def _keep_highest(self, _model: Any, _arguments: Any, output: Any) -> None:
        self._highest = output.logits.amax()

    def synchronize(self) -> None:
        """Wait for the device; a step has already waited for its own tokens."""
        self._runtime.synchronize()

    def memory(self) -> SessionMemory:
        """The pool with the two sectors that the library keeps beside it as a scratch area."""
        return SessionMemory(
            weight_bytes_resident=resident_bytes(self.model),
            kv_cache_bytes=self._processor.cache.cache_tensor.nbytes if self._processor else None,
            peak_bytes=self._runtime.peak_bytes(),
            reserved_bytes=self._runtime.reserved_bytes(),
        )

    def reset_peak(self) -> None:
        """Start the peak anew from what is held now, the pool included."""
        self._runtime.reset_peak()

    def forget(self) -> None:
        """Every request, answer and cached prefix is gone; the pool stays."""
        while not self._manager.input_queue.empty():
            self._manager.input_queue.get_nowait()
        self._processor.reset()
        self._processor.cache.reset()
        self._requests.clear()
        self.answers.clear()

    def close(self) -> None:
        """Free the pool and give the model back as it was; a second time does nothing."""
        if self._manager is not None:
            self._manager.destroy()
        self._manager = self._processor = self._highest = None
        self._requests.clear()
        if self.model.config._attn_implementation != self._attention:
            self.model.set_attn_implementation(self._attention)
        self._runtime.empty_cached_blocks()


class _Submitted:
    """What was asked for, and the library's state of it in the last step that held it."""

    def __init__(self, new_tokens: int) -> None:
        self.new_tokens = new_tokens
        self.state: Any = None


def _manager(model: Any, *, limits: Serving, share_prefixes: bool) -> Any:
    """The library's manager, whose thread is never started."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    return model.init_continuous_batching(
        # No end of sequence stops anything.
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=limits.block_tokens,
            num_blocks=limits.cache_blocks,
            max_batch_tokens=limits.max_batch_tokens,
            max_requests_per_batch=limits.max_sequences,
            allow_block_sharing=share_prefixes,
            scheduler_type="fifo",
            safety_margin=0.0,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        ),
    )
