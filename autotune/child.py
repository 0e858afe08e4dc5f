"""The child's side of a process that the engine starts: a guard, and under it the worker that does the work.

The guard leads a session of its own and does nothing but watch. It ends the worker and every process below it when
the engine is gone, when the worker outgrows its memory limit, and when the worker itself has ended. It holds no lock
and runs no library code, so neither a hang nor a crash of the worker can stop it from cleaning up.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil

from autotune.errors import AutotuneError

POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class Task(msgspec.Struct, frozen=True):
    """What a child is to do. Written to `task.json` in the child's folder.

    `target` is `module:function`; the function takes `request` and the folder, and what it returns is written to
    `reply.json`. `memory_limit_bytes` limits the worker's resident memory.
    """

    target: str
    request: dict[str, Any]
    engine_pid: int
    engine_started: float  # by `start_of`
    environment: dict[str, str | None] = {}
    working_folder: str | None = None
    memory_limit_bytes: int | None = None
    temporary: bool = False  # the folder is nobody's once the engine is gone


class Ending(msgspec.Struct, frozen=True):
    """How the worker ended, in `ending.json`. `signal` is set when a signal ended it."""

    exit_code: int | None
    signal: int | None = None
    over_memory_limit: bool = False
    peak_resident_bytes: int = 0
    machine_oom_kills: int = 0

    @property
    def by_signal(self) -> str:
        """In words, as "ended by signal 11 (Segmentation fault)"."""
        assert self.signal is not None
        return f"ended by signal {self.signal} ({signal.strsignal(self.signal)})"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or none (same folder, then `os.replace`); readable by the user."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def run(folder_name: str) -> None:
    """Be the guard of the task in `folder_name` until it is over."""
    folder = Path(folder_name)
    task = msgspec.json.decode((folder / "task.json").read_bytes(), type=Task)
    if os.getpgrp() != os.getpid():
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to answer
    log = os.open(folder / "output.log", LOG_FLAGS, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    oom_kills_before = _machine_oom_kills()
    guard_pid = os.getpid()
    worker_pid = os.fork()
    if worker_pid == 0:
        _be_the_worker(task, folder, guard_pid)
    signal.signal(signal.SIGTERM, lambda *_: _kill(worker_pid))  # end in good order: nothing may be left
    ending = _watch(worker_pid, task)
    _end_descendants()
    ending = msgspec.structs.replace(ending, machine_oom_kills=_machine_oom_kills() - oom_kills_before)
    if task.temporary and start_of(task.engine_pid) != task.engine_started:
        shutil.rmtree(folder, ignore_errors=True)  # it may hold rows of the data
        return
    with contextlib.suppress(OSError):  # the folder may be gone with the engine
        write_whole(folder / "ending.json", msgspec.json.encode(ending))


def _watch(worker_pid: int, task: Task) -> Ending:
    peak = 0
    over_limit = False
    statm = f"/proc/{worker_pid}/statm"
    page = os.sysconf("SC_PAGE_SIZE")
    end_is_near = _poller_of_end(worker_pid)
    while True:
        ended, status = os.waitpid(worker_pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return Ending(
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                over_memory_limit=over_limit,
                peak_resident_bytes=peak,
            )
        try:
            with open(statm, "rb") as file:
                resident = int(file.read().split()[1]) * page
        except (OSError, IndexError):
            resident = 0
        peak = max(peak, resident)
        over_limit = task.memory_limit_bytes is not None and resident > task.memory_limit_bytes
        if over_limit or start_of(task.engine_pid) != task.engine_started:
            _kill(worker_pid)
            _, status = os.waitpid(worker_pid, 0)
            return Ending(exit_code=None, signal=signal.SIGKILL, over_memory_limit=over_limit, peak_resident_bytes=peak)
        end_is_near()


def _poller_of_end(pid: int) -> Callable[[], object]:
    """A wait of at most POLL_SECONDS that returns as soon as the process ends, where the system can tell (Linux)."""
    if not hasattr(os, "pidfd_open"):
        return functools.partial(time.sleep, POLL_SECONDS)
    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)
    return functools.partial(poll.poll, POLL_SECONDS * 1000)


def start_of(pid: int) -> float | None:
    """When a process was started, which tells it from a later one of the same number; None once it has ended.

    On Linux in clock ticks since the machine's own start (proc(5), field 22), which setting the clock does not change.
    """
    if sys.platform != "linux":
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
        except psutil.Error:
            return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else float(fields[19])  # Z: ended, and its parent has not asked yet


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _end_descendants() -> None:
    """Kill whatever the worker left, processes with a session of their own included, until nothing is there."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        remaining = psutil.Process().children(recursive=True)
        for process in remaining:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not remaining:
            return
        time.sleep(0.01)


def _be_the_worker(task: Task, folder: Path, guard_pid: int) -> NoReturn:
    """Run the task's function and exit without the clean-up of the process this one was forked from."""
    code = 70
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard_pid:  # the guard died before the line above
            os._exit(code)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # dataloader workers are to start as they do under plain `trl`: `multiprocessing` makes its children start
        # theirs as they were started, from a fork server that would have to import everything again (4 s each)
        multiprocessing.set_start_method(None, force=True)
        for name, value in task.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if task.working_folder is not None:
            os.chdir(task.working_folder)
        reply = _call(task, folder)
        write_whole(folder / "reply.json", json.dumps(reply).encode())
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with _no_more_than(2.0):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _call(task: Task, folder: Path) -> dict[str, Any]:
    module_name, function_name = task.target.split(":")
    function = getattr(importlib.import_module(module_name), function_name)
    try:
        return {"value": function(task.request, folder)}
    except AutotuneError as error:
        return {"error": {"kind": type(error).__name__, "what": error.what, "hint": error.hint}}


@contextlib.contextmanager
def _no_more_than(seconds: float) -> Iterator[None]:
    """Leave a block that does not end: a full disk can block a flush for ever."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(71))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the guard's own watch has to do."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _machine_oom_kills() -> int:
    """How many processes the kernel has killed for memory since it started, 0 where that is not told."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0


if __name__ == "__main__":
    run(sys.argv[1])
