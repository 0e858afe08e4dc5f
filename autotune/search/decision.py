"""The end of a search: the finalists and the baseline once more, in turns, and the checks; best first, until one passes
them all."""

from __future__ import annotations

from autotune.plan.space import Candidate
from autotune.search.confirm import Confirmed, confirm
from autotune.search.failures import describe_failure
from autotune.search.finals import check, finalists
from autotune.search.record import Record
from autotune.search.samples import Sample
from autotune.search.stopping import seconds_to_check
from autotune.trial.result import TrialResult

NO_TIME_TO_CHECK = "the budget is used up before it could be checked"


def decide(record: Record, sample: Sample) -> None:
    """Leave in the record what was confirmed, the gates of the winner, and its memory trial."""
    gates_failed = 0
    known: dict[tuple[Candidate, str], float] = {}
    while chosen := finalists(record.setting, record.results, baseline_runs=record.baseline is not None):
        baseline = record.baseline
        reference = record.setting.space.baseline if baseline is not None else chosen[0].candidate
        confirmed = None
        if not (gates_failed and baseline is not None and record.setting.seconds_left() <= 0):
            confirmed = _in_turns(record, chosen, reference, sample)
        if confirmed is None:
            _without_time(record, chosen, any_failed=gates_failed > 0)
            return
        if _dropped(record, confirmed, reference):
            continue
        record.confirmed = confirmed if baseline is not None else None
        winner = record.found().winner
        gates, worst = check(record.setting, winner, confirmed, sample, take_index=record.take_index, known=known)
        if worst is not None:
            record.memory.append(worst)
        if all(gate.passed for gate in gates):
            record.gates = gates
            return
        gates_failed += 1
        record.drop(winner, "; ".join(f"{gate.name}: {gate.detail}" for gate in gates if not gate.passed))
        record.confirmed = None


def _in_turns(record: Record, chosen: list[TrialResult], reference: Candidate, sample: Sample) -> Confirmed | None:
    """The confirmation; None where no time is left for a round of it."""
    setting, baseline = record.setting, record.baseline
    others = [one.candidate for one in chosen if one.candidate != reference]
    first_index = record.next_index
    record.next_index += 1 + len(others)
    confirmed = confirm(
        setting,
        first_index,
        reference,
        others,
        sample,
        seconds=setting.seconds_left() - seconds_to_check(setting, baseline or record.best),
        measured={one.candidate: one for one in record.results if one.passes},
        resident_bytes=sum(one.peak_bytes or 0 for one in (*chosen, *((baseline,) if baseline else ()))),
    )
    if not confirmed.rounds and not confirmed.results:
        return None
    _tell_of_others(record, confirmed)
    return confirmed


def _without_time(record: Record, chosen: list[TrialResult], *, any_failed: bool) -> None:
    if not any_failed:
        record.note("what is left of the budget is too short to confirm or check anything")
    elif record.baseline is not None:
        for one in chosen:
            record.drop(one.candidate, NO_TIME_TO_CHECK)


def _dropped(record: Record, confirmed: Confirmed, reference: Candidate) -> bool:
    """Whether a finalist did not run again, and is out."""
    failed = [
        (candidate, result)
        for candidate, result in confirmed.results.items()
        if result.rate is None and candidate != reference
    ]
    for candidate, result in failed:
        record.drop(candidate, f"did not run again: {describe_failure(result)}")
    return bool(failed)


def _tell_of_others(record: Record, confirmed: Confirmed) -> None:
    if confirmed.busy:
        record.note("other processes had the cores in every round of the confirmation", topic="best")
    elif confirmed.left_out:
        rounds = confirmed.rounds + confirmed.left_out
        record.note(
            f"{confirmed.left_out} of {rounds} rounds are left out: other processes had the cores", topic="best"
        )
