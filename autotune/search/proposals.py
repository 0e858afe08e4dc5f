"""In what order candidates are tried: first by prediction, then around the best, then as Optuna's TPE proposes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.plan.checkpointing import keeps_at_least
from autotune.plan.memory_room import Room
from autotune.plan.space import Candidate, Space
from autotune.search.failures import fail_alike, most_unlike
from autotune.trial.result import TrialResult

if TYPE_CHECKING:
    import optuna

MOST_PREDICTED = 6  # arrangements tried on prediction alone
# How much more one holds than another that differs on these is not known
DECIDE_MEMORY_TOO = ("layer_kernels", "torch_compile", "activation_offloading", "optimizer", "dtype")

PREDICTED_WITHIN = 1.6  # of the best prediction; the constants of a prediction are no better than that
TPE_ASKS = 40  # repeats that TPE may propose before the best predicted one left is taken


class Proposals:
    """The next candidate to try, given all that was measured.

    The same seed and the same results in the same order give the same proposals. `predict` gives seconds per useful
    token of a candidate; `room` says whether there is memory for it: what is tight is tried last, and what there is
    none for is not tried while its estimate says so.
    """

    def __init__(
        self,
        space: Space,
        predict: Callable[[Candidate], float],
        *,
        room: Callable[[Candidate], Room] = lambda _candidate: Room("fits"),
        seed: int = 0,
    ) -> None:
        self._space = space
        self._room = room
        self._seed = seed
        candidates = list(space.candidates())
        predicted = {candidate: predict(candidate) for candidate in candidates}
        base = space.baseline
        # between equal predictions the one that changes less
        self._open = sorted(candidates, key=lambda one: (predicted[one], one.differences(base)))
        self._predicted = predicted
        self._results: dict[Candidate, TrialResult] = {}
        self._ruled_out: dict[Candidate, str] = {}
        self._first = self._best_of_each_arrangement()

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
        return len(self.candidates_left)

    @property
    def candidates_left(self) -> list[Candidate]:
        """Those that have been neither tried nor ruled out, the best predicted first."""
        return [candidate for candidate in self._open if self._room_of(candidate).verdict != "none"]

    def tell(self, result: TrialResult) -> None:
        """A trial has ended. One that ran out of memory rules out those that need at least as much."""
        self._results[result.candidate] = result
        self._open = [candidate for candidate in self._open if candidate != result.candidate]
        if result.outcome == "oom":
            for candidate in list(self._open):
                if needs_as_much_memory(candidate, result.candidate):
                    self._open.remove(candidate)
                    self._ruled_out[candidate] = f"needs at least the memory of #{result.index}, which ran out"

    def next(self) -> tuple[Candidate, str] | None:
        """A candidate and why it is tried now, or None when all are done."""
        verdicts = {candidate: self._room_of(candidate).verdict for candidate in self._open}
        fitting = [candidate for candidate in self._open if verdicts[candidate] == "fits"]
        tight = [candidate for candidate in self._open if verdicts[candidate] == "tight"]
        if not fitting:
            return (tight[0], "may not fit in memory: tried last") if tight else None
        results = list(self._results.values())
        if fail_alike(results) and (unlike := most_unlike(results, fitting)) is not None:
            return unlike, "differs from all that failed"
        while self._first:
            candidate = self._first.pop(0)
            if candidate in fitting:
                return candidate, "predicted among the fastest"
        neighbour = self._neighbour_of_best(fitting)
        if neighbour is not None:
            return neighbour, "one step from the best so far"
        return self._ask_optuna(fitting)

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

    def _best_of_each_arrangement(self) -> list[Candidate]:
        """The best predicted candidate of each arrangement, since the prediction is least sure between those."""
        chosen: dict[Any, Candidate] = {}
        fitting = [candidate for candidate in self._open if self._room_of(candidate).verdict == "fits"]
        for candidate in fitting or self._open:
            chosen.setdefault(candidate.arrangement, candidate)
        ordered = list(chosen.values())
        limit = self._predicted[ordered[0]] * PREDICTED_WITHIN
        return [candidate for candidate in ordered if self._predicted[candidate] <= limit][:MOST_PREDICTED]

    def _best(self) -> TrialResult | None:
        rated = [result for result in self._results.values() if result.outcome == "ok" and result.rate]
        return max(rated, key=lambda result: result.rate or 0.0, default=None)

    def _neighbour_of_best(self, fitting: list[Candidate]) -> Candidate | None:
        best = self._best()
        if best is None:
            return None
        near = [candidate for candidate in fitting if candidate.differences(best.candidate) == 1]
        return min(near, key=lambda one: self._predicted[one], default=None)

    def _ask_optuna(self, fitting: list[Candidate]) -> tuple[Candidate, str]:
        import optuna  # 0.4 s

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=self._seed + len(self._results), n_startup_trials=0),
        )
        distributions = {
            axis.name: optuna.distributions.CategoricalDistribution(tuple(range(len(axis.choices))))
            for axis in self._space.axes
        }
        for result in self._results.values():
            study.add_trial(self._as_optuna(result, distributions))
        open_candidates = set(fitting)
        for _ in range(TPE_ASKS):
            trial = study.ask(distributions)  # type: ignore[arg-type]
            candidate = msgspec.structs.replace(
                self._space.baseline,
                **{axis.name: axis.choices[trial.params[axis.name]].value for axis in self._space.axes},
            )
            if candidate in open_candidates:
                return candidate, "proposed by TPE"
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return fitting[0], "best prediction left"

    def _as_optuna(self, result: TrialResult, distributions: Any) -> optuna.trial.FrozenTrial:
        import optuna

        params = {
            axis.name: [choice.value for choice in axis.choices].index(getattr(result.candidate, axis.name))
            for axis in self._space.axes
        }
        rate = result.rate if result.outcome == "ok" else result.partial_rate
        if rate is None:  # a failed trial has no score, and TPE learns nothing from it
            return optuna.trial.create_trial(
                params=params, distributions=distributions, state=optuna.trial.TrialState.FAIL
            )
        if result.outcome == "pruned":
            return optuna.trial.create_trial(
                params=params,
                distributions=distributions,
                state=optuna.trial.TrialState.PRUNED,
                intermediate_values={1: rate},
            )
        return optuna.trial.create_trial(params=params, distributions=distributions, value=rate)


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
