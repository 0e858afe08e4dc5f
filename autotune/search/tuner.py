"""Baseline, ask, run, tell, confirm: finding the best allowed candidate within the budget."""

from __future__ import annotations

import time

import msgspec

from autotune.errors import NoTrialFinishedError
from autotune.events import BestChanged, Note, RunOutcome, Topic
from autotune.plan import cost
from autotune.plan.space import Candidate
from autotune.search import samples
from autotune.search.confirm import Confirmed, confirm
from autotune.search.finals import check, finalists, first_among_equals
from autotune.search.found import Found, describe_failure, estimate_of, unconfirmed
from autotune.search.gates import Gate
from autotune.search.measure import disturbed, keep, measure
from autotune.search.memory_use import MemoryUse
from autotune.search.proposals import Proposals
from autotune.search.samples import Sample
from autotune.search.setting import Setting
from autotune.search.statistics import Estimate
from autotune.search.stopping import reason_to_stop, seconds_to_check
from autotune.trial.result import TrialResult

FEWEST_PASS_STEPS = 4
PASS_SHARE = 0.05  # of the budget, for one pass of the baseline
MOST_TRIES = 1  # repeats of one candidate on a busy machine
MOST_REPEATS = 6  # in one search


class Tuner:
    """One search. All state is in the results, which are in the run folder."""

    def __init__(self, setting: Setting, earlier: list[TrialResult]) -> None:
        self.setting = setting
        base = setting.space.baseline
        # a baseline taken beside others is no measure for the rest
        measured = {
            one.candidate: one for one in earlier if one.purpose == "speed" and not (one.busy and one.candidate == base)
        }
        self.results = sorted(measured.values(), key=lambda one: (one.candidate != base, one.index))
        self._next_index = self._session_index = max((result.index for result in earlier), default=-1) + 1
        self._sample: Sample | None = None
        self._confirmed: Confirmed | None = None
        self._again = MOST_REPEATS
        self._gates_failed = 0
        self._gates: tuple[Gate, ...] = ()
        self._memory: list[TrialResult] = []
        self._search_seconds = 0.0
        self._confirm_seconds = 0.0
        self._memory_use = MemoryUse(setting)
        self._proposals = Proposals(
            setting.space,
            lambda candidate: cost.seconds_per_token(candidate, setting.data, setting.model, setting.machine),
            room=self._memory_use.room,
            seed=setting.seed,
        )
        for result in self.results:
            self._proposals.tell(result)

    # --- what is known so far ------------------------------------------------------------------------------------

    @property
    def baseline(self) -> TrialResult | None:
        """The baseline's result, None while it has none or when it did not run."""
        return next((one for one in self.results if one.candidate == self.setting.space.baseline and one.rate), None)

    @property
    def best(self) -> TrialResult | None:
        """The fastest measured so far, of those that had the machine if any had."""
        rated = [one for one in self.results if one.rate]
        return max(rated, key=lambda one: (not one.busy, one.rate or 0.0), default=None)

    def found(self, outcome: RunOutcome | None = None) -> Found:
        """The state of the search as a result; valid at any moment."""
        baseline, best = self.baseline, self.best
        speedup: Estimate | None = None
        winner = best
        if self._confirmed is not None and self._confirmed.ratios:
            candidate, speedup = first_among_equals(self.setting, self._confirmed.ratios)
            winner = next(one for one in self.results if one.candidate == candidate)
        elif baseline is not None and best is not None and baseline.rate and best.rate:
            speedup = unconfirmed(baseline, best)
        kept = winner is None or winner is baseline or (speedup is not None and speedup.low <= 1.0)
        if outcome is None:
            outcome = "failed" if winner is None else "kept" if kept else "improved"
        unsure = kept and winner is not None and winner is not baseline and speedup is not None and speedup.value > 1.0
        contender, contender_ratio = (winner, speedup) if unsure else (None, None)
        if kept:
            winner, speedup = baseline, Estimate(1.0, 1.0, 1.0)
        if self._confirmed is not None:  # rates taken in turns: their ratio is the speed-up that is told
            baseline = self._as_confirmed(baseline)
            winner = self._as_confirmed(winner)
        return Found(
            outcome=outcome,
            winner=winner.candidate if winner is not None else self.setting.space.baseline,
            baseline=baseline,
            best=winner,
            speedup=speedup if baseline is not None else None,
            confirmed_rounds=self._confirmed.rounds if self._confirmed is not None else 0,
            results=tuple(self.results),
            ruled_out=dict(self._proposals.ruled_out),
            contender=contender,
            contender_ratio=contender_ratio,
            busy=self._confirmed.busy if self._confirmed is not None else False,
            gates=self._gates,
            memory=tuple(self._memory),
            session_index=self._session_index,
            search_seconds=self._search_seconds,
            confirm_seconds=self._confirm_seconds,
        )

    def _as_confirmed(self, result: TrialResult | None) -> TrialResult | None:
        again = self._confirmed.results.get(result.candidate) if self._confirmed and result else None
        if result is None or again is None or again.rate is None:
            return result
        return msgspec.structs.replace(again, index=result.index)  # the number that people saw first

    # --- the search ----------------------------------------------------------------------------------------------

    def run(self) -> Found:
        """Search, confirm, check. Raises NoTrialFinishedError when nothing ran."""
        setting = self.setting
        began = time.monotonic()
        try:
            self._run_baseline()
            while True:
                stop = self._reason_to_stop()
                proposal = None if stop else self._proposals.next()
                if proposal is None:
                    self._note(stop or "every allowed candidate was tried")
                    break
                self._try(*proposal)
        finally:
            self._search_seconds = time.monotonic() - began
        began = time.monotonic()
        try:
            self._confirm()
        finally:
            self._confirm_seconds = time.monotonic() - began
        if self.best is None:
            trials = len(self.results)
            none = f"none of {trials} trials finished; most often" if trials > 1 else "the only trial did not finish"
            raise NoTrialFinishedError(
                f"{none}: {self._commonest_failure()}",
                hint=f"the logs are in {setting.folder}/trial-*/output.log",
            )
        return self.found()

    def _reason_to_stop(self) -> str | None:
        return reason_to_stop(
            self.setting, self.results, baseline=self.baseline, best=self.best, left=self._proposals.candidates_left
        )

    def _run_baseline(self) -> None:
        setting = self.setting
        base = setting.space.baseline
        steps = samples.first_pass_steps(setting)
        longest = max(4.0, PASS_SHARE * setting.budget_seconds)
        while True:
            self._sample = samples.draw(self.setting, steps)
            recalled = next((one for one in self.results if one.candidate == base), None)
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
            self._note(
                f"a step of yours takes {foretold / self._sample.steps:.1f} s, so trials pass over the documents of "
                f"{steps} steps, not of {self._sample.steps}",
                topic="trial",
            )
            self._next_index -= 1  # it told how long a step is and nothing else
        for one in self.results:
            self._memory_use.tell(one, self._sample)
        if recalled is None:
            self._told(result)
        if result.rate is None:
            self._note(f"yours did not run: {describe_failure(result)}; looking for settings that do", topic="trial")

    def _try(self, candidate: Candidate, reason: str) -> None:
        self._told(self._measure(candidate, reason))

    def _measure(self, candidate: Candidate, reason: str, *, longest_pass: float | None = None) -> TrialResult:
        """Measure, and once more where other processes had the cores that the candidate needs."""
        setting = self.setting
        assert self._sample is not None
        index = self._take_index()
        best, baseline = self.best, self.baseline
        tries: list[TrialResult] = []
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
                    kept = msgspec.structs.replace(tries[-1], busy=True)
                    keep(setting, kept)
                    self._told(kept)
                raise
            tries.append(result)
            if not self._disturbed(result) or self._again == 0 or len(tries) > MOST_TRIES:
                calmest = min(tries, key=lambda one: one.others_cores)
                if calmest is not result:
                    keep(setting, calmest)
                return calmest
            self._again -= 1
            self._note(
                f"other processes kept {result.others_cores:.1f} of {setting.machine.cpu.cores} cores busy during "
                f"#{index}: measuring it again",
                topic="trial",
            )
            if self._again == 0:
                self._note("this machine is busy: from here on figures are taken as they come", topic="trial")
            reason = "again: the machine was busy"

    def _disturbed(self, result: TrialResult) -> bool:
        ran = result.outcome in ("ok", "pruned", "stopped")
        return ran and disturbed(self.setting, result.candidate, result.others_cores)

    def _told(self, result: TrialResult) -> None:
        before = self.best
        self.results.append(result)
        if self._sample is not None:
            self._memory_use.tell(result, self._sample)
        self._proposals.tell(result)
        if (
            result.rate
            and not result.busy
            and (before is None or result.rate > (before.rate or 0.0))
            and len(self.results) > 1
        ):
            baseline = self.baseline
            ratio = result.rate / baseline.rate if baseline is not None and baseline.rate else None
            self.setting.emit(BestChanged(trial=result.index, label=result.label, rate=result.rate, ratio=ratio))

    def _take_index(self) -> int:
        index = self._next_index
        self._next_index += 1
        return index

    # --- the end -------------------------------------------------------------------------------------------------

    def _confirm(self) -> None:
        """Measure the finalists against the baseline in turns; drop those that fail a check, best first."""
        setting = self.setting
        assert self._sample is not None
        base = setting.space.baseline
        baseline = self.baseline
        while True:
            chosen = finalists(setting, self.results, baseline_runs=baseline is not None)
            if not chosen:
                return
            if self._gates_failed and baseline is not None and setting.seconds_left() <= 0:
                for one in chosen:
                    self._drop(one.candidate, "the budget is used up before it could be checked")
                return
            seconds = setting.seconds_left() - seconds_to_check(baseline or self.best)
            reference = base if baseline is not None else chosen[0].candidate
            others = [one.candidate for one in chosen if one.candidate != reference]
            resident = sum(one.peak_bytes or 0 for one in (*chosen, *((baseline,) if baseline else ())))
            first_index = self._next_index
            self._next_index += 1 + len(others)
            confirmed = confirm(
                setting,
                first_index,
                reference,
                others,
                self._sample,
                seconds=seconds,
                measured={one.candidate: one for one in self.results if one.passes},
                resident_bytes=resident,
            )
            if not confirmed.rounds and not confirmed.results:
                if not self._gates_failed:
                    self._note("what is left of the budget is too short to confirm: the result is not confirmed")
                elif baseline is not None:
                    for one in chosen:
                        self._drop(one.candidate, "the budget is used up before it could be checked")
                return
            self._tell_of_others(confirmed)
            failed = {candidate for candidate, result in confirmed.results.items() if result.rate is None}
            if failed - {reference}:
                for candidate in failed - {reference}:
                    self._drop(candidate, f"did not run again: {describe_failure(confirmed.results[candidate])}")
                continue
            self._confirmed = confirmed if baseline is not None else None
            winner = self.found().winner
            gates, worst = check(setting, winner, confirmed, memory_index=self._next_index)
            if worst is not None:
                self._next_index += 1
                self._memory.append(worst)
            if all(gate.passed for gate in gates):
                self._gates = gates
                return
            self._gates_failed += 1
            self._drop(winner, "; ".join(f"{gate.name}: {gate.detail}" for gate in gates if not gate.passed))
            self._confirmed = None

    def _tell_of_others(self, confirmed: Confirmed) -> None:
        if confirmed.busy:
            self._note("other processes had the cores in every round of the confirmation", topic="best")
        elif confirmed.left_out:
            rounds = confirmed.rounds + confirmed.left_out
            self._note(
                f"{confirmed.left_out} of {rounds} rounds are left out: other processes had the cores", topic="best"
            )

    def _drop(self, candidate: Candidate, why: str) -> None:
        """Take a candidate's score away, so that it can be neither the winner nor the best so far."""
        self._note(f"{self.setting.label(candidate)} is out: {why}", topic="same")
        self.results = [
            msgspec.structs.replace(one, rate=None, rate_interval=None, outcome="error", detail=why)
            if one.candidate == candidate
            else one
            for one in self.results
        ]

    def _commonest_failure(self) -> str:
        failures = [describe_failure(result) for result in self.results]
        return max(set(failures), key=failures.count) if failures else "no trial was started"

    def _note(self, text: str, *, topic: Topic = "plan") -> None:
        self.setting.emit(Note(text=text, topic=topic))
