"""The real command, run by tests: what it answered, and a folder in which nothing of this machine reaches it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from autotune import cli
from autotune.children import Children


class Answer(msgspec.Struct, frozen=True):
    """Exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The line that says what is wrong."""
        return self.err.splitlines()[-2]

    @property
    def hint(self) -> str:
        return self.err.splitlines()[-1]


Run = Callable[..., Answer]


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the folder, without a network and without what the machine's own environment says of threads."""
    for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder.parent / "home"))
    monkeypatch.chdir(folder)


def in_this_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process, on the server that the tests share: starting one takes 5 s."""
    monkeypatch.setattr(Children, "close", lambda self: None)

    def run(*arguments: str) -> Answer:
        capfd.readouterr()
        code = cli.main(arguments)
        out, err = capfd.readouterr()
        return Answer(code, out, err)

    return run
