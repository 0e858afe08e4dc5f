"""A trial in its own process group: start, watch, deadline, kill, classify."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autotune.child import Ending, write_whole
from autotune.children import Child, Children, last_error
from autotune.events import AnyEvent, EventReader, Finished, Hello, Outcome, PassEnd, Phase, Step
from autotune.trial.failures import read_log
from autotune.trial.result import Purpose


class Deadlines(msgspec.Struct, frozen=True):
    """The longest a phase may take without a sign of life, in seconds.

    Generous: a slow disk or a first compilation is not a hang. A step may take `step_factor` times the slowest
    before it.
    """

    start: float = 120.0
    load_model: float = 1200.0
    prepare_data: float = 1200.0
    first_step: float = 900.0
    step: float = 120.0
    step_factor: float = 20.0


class TrialPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All a trial needs. `config` is the text of the trial's YAML; `passes` 0 stops after the warm-up steps."""

    index: int
    purpose: Purpose
    label: str
    method: str
    config: str
    working_folder: str
    datasets_cache: str
    threads: int | None
    environment: dict[str, str | None] = {}
    warm_up_steps: int = 2
    passes: int = 1
    turns: bool = False
    memory_limit_bytes: int | None = None


class Trial:
    """One candidate running. `poll` moves it on; nothing here waits."""

    def __init__(
        self, plan: TrialPlan, folder: Path, children: Children, *, deadlines: Deadlines | None = None, target: str
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.steps: list[Step] = []
        self.ended_passes: set[int] = set()
        self.hello: Hello | None = None
        self.phase = "start"
        self.first_step_at: float | None = None
        self.finished: Finished | None = None
        self.started = time.monotonic()
        self.ended: float | None = None
        self._children = children
        self._deadlines = deadlines or Deadlines()
        self._target = target
        self._child: Child | None = None
        self._reader = EventReader(folder / "events.jsonl")
        self._sign_of_life = self.started
        self._waiting = False
        self._silent_seconds: float | None = None  # when it was ended for that
        self._stepped = False  # this child, not one it took over from
        self._stopped = False
        self._passes_before = 0

    def continue_from(self, earlier: Trial) -> None:
        """Take over what an earlier child of the same candidate measured; passes are counted on from there."""
        self.steps = earlier.steps
        self.ended_passes = earlier.ended_passes
        self.first_step_at = earlier.first_step_at
        self.hello = earlier.hello
        self._passes_before = max(self.ended_passes, default=0)
        self._reader = earlier._reader
        for _ in self._reader.read():  # what the earlier child said while it was ended is not this one's
            pass

    def start(self) -> None:
        """Write the trial's files and start its child."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stale = ["reply.json", "ending.json", "stop", "turns"]
        if not self._passes_before:
            stale += ["events.jsonl", "output.log", "result.json"]  # of an attempt that was cut short
        for name in stale:
            (self.folder / name).unlink(missing_ok=True)
        config = self.folder / "trl.yaml"
        write_whole(config, self.plan.config.encode())
        command = ["trl", self.plan.method, "--config", str(config)]
        write_whole(self.folder / "command.txt", (shlex.join(command) + "\n").encode())
        self.started = self._sign_of_life = time.monotonic()
        self._child = self._children.spawn(
            self._target,
            {
                "method": self.plan.method,
                "config": str(config),
                "threads": self.plan.threads,
                "datasets_cache": self.plan.datasets_cache,
                "started": self.started,
                "warm_up_steps": self.plan.warm_up_steps,
                "passes": self.plan.passes,
                "turns": self.plan.turns,
            },
            self.folder,
            environment=self.plan.environment,
            working_folder=Path(self.plan.working_folder),
            memory_limit_bytes=self.plan.memory_limit_bytes,
        )

    @property
    def pid(self) -> int:
        """Of the guard, below which everything of the trial runs."""
        assert self._child is not None
        return self._child.pid

    @property
    def running(self) -> bool:
        return self.ended is None

    def poll(self) -> list[AnyEvent]:
        """What the worker has said since the last call; ends the trial when its child has ended or is overdue."""
        assert self._child is not None
        alive = self._child.alive()  # before reading: what a child says last is still read
        new = list(self._reader.read())
        for event in new:
            self._sign_of_life = time.monotonic()
            match event:
                case Step():
                    self.steps.append(self._counted_on(event))
                    self._waiting = False
                    self._stepped = True
                    if self.first_step_at is None:
                        self.first_step_at = time.monotonic() - event.seconds
                case PassEnd():
                    self.ended_passes.add(event.pass_index + self._passes_before)
                case Hello():
                    self.hello = event
                case Phase():
                    self.phase = event.phase
                case Finished():
                    self.finished = event
                case _:
                    pass
        if not alive:
            self._end()
        elif self._overdue():
            self._silent_seconds = time.monotonic() - self._sign_of_life
            self._child.kill()
            new += self._reader.read()
            self._end()
        return new

    def grant_turns(self, passes: int) -> None:
        """Let a trial that takes turns go on to the end of pass number `passes`."""
        self._waiting = False
        self._sign_of_life = time.monotonic()
        write_whole(self.folder / "turns", str(passes).encode())

    def rest(self) -> None:
        """This trial waits for its turn: silence is no sign of a hang."""
        self._waiting = True

    def ask_to_stop(self) -> None:
        """End at the next step, or at once while waiting."""
        self._stopped = True
        write_whole(self.folder / "stop", b"")

    def kill(self) -> None:
        """End it now, with all it started."""
        if self._child is not None and self.ended is None:
            self._child.kill()
            self._stopped = True
            self._end()

    def result_outcome(self) -> tuple[Outcome, str | None, str | None]:
        """Outcome from the closed set, where, and what was said."""
        assert self._child is not None
        if self._silent_seconds is not None:
            return "hung", self.phase, f"no sign of life for {self._silent_seconds:.0f} s in {self.phase}"
        if self.finished is not None:
            failed = self.finished.outcome not in ("ok", "stopped")
            where = (self.finished.where or self._place()) if failed else None
            return self.finished.outcome, where, self.finished.detail
        if self._stopped:
            return "stopped", self.phase, None
        return classify_ending(self._child.ending(), self._place(), self.folder / "output.log", self.plan)

    def peak_bytes(self) -> int | None:
        """The worker's own figure, or what the guard saw when the worker could not tell. Bytes."""
        assert self._child is not None
        if self.finished is not None and self.finished.peak_bytes is not None:
            return self.finished.peak_bytes
        seen = [step.peak_bytes for step in self.steps if step.peak_bytes is not None]
        return max(seen, default=self._child.ending().peak_resident_bytes) or None

    def _counted_on(self, step: Step) -> Step:
        if not self._passes_before or step.pass_index == 0:
            return step
        return msgspec.structs.replace(step, pass_index=step.pass_index + self._passes_before)

    def _place(self) -> str:
        return "a step" if self.phase in ("first_step", "measure") else self.phase

    def _end(self) -> None:
        self.ended = time.monotonic()

    def _overdue(self) -> bool:
        if self._waiting:
            return False
        silent = time.monotonic() - self._sign_of_life
        limits = self._deadlines
        if self.phase == "measure" or self._stepped:
            slowest = max((step.seconds for step in self.steps), default=0.0)
            return silent > max(limits.step, limits.step_factor * slowest)
        allowed: float = getattr(limits, self.phase)
        return silent > allowed


def classify_ending(ending: Ending, place: str, log: Path, plan: TrialPlan) -> tuple[Outcome, str | None, str | None]:
    """The outcome of a worker that ended without a word, from how it ended and what the kernel counted."""
    if ending.over_memory_limit:
        limit = plan.memory_limit_bytes or 0
        return (
            "oom",
            place,
            f"held {ending.peak_resident_bytes / 1e9:.2f} GB, more than the {limit / 1e9:.2f} GB a trial may take",
        )
    if ending.signal == 9 and ending.machine_oom_kills > 0:
        return "oom", place, f"the kernel killed it for memory at {ending.peak_resident_bytes / 1e9:.2f} GB"
    said = read_log(log.read_text(errors="replace")) if log.exists() else None
    if ending.signal is not None:
        if said is not None and said[0] != "error" and ending.signal != signal.SIGKILL:
            return said[0], place, f"{said[1]} ({ending.by_signal})"
        return "killed", place, ending.by_signal
    outcome, words = said or ("error", last_error(log))
    return outcome, place, f"exit code {ending.exit_code}: {words}"


def environment_difference(wanted: Mapping[str, str], present: Mapping[str, str]) -> dict[str, str | None]:
    """What a child must set, or unset (None), to get from one environment to the other."""
    changed: dict[str, str | None] = {name: value for name, value in wanted.items() if present.get(name) != value}
    return changed | {name: None for name in present if name not in wanted}


def to_json(value: Any) -> bytes:
    """Indented JSON with a newline, for files that people open."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
