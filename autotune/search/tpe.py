"""What Optuna's TPE proposes after the trials so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.plan.space import Candidate, Space
from autotune.trial.result import TrialResult

if TYPE_CHECKING:
    import optuna

ASKS = 40  # repeats that TPE may propose before it is left


def ask(
    space: Space, results: Iterable[TrialResult], *, seed: int, may_be_tried: Callable[[Candidate], bool]
) -> Candidate | None:
    """The first of its proposals that may be tried, None where it has none."""
    import optuna  # 0.4 s

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=0))
    distributions = {
        axis.name: optuna.distributions.CategoricalDistribution(tuple(range(len(axis.choices)))) for axis in space.axes
    }
    for result in results:
        study.add_trial(_as_optuna(space, result, distributions))
    for _ in range(ASKS):
        trial = study.ask(distributions)  # type: ignore[arg-type]
        candidate = msgspec.structs.replace(
            space.baseline, **{axis.name: axis.choices[trial.params[axis.name]].value for axis in space.axes}
        )
        if may_be_tried(candidate):
            return candidate
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return None


def _as_optuna(space: Space, result: TrialResult, distributions: Any) -> optuna.trial.FrozenTrial:
    """A trial cut short is pruned. So is one that ran out of memory, before its first figure: the worst there is, for
    TPE. Another failure has no score, and TPE learns nothing from it."""
    from optuna.trial import TrialState, create_trial

    params = {
        axis.name: [choice.value for choice in axis.choices].index(getattr(result.candidate, axis.name))
        for axis in space.axes
    }
    rate = result.rate if result.outcome == "ok" else result.partial_rate
    if result.outcome == "oom":
        return create_trial(params=params, distributions=distributions, state=TrialState.PRUNED)
    if rate is None:
        return create_trial(params=params, distributions=distributions, state=TrialState.FAIL)
    if result.outcome == "pruned":
        return create_trial(
            params=params, distributions=distributions, state=TrialState.PRUNED, intermediate_values={1: rate}
        )
    return create_trial(params=params, distributions=distributions, value=rate)
