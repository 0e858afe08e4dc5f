"""A whole run with workers that do what a table says, in a process of its own, which kills itself at an event.

    python -m tests.killed_search FOLDER {start|resume} [EVENT]

An event is named by its kind, and for trials by number or purpose: `trial_started:0`, `trial_finished:confirm`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from autotune import engine, planning, session
from autotune.events import AnyEvent, RunStarted, TrialFinished, TrialStarted
from autotune.search.setting import Setting
from autotune.trial.load import LoadMeter
from tests.fake_workers import write_table

RULES: list[dict[str, Any]] = [
    {"if": {"gradient_checkpointing": True}, "seconds": 1.4},
    {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.7},
    {"if": {"dataloader_num_workers": 1}, "fail": "error", "where": "a step", "detail": "no workers here"},
]
TRIALS = 5


class Alone(LoadMeter):
    """Nobody else is here: what others do to figures would make each search another."""

    def others(self) -> float:
        return 0.0


def names_of(event: AnyEvent) -> set[str]:
    """What an event is called by."""
    kind = str(event.__struct_config__.tag)
    if isinstance(event, TrialStarted | TrialFinished):
        return {f"{kind}:{event.trial}", f"{kind}:{event.purpose}"}
    return {kind}


def main() -> None:
    folder, how, *kill_at = Path(sys.argv[1]), *sys.argv[2:]
    started = time.monotonic()

    def emit(event: AnyEvent) -> None:
        if isinstance(event, RunStarted):
            write_table(folder, RULES)
        if kill_at and kill_at[0] in names_of(event):
            os.kill(os.getpid(), signal.SIGKILL)

    def of_table(*positional: object, **named: object) -> Setting:
        setting = planning.setting_of(*positional, **named)  # type: ignore[arg-type]
        setting.worker = "tests.fake_workers:trial_by_table"
        setting.trl = Path("trl").resolve()
        vars(setting)["load_meter"] = lambda trial: Alone(trial.pid)
        return setting

    vars(engine)["setting_of"] = of_table
    options = session.Options(
        method="sft",
        arguments=("--config", "sft.yaml"),
        folder=Path.cwd(),
        budget_seconds=300.0,
        trial_limit=TRIALS,
        resume=folder if how == "resume" else None,
    )
    if how == "resume":
        plan = planning.resume(options)
        with session.children_of(plan.prepared.job, plan.prepared.machine, cold=False) as children:
            engine.tune(plan, folder, children, started=started, emit=emit, resumed=True)
        return
    with session.children_for(options) as (children, given, machine):
        plan = planning.prepare(given, children, machine, emit=emit)
        engine.tune(plan, folder, children, started=started, emit=emit)


if __name__ == "__main__":
    main()
