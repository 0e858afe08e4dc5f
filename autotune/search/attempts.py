"""Attempts at one trial, and where those are kept that do not count: a trial's folder holds what its result says."""

from __future__ import annotations

import itertools
from pathlib import Path

from autotune.search.setting import Setting


class Attempts:
    """The attempts at trial `index` from now on, numbered from 1; the one that runs has the trial's own folder."""

    def __init__(self, setting: Setting, index: int) -> None:
        self._folder = setting.trial_folder(index)
        self._index = index
        self._aside: list[Path] = []

    def again(self) -> None:
        """The next attempt begins: the one that ended is set aside."""
        free = (self._folder.with_name(f"attempt-{self._index:04d}-{number}") for number in itertools.count(1))
        self._aside.append(next(path for path in free if not path.exists()))
        self._folder.rename(self._aside[-1])

    def take(self, number: int) -> None:
        """Attempt `number` is the trial: it gets the trial's folder, and the last is set aside in its place."""
        if number <= len(self._aside):
            self.again()
            self._aside[number - 1].rename(self._folder)
