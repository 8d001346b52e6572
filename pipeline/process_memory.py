"""Memory of this process: resident now, the peak, a peak that can be started anew, and a limit on it.

>>> 0 < resident_bytes_now() <= peak_resident_bytes()
True
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_M_MMAP_THRESHOLD = -3
"""glibc's malloc.h."""
_LARGE_BLOCK_BYTES = 65_536


def resident_bytes_now() -> int:
    """Resident set size in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Largest resident set since the start or the last reset, in bytes.

    On Linux from VmHWM, which a reset lowers; elsewhere from ru_maxrss, which never falls (bytes on macOS,
    KiB on other systems).
    """
    try:
        status = Path("/proc/self/status").read_text("ascii")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    # The kernel updates the two counters lazily, so the peak may lag behind the present value.
    return max(int(line.split()[1]) * 1024, resident_bytes_now())


def return_freed_memory() -> None:
    """Give memory that the allocator keeps for later back to the system, so that it isn't counted as used.

    Only glibc knows how; elsewhere nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak_resident_bytes() -> bool:
    """Start the peak anew at the present resident size (Linux); False where the system can't."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def return_large_blocks_at_once() -> None:
    """From now on a large block goes back to the system when it is freed, so that the peak is what was held.

    By default glibc raises the size from which it does so with every block that is freed, up to 32 MiB, and keeps
    smaller ones: its M_MMAP_THRESHOLD, fixed here, in mallopt(3). Elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def private_bytes_now() -> int | None:
    """Private writable memory that this process has asked for, touched or not; None where the system doesn't tell.

    Linux: VmData, which is what RLIMIT_DATA counts since 4.7 (setrlimit(2)).
    """
    if sys.platform != "linux":
        return None
    try:
        status = Path("/proc/self/status").read_text("ascii")
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("VmData:")), None)
    return int(line.split()[1]) * 1024 if line else None


@contextmanager
def private_memory_limit(limit_bytes: int | None) -> Iterator[None]:
    """Within the block the system refuses memory beyond `limit_bytes` of `private_bytes_now`; None sets no limit.

    What is refused raises MemoryError, or the library's own exception. A stricter limit that stands already stays.
    """
    if limit_bytes is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = [limit for limit in (limit_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(allowed), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
