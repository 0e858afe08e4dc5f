"""An earlier run of the same job: what it found is where a later run starts.

Nothing of it is taken over unmeasured. On an unchanged job, with the same data, model, machine and versions, its pick
is tried first and the search ends once that is confirmed; where something changed, it is tried first in a full search.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from autotune import folder as run_folder
from autotune.errors import AutotuneError
from autotune.events import RunFinished
from autotune.folder import Earlier, Prepared
from autotune.plan.space import Arrangement, Candidate, Space
from autotune.probe.lengths import Lengths
from autotune.probe.machine import Machine

MOST_RUNS = 8  # the newest; one over a million rows takes a third of a second to read
MOST_TOLD = 4  # of the fields that changed
# What a trial leaves out or overrides, and names that change nothing a step computes
NO_MATTER = frozenset(
    {
        "output_dir",
        "run_name",
        "report_to",
        "project",
        "logging_dir",
        "push_to_hub",
        "hub_model_id",
        "hub_private_repo",
        "hub_strategy",
        "hub_revision",
        "resume_from_checkpoint",
        "overwrite_output_dir",
    }
)


def find(prepared: Prepared, space: Space, runs: Path) -> Earlier | None:
    """The newest run in the folder `runs` of this very job, or else of the job as it was before something changed: one
    of the same method, and of the same config file or model. None where there is none that came to an end."""
    changed: Earlier | None = None
    for folder in _newest(runs):
        last = run_folder.confirmed(folder)
        if last is None:
            continue
        try:
            before = run_folder.read(folder)
        except AutotuneError:  # another version's, or damaged: there is nothing to start from
            continue
        if not _same_training(before, prepared):
            continue
        differences = tuple(changes(before, prepared))
        if differences and changed is not None:
            continue
        found = _of_run(folder, last, space, differences)
        if found is not None and not differences:
            return found
        changed = changed or found
    return changed


def changes(before: Prepared, now: Prepared) -> Iterator[str]:
    """What is different, each in words: options of the job, the data, the model, the machine, versions."""
    yield from _of_dicts(_given(before), _given(now), quoted=True)
    if _counts(before.lengths) != _counts(now.lengths):
        was, is_ = before.lengths.rows, now.lengths.rows
        yield "the data" + (f" ({was:,} rows, {is_:,} now)" if was != is_ else " (other lengths)")
    if before.model != now.model:
        yield "the model"
    if before.allowed != now.allowed:
        yield "what is allowed"
    yield from _of_dicts(_hardware(before.machine), _hardware(now.machine), quoted=False)
    yield from _of_dicts(before.machine.versions, now.machine.versions, quoted=False)


def line(earlier: Earlier) -> str:
    """What there is to say of it."""
    what = f"an earlier run ({earlier.run}) found {earlier.label}"
    what += f", {earlier.speedup:.2f}x as fast as yours" if earlier.speedup is not None else ""
    if not earlier.changed:
        again = "that is measured again first" if earlier.speedup is not None else "that is looked at again"
        return f"{what}: nothing has changed since, so {again}, and the search ends where it is confirmed"
    told, rest = earlier.changed[:MOST_TOLD], len(earlier.changed) - MOST_TOLD
    listed = ", ".join(told) + (f" and {rest} more" if rest > 0 else "")
    return f"{what}; changed since: {listed}: that is tried first in a full search"


def nearest(space: Space, pick: Candidate) -> Candidate:
    """The pick as far as this space has it: where an axis no longer has its choice, the baseline's; of arrangements the
    most like it."""
    values: dict[str, Any] = {}
    for axis in space.axes:
        present = [choice.value for choice in axis.choices]
        value = getattr(pick, axis.name)
        if value not in present and axis.name == "arrangement":
            value = min(
                (one for one in present if _alike(one, value)), key=lambda one: _apart(one, value), default=None
            )
        values[axis.name] = value if value in present else getattr(space.baseline, axis.name)
    candidate = msgspec.structs.replace(space.baseline, **values)
    return candidate if candidate in set(space.candidates()) else space.baseline


def _newest(runs: Path) -> list[Path]:
    """The runs of a folder, the newest first."""
    found = [(path.stat().st_mtime, path.parent) for path in runs.glob("*/run.msgpack")]
    return [folder for _, folder in sorted(found, reverse=True)[:MOST_RUNS]]


def _same_training(before: Prepared, now: Prepared) -> bool:
    """Whether one is the other, perhaps with changes: of one method, and of one config file or else one model."""
    one, other = before.job, now.job
    if one.method != other.method or before.machine.what_if:
        return False
    if one.config_path is not None and (one.folder, one.config_path) == (other.folder, other.config_path):
        return True
    return bool(one.resolved["model_name_or_path"] == other.resolved["model_name_or_path"])


def _of_run(folder: Path, last: RunFinished, space: Space, differences: tuple[str, ...]) -> Earlier | None:
    """What the run ended with, by its last confirmed result."""
    # what was delivered is the arm of the confirmation whose rate was told
    arms = [one for one in run_folder.results(folder) if one.purpose == "confirm" and one.rate is not None]
    pick = next((one.candidate for one in arms if one.rate == last.best_rate), None)
    if pick is None:
        return None
    if last.outcome == "kept":
        return Earlier(folder.name, space.baseline, "nothing faster than yours", changed=differences)
    return Earlier(folder.name, nearest(space, pick), str(pick), speedup=last.speedup, changed=differences)


def _given(prepared: Prepared) -> dict[str, Any]:
    """What the user gave, without what cannot matter here."""
    job = prepared.job
    options = {**job.options, **job.launcher, **{f"env {name}": value for name, value in job.environment.items()}}
    return {name: value for name, value in options.items() if name not in NO_MATTER and value is not None}


def _counts(lengths: Lengths) -> tuple[Any, ...]:
    return lengths.rows, lengths.tokens, lengths.first_loss, lengths.last_loss, lengths.loss_tokens


def _hardware(machine: Machine) -> dict[str, Any]:
    names = [f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in machine.gpus]
    return {
        "GPUs": ", ".join(names) or None,
        "CPU": f"{machine.cpu.cores}-core {machine.cpu.name}",
        "driver": machine.driver,
    }


def _of_dicts(before: dict[str, Any], now: dict[str, Any], *, quoted: bool) -> Iterator[str]:
    for name in dict.fromkeys([*before, *now]):
        was, is_ = before.get(name), now.get(name)
        if was == is_:
            continue
        shown = f"`{name}`" if quoted else name
        simple = all(one is None or isinstance(one, bool | int | float | str) for one in (was, is_))
        yield f"{shown} {_told(was)} -> {_told(is_)}" if simple else shown


def _told(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _alike(one: Arrangement, other: Arrangement) -> bool:
    return one.name == other.name and one.padding_free == other.padding_free


def _apart(one: Arrangement, other: Arrangement) -> tuple[int, int, int]:
    length = abs((one.row_length or 0) - (other.row_length or 0))
    return abs(one.micro_batch - other.micro_batch), length, abs(one.accumulation - other.accumulation)
