"""What runs in children in tests: functions that answer, refuse, crash, hang and leave processes behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, NotYetError

Request = dict[str, Any]


class OwnError(AutotuneError):
    """An error whose class the engine does not know."""


def answer(request: Request, _folder: Path) -> Any:
    """What was asked, as it arrived."""
    return request


def surroundings(request: Request, folder: Path) -> dict[str, Any]:
    """What the child sees of the world; `names` are environment variables."""
    return {
        "folder": str(folder),
        "working_folder": str(Path.cwd()),
        "environment": {name: os.environ.get(name) for name in request["names"]},
        "path": sys.path,
        "pid": os.getpid(),
        "guard": os.getppid(),
        "session": os.getsid(0),
        "input": sys.stdin.read() if sys.stdin is not None else "",
        "modules": sorted(name for name in ("torch", "trl") if name in sys.modules),
    }


def refuse(_request: Request, _folder: Path) -> None:
    raise NotYetError("tuning `x` is not built yet", hint="do `y`")


def refuse_in_its_own_way(_request: Request, _folder: Path) -> None:
    raise OwnError("what", hint="hint")


def fail(_request: Request, _folder: Path) -> None:
    raise ValueError("the first line\nand a second one")


def answer_with_a_set(_request: Request, _folder: Path) -> Any:
    return {1, 2}


def exit_with(request: Request, _folder: Path) -> None:
    sys.exit(request["code"])


def exit_at_once(request: Request, _folder: Path) -> None:
    """Without a word, as `os._exit` in a C library would."""
    os._exit(request["code"])


def signal_itself(request: Request, _folder: Path) -> None:
    os.kill(os.getpid(), request["signal"])
    time.sleep(60)


def segfault(_request: Request, _folder: Path) -> None:
    ctypes.string_at(0)


def hold(request: Request, _folder: Path) -> int:
    """Hold `bytes` of memory for `seconds`."""
    block = bytearray(request["bytes"])
    block[::4096] = b"x" * len(block[::4096])
    time.sleep(request["seconds"])
    return len(block)


def sleep(request: Request, folder: Path) -> str:
    (folder / "pids").write_text(f"{os.getpid()} {os.getppid()}\n")
    time.sleep(request["seconds"])
    return "slept"


def leave_processes(request: Request, folder: Path) -> str:
    """Start two processes that no signal but SIGKILL ends, then sleep: a child in a session of its own, and a daemon
    whose parent is gone. Writes its own number, its guard's and theirs to `pids`."""
    numbers = [os.getpid(), os.getppid()]
    for daemon in (False, True):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if daemon and os.fork():
                os._exit(0)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.write(writer, str(os.getpid()).encode())
            time.sleep(600)
            os._exit(0)
        numbers.append(int(os.read(reader, 20)))
    unfinished = folder / "pids.part"
    unfinished.write_text(" ".join(map(str, numbers)) + "\n")
    unfinished.rename(folder / "pids")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(request["seconds"])
    return "left two behind"
