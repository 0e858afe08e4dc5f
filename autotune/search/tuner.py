"""Baseline, ask, run, tell, confirm: finding the best allowed candidate within the budget."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from autotune.errors import NoTrialFinishedError
from autotune.events import BestChanged, Note, RunOutcome, Topic
from autotune.plan import cost
from autotune.plan.sample import draw_sample
from autotune.plan.space import GRADES, Candidate
from autotune.probe.lengths import sample_rows
from autotune.search.confirm import Confirmed, confirm
from autotune.search.gates import Gate, documents_stay_apart, losses_agree, ran_as_asked, stays_finite
from autotune.search.measure import Sample, measure, run_memory_trial
from autotune.search.proposals import Proposals
from autotune.search.setting import Setting
from autotune.search.statistics import Estimate
from autotune.trial.result import TrialResult

PASS_STEPS = 12  # optimizer steps of the baseline in one pass over the sample
FEWEST_PASS_STEPS = 4
FEWEST_ROWS = 96  # below this the sample's packing is too far from the data's
PASS_SHARE = 0.05  # of the budget, for one pass of the baseline
PATIENCE = 14  # trials in a row without a gain, after which the search ends
GAIN = 1.01
TIE = 0.02  # what two finalists may differ by and still be called equally fast
ROUNDS_FORESEEN = 4  # of the confirmation
SAME_FAILURES = 4
SLACK_CORES = 0.25  # what others may use of the cores a trial needs
MOST_TRIES = 2  # of one candidate on a busy machine
MOST_REPEATS = 6  # in one search
FINALIST_WITHIN = 0.96  # of the best rate
MOST_FINALISTS = 2
CONFIRM_SHARE = 0.45  # of the budget, at most


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a search ends with. `winner` is the baseline when nothing beat it."""

    outcome: RunOutcome
    winner: Candidate
    baseline: TrialResult | None
    best: TrialResult | None
    speedup: Estimate | None
    confirmed_rounds: int
    results: tuple[TrialResult, ...]
    ruled_out: dict[Candidate, str]
    gates: tuple[Gate, ...] = ()
    memory: tuple[TrialResult, ...] = ()  # of the longest rows: the winner, and the baseline where it ran
    search_seconds: float = 0.0
    confirm_seconds: float = 0.0


class Tuner:
    """One search. All state is in the results, which are in the run folder."""

    def __init__(self, setting: Setting, earlier: list[TrialResult]) -> None:
        self.setting = setting
        self.results: list[TrialResult] = []
        self._earlier = {result.candidate: result for result in earlier if result.purpose == "speed"}
        self._next_index = max((result.index for result in earlier), default=-1) + 1
        self._sample: Sample | None = None
        self._confirmed: Confirmed | None = None
        self._again = MOST_REPEATS
        self._gates_failed = 0
        self._gates: tuple[Gate, ...] = ()
        self._memory: list[TrialResult] = []
        self._search_seconds = 0.0
        self._confirm_seconds = 0.0
        self._proposals = Proposals(
            setting.space,
            lambda candidate: cost.seconds_per_token(candidate, setting.data, setting.model, setting.machine),
            seed=setting.seed,
        )

    # --- what is known so far ------------------------------------------------------------------------------------

    @property
    def baseline(self) -> TrialResult | None:
        """The baseline's result, None while it has none or when it did not run."""
        return next((one for one in self.results if one.candidate == self.setting.space.baseline and one.rate), None)

    @property
    def best(self) -> TrialResult | None:
        """The fastest measured so far."""
        return max((one for one in self.results if one.rate), key=lambda one: one.rate or 0.0, default=None)

    def found(self, outcome: RunOutcome | None = None) -> Found:
        """The state of the search as a result; valid at any moment."""
        baseline, best = self.baseline, self.best
        speedup: Estimate | None = None
        winner = best
        if self._confirmed is not None and self._confirmed.ratios:
            candidate, speedup = self._first_among_equals(self._confirmed.ratios)
            winner = next(one for one in self.results if one.candidate == candidate)
        elif baseline is not None and best is not None and baseline.rate and best.rate:
            speedup = _unconfirmed(baseline, best)
        kept = winner is None or winner is baseline or (speedup is not None and speedup.low <= 1.0)
        if outcome is None:
            outcome = "failed" if winner is None else "kept" if kept else "improved"
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
            gates=self._gates,
            memory=tuple(self._memory),
            search_seconds=self._search_seconds,
            confirm_seconds=self._confirm_seconds,
        )

    def _first_among_equals(self, ratios: dict[Candidate, Estimate]) -> tuple[Candidate, Estimate]:
        """The fastest, or one as fast within the noise that changes less."""
        space = self.setting.space
        best = max(ratios.values(), key=lambda one: one.value)
        near = [(one, ratio) for one, ratio in ratios.items() if ratio.value >= best.value * (1 - TIE)]
        return min(
            near,
            key=lambda item: (
                GRADES.index(space.grade(item[0])),
                item[0].differences(space.baseline),
                -item[1].value,
            ),
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
            while self._goes_on():
                proposal = self._proposals.next()
                if proposal is None:
                    self._note("every allowed candidate was tried")
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

    def _run_baseline(self) -> None:
        setting = self.setting
        base = setting.space.baseline
        steps = self._first_pass_steps()
        longest = max(4.0, PASS_SHARE * setting.budget_seconds)
        while True:
            self._sample = self.draw(steps)
            result = self._recall(base)
            if result is None:
                result = self._measure(
                    base,
                    "your own settings",
                    longest_pass=longest if self._sample.steps > FEWEST_PASS_STEPS else None,
                )
            if result.outcome != "stopped":
                if result.pass_steps != self._sample.steps:  # recalled: an interrupted search had settled on fewer
                    self._sample = self.draw(result.pass_steps)
                break
            foretold = result.foretold_pass_seconds or longest
            steps = max(FEWEST_PASS_STEPS, min(self._sample.steps - 1, int(self._sample.steps * longest / foretold)))
            self._note(
                f"a step of yours takes {foretold / self._sample.steps:.1f} s, so trials pass over the documents of "
                f"{steps} steps, not of {self._sample.steps}",
                topic="trial",
            )
            self._next_index -= 1  # it told how long a step is and nothing else
        self._told(result)
        if result.rate is None:
            self._note(f"yours did not run: {describe_failure(result)}; looking for settings that do", topic="trial")

    def _first_pass_steps(self) -> int:
        arrangement = self.setting.space.baseline.arrangement
        rows_a_step = arrangement.micro_batch * arrangement.accumulation
        available = len(self.setting.data.kept.tokens) // rows_a_step
        wanted = max(PASS_STEPS, -(-FEWEST_ROWS // rows_a_step))
        return max(1, min(wanted, available))

    def draw(self, steps: int) -> Sample:
        """Draw the documents of the trials and write them into the run folder."""
        setting = self.setting
        arrangement = setting.space.baseline.arrangement
        data = setting.data
        documents_a_step = arrangement.micro_batch * arrangement.accumulation
        if arrangement.packed:
            figures = data.figures(arrangement)
            documents_a_step = max(1, round(documents_a_step * len(data.kept.tokens) * data.kept.weight / figures.rows))
        rows = draw_sample(
            data.kept,
            rows=min(len(data.kept.tokens), steps * documents_a_step),
            seed=_sampling_seed(setting),
            micro_batch=1 if arrangement.packed else arrangement.micro_batch,
            effective_batch=documents_a_step,
        )
        path = setting.folder / f"sample-{len(rows)}.parquet"
        self._write_rows(rows, path)
        return Sample(path, len(rows), max(1, len(rows) // documents_a_step))

    def _write_rows(self, rows: tuple[int, ...], path: Path) -> None:
        setting = self.setting
        if path.exists():
            return
        sample_rows(setting.job.resolved, rows, path, folder=setting.job_folder, children=setting.children)

    def _goes_on(self) -> bool:
        setting = self.setting
        speed_trials = len(self.results)
        if setting.trial_limit is not None and speed_trials >= setting.trial_limit:
            self._note(f"the limit of {setting.trial_limit} trials is reached")
            return False
        if setting.seconds_left() < self._seconds_to_confirm() + self._seconds_of_a_trial():
            self._note("what is left of the budget goes to the confirmation")
            return False
        if self._fails_for_one_reason():
            self._note(f"the first {SAME_FAILURES} trials failed in the same way")
            return False
        if self._without_gain() >= PATIENCE:
            self._note(f"no gain in the last {PATIENCE} trials")
            return False
        return True

    def _fails_for_one_reason(self) -> bool:
        """Whether nothing ran and all say the same, memory aside: another setting will not mend that."""
        failures = {(result.outcome, result.where, result.detail) for result in self.results}
        alike = len(self.results) >= SAME_FAILURES and len(failures) == 1 and self.best is None
        return alike and self.results[0].outcome not in ("oom", "stopped")

    def _try(self, candidate: Candidate, reason: str) -> None:
        result = self._recall(candidate)
        if result is None:
            result = self._measure(candidate, reason)
        self._told(result)

    def _measure(self, candidate: Candidate, reason: str, *, longest_pass: float | None = None) -> TrialResult:
        """Measure, and once more where other processes had the cores that the candidate needs."""
        setting = self.setting
        assert self._sample is not None
        index = self._take_index()
        best, baseline = self.best, self.baseline
        tries: list[TrialResult] = []
        while True:
            result = measure(
                setting,
                index,
                candidate,
                self._sample,
                reason=reason,
                best=_estimate(best) if best is not None else None,
                baseline_rate=baseline.rate if baseline is not None else None,
                longest_pass=longest_pass,
            )
            tries.append(result)
            if not self._disturbed(result) or self._again == 0 or len(tries) > MOST_TRIES:
                return min(tries, key=lambda one: one.others_cores)
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
        candidate = result.candidate
        free = self.setting.machine.cpu.cores - (candidate.threads or 1) - candidate.workers
        return result.outcome in ("ok", "pruned", "stopped") and result.others_cores > max(0, free) + SLACK_CORES

    def _told(self, result: TrialResult) -> None:
        before = self.best
        self.results.append(result)
        self._proposals.tell(result)
        if result.rate and (before is None or result.rate > (before.rate or 0.0)) and len(self.results) > 1:
            baseline = self.baseline
            ratio = result.rate / baseline.rate if baseline is not None and baseline.rate else None
            self.setting.emit(BestChanged(trial=result.index, label=result.label, rate=result.rate, ratio=ratio))

    def _recall(self, candidate: Candidate) -> TrialResult | None:
        """The result of an earlier, interrupted search of this run."""
        return self._earlier.pop(candidate, None)

    def _take_index(self) -> int:
        index = self._next_index
        self._next_index += 1
        return index

    def _without_gain(self) -> int:
        """Trials since the last that was faster than all before it by more than `GAIN`."""
        best_rate, since = 0.0, 0
        for result in self.results:
            since += 1
            if (result.rate or 0.0) > best_rate * GAIN:
                best_rate, since = result.rate or 0.0, 0
        return since

    def _seconds_of_a_trial(self) -> float:
        recent = [result.seconds for result in self.results[-5:]]
        return max(recent, default=5.0)

    def _seconds_to_confirm(self) -> float:
        """What the confirmation, the memory trials and the gates will take, from what their passes took so far."""
        baseline, best = self.baseline, self.best
        if best is None:
            return 0.0
        arms = [best] * MOST_FINALISTS + ([baseline] if baseline is not None else [])
        seconds = 0.0
        for arm in arms:
            a_pass = arm.passes[0]
            warm_up = 2 * a_pass.seconds / a_pass.steps
            seconds += ROUNDS_FORESEEN * a_pass.seconds + (arm.startup_seconds or 1.0) + warm_up
        return min(seconds + self._seconds_to_check(), CONFIRM_SHARE * self.setting.budget_seconds)

    def _seconds_to_check(self) -> float:
        """What the memory trial, the gates and the files will take."""
        baseline = self.baseline or self.best
        if baseline is None or not baseline.passes:
            return 0.0
        longest_step = 2.5 * baseline.passes[0].seconds / baseline.passes[0].steps
        return 2.0 + 2 * (baseline.startup_seconds or 1.0) + 3 * longest_step

    # --- the end -------------------------------------------------------------------------------------------------

    def _confirm(self) -> None:
        """Measure the finalists against the baseline in turns; drop those that fail a check, best first."""
        setting = self.setting
        assert self._sample is not None
        base = setting.space.baseline
        baseline = self.baseline
        while True:
            finalists = self._finalists()
            if not finalists:
                return
            if self._gates_failed and baseline is not None and setting.seconds_left() <= 0:
                for one in finalists:
                    self._drop(one.candidate, "the budget is used up before it could be checked")
                return
            seconds = setting.seconds_left() - self._seconds_to_check()
            reference = base if baseline is not None else finalists[0].candidate
            others = [one.candidate for one in finalists if one.candidate != reference]
            resident = sum(one.peak_bytes or 0 for one in (*finalists, *((baseline,) if baseline else ())))
            first_index = self._next_index
            self._next_index += 1 + len(others)
            confirmed = confirm(
                setting, first_index, reference, others, self._sample, seconds=seconds, resident_bytes=resident
            )
            failed = {candidate for candidate, result in confirmed.results.items() if result.rate is None}
            if failed - {reference}:
                for candidate in failed - {reference}:
                    self._drop(candidate, f"did not run again: {describe_failure(confirmed.results[candidate])}")
                continue
            self._confirmed = confirmed if baseline is not None else None
            winner = self.found().winner
            gates = self._check(winner, confirmed)
            if all(gate.passed for gate in gates):
                self._gates = gates
                return
            self._gates_failed += 1
            self._drop(winner, "; ".join(f"{gate.name}: {gate.detail}" for gate in gates if not gate.passed))
            self._confirmed = None

    def _drop(self, candidate: Candidate, why: str) -> None:
        """Take a candidate's score away, so that it can be neither the winner nor the best so far."""
        self._note(f"{self.setting.label(candidate)} is out: {why}", topic="same")
        self.results = [
            msgspec.structs.replace(one, rate=None, rate_interval=None, outcome="error", detail=why)
            if one.candidate == candidate
            else one
            for one in self.results
        ]

    def _finalists(self) -> list[TrialResult]:
        """The fastest and those within reach of it; between near equals the safer grade and fewer changes first."""
        space = self.setting.space
        rated = [one for one in self.results if one.rate]
        if self.baseline is not None:
            rated = [one for one in rated if one.candidate != space.baseline]
        if not rated:
            return []
        best_rate = max(one.rate or 0.0 for one in rated)
        near = [one for one in rated if (one.rate or 0.0) >= FINALIST_WITHIN * best_rate]
        near.sort(key=lambda one: -(one.rate or 0.0))
        chosen = near[:1]
        others = sorted(
            near[1:],
            key=lambda one: (
                GRADES.index(space.grade(one.candidate)),
                one.candidate.differences(space.baseline),
                -(one.rate or 0.0),
            ),
        )
        return chosen + others[: MOST_FINALISTS - 1]

    def _check(self, winner: Candidate, confirmed: Confirmed) -> tuple[Gate, ...]:
        """Is the winner still the same training, and does it fit at its worst?"""
        setting = self.setting
        result = confirmed.results.get(winner)
        gates: list[Gate] = []
        if result is None or winner == setting.space.baseline:
            return ()
        gates.append(stays_finite(setting, result))
        reference = confirmed.results.get(setting.space.baseline)
        gates.append(ran_as_asked(result, reference, setting.space.baseline))
        if reference is not None:
            agreement = losses_agree(setting, winner, result, reference)
            if agreement is not None:
                gates.append(agreement)
        if winner.arrangement.name in ("bfd", "bfd_split"):
            gates += documents_stay_apart(setting, winner)
        gates.append(self._fits_at_worst(winner))
        return tuple(gates)

    def _fits_at_worst(self, winner: Candidate) -> Gate:
        setting = self.setting
        arrangement = setting.space.baseline.arrangement
        kept = setting.data.kept
        rows = max(winner.arrangement.micro_batch * winner.arrangement.accumulation, 1)
        rows = max(rows, arrangement.micro_batch * arrangement.accumulation)
        longest = sorted(range(len(kept.tokens)), key=lambda place: -kept.tokens[place])[: 3 * rows]
        path = setting.folder / "longest.parquet"
        self._write_rows(tuple(kept.row_numbers[place] for place in longest), path)
        sample = Sample(path, len(longest), 3)
        result = run_memory_trial(setting, self._take_index(), winner, sample, reason="the longest rows")
        self._memory.append(result)
        passed = result.outcome == "ok"
        held = f"{(result.peak_bytes or 0) / 1e9:.1f} GB at most on the longest rows"
        return Gate("longest rows", passed, held if passed else describe_failure(result))

    def _commonest_failure(self) -> str:
        failures = [describe_failure(result) for result in self.results]
        return max(set(failures), key=failures.count) if failures else "no trial was started"

    def _note(self, text: str, *, topic: Topic = "plan") -> None:
        self.setting.emit(Note(text=text, topic=topic))


def describe_failure(result: TrialResult) -> str:
    """Why a trial did not run, in words: "out of memory in backward"."""
    words = {"oom": "out of memory", "error": "an error", "killed": "killed", "hung": "no sign of life"}
    what = words.get(result.outcome, result.outcome)
    where = f" in {result.where}" if result.where else ""
    detail = f" ({result.detail})" if result.detail else ""
    return f"{what}{where}{detail}"


def _estimate(result: TrialResult) -> Estimate:
    low, high = result.rate_interval or (result.rate or 0.0, result.rate or 0.0)
    return Estimate(result.rate or 0.0, low, high)


def _unconfirmed(baseline: TrialResult, best: TrialResult) -> Estimate:
    """The ratio of two rates measured one after the other, with the widest interval their own allow."""
    mine, theirs = _estimate(best), _estimate(baseline)
    return Estimate(mine.value / theirs.value, mine.low / theirs.high, mine.high / theirs.low)


def _sampling_seed(setting: Setting) -> int:
    resolved = setting.job.resolved
    seed = resolved.get("data_seed")
    return int(seed if seed is not None else resolved["seed"])
