"""What /proc/cpuinfo says of the CPU, and silence where it says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.processor import processor_entry, processor_flags

CPUINFO = Path("/proc/cpuinfo")


def test_an_entry_that_there_is_not_is_empty() -> None:
    assert processor_entry("no such entry") == ""


@pytest.mark.skipif(
    not CPUINFO.is_file() or "\nflags" not in CPUINFO.read_text("utf-8", errors="replace"),
    reason="this system names no instruction sets",
)
def test_instruction_sets_are_words_of_the_first_cpu() -> None:
    flags = processor_flags()
    assert " ".join(sorted(flags)) == " ".join(sorted(set(processor_entry("flags").split())))
    assert "fpu" in flags
