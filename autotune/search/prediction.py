"""What a prediction of a candidate's speed is worth: how far it may be off, what trying it is expected to gain, and how
near earlier predictions came."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

FEWEST_TO_TELL = 3  # predictions, before it is said how near they came


class Predicted(NamedTuple):
    """Seconds per useful token of a candidate: the logarithm, and its standard deviation."""

    log_seconds: float
    deviation: float


class Checked(msgspec.Struct, frozen=True):
    """What was predicted of a candidate before it was measured, in useful tokens per second."""

    index: int
    predicted: float
    measured: float
    whole: bool  # measured over a whole pass: the rate of one that was cut short is no more than a hint
    surprise: float  # the logarithm of measured over predicted, in its standard deviations

    @property
    def error(self) -> float:
        """How far off it was, as a share of what was measured."""
        return abs(self.predicted / self.measured - 1.0)


def expected_gain(best: Predicted, other: Predicted, *, spread: float) -> float:
    """The mean of how much faster `other` turns out to be than the best, as a logarithm, 0 where it is slower: expected
    improvement (Jones et al. 1998, equation 15), with Student's t of 4 degrees of freedom for the normal distribution,
    of the same variance: the spread is known from few errors, and a prediction far behind is wrong more often than a
    normal one would be."""
    scale = other.deviation * spread / math.sqrt(2.0)
    ahead = (best.log_seconds - other.log_seconds) / scale
    wide = 1.0 + ahead * ahead / 4
    density = 0.375 * wide**-2.5
    share = ahead / math.sqrt(wide)
    below = 0.5 + 0.375 * share * (1.0 - share * share / 12)
    gain: float = scale * ((4.0 + ahead * ahead) / 3 * density + ahead * below)
    return max(0.0, gain)


def describe_errors(checked: Sequence[Checked]) -> str | None:
    """One line: how near the predictions came; None with too few to tell."""
    checked = [one for one in checked if one.whole]
    if len(checked) < FEWEST_TO_TELL:
        return None
    median = statistics.median(one.error for one in checked)
    most = max(checked, key=lambda one: one.error)
    return (
        f"each setting's speed was predicted from the trials before it: half of {len(checked)} predictions were within "
        f"{median:.0%} of what was measured, the worst (#{most.index}) {most.error:.0%} off"
    )
