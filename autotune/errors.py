"""The few errors a user can meet. Each says what happened and what to do about it."""

from __future__ import annotations


class AutotuneError(Exception):
    """A failure the user can act on, shown as `error: what` and `hint: hint`; exit code 2."""

    exit_code = 2

    def __init__(self, what: str, *, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


class NotYetError(AutotuneError):
    """Something TRL can do and this version cannot tune yet."""


class NoTrialFinishedError(AutotuneError):
    """The run ended without one trial that worked; exit code 1."""

    exit_code = 1
