"""Ctrl-C and SIGTERM end a run the same way, once: it keeps what is finished and writes its report.

with first_signal_interrupts() as disarm:
    work()          # may be left by KeyboardInterrupt
    disarm()
    write_report()  # goes on whatever comes
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def first_signal_interrupts() -> Iterator[Callable[[], None]]:
    """The first Ctrl-C or SIGTERM raises KeyboardInterrupt; what comes after it is ignored.

    Otherwise an impatient second Ctrl-C would break off the clean-up or the report of the first. Yields a
    function after whose call the first one is ignored, too. A signal that was ignored before stays ignored.
    """
    armed = True

    def disarm() -> None:
        nonlocal armed
        armed = False

    def interrupt(*_: object) -> None:
        if armed:
            disarm()
            # Not an Exception: handlers of the stages' own errors on the way must not take it for one.
            raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield disarm
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
