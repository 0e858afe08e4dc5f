"""In what order candidates are tried: as the fitted prediction says, and when that has nothing more to gain, around the
best and as Optuna's TPE proposes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from autotune.plan.checkpointing import keeps_at_least
from autotune.plan.cost import Terms
from autotune.plan.memory_room import Room
from autotune.plan.space import GRADES, Candidate, Space
from autotune.search import tpe
from autotune.search.cost_fit import CostFit
from autotune.search.failures import fail_alike, most_unlike
from autotune.search.prediction import Checked, Predicted, expected_gain
from autotune.trial.result import TrialResult

MOST_PREDICTED = 6  # arrangements tried on the prediction's constants alone, as long as nothing ran
# How much more one holds than another that differs on these is not known
DECIDE_MEMORY_TOO = ("layer_kernels", "torch_compile", "activation_offloading", "optimizer", "dtype")

PREDICTED_WITHIN = 1.6  # of the best prediction; the constants of a prediction are no better than that
SHORTLIST = 96  # candidates whose errors are looked at, those predicted best
OF_EACH_CHOICE = 2  # beside them, the best predicted that fit with each choice of each axis
LOOKED_AT = 24  # for these, before a choice is taken to fit nowhere
NOTHING_TO_GAIN = 0.002  # expected gain below which others decide: the fit may err in what it does not look at
FAR_BEHIND = 1.4  # times the seconds of the best: so slow is nothing that differs from it in one small thing
EQUAL = 0.004  # gains that differ by less are equal: the one that changes less comes first


class Scored(NamedTuple):
    """A candidate with its prediction and what trying it is expected to gain, as a share of the best rate."""

    candidate: Candidate
    predicted: Predicted
    gain: float


class Proposals:
    """The next candidate to try, given all that was measured.

    The same seed and the same results in the same order give the same proposals. `predict` gives the terms of a
    candidate's seconds per useful token, or these seconds themselves; `room` says whether there is memory for it: what
    is tight is tried last, and what there is none for is not tried while its estimate says so. `disturbed` tells
    whether others had what a trial needed.
    """

    def __init__(
        self,
        space: Space,
        predict: Callable[[Candidate], Terms | float],
        *,
        room: Callable[[Candidate], Room] = lambda _candidate: Room("fits"),
        disturbed: Callable[[TrialResult], bool] = lambda result: result.busy,
        seed: int = 0,
    ) -> None:
        self._space = space
        self._room = room
        self._seed = seed
        base = space.baseline
        self._terms = {candidate: _as_terms(predict(candidate)) for candidate in space.candidates()}
        self._fit = CostFit(self._terms.__getitem__, base, disturbed=disturbed)
        seconds = {candidate: terms.seconds for candidate, terms in self._terms.items()}
        # between equal predictions the one that changes less
        self._open = dict.fromkeys(sorted(self._terms, key=lambda one: (seconds[one], one.differences(base))))
        self._results: dict[Candidate, TrialResult] = {}
        self._ruled_out: dict[Candidate, str] = {}
        self._seen_to_run: set[tuple[str, Any]] = set()
        self._failures: Counter[tuple[str, Any]] = Counter()
        self._scored: list[Scored] | None = None  # of the results so far, the most promising first
        self._first = self._best_of_each_arrangement(seconds)

    @property
    def ruled_out(self) -> dict[Candidate, str]:
        """Candidates that will not be tried, with the reason."""
        rooms = {candidate: self._room_of(candidate) for candidate in self._open}
        return self._ruled_out | {
            candidate: found.reason for candidate, found in rooms.items() if found.verdict == "none"
        }

    @property
    def left(self) -> int:
        """How many have been neither tried nor ruled out."""
        return len(self.candidates_left())

    @property
    def checked(self) -> list[Checked]:
        """What was predicted of each trial before it ran, and what it gave."""
        return self._fit.checked

    def candidates_left(self) -> list[Candidate]:
        """Those that have been neither tried nor ruled out, the best predicted first; looks at each of them."""
        return [candidate for candidate in self._open if self._room_of(candidate).verdict != "none"]

    def tell(self, result: TrialResult) -> None:
        """A trial has ended. One that ran out of memory rules out those that need at least as much; one whose figures
        do not count may be tried again."""
        self._results[result.candidate] = result
        if not result.busy:
            self._open.pop(result.candidate, None)
        self._fit.tell(result)
        self._scored = None
        if result.outcome in ("ok", "pruned"):
            self._seen_to_run |= _choices(result.candidate)
        elif result.outcome != "oom":
            self._failures.update(_choices(result.candidate))
        if result.outcome == "oom":
            for candidate in list(self._open):
                if needs_as_much_memory(candidate, result.candidate):
                    del self._open[candidate]
                    self._ruled_out[candidate] = f"needs at least the memory of #{result.index}, which ran out"

    def expected_gain(self) -> float | None:
        """What the most promising candidate is expected to gain, as a share of the best rate so far; None where that
        is not known, as nothing ran or nothing is left."""
        scored = self._promising()
        return scored[0].gain if scored else None

    def next(self) -> tuple[Candidate, str] | None:
        """A candidate and why it is tried now, or None when all are done."""
        first_fitting = next(self._fitting(self._open), None)
        if first_fitting is None:
            tight = next((one for one in self._open if self._room_of(one).verdict == "tight"), None)
            return (tight, "may not fit in memory: tried last") if tight is not None else None
        results = list(self._results.values())
        if fail_alike(results) and (unlike := most_unlike(results, list(self._fitting(self._open)))) is not None:
            return unlike, "differs from all that failed"
        scored = self._promising()
        if not scored:  # nothing ran
            while self._first:
                candidate = self._first.pop(0)
                if candidate in self._open and self._room_of(candidate).verdict == "fits":
                    return candidate, "predicted among the fastest"
            return first_fitting, "best prediction left"
        if scored[0].gain >= NOTHING_TO_GAIN:
            return scored[0].candidate, self._why(scored[0])
        near = self._near_the_best(scored)
        if near is not None:
            return near, "one step from the best so far"
        return self._ask_tpe(scored)

    def _promising(self) -> list[Scored]:
        """The shortlist with what each is expected to gain, the most promising first; of equal gains the safer grade
        and the fewer changes. Empty as long as nothing ran."""
        if self._scored is not None:
            return self._scored
        best = self._best()
        if best is None:
            return []
        reached, spread, space = self._fit.predict(best.candidate), self._fit.spread, self._space
        found = []
        for candidate in self._shortlist():
            predicted = self._fit.predict(candidate)
            gain = expected_gain(reached, predicted, spread=spread) * self._chance_to_run(candidate)
            found.append(Scored(candidate, predicted, gain))
        found.sort(
            key=lambda one: (
                -round(one.gain / EQUAL),
                GRADES.index(space.grade(one.candidate)),
                one.candidate.differences(space.baseline),
                -one.gain,
            )
        )
        self._scored = found
        return found

    def _chance_to_run(self, candidate: Candidate) -> float:
        """A guess: half for each failure, memory aside, of each of its choices that has never been seen to run."""
        doubts = [self._failures[choice] for choice in _choices(candidate) if choice not in self._seen_to_run]
        return 0.5 ** sum(doubts)

    def _shortlist(self) -> list[Candidate]:
        """The best predicted that fit, and of each choice of each axis its best."""
        seconds = {one: self._fit.log_seconds(one, self._terms[one]) for one in self._open}
        ranked = sorted(self._open, key=seconds.__getitem__)
        chosen = dict.fromkeys(itertools.islice(self._fitting(ranked), SHORTLIST))
        if len(chosen) == SHORTLIST:
            for axis in self._space.axes:
                of_value: dict[Any, list[Candidate]] = {}
                for candidate in ranked:
                    of_value.setdefault(getattr(candidate, axis.name), []).append(candidate)
                for these in of_value.values():
                    chosen |= dict.fromkeys(itertools.islice(self._fitting(these[:LOOKED_AT]), OF_EACH_CHOICE))
        return list(chosen)

    def _fitting(self, candidates: Any) -> Iterator[Candidate]:
        return (candidate for candidate in candidates if self._room_of(candidate).verdict == "fits")

    def _near_the_best(self, scored: list[Scored]) -> Candidate | None:
        """The most promising that differs from the best on one axis and is not predicted far behind: the fit sees the
        axes apart, and here is where two of them may go together."""
        best = self._best()
        assert best is not None
        limit = self._fit.predict(best.candidate).log_seconds + math.log(FAR_BEHIND)
        steps = (one for one in scored if one.candidate.differences(best.candidate) == 1)
        near = [one for one in steps if one.predicted.log_seconds < limit]
        return max(near, key=lambda one: one.gain).candidate if near else None

    def _why(self, scored: Scored) -> str:
        best = self._best()
        assert best is not None
        reached = self._fit.predict(best.candidate)
        ratio = math.exp(reached.log_seconds - scored.predicted.log_seconds)
        off = math.expm1(scored.predicted.deviation * self._fit.spread)
        return f"predicted {ratio:.2f}x the best so far, give or take {off:.0%}"

    def _room_of(self, candidate: Candidate) -> Room:
        """An estimate neither rules out nor puts off the baseline, nor what needs no more than something that ran."""
        if candidate == self._space.baseline:
            return Room("fits")
        found = self._room(candidate)
        if found.verdict != "fits" and any(
            result.outcome in ("ok", "pruned") and needs_as_much_memory(result.candidate, candidate)
            for result in self._results.values()
        ):
            return Room("fits")
        return found

    def _best_of_each_arrangement(self, seconds: dict[Candidate, float]) -> list[Candidate]:
        """The best predicted candidate of each arrangement, since the prediction is least sure between those."""
        of_arrangement: dict[Any, list[Candidate]] = {}
        for candidate in self._open:
            of_arrangement.setdefault(candidate.arrangement, []).append(candidate)
        chosen = [next(self._fitting(these), None) for these in of_arrangement.values()]
        ordered = sorted((one for one in chosen if one is not None), key=lambda one: seconds[one])
        ordered = ordered or [these[0] for these in of_arrangement.values()]
        limit = seconds[ordered[0]] * PREDICTED_WITHIN
        return [candidate for candidate in ordered if seconds[candidate] <= limit][:MOST_PREDICTED]

    def _best(self) -> TrialResult | None:
        rated = [result for result in self._results.values() if result.outcome == "ok" and result.rate]
        return max(rated, key=lambda result: (not result.busy, result.rate or 0.0), default=None)

    def _ask_tpe(self, scored: list[Scored]) -> tuple[Candidate, str]:
        candidate = tpe.ask(
            self._space,
            self._results.values(),
            seed=self._seed + len(self._results),
            may_be_tried=lambda one: one in self._open and self._room_of(one).verdict == "fits",
        )
        if candidate is not None:
            return candidate, "proposed by TPE"
        return scored[0].candidate, "best prediction left"


def _choices(candidate: Candidate) -> set[tuple[str, Any]]:
    """What may be why a candidate fails; of its arrangement the kind, whatever the sizes."""
    arrangement = candidate.arrangement
    rest = {(name, getattr(candidate, name)) for name in Candidate.__struct_fields__[1:]}
    return {("arrangement", (arrangement.name, arrangement.padding_free)), *rest}


def _as_terms(predicted: Terms | float) -> Terms:
    return predicted if isinstance(predicted, Terms) else Terms(predicted)


def needs_as_much_memory(candidate: Candidate, failed: Candidate) -> bool:
    """Whether `candidate` surely holds at least what `failed` held."""
    one, other = candidate.arrangement, failed.arrangement
    return (
        one.name == other.name
        and (one.row_length or 0) >= (other.row_length or 0)
        and one.micro_batch >= other.micro_batch
        and candidate.attention == failed.attention
        and one.padding_free == other.padding_free
        and keeps_at_least(candidate.checkpointing, failed.checkpointing)
        and all(getattr(candidate, name) == getattr(failed, name) for name in DECIDE_MEMORY_TOO)
    )
