"""What runs in children in tests: functions that answer, refuse, crash, hang and leave processes behind."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import yaml

from autotune.errors import AutotuneError, NotYetError
from autotune.events import PROTOCOL, EventWriter, Finished, Hello, Outcome, PassEnd, Phase, Step, encode_line
from autotune.trial import worker

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


# --- workers of trials --------------------------------------------------------------------------------------------


class Voice:
    """Says what a worker says."""

    def __init__(self, request: Request, folder: Path) -> None:
        self.events = EventWriter(folder / "events.jsonl")
        self.began = request["started"]

    def enter(self, phase: Any) -> None:
        self.events.write(Phase(phase=phase, seconds=time.monotonic() - self.began))

    def hello(self, attention: str = "sdpa") -> None:
        self.events.write(
            Hello(
                protocol=PROTOCOL,
                pid=os.getpid(),
                versions={},
                requested_attention=attention,
                actual_attention=attention,
            )
        )

    def step(self, pass_index: int, step: int, *, seconds: float = 0.1, tokens: int = 100) -> None:
        self.events.write(
            Step(
                pass_index=pass_index,
                step=step,
                seconds=seconds,
                micro_batches=2,
                useful_tokens=tokens,
                padding_tokens=0,
                loss=2.0,
            )
        )

    def finish(self, outcome: Any, where: str | None = None, detail: str | None = None) -> None:
        self.events.write(Finished(outcome=outcome, where=where, detail=detail, peak_bytes=None))

    def until_first_step(self) -> None:
        for phase in ("start", "load_model", "prepare_data", "first_step"):
            self.enter(phase)
            if phase == "load_model":
                self.hello()


def trial_that_works(request: Request, _folder: Path) -> None:
    voice = Voice(request, _folder)
    print("from the worker, on stdout", flush=True)
    print("from the worker, on stderr", file=sys.stderr, flush=True)
    voice.until_first_step()
    for step in range(request["warm_up_steps"]):
        voice.step(0, step)
    voice.enter("measure")
    for pass_index in range(1, request["passes"] + 1):
        for step in range(3):
            voice.step(pass_index, step)
        voice.events.write(PassEnd(pass_index=pass_index))
    voice.finish("ok")


def trial_out_of_memory(request: Request, folder: Path) -> Any:
    """The real worker's own account of an error that a training raises in the backward pass."""

    def backward() -> None:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …\nand more")

    def train(request: Request, folder: Path, events: EventWriter) -> Outcome:
        events.write(Phase(phase="first_step", seconds=0.0))
        backward()
        return "ok"

    worker._train = train
    return worker.run(request, folder)


def trial_killed_in_a_step(request: Request, folder: Path) -> None:
    voice = Voice(request, folder)
    voice.until_first_step()
    voice.step(0, 0)
    os.kill(os.getpid(), signal.SIGKILL)


def trial_segfault_at_load(request: Request, folder: Path) -> None:
    Voice(request, folder).enter("load_model")
    ctypes.string_at(0)


def trial_hangs_in_first_step(request: Request, folder: Path) -> None:
    Voice(request, folder).until_first_step()
    leave_processes({"seconds": 600}, folder)


def trial_hangs_after_a_step(request: Request, folder: Path) -> None:
    voice = Voice(request, folder)
    voice.until_first_step()
    voice.step(0, 0, seconds=0.01)
    leave_processes({"seconds": 600}, folder)


def trial_long_step(request: Request, folder: Path) -> None:
    """A step that said to have taken 0.1 s, then silence of 0.8 s, then the end."""
    voice = Voice(request, folder)
    voice.until_first_step()
    voice.step(0, 0, seconds=0.1)
    time.sleep(0.8)
    voice.finish("ok")


def trial_torn(request: Request, folder: Path) -> None:
    voice = Voice(request, folder)
    voice.until_first_step()
    voice.step(0, 0)
    os.write(voice.events._descriptor, b'{"kind":"step","pass_index":0,"ste')
    os._exit(3)


def trial_exit_3(request: Request, folder: Path) -> None:
    Voice(request, folder).enter("prepare_data")
    os._exit(3)


def trial_traceback(request: Request, folder: Path) -> None:
    Voice(request, folder).enter("prepare_data")
    print("WARNING: an error that is none")
    raise KeyError("text")


def trial_holds_memory(request: Request, folder: Path) -> None:
    Voice(request, folder).until_first_step()
    hold({"bytes": 900_000_000, "seconds": 60}, folder)


def trial_slow_start(request: Request, folder: Path) -> None:
    time.sleep(0.8)
    voice = Voice(request, folder)
    voice.enter("start")
    voice.finish("ok")


def trial_crashes_after_its_end(request: Request, folder: Path) -> None:
    trial_that_works(request, folder)
    ctypes.string_at(0)


def trial_that_stops_when_asked(request: Request, folder: Path) -> None:
    voice = Voice(request, folder)
    voice.until_first_step()
    step = 0
    while not (folder / "stop").exists():
        voice.step(0, step)
        step += 1
        time.sleep(0.02)
    voice.finish("stopped")


def trial_that_waits(request: Request, folder: Path) -> None:
    """One pass, then it waits for a turn that does not come."""
    voice = Voice(request, folder)
    voice.until_first_step()
    voice.step(1, 0)
    voice.events.write(PassEnd(pass_index=1))
    time.sleep(600)


def write_table(folder: Path, rules: list[dict[str, Any]], *, seconds: float = 0.02, rows_a_step: int = 8) -> None:
    """The table of a run, for `trial_by_table`."""
    table = {"seconds": seconds, "rows_a_step": rows_a_step, "rules": rules}
    (folder / "table.json").write_text(json.dumps(table))


def trial_by_table(request: Request, folder: Path) -> None:
    """What `table.json` of the run says of the options in this trial's own YAML.

    A rule is `{"if": {option: value}, …}`; all that fit count: `seconds` is a factor of the step's seconds, `fail` an
    outcome with `where` and `detail`, `pause` real seconds before the first pass, `attention` what ran instead, `loss`
    the loss. `when` limits a rule to trials for speed, confirm or memory (the last: few steps of any kind).
    """
    options = yaml.safe_load(Path(request["config"]).read_text())
    purpose = "memory" if request["passes"] == 0 else "confirm" if request["turns"] else "speed"
    table = json.loads((folder.parent / "table.json").read_text())
    seconds, pause, loss, attention = table["seconds"], 0.0, 2.0, options["attn_implementation"]
    voice = Voice(request, folder)
    for rule in table["rules"]:
        fits = all(options.get(name) == value for name, value in rule.get("if", {}).items())
        if not fits or rule.get("when", purpose) != purpose:
            continue
        if "fail" in rule:
            voice.finish(rule["fail"], rule.get("where"), rule.get("detail"))
            return
        seconds *= rule.get("seconds", 1.0)
        pause += rule.get("pause", 0.0)
        loss = rule.get("loss", loss)
        attention = rule.get("attention", attention)
    voice.hello(attention)
    sample = Path(options["datasets"][0]["data_files"]).stem
    steps = int(sample.removeprefix("sample-")) // table["rows_a_step"] if purpose != "memory" else 3

    def run(pass_index: int, count: int) -> bytes:
        step = Step(pass_index, 0, seconds, 2, 256, 0, loss, peak_bytes=10**8)
        return b"".join(encode_line(msgspec.structs.replace(step, step=number)) for number in range(count))

    os.write(voice.events._descriptor, run(0, request["warm_up_steps"]))
    time.sleep(pause)
    ready = b""
    for pass_index in range(1, request["passes"] + 1):
        while request["turns"] and _turns(folder) < pass_index:
            time.sleep(0.005)
        ready += run(pass_index, steps) + encode_line(PassEnd(pass_index=pass_index))
        if request["turns"]:
            os.write(voice.events._descriptor, ready)
            ready = b""
    os.write(voice.events._descriptor, ready + encode_line(Finished(outcome="ok", peak_bytes=10**8)))


def _turns(folder: Path) -> int:
    try:
        return int((folder / "turns").read_text())
    except FileNotFoundError:
        return 0
