"""Who goes into the confirmation, who wins it, and whether the winner is still the same training."""

from __future__ import annotations

from autotune.plan.space import GRADES, Candidate
from autotune.search.confirm import Confirmed
from autotune.search.found import describe_failure
from autotune.search.gates import Gate, documents_stay_apart, losses_agree, ran_as_asked, stays_finite
from autotune.search.measure import run_memory_trial
from autotune.search.samples import draw_longest
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
    setting: Setting, winner: Candidate, confirmed: Confirmed, *, memory_index: int
) -> tuple[tuple[Gate, ...], TrialResult | None]:
    """All checks of a winner, and its memory trial (number `memory_index`); none for the baseline itself."""
    result = confirmed.results.get(winner)
    if result is None or winner == setting.space.baseline:
        return (), None
    reference = confirmed.results.get(setting.space.baseline)
    gates = [stays_finite(result), ran_as_asked(result, reference, setting.space.baseline)]
    if reference is not None:
        agreement = losses_agree(setting, winner, result, reference)
        gates += [agreement] if agreement is not None else []
    if winner.arrangement.one_row:
        gates += documents_stay_apart(setting, winner)
    worst = run_memory_trial(
        setting, memory_index, winner, draw_longest(setting, winner), reason="three steps on the longest rows"
    )
    fits = worst.outcome == "ok"
    held = f"{(worst.peak_bytes or 0) / 1e9:.1f} GB at most"
    gates.append(Gate("longest rows", fits, held if fits else describe_failure(worst)))
    return tuple(gates), worst
