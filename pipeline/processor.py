"""What the system says of this machine's CPU, which decides what libraries can run on it and how they lay weights out.

>>> isinstance(processor_flags(), frozenset)
True
"""

from __future__ import annotations

from functools import cache
from pathlib import Path


def processor_entry(name: str) -> str:
    """The first CPU's entry `name` in /proc/cpuinfo; empty where there is none (only Linux has the file)."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


@cache
def processor_flags() -> frozenset[str]:
    """Its instruction sets, such as "avx2"; empty where the system doesn't tell (only Linux on x86 does)."""
    return frozenset(processor_entry("flags").split())
