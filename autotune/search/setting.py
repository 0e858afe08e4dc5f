"""What a search is given: the job, the machine, the data, the space, and the limits it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from autotune.children import Children
from autotune.events import AnyEvent
from autotune.folder import Earlier
from autotune.job import Job, write_job
from autotune.plan import recipe
from autotune.plan.data import Data
from autotune.plan.space import Candidate, Space
from autotune.probe.machine import Machine
from autotune.probe.model import ModelShape
from autotune.search.clock import Clock
from autotune.trial import gpu_state
from autotune.trial.load import LoadMeter
from autotune.trial.result import Purpose
from autotune.trial.runner import Deadlines, Trial, TrialPlan

WORKER = "autotune.trial.worker:run"
WARM_UP_STEPS = 2  # the first steps allocate
NO_OPTIONS: Mapping[str, Any] = {}
COMPILE_STEPS = 3  # torch.compile compiles twice, for the first lengths and for varying ones


class Setting:
    """Everything fixed during a search."""

    def __init__(
        self,
        *,
        job: Job,
        machine: Machine,
        model: ModelShape,
        data: Data,
        space: Space,
        children: Children,
        folder: Path,
        emit: Callable[[AnyEvent], None],
        budget_seconds: float,
        trial_limit: int | None = None,
        memory_limit_bytes: int | None = None,
        started: float | None = None,
        deadlines: Deadlines | None = None,
        worker: str = WORKER,
        trl: Path | None = None,
        earlier: Earlier | None = None,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.job = job
        self.machine = machine
        self.model = model
        self.data = data
        self.space = space
        self.children = children
        self.folder = folder
        self.emit = emit
        self.budget_seconds = budget_seconds
        self.trial_limit = trial_limit
        self.memory_limit_bytes = memory_limit_bytes
        self.earlier = earlier  # what a run before found: tried first
        self.clock = clock or Clock()
        self.started = self.clock.now() if started is None else started
        self.deadlines = deadlines or Deadlines()
        self.worker = worker
        self.trl = trl  # the command, for a run of the winner from end to end; None: none is made
        self.seed = seed

    @property
    def job_folder(self) -> Path:
        """Where the job's relative paths mean what they meant."""
        return Path(self.job.folder)

    def seconds_left(self) -> float:
        """Of the budget, which covers everything from the command's start to the delivered files."""
        return self.budget_seconds - (self.clock.now() - self.started)

    def trial_folder(self, index: int) -> Path:
        return self.folder / f"trial-{index:04d}"

    def trial(
        self,
        index: int,
        candidate: Candidate,
        sample: Path,
        *,
        purpose: Purpose,
        passes: int,
        warm_up_steps: int | None = None,
        turns: bool = False,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> Trial:
        """A trial of the candidate on the sample, not started yet. `options` of TRL win over the candidate's."""
        folder = self.trial_folder(index)
        environment: dict[str, str | None] = dict(self.job.launch_environment)
        if candidate.threads is not None:
            environment["OMP_NUM_THREADS"] = str(candidate.threads)
        plan = TrialPlan(
            index=index,
            purpose=purpose,
            label=self.label(candidate),
            method=self.job.method,
            config=self.config(candidate, sample, folder / "output", options),
            working_folder=str(self.job_folder),
            datasets_cache=str(self.folder / "cache"),
            threads=candidate.threads,
            environment=environment,
            warm_up_steps=self._warm_up_steps(candidate) if warm_up_steps is None else warm_up_steps,
            passes=passes,
            turns=turns,
            memory_limit_bytes=self.memory_limit_bytes,
        )
        return self._trial(plan, folder)

    def config(self, candidate: Candidate, sample: Path, output: Path, options: Mapping[str, Any] = NO_OPTIONS) -> str:
        """The YAML of the candidate on the sample: what would be delivered, with what a trial changes."""
        changes = {change.name: change.value for change in recipe.changes(self.job, self.space, candidate)}
        of_trial = recipe.trial_options(sample=str(sample), workers=candidate.workers, output_folder=str(output))
        return write_job(self.job, {**changes, **of_trial, **options}, {})

    def again(self, earlier: Trial, *, passes: int) -> Trial:
        """A fresh child of the same candidate, which goes on where the earlier one ended; not started yet."""
        trial = self._trial(msgspec.structs.replace(earlier.plan, passes=passes), earlier.folder)
        trial.continue_from(earlier)
        return trial

    def load_meter(self, trial: Trial) -> LoadMeter:
        """What tells how much of the machine others have while this trial runs, from now on."""
        return LoadMeter(trial.pid)

    def gpu_disturbance(self) -> str | None:
        """What is on the GPU beside this run, or holds it back, now; to be asked when a trial has measured."""
        return gpu_state.ask(self.machine.gpus[0].uuid) if self.machine.backend == "cuda" else None

    def _trial(self, plan: TrialPlan, folder: Path) -> Trial:
        return Trial(plan, folder, self.children, deadlines=self.deadlines, target=self.worker)

    def _warm_up_steps(self, candidate: Candidate) -> int:
        own = bool(self.job.resolved.get("torch_compile"))
        compiled = own if candidate.torch_compile is None else candidate.torch_compile
        return WARM_UP_STEPS + (COMPILE_STEPS if compiled else 0)

    def label(self, candidate: Candidate) -> str:
        """How a person calls the candidate: yours in full, others by how they differ from it."""
        base = self.space.baseline
        return f"yours ({candidate})" if candidate == base else candidate.describe(other_than=base)
