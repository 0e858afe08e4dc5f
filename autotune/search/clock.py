"""The time a search goes by. Recorded trials are played back with a clock of their own."""

from __future__ import annotations

import time


class Clock:
    """The machine's own time: seconds since a moment that means nothing by itself."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
