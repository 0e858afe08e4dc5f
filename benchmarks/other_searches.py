"""Random search and plain Optuna TPE on the tables that the tuner is played on, with the same trials at the same cost.

Both begin with the user's own settings, as the tuner does, and measure each candidate by the tuner's own trial until
its rate is known as well as the tuner wants it, without pruning. What is best when the budget is used up is delivered,
without a confirmation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from autotune.plan.space import Candidate, Space
from autotune.planning import Plan
from autotune.search.measure import measure
from autotune.search.samples import draw, first_pass_steps
from autotune.trial.result import TrialResult
from benchmarks.replay import Incumbents, ReplaySetting
from benchmarks.sweep_table import Table

Asks = Iterator[Candidate]
Told = list[TrialResult]
Search = Callable[[Space, int, Told], Asks]


def at_random(space: Space, seed: int, _told: Told) -> Asks:
    """Every candidate once, in an order by chance."""
    candidates = list(space.candidates())[1:]
    yield space.baseline
    yield from random.Random(seed).sample(candidates, len(candidates))


def by_tpe(space: Space, seed: int, told: Told) -> Asks:
    """Optuna's TPE with its defaults, axes as categories. What it asks for again is measured again; what cannot be, as
    an attention that may not run with an arrangement, is told as failed and costs nothing."""
    import optuna  # 0.4 s

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    distributions: dict[str, Any] = {
        axis.name: optuna.distributions.CategoricalDistribution(tuple(range(len(axis.choices)))) for axis in space.axes
    }
    allowed = set(space.candidates())
    study.enqueue_trial(dict.fromkeys(distributions, 0))  # the baseline's choice is the first of each axis
    while True:
        trial = study.ask(distributions)
        candidate = msgspec.structs.replace(
            space.baseline, **{axis.name: axis.choices[trial.params[axis.name]].value for axis in space.axes}
        )
        if candidate not in allowed:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        yield candidate
        rate = told[-1].rate
        if rate is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, rate)


def search(
    table: Table, plan: Plan, folder: Path, *, seed: int, budget_seconds: float, asks: Search
) -> tuple[tuple[float, Candidate], ...]:
    """Who was the best so far, from which moment on; a trial that the budget's end cuts short does not count."""
    told = Incumbents()

    def hear(event: Any) -> None:
        if told.setting is not None and told.setting.seconds_left() >= 0:
            told.hear(event)

    setting = ReplaySetting(table, plan, folder, budget_seconds=budget_seconds, seed=seed, emit=hear)
    told.setting = setting
    sample = draw(setting, first_pass_steps(setting))
    results: Told = []
    for index, candidate in enumerate(asks(plan.space, seed, results)):
        results.append(measure(setting, index, candidate, sample, reason="", best=None, baseline_rate=None))
        if setting.seconds_left() <= 0:
            break
    return tuple(told.found or [(0.0, plan.space.baseline)])
