"""Where a search starts that has an earlier run to start from, and when that is enough."""

from __future__ import annotations

from collections.abc import Callable

from autotune.folder import Earlier
from autotune.plan.space import Candidate
from autotune.search.setting import Setting
from autotune.trial.result import TrialResult

# On an unchanged job: other candidates tried beside the earlier pick, before it counts as the best still. The earlier
# run has tried the rest; a fit to few trials expects something of most that it has not seen.
FEWEST_OTHERS, MOST_OTHERS = 2, 4
AS_FAST_AS_BEFORE = 0.9  # of its speed-up then; with less, something is otherwise than it looks
TIE = 0.02  # what the pick may be slower than the fastest and still hold
GAIN = 0.01  # expected of the best candidate left: below it the fewest are enough


def first_candidate(setting: Setting, results: list[TrialResult]) -> tuple[Candidate, str] | None:
    """The earlier run's pick with the reason, until it was tried."""
    earlier = setting.earlier
    if earlier is None or any(one.candidate == earlier.candidate for one in results):
        return None
    return earlier.candidate, f"the pick of an earlier run, {earlier.run}"


def settled(
    setting: Setting,
    results: list[TrialResult],
    *,
    baseline: TrialResult | None,
    best: TrialResult | None,
    expected_gain: Callable[[], float | None],
) -> str | None:
    """Why the earlier run's result needs no further search, in words; None where it does.

    `expected_gain` tells that of the most promising candidate left, as a share of the best rate; None where it is not
    known.
    """
    earlier = setting.earlier
    if earlier is None or earlier.changed or best is None or baseline is None:
        return None
    pick = next((one for one in results if one.candidate == earlier.candidate), baseline)
    others = [one for one in results if one.candidate not in (earlier.candidate, setting.space.baseline)]
    if len(others) < FEWEST_OTHERS or not _as_before(earlier, pick, baseline=baseline, best=best):
        return None
    if len(others) < MOST_OTHERS and (expected_gain() or 0.0) >= GAIN:
        return None
    return f"what the earlier run found still holds, after {len(others)} others that promised most"


def _as_before(earlier: Earlier, pick: TrialResult, *, baseline: TrialResult, best: TrialResult) -> bool:
    """Whether the pick is the fastest within the noise, and as much faster than the baseline as it was."""
    if not (pick.rate and best.rate and baseline.rate) or pick.rate < (1 - TIE) * best.rate:
        return False
    return earlier.speedup is None or pick.rate / baseline.rate >= AS_FAST_AS_BEFORE * earlier.speedup
