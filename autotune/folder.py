"""A run's folder: what is in it, how it is made, and how an interrupted run is read back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from autotune.child import write_whole
from autotune.errors import AutotuneError
from autotune.events import EventReader, RunFinished, RunStarted
from autotune.job import Job
from autotune.plan.space import Candidate, Space
from autotune.probe.lengths import Lengths
from autotune.probe.machine import Machine
from autotune.probe.model import ModelShape
from autotune.trial.result import TrialResult
from autotune.trial.runner import to_json

RUNS = "autotune-runs"
LOCK = ".lock"
SCHEMA = 2  # 1: a candidate's `checkpointing` was true or false


class Earlier(msgspec.Struct, frozen=True):
    """What an earlier run of the job found: its folder's name, its pick as this run's space has it and in words, and
    how much faster than the user's own it was; None where it found nothing faster. `changed` are the things that are
    otherwise now, in words."""

    run: str
    candidate: Candidate
    label: str
    speedup: float | None = None
    changed: tuple[str, ...] = ()


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found out before the first trial; `run.msgpack`, from which a run is resumed."""

    schema: int = SCHEMA
    job: Job
    machine: Machine
    model: ModelShape
    lengths: Lengths
    allowed: tuple[str, ...]
    budget_seconds: float
    trial_limit: int | None
    memory_limit_bytes: int | None
    seed: int = 0
    earlier: Earlier | None = None


def check_new(folder: Path) -> None:
    """Raise AutotuneError unless the folder is new or empty, and can be written."""
    if folder.is_dir() and any(one.name != LOCK for one in folder.iterdir()):
        raise AutotuneError(
            f"the run folder `{folder}` is not empty", hint="name a new one, or go on with it by `--resume`"
        )
    parent = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not parent.is_dir():
        raise AutotuneError(f"`{parent}` is no folder", hint="choose another place with `--run-folder DIR`")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise AutotuneError(f"cannot write in `{parent}`", hint="choose another place with `--run-folder DIR`")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of the folder; the system lets go of the lock when this process ends in any way."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AutotuneError(
                f"another run is going on in `{folder}`", hint="wait for it, or name another folder by `--run-folder`"
            ) from None
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)  # a run that ends leaves what it found, and nothing else


def default_name(job: Job) -> Path:
    """`autotune-runs/<time>-<method>-<model>`, one that is not there yet."""
    model = "".join(
        letter if letter.isalnum() or letter in "-._" else "-"
        for letter in Path(str(job.resolved["model_name_or_path"])).name
    )
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{job.method}-{model[:40]}"
    folder = Path(RUNS) / stem
    number = 1
    while folder.exists():
        number += 1
        folder = Path(RUNS) / f"{stem}-{number}"
    return folder


def create(folder: Path, prepared: Prepared, space: Space, report: dict[str, Any]) -> None:
    """Make the folder, for the user alone, and write what was found out."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    write_whole(folder / "job.yaml", prepared.job.config_text.encode())
    write_whole(folder / "machine.json", to_json(prepared.machine))
    write_whole(folder / "lengths.json", to_json(report))
    write_whole(folder / "space.json", to_json(space))
    write_prepared(folder, prepared)


def remove(folder: Path) -> None:
    """Take away what `create` made."""
    shutil.rmtree(folder, ignore_errors=True)


def write_prepared(folder: Path, prepared: Prepared) -> None:
    """Write that from which the run can be resumed."""
    write_whole(folder / "run.msgpack", msgspec.msgpack.encode(prepared))


def read(folder: Path) -> Prepared:
    """What an earlier run of this folder had found out. Raises AutotuneError."""
    try:
        content = (folder / "run.msgpack").read_bytes()
    except OSError:
        raise AutotuneError(
            f"`{folder}` is no run's folder: it has no `run.msgpack`",
            hint=f"runs are in `{RUNS}/`, below the folder where they were started",
        ) from None
    try:
        whole = isinstance(msgspec.msgpack.decode(content), dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        whole = False
    if not whole:
        tuned = folder / "tuned.yaml"
        still = f"; `trl sft --config {tuned}` still works" if tuned.is_file() else ""
        raise AutotuneError(f"`{folder}/run.msgpack` is damaged", hint=f"start a new run{still}")
    try:
        prepared = msgspec.msgpack.decode(content, type=Prepared)
        if prepared.schema != SCHEMA:
            raise msgspec.DecodeError(f"schema {prepared.schema} instead of {SCHEMA}")
    except msgspec.DecodeError as error:
        raise AutotuneError(
            f"`{folder}/run.msgpack` is of another version of trl-autotune ({error})", hint="start a new run"
        ) from None
    return prepared


def results(folder: Path) -> list[TrialResult]:
    """The trials of the folder that have a result, in order. A trial without one counts as not run."""
    found = []
    for path in sorted(folder.glob("trial-*/result.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=TrialResult))
    return found


def finished(folder: Path) -> RunFinished | None:
    """How the run ended; None for one that was interrupted, failed, or is half way through a later session."""
    last: RunStarted | RunFinished | None = None
    for event in EventReader(folder / "events.jsonl").read():
        if isinstance(event, RunStarted | RunFinished):
            last = event
    return _as_here(last, folder) if isinstance(last, RunFinished) else None


def confirmed(folder: Path) -> RunFinished | None:
    """The last result of the folder that was confirmed, whatever came after it."""
    found: RunFinished | None = None
    for event in EventReader(folder / "events.jsonl").read():
        if isinstance(event, RunFinished) and event.confirmed:
            found = _as_here(event, folder) or found
    return found


def _as_here(event: RunFinished, folder: Path) -> RunFinished | None:
    """The result with its files where they are now: the folder may have been moved or copied. None for no result."""
    config, profile = folder / "tuned.yaml", folder / "profile.yaml"
    if event.outcome not in ("improved", "kept") or event.config is None or not config.is_file():
        return None
    there = str(profile) if event.profile is not None else None
    return msgspec.structs.replace(event, run=str(folder), config=str(config), profile=there)


def clean(folder: Path) -> None:
    """Remove what holds the user's data: the samples and what was tokenised from them. Only lengths stay."""
    for sample in folder.glob("*.parquet"):
        sample.unlink(missing_ok=True)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    for kind in ("trial", "attempt"):
        for output in folder.glob(f"{kind}-*/output"):
            shutil.rmtree(output, ignore_errors=True)
