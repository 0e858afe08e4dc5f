"""The real search played on a recorded table, without processes and in virtual time.

The search is `autotune.search` as it is: it asks its setting for trials, for the time and for what others used, and
this setting answers from the table. Each trial takes the times of one repetition, drawn by the seed, and each turn of
the confirmation those of another draw, so that what differed between repetitions differs here. The time that the
search itself needs to think is real, some seconds a run, and is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from autotune.children import Children
from autotune.events import AnyEvent, TrialFinished
from autotune.plan.space import Candidate
from autotune.planning import Plan
from autotune.search.clock import Clock
from autotune.search.found import Found
from autotune.search.setting import Setting
from autotune.search.tuner import Tuner
from autotune.trial.load import LoadMeter
from autotune.trial.result import Purpose
from autotune.trial.runner import Trial, TrialPlan
from benchmarks.replay_trial import ReplayTrial
from benchmarks.sweep_table import Measured, Swept, Table

# A process that keeps one core busy takes it from a trial that uses every core: two threads and it share two cores,
# and the threads wait for each other in every layer. An estimate; what matters is that the figures become wrong.
SLOWED = 1.6


class VirtualClock(Clock):
    """Time passes when somebody waits."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        return self._seconds

    def sleep(self, seconds: float) -> None:
        self._seconds += seconds


class Busy(msgspec.Struct, frozen=True):
    """Another process that keeps `cores` cores busy between two moments of virtual time, in seconds."""

    start: float
    end: float
    cores: float = 1.0

    def at(self, moment: float) -> bool:
        return self.start <= moment < self.end

    def share(self, start: float, end: float) -> float:
        """Of the time between two moments, how much lies within its own."""
        overlap = min(end, self.end) - max(start, self.start)
        return max(0.0, overlap) / (end - start) if end > start else 0.0


NOBODY = Busy(0.0, 0.0)


class Played(msgspec.Struct, frozen=True):
    """One search that was played: what it found, what it took, and who was the best so far from when on."""

    found: Found
    seconds: float
    incumbents: tuple[tuple[float, Candidate], ...]


class ReplayChildren(Children):
    """Answers what the search asks of children besides trials."""

    def __init__(self, table: Table, clock: Clock) -> None:
        super().__init__({})
        self._table = table
        self._clock = clock

    def call(self, target: str, request: dict[str, Any], **_: Any) -> Any:
        match target:
            case "autotune.probe.row_sample:write":
                self._clock.sleep(self._table.sample_seconds)
                Path(request["path"]).touch()
                return None
            case "autotune.trial.document_check:check":
                self._clock.sleep(self._table.check_seconds)
                return {"leakage": 0.0, "parity": 0.0, "dtype": "float32"}
        raise LookupError(f"a table has no answer for `{target}`")


class ReplaySetting(Setting):
    """A setting whose trials are in a table."""

    def __init__(
        self,
        table: Table,
        plan: Plan,
        folder: Path,
        *,
        budget_seconds: float,
        seed: int,
        emit: Callable[[AnyEvent], None] = lambda _event: None,
        busy: Busy = NOBODY,
    ) -> None:
        clock = VirtualClock()
        prepared = plan.prepared
        super().__init__(
            job=prepared.job,
            machine=prepared.machine,
            model=prepared.model,
            data=plan.data,
            space=plan.space,
            children=ReplayChildren(table, clock),
            folder=folder,
            emit=emit,
            budget_seconds=budget_seconds,
            memory_limit_bytes=prepared.memory_limit_bytes,
            seed=seed,
            clock=clock,
        )
        self.table = table
        self.busy = busy
        self.candidates: dict[int, Candidate] = {}  # of each trial number
        self.shares: dict[int, float] = {}  # of the recorded sample that each trial passes over
        self._chance = random.Random(seed)
        self._swept = {one.candidate: one for one in table.swept}

    def trial(self, index: int, candidate: Candidate, sample: Path, *, purpose: Purpose, **options: Any) -> Trial:
        self.candidates[index] = candidate
        rows = int(sample.stem.rpartition("-")[2])
        self.shares[index] = min(1.0, rows / len(self.table.sample_rows))
        return super().trial(index, candidate, sample, purpose=purpose, **options)

    def load_meter(self, trial: Trial) -> LoadMeter:
        assert isinstance(trial, ReplayTrial)
        return ReplayMeter(self, trial)

    def _trial(self, plan: TrialPlan, folder: Path) -> Trial:
        return ReplayTrial(plan, folder, self)

    def swept(self, candidate: Candidate) -> Swept:
        """What the table has of a candidate; nothing but an error where it was not swept."""
        nothing = Measured(outcome="error", where="the table", detail="this candidate was not swept")
        return self._swept.get(candidate) or Swept(candidate, (nothing,))

    def draw(self, candidate: Candidate) -> Measured:
        """One repetition, by chance."""
        return self._chance.choice(self.swept(candidate).repetitions)

    def draw_other(self, candidate: Candidate, than: Measured) -> Measured:
        """One that ran, for a trial that runs already."""
        ran = [one for one in self.swept(candidate).repetitions if one.rated]
        return self._chance.choice(ran or [than])

    def slowed(self, candidate: Candidate, moment: float) -> float:
        """How much longer a step that begins at this moment takes for the other process."""
        needs = (candidate.threads or 1) + candidate.workers
        contended = needs + self.busy.cores > self.machine.cpu.cores
        return SLOWED if contended and self.busy.at(moment) else 1.0


class ReplayMeter(LoadMeter):
    """Tells what others used, as recorded, and the other process that is played."""

    def __init__(self, setting: ReplaySetting, trial: ReplayTrial) -> None:
        self._setting = setting
        self._trial = trial
        self._made = setting.clock.now()

    def sample(self) -> None:
        """There is nothing to look at."""

    def others(self) -> float:
        busy = self._setting.busy
        return self._trial.others_cores + busy.cores * busy.share(self._made, self._setting.clock.now())


def play(table: Table, plan: Plan, folder: Path, *, seed: int, budget_seconds: float, busy: Busy = NOBODY) -> Played:
    """Play one whole search, in an empty folder. Raises NoTrialFinishedError as the search does."""
    told = Incumbents()
    setting = ReplaySetting(table, plan, folder, budget_seconds=budget_seconds, seed=seed, emit=told.hear, busy=busy)
    told.setting = setting
    found = Tuner(setting, []).run()
    return Played(found, setting.clock.now(), (*told.found, (setting.clock.now(), found.winner)))


class Incumbents:
    """Who was the best so far, by what was measured, from when on."""

    def __init__(self) -> None:
        self.setting: ReplaySetting | None = None
        self.found: list[tuple[float, Candidate]] = []
        self._rate = 0.0

    def hear(self, event: AnyEvent) -> None:
        if not isinstance(event, TrialFinished) or event.purpose != "speed" or self.setting is None:
            return
        if event.rate is not None and event.rate > self._rate:
            self._rate = event.rate
            self.found.append((self.setting.clock.now(), self.setting.candidates[event.trial]))
