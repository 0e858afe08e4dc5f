"""The predicted cost of candidates, brought to what trials measured, with how far it may be off.

The logarithm of the seconds per useful token is the prediction's (`autotune.plan.cost`) with free constants, plus what
those miss. Every constant has a prior around its value there, so that one trial moves what it tells about and leaves
the rest; what is missed is alike for candidates that are alike (a Gaussian process over the axes: Rasmussen and
Williams 2006, 2.7, explicit basis functions with a prior). The constants are inside a sum, so the fit is linearised
around the last ones a few times (Gauss-Newton). In plain Python: a fit to 30 trials takes 20 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from autotune.plan.cost import THREAD_EXPONENT, Terms
from autotune.plan.space import Arrangement, Candidate
from autotune.search.matrix import cholesky, dot, solve, solve_lower
from autotune.search.prediction import Checked, Predicted
from autotune.trial.result import TrialResult

# How far each constant may be from the prediction's, as the standard deviation of its logarithm
SPEED, OVERHEAD, ATTENTION, RECOMPUTED = 1.0, 1.0, 0.7, 0.5
THREADS = 0.4  # of the exponent itself
OF_AXIS = 0.1  # what another choice of an axis without a term of its own does
OF_ARITHMETIC = 0.3  # the same of those that change the arithmetic
ARITHMETIC = ("dtype", "tf32", "torch_compile", "layer_kernels")
IN_TERMS = ("arrangement", "attention", "checkpointing", "threads")

MISSED = 0.08  # what the terms miss of a candidate
# How alike what is missed of two candidates is, where they differ on one axis
ALIKE = 0.7
ALIKE_ON = {"workers": 0.85, "attention": 0.5}
OTHER_ROWS = 0.3  # arrangements of another kind; of one kind and other sizes they are `ALIKE`

TRIAL_NOISE = 0.02  # between two trials of one candidate, beside what a trial's own steps show
CUT_SHORT = 0.1  # the rate of a pruned trial is that of a few steps
DISTURBED = 0.3  # other processes had the cores
ROUNDS = 4  # of linearisation
LONGEST_STEP = 2.0  # of a constant's logarithm in one of them
EXPECTED_ERRORS = 4.0  # errors as large as expected, that the first real ones are weighed against
MOST_ERRORS = 4.0  # one error counts as so many of its expected size at most


class _Seen(NamedTuple):
    candidate: Candidate
    terms: Terms
    log_seconds: float
    noise: float


class CostFit:
    """A fit to the results told so far. Without any it predicts what the constants say."""

    def __init__(
        self,
        terms: Callable[[Candidate], Terms],
        baseline: Candidate,
        *,
        disturbed: Callable[[TrialResult], bool] = lambda result: result.busy,
    ) -> None:
        """`disturbed` tells whether other processes had what a trial needed: its rate is then little more than a
        hint."""
        self._terms = terms
        self._baseline = baseline
        self._disturbed = disturbed
        self._seen: list[_Seen] = []
        self._constants: dict[str, float] = {}  # logarithms; what is not in it is as predicted
        self._slopes: list[dict[str, float]] = []
        self._alike: list[list[float]] = []  # of the trials seen, what they miss in common
        self._factor: list[list[float]] = []  # Cholesky factor of their covariance
        self._weights: list[float] = []
        self.checked: list[Checked] = []

    def tell(self, result: TrialResult) -> None:
        """A trial has ended; only what has a rate tells something."""
        rate = result.rate or result.partial_rate
        if rate is None or result.outcome not in ("ok", "pruned"):
            return
        disturbed = self._disturbed(result)
        noise = DISTURBED if disturbed else _noise(result)
        if self._seen and not disturbed:
            self._check(result, rate, noise)
        self._forget(result.candidate)
        self._seen.append(_Seen(result.candidate, self._terms(result.candidate), -math.log(rate), noise))
        self._alike.append([_missed_alike(one.candidate, result.candidate) for one in self._seen])
        self._fit()

    @property
    def spread(self) -> float:
        """By how much errors turned out larger than the fit expects them, 1.0 as long as nothing is known."""
        surprises = [min(MOST_ERRORS, abs(one.surprise)) for one in self.checked]
        return math.sqrt((EXPECTED_ERRORS + sum(one * one for one in surprises)) / (EXPECTED_ERRORS + len(surprises)))

    def log_seconds(self, candidate: Candidate, terms: Terms) -> float:
        """What the terms say with the constants as they are: quick, and without what only neighbours tell."""
        constants = self._constants
        computed, overhead, recomputed = self._parts(terms)
        value = math.log(computed + overhead) + math.log1p(recomputed) + math.log(terms.rest)
        if constants:
            value += sum(constants.get(name, 0.0) for name in _choices(candidate, self._baseline))
        return value

    def predict(self, candidate: Candidate) -> Predicted:
        """The best guess, and how far it may be off, before `spread`."""
        terms = self._terms(candidate)
        slopes = self._slopes_of(candidate, terms)
        alone = sum(_variance(name) * slope * slope for name, slope in slopes.items()) + MISSED * MISSED
        value = self.log_seconds(candidate, terms)
        if not self._seen:
            return Predicted(value, math.sqrt(alone))
        missed = [_missed_alike(one.candidate, candidate) for one in self._seen]
        value += dot(missed, self._weights)
        together = [
            _covariance(slopes, other) + in_common for other, in_common in zip(self._slopes, missed, strict=True)
        ]
        known = solve_lower(self._factor, together)
        return Predicted(value, math.sqrt(max(1e-8, alone - dot(known, known))))

    def _check(self, result: TrialResult, rate: float, noise: float) -> None:
        predicted = self.predict(result.candidate)
        surprise = (-math.log(rate) - predicted.log_seconds) / math.hypot(predicted.deviation, noise)
        self.checked.append(
            Checked(result.index, math.exp(-predicted.log_seconds), rate, result.rate is not None, -surprise)
        )

    def _forget(self, candidate: Candidate) -> None:
        """A candidate that is measured again is known by its last trial."""
        for place, one in enumerate(self._seen):
            if one.candidate == candidate:
                del self._seen[place], self._alike[place]
                for row in self._alike[place:]:
                    del row[place]
                return

    def _fit(self) -> None:
        for _ in range(ROUNDS):
            self._slopes = [self._slopes_of(one.candidate, one.terms) for one in self._seen]
            covariance = [
                [_covariance(mine, self._slopes[column]) + self._alike[row][column] for column in range(row + 1)]
                for row, mine in enumerate(self._slopes)
            ]
            for row, one in enumerate(self._seen):
                covariance[row][row] += one.noise * one.noise
            self._factor = cholesky(covariance)
            rest = [
                one.log_seconds
                - self.log_seconds(one.candidate, one.terms)
                + sum(self._constants.get(name, 0.0) * slope for name, slope in slopes.items())
                for one, slopes in zip(self._seen, self._slopes, strict=True)
            ]
            self._weights = solve(self._factor, rest)
            found: dict[str, float] = {}
            for weight, slopes in zip(self._weights, self._slopes, strict=True):
                for name, slope in slopes.items():
                    found[name] = found.get(name, 0.0) + _variance(name) * slope * weight
            moved = {name: _towards(self._constants.get(name, 0.0), value) for name, value in found.items()}
            change = max(abs(value - self._constants.get(name, 0.0)) for name, value in moved.items())
            self._constants = moved
            if change < 1e-3:
                return

    def _parts(self, terms: Terms) -> tuple[float, float, float]:
        """Computed seconds, overhead in seconds and the share recomputed, with the constants as they are."""
        constants = self._constants
        attention = terms.attention * math.exp(constants.get("attention", 0.0) + constants.get(terms.scores, 0.0))
        exponent = THREAD_EXPONENT + constants.get("threads", 0.0)
        computed = (terms.arithmetic + attention) * math.exp(constants.get("speed", 0.0)) / terms.threads**exponent
        return (
            computed,
            terms.overhead * math.exp(constants.get("overhead", 0.0)),
            terms.again * math.exp(constants.get("recomputed", 0.0)),
        )

    def _slopes_of(self, candidate: Candidate, terms: Terms) -> dict[str, float]:
        """The derivative of the logarithm by each constant."""
        constants = self._constants
        computed, overhead, recomputed = self._parts(terms)
        share = computed / (computed + overhead)
        slopes = {"speed": share}
        if overhead:
            slopes["overhead"] = 1.0 - share
        if terms.attention:
            attention = terms.attention * math.exp(constants.get("attention", 0.0) + constants.get(terms.scores, 0.0))
            slopes["attention"] = slopes[terms.scores] = share * attention / (terms.arithmetic + attention)
        if terms.threads > 1:
            slopes["threads"] = -share * math.log(terms.threads)
        if recomputed:
            slopes["recomputed"] = recomputed / (1.0 + recomputed)
        for name in _choices(candidate, self._baseline):
            slopes[name] = 1.0
        return slopes


def _noise(result: TrialResult) -> float:
    """The standard deviation of a rate's logarithm."""
    if result.rate is None:
        return CUT_SHORT
    low, high = result.rate_interval or (result.rate, result.rate)
    return math.hypot(TRIAL_NOISE, (high - low) / 2 / 1.96 / result.rate)


def _choices(candidate: Candidate, baseline: Candidate) -> list[str]:
    """The names of the choices without a term of their own in which a candidate differs from the baseline."""
    names = [
        f"{name} {getattr(candidate, name)}" for name in _OTHERS if getattr(candidate, name) != getattr(baseline, name)
    ]
    if candidate.arrangement.name != baseline.arrangement.name:
        names.append(candidate.arrangement.name)
    return names


_OTHERS = tuple(name for name in Candidate.__struct_fields__ if name not in IN_TERMS)
_PRIORS = {"speed": SPEED, "overhead": OVERHEAD, "attention": ATTENTION, "recomputed": RECOMPUTED, "threads": THREADS}
_PRIORS |= {"causal": ATTENTION, "dense mask": ATTENTION, "written": ATTENTION, "variable length": ATTENTION}


def _variance(name: str) -> float:
    prior = _PRIORS.get(name)
    if prior is None:
        prior = _PRIORS[name] = OF_ARITHMETIC if name.partition(" ")[0] in ARITHMETIC else OF_AXIS
    return prior * prior


def _covariance(one: dict[str, float], other: dict[str, float]) -> float:
    return sum(_variance(name) * slope * other[name] for name, slope in one.items() if name in other)


def _missed_alike(one: Candidate, other: Candidate) -> float:
    """The covariance of what the terms miss of two candidates."""
    alike = MISSED * MISSED * _rows_alike(one.arrangement, other.arrangement)
    for name in Candidate.__struct_fields__[1:]:
        if getattr(one, name) != getattr(other, name):
            alike *= ALIKE_ON.get(name, ALIKE)
    return alike


def _rows_alike(one: Arrangement, other: Arrangement) -> float:
    if one == other:
        return 1.0
    return ALIKE if one.name == other.name and one.padding_free == other.padding_free else OTHER_ROWS


def _towards(value: float, wanted: float) -> float:
    return value + max(-LONGEST_STEP, min(LONGEST_STEP, wanted - value))
