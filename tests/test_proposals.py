"""In what order candidates are tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec
import pytest

from autotune.events import Outcome
from autotune.plan.space import Arrangement, Axis, Candidate, Choice, Space
from autotune.search.proposals import MOST_PREDICTED, PREDICTED_WITHIN, Proposals, needs_as_much_memory
from autotune.trial.result import TrialResult

Rate = Callable[[Candidate], float]

PADDED = [Arrangement("padded", micro_batch, 8 // micro_batch) for micro_batch in (8, 4, 2, 1)]
PACKED = [Arrangement("bfd", 1, 2, 512), Arrangement("bfd", 2, 1, 512), Arrangement("bfd", 1, 1, 1024)]
BASELINE = Candidate(arrangement=PADDED[0], attention="sdpa", checkpointing="full", workers=0)


def space(arrangements: Iterable[Arrangement] = (*PADDED, *PACKED)) -> Space:
    def axis(name: str, *values: object) -> Axis:
        return Axis(name, tuple(Choice(value, "exact", "as good as any") for value in values))

    return Space(
        BASELINE,
        (
            axis("arrangement", *arrangements),
            axis("attention", "sdpa", "eager"),
            axis("checkpointing", "full", "off"),
            axis("workers", 0, 1),
        ),
        460.0,
    )


def cost(candidate: Candidate) -> float:
    """Seconds per token: packed rows are twice as fast, no checkpointing a quarter; the rest costs a little."""
    seconds = 1.0 if candidate.arrangement.packed else 2.0
    seconds *= 1.0 if candidate.checkpointing == "off" else 1.25
    seconds *= 1.0 if candidate.attention == "sdpa" else 1.1
    return seconds + 0.01 * candidate.workers + 0.02 * candidate.arrangement.accumulation


def result(index: int, candidate: Candidate, rate: float | None, outcome: Outcome = "ok") -> TrialResult:
    return TrialResult(
        index=index,
        purpose="speed",
        candidate=candidate,
        label=str(candidate),
        outcome=outcome,
        rate=rate if outcome == "ok" else None,
        partial_rate=rate if outcome == "pruned" else None,
    )


def search(
    proposals: Proposals, rate: Rate, outcome: Callable[[int], Outcome] = lambda index: "ok", *, trials: int = 1000
) -> list[tuple[Candidate, str]]:
    """Tell the baseline, then try what is proposed until nothing is left."""
    proposals.tell(result(0, BASELINE, rate(BASELINE)))
    tried = []
    for index in range(1, trials + 1):
        proposal = proposals.next()
        if proposal is None:
            break
        tried.append(proposal)
        proposals.tell(result(index, proposal[0], rate(proposal[0]), outcome(index)))
    return tried


def test_as_long_as_nothing_ran_the_best_predicted_of_each_arrangement_come_first() -> None:
    proposals = Proposals(space(), cost)
    tried = search(proposals, lambda one: 0.0, lambda index: ("error", "killed", "hung")[index % 3])
    first = [candidate for candidate, reason in tried if reason == "predicted among the fastest"]
    assert [one for one, _ in tried[: len(first)]] == first
    assert len(first) <= MOST_PREDICTED
    best = cost(first[0])
    assert [cost(one) for one in first] == sorted(cost(one) for one in first)
    assert all(cost(one) <= best * PREDICTED_WITHIN for one in first)
    assert {one.arrangement for one in first} == set(PACKED)
    for one in first:
        assert (one.attention, one.checkpointing, one.workers) == ("sdpa", "off", 0)


def test_the_fastest_by_prediction_is_tried_first_where_measurements_bear_it_out() -> None:
    (first, reason), *_ = search(Proposals(space(), cost), lambda one: 1 / cost(one))
    assert first == min(space().candidates(), key=cost)
    assert reason.startswith("predicted 2.")
    assert "x the best so far, give or take" in reason


def test_a_surprise_brings_those_to_the_front_that_are_like_it() -> None:
    """Against every prediction eager attention is three times as fast: once one was tried, the others follow."""

    def rate(candidate: Candidate) -> float:
        return 1 / cost(candidate) * (3.0 if candidate.attention == "eager" else 1.0)

    tried = [candidate for candidate, _ in search(Proposals(space(), cost), rate)]
    place = next(place for place, candidate in enumerate(tried) if candidate.attention == "eager")
    assert place < 6
    assert {candidate.attention for candidate in tried[place + 1 : place + 5]} == {"eager"}
    best = max(space().candidates(), key=rate)
    assert best in tried[place : place + 3]


def test_of_equal_predictions_the_one_that_changes_less_comes_first() -> None:
    first = Proposals(space(), lambda one: 1.0).next()
    assert first is not None
    assert first[0] == BASELINE


@pytest.mark.parametrize("outcome", ["ok", "error", "pruned"])
def test_every_candidate_is_proposed_once(outcome: Outcome) -> None:
    here = space()
    tried = [candidate for candidate, _ in search(Proposals(here, cost), lambda one: 1 / cost(one), lambda _: outcome)]
    assert len(tried) == len(set(tried)) == here.size - 1
    assert set(tried) | {BASELINE} == set(here.candidates())


def test_the_same_results_give_the_same_proposals() -> None:
    outcomes: list[Outcome] = ["ok", "error", "pruned", "ok", "hung"]

    def run(seed: int) -> list[tuple[Candidate, str]]:
        return search(Proposals(space(), cost, seed=seed), lambda one: 1 / cost(one), lambda index: outcomes[index % 5])

    assert run(0) == run(0)
    assert {candidate for candidate, _ in run(0)} == {candidate for candidate, _ in run(1)}


def test_tpe_goes_on_when_the_prediction_has_nothing_more_to_gain() -> None:
    tried = search(Proposals(space(), cost), lambda one: 1 / cost(one))
    reasons = ["predicted" if reason.startswith("predicted") else reason for _, reason in tried]
    kinds = [reason for reason, _ in itertools.groupby(reasons)]
    assert kinds[0] == "predicted"
    assert "proposed by TPE" in kinds
    assert reasons.count("predicted") < len(tried) / 2


def test_what_the_next_trial_may_gain_is_known_once_something_ran_and_falls() -> None:
    proposals = Proposals(space(), cost)
    assert proposals.expected_gain() is None
    proposals.tell(result(0, BASELINE, 1 / cost(BASELINE)))
    first = proposals.expected_gain()
    assert first is not None
    assert first > 0.5
    search(proposals, lambda one: 1 / cost(one), trials=12)
    last = proposals.expected_gain()
    assert last is not None
    assert last < 0.01


def test_tpe_learns_from_finished_and_pruned_trials_and_bears_failed_ones() -> None:
    """Only eager attention without workers is fast, against every prediction: half way it has been found out."""
    outcomes: list[Outcome] = ["ok", "pruned", "error"]

    def rate(candidate: Candidate) -> float:
        return 5.0 if candidate.attention == "eager" and not candidate.workers else 1.0

    tried = search(
        Proposals(space(), lambda one: 1.0), rate, lambda index: outcomes[index % 3], trials=space().size // 2
    )
    fast = sum(rate(candidate) > 1 for candidate, _ in tried)
    assert fast > len(tried) / 4 * 1.3


def test_what_was_measured_beside_others_may_be_proposed_again() -> None:
    proposals = Proposals(space(), cost)
    proposals.tell(result(0, BASELINE, 1 / cost(BASELINE)))
    first = proposals.next()
    assert first is not None
    disturbed = msgspec.structs.replace(result(1, first[0], 1 / cost(first[0])), busy=True)
    proposals.tell(disturbed)
    assert first[0] in [candidate for candidate, _ in search(proposals, lambda one: 1 / cost(one))]


def test_all_trials_failing_is_no_reason_to_stop_proposing() -> None:
    proposals = Proposals(space(), cost)
    proposals.tell(result(0, BASELINE, None, "error"))
    tried = search(proposals, lambda one: 0.0, lambda _: "error")
    assert len(tried) == space().size - 1


def test_a_choice_that_only_fails_is_left_for_the_end() -> None:
    """Eager attention is predicted to be fastest, and always fails; what else is there is tried before the third."""

    def by_constants(candidate: Candidate) -> float:
        return cost(candidate) * (0.7 if candidate.attention == "eager" else 1.0)

    proposals = Proposals(space(), by_constants)
    proposals.tell(result(0, BASELINE, 1 / cost(BASELINE)))
    tried = []
    for index in range(1, 40):
        proposal = proposals.next()
        assert proposal is not None
        candidate = proposal[0]
        tried.append(candidate)
        fails = candidate.attention == "eager"
        proposals.tell(result(index, candidate, 1 / cost(candidate), "error" if fails else "ok"))
    assert tried[0].attention == "eager"
    assert sum(one.attention == "eager" for one in tried[:10]) <= 5
    assert min(space().candidates(), key=lambda one: (one.attention == "eager", cost(one))) in tried[:12]


def test_out_of_memory_rules_out_what_needs_at_least_as_much() -> None:
    proposals = Proposals(space(), cost)
    failed = msgspec.structs.replace(BASELINE, arrangement=Arrangement("padded", 4, 2))
    before = proposals.left
    proposals.tell(result(3, failed, None, "oom"))
    ruled_out = proposals.ruled_out
    assert {one.arrangement.micro_batch for one in ruled_out} == {4, 8}
    assert {one.attention for one in ruled_out} == {"sdpa"}
    assert {one.arrangement.name for one in ruled_out} == {"padded"}
    assert set(ruled_out.values()) == {"needs at least the memory of #3, which ran out"}
    assert failed not in ruled_out
    assert proposals.left == before - 1 - len(ruled_out)
    rest = {candidate for candidate, _ in search(proposals, lambda one: 1 / cost(one))}
    assert not rest & {failed, *ruled_out}


@pytest.mark.parametrize(
    ("changes", "as_much"),
    [
        ({}, True),
        ({"arrangement": Arrangement("bfd", 4, 1, 512)}, True),
        ({"arrangement": Arrangement("bfd", 2, 1, 1024)}, True),
        ({"arrangement": Arrangement("bfd", 1, 2, 512)}, False),
        ({"arrangement": Arrangement("bfd", 2, 1, 256)}, False),
        ({"arrangement": Arrangement("bfd_split", 2, 1, 512)}, False),
        ({"attention": "eager"}, False),
        ({"checkpointing": "full"}, False),
        ({"workers": 1}, True),
    ],
)
def test_memory_is_compared_only_where_it_can_be(changes: dict[str, object], as_much: bool) -> None:
    failed = Candidate(arrangement=Arrangement("bfd", 2, 1, 512), attention="sdpa", checkpointing="off", workers=0)
    assert needs_as_much_memory(msgspec.structs.replace(failed, **changes), failed) is as_much


def test_without_checkpointing_more_is_held_than_with_it() -> None:
    failed = Candidate(arrangement=PADDED[0], attention="sdpa", checkpointing="full", workers=0)
    assert needs_as_much_memory(msgspec.structs.replace(failed, checkpointing="off"), failed)
