"""When a search has tried enough, and what the time after it is needed for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from autotune.plan.space import Candidate
from autotune.search import end_to_end, parity
from autotune.search.confirm import least_seconds, passes_in_a_turn
from autotune.search.failures import fail_alike, most_unlike
from autotune.search.finals import MOST_FINALISTS
from autotune.search.setting import Setting
from autotune.search.training import duration, training_seconds
from autotune.trial.result import TrialResult

PATIENCE = 14  # trials in a row without a gain, after which the search ends
GAIN = 1.01
FEWEST_TRIALS = 4  # the user's own among them, before what is expected of the next one ends the search
# An expected gain that is worth a trial however short the training: what is found is used again
WORTH_A_TRIAL = 0.01
SAME_FAILURES = 4
BEFORE_A_STEP = ("start", "load_model", "prepare_data")
ROUNDS_FORESEEN = 4  # of the confirmation
FEWEST_FORESEEN = 2  # while there is nothing to confirm yet: then a first trial is worth more than rounds
CONFIRM_SHARE = 0.5  # of the budget, at most


def reason_to_stop(
    setting: Setting,
    results: list[TrialResult],
    *,
    baseline: TrialResult | None,
    best: TrialResult | None,
    left: Callable[[], Collection[Candidate]],
    expected_gain: Callable[[], float | None],
) -> str | None:
    """Why no further candidate is tried, in words; None while the search goes on. `left` tells who may be tried, and
    `expected_gain` what the most promising of them is expected to gain, as a share of the best rate."""
    if setting.trial_limit is not None and len(results) >= setting.trial_limit:
        return f"the limit of {setting.trial_limit} trial{'s' if setting.trial_limit > 1 else ''} is reached"
    a_trial = max((result.seconds for result in results[-5:]), default=5.0)
    if setting.seconds_left() < seconds_to_confirm(setting, baseline=baseline, best=best) + a_trial:
        if best is baseline:
            return "what is left of the budget is too short to try and confirm anything else"
        return "what is left of the budget goes to the confirmation"
    if _nothing_will_mend(results, left):
        return f"the first {len(results)} trials failed in the same way"
    if _trials_without_gain(results) >= PATIENCE:
        return f"no gain in the last {PATIENCE} trials"
    return _not_worth_a_trial(setting, results, best=best, expected_gain=expected_gain)


def seconds_to_confirm(setting: Setting, *, baseline: TrialResult | None, best: TrialResult | None) -> float:
    """What the confirmation and the checks will take, from what passes took so far."""
    if best is None:
        return 0.0
    alone = best is baseline
    finalists, rounds = (1, FEWEST_FORESEEN) if alone else (MOST_FINALISTS, ROUNDS_FORESEEN)
    arms = [best] * finalists + ([baseline] if baseline is not None else [])
    seconds = 0.0
    for arm in arms:
        a_pass = arm.passes[0]
        warm_up = 2 * a_pass.seconds / a_pass.steps
        turn = a_pass.seconds * passes_in_a_turn(arms[-1].passes[0].seconds, a_pass.seconds)
        seconds += rounds * turn + (arm.startup_seconds or 1.0) + warm_up
    seconds = max(seconds, least_seconds(setting.budget_seconds))
    return min(seconds + seconds_to_check(setting, baseline or best), CONFIRM_SHARE * setting.budget_seconds)


def seconds_to_check(setting: Setting, slowest: TrialResult | None) -> float:
    """What the memory trial, the other checks and the files will take; `slowest` is the baseline where it ran."""
    if slowest is None or not slowest.passes:
        return 0.0
    longest_step = 2.5 * slowest.passes[0].seconds / slowest.passes[0].steps
    of_checks = end_to_end.seconds_reserved(setting, slowest) + parity.seconds_reserved(setting, slowest)
    return 2.0 + 2 * (slowest.startup_seconds or 1.0) + 3 * longest_step + of_checks


def _not_worth_a_trial(
    setting: Setting,
    results: list[TrialResult],
    *,
    best: TrialResult | None,
    expected_gain: Callable[[], float | None],
) -> str | None:
    """Whether the next trial takes longer than it is expected to save of the whole training, in words."""
    if best is None or len(results) < FEWEST_TRIALS or (gain := expected_gain()) is None or gain >= WORTH_A_TRIAL:
        return None
    last = results[-FEWEST_TRIALS:]
    a_trial = sum(one.seconds for one in last) / len(last)
    training = training_seconds(setting, best)
    saved = training * -math.expm1(-gain)
    if saved >= a_trial:
        return None
    return (
        f"another trial of {duration(a_trial)} would save about {duration(saved)} of the {duration(training)} that the "
        f"training takes (est.); the {len(results)} so far took {duration(sum(one.seconds for one in results))}"
    )


def _nothing_will_mend(results: list[TrialResult], left: Callable[[], Collection[Candidate]]) -> bool:
    """Whether nothing ran, all say the same, and who is left has all that those have in common."""
    if len(results) > 1 and all(one.outcome == "oom" and one.where in BEFORE_A_STEP for one in results):
        return True  # what is loaded does not depend on the setting
    return len(results) >= SAME_FAILURES and fail_alike(results) and most_unlike(results, left()) is None


def _trials_without_gain(results: list[TrialResult]) -> int:
    """Trials since the last that was faster than all before it by more than `GAIN`."""
    best_rate, since = 0.0, 0
    for result in results:
        since += 1
        if (result.rate or 0.0) > best_rate * GAIN:
            best_rate, since = result.rate or 0.0, 0
    return since
