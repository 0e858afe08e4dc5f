"""Attempts at one trial, and where those are kept that do not count: a trial's folder holds what its result says."""

from __future__ import annotations

from pathlib import Path

from autotune.search.setting import Setting


class Attempts:
    """The attempts at trial `index`, numbered from 1; the one that runs has the trial's own folder."""

    def __init__(self, setting: Setting, index: int) -> None:
        self._folder = setting.trial_folder(index)
        self._index = index
        self._number = 1

    def again(self) -> None:
        """The next attempt begins: the one that ended is set aside."""
        self._folder.rename(self._aside(self._number))
        self._number += 1

    def take(self, number: int) -> None:
        """Attempt `number` is the trial: it gets the trial's folder, and the last is set aside in its place."""
        if number != self._number:
            self._folder.rename(self._aside(self._number))
            self._aside(number).rename(self._folder)

    def _aside(self, number: int) -> Path:
        return self._folder.with_name(f"attempt-{self._index:04d}-{number}")
