"""The child's side of working on all cores, in processes that are forked with everything loaded."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

MOST_PROCESSES = 8  # each holds some 60 MB of its own; as many as TRL's preparation gets here

Item = TypeVar("Item")
Result = TypeVar("Result")

_work: Callable[[Any], Any] | None = None


def available() -> int:
    """How many processes are worth starting."""
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


def each(work: Callable[[Item], Result], items: Sequence[Item], *, processes: int) -> Generator[Result, None, None]:
    """What `work` makes of each item, in their order; with one process in this one.

    Threads would not do: templates are rendered in Python, one at a time. `work` reaches the processes by the fork,
    items and results by pickle. Raises what `work` raises, and `concurrent.futures.process.BrokenProcessPool` where a
    process is killed.
    """
    global _work  # noqa: PLW0603 (a fork hands it on; a closure cannot be pickled)
    if processes < 2:
        yield from map(work, items)
        return
    _work = work
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork"))
    try:
        yield from pool.map(_one, items)
    finally:
        pool.shutdown(cancel_futures=True)
        _work = None


def _one(item: Any) -> Any:
    assert _work is not None
    return _work(item)
