"""The first steps of a measurement that are still warming up, found by what the later ones take.

The steps before the first pass are left out by number (`Setting.trial`), since the first allocate and compile. How long
that goes on differs, though: an allocator that meets its longest rows late, kernels that are tuned for each new shape,
clocks that come up, workers that start to read. What is slow at the start of the first pass and not after it is no part
of the rate that a training of hours has.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from autotune.events import Step
from autotune.search.statistics import StepCost, fit_step_cost
from autotune.trial.result import Pass

FEWEST_STEPS = 8  # measured, below which nothing is said
MOST_SHARE = 0.5  # of the first pass
BEYOND = 4.0  # deviations of the later steps, and
SLOWER = 0.1  # so much more than what later steps of that size take, as a logarithm
LEAST_DEVIATION = 0.01
NORMAL = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation


def steady(passes: Sequence[Pass], steps: Sequence[Step]) -> tuple[tuple[Pass, ...], list[Step]]:
    """The passes with the steps that were warming up as fast as later ones of their size, and the steps without them.

    `steps` are all that were measured, in order. A pass stays whole, since passes are compared document by document.
    """
    count = warming_up(steps)
    if not count or not passes:
        return tuple(passes), list(steps)
    cost = fit_step_cost(steps[count:])
    saved = sum(one.seconds - _expected(cost, one) for one in steps[:count])
    first = steps[0].pass_index
    mended = tuple(
        msgspec.structs.replace(one, seconds=one.seconds - saved) if one.index == first else one for one in passes
    )
    return mended, list(steps[count:])


def warming_up(steps: Sequence[Step]) -> int:
    """How many steps at the start are slower than the later ones, for their size and beyond the noise of these."""
    if len(steps) < FEWEST_STEPS:
        return 0
    most = int(MOST_SHARE * sum(one.pass_index == steps[0].pass_index for one in steps))
    later = steps[most:]
    cost = fit_step_cost(later)
    if not all(_expected(cost, one) > 0 and one.seconds > 0 for one in steps):
        return 0
    logarithms = [math.log(one.seconds / _expected(cost, one)) for one in steps]
    middle = statistics.median(logarithms[most:])
    apart = statistics.median(abs(one - middle) for one in logarithms[most:])
    limit = middle + max(SLOWER, BEYOND * max(LEAST_DEVIATION, NORMAL * apart))
    for count, one in enumerate(logarithms[:most]):
        if one <= limit:
            return count
    return most


def _expected(cost: StepCost, step: Step) -> float:
    return cost.seconds(micro_batches=step.micro_batches, positions=step.useful_tokens + step.padding_tokens)
