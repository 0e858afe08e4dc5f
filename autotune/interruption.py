"""Being told to end: Ctrl-C, SIGTERM and a closed terminal, each once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """The first of `SIGNALS` raises KeyboardInterrupt inside, and no other does after it.

    What ends then is bounded in time (children are killed, files are written), and a second Ctrl-C in the midst of it
    would tear it. So it stays until the process ends.
    """
    interrupted = False

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        _ignore()
        raise KeyboardInterrupt

    kept = [(number, signal.signal(number, interrupt)) for number in SIGNALS]
    try:
        yield
    finally:
        if not interrupted:
            for number, handler in kept:
                signal.signal(number, handler)


@contextlib.contextmanager
def not_interrupted() -> Iterator[None]:
    """Nothing of `SIGNALS` ends what is inside, as the writing of files."""
    kept = [(number, signal.getsignal(number)) for number in SIGNALS]
    _ignore()
    try:
        yield
    finally:
        for number, handler in kept:
            signal.signal(number, handler)


def _ignore() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
