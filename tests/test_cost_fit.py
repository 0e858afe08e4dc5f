"""The fit of the predicted cost to what trials measured."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from autotune.plan.cost import Terms
from autotune.plan.space import Arrangement, Candidate
from autotune.search import matrix
from autotune.search.cost_fit import CostFit
from autotune.search.prediction import Predicted, describe_errors, expected_gain
from autotune.trial.result import TrialResult

ARRANGEMENTS = [
    *(Arrangement("padded", micro_batch, 8 // micro_batch) for micro_batch in (8, 4, 2, 1)),
    *(Arrangement("bfd", micro_batch, 2 // micro_batch, 512) for micro_batch in (2, 1)),
]
CANDIDATES = [
    Candidate(
        arrangement=arrangement, attention=attention, checkpointing=checkpointing, workers=workers, threads=threads
    )
    for arrangement in ARRANGEMENTS
    for attention in ("sdpa", "eager")
    for checkpointing in ("full", "off")
    for workers in (0, 1)
    for threads in (1, 2)
]
BASELINE = CANDIDATES[0]


def terms(candidate: Candidate) -> Terms:
    arrangement = candidate.arrangement
    padding = 1.0 if arrangement.packed else 1.0 + 0.2 * math.log2(2 * arrangement.micro_batch)
    return Terms(
        arithmetic=1e-3 * padding,
        attention=1e-4 * padding * (arrangement.micro_batch if arrangement.packed else 1),
        scores="written" if candidate.attention == "eager" else "dense mask" if arrangement.packed else "causal",
        overhead=1e-4 * arrangement.accumulation,
        again=1 / 3 if candidate.checkpointing == "full" else 0.0,
        threads=candidate.threads or 1,
    )


def truth(candidate: Candidate) -> float:
    """Another machine than the constants are of: faster, with more overhead, fewer gains by threads, and workers that
    take something."""
    told = terms(candidate)
    computed = (told.arithmetic + 5 * told.attention) / 3 / told.threads**0.5
    seconds: float = (computed + 1.5 * told.overhead) * (1 + 0.6 * told.again)
    return seconds * (1.08 if candidate.workers else 1.0)


def result(index: int, candidate: Candidate, seconds: float, **changes: object) -> TrialResult:
    rate = 1 / seconds
    made = TrialResult(
        index=index,
        purpose="speed",
        candidate=candidate,
        label=str(candidate),
        outcome="ok",
        rate=rate,
        rate_interval=(0.97 * rate, 1.03 * rate),
    )
    return msgspec.structs.replace(made, **changes)


def test_without_a_trial_the_constants_are_what_is_predicted() -> None:
    fit = CostFit(terms, BASELINE)
    for candidate in CANDIDATES:
        assert math.exp(fit.predict(candidate).log_seconds) == pytest.approx(terms(candidate).seconds)


def test_one_trial_moves_the_level_and_leaves_most_of_the_order() -> None:
    fit = CostFit(terms, BASELINE)
    fit.tell(result(0, BASELINE, 10 * terms(BASELINE).seconds))
    assert math.exp(fit.predict(BASELINE).log_seconds) == pytest.approx(10 * terms(BASELINE).seconds, rel=0.05)
    like = msgspec.structs.replace(BASELINE, checkpointing="off")
    ratio = math.exp(fit.predict(like).log_seconds - fit.predict(BASELINE).log_seconds)
    assert ratio == pytest.approx(0.75, rel=0.1)
    assert fit.predict(like).deviation < 0.2 < fit.predict(CANDIDATES[-1]).deviation


def test_a_dozen_noisy_trials_predict_the_rest_within_a_few_percent() -> None:
    chance = random.Random(3)
    fit = CostFit(terms, BASELINE)
    tried = [BASELINE, *chance.sample(CANDIDATES[1:], 14)]
    for index, candidate in enumerate(tried):
        fit.tell(result(index, candidate, truth(candidate) * chance.lognormvariate(0.0, 0.015)))
    rest = [candidate for candidate in CANDIDATES if candidate not in tried]
    errors = sorted(abs(math.exp(fit.predict(one).log_seconds) / truth(one) - 1) for one in rest)
    by_constants = sorted(abs(terms(one).seconds / truth(one) - 1) for one in rest)
    assert errors[len(errors) // 2] < 0.05
    assert errors[-1] < 0.25
    assert by_constants[len(rest) // 2] > 0.2


def test_errors_are_as_large_as_they_are_said_to_be() -> None:
    """Of the predictions made before each trial, over several orders of trials: about two thirds within one standard
    deviation, and few beyond three."""
    surprises = []
    for seed in range(4):
        chance = random.Random(seed)
        fit = CostFit(terms, BASELINE)
        for index, candidate in enumerate([BASELINE, *chance.sample(CANDIDATES[1:], 20)]):
            fit.tell(result(index, candidate, truth(candidate) * chance.lognormvariate(0.0, 0.015)))
        assert 0.3 < fit.spread < 1.5
        surprises += [abs(one.surprise) for one in fit.checked]
    assert sum(one < 1 for one in surprises) > 0.6 * len(surprises)
    assert sum(one > 3 for one in surprises) < 0.05 * len(surprises)


def test_a_trial_that_was_cut_short_or_disturbed_tells_less_and_a_failed_one_nothing() -> None:
    def after(**changes: object) -> Predicted:
        fit = CostFit(terms, BASELINE)
        fit.tell(result(0, BASELINE, truth(BASELINE)))
        fit.tell(result(1, CANDIDATES[-1], 2 * truth(CANDIDATES[-1]), **changes))
        return fit.predict(CANDIDATES[-1])

    whole = after()
    short = after(outcome="pruned", partial_rate=0.5 / truth(CANDIDATES[-1]), rate=None)
    busy = after(busy=True)
    failed = after(outcome="error", rate=None)
    assert whole.log_seconds > short.log_seconds > busy.log_seconds > failed.log_seconds
    assert whole.deviation < short.deviation < busy.deviation < failed.deviation


def test_a_candidate_that_is_measured_again_is_known_by_its_last_trial() -> None:
    fit, once = CostFit(terms, BASELINE), CostFit(terms, BASELINE)
    for one in (result(0, BASELINE, 1.0), result(1, CANDIDATES[9], 0.5), result(2, CANDIDATES[20], 0.7)):
        fit.tell(one)
    fit.tell(result(3, CANDIDATES[9], 0.3))
    for one in (result(0, BASELINE, 1.0), result(2, CANDIDATES[20], 0.7), result(3, CANDIDATES[9], 0.3)):
        once.tell(one)
    for candidate in CANDIDATES[::7]:
        assert fit.predict(candidate).log_seconds == pytest.approx(once.predict(candidate).log_seconds, abs=0.01)


def test_how_near_predictions_came_is_told_from_what_was_measured_whole() -> None:
    fit = CostFit(terms, BASELINE)
    assert describe_errors(fit.checked) is None
    for index, candidate in enumerate([BASELINE, *CANDIDATES[5:30:6]]):
        fit.tell(result(index, candidate, truth(candidate)))
    fit.tell(result(9, CANDIDATES[-1], 1.0, outcome="pruned", rate=None, partial_rate=1e-3))
    told = describe_errors(fit.checked)
    assert told is not None
    assert "half of 5 predictions were within" in told
    assert "#9" not in told


def test_the_expected_gain_is_the_mean_of_what_would_be_faster() -> None:
    chance = random.Random(1)
    best, other = Predicted(-5.0, 0.0), Predicted(-4.95, 0.08)
    gains = []
    for _ in range(40_000):
        student = chance.gauss(0.0, 1.0) / math.sqrt(sum(chance.gauss(0.0, 1.0) ** 2 for _ in range(4)) / 4)
        gains.append(max(0.0, best.log_seconds - other.log_seconds - 0.16 / math.sqrt(2) * student))
    assert expected_gain(best, other, spread=2.0) == pytest.approx(sum(gains) / len(gains), rel=0.03)
    assert expected_gain(best, Predicted(-5.3, 1e-4), spread=1.0) == pytest.approx(0.3)
    assert 0.0 < expected_gain(best, Predicted(-4.0, 0.05), spread=1.0) < 1e-5


def test_equations_are_solved() -> None:
    lower = [[4.0], [2.0, 5.0], [0.5, -1.0, 3.0]]
    factor = matrix.cholesky(lower)
    x = [1.0, -2.0, 3.0]
    whole = [[lower[max(i, j)][min(i, j)] for j in range(3)] for i in range(3)]
    right = [sum(a * b for a, b in zip(row, x, strict=True)) for row in whole]
    assert matrix.solve(factor, right) == pytest.approx(x)
    with pytest.raises(ValueError, match=r"math domain|nonnegative"):
        matrix.cholesky([[1.0], [2.0, 1.0]])
