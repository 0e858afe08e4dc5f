"""Who goes into the confirmation, who wins it, and whether the winner is still the same training."""

from __future__ import annotations

from collections.abc import Callable

from autotune.plan.memory_room import free_bytes_of
from autotune.plan.space import GRADES, Candidate
from autotune.search.checking import Checking
from autotune.search.confirm import Confirmed
from autotune.search.end_to_end import run_end_to_end
from autotune.search.gates import Gate, documents_stay_apart, holds_longest_rows, ran_as_asked, stays_finite
from autotune.search.measure import run_memory_trial
from autotune.search.parity import parity
from autotune.search.samples import Sample, draw_longest
from autotune.search.setting import Setting
from autotune.search.statistics import Estimate
from autotune.trial.result import TrialResult

FINALIST_WITHIN = 0.96  # of the best rate
MOST_FINALISTS = 2
TIE = 0.02  # what two finalists may differ by and still be called equally fast


def finalists(setting: Setting, results: list[TrialResult], *, baseline_runs: bool) -> list[TrialResult]:
    """The fastest, and one that may be as fast: of those near it the one of the safest grade, with the fewest changes,
    else the fastest whose interval reaches it.

    Without a baseline that runs, the job's own settings have no place of their own and may be among them.
    """
    space = setting.space
    rated = [
        one for one in results if one.rate and not one.busy and not (baseline_runs and one.candidate == space.baseline)
    ]
    if not rated:
        return []
    fastest = max(rated, key=lambda one: one.rate or 0.0)
    near = FINALIST_WITHIN * (fastest.rate or 0.0)
    others = [one for one in rated if one is not fastest and _may_reach(one, fastest)]
    others.sort(key=lambda one: ((one.rate or 0.0) < near, *_caution(setting, one.candidate), -(one.rate or 0.0)))
    return [fastest, *others[: MOST_FINALISTS - 1]]


def _may_reach(one: TrialResult, fastest: TrialResult) -> bool:
    """Whether a rate is near the fastest, or known so badly that it may be: a lucky pass must not stand alone."""
    most = one.rate_interval[1] if one.rate_interval else one.rate
    return (most or 0.0) >= FINALIST_WITHIN * (fastest.rate or 0.0)


def first_among_equals(setting: Setting, ratios: dict[Candidate, Estimate]) -> tuple[Candidate, Estimate]:
    """The fastest, or one as fast within the noise that changes less."""
    best = max(ratios.values(), key=lambda one: one.value)
    near = [(one, ratio) for one, ratio in ratios.items() if ratio.value >= best.value * (1 - TIE)]
    return min(near, key=lambda item: (*_caution(setting, item[0]), -item[1].value))


def _caution(setting: Setting, candidate: Candidate) -> tuple[int, int]:
    """How far a candidate is from what the user had: its grade, and on how many axes it differs."""
    space = setting.space
    return GRADES.index(space.grade(candidate)), candidate.differences(space.baseline)


def check(
    setting: Setting,
    winner: Candidate,
    confirmed: Confirmed,
    sample: Sample,
    *,
    take_index: Callable[[], int],
    known: dict[tuple[Candidate, str], float],
) -> tuple[tuple[Gate, ...], TrialResult | None]:
    """All checks of a winner, and its memory trial; none for the baseline itself. Each trial of a check has the number
    that `take_index` gives; `known` keeps first losses from one winner to the next. What takes longest, the run from
    end to end, is left out for one that failed before."""
    result = confirmed.results.get(winner)
    base = setting.space.baseline
    if result is None or winner == base:
        return (), None
    reference = confirmed.results.get(base)
    checking = Checking(setting, sample, take_index, like=result, known=known)
    gates = [ran_as_asked(result, reference, base)]
    gates.append(stays_finite(result, checking, scaled=bool(setting.job.resolved.get("fp16"))))
    if reference is not None:
        gates += parity(winner, result, reference, checking)
    if winner.arrangement.one_row:
        gates += documents_stay_apart(setting, winner)
    reason = "three steps on the longest rows"
    worst = run_memory_trial(setting, take_index(), winner, draw_longest(setting, winner), reason=reason)
    gates.append(holds_longest_rows(worst, free_bytes_of(setting.machine, setting.memory_limit_bytes)))
    if all(gate.passed for gate in gates):
        by_command = run_end_to_end(winner, result, reference, checking)
        gates += [by_command] if by_command is not None else []
    return tuple(gates), worst
