"""Processes that the engine starts: children forked from a server that has TRL loaded, or fresh ones.

Everything that imports torch runs in such a child. Each is led by a guard (`autotune.child`) in a session of its
own, so that ending one ends all it started.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver, util
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil

from autotune import errors
from autotune.child import LOG_FLAGS, Ending, Task, start_of, write_whole

WAIT_SECONDS = 0.02
SOCKET_FOLDER = "TRL_AUTOTUNE_SOCKET_FOLDER"  # in its environment: where the server's own socket is
KILL_SECONDS = 10.0  # a process that is deep in the kernel takes its time to die

# What every child gets, whatever the job says.
CHILD_ENVIRONMENT: dict[str, str] = {
    "PYTHONSAFEPATH": "1",  # no module of the user's folder may stand in for one of ours
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU must not initialise CUDA before a fork
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "PYTHONUNBUFFERED": "1",
}


class ChildError(errors.AutotuneError):
    """A child ended without an answer."""


class Child:
    """One guard and what runs below it. The folder holds `task.json`, `output.log`, `reply.json`, `ending.json`."""

    def __init__(self, handle: multiprocessing.process.BaseProcess | subprocess.Popen[bytes], folder: Path) -> None:
        self._handle = handle
        self.folder = folder
        self._guard_started = start_of(self.pid)

    @property
    def pid(self) -> int:
        pid = self._handle.pid
        assert pid is not None
        return pid

    def alive(self) -> bool:
        if isinstance(self._handle, subprocess.Popen):
            return self._handle.poll() is None
        # without its server, which knows of its children's ends, every child seems to have ended
        return self._handle.is_alive() or self._guard_lives()

    def _guard_lives(self) -> bool:
        return self._guard_started is not None and start_of(self.pid) == self._guard_started

    def wait(self, seconds: float) -> bool:
        """Wait for the end; True when it has ended."""
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(WAIT_SECONDS)
        return True

    def kill(self) -> None:
        """End the guard, the worker and all they started. Returns when they are gone."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # to the guard, which ends what is below it: it also inherits whatever has lost its parent
                os.kill(self.pid, signal.SIGTERM)
            if not self.wait(KILL_SECONDS):
                self._kill_from_outside()
        if isinstance(self._handle, multiprocessing.process.BaseProcess):
            self._handle.join(1.0)

    def _kill_from_outside(self) -> None:
        """For a guard that does not answer, as one that was stopped."""
        for pid in (self.pid, *_descendants(self.pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.wait(KILL_SECONDS)

    def ending(self) -> Ending:
        """How the worker ended. A guard that was itself killed leaves an ending that says so."""
        try:
            return msgspec.json.decode((self.folder / "ending.json").read_bytes(), type=Ending)
        except (OSError, msgspec.DecodeError):
            return Ending(exit_code=None, signal=signal.SIGKILL)

    def reply(self) -> Any:
        """What the function returned. Raises the child's own `AutotuneError`, or ChildError if there is no answer."""
        try:
            reply = json.loads((self.folder / "reply.json").read_bytes())
        except FileNotFoundError:
            raise ChildError(
                f"a helper process ended without an answer: {self._cause()}",
                hint="run again with `--cold`, which starts every process afresh",
            ) from None
        if "error" in reply:
            failure = reply["error"]
            kind = getattr(errors, failure["kind"], errors.AutotuneError)
            raise kind(failure["what"], hint=failure["hint"])
        return reply["value"]

    def _cause(self) -> str:
        said = last_error(self.folder / "output.log")
        ending = self.ending()
        return said if ending.signal is None else f"{ending.by_signal}; {said}"


class Children:
    """Starts children in one environment.

    `environment` is what libraries read when they are imported, so it is fixed for the life of the server; what
    differs from child to child is given with each. With `cold` every child is a fresh process (about 5 s each).
    What the server itself says goes to `log`, or nowhere: a child's own output is in its folder.
    `multiprocessing` has one server in a process, so only one of these may be open at a time, unless it is cold.
    """

    def __init__(self, environment: Mapping[str, str], *, log: Path | None = None, cold: bool = False) -> None:
        self.environment = {**environment, **CHILD_ENVIRONMENT}
        self.cold = cold
        self._log = log
        self._running = False

    def __enter__(self) -> Children:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the server, also in place of one that was killed. Returns at once: it imports TRL meanwhile."""
        if self.cold or (self._running and _server_lives()):
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["autotune.preload"])
        socket_folder = {SOCKET_FOLDER: util.get_temp_dir()}
        with _as_environment({**self.environment, **socket_folder}), _output_to(self._log):
            forkserver.ensure_running()
        self._running = True

    def spawn(
        self,
        target: str,
        request: dict[str, Any],
        folder: Path,
        *,
        environment: Mapping[str, str | None] | None = None,
        working_folder: Path | None = None,
        memory_limit_bytes: int | None = None,
        temporary: bool = False,
    ) -> Child:
        """Start `target` (`module:function`) in a child whose files are in `folder`, which exists; a `temporary` one is
        deleted by the child if this process is killed."""
        engine_started = start_of(os.getpid())
        assert engine_started is not None
        task = Task(
            target=target,
            request=request,
            engine_pid=os.getpid(),
            engine_started=engine_started,
            environment=dict(environment or {}),
            working_folder=str(working_folder) if working_folder else None,
            memory_limit_bytes=memory_limit_bytes,
            temporary=temporary,
        )
        write_whole(folder / "task.json", msgspec.json.encode(task))
        return Child(self._spawn_fresh(folder) if self.cold else self._fork(folder), folder)

    def _fork(self, folder: Path) -> multiprocessing.process.BaseProcess:
        self.start()
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_guard, args=(str(folder),), daemon=False)
        process.start()
        return process

    def _spawn_fresh(self, folder: Path) -> subprocess.Popen[bytes]:
        log = os.open(folder / "output.log", LOG_FLAGS, 0o600)
        try:
            return subprocess.Popen(
                [sys.executable, "-m", "autotune.child", str(folder)],
                env={**self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)

    def call(
        self,
        target: str,
        request: dict[str, Any],
        *,
        deadline_seconds: float,
        working_folder: Path | None = None,
        while_waiting: Callable[[Path], None] | None = None,
        collect: Callable[[Path], None] | None = None,
    ) -> Any:
        """Run `target` in a child and return its JSON answer.

        `while_waiting` is called with the child's folder about every 20 ms, to report progress; `collect` once it has
        answered, to read what it left there before the folder is deleted. Raises ChildError when the child dies or is
        not done in time.
        """
        folder = Path(tempfile.mkdtemp(prefix="trl-autotune-"))  # 0o700
        child: Child | None = None
        try:
            child = self.spawn(target, request, folder, working_folder=working_folder, temporary=True)
            deadline = time.monotonic() + deadline_seconds
            while child.alive():
                if time.monotonic() > deadline:
                    module = target.split(":", maxsplit=1)[0].rsplit(".", 1)[-1]
                    raise ChildError(
                        f"`{module}` was not done in {deadline_seconds:.0f} s",
                        hint="a slow disk or network share can cause this; try again",
                    )
                if while_waiting is not None:
                    while_waiting(folder)
                time.sleep(WAIT_SECONDS)
            reply = child.reply()
            if collect is not None:
                collect(folder)
            return reply
        finally:
            if child is not None:
                child.kill()
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Stop the server. `multiprocessing` has no public call for it, and left running it holds half a gigabyte."""
        if self._running:
            for process in multiprocessing.active_children():
                process.terminate()  # one whose start was interrupted: at exit, `multiprocessing` waits for each
                process.join(KILL_SECONDS)
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
            self._running = False


def last_error(log: Path, *, limit: int = 300) -> str:
    """The last line of a log that names an error, or its last line; 'no output' for an empty one."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "no output"
    if not lines:
        return "no output"
    named = [line for line in lines if _names_an_error(line)]
    return (named or lines)[-1][:limit]


def _names_an_error(line: str) -> bool:
    head = line.split(":", 1)[0]
    return ":" in line and head.replace(".", "").isidentifier() and head.endswith(("Error", "Exception", "Interrupt"))


def _guard(folder: str) -> None:
    from autotune import child

    child.run(folder)


def _descendants(pid: int) -> list[int]:
    try:
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _server_lives() -> bool:
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid is not None and start_of(pid) is not None


@contextlib.contextmanager
def _as_environment(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _output_to(log: Path | None) -> Iterator[None]:
    """Point file descriptors 1 and 2 at `log` while a process that inherits them is started."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(os.devnull if log is None else log, LOG_FLAGS, 0o600)
    kept = os.dup(1), os.dup(2)
    try:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        yield
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for one in (descriptor, *kept):
            os.close(one)
