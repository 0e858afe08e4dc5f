"""What a sweep measured, as one file: every candidate of a job's space, several times, step by step.

From a table a search can be played again (`benchmarks/replay.py`): it holds the plan of the run (job, machine, lengths,
model) and, of each trial, all that the search would have been told.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import msgspec

from autotune import folder as run_folder
from autotune import planning, session
from autotune.child import write_whole
from autotune.events import Outcome, Step
from autotune.folder import Prepared
from autotune.plan.space import Candidate, Space
from autotune.planning import Plan

SWEEPS = Path(__file__).parent.parent / "tests" / "data" / "sweeps"


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What one optimizer step computes on."""

    micro_batches: int
    useful_tokens: int
    padding_tokens: int


Layout = tuple[tuple[StepShape, ...], ...]  # per pass its steps; pass 0 is the warm-up


class Measured(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One trial of one candidate. Seconds, bytes."""

    outcome: Outcome
    layout: int = 0  # place in the table's layouts
    step_seconds: tuple[tuple[float, ...], ...] = ()  # per pass, as the layout
    losses: tuple[float | None, ...] = ()  # of the first steps
    startup_seconds: float = 0.0  # child start to first step
    seconds: float = 0.0  # of the whole trial
    peak_bytes: int | None = None
    others_cores: float = 0.0  # cores that other processes kept busy meanwhile
    disturbed: bool = False  # these were cores that the candidate needs, also when it was measured again
    tries: int = 1
    attention: str | None = None  # that ran
    where: str | None = None
    detail: str | None = None

    @property
    def rated(self) -> bool:
        """Whether it came to a complete pass."""
        return self.outcome == "ok" and len(self.step_seconds) > 1


class Swept(msgspec.Struct, frozen=True, omit_defaults=True):
    """One candidate and what each repetition gave. `on_longest`: how three steps on the longest rows would end."""

    candidate: Candidate
    repetitions: tuple[Measured, ...]
    on_longest: Outcome = "ok"


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep. `kind` is `measured` or `made up`: timings by a formula, for tests of the search alone."""

    schema: Literal[1] = 1
    name: str
    kind: Literal["measured", "made up"]
    date: str
    prepared: Prepared  # job, machine, lengths, model; paths are relative to the job's folder
    axes: tuple[str, ...]  # that were swept; on every other each candidate has the job's own choice
    sample_rows: tuple[int, ...]  # numbers of the data's rows that every trial passed over
    sample_steps: int  # optimizer steps of the baseline in one pass over them
    passes: int
    sample_seconds: float = 1.0  # to draw and write a sample
    check_seconds: float = 2.0  # of the check that packed documents stay apart
    layouts: tuple[Layout, ...]
    swept: tuple[Swept, ...]

    @property
    def repetitions(self) -> int:
        return min(len(one.repetitions) for one in self.swept)

    @property
    def disturbed_share(self) -> float:
        """Of the trials, those beside which others had cores that they needed though they were measured again."""
        trials = [measured for one in self.swept for measured in one.repetitions]
        return sum(one.disturbed for one in trials) / len(trials)

    def repetition_seconds(self) -> float:
        """What it takes to measure every candidate once: the mean over the repetitions."""
        return sum(one.seconds for swept in self.swept for one in swept.repetitions) / self.repetitions


def steps_of(table: Table, measured: Measured) -> list[Step]:
    """The steps of a trial as its worker told them."""
    return [
        step_of(shape, pass_index=pass_index, step=number, seconds=seconds, loss=loss_of(measured, pass_index, number))
        for pass_index, (shapes, times) in enumerate(
            zip(table.layouts[measured.layout], measured.step_seconds, strict=True)
        )
        for number, (shape, seconds) in enumerate(zip(shapes, times, strict=True))
    ]


def step_of(shape: StepShape, *, pass_index: int, step: int, seconds: float, loss: float | None) -> Step:
    return Step(
        pass_index=pass_index,
        step=step,
        seconds=seconds,
        micro_batches=shape.micro_batches,
        useful_tokens=shape.useful_tokens,
        padding_tokens=shape.padding_tokens,
        loss=loss,
    )


def loss_of(measured: Measured, pass_index: int, step: int) -> float | None:
    """The loss of a step: recorded for the first ones, for later ones the last that was."""
    if not measured.losses:
        return None
    return measured.losses[min(step, len(measured.losses) - 1)] if pass_index == 0 else measured.losses[-1]


def read(path: Path) -> Table:
    """The table in a file. Raises msgspec.ValidationError for one of another version."""
    return msgspec.json.decode(path.read_bytes(), type=Table)


def write(table: Table, path: Path) -> None:
    """Write the file whole: one line for each candidate, so that a new sweep can be compared with the old."""
    text = msgspec.json.encode(table).replace(b'{"candidate":', b'\n{"candidate":')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text + b"\n")


def plan_of(table: Table) -> Plan:
    """The plan that the sweep was made by, with the candidates that it swept."""
    with tempfile.TemporaryDirectory() as name:
        run_folder.write_prepared(Path(name), table.prepared)
        plan = planning.resume(session.Options(method="", arguments=(), folder=Path(name), resume=Path(name)))
    return msgspec.structs.replace(plan, space=narrowed(plan.space, [one.candidate for one in table.swept]))


def narrowed(space: Space, candidates: Collection[Candidate]) -> Space:
    """The space with those choices alone that one of the candidates has."""
    axes = tuple(
        msgspec.structs.replace(
            axis,
            choices=tuple(
                choice
                for choice in axis.choices
                if choice.value == getattr(space.baseline, axis.name)
                or any(choice.value == getattr(candidate, axis.name) for candidate in candidates)
            ),
        )
        for axis in space.axes
    )
    return msgspec.structs.replace(space, axes=axes)


def with_axes(space: Space, names: Collection[str]) -> Space:
    """The space with a choice on these axes alone; on every other the baseline's."""
    axes = tuple(
        axis if axis.name in names else msgspec.structs.replace(axis, choices=axis.choices[:1]) for axis in space.axes
    )
    return msgspec.structs.replace(space, axes=axes)
