"""Was the machine ours while a trial ran? Processor time that others used, which no rate can be trusted beside."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

SAMPLE_SECONDS = 0.2


class LoadMeter:
    """Sums the processor time of the whole machine and of one trial's processes, and tells the difference.

    Time stolen by the host of a virtual machine counts as others'. A process that ends between two samples takes at
    most `SAMPLE_SECONDS` of its time with it, which then counts as others' too.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._engine = psutil.Process()
        self._wall = self._sampled = time.monotonic()
        self._busy = _busy_seconds()
        self._own_at_start = _seconds_of(self._engine)
        self._tree: dict[int, float] = {}
        self._before = self._tree_seconds()

    def sample(self) -> None:
        """Look at the trial's processes; cheap enough to be called in a loop."""
        if time.monotonic() - self._sampled >= SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            self._tree_seconds()

    def others(self) -> float:
        """Cores that others kept busy on average since the meter was made."""
        wall = time.monotonic() - self._wall
        if wall < SAMPLE_SECONDS:
            return 0.0
        own = self._tree_seconds() - self._before + _seconds_of(self._engine) - self._own_at_start
        return max(0.0, (_busy_seconds() - self._busy - own) / wall)

    def _tree_seconds(self) -> float:
        """Processor seconds of the trial's processes, those that have ended as last seen."""
        for pid in _tree(self._pid):
            with contextlib.suppress(psutil.Error):
                self._tree[pid] = _seconds_of(psutil.Process(pid))
        return sum(self._tree.values())


def _tree(pid: int) -> list[int]:
    """A process and all below it. On Linux by `children` of proc(5), since looking through every process of the
    machine, as psutil does, takes 5 ms of a core that may be measured on."""
    pids = [pid]
    try:
        for one in pids:
            for children in Path(f"/proc/{one}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
    except OSError:  # ended meanwhile
        return pids
    if len(pids) == 1 and not Path(f"/proc/{pid}/task/{pid}/children").exists():
        with contextlib.suppress(psutil.Error):
            pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return pids


def _seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    steal = getattr(times, "steal", 0.0)  # Linux only
    return float(times.user + times.system + getattr(times, "nice", 0.0) + steal)
