"""transformers' continuous batching on this CPU, fed in real time, with every step timed.

What the simulation is checked against: the same requests, arriving at the same moments, go through a real
scheduler, a real paged KV cache and a real model, by the package's own serving session and clock.

    with PagedEngine(folder, serving=serving, threads=1) as engine:
        run = engine.serve(requests, seed=0)
        run.replay.result(), run.steps
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from pipeline.engines.transformers import Transformers, stored_dtype
from pipeline.errors import StageError
from pipeline.quantizers.native import Native
from pipeline.serving_measure import prompts_of, serve_continuously
from pipeline.serving_summary import replay_of
from pipeline.serving_turns import sleep_until
from pipeline.simulation import Replay, Request, Serving
from pipeline.step_times import StepSample


class EngineRun(NamedTuple):
    """What the engine did: each request's times, and each step's composition and time."""

    replay: Replay
    steps: list[StepSample]


class PagedEngine(AbstractContextManager["PagedEngine"]):
    """A model in FP32 behind a paged session without shared prefixes, within the limits of `serving`."""

    def __init__(self, model_folder: Path, *, serving: Serving, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        stored = Native.model_validate({"dtype": _SHORT[stored_dtype(model_folder)]})
        engine = Transformers(compute_dtype="float32")
        self.serving = serving
        self._static = engine.open(model_folder, quantizer=stored, device="cpu")
        self._paged = self._static.serving(serving, share_prefixes=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._paged.close()

    def serve(self, requests: Sequence[Request], *, seed: int) -> EngineRun:
        """Submit every request at its time and wait for all. Raises StageError when one doesn't get its tokens."""
        prompts = prompts_of(requests, vocabulary_tokens=self._static.vocabulary_tokens, seed=seed)
        self._paged.forget()
        trace = serve_continuously(
            self._paged,
            requests,
            prompts=prompts,
            concurrency=len(requests),
            clock=time.perf_counter,
            wait_until=sleep_until,
        )
        replay = replay_of(trace) if all(one.finished for one in trace.requests) else None
        if replay is None:
            raise StageError("the engine stopped before every request had its tokens")
        return EngineRun(replay, list(trace.steps))


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
