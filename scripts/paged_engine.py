"""transformers' continuous-batching engine on this CPU, fed in real time, with every step recorded.

What the simulation is checked against: the same requests, arriving at the same moments, go through a real
scheduler, a real paged KV cache and a real model. Nothing of the library is changed: a step is timed around
the engine's own loop body, and what was in it is read from the batch that the engine keeps.

    with PagedEngine(folder, serving=serving, threads=1) as engine:
        run = engine.serve(requests, seed=0)
        run.replay.result(), run.steps
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from pipeline.errors import StageError
from pipeline.simulation import Replay, Request, Serving
from pipeline.step_times import StepSample

LONGEST_SILENCE_S = 120.0
"""Without any result while requests are waiting: the engine's thread has died or hangs."""
FIRST_ORDINARY_ID = 100
"""Token ids below it are often special; prompts are drawn from the others."""


class EngineRun(NamedTuple):
    """What the engine did: each request's times, and each step's composition and time."""

    replay: Replay
    steps: list[StepSample]


class PagedEngine(AbstractContextManager["PagedEngine"]):
    """A loaded model behind transformers' continuous-batching manager; weights in FP32.

    Greedy, no end-of-sequence stop, so that answers have exactly the lengths asked for; no prefix sharing and
    no safety margin, so that the scheduler's limits are those of `serving`.
    """

    def __init__(self, model_folder: Path, *, serving: Serving, threads: int) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(threads)
        self.serving = serving
        self.model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        self.vocabulary = self.model.config.get_text_config().vocab_size
        self.manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=serving.block_tokens,
                num_blocks=serving.cache_blocks,
                max_batch_tokens=serving.max_batch_tokens,
                max_requests_per_batch=serving.max_sequences,
                allow_block_sharing=False,
                safety_margin=0.0,
                scheduler_type="fifo",
            ),
        )
        self.recorder = _StepRecorder(self.manager)

    def __enter__(self) -> PagedEngine:
        self.manager.warmup()
        self.manager.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.manager.stop(block=True, hard_stop=kind is not None)
        self.manager.destroy()

    def serve(self, requests: Sequence[Request], *, seed: int) -> EngineRun:
        """Submit every request at its time and wait for all. Raises StageError when the engine fails one.

        Requests that are there from the start are all submitted before the engine may look.
        """
        import numpy as np

        draw = np.random.default_rng(seed)
        prompts = [
            draw.integers(FIRST_ORDINARY_ID, self.vocabulary, size=request.prompt_tokens).tolist()
            for request in requests
        ]
        at_once = sum(request.arrival_s == 0.0 for request in requests)
        self.recorder.begin()
        with self.manager.pause():
            for place in range(at_once):
                self._submit(place, prompts[place], requests[place])
            zero_s = time.perf_counter()
        for place in range(at_once, len(requests)):
            time.sleep(max(0.0, zero_s + requests[place].arrival_s - time.perf_counter()))
            self._submit(place, prompts[place], requests[place])
        self._wait_for_all(len(requests))
        return EngineRun(self._replay(requests, zero_s=zero_s), list(self.recorder.samples))

    def _submit(self, place: int, prompt: list[int], request: Request) -> None:
        self.manager.add_request(
            prompt, request_id=str(place), max_new_tokens=request.new_tokens, eos_token_id=-1
        )

    def _wait_for_all(self, count: int) -> None:
        ended = 0
        last_s = time.perf_counter()
        while ended < count:
            output = self.manager.get_result(timeout=1.0)
            if output is not None:
                if output.error:
                    raise StageError(f"the engine failed request {output.request_id}: {output.error}")
                ended += 1
                last_s = time.perf_counter()
            elif not self.manager.is_running() or time.perf_counter() - last_s > LONGEST_SILENCE_S:
                raise StageError(f"the engine stopped after {ended} of {count} requests")

    def _replay(self, requests: Sequence[Request], *, zero_s: float) -> Replay:
        import numpy as np

        recorder = self.recorder
        progress = [recorder.progress[str(place)] for place in range(len(requests))]
        for place, (request, one) in enumerate(zip(requests, progress, strict=True)):
            if one.tokens != request.new_tokens:
                raise StageError(f"request {place} got {one.tokens} tokens, not {request.new_tokens}")
        return Replay(
            served=np.arange(len(requests)),
            arrival_s=np.array([request.arrival_s for request in requests]),
            start_s=np.array([one.start_s for one in progress]) - zero_s,
            first_token_s=np.array([one.first_token_s for one in progress]) - zero_s,
            end_s=np.array([one.end_s for one in progress]) - zero_s,
            new_tokens=np.array([request.new_tokens for request in requests]),
            rejected=0,
            busy_s=sum(sample.seconds for sample in recorder.samples),
            sequence_s=recorder.sequence_s,
            peak_blocks=recorder.peak_blocks,
            preemptions=recorder.preemptions,
            steps=len(recorder.samples),
            prefill_tokens=sum(sample.prefill_tokens for sample in recorder.samples),
        )


@dataclass
class _Progress:
    """One request's times on the engine's clock, and its tokens so far."""

    start_s: float
    first_token_s: float = 0.0
    end_s: float = 0.0
    tokens: int = 0


class _StepRecorder:
    """Times the manager's loop body and notes what each step held.

    Token times are taken here, not from the engine: it forgets those of a sequence that it preempts.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.page_tokens = manager.continuous_batching_config.page_size
        self.body = manager._generation_loop_body
        manager._generation_loop_body = self
        self.begin()

    def begin(self) -> None:
        """Forget the steps so far."""
        self.samples: list[StepSample] = []
        self.progress: dict[str, _Progress] = {}
        self.sequence_s = 0.0
        self.peak_blocks = 0
        self.preemptions = 0

    def __call__(self, batch_processor: Any, bootstrapping: bool) -> bool:
        step = self.manager.current_batch
        begin_s = time.perf_counter()
        goes_on = bool(self.body(batch_processor, bootstrapping=bootstrapping))
        end_s = time.perf_counter()
        if self.manager.current_batch != step:
            self._note(batch_processor.inputs_and_outputs.requests_in_batch, begin_s=begin_s, end_s=end_s)
        return goes_on

    def _note(self, batch: Sequence[Any], *, begin_s: float, end_s: float) -> None:
        prefill = decode = cached = pairs = blocks = 0
        for entry in batch:
            # The engine has moved the sequence's position on by what the step computed.
            query, before = entry.query_length, entry.state.position_offset - entry.query_length
            if before >= len(entry.state.initial_tokens):
                decode += 1
            else:
                prefill += query
                self.preemptions += before == 0 and entry.state._true_initial_tokens > 0
            cached += before
            pairs += query * before + query * (query + 1) // 2
            blocks += -(-(before + query) // self.page_tokens)
            one = self.progress.setdefault(entry.state.request_id, _Progress(start_s=begin_s))
            if entry.has_new_token:
                one.first_token_s = one.first_token_s or end_s
                one.end_s = end_s
                one.tokens += 1
        self.sequence_s += (end_s - begin_s) * len(batch)
        self.peak_blocks = max(self.peak_blocks, blocks)
        self.samples.append(
            StepSample(
                seconds=end_s - begin_s,
                prefill_tokens=prefill,
                decode_sequences=decode,
                cached_tokens=cached,
                pairs=pairs,
            )
        )
