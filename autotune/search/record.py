"""What a search knows so far: its results, the confirmation and the checks, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from autotune.events import Note, RunOutcome, Topic
from autotune.plan.space import Candidate
from autotune.search.confirm import Confirmed
from autotune.search.failures import describe_failure
from autotune.search.finals import first_among_equals
from autotune.search.found import Found, unconfirmed
from autotune.search.gates import Gate
from autotune.search.setting import Setting
from autotune.search.statistics import Estimate, with_spells
from autotune.trial.result import TrialResult


class Record:
    """The results of one search, those of a run that is gone on with among them; all of it is in the run folder.

    `faster` is told of the fastest that surely beats the baseline, by its own measurement and not confirmed yet,
    whenever that is another one; of None where it lost its score and there is no other.
    """

    def __init__(
        self,
        setting: Setting,
        earlier: list[TrialResult],
        *,
        faster: Callable[[TrialResult | None], None] = lambda _result: None,
    ) -> None:
        self.setting = setting
        self._faster = faster
        self._told: TrialResult | None = None
        base = setting.space.baseline
        # a baseline taken beside others is no measure for the rest
        measured = {
            one.candidate: one for one in earlier if one.purpose == "speed" and not (one.busy and one.candidate == base)
        }
        self.results = sorted(measured.values(), key=lambda one: (one.candidate != base, one.index))
        self.next_index = self._session_index = max((result.index for result in earlier), default=-1) + 1
        self.confirmed: Confirmed | None = None
        self.gates: tuple[Gate, ...] = ()
        self.memory: list[TrialResult] = []
        self.set_aside: list[TrialResult] = []  # trials whose rate does not count, though their time was spent
        self.ruled_out: dict[Candidate, str] = {}
        self.ended: str | None = None
        self.predicted: str | None = None
        self.search_seconds = 0.0
        self.confirm_seconds = 0.0

    @property
    def baseline(self) -> TrialResult | None:
        """The baseline's result, None while it has none or when it did not run."""
        return self.result_of(self.setting.space.baseline)

    @property
    def best(self) -> TrialResult | None:
        """The fastest measured so far, of those that had the machine if any had."""
        rated = [one for one in self.results if one.rate]
        return max(rated, key=lambda one: (not one.busy, one.rate or 0.0), default=None)

    def result_of(self, candidate: Candidate) -> TrialResult | None:
        """The candidate's result if it has a rate."""
        return next((one for one in self.results if one.candidate == candidate and one.rate), None)

    def add(self, result: TrialResult) -> None:
        """A trial for speed has ended; of a candidate that is measured again the last counts."""
        self.results = [*(one for one in self.results if one.candidate != result.candidate), result]
        self._tell_faster()

    def take_index(self) -> int:
        """The number of the next trial."""
        index = self.next_index
        self.next_index += 1
        return index

    def drop(self, candidate: Candidate, why: str) -> None:
        """Take a candidate's score away, so that it can be neither the winner nor the best so far."""
        self.note(f"{self.setting.label(candidate)} is out: {why}", topic="same")
        self.results = [
            msgspec.structs.replace(one, rate=None, rate_interval=None, outcome="error", detail=why)
            if one.candidate == candidate
            else one
            for one in self.results
        ]
        self._tell_faster()

    def _tell_faster(self) -> None:
        """Tell of the fastest whose interval lies above the baseline's, with losses that were all numbers."""
        baseline = self.baseline
        if baseline is None or baseline.busy:
            return
        sure = [
            one
            for one in self.results
            if one.rate and not one.busy and one.finite_steps == one.steps and unconfirmed(baseline, one).low > 1.0
        ]
        fastest = max(sure, key=lambda one: one.rate or 0.0, default=None)
        if fastest is not self._told:
            self._told = fastest
            self._faster(fastest)

    def note(self, text: str, *, topic: Topic = "plan") -> None:
        """Say a line."""
        self.setting.emit(Note(text=text, topic=topic))

    def commonest_failure(self) -> str:
        """Why most of the trials did not run, in words."""
        failures = [describe_failure(result) for result in self.results]
        return max(set(failures), key=failures.count) if failures else "no trial was started"

    def found(self, outcome: RunOutcome | None = None) -> Found:
        """The state of the search as a result; valid at any moment.

        Of a search that went to its end, nothing is `improved` that was not confirmed and checked, unless the job's own
        settings do not run: then whatever runs is better than they are.
        """
        baseline, best = self.baseline, self.best
        speedup: Estimate | None = None
        winner = best
        if self.confirmed is not None and self.confirmed.ratios:
            candidate, speedup = first_among_equals(self.setting, self.confirmed.ratios)
            winner = next(one for one in self.results if one.candidate == candidate)
            if baseline is not None and winner.rate and not (baseline.busy or winner.busy):
                speedup = with_spells(speedup, unconfirmed(baseline, winner), seconds=self.confirmed.seconds)
        elif baseline is not None and best is not None and baseline.rate and best.rate:
            speedup = unconfirmed(baseline, best)
        unchecked = baseline is not None and self.confirmed is None and outcome is None
        kept = unchecked or winner is None or winner is baseline or (speedup is not None and speedup.low <= 1.0)
        if outcome is None:
            outcome = "failed" if winner is None else "kept" if kept else "improved"
        contender, contender_ratio = None, None
        if kept and winner is not None and winner is not baseline and speedup is not None:
            before = unconfirmed(baseline, winner) if baseline is not None and winner.rate else speedup
            if max(speedup.value, before.low) > 1.0:  # faster in turns, or surely so before them
                contender, contender_ratio = winner, speedup
        if kept:
            winner, speedup = baseline, Estimate(1.0, 1.0, 1.0)
        if self.confirmed is not None:  # rates taken in turns: their ratio is the speed-up that is told
            baseline = self._as_confirmed(baseline)
            winner = self._as_confirmed(winner)
        return Found(
            outcome=outcome,
            winner=winner.candidate if winner is not None else self.setting.space.baseline,
            baseline=baseline,
            best=winner,
            speedup=speedup if baseline is not None else None,
            confirmed_rounds=self.confirmed.rounds if self.confirmed is not None else 0,
            results=tuple(self.results),
            ruled_out=dict(self.ruled_out),
            contender=contender,
            contender_ratio=contender_ratio,
            busy=self.confirmed.busy if self.confirmed is not None else False,
            set_aside=tuple(self.set_aside),
            gates=self.gates,
            in_turns=tuple(self.confirmed.results.values()) if self.confirmed is not None else (),
            memory=tuple(self.memory),
            session_index=self._session_index,
            ended=self.ended,
            predicted=self.predicted,
            search_seconds=self.search_seconds,
            confirm_seconds=self.confirm_seconds,
        )

    def _as_confirmed(self, result: TrialResult | None) -> TrialResult | None:
        again = self.confirmed.results.get(result.candidate) if self.confirmed and result else None
        if result is None or again is None or again.rate is None:
            return result
        return msgspec.structs.replace(again, index=result.index)  # the number that people saw first
