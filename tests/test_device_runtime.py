"""CUDA's part of a session, on a scripted `torch.cuda` that only does queued work when it is waited for."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pipeline.alternation import TurnResult
from pipeline.device_runtime import CpuRuntime, CudaRuntime, device_runtime
from pipeline.energy import Unmetered
from pipeline.engines.transformers import TransformersSession
from pipeline.measure import time_generation
from pipeline.scheduler import Serving
from pipeline.speed_results import SpeedShape
from pipeline.stages import take_turn
from tests.test_engine_transformers import model

PREFILL_S, STEP_S = 1.0, 0.01
HELD_BYTES, WORKSPACE_BYTES, BLOCK_BYTES = 1000, 300, 512


class ScriptedCuda:
    """What `torch.cuda` offers to a session: events over a queue, and a caching allocator in blocks of 512 B.

    `work` queues seconds and takes a workspace that is freed at once, into the allocator's cache.
    """

    def __init__(self) -> None:
        self.now_s = self._queued_s = 0.0
        self.cached_bytes = 0
        self._peak_bytes = self._peak_reserved_bytes = HELD_BYTES
        self.emptied = 0

    def clock(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self._queued_s += seconds
        self.cached_bytes = -(-WORKSPACE_BYTES // BLOCK_BYTES) * BLOCK_BYTES
        self._peak_bytes = max(self._peak_bytes, HELD_BYTES + WORKSPACE_BYTES)
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, HELD_BYTES + self.cached_bytes)

    def Event(self) -> _Event:  # noqa: N802  (torch's name)
        return _Event(self)

    def done_until(self, queued_s: float) -> None:
        self.now_s += queued_s
        self._queued_s -= queued_s

    @property
    def queued_s(self) -> float:
        return self._queued_s

    def max_memory_allocated(self) -> int:
        return self._peak_bytes

    def max_memory_reserved(self) -> int:
        return self._peak_reserved_bytes

    def reset_peak_memory_stats(self) -> None:
        self._peak_bytes = HELD_BYTES
        self._peak_reserved_bytes = HELD_BYTES + self.cached_bytes

    def empty_cache(self) -> None:
        self.cached_bytes = 0
        self.emptied += 1


class _Event:
    """Knows what was queued before it, and nothing of what comes behind."""

    def __init__(self, cuda: ScriptedCuda) -> None:
        self._cuda = cuda
        self._queued_s: float | None = None

    def record(self) -> None:
        self._queued_s = self._cuda.queued_s

    def synchronize(self) -> None:
        assert self._queued_s is not None, "an event that was never recorded waits for nothing"
        self._cuda.done_until(self._queued_s)


def queueing(cuda: ScriptedCuda) -> TransformersSession:
    """A tiny model whose every forward pass queues work on the scripted device."""
    loaded = model("llama")

    def queue(_model: Any, arguments: Any, _output: Any) -> None:
        tokens = arguments[0].shape[1] if arguments else 1
        cuda.work(PREFILL_S if tokens > 1 else STEP_S)

    loaded.register_forward_hook(queue)
    return TransformersSession(
        loaded,
        cache="dynamic",
        compute_dtype="float32",
        vocabulary_tokens=300,
        runtime=CudaRuntime(cuda),
    )


def turn(session: TransformersSession, cuda: ScriptedCuda, *, batch_size: int = 1) -> TurnResult:
    shape = SpeedShape(batch_size=batch_size, prompt_tokens=8, new_tokens=11)
    return take_turn(session, shape=shape, seed=1, clock=cuda.clock, meter=Unmetered("no device"))


def test_work_that_is_only_queued_is_in_the_measured_time() -> None:
    cuda = ScriptedCuda()
    session = queueing(cuda)
    session.prefill([[1, 2]], new_tokens=2)  # work left over from before
    trace = time_generation(session, prompts=[[3, 4, 5]], new_tokens=101, clock=cuda.clock)
    assert trace.ttft_s == pytest.approx(PREFILL_S)
    assert trace.tpot_s == pytest.approx(STEP_S)
    assert trace.decode_tokens_per_s == pytest.approx(100.0)


def test_the_peak_is_the_allocator_s_and_starts_anew_with_every_shape() -> None:
    cuda = ScriptedCuda()
    session = queueing(cuda)
    session.prefill([[1, 2]], new_tokens=2)
    session.reset_peak()
    assert session.memory().peak_bytes == HELD_BYTES
    for batch_size in (1, 2):
        memory = turn(session, cuda, batch_size=batch_size).memory
        assert memory is not None
        assert (memory.peak_bytes, memory.reserved_bytes) == (1300, 1512)


def test_cached_blocks_are_handed_back_between_shapes() -> None:
    cuda = ScriptedCuda()
    session = queueing(cuda)
    turn(session, cuda)
    assert cuda.cached_bytes == 512, "still cached until the next shape"
    session.release()
    session.reset_peak()
    assert session.memory().reserved_bytes == HELD_BYTES


def test_continuous_batching_sees_the_same_device() -> None:
    cuda = ScriptedCuda()
    limits = Serving(max_batch_tokens=8, max_sequences=2, block_tokens=4, cache_blocks=16)
    with queueing(cuda).serving(limits, share_prefixes=False) as serving:
        serving.synchronize()
        serving.reset_peak()
        before_s = cuda.clock()
        serving.submit(0, [1, 2, 3], new_tokens=3)
        assert [serving.step() for _ in range(3)][-1] is not None
        assert cuda.clock() == before_s, "nothing is done yet"
        serving.synchronize()
        assert cuda.clock() == pytest.approx(before_s + 3 * STEP_S)
        assert serving.memory().peak_bytes == 1300
        emptied = cuda.emptied
    assert cuda.emptied > emptied


def test_a_processor_has_its_resident_peak_and_no_reserve() -> None:
    runtime = device_runtime("cpu")
    assert isinstance(runtime, CpuRuntime)
    runtime.synchronize()
    runtime.empty_cached_blocks()
    assert runtime.reserved_bytes() is None
    runtime.reset_peak()
    before_bytes = runtime.peak_bytes()
    held = os.urandom(64 * 2**20)
    assert runtime.peak_bytes() >= before_bytes + len(held) // 2
