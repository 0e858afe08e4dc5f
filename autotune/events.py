"""Everything that happens, as typed values and JSON lines.

A worker appends its lines to `trial-NNNN/events.jsonl`; the engine appends its own, and the worker's with the
trial's number, to the run's `events.jsonl` and, with `--json`, to stdout. A line is written in one call and counts
once its newline is there, so a reader never sees half of one and a torn tail after a crash is ignored.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

PROTOCOL = 1

Outcome = Literal["ok", "oom", "error", "killed", "hung", "pruned", "stopped"]
RunOutcome = Literal["improved", "kept", "failed", "interrupted"]
Topic = Literal["job", "machine", "kernels", "data", "plan", "trial", "best", "same", "epoch"]


class Event(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=False):
    """One thing that happened. `trial` is the trial's number, None where it concerns the whole run."""


# --- what a worker says -------------------------------------------------------------------------------------------


class Hello(Event, frozen=True, tag="hello"):
    """A worker is up and the model is loaded: what was asked for and what is really there.

    `kernel_revision`: the commit of the hub kernel that runs, `local` for one in a folder, None where none does.
    """

    protocol: int
    pid: int
    versions: dict[str, str | None]
    requested_attention: str | None
    actual_attention: str | None
    kernel_revision: str | None = None
    preloaded: bool = True
    trial: int | None = None


class Phase(Event, frozen=True, tag="phase"):
    """A worker entered a phase. `seconds` since the trial was started, the fork or process start included."""

    phase: Literal["start", "load_model", "prepare_data", "first_step", "measure"]
    seconds: float
    trial: int | None = None


class Step(Event, frozen=True, tag="step"):
    """One optimizer step, timed from the end of the one before it (waiting for data included)."""

    pass_index: int  # 0 is warm-up, then complete passes over the sample
    step: int  # within its pass, from 0
    seconds: float
    micro_batches: int
    useful_tokens: int
    padding_tokens: int
    loss: float | None
    grad_norm: float | None = None
    peak_bytes: int | None = None
    finite: bool = True  # loss and gradient norm are numbers; one that is none is null above
    trial: int | None = None


class PassEnd(Event, frozen=True, tag="pass_end"):
    """A complete pass over the sample is over."""

    pass_index: int
    trial: int | None = None


class Finished(Event, frozen=True, tag="finished"):
    """The worker's own account of its end; the guard writes it where the worker no longer could."""

    outcome: Outcome
    where: str | None = None
    detail: str | None = None
    peak_bytes: int | None = None
    trial: int | None = None


# --- what the engine says -----------------------------------------------------------------------------------------


class RunStarted(Event, frozen=True, tag="run_started"):
    run: str
    method: str
    model: str
    data: str
    config: str | None
    machine: str
    precision: str
    precision_reason: str
    candidates: int
    budget_seconds: float | None


class TrialStarted(Event, frozen=True, tag="trial_started"):
    trial: int
    label: str
    purpose: Literal["speed", "memory", "confirm", "gate"]
    reason: str


class TrialFinished(Event, frozen=True, tag="trial_finished"):
    trial: int
    label: str
    purpose: Literal["speed", "memory", "confirm", "gate"]
    outcome: Outcome
    where: str | None
    detail: str | None
    rate: float | None  # useful tokens/s
    rate_interval: tuple[float, float] | None
    ratio: float | None  # against the baseline
    peak_bytes: int | None
    seconds: float
    measured_seconds: float


class BestChanged(Event, frozen=True, tag="best_changed"):
    trial: int
    label: str
    rate: float
    ratio: float | None


class Note(Event, frozen=True, tag="note"):
    text: str
    topic: Topic = "plan"


class RunFinished(Event, frozen=True, tag="run_finished"):
    """The last line of a run."""

    outcome: RunOutcome
    run: str
    rate_unit: Literal["useful tokens/s", "completions/s"]
    baseline_rate: float | None
    best_rate: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    trials: int
    seconds: float
    best: dict[str, Any]
    config: str | None
    profile: str | None
    confirmed: bool = False  # measured in turns with the user's own
    grade: str | None = None  # of `best`, where it is not the user's own


AnyEvent = (
    Hello
    | Phase
    | Step
    | PassEnd
    | Finished
    | RunStarted
    | TrialStarted
    | TrialFinished
    | BestChanged
    | Note
    | RunFinished
)

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode_line(event: AnyEvent) -> bytes:
    """The event as one JSON line. Non-finite numbers become null (msgspec's rule)."""
    return msgspec.json.encode(event) + b"\n"


def decode_line(line: bytes) -> AnyEvent | None:
    """The event in a line, or None for a torn line or one of a kind this version does not know."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


class EventWriter:
    """Appends events to a file. One `write` a line, so lines of several processes never mix."""

    def __init__(self, path: Path) -> None:
        # 0o600: a trial's lines can quote the user's data in an error.
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")  # a torn tail must not swallow the line that follows it

    def write(self, event: AnyEvent) -> None:
        """Append the event. Raises OSError when the disk is full."""
        line = encode_line(event)
        if os.write(self._descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class EventReader:
    """Reads what has been appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[AnyEvent]:
        """Yield the whole lines that are new. A file that is not there yet has none."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            event = decode_line(line)
            if event is not None:
                yield event
