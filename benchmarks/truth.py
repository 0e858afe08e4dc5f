"""What a sweep says is true: the rate of every candidate, and how far a pick is from the best."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from autotune.plan.space import Candidate
from autotune.planning import Plan
from autotune.search.measure import corrected_passes
from autotune.trial.result import passes_of
from benchmarks.replay import ReplaySetting
from benchmarks.sweep_table import Measured, Table, steps_of


def true_rates(table: Table, plan: Plan) -> dict[Candidate, float]:
    """Useful tokens per second of each candidate that runs: the median over its repetitions, each over all its passes,
    corrected to the whole data as every rate is. Those that end on the longest rows are left out: none may win."""
    setting = ReplaySetting(table, plan, Path(), budget_seconds=0.0, seed=0)
    rates: dict[Candidate, float] = {}
    for one in table.swept:
        rated = [measured for measured in one.repetitions if measured.rated]
        if rated and len(rated) == len(one.repetitions) and one.on_longest == "ok":
            rates[one.candidate] = statistics.median(_rate(setting, one.candidate, measured) for measured in rated)
    return rates


def _rate(setting: ReplaySetting, candidate: Candidate, measured: Measured) -> float:
    steps = steps_of(setting.table, measured)
    passes = passes_of(steps, set(range(1, len(measured.step_seconds))))
    corrected = corrected_passes(setting, candidate, passes, [step for step in steps if step.pass_index > 0])
    return sum(one.useful_tokens for one in corrected) / sum(one.seconds for one in corrected)


def regret(rates: Mapping[Candidate, float], delivered: Candidate) -> float:
    """How much faster the table's best is than what was delivered, as a share; infinite for one that does not run."""
    rate = rates.get(delivered)
    return max(rates.values()) / rate - 1.0 if rate else float("inf")
