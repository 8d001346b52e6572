"""What a loaded session needs from its device: wait for work, tell memory, start a peak anew, hand blocks back.

CUDA's calls come through `torch.cuda`, which is handed in: so a scripted one proves the same code without a GPU.

>>> CpuRuntime().reserved_bytes() is None
True
"""

from __future__ import annotations

from typing import Any, Protocol

from pipeline.process_memory import peak_resident_bytes, reset_peak_resident_bytes


class DeviceRuntime(Protocol):
    """One device, as a session sees it."""

    def synchronize(self) -> None:
        """Return when all queued work is done."""

    def peak_bytes(self) -> int:
        """Most bytes held since the last `reset_peak`."""

    def reserved_bytes(self) -> int | None:
        """Most bytes that the allocator had reserved since the last `reset_peak`; None where there is none."""

    def reset_peak(self) -> None:
        """Start the peak anew from what is held now."""

    def empty_cached_blocks(self) -> None:
        """Hand blocks that the allocator keeps for later back to the device."""


class CpuRuntime:
    """A processor: work is done when a call returns; memory is the process's resident set."""

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def peak_bytes(self) -> int:
        """Peak resident set."""
        return peak_resident_bytes()

    def reserved_bytes(self) -> int | None:
        """None: the system's allocator doesn't tell."""
        return None

    def reset_peak(self) -> None:
        """Linux only; elsewhere the peak never falls."""
        reset_peak_resident_bytes()

    def empty_cached_blocks(self) -> None:
        """Freed memory stays with the process, for the next shape."""


class CudaRuntime:
    """A GPU through `torch.cuda`: events, and the caching allocator's own counters."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def synchronize(self) -> None:
        """Wait for an event recorded behind everything that the current stream has queued."""
        event = self._cuda.Event()
        event.record()
        event.synchronize()

    def peak_bytes(self) -> int:
        """Peak of what tensors took up: without the allocator's reserve and CUDA's own context."""
        return int(self._cuda.max_memory_allocated())

    def reserved_bytes(self) -> int:
        """Peak of what the allocator took from the device."""
        return int(self._cuda.max_memory_reserved())

    def reset_peak(self) -> None:
        """Both peaks."""
        self._cuda.reset_peak_memory_stats()

    def empty_cached_blocks(self) -> None:
        """So that the next shape starts with an unfragmented allocator."""
        self._cuda.empty_cache()


def device_runtime(device_type: str) -> DeviceRuntime:
    """The runtime of torch's device type "cpu" or "cuda"."""
    if device_type != "cuda":
        return CpuRuntime()
    import torch

    return CudaRuntime(torch.cuda)
