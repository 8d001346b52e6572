"""What is running and how long is left: one moving line on a terminal, plain lines elsewhere.

progress = Progress(sys.stderr, steps=("quantize fp16", "speed"), durations_s={"speed": 60.0})
with progress.step("speed") as step:
    step.tell("int8: batch 1, repeat 2")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

Tell = Callable[[str], None]
"""Takes a few words about what is going on."""


def silent(text: str) -> None:
    """Tell nobody."""
    del text


class Progress:
    """Tells of the steps of a run on `stream`; the time left is the sum of what the open steps took before."""

    def __init__(self, stream: TextIO, *, steps: Sequence[str], durations_s: Mapping[str, float]) -> None:
        self._stream = stream
        self._left = list(steps)
        self._total = len(steps)
        self._durations_s = dict(durations_s)
        self._terminal = stream.isatty()
        self._started = 0.0
        self._name = ""

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """A step, counted off when the block ends; announced when its work begins."""
        self._name = name
        self._started = time.monotonic()
        step = Step(self)
        try:
            yield step
        finally:
            if name in self._left:
                self._left.remove(name)
        if step.note:
            self._line(f"{self._count()} {name}: {step.note}", lasting=True)
        else:
            self._line(
                f"{self._count()} {name}: done in {spoken(time.monotonic() - self._started)}", lasting=True
            )

    def announce(self) -> None:
        """Say what is running now."""
        self._line(self._announcement(), lasting=not self._terminal)

    def tell(self, text: str) -> None:
        """A detail of the running step; shown on a terminal only."""
        if self._terminal:
            self._line(f"{self._announcement()} · {text}", lasting=False)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._line(text, lasting=True)

    def _announcement(self) -> str:
        left = self._seconds_left()
        ending = f" · about {spoken(left)} left" if left is not None else ""
        return f"{self._count()} {self._name}{ending}"

    def _count(self) -> str:
        return f"[{self._total - len(self._left) + (self._name in self._left)}/{self._total}]"

    def _seconds_left(self) -> float | None:
        known = [self._durations_s[name] for name in self._left if name in self._durations_s]
        if len(known) < len(self._left) or not known:
            return None
        return max(0.0, sum(known) - (time.monotonic() - self._started))

    def _line(self, text: str, *, lasting: bool) -> None:
        # Who reads along may leave (`2>&1 | head`); that must not end hours of measuring.
        with suppress(BrokenPipeError):
            if self._terminal:
                self._stream.write(f"\r\x1b[K{text[:160]}" + ("\n" if lasting else ""))
            elif lasting:
                self._stream.write(text + "\n")
            self._stream.flush()


class Step:
    """A running step."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.note = ""

    def begins(self) -> None:
        """There is something to do: the result isn't in the store."""
        self._progress.announce()

    def tell(self, text: str) -> None:
        """A detail of what is going on."""
        self._progress.tell(text)

    def reused(self) -> None:
        """Nothing had to be done: the result was in the store."""
        self.note = "reused"

    def failed(self, message: str) -> None:
        """The step gave no result."""
        self.note = f"FAILED: {message}"


class ByteProgress:
    """Bytes done of a total, with the rate so far and the time left, told in words."""

    def __init__(self, tell: Tell, *, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._total_bytes = total_bytes
        self._found_bytes = self._done_bytes = 0
        self._started_s = clock()

    def found(self, size_bytes: int) -> None:
        """So much was done before; it counts as done and not for the rate."""
        self._found_bytes += size_bytes
        self._started_s = self._clock()
        self._tell(self.text())

    def done(self, size_bytes: int) -> None:
        """So much more is done."""
        self._done_bytes += size_bytes
        self._tell(self.text())

    def text(self) -> str:
        """`5.00 of 20.00 GB · 0.50 GB/s · about 30 s left`, in 10^9 bytes."""
        done_bytes = self._found_bytes + self._done_bytes
        told = f"{done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB"
        seconds = self._clock() - self._started_s
        if not self._done_bytes or seconds <= 0:
            return told
        rate = self._done_bytes / seconds
        left_s = (self._total_bytes - done_bytes) / rate
        return f"{told} · {rate / 1e9:.2f} GB/s · about {spoken(left_s)} left"


def spoken(seconds: float) -> str:
    """`75` → `1 min 15 s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
    )
