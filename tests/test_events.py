"""Events: what is written is what is read, and a crash in the middle of a line costs that line alone."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from autotune.events import (
    AnyEvent,
    BestChanged,
    EventReader,
    EventWriter,
    Finished,
    Hello,
    Note,
    Outcome,
    PassEnd,
    Phase,
    RunFinished,
    RunOutcome,
    RunStarted,
    Step,
    TrialFinished,
    TrialStarted,
    decode_line,
    encode_line,
)

REPOSITORY = Path(__file__).parent.parent

# Other programs read these lines. A change here is a change of the protocol: it needs its line in the README.
FROZEN: dict[str, tuple[str, ...]] = {
    "hello": (
        "protocol",
        "pid",
        "versions",
        "requested_attention",
        "actual_attention",
        "kernel_revision",
        "preloaded",
        "trial",
    ),
    "phase": ("phase", "seconds", "trial"),
    "step": (
        "pass_index",
        "step",
        "seconds",
        "micro_batches",
        "useful_tokens",
        "padding_tokens",
        "loss",
        "grad_norm",
        "peak_bytes",
        "finite",
        "trial",
    ),
    "pass_end": ("pass_index", "trial"),
    "finished": ("outcome", "where", "detail", "peak_bytes", "trial"),
    "run_started": (
        "run",
        "method",
        "model",
        "data",
        "config",
        "machine",
        "precision",
        "precision_reason",
        "candidates",
        "budget_seconds",
    ),
    "trial_started": ("trial", "label", "purpose", "reason"),
    "trial_finished": (
        "trial",
        "label",
        "purpose",
        "outcome",
        "where",
        "detail",
        "rate",
        "rate_interval",
        "ratio",
        "peak_bytes",
        "seconds",
        "measured_seconds",
    ),
    "best_changed": ("trial", "label", "rate", "ratio"),
    "note": ("text", "topic"),
    "run_finished": (
        "outcome",
        "run",
        "rate_unit",
        "baseline_rate",
        "best_rate",
        "speedup",
        "speedup_interval",
        "trials",
        "seconds",
        "best",
        "config",
        "profile",
        "confirmed",
        "grade",
    ),
}

ONE_OF_EACH: tuple[AnyEvent, ...] = (
    Hello(
        protocol=1,
        pid=17,
        versions={"trl": "1.16.0", "vllm": None},
        requested_attention="sdpa",
        actual_attention="sdpa",
        kernel_revision="main",
        preloaded=False,
        trial=3,
    ),
    Phase(phase="load_model", seconds=0.25, trial=3),
    Step(
        pass_index=1,
        step=2,
        seconds=0.125,
        micro_batches=4,
        useful_tokens=900,
        padding_tokens=100,
        loss=2.5,
        grad_norm=1.5,
        peak_bytes=2**31,
        trial=3,
    ),
    PassEnd(pass_index=1, trial=3),
    Finished(outcome="oom", where="backward", detail="torch.OutOfMemoryError: “…”\u2028\r\n", peak_bytes=5, trial=3),
    RunStarted(
        run="autotune-runs/one",
        method="sft",
        model="tiny",
        data="rows.jsonl",
        config=None,
        machine="2 cores",
        precision="float32",
        precision_reason="no GPU",
        candidates=48,
        budget_seconds=None,
    ),
    TrialStarted(trial=0, label="yours", purpose="speed", reason="your own settings"),
    TrialFinished(
        trial=0,
        label="yours",
        purpose="confirm",
        outcome="ok",
        where=None,
        detail=None,
        rate=4700.0,
        rate_interval=(4600.0, 4800.0),
        ratio=1.0,
        peak_bytes=2**40,
        seconds=4.5,
        measured_seconds=3.25,
    ),
    BestChanged(trial=4, label="bfd", rate=9700.0, ratio=None),
    Note(text="packing: zu früh \U0001f600", topic="plan"),
    RunFinished(
        outcome="improved",
        run="autotune-runs/one",
        rate_unit="useful tokens/s",
        baseline_rate=None,
        best_rate=9700.0,
        speedup=None,
        speedup_interval=None,
        trials=11,
        seconds=64.0,
        best={"packing": True, "max_length": 512, "attn_implementation": "sdpa"},
        config="autotune-runs/one/tuned.yaml",
        profile=None,
    ),
)

STEP = Step(
    pass_index=0, step=0, seconds=1.0, micro_batches=1, useful_tokens=10, padding_tokens=0, loss=1.0, peak_bytes=None
)


def kind(event: AnyEvent) -> str:
    return str(event.__struct_config__.tag)


def test_event_kinds_and_their_fields_are_the_frozen_list() -> None:
    present = {str(one.__struct_config__.tag): one.__struct_fields__ for one in get_args(AnyEvent)}
    assert present == FROZEN


def test_outcomes_are_closed_sets() -> None:
    assert get_args(Outcome) == ("ok", "oom", "error", "killed", "hung", "pruned", "stopped")
    assert get_args(RunOutcome) == ("improved", "kept", "failed", "interrupted")


def test_there_is_an_example_of_every_kind_below() -> None:
    assert {kind(event) for event in ONE_OF_EACH} == set(FROZEN)


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=kind)
def test_an_event_is_read_as_it_was_written(event: AnyEvent) -> None:
    line = encode_line(event)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_line(line) == event


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=kind)
def test_a_line_is_plain_json_with_its_kind_first_and_every_field(event: AnyEvent) -> None:
    found = json.loads(encode_line(event))
    assert list(found) == ["kind", *FROZEN[kind(event)]]


def test_events_come_back_in_the_order_they_were_written(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")
    for event in ONE_OF_EACH:
        writer.write(event)
    writer.close()
    assert tuple(EventReader(tmp_path / "events.jsonl").read()) == ONE_OF_EACH


def test_a_reader_gives_each_event_once(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")
    reader = EventReader(tmp_path / "events.jsonl")
    writer.write(ONE_OF_EACH[0])
    assert list(reader.read()) == [ONE_OF_EACH[0]]
    assert list(reader.read()) == []
    writer.write(ONE_OF_EACH[1])
    assert list(reader.read()) == [ONE_OF_EACH[1]]
    writer.close()


def test_a_file_that_is_not_there_yet_has_no_events(tmp_path: Path) -> None:
    reader = EventReader(tmp_path / "events.jsonl")
    assert list(reader.read()) == []
    writer = EventWriter(tmp_path / "events.jsonl")
    writer.write(STEP)
    writer.close()
    assert list(reader.read()) == [STEP]


@pytest.mark.parametrize("cut", [1, 20, len(encode_line(STEP)) - 1])
def test_a_torn_tail_counts_once_its_newline_is_there(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    line = encode_line(STEP)
    path.write_bytes(line + line[:cut])
    reader = EventReader(path)
    assert list(reader.read()) == [STEP]
    assert list(reader.read()) == []
    with path.open("ab") as file:
        file.write(line[cut:])
    assert list(reader.read()) == [STEP]


def test_what_is_appended_after_a_torn_tail_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(encode_line(STEP) + encode_line(STEP)[:30])
    writer = EventWriter(path)
    writer.write(ONE_OF_EACH[1])
    writer.close()
    assert list(EventReader(path).read()) == [STEP, ONE_OF_EACH[1]]


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"weather","trial":1}',
        b'{"trial":1}',
        b'{"kind":"phase","phase":"lunch","seconds":1.0}',
        b'{"kind":"pass_end"}',
        b'{"kind":"pass_end","pass_index":"one"}',
        b"[]",
        b"null",
        b"",
        b"Traceback (most recent call last):",
        b"\xff\xfe\x00",
        b'{"kind":"note","text":"\xff"}',
    ],
)
def test_a_line_this_version_does_not_know_is_skipped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(encode_line(STEP) + line + b"\n" + encode_line(ONE_OF_EACH[1]))
    assert list(EventReader(path).read()) == [STEP, ONE_OF_EACH[1]]


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=kind)
def test_keys_of_a_later_version_are_skipped(event: AnyEvent) -> None:
    later = json.loads(encode_line(event)) | {"mood": {"deep": [1, None]}}
    assert decode_line(json.dumps(later).encode()) == event


def test_keys_that_have_a_default_may_be_missing() -> None:
    given = {"pass_index": 0, "step": 0, "seconds": 1, "micro_batches": 1, "useful_tokens": 10, "padding_tokens": 0}
    assert decode_line(json.dumps({"kind": "step", **given, "loss": 1}).encode()) == STEP


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_becomes_null(number: float) -> None:
    line = encode_line(msgspec.structs.replace(STEP, loss=number, grad_norm=number))
    assert json.loads(line)["loss"] is None
    assert decode_line(line) == msgspec.structs.replace(STEP, loss=None, grad_norm=None)


def test_a_number_that_is_not_finite_becomes_null_inside_options() -> None:
    last = ONE_OF_EACH[-1]
    assert isinstance(last, RunFinished)
    line = encode_line(msgspec.structs.replace(last, best={"learning_rate": math.nan, "betas": [math.inf, 0.9]}))
    assert json.loads(line)["best"] == {"learning_rate": None, "betas": [None, 0.9]}


def test_two_processes_that_append_at_the_same_time_never_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    count = 400
    script = """
import sys
from pathlib import Path
from autotune.events import EventWriter, Note
writer = EventWriter(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    writer.write(Note(text=f"{sys.argv[2]} {number} " + sys.argv[2] * 3000))
"""
    command = [sys.executable, "-c", script, str(path)]
    writers = [
        subprocess.Popen([*command, name, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY)
        for name in ("a", "b")
    ]
    for writer in writers:  # one that opens the file amid a line of the other closes that line, with one more newline
        assert writer.stdout is not None
        with writer.stdout:
            assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.close()
    assert [writer.wait(30) for writer in writers] == [0, 0]
    events = list(EventReader(path).read())
    assert len(path.read_bytes().splitlines()) == len(events) == 2 * count
    for name in ("a", "b"):
        own = [event.text for event in events if isinstance(event, Note) and event.text.startswith(name)]
        assert own == [f"{name} {number} " + name * 3000 for number in range(count)]


def test_a_line_that_only_half_fits_on_the_disk_is_an_error_and_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    script = """
import resource, signal, sys
from pathlib import Path
from autotune.events import EventWriter, Note
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
writer = EventWriter(Path(sys.argv[1]))
writer.write(Note(text="a" * 100))
try:
    writer.write(Note(text="b" * 100))
except OSError as error:
    print(error.strerror)
"""
    found = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert found.stdout == "No space left on device\n"
    assert path.stat().st_size == 200
    writer = EventWriter(path)
    writer.write(STEP)
    writer.close()
    assert list(EventReader(path).read()) == [Note(text="a" * 100), STEP]


def test_events_can_be_read_by_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        EventWriter(tmp_path / "events.jsonl").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "events.jsonl").stat().st_mode) == 0o600


def test_closing_twice_is_no_error(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")
    writer.close()
    writer.close()
