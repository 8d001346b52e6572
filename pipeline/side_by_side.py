"""Whether a set of variants can be loaded at the same time, so that they can be timed in alternation.

>>> from pipeline.data_sheet import DATA_SHEET
>>> [fit_together(sizes, device=DATA_SHEET["h200-sxm"]) for sizes in ([108e9], [108e9, 108e9])]
[True, False]
"""

from __future__ import annotations

from collections.abc import Collection

from pipeline.hardware import Device, available_memory_bytes

PROCESS_BYTES = 900_000_000
"""What a worker needs beside its weights: interpreter, torch, activations of small batches."""
USABLE_SHARE = 0.8
"""Of the free memory; the rest is for whatever else runs on the machine."""


def fit_together(loaded_bytes: Collection[float], *, device: Device, cache_bytes: float = 0.0) -> bool:
    """Whether variants whose weights take so much fit with `cache_bytes` of KV caches in all."""
    needed = sum(size + PROCESS_BYTES for size in loaded_bytes) + cache_bytes
    # A GPU is asked for by its size: its free memory could only be read by opening it in this process.
    free = device.memory_bytes if device.kind == "cuda" else available_memory_bytes()
    return needed < USABLE_SHARE * free
