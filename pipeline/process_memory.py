"""Memory of this process: resident now, the peak, and a peak that can be started anew.

>>> 0 < resident_bytes_now() <= peak_resident_bytes()
True
"""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path


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
