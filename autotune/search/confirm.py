"""The confirmation: baseline and finalists again, in fresh children, pass by pass in turns.

A host's slow spells last longer than a turn, so two arms that take turns share them, and their ratio is steadier
than either rate. A spell can still slow one arm more than the other: on a virtual machine of two cores, arms of two
threads ran 20 % slower for 15 to 110 s at a time while arms of one thread did not, and nothing in `/proc/stat` showed
it. So the confirmation lasts for some time, however sure the first rounds look. A turn of a fast arm is several passes
long, since a pass of half a second says little on a noisy host. Every round visits the arms in the reverse order of the
one before, which cancels a steady drift.
"""

from __future__ import annotations

import msgspec
import psutil

from autotune.plan.space import Candidate
from autotune.search.measure import (
    POLL_SECONDS,
    conclude,
    corrected_passes,
    disturbed,
    finished,
    forward,
    started,
)
from autotune.search.samples import Sample
from autotune.search.setting import Setting
from autotune.search.statistics import Estimate, ratio_of
from autotune.search.steadiness import steady
from autotune.trial.result import Pass, TrialResult, joined, passes_of
from autotune.trial.runner import Trial

FEWEST_ROUNDS = 4
MOST_ROUNDS = 24
LEAST_SECONDS = 60.0  # and this share of the budget at most
LEAST_SHARE = 0.1
ENOUGH = 0.02  # half the interval of the ratio, as a share of it
MOST_PASSES = 3  # of one arm in one turn
OUTRUN = 0.93  # of the best ratio: an arm below this after a whole round is not measured on


class Arm(msgspec.Struct):
    """One side of the comparison."""

    candidate: Candidate
    trial: Trial
    turn: int  # passes in one turn
    failed: bool = False
    disturbed: set[int] = msgspec.field(default_factory=set)  # rounds in which other processes had the cores

    def passes(self) -> tuple[Pass, ...]:
        return passes_of(self.trial.steps, self.trial.ended_passes)


class Confirmed(msgspec.Struct, frozen=True):
    """Per candidate (the first is what the others are compared with): the ratio, and its result.

    `rounds` are those that count: without the ones in which others had the cores, or all, with `busy`, where these
    are all there are. None where there was no time for one.
    """

    ratios: dict[Candidate, Estimate]
    results: dict[Candidate, TrialResult]
    rounds: int
    seconds: float = 0.0  # from the first turn to the last
    left_out: int = 0
    busy: bool = False


def confirm(
    setting: Setting,
    first_index: int,
    reference: Candidate,
    finalists: list[Candidate],
    sample: Sample,
    *,
    seconds: float,
    measured: dict[Candidate, TrialResult],
    resident_bytes: int,
) -> Confirmed:
    """Compare finalists with the reference, in turns, for at most about `seconds`.

    `measured` is what each gave in the search. With too little time for all the turns are one pass long, then the
    later finalists stay out, and then nothing is started and no round counts.
    All arms stay loaded while they wait where their memory together (`resident_bytes`) fits; otherwise each round
    starts every arm afresh.
    """
    together = resident_bytes < 0.8 * psutil.virtual_memory().available and setting.machine.backend == "cpu"
    candidates = [reference, *finalists]
    turns = {
        one: passes_in_a_turn(_pass_seconds(measured[reference]), _pass_seconds(measured[one])) for one in candidates
    }
    if _first_round_seconds(candidates, measured, turns) > seconds:
        turns = dict.fromkeys(candidates, 1)
    while len(candidates) > 1 and _first_round_seconds(candidates, measured, turns) > seconds:
        candidates.pop()
    if finalists and len(candidates) == 1:
        return Confirmed({}, {}, 0)
    began = setting.clock.now()
    deadline = began + seconds
    arms: list[Arm] = []
    try:
        for place, candidate in enumerate(candidates):
            turn = turns[candidate]
            trial = setting.trial(
                first_index + place, candidate, sample.path, purpose="confirm", passes=MOST_ROUNDS * turn, turns=True
            )
            arms.append(Arm(candidate, trial, turn))
            started(setting, trial, candidate, "in turns with yours" if place else "the reference")
        rounds = 0
        running = list(arms)
        for number in range(1, MOST_ROUNDS + 1):
            round_began = setting.clock.now()
            for arm in running if number % 2 else reversed(running):
                if rounds and setting.clock.now() > deadline:
                    break
                _take_turn(setting, arm, number, fresh=not together)
            if any(arm.failed for arm in running):
                break
            now = setting.clock.now()
            if rounds and now > deadline:
                break
            rounds = number
            running = _in_the_race(setting, running)
            calm = rounds - len(_disturbed_rounds(running))
            enough = calm >= FEWEST_ROUNDS or rounds >= 2 * FEWEST_ROUNDS  # a busy machine may stay so
            if enough and now - began >= least_seconds(setting.budget_seconds) and _sure(setting, running):
                break
            if now + (now - round_began) > deadline:
                break
    finally:
        for arm in arms:
            arm.trial.kill()
    results = {arm.candidate: conclude(setting, arm.trial, arm.candidate) for arm in arms}
    reference_rate = results[reference].rate
    for result in results.values():
        finished(setting, result, reference_rate)
    ratios = {
        arm.candidate: ratio_of(_pairs(setting, arms[0], arm)) for arm in arms[1:] if not arm.failed and rounds > 0
    }
    left_out = len([number for number in _disturbed_rounds(running) if number <= rounds])
    busy = 0 < rounds == left_out
    left_out = 0 if busy else left_out
    return Confirmed(
        ratios if not arms[0].failed else {},
        results,
        rounds - left_out,
        seconds=setting.clock.now() - began,
        left_out=left_out,
        busy=busy,
    )


def least_seconds(budget_seconds: float) -> float:
    """How long a confirmation lasts at least."""
    return min(LEAST_SECONDS, LEAST_SHARE * budget_seconds)


def passes_in_a_turn(reference_seconds: float, arm_seconds: float) -> int:
    """So many passes that a turn of either arm takes about as long."""
    return max(1, min(MOST_PASSES, round(reference_seconds / arm_seconds)))


def _pass_seconds(result: TrialResult) -> float:
    return result.passes[0].seconds


def _first_round_seconds(
    candidates: list[Candidate], measured: dict[Candidate, TrialResult], turns: dict[Candidate, int]
) -> float:
    """What it takes to start all arms and give each its turn."""
    seconds = 0.0
    for candidate in candidates:
        result = measured[candidate]
        a_pass = _pass_seconds(result)
        seconds += (result.startup_seconds or 1.0) + 2 * a_pass / result.passes[0].steps + turns[candidate] * a_pass
    return seconds


def _disturbed_rounds(arms: list[Arm]) -> set[int]:
    return set().union(*(arm.disturbed for arm in arms))


def _take_turn(setting: Setting, arm: Arm, number: int, *, fresh: bool) -> None:
    """Run turn `number` of one arm; marks it as failed when it ends before its turn does."""
    trial = arm.trial
    if arm.failed:
        return
    if number == 1:
        trial.start()
        trial.grant_turns(arm.turn)
    elif fresh:
        _restart(setting, arm)
    else:
        trial.grant_turns(number * arm.turn)
    load = setting.load_meter(arm.trial)
    while number * arm.turn not in arm.trial.ended_passes:
        load.sample()
        if not arm.trial.running:
            arm.failed = True
            return
        if not forward(setting, arm.trial):
            setting.clock.sleep(POLL_SECONDS)
    if disturbed(setting, arm.candidate, load.others()) or setting.gpu_disturbance() is not None:
        arm.disturbed.add(number)
    if fresh:
        arm.trial.kill()
    else:
        arm.trial.rest()


def _restart(setting: Setting, arm: Arm) -> None:
    """A fresh child for the next round; what the ones before measured is kept."""
    arm.trial = setting.again(arm.trial, passes=arm.turn)
    arm.trial.start()
    arm.trial.grant_turns(arm.turn)


def _pairs(setting: Setting, reference: Arm, arm: Arm) -> list[tuple[Pass, Pass]]:
    """The turns of each round, of those in which both had the machine if there are any."""
    pairs = list(zip(_turns(setting, reference), _turns(setting, arm), strict=False))
    busy = reference.disturbed | arm.disturbed
    calm = [pair for number, pair in enumerate(pairs, start=1) if number not in busy]
    return calm or pairs


def _turns(setting: Setting, arm: Arm) -> list[Pass]:
    """What each whole turn measured, the passes in it taken together."""
    steps = [step for step in arm.trial.steps if step.pass_index > 0]
    steady_passes, steps = steady(arm.passes(), steps)
    passes = corrected_passes(setting, arm.candidate, steady_passes, steps)
    whole = len(passes) - len(passes) % arm.turn
    return [joined(passes[first : first + arm.turn]) for first in range(0, whole, arm.turn)]


def _in_the_race(setting: Setting, arms: list[Arm]) -> list[Arm]:
    """The reference, and the arms that may still win; the others are ended, so that these get more turns."""
    ratios = {arm.candidate: ratio_of(_pairs(setting, arms[0], arm)).value for arm in arms[1:]}
    best = max(ratios.values(), default=0.0)
    for arm in arms[1:]:
        if ratios[arm.candidate] < OUTRUN * best:
            arm.trial.kill()
    return arms[:1] + [arm for arm in arms[1:] if ratios[arm.candidate] >= OUTRUN * best]


def _sure(setting: Setting, arms: list[Arm]) -> bool:
    """Whether the best finalist's ratio is known well enough."""
    estimates = [ratio_of(_pairs(setting, arms[0], arm)) for arm in arms[1:]]
    if not estimates:
        return True
    best = max(estimates, key=lambda estimate: estimate.value)
    return best.half_width <= ENOUGH
