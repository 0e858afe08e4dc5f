"""Factors that bring estimates of memory to what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# How sure the formula is of itself: as if it had been measured once at each factor, that far off.
FIXED_DEVIATION = 0.10  # of the mean peak
FACTOR_DEVIATION = 0.15
MEASURED_DEVIATION = 0.03  # of a peak
SWEEPS = 200


class Measured(msgspec.Struct, frozen=True):
    """One trial: bytes by the formula in three parts, and the peak. `at_least`: it ran out of memory there."""

    fixed: float
    state: float
    batch: float
    peak: float
    at_least: bool = False


class Factors(msgspec.Struct, frozen=True):
    """Peak = fixed + `fixed_bytes` + `state` x state + `batch` x activations and the like."""

    fixed_bytes: float = 0.0
    state: float = 1.0
    batch: float = 1.0

    def of(self, fixed: float, state: float, batch: float) -> float:
        return max(0.0, fixed + self.fixed_bytes) + self.state * state + self.batch * batch


def fit(measured: Sequence[Measured]) -> Factors:
    """The factors with the least squares of relative errors, near (0, 1, 1), none negative.

    A trial that ran out counts only while the factors put it below where it ran out. Coordinate descent on a convex
    function: deterministic, and with three unknowns a few sweeps do.
    """
    if not measured:
        return Factors()
    mean = sum(one.peak for one in measured) / len(measured)
    values = [0.0, 1.0, 1.0]
    centre = [0.0, 1.0, 1.0]
    deviation = [FIXED_DEVIATION, FACTOR_DEVIATION, FACTOR_DEVIATION]
    lowest = [-min(one.fixed for one in measured) / mean, 0.0, 0.0]
    for _ in range(SWEEPS):
        for index in range(3):
            numerator, denominator = centre[index] / deviation[index] ** 2, deviation[index] ** -2
            for one in measured:
                row = (mean / one.peak, one.state / one.peak, one.batch / one.peak)
                rest = one.fixed / one.peak + sum(row[j] * values[j] for j in range(3) if j != index)
                if one.at_least and rest + row[index] * values[index] >= 1.0:
                    continue
                numerator += row[index] * (1.0 - rest) / MEASURED_DEVIATION**2
                denominator += row[index] ** 2 / MEASURED_DEVIATION**2
            values[index] = max(lowest[index], numerator / denominator)
    return Factors(fixed_bytes=values[0] * mean, state=values[1], batch=values[2])
