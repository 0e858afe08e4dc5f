"""Children: real processes that answer, fail, crash and hang. Whatever they do, nothing of them stays."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.child import Ending, start_of, write_whole
from autotune.children import Child, ChildError, Children, last_error
from autotune.errors import AutotuneError, NotYetError
from tests.processes import REPOSITORY, alive, eventually, marked, read_numbers

WORKERS = "tests.fake_workers"


@pytest.fixture(scope="module", params=["forked", "cold"])
def either(
    request: pytest.FixtureRequest, children: Children, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Children]:
    """Children forked from the server, and fresh ones: no test may tell them apart."""
    if request.param == "forked":
        yield children
        return
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with Children(environment, log=tmp_path_factory.mktemp("cold") / "server.log", cold=True) as cold:
        yield cold


def spawn(children: Children, name: str, folder: Path, **request: object) -> Child:
    return children.spawn(f"{WORKERS}:{name}", dict(request), folder)


def call(children: Children, name: str, *, deadline_seconds: float = 30.0, **request: object) -> object:
    return children.call(f"{WORKERS}:{name}", dict(request), deadline_seconds=deadline_seconds)


# --- answers ------------------------------------------------------------------------------------------------------


def test_a_call_returns_what_the_function_returned(either: Children) -> None:
    request = {"text": "zu früh \U0001f600", "number": 1.5, "nothing": None, "list": [1, {"a": [True]}]}
    assert either.call(f"{WORKERS}:answer", request, deadline_seconds=30) == request


def test_an_error_of_ours_arrives_as_it_was_raised(either: Children) -> None:
    with pytest.raises(NotYetError) as caught:
        call(either, "refuse")
    assert caught.value.what == "tuning `x` is not built yet"
    assert caught.value.hint == "do `y`"


def test_an_error_of_an_unknown_class_arrives_as_an_autotune_error(either: Children) -> None:
    with pytest.raises(AutotuneError) as caught:
        call(either, "refuse_in_its_own_way")
    assert (type(caught.value), caught.value.what, caught.value.hint) == (AutotuneError, "what", "hint")


def test_a_python_error_is_told_by_its_first_line(either: Children) -> None:
    with pytest.raises(ChildError, match=r"ended without an answer: ValueError: the first line$"):
        call(either, "fail")


def test_an_answer_that_is_no_json_is_an_error(either: Children) -> None:
    with pytest.raises(ChildError, match="TypeError: Object of type set is not JSON serializable"):
        call(either, "answer_with_a_set")


def test_a_missing_module_is_named(either: Children) -> None:
    with pytest.raises(ChildError, match=r"ModuleNotFoundError: No module named 'tests\.nowhere'"):
        either.call("tests.nowhere:run", {}, deadline_seconds=30)


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("segfault", None, r"signal 11 \(Segmentation fault\)"),
        ("signal_itself", signal.SIGABRT, r"signal 6 \(Aborted\)"),
        ("signal_itself", signal.SIGKILL, r"signal 9 \(Killed\)"),
        ("signal_itself", signal.SIGTERM, r"signal 15 \(Terminated\)"),
    ],
)
def test_a_crash_names_the_signal(either: Children, name: str, number: int | None, words: str) -> None:
    with pytest.raises(ChildError, match=f"ended without an answer: ended by {words}"):
        call(either, name, signal=number)


def test_a_child_that_exits_without_a_word_says_that_there_was_no_output(either: Children) -> None:
    with pytest.raises(ChildError, match="ended without an answer: no output"):
        call(either, "exit_at_once", code=3)


def test_progress_can_be_watched_in_the_folder_of_the_child(either: Children) -> None:
    seen: list[str] = []
    either.call(
        f"{WORKERS}:sleep",
        {"seconds": 0.3},
        deadline_seconds=30,
        while_waiting=lambda folder: seen.extend(one.name for one in folder.glob("pids")),
    )
    assert set(seen) == {"pids"}


def test_a_call_leaves_no_folder(either: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    call(either, "answer")
    with pytest.raises(ChildError):
        call(either, "segfault")
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_is_not_done_in_time_is_ended(either: Children, tmp_path: Path) -> None:
    folders: list[Path] = []
    pids: list[int] = []

    def note(folder: Path) -> None:
        folders.append(folder)
        if not pids and (folder / "pids").exists():
            pids.extend(read_numbers(folder / "pids"))

    began = time.monotonic()
    with pytest.raises(ChildError) as caught:
        either.call(f"{WORKERS}:leave_processes", {"seconds": 600}, deadline_seconds=1.5, while_waiting=note)
    assert time.monotonic() - began < 5
    assert caught.value.what == "`fake_workers` was not done in 2 s"
    assert len(pids) == 4
    assert alive(pids) == []
    assert not folders[0].exists()


# --- surroundings -------------------------------------------------------------------------------------------------


def test_environment_and_working_folder_are_those_asked_for(
    either: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    names = ["CHANGED", "PATH", "HOME", "PYTHONSAFEPATH", "HF_HUB_DISABLE_TELEMETRY"]
    child = either.spawn(
        f"{WORKERS}:surroundings",
        {"names": names},
        tmp_path,
        environment={"CHANGED": "yes", "HOME": None},
        working_folder=work,
    )
    assert child.wait(30)
    found = child.reply()
    assert found["folder"] == str(tmp_path)
    assert found["working_folder"] == str(work)
    assert found["environment"] == {
        "CHANGED": "yes",
        "PATH": os.environ["PATH"],
        "HOME": None,
        "PYTHONSAFEPATH": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    assert "CHANGED" not in os.environ


def test_a_child_has_a_guard_a_session_of_its_own_and_no_input(either: Children, tmp_path: Path) -> None:
    child = spawn(either, "surroundings", tmp_path, names=[])
    assert child.wait(30)
    found = child.reply()
    assert found["guard"] == found["session"] == child.pid
    assert found["session"] != os.getsid(0)
    assert found["input"] == ""


def test_no_module_of_the_working_folder_stands_in_for_another(either: Children, tmp_path: Path) -> None:
    (tmp_path / "trl.py").write_text("raise SystemExit('the wrong trl')")
    child = either.spawn(f"{WORKERS}:surroundings", {"names": []}, tmp_path, working_folder=tmp_path)
    assert child.wait(30)
    assert not {"", ".", str(tmp_path)} & set(child.reply()["path"])


def test_a_forked_child_has_trl_loaded_and_a_fresh_one_does_not(either: Children, tmp_path: Path) -> None:
    child = spawn(either, "surroundings", tmp_path, names=[])
    assert child.wait(30)
    assert child.reply()["modules"] == ([] if either.cold else ["torch", "trl"])


def test_files_of_a_child_can_be_read_by_the_user_alone(either: Children, tmp_path: Path) -> None:
    folder = tmp_path / "child"
    folder.mkdir(mode=0o700)
    before = os.umask(0)
    try:
        child = spawn(either, "fail", folder)
        assert child.wait(30)
        answered = spawn(either, "answer", folder)
        assert answered.wait(30)
    finally:
        os.umask(before)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.iterdir()}
    assert modes == dict.fromkeys(("task.json", "output.log", "reply.json", "ending.json"), "0o600")


def test_the_folder_of_a_call_can_be_read_by_the_user_alone(either: Children) -> None:
    modes: set[str] = set()
    either.call(
        f"{WORKERS}:sleep",
        {"seconds": 0.1},
        deadline_seconds=30,
        while_waiting=lambda folder: modes.add(oct(stat.S_IMODE(folder.stat().st_mode))),
    )
    assert modes == {"0o700"}


# --- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "request_", "code", "number"),
    [
        ("answer", {}, 0, None),
        ("fail", {}, 1, None),
        ("exit_with", {"code": 3}, 3, None),
        ("exit_at_once", {"code": 7}, 7, None),
        ("signal_itself", {"signal": 9}, None, 9),
        ("segfault", {}, None, 11),
    ],
)
def test_how_a_child_ended_is_told(
    either: Children, tmp_path: Path, name: str, request_: dict[str, int], code: int | None, number: int | None
) -> None:
    child = spawn(either, name, tmp_path, **request_)
    assert child.wait(30)
    ending = child.ending()
    assert (ending.exit_code, ending.signal, ending.over_memory_limit) == (code, number, False)


def test_a_child_beyond_its_memory_limit_is_ended(either: Children, tmp_path: Path) -> None:
    allowed = 900_000_000  # a forked child starts with the half gigabyte of its server
    child = either.spawn(f"{WORKERS}:hold", {"bytes": allowed, "seconds": 60}, tmp_path, memory_limit_bytes=allowed)
    assert child.wait(30)
    ending = child.ending()
    assert ending.over_memory_limit
    assert ending.signal == signal.SIGKILL
    assert ending.peak_resident_bytes > allowed


def test_a_child_within_its_memory_limit_goes_on(either: Children, tmp_path: Path) -> None:
    child = either.spawn(
        f"{WORKERS}:hold", {"bytes": 100_000_000, "seconds": 0.3}, tmp_path, memory_limit_bytes=2_000_000_000
    )
    assert child.wait(30)
    assert child.reply() == 100_000_000
    assert child.ending().peak_resident_bytes > 100_000_000


def test_kill_leaves_nothing_not_even_daemons(either: Children, tmp_path: Path) -> None:
    child = spawn(either, "leave_processes", tmp_path, seconds=600)
    pids = read_numbers(tmp_path / "pids")
    assert alive(pids) == pids
    child.kill()
    assert alive(pids) == []
    assert not child.alive()
    child.kill()  # a second time is no error


def test_a_child_that_ends_by_itself_leaves_nothing_either(either: Children, tmp_path: Path) -> None:
    child = spawn(either, "leave_processes", tmp_path, seconds=0)
    pids = read_numbers(tmp_path / "pids")
    assert child.wait(10)
    assert child.reply() == "left two behind"
    assert alive(pids) == []


def test_a_child_can_be_killed_as_soon_as_it_was_started(either: Children, tmp_path: Path) -> None:
    child = spawn(either, "sleep", tmp_path, seconds=600)
    child.kill()
    assert alive([child.pid]) == []
    time.sleep(0.1)
    if (tmp_path / "pids").exists():
        assert alive(read_numbers(tmp_path / "pids")) == []


def test_a_guard_that_is_asked_to_end_takes_everything_with_it(either: Children, tmp_path: Path) -> None:
    child = spawn(either, "leave_processes", tmp_path, seconds=600)
    pids = read_numbers(tmp_path / "pids")
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(5)
    assert alive(pids) == []
    assert child.ending().signal == signal.SIGKILL


def test_a_killed_guard_takes_the_worker_with_it(either: Children, tmp_path: Path) -> None:
    child = spawn(either, "sleep", tmp_path, seconds=600)
    pids = read_numbers(tmp_path / "pids")
    os.kill(child.pid, signal.SIGKILL)
    assert eventually(lambda: not alive(pids), seconds=2)
    assert child.wait(2)
    assert child.ending() == Ending(exit_code=None, signal=signal.SIGKILL)
    with pytest.raises(ChildError, match=r"signal 9 \(Killed\)"):
        child.reply()


def test_a_guard_that_was_stopped_is_killed_with_its_worker(
    either: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.children.KILL_SECONDS", 0.3)
    child = spawn(either, "sleep", tmp_path, seconds=600)
    pids = read_numbers(tmp_path / "pids")
    os.kill(child.pid, signal.SIGSTOP)
    child.kill()
    assert eventually(lambda: not alive(pids), seconds=1)


@pytest.mark.parametrize("cold", [False, True], ids=["forked", "cold"])
def test_a_killed_engine_takes_guard_worker_and_daemons_with_it(tmp_path: Path, *, cold: bool) -> None:
    engine = start_engine(tmp_path, cold=cold)
    pids = read_numbers(tmp_path / "child" / "pids")
    assert alive(pids) == pids
    engine.kill()
    try:
        # not asked for its exit code yet: an engine that has ended so is gone, too
        assert eventually(lambda: not alive(pids), seconds=2)
        assert eventually(lambda: not marked(str(tmp_path / "server.log")), seconds=2)
    finally:
        engine.wait()


def test_an_engine_that_ends_does_not_wait_for_its_children(tmp_path: Path) -> None:
    engine = start_engine(tmp_path, cold=False)
    pids = read_numbers(tmp_path / "child" / "pids")
    engine.terminate()  # the script's handler leaves the `with`
    assert engine.wait(5) == 0
    assert alive(pids) == []


def start_engine(folder: Path, *, cold: bool) -> subprocess.Popen[bytes]:
    """A process that has one child, which leaves processes behind."""
    (folder / "child").mkdir()
    script = """
import os, signal, sys, time
from multiprocessing import context
from pathlib import Path
from autotune.children import Children
context.BaseContext.set_forkserver_preload = lambda self, names: None  # 5 s that nothing here needs
class Over(Exception): pass
def over(*_): raise Over
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, over)
    try:
        with Children(dict(os.environ), log=folder / "server.log", cold=sys.argv[2] == "cold") as children:
            children.spawn("tests.fake_workers:leave_processes", {"seconds": 600}, folder / "child")
            time.sleep(600)
    except Over:
        pass
"""
    (folder / "engine.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, str(folder / "engine.py"), str(folder), "cold" if cold else "forked"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "MARKER": str(folder / "server.log")},
        start_new_session=True,
    )


def test_children_go_on_after_their_server_was_killed(children: Children, tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    before = spawn(children, "sleep", tmp_path / "before", seconds=600)
    pids = read_numbers(tmp_path / "before" / "pids")
    with Path(f"/proc/{before.pid}/stat").open("rb") as file:
        server = int(file.read().rpartition(b")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    assert eventually(lambda: not alive([server]), seconds=2)
    assert before.alive()
    before.kill()
    assert alive(pids) == []
    after = spawn(children, "surroundings", tmp_path / "after", names=["PYTHONSAFEPATH"])
    assert after.wait(60)
    assert after.reply()["environment"] == {"PYTHONSAFEPATH": "1"}
    assert after.reply()["modules"] == ["torch", "trl"]
    assert "PYTHONSAFEPATH" not in os.environ


def test_the_start_of_a_process_is_the_same_at_every_look_and_ends_with_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first = start_of(process.pid)
    assert first is not None
    assert start_of(process.pid) == first
    process.kill()
    assert eventually(lambda: start_of(process.pid) is None, seconds=2)  # although nobody has waited for it
    process.communicate()
    assert start_of(process.pid) is None


# --- files --------------------------------------------------------------------------------------------------------


def test_a_file_is_written_whole_and_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_whole(tmp_path / "file", b"old")
        write_whole(tmp_path / "file", b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_old_content_and_no_temporary_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"old")
    script = """
import resource, sys
from pathlib import Path
from autotune.child import write_whole
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    write_whole(Path(sys.argv[1]), b"n" * 100_000)
except OSError as error:
    print(error.strerror)
"""
    found = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    assert found.stdout == "File too large\n"
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no output"),
        ("\n  \n", "no output"),
        ("Loading weights\nDone\n", "Done"),
        ("Traceback (most recent call last):\n  File x\nValueError: bad\nand more\n", "ValueError: bad"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\n", "torch.OutOfMemoryError: CUDA out of memory. Tried"),
        ("KeyboardInterrupt: \nWARNING: an Error: here\n", "KeyboardInterrupt:"),
        ("x" * 1000, "x" * 300),
        ("before\r 50%|#####     |\r100%|##########|\nRuntimeError: \udcff".encode(errors="surrogateescape"), None),
    ],
)
def test_the_last_error_of_a_log_is_the_last_line_that_names_one(
    tmp_path: Path, text: str | bytes, told: str | None
) -> None:
    log = tmp_path / "output.log"
    log.write_bytes(text.encode() if isinstance(text, str) else text)
    assert last_error(log) == (told if told is not None else "RuntimeError: \ufffd")


def test_a_log_that_is_not_there_says_no_output(tmp_path: Path) -> None:
    assert last_error(tmp_path / "output.log") == "no output"
