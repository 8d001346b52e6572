"""The limits that memory and arithmetic set: floors of a pass, ops:byte, capacity, price.

A decode step reads the weights once and does two FLOPs for each of them and each sequence of the batch. So a
single stream can't be faster than bandwidth ÷ bytes read, and a batch can't be faster than the arithmetic
(the roofline: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009). Every measured figure stands
beside these; one above its ceiling is void. Pure arithmetic, SI units, nothing rounded.

>>> step_s = step_floor_s(
...     read_bytes=54e9, flops=54e9, bandwidth_bytes_per_s=3.35e12, peak_flops_per_s=989e12)
>>> round(1 / step_s, 1)
62.0
>>> round(ops_per_byte(989e12, bandwidth_bytes_per_s=3.35e12))
295
"""

from __future__ import annotations

import math

PLAUSIBLE_SHARE = 1.05
"""Above this share of a measured ceiling a figure is void; a ceiling itself is measured to a few percent."""
CACHEABLE_MULTIPLE = 4
"""Weights below this many last-level caches may come out of the cache, where memory bandwidth is no limit."""
SECONDS_PER_HOUR = 3600


def ops_per_byte(peak_flops_per_s: float, *, bandwidth_bytes_per_s: float) -> float:
    """FLOPs the device can do while it reads one byte: the arithmetic intensity at the roofline's ridge."""
    _positive(peak_flops_per_s=peak_flops_per_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return peak_flops_per_s / bandwidth_bytes_per_s


def attended_pairs(tokens: int, *, window_tokens: int | None = None) -> int:
    """(query, key) pairs of causal attention over `tokens` tokens: each token sees itself and those before it.

    With a window each sees at most `window_tokens`, itself included.
    """
    window = tokens if window_tokens is None else min(tokens, window_tokens)
    return window * (window + 1) // 2 + (tokens - window) * window


def step_floor_s(
    *, read_bytes: float, flops: float, bandwidth_bytes_per_s: float, peak_flops_per_s: float | None
) -> float:
    """Shortest time of a forward pass: the longer of reading its bytes and doing its FLOPs, fully overlapped.

    Without a known peak only reading counts, which is right for small batches.
    """
    _positive(read_bytes=read_bytes, flops=flops, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    reading_s = read_bytes / bandwidth_bytes_per_s
    if peak_flops_per_s is None:
        return reading_s
    _positive(peak_flops_per_s=peak_flops_per_s)
    return max(reading_s, flops / peak_flops_per_s)


def bandwidth_share(steps_per_s: float, *, read_bytes_per_step: float, bandwidth_bytes_per_s: float) -> float:
    """Share of the memory bandwidth that decoding achieves: steps/s × bytes a step ÷ bandwidth."""
    _positive(read_bytes_per_step=read_bytes_per_step, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return steps_per_s * read_bytes_per_step / bandwidth_bytes_per_s


def plausible(share: float, *, read_bytes_per_step: float, last_level_cache_bytes: int | None) -> bool:
    """Whether a share of the bandwidth can be true.

    More than 1.05 can't (an early end, a cache, a missing synchronisation), unless the bytes are under four
    last-level caches, where the cache may serve them. An unknown cache size excuses nothing. A share that is
    not finite is never plausible.
    """
    if not math.isfinite(share) or share < 0:
        return False
    cache_bytes = last_level_cache_bytes or 0
    return share <= PLAUSIBLE_SHARE or read_bytes_per_step < CACHEABLE_MULTIPLE * cache_bytes


def capacity(
    budget_bytes: float, *, weight_bytes: float, kv_bytes_per_sequence: float, reserve_bytes: float = 0
) -> int:
    """Whole sequences whose KV cache fits beside the weights and the reserve; 0 when the weights don't fit.

    All in bytes: 80 GiB of memory are 85,899,345,920 bytes, "80 GB" are 80e9. Raises ValueError unless
    `kv_bytes_per_sequence` is positive: without a cache, memory sets no limit.
    """
    _positive(kv_bytes_per_sequence=kv_bytes_per_sequence)
    left_bytes = budget_bytes - weight_bytes - reserve_bytes
    return max(0, math.floor(left_bytes / kv_bytes_per_sequence))


def dollars_per_million_tokens(tokens_per_s: float, *, dollars_per_hour: float) -> float:
    """Price of a million tokens on a machine kept busy: $/h ÷ (tok/s × 3600 s/h) × 1e6."""
    _positive(tokens_per_s=tokens_per_s)
    return dollars_per_hour / (tokens_per_s * SECONDS_PER_HOUR) * 1e6


def _positive(**figures: float) -> None:
    for name, value in figures.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0, is {value!r}")
