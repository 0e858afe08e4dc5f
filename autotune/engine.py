"""A whole run: plan, search, deliver. The wizard and `--auto` see the same events."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from autotune import folder as run_folder
from autotune.children import Children
from autotune.deliver import closing, files, wording
from autotune.errors import NoTrialFinishedError
from autotune.events import AnyEvent, EventWriter, RunFinished, RunStarted
from autotune.interruption import not_interrupted
from autotune.plan.lengths_report import lengths_report
from autotune.planning import Listener, Plan, estimated_seconds, note, setting_of
from autotune.probe.machine import describe
from autotune.search.found import Found
from autotune.search.setting import Setting
from autotune.search.tuner import Tuner
from autotune.trial.result import TrialResult


def tune(
    plan: Plan,
    folder: Path,
    children: Children,
    *,
    started: float,
    emit: Listener,
    resumed: bool = False,
) -> RunFinished:
    """Search and deliver in the run's folder. Ctrl-C and SIGTERM end it in good order, with the best so far."""
    with run_folder.locked(folder):
        if not resumed:
            run_folder.check_new(folder)  # again: another run may have come and gone while this one looked around
            report = wording.lengths_json(plan.data, lengths_report, plan.prepared.job)
            run_folder.create(folder, plan.prepared, plan.space, report)
        else:
            run_folder.write_prepared(folder, plan.prepared)  # its limits may be others now
        try:
            return _tune(plan, folder, children, started=started, emit=emit, resumed=resumed)
        except KeyboardInterrupt:  # before the search began: nothing was written, and nothing is left
            if not resumed:
                run_folder.remove(folder)
            raise


def _tune(
    plan: Plan, folder: Path, children: Children, *, started: float, emit: Listener, resumed: bool
) -> RunFinished:
    prepared = plan.prepared
    job = prepared.job
    events = EventWriter(folder / "events.jsonl")

    def say(event: AnyEvent) -> None:
        events.write(event)
        emit(event)

    earlier = run_folder.results(folder) if resumed else []
    confirmed = run_folder.confirmed(folder) if resumed else None
    precision = wording.precision(job, prepared.machine)
    say(
        RunStarted(
            run=str(folder),
            method=job.method,
            model=str(job.resolved["model_name_or_path"]),
            data=wording.data_name(job),
            config=job.config_path,
            machine=describe(prepared.machine),
            precision=precision.value,
            precision_reason=precision.reason,
            candidates=plan.space.size,
            budget_seconds=prepared.budget_seconds,
        )
    )
    if resumed:
        note(say, "job", wording.job_line(job))
        note(say, "data", wording.data_line(plan.data))
        note(say, "plan", f"going on after {len(earlier)} trial{'' if len(earlier) == 1 else 's'}")
    note(say, "plan", wording.plan_line(plan.space, estimated_seconds(plan), prepared.budget_seconds))
    setting = setting_of(plan, folder, children, emit=say, started=started)

    def keep_so_far(fastest: TrialResult | None) -> None:
        if confirmed is not None:  # which is not written over by what is not
            return
        first = not (folder / "tuned.yaml").exists()
        files.write_so_far(setting, fastest, folder)
        if first and fastest is not None:
            note(say, "best", f"tuned.yaml holds #{fastest.index} for now, not confirmed yet")

    tuner = Tuner(setting, earlier, faster=keep_so_far)
    failure: NoTrialFinishedError | None = None
    try:
        found = tuner.run()
    except KeyboardInterrupt:
        found = tuner.found("interrupted")
    except NoTrialFinishedError as error:
        failure, found = error, tuner.found("failed")
    with not_interrupted():
        run_folder.clean(folder)
        for topic, text in closing.lines(setting, found, seconds=time.monotonic() - started):
            note(say, topic, text)
        seconds = time.monotonic() - started
        if confirmed is not None and not found.confirmed_rounds:
            note(say, "best", "this is not confirmed, and what was confirmed before stays")
            ended = "interrupted" if found.outcome == "interrupted" else confirmed.outcome
            last = msgspec.structs.replace(confirmed, outcome=ended, trials=len(found.results), seconds=seconds)
        else:
            last = _deliver(setting, found, folder, seconds=seconds)
        say(last)
        events.close()
    if failure is not None and last.config is None:
        raise failure
    return last


def _deliver(setting: Setting, found: Found, folder: Path, *, seconds: float) -> RunFinished:
    delivered = files.write(setting, found, folder, seconds=seconds)
    best, baseline = found.best, found.baseline
    return RunFinished(
        outcome=found.outcome,
        run=str(folder),
        rate_unit="useful tokens/s",
        baseline_rate=baseline.rate if baseline is not None else None,
        best_rate=best.rate if best is not None else None,
        speedup=found.speedup.value if found.speedup is not None else None,
        speedup_interval=(found.speedup.low, found.speedup.high) if found.speedup is not None else None,
        trials=len(found.results),
        seconds=seconds,
        best=delivered.options,
        config=str(delivered.config) if delivered.config is not None else None,
        profile=str(delivered.profile) if delivered.profile is not None else None,
        confirmed=found.confirmed_rounds > 0,
        grade=setting.space.grade(found.winner) if found.winner != setting.space.baseline else None,
    )
