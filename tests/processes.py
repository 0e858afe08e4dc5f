"""Looking at processes from outside: is one still there, which belong to a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from autotune.child import start_of

REPOSITORY = Path(__file__).parent.parent


def alive(pids: Iterable[int]) -> list[int]:
    """Those that have not ended; one that has ended and was not asked for its exit code has."""
    return [pid for pid in pids if start_of(pid) is not None]


def eventually(condition: Callable[[], object], *, seconds: float) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def read_numbers(path: Path, *, seconds: float = 20.0) -> list[int]:
    """The numbers in a file that another process writes, once its last line is whole."""
    assert eventually(lambda: path.exists() and path.read_text().endswith("\n"), seconds=seconds), f"no {path.name}"
    return [int(word) for word in path.read_text().split()]


def marked(marker: str) -> list[int]:
    """The processes that were started with this text in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(marker in value for value in process.environ().values()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return alive(found)
