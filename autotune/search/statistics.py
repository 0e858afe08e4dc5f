"""Rates with their uncertainty: what a few noisy steps say, and when they say enough.

Rates are useful tokens per second, taken as all tokens over all seconds: the median of per-step rates is not the
rate, since long and short steps differ by more than the noise. Intervals are 95 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from autotune.events import Step
from autotune.trial.result import Pass

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom (any table of the distribution).
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
# A host shared with others slows a process down for seconds at a time, which the spread inside one short pass does
# not show: no single pass is trusted to better than this (share of the rate).
PASS_NOISE = 0.03
FEWEST_TO_CORRELATE = 6  # pairs, below which neighbours' correlation is not estimated
MOST_CORRELATION = 0.8
# How long a slow spell of a shared host lasts, about: 15 to 110 s were seen, with nothing in /proc/stat
SPELL_SECONDS = 30.0
WIDEST = 4.0  # an interval whose ends are further apart, as a ratio, is not told in numbers


def student_t(degrees: float) -> float:
    """The two-sided 95 % quantile of Student's t; the normal one beyond 30 degrees of freedom."""
    return STUDENT_T[int(degrees) - 1] if degrees <= len(STUDENT_T) else 1.96


class Estimate(msgspec.Struct, frozen=True):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval as a share of the value."""
        return (self.high - self.low) / 2 / self.value if self.value else math.inf

    @property
    def known(self) -> bool:
        """Whether the interval says anything: its ends are less than `WIDEST` apart."""
        return self.low > 0.0 and self.high <= WIDEST * self.low

    def overlaps(self, other: Estimate) -> bool:
        return self.low <= other.high and other.low <= self.high


class StepCost(msgspec.Struct, frozen=True):
    """What a step costs: seconds per micro-batch and per computed position."""

    per_micro_batch: float
    per_position: float

    def seconds(self, *, micro_batches: float, positions: float) -> float:
        return self.per_micro_batch * micro_batches + self.per_position * positions


def fit_step_cost(steps: Sequence[Step]) -> StepCost:
    """Least squares of step seconds on micro-batches and positions, neither below zero.

    With micro-batches and positions in one proportion in every step the two cannot be told apart; all is then put on
    the positions, which is right for what it is used for: correcting between two fills.
    """
    aa = ab = bb = ay = by = 0.0
    for step in steps:
        micro_batches, positions = step.micro_batches, step.useful_tokens + step.padding_tokens
        aa += micro_batches * micro_batches
        ab += micro_batches * positions
        bb += positions * positions
        ay += micro_batches * step.seconds
        by += positions * step.seconds
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        per_micro_batch = (ay * bb - by * ab) / determinant
        per_position = (by * aa - ay * ab) / determinant
        if per_micro_batch >= 0 and per_position >= 0:
            return StepCost(per_micro_batch, per_position)
        if per_position < 0:
            return StepCost(ay / aa, 0.0)
    return StepCost(0.0, by / bb if bb else 0.0)


def correction(cost: StepCost, *, sample: tuple[float, float], whole: tuple[float, float]) -> float:
    """By how much the whole data is faster than the sample: seconds per useful token there over seconds here.

    `sample` and `whole` are (micro-batches, positions) per useful token: the sample's as run, the whole data's from
    the plan of its lengths.
    """
    here = cost.seconds(micro_batches=sample[0], positions=sample[1])
    there = cost.seconds(micro_batches=whole[0], positions=whole[1])
    return here / there if there > 0 else 1.0


def on_whole_data(passes: Sequence[Pass], cost: StepCost, whole: tuple[float, float]) -> tuple[Pass, ...]:
    """Each pass with the seconds it would have taken were its documents padded and packed as the whole data is.

    Every pass visits the same documents in another order, so its padding differs from that of other passes and of
    the data: that is known exactly, and is no noise. `whole` is (micro-batches, positions) per useful token.
    """
    adjusted = []
    for one in passes:
        tokens = one.useful_tokens
        sample = (one.micro_batches / tokens, (tokens + one.padding_tokens) / tokens)
        factor = correction(cost, sample=sample, whole=whole)
        adjusted.append(msgspec.structs.replace(one, seconds=one.seconds / factor))
    return tuple(adjusted)


def rate_of(passes: Sequence[Pass], steps: Sequence[Step]) -> Estimate:
    """The rate over complete passes, with the interval that its steps and passes show.

    Two sources of spread are seen: steps around what their size explains, and passes around each other, both counted as
    `independent` says. The wider interval is taken, and never one narrower than `PASS_NOISE` over the root of the
    passes.
    """
    seconds = sum(one.seconds for one in passes)
    tokens = sum(one.useful_tokens for one in passes)
    rate = tokens / seconds
    relative = PASS_NOISE / math.sqrt(len(passes))
    measured = [step for step in steps if step.pass_index in {one.index for one in passes}]
    if len(measured) > 3:
        cost = fit_step_cost(measured)
        residuals = [
            step.seconds
            - cost.seconds(micro_batches=step.micro_batches, positions=step.useful_tokens + step.padding_tokens)
            for step in measured
        ]
        degrees = len(measured) - 2
        alike = len(measured) / independent(residuals)  # a slow spell makes neighbours alike
        spread = math.sqrt(sum(residual * residual for residual in residuals) / degrees * len(measured) * alike)
        relative = max(relative, student_t(degrees) * spread / sum(step.seconds for step in measured))
    if len(passes) > 1:
        rates = [one.rate for one in passes]
        mean = sum(rates) / len(rates)
        deviation = math.sqrt(sum((one - mean) ** 2 for one in rates) / (len(rates) - 1))
        relative = max(relative, student_t(len(rates) - 1) * deviation / math.sqrt(independent(rates)) / mean)
    relative = min(relative, 0.9)
    return Estimate(rate, rate * (1 - relative), rate * (1 + relative))


def ratio_of(pairs: Sequence[tuple[Pass, Pass]]) -> Estimate:
    """How much faster the second of each pair is: the geometric mean over pairs of passes on the same documents,
    with Student's interval of the logarithms, for as many independent pairs as these are worth. One pair alone has no
    spread: its interval is `PASS_NOISE` each way, doubled for the two passes."""
    logarithms = [math.log(second.rate / first.rate) for first, second in pairs]
    mean = sum(logarithms) / len(logarithms)
    if len(logarithms) == 1:
        half = 2 * PASS_NOISE
    else:
        variance = sum((one - mean) ** 2 for one in logarithms) / (len(logarithms) - 1)
        half = student_t(len(logarithms) - 1) * math.sqrt(variance / independent(logarithms))
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def with_spells(ratio: Estimate, earlier: Estimate, *, seconds: float) -> Estimate:
    """The ratio, its interval wide enough for what the machine did between two looks at the same two candidates.

    Turns share a slow spell, so their own spread does not show one that lasts as long as they do: four rounds of the
    same two arms gave 3.9 and, a minute later, 4.9. The ratio `earlier`, taken at another time, does show it: how far
    the two are apart beyond both their intervals is the spread between spells (DerSimonian and Laird 1986, for two
    studies), of which turns over `seconds` hold one for each `SPELL_SECONDS`.
    """
    if min(ratio.low, earlier.low) <= 0.0:
        return ratio
    variances = [(math.log(one.high / one.low) / 2 / student_t(math.inf)) ** 2 for one in (ratio, earlier)]
    apart = math.log(ratio.value / earlier.value)
    between = max(0.0, (apart * apart - sum(variances)) / 2)
    spells = max(1.0, seconds / SPELL_SECONDS)
    half = student_t(math.inf) * math.sqrt(between / spells)
    return Estimate(
        ratio.value, min(ratio.low, ratio.value * math.exp(-half)), max(ratio.high, ratio.value * math.exp(half))
    )


def independent(values: Sequence[float]) -> float:
    """How many independent values a series is worth: a slow spell that lasts over several makes neighbours alike.

    n (1 - r) / (1 + r) with r the correlation of neighbours, the effective size of a sample from an autoregressive
    process of order one (Bayley and Hammersley, 1946). Too few values show no r: the series is then taken as it is.
    """
    count = len(values)
    mean = sum(values) / count
    spread = sum((one - mean) ** 2 for one in values)
    if count < FEWEST_TO_CORRELATE or spread == 0.0:
        return float(count)
    together = sum((one - mean) * (after - mean) for one, after in itertools.pairwise(values))
    correlation = min(MOST_CORRELATION, max(0.0, together / spread))
    return count * (1 - correlation) / (1 + correlation)


def cannot_reach(steps: Sequence[Step], *, steps_per_pass: int, best_low: float, scale: float = 1.0) -> bool:
    """Whether a pass that began like this cannot end as fast as the best.

    `steps` are the steps of the current pass so far, `scale` how much faster the whole data may be than these. The
    margin is wide at first, since early steps may hold other lengths than the rest, and narrows as the pass goes on:
    60 % after a tenth of it, 12 % after a half, 6 % at the end.
    """
    if len(steps) < 2:
        return False
    tokens = sum(step.useful_tokens for step in steps)
    seconds = sum(step.seconds for step in steps)
    done = min(1.0, len(steps) / max(1, steps_per_pass))
    margin = 0.06 + 0.06 * (1 - done) / max(done, 0.1)
    return scale * tokens / seconds * (1 + min(margin, 0.6)) < best_low
