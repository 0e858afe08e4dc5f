"""Baseline, ask, run, tell, confirm: finding the best allowed candidate within the budget."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from autotune.errors import NoTrialFinishedError
from autotune.events import BestChanged, RunOutcome
from autotune.plan.cost import CostModel
from autotune.plan.space import Candidate
from autotune.search import samples
from autotune.search.attempts import Attempts
from autotune.search.decision import decide
from autotune.search.drift import Drift
from autotune.search.failures import describe_failure
from autotune.search.found import Found, estimate_of
from autotune.search.measure import disturbed, keep, measure
from autotune.search.memory_use import MemoryUse
from autotune.search.prediction import describe_errors
from autotune.search.proposals import Proposals
from autotune.search.record import Record
from autotune.search.samples import Sample
from autotune.search.setting import Setting
from autotune.search.start import first_candidate, settled
from autotune.search.stopping import reason_to_stop, seconds_to_confirm
from autotune.trial.result import TrialResult

FEWEST_PASS_STEPS = 4
PASS_SHARE = 0.05  # of the budget, for one pass of the baseline
MOST_TRIES = 1  # repeats of one candidate on a busy machine
MOST_REPEATS = 6  # in one search


class Tuner:
    """One search. All state is in the results, which are in the run folder."""

    def __init__(
        self,
        setting: Setting,
        earlier: list[TrialResult],
        *,
        faster: Callable[[TrialResult | None], None] = lambda _result: None,
    ) -> None:
        """`faster` is called with what surely beats the baseline as soon as it is measured (see `Record`)."""
        self.setting = setting
        self.record = Record(setting, earlier, faster=faster)
        self._sample: Sample | None = None
        self._again = MOST_REPEATS
        self._memory_use = MemoryUse(setting)
        self._drift = Drift(setting, self.record)
        self._doubtful: list[Candidate] = []  # measured on a machine of another speed
        self._proposals = self._proposals_after(self.record.results)

    def _proposals_after(self, results: list[TrialResult]) -> Proposals:
        setting = self.setting
        proposals = Proposals(
            setting.space,
            CostModel(setting.data, setting.model, setting.machine).terms,
            room=self._memory_use.room,
            disturbed=lambda result: result.busy or self._disturbed(result),
            seed=setting.seed,
        )
        for result in results:
            proposals.tell(result)
        return proposals

    def found(self, outcome: RunOutcome | None = None) -> Found:
        """The state of the search as a result; valid at any moment."""
        self.record.ruled_out = dict(self._proposals.ruled_out)
        self.record.predicted = describe_errors(self._proposals.checked)
        return self.record.found(outcome)

    def run(self) -> Found:
        """Search, confirm, check. Raises NoTrialFinishedError when nothing ran."""
        setting, record = self.setting, self.record
        began = setting.clock.now()
        try:
            self._run_baseline()
            while True:
                stop = self._reason_to_stop()
                proposal = None if stop else self._next()
                if proposal is None:
                    record.ended = stop or "every allowed candidate was tried"
                    record.note(record.ended)
                    break
                self._try(*proposal)
                self._watch_the_machine()
        finally:
            record.search_seconds = setting.clock.now() - began
        began = setting.clock.now()
        assert self._sample is not None
        try:
            decide(record, self._sample)
        finally:
            record.confirm_seconds = setting.clock.now() - began
        if record.best is None:
            trials = len(record.results)
            none = f"none of {trials} trials finished; most often" if trials > 1 else "the only trial did not finish"
            raise NoTrialFinishedError(
                f"{none}: {record.commonest_failure()}",
                hint=f"the logs are in {setting.folder}/trial-*/output.log",
            )
        return self.found()

    def _next(self) -> tuple[Candidate, str] | None:
        if self._doubtful:
            return self._doubtful.pop(0), "again: the machine has changed"
        return first_candidate(self.setting, self.record.results) or self._proposals.next()

    def _reason_to_stop(self) -> str | None:
        record = self.record
        return reason_to_stop(
            self.setting,
            record.results,
            baseline=record.baseline,
            best=record.best,
            left=self._proposals.candidates_left,  # looked at only where nothing ran
            expected_gain=self._proposals.expected_gain,
        ) or settled(
            self.setting,
            record.results,
            baseline=record.baseline,
            best=record.best,
            expected_gain=self._proposals.expected_gain,
        )

    def _run_baseline(self) -> None:
        setting = self.setting
        base = setting.space.baseline
        steps = samples.first_pass_steps(setting)
        longest = max(4.0, PASS_SHARE * setting.budget_seconds)
        while True:
            self._sample = samples.draw(self.setting, steps)
            recalled = next((one for one in self.record.results if one.candidate == base), None)
            if recalled is not None:
                result = recalled
            else:
                result = self._measure(
                    base,
                    "your own settings",
                    longest_pass=longest if self._sample.steps > FEWEST_PASS_STEPS else None,
                )
            if result.outcome != "stopped":
                if result.pass_steps != self._sample.steps:  # recalled: an interrupted search had settled on fewer
                    self._sample = samples.draw(self.setting, result.pass_steps)
                break
            foretold = result.foretold_pass_seconds or longest
            steps = max(FEWEST_PASS_STEPS, min(self._sample.steps - 1, int(self._sample.steps * longest / foretold)))
            self.record.note(
                f"a step of yours takes {foretold / self._sample.steps:.1f} s, so trials pass over the documents of "
                f"{steps} steps, not of {self._sample.steps}",
                topic="trial",
            )
            self.record.next_index -= 1  # it told how long a step is and nothing else
            self.record.set_aside.append(result)
        for one in self.record.results:
            self._memory_use.tell(one, self._sample)
        if recalled is None:
            self._told(result)
        self._drift.measured(result)
        if result.rate is None:
            self.record.note(
                f"yours did not run: {describe_failure(result)}; looking for settings that do", topic="trial"
            )

    def _try(self, candidate: Candidate, reason: str) -> None:
        self._told(self._measure(candidate, reason))

    def _watch_the_machine(self) -> None:
        """Measure yours again where it is time to or a trial asks for it, and then what that puts in doubt."""
        reason = self._drift.reason_to_look(self._proposals.checked)
        if reason is None or self._reason_to_stop() is not None:
            return
        assert self._sample is not None
        doubtful = self._drift.look(self._sample, reason)
        if doubtful is None:
            return
        self._proposals = self._proposals_after(self.record.results)
        self._doubtful = doubtful

    def _measure(self, candidate: Candidate, reason: str, *, longest_pass: float | None = None) -> TrialResult:
        """Measure, and once more where other processes had the cores that the candidate needs."""
        setting = self.setting
        assert self._sample is not None
        index = self.record.take_index()
        best, baseline = self.record.best, self.record.baseline
        tries: list[TrialResult] = []
        attempts = Attempts(setting, index)
        while True:
            try:
                result = measure(
                    setting,
                    index,
                    candidate,
                    self._sample,
                    reason=reason,
                    best=estimate_of(best) if best is not None else None,
                    baseline_rate=baseline.rate if baseline is not None else None,
                    longest_pass=longest_pass,
                )
            except KeyboardInterrupt:
                if tries:  # what was measured beside others is better than nothing
                    attempts.take(len(tries))
                    kept = msgspec.structs.replace(tries[-1], busy=True)
                    keep(setting, kept)
                    self._told(kept)
                raise
            tries.append(result)
            if not self._disturbed(result) or not self._may_repeat(result, len(tries)):
                calmest = min(tries, key=lambda one: (one.disturbed_by is not None, one.others_cores))
                attempts.take(tries.index(calmest) + 1)
                self.record.set_aside += [one for one in tries if one is not calmest]
                return calmest
            attempts.again()
            self._again -= 1
            beside = f"other processes kept {result.others_cores:.1f} of {setting.machine.cpu.cores} cores busy"
            self.record.note(f"{result.disturbed_by or beside} during #{index}: measuring it again", topic="trial")
            if self._again == 0:
                self.record.note("this machine is busy: from here on figures are taken as they come", topic="trial")
            reason = "again: the machine was busy"

    def _may_repeat(self, result: TrialResult, tries: int) -> bool:
        """Whether there are repeats left, and the time for one beside the confirmation."""
        best, baseline = self.record.best, self.record.baseline
        needed = result.seconds + seconds_to_confirm(self.setting, baseline=baseline, best=best)
        return self._again > 0 and tries <= MOST_TRIES and self.setting.seconds_left() > needed

    def _disturbed(self, result: TrialResult) -> bool:
        ran = result.outcome in ("ok", "pruned", "stopped")
        on_gpu = result.disturbed_by is not None
        return ran and (on_gpu or disturbed(self.setting, result.candidate, result.others_cores))

    def _told(self, result: TrialResult) -> None:
        before = self.record.best
        self.record.add(result)
        if self._sample is not None:
            self._memory_use.tell(result, self._sample)
        self._proposals.tell(result)
        if (
            result.rate
            and not result.busy
            and (before is None or result.rate > (before.rate or 0.0))
            and len(self.record.results) > 1
        ):
            baseline = self.record.baseline
            ratio = result.rate / baseline.rate if baseline is not None and baseline.rate else None
            self.setting.emit(BestChanged(trial=result.index, label=result.label, rate=result.rate, ratio=ratio))
