"""What a search has found, at its end or at any moment before."""

from __future__ import annotations

import msgspec

from autotune.events import RunOutcome
from autotune.plan.space import Candidate
from autotune.search.gates import Gate
from autotune.search.statistics import Estimate
from autotune.trial.result import TrialResult

UNSURE = "too unsure to tell; try again on an idle machine"


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
    contender: TrialResult | None = None  # the fastest other one, where yours is kept though it was not surely slower
    contender_ratio: Estimate | None = None
    busy: bool = False  # other processes had the cores in every round of the confirmation
    set_aside: tuple[TrialResult, ...] = ()  # trials whose rate does not count
    gates: tuple[Gate, ...] = ()
    in_turns: tuple[TrialResult, ...] = ()  # of the confirmation, the reference first
    memory: tuple[TrialResult, ...] = ()  # of the longest rows: the winner, and the baseline where it ran
    session_index: int = 0  # trials from this one on ran in this session, the others before a resume
    ended: str | None = None  # why no further candidate was tried, in words
    predicted: str | None = None  # how near the predictions came, in words
    search_seconds: float = 0.0
    confirm_seconds: float = 0.0


def why_kept(found: Found) -> str:
    """What there is to say when the user's own settings are delivered."""
    if all(result.candidate == found.winner for result in found.results):
        return "nothing but yours was measured: a longer `--budget`, or more `--trials`, tries others"
    if found.contender is not None and found.contender_ratio is not None:
        ratio, name = found.contender_ratio, f"#{found.contender.index}"
        if ratio.value <= 1.0:
            return (
                f"{name} was faster than yours in the search and {ratio.value:.2f}x as fast in turns with it"
                f"{', on a busy machine' if found.busy else ''}: {UNSURE}"
            )
        if not ratio.known:
            return f"whether {name} is faster than yours is not known: {UNSURE}"
        if not found.confirmed_rounds:
            return (
                f"{name} came out {ratio.value:.2f}x as fast as yours, but was neither confirmed nor checked to be the "
                "same training, so nothing is changed: go on with a longer `--budget`"
            )
        return (
            f"{name} came out {ratio.value:.2f}x as fast as yours, and {ratio.low:.2f} to {ratio.high:.2f} is too "
            "unsure to change anything: try again on an idle machine or with a longer `--budget`"
        )
    return "nothing beat yours beyond the noise"


def estimate_of(result: TrialResult) -> Estimate:
    """The rate of a trial that has one, with its interval."""
    low, high = result.rate_interval or (result.rate or 0.0, result.rate or 0.0)
    return Estimate(result.rate or 0.0, low, high)


def unconfirmed(baseline: TrialResult, best: TrialResult) -> Estimate:
    """The ratio of two rates measured one after the other, with the widest interval their own allow."""
    mine, theirs = estimate_of(best), estimate_of(baseline)
    return Estimate(mine.value / theirs.value, mine.low / theirs.high, mine.high / theirs.low)
