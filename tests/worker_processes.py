"""The worker processes that a test has started.

A process that another test file left behind (multiprocessing's resource tracker lives as long as its parent) is none.
"""

from __future__ import annotations

import psutil


def workers() -> list[psutil.Process]:
    """Children of this process, theirs among them, that run a stage."""
    return [one for one in psutil.Process().children(recursive=True) if _runs_a_stage(one)]


def _runs_a_stage(process: psutil.Process) -> bool:
    try:
        return "pipeline.worker" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
