"""Short trials that checks ask for: some optimizer steps of a setting, each trial with a number of its own, while there
is time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.plan.space import Candidate
from autotune.search.measure import run_steps
from autotune.search.samples import Sample
from autotune.search.setting import NO_OPTIONS, Setting
from autotune.trial.result import TrialResult

SLOWER_START = 1.5  # than the trials before it: another setting has to be read and compiled anew


class Checking:
    """Runs the trials of one winner's checks. `like` is a result of the winner, from which their time is foretold;
    `known` the losses that an earlier winner's checks found, by candidate and options, and those of this one's."""

    def __init__(
        self,
        setting: Setting,
        sample: Sample,
        take_index: Callable[[], int],
        *,
        like: TrialResult,
        known: dict[tuple[Candidate, str], float],
    ) -> None:
        self.setting = setting
        self.sample = sample
        self.take_index = take_index
        self._known = known
        self._start_seconds = SLOWER_START * (like.startup_seconds or 1.0)
        steps = sum(one.steps for one in like.passes)
        self._step_seconds = sum(one.seconds for one in like.passes) / steps if steps else 1.0

    def has_time_for(self, steps: int) -> bool:
        """Whether the budget leaves enough for a trial of so many optimizer steps."""
        return self.setting.seconds_left() > self._start_seconds + steps * self._step_seconds

    def run(
        self, candidate: Candidate, steps: int, *, reason: str, options: Mapping[str, Any] = NO_OPTIONS
    ) -> TrialResult | None:
        """A trial of so many steps on the sample of the search; None where no time is left for it."""
        if not self.has_time_for(steps):
            return None
        return run_steps(
            self.setting,
            self.take_index(),
            candidate,
            self.sample,
            steps,
            purpose="gate",
            reason=reason,
            options=options,
        )

    def first_loss(self, candidate: Candidate, *, reason: str, options: Mapping[str, Any] = NO_OPTIONS) -> float | None:
        """The loss of the first optimizer step; None without time for it, or where it did not run."""
        key = candidate, repr(sorted(options.items()))
        if key not in self._known:
            result = self.run(candidate, 1, reason=reason, options=options)
            loss = result.losses[0] if result is not None and result.outcome == "ok" and result.losses else None
            if loss is None:
                return None
            self._known[key] = loss
        return self._known[key]
