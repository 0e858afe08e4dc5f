"""A trial whose events come from a table, each when its virtual time has come."""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from autotune.events import PROTOCOL, AnyEvent, Finished, Hello, Outcome, PassEnd, Step
from autotune.trial.runner import Trial, TrialPlan
from benchmarks.sweep_table import StepShape, loss_of, step_of

if TYPE_CHECKING:
    from benchmarks.replay import ReplaySetting


class ReplayTrial(Trial):
    """A trial that says, when its time has come, what the recorded one said."""

    def __init__(self, plan: TrialPlan, folder: Path, setting: ReplaySetting) -> None:
        super().__init__(plan, folder, setting.children, target=setting.worker)
        self._setting = setting
        self._candidate = setting.candidates[plan.index]
        self._clock = setting.clock
        self._measured = setting.draw(self._candidate)
        self._upcoming: deque[AnyEvent] = deque()
        self._due = 0.0  # when the next of them is said
        self._pass_index = 0  # that is under way, 0 the warm-up
        self._turns = 0  # the last pass that may begin

    @property
    def others_cores(self) -> float:
        return self._measured.others_cores

    def start(self) -> None:
        self.started = self._clock.now()
        measured = self._measured
        self._due = self.started + measured.startup_seconds
        if measured.outcome != "ok":
            self._due = self.started + measured.seconds
            self._say(self._failure(measured.outcome, measured.where, measured.detail))
            return
        asked = self._candidate.attention
        self._say(Hello(PROTOCOL, 0, {}, asked, measured.attention or asked))
        if self.plan.purpose == "memory":
            self._longest_rows()
            return
        self._warm_up()

    def poll(self) -> list[AnyEvent]:
        said: list[AnyEvent] = []
        while self.running:
            if not self._upcoming:
                self._next_pass()
            if not self._upcoming or self._due > self._clock.now():
                break
            event = self._upcoming.popleft()
            said.append(event)
            match event:
                case Step():
                    self.steps.append(self._counted_on(event))
                    self.phase = "measure"
                    if self.first_step_at is None:
                        self.first_step_at = self._due - event.seconds
                case PassEnd():
                    self.ended_passes.add(event.pass_index + self._passes_before)
                case Hello():
                    self.hello = event
                case Finished():
                    self.finished = event
                    self.ended = self._due
                case _:
                    pass
            self._wait_for_next()
        return said

    def grant_turns(self, passes: int) -> None:
        self._turns = passes
        if not self._upcoming:  # it has waited until now
            self._due = self._clock.now()
            self._measured = self._setting.draw_other(self._candidate, self._measured)

    def rest(self) -> None:
        """Waiting needs nothing."""

    def kill(self) -> None:
        if self.ended is None:
            self._stopped = True
            self.ended = self._clock.now()

    def result_outcome(self) -> tuple[Outcome, str | None, str | None]:
        if self.finished is not None:
            return self.finished.outcome, self.finished.where, self.finished.detail
        return "stopped", self.phase, None

    def peak_bytes(self) -> int | None:
        return self._measured.peak_bytes

    def _say(self, event: AnyEvent) -> None:
        self._upcoming.append(event)

    def _failure(self, outcome: Outcome, where: str | None, detail: str | None) -> Finished:
        return Finished(outcome=outcome, where=where, detail=detail, peak_bytes=self._measured.peak_bytes)

    def _wait_for_next(self) -> None:
        """A step is said when it is over, anything else at once. A step is as slow as the machine is at its start."""
        if self._upcoming and isinstance(step := self._upcoming[0], Step):
            seconds = step.seconds * self._setting.slowed(self._candidate, self._due)
            self._upcoming[0] = msgspec.structs.replace(step, seconds=seconds)
            self._due += seconds

    def _warm_up(self) -> None:
        """As many steps as are asked for: those of the recorded warm-up, then of the first pass, over and over."""
        recorded = [pair for each in (0, 1) for pair in zip(*self._recorded(each), strict=True)]
        steps = itertools.islice(itertools.cycle(recorded), self.plan.warm_up_steps)
        for number, (shape, seconds) in enumerate(steps):
            self._say(self._step(shape, 0, number, seconds))

    def _next_pass(self) -> None:
        """Lay out the next pass, if it may begin; after the last one, the end."""
        begun = self._pass_index
        if begun >= self.plan.passes:
            self._say(Finished(outcome="ok", peak_bytes=self._measured.peak_bytes))
            return
        if self.plan.turns and begun >= self._turns:
            return
        self._pass_index += 1
        if begun and begun % self._setting.table.passes == 0:
            self._measured = self._setting.draw_other(self._candidate, self._measured)
        # recorded passes come again in turn, as the same pass of every arm visits the same documents
        recorded = 1 + begun % self._setting.table.passes
        shapes, times = self._recorded(recorded)
        for number, (shape, seconds) in enumerate(zip(shapes, times, strict=True)):
            self._say(self._step(shape, self._pass_index, number, seconds))
        self._say(PassEnd(pass_index=self._pass_index))
        self._wait_for_next()

    def _recorded(self, pass_index: int) -> tuple[tuple[StepShape, ...], tuple[float, ...]]:
        """Shapes and seconds of a recorded pass; of a sample smaller than the sweep's the first of its steps."""
        shapes = self._setting.table.layouts[self._measured.layout][pass_index]
        steps = len(shapes)
        if pass_index > 0:
            steps = max(1, round(self._setting.shares[self.plan.index] * steps))
        return shapes[:steps], self._measured.step_seconds[pass_index][:steps]

    def _step(self, shape: StepShape, pass_index: int, number: int, seconds: float) -> Step:
        return step_of(
            shape,
            pass_index=pass_index,
            step=number,
            seconds=seconds,
            loss=loss_of(self._measured, pass_index, number),
        )

    def _longest_rows(self) -> None:
        """Three steps as long as the longest that was recorded, or the failure that the table tells."""
        outcome = self._setting.swept(self._candidate).on_longest
        if outcome != "ok":
            self._say(self._failure(outcome, "backward", "on the longest rows"))
            return
        slowest = max(itertools.chain.from_iterable(self._measured.step_seconds))
        shape = self._recorded(0)[0][0]
        for number in range(self.plan.warm_up_steps):
            self._say(self._step(shape, 0, number, slowest))
        self._say(Finished(outcome="ok", peak_bytes=self._measured.peak_bytes))
