"""Every candidate of a job's space, measured several times: the truth that a search can be held against.

Each measurement is the tool's own trial with a fixed number of passes over the sample that a tuning with the default
budget draws. Repetition follows repetition, each in an order of its own, so that a slow spell of the host hits no
candidate in all of them. What others disturbed is measured again at the end of its repetition. A sweep that is stopped
goes on where it was.

    make bench-sweep ARGS="--job chat"      20 to 40 minutes on an idle machine; writes tests/data/sweeps/chat.json
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from pathlib import Path

import msgspec

from autotune import planning, session
from autotune.child import write_whole
from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.events import AnyEvent, Note
from autotune.folder import Prepared
from autotune.interruption import ended_by_signals
from autotune.plan.space import Candidate
from autotune.planning import Plan
from autotune.probe.machine import describe
from autotune.search.gates import documents_stay_apart
from autotune.search.measure import POLL_SECONDS, disturbed
from autotune.search.samples import Sample, draw, first_pass_steps
from autotune.search.setting import Setting
from autotune.trial.runner import Trial
from benchmarks.search_jobs import JOBS, SearchJob, build
from benchmarks.sweep_journal import Entry, Journal, to_do
from benchmarks.sweep_table import SWEEPS, Layout, Measured, StepShape, Swept, Table, with_axes, write

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "sweeps"
REPETITIONS = 3
PASSES = 2  # a search that is sure enough of a rate has seen two
FIRST_LOSSES = 3


def measure(setting: Setting, index: int, candidate: Candidate, sample: Sample) -> tuple[Layout, Measured]:
    """One trial, to its end."""
    trial = setting.trial(index, candidate, sample.path, purpose="speed", passes=PASSES)
    began = time.monotonic()
    try:
        trial.start()
        load = setting.load_meter(trial)
        while trial.running and PASSES not in trial.ended_passes:
            load.sample()
            if not trial.poll():
                time.sleep(POLL_SECONDS)
        others = load.others()  # while its processes can still be asked
        seconds = time.monotonic() - began
    finally:
        trial.kill()
    layout, times = _steps(trial)
    outcome, where, detail = trial.result_outcome()
    if PASSES in trial.ended_passes:
        outcome, where, detail = "ok", None, None  # ended because all was measured
    measured = Measured(
        outcome=outcome,
        step_seconds=times,
        losses=tuple(step.loss for step in trial.steps[:FIRST_LOSSES]),
        startup_seconds=round(trial.first_step_at - trial.started, 3) if trial.first_step_at is not None else 0.0,
        seconds=round(seconds, 3),
        peak_bytes=trial.peak_bytes(),
        others_cores=round(others, 2),
        disturbed=disturbed(setting, candidate, others),
        attention=trial.hello.actual_attention if trial.hello else None,
        where=where,
        detail=detail,
    )
    shutil.rmtree(trial.folder, ignore_errors=True)
    return layout, measured


def _steps(trial: Trial) -> tuple[Layout, tuple[tuple[float, ...], ...]]:
    """Shapes and seconds of the steps, by pass."""
    passes = [[step for step in trial.steps if step.pass_index == index] for index in range(PASSES + 1)]
    shapes = tuple(
        tuple(StepShape(step.micro_batches, step.useful_tokens, step.padding_tokens) for step in steps)
        for steps in passes
        if steps
    )
    return shapes, tuple(tuple(round(step.seconds, 5) for step in steps) for steps in passes if steps)


def run(job: SearchJob, *, repetitions: int, limit: int | None, anew: bool) -> Path:
    """Sweep a job, or go on with it, and write its table; the path of that."""
    folder = WORK / job.name
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "sft.yaml", job.config.encode())
    options = session.Options(method="sft", arguments=("--config", "sft.yaml"), folder=folder)
    with session.children_for(options) as (children, options, machine):
        build(job, folder, children)
        plan = planning.prepare(options, children, machine, emit=_say)
        plan = msgspec.structs.replace(plan, space=with_axes(plan.space, job.axes))
        candidates = _some(list(plan.space.candidates()), limit)
        print(f"{job.name}: {len(candidates)} of {plan.space.size} candidates, {describe(machine)}", flush=True)
        return _sweep(job, plan, folder, children, candidates, repetitions=repetitions, anew=anew)


def _sweep(
    job: SearchJob,
    plan: Plan,
    folder: Path,
    children: Children,
    candidates: list[Candidate],
    *,
    repetitions: int,
    anew: bool,
) -> Path:
    setting = planning.setting_of(plan, folder / "run", children, emit=_say, started=time.monotonic())
    setting.folder.mkdir(mode=0o700, exist_ok=True)
    for old in setting.folder.glob("sample-*.parquet"):
        old.unlink()
    began = time.monotonic()
    sample = draw(setting, first_pass_steps(setting))
    sample_seconds = time.monotonic() - began
    journal = Journal(folder / f"measured-{len(candidates)}.jsonl", _key(plan.prepared, sample, candidates), anew=anew)
    # the sample is tokenized once for all, as in a tuning by its first trial
    measure(setting, 0, plan.space.baseline, sample)
    spent, done, total = 0.0, 0, repetitions * len(candidates)
    for index, (repetition, candidate) in enumerate(to_do(candidates, journal, repetitions), start=1):
        layout, measured = measure(setting, index, candidate, sample)
        journal.add(Entry(candidate, repetition, layout, measured))
        spent, done = spent + measured.seconds, done + 1
        left = max(0, total - len(journal.entries)) * spent / done
        trials = [entry.measured for entry in journal.entries.values()]
        others = sum(one.disturbed for one in trials)
        print(
            f"{len(trials)} of {total}  {_told(measured)}  {candidate}{'  DISTURBED' if measured.disturbed else ''}"
            f"   {others} disturbed so far, {left / 60:.0f} min left (est.)",
            flush=True,
        )
    table = _table(job, plan, sample, candidates, journal, repetitions)
    table = msgspec.structs.replace(
        table, sample_seconds=round(sample_seconds, 2), check_seconds=round(_check_seconds(setting), 2)
    )
    path = (SWEEPS if len(candidates) == plan.space.size else folder) / f"{job.name}.json"
    write(msgspec.convert(_relative(msgspec.to_builtins(table), folder), Table), path)
    print(
        f"{path}: {path.stat().st_size / 1000:.0f} kB, one repetition {table.repetition_seconds():.0f} s, "
        f"{table.disturbed_share:.0%} of the trials disturbed"
    )
    return path


def _table(
    job: SearchJob, plan: Plan, sample: Sample, candidates: list[Candidate], journal: Journal, repetitions: int
) -> Table:
    layouts: dict[Layout, int] = {}
    swept = []
    for candidate in candidates:
        entries = [journal.entries[candidate, repetition] for repetition in range(repetitions)]
        measured = [
            msgspec.structs.replace(entry.measured, layout=layouts.setdefault(entry.layout, len(layouts)))
            for entry in entries
        ]
        swept.append(Swept(candidate, tuple(measured)))
    return Table(
        name=job.name,
        kind="measured",
        date=time.strftime("%Y-%m-%d"),
        prepared=plan.prepared,
        axes=job.axes,
        sample_rows=sample.row_numbers,
        sample_steps=sample.steps,
        passes=PASSES,
        layouts=tuple(layouts),
        swept=tuple(swept),
    )


def _key(prepared: Prepared, sample: Sample, candidates: list[Candidate]) -> str:
    """What must be the same for a sweep to go on: one line of text."""
    machine = prepared.machine
    told = (machine.cpu.name, machine.cpu.cores, machine.versions, prepared.job.config_text, sample.row_numbers)
    return msgspec.json.encode((told, candidates)).decode()


def _check_seconds(setting: Setting) -> float:
    """How long it takes to see whether packed documents stay apart."""
    began = time.monotonic()
    documents_stay_apart(setting, setting.space.baseline)
    return time.monotonic() - began


def _relative(value: object, folder: Path) -> object:
    """The same with paths from the job's folder on: a table names no place of this machine."""
    if isinstance(value, str):
        return value.replace(str(folder), ".").replace(str(Path.home()), "~")
    if isinstance(value, dict):
        return {name: _relative(one, folder) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_relative(one, folder) for one in value]
    return value


def _some(candidates: list[Candidate], limit: int | None) -> list[Candidate]:
    """All, or so many by chance, the baseline first."""
    if limit is None or limit >= len(candidates):
        return candidates
    return [candidates[0], *random.Random(limit).sample(candidates[1:], limit - 1)]


def _told(measured: Measured) -> str:
    if not measured.rated:
        return measured.outcome
    a_pass = sum(measured.step_seconds[1])
    return f"{measured.seconds:4.1f} s, a pass {a_pass:5.2f} s"


def _say(event: AnyEvent) -> None:
    if isinstance(event, Note):
        print(f"{event.topic:8} {event.text}", flush=True)


def main() -> None:
    """Sweep one job and print how it goes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--job", choices=sorted(JOBS), required=True)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--limit", type=int, help="so many candidates alone; the table then stays in build/sweeps")
    parser.add_argument("--anew", action="store_true", help="forget what was measured")
    given = parser.parse_args()
    job = JOBS[given.job]
    if job.needs is not None and not job.needs.exists():
        raise SystemExit(
            f"error: `{job.name}` needs `{job.needs.name}`, which is not here\nhint: see {job.needs.parent}"
        )
    try:
        with ended_by_signals():
            run(job, repetitions=given.repetitions, limit=given.limit, anew=given.anew)
    except AutotuneError as error:
        raise SystemExit(f"error: {error.what}\nhint: {error.hint}") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None


if __name__ == "__main__":
    main()
