"""Events as plain lines for a person; on a terminal with a bar for what is going on now."""

from __future__ import annotations

import os
import shlex
import time
from typing import TYPE_CHECKING, TextIO

from autotune.deliver import grades, wording
from autotune.deliver.redaction import narrated, without_secrets
from autotune.events import (
    AnyEvent,
    BestChanged,
    Note,
    Phase,
    RunFinished,
    RunStarted,
    Step,
    TrialFinished,
    TrialStarted,
)

if TYPE_CHECKING:
    from rich.progress import TaskID

TOPIC_WIDTH = 9
SETTING_COLUMN = 43  # where the settings of the table begin
TELL_SECONDS = 10.0  # between lines about what goes on, where there is no bar
FOR_READING = ("job", "machine", "kernels", "data", "plan")  # notes without commands to copy
PHASES = {
    "start": "starting",
    "load_model": "loading the model",
    "prepare_data": "preparing the sample",
    "first_step": "first steps",
    "measure": "measuring",
}
OUTCOMES = {
    "oom": "out of memory",
    "error": "failed",
    "killed": "killed",
    "hung": "hung",
    "pruned": "stopped early",
    "stopped": "stopped",
}


class Narrator:
    """Writes to `stream` (stderr). Nothing is said by colour alone; `NO_COLOR` and dumb terminals are rich's care."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console  # 60 ms, not needed for `--json`
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(file=stream, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._budget: float | None = None
        self._began = time.monotonic()
        self._topic = ""
        self._table = False
        self._method = ""
        self._first: tuple[float, int] | None = None  # when reading was first told of, and the rows read by then
        self._told = 0.0

    def start(self) -> None:
        """Start drawing the bar, where there is a terminal."""
        self._progress.start()
        self._task = self._progress.add_task("looking around", total=None, left="")

    def finished_before(self, event: RunFinished) -> None:
        """A run that is to be resumed, and is done."""
        self._progress.stop()
        self._method = "sft"
        self._line("plan", "this run is finished: a longer `--budget` or more `--trials` than it had go on with it")

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def progress(self, what: str, done: int, of: int) -> None:
        """Long work before the first trial."""
        now = time.monotonic()
        if self._first is None or done < self._first[1]:
            self._first, self._told = (now, done), now
        began, already = self._first
        rate = (done - already) / (now - began) if now > began else 0.0
        left = f"{done:,} of {of:,} rows"
        if rate and of > done:
            left += f", {rate:,.0f} rows/s, {wording.seconds((of - done) / rate)} left"
        self._show(what, done, of, left)
        if not self._console.is_terminal and now - self._told > TELL_SECONDS:
            self._told = now
            self._line("data", f"{what}: {left}")

    def __call__(self, event: AnyEvent) -> None:
        match event:
            case Note():
                told = narrated if event.topic in FOR_READING else without_secrets
                self._line(event.topic, told(event.text, os.environ))
            case RunStarted():
                self._budget = event.budget_seconds
                self._method = event.method
            case TrialStarted():
                self._show(f"#{event.trial} {event.label}", 0, None, self._left())
            case Phase():
                self._show(None, 0, None, f"{PHASES[event.phase]}, {self._left()}")
            case Step():
                self._show(None, event.step + 1, None, f"step {event.step + 1}, {self._left()}")
            case TrialFinished():
                self._trial(event)
            case BestChanged():
                against = f", {event.ratio:.2f}x yours" if event.ratio else ""
                self._print(f"{'':5}best so far: #{event.trial}{against}; {self._left()}")
            case RunFinished():
                self._end(event)
            case _:
                pass

    def _trial(self, event: TrialFinished) -> None:
        if not self._table:
            self._table = True
            self._print("")
            self._print(*self._row("#", "vs yours", "useful tokens/s", "memory", "setting"))
        kind = {"confirm": " (in turns)", "memory": " (longest rows)", "gate": " (check)"}.get(event.purpose, "")
        number, label, memory = str(event.trial), event.label + kind, wording.gigabytes(event.peak_bytes)
        if event.rate is not None:
            against = f"{event.ratio:.2f}x" if event.ratio else "1.00x" if event.trial == 0 else ""
            self._print(*self._row(number, against, _with_spread(event.rate, event.rate_interval), memory, label))
            return
        outcome = "" if event.outcome == "ok" else OUTCOMES.get(event.outcome, event.outcome)
        self._print(*self._row(number, "", outcome, memory, label))
        if event.detail and event.outcome != "pruned":
            where = f"in {event.where}: " if event.where else ""
            self._print(" " * SETTING_COLUMN, f"{where}{event.detail}")

    @staticmethod
    def _row(number: str, against: str, rate: str, memory: str, setting: str) -> tuple[str, str]:
        return f"{number:>4}  {against:>8}  {rate:>16}  {memory:>7}  ", setting

    def _end(self, event: RunFinished) -> None:
        self._progress.stop()
        self._print("")
        match event.outcome:
            case "failed":
                self._line("result", "no trial finished")
            case "kept":
                self._line("result", "yours is kept")
            case "interrupted":
                self._line("result", "interrupted; this is the best so far")
                self._line("go on", f"trl-autotune {self._method} --resume {shlex.quote(event.run)}")
            case _ if event.speedup is None:
                self._line("result", "yours did not run here; this does")
            case _:
                otherwise = f", {grades.RESULTS[event.grade]}" if event.grade in grades.RESULTS else ""
                self._line("result", f"{event.speedup:.2f}x as fast as yours{otherwise}")
        if event.config is not None:
            self._line("wrote", f"{event.config}      run it: trl {self._method} --config {event.config}")

    def _line(self, topic: str, text: str) -> None:
        shown = topic if topic != self._topic else ""
        self._topic = topic
        self._print(f"{shown:<{TOPIC_WIDTH}}", text)

    def _print(self, head: str, text: str = "") -> None:
        """One line; on a terminal too narrow for it the text goes on below itself, at a word's end."""
        if not self._console.is_terminal or len(head) + len(text) <= self._console.width:
            self._console.print(head + text)
            return
        from rich.table import Table

        columns = Table.grid(padding=0)
        columns.add_column(width=len(head), no_wrap=True)
        columns.add_column()
        columns.add_row(head, text)
        self._console.print(columns)

    def _left(self) -> str:
        if self._budget is None:
            return ""
        left = max(0.0, self._budget - (time.monotonic() - self._began))
        return f"at most {wording.seconds(left)} left"

    def _show(self, what: str | None, done: int, of: int | None, left: str) -> None:
        if self._task is None:
            return
        if what is not None:
            self._progress.update(self._task, description=what)
        self._progress.update(self._task, completed=done, total=of, left=left)


def _with_spread(rate: float, interval: tuple[float, float] | None) -> str:
    if interval is None:
        return wording.rate(rate)
    return f"{wording.rate(rate)} +- {wording.rate((interval[1] - interval[0]) / 2)}"
