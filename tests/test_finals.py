"""Who goes into the confirmation: the fastest, and one that may be as fast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from autotune.plan.space import Arrangement, Axis, Candidate, Choice, Space
from autotune.search.finals import finalists
from autotune.search.setting import Setting
from autotune.trial.result import TrialResult

YOURS = Candidate(Arrangement("padded", 8, 1), attention="sdpa", checkpointing="full", workers=0, threads=1)
SPLIT = Candidate(Arrangement("padded", 1, 8), attention="sdpa", checkpointing="off", workers=0, threads=2)
BALANCED = Candidate(Arrangement("batch_rebalance", 2, 4), attention="sdpa", checkpointing="off", workers=0, threads=2)
PACKED = Candidate(Arrangement("bfd", 1, 2, 512), attention="sdpa", checkpointing="off", workers=0, threads=2)


def setting() -> Setting:
    """As much of one as choosing finalists looks at."""
    grades: dict[Any, Any] = {YOURS: "exact", SPLIT: "exact", BALANCED: "exact", PACKED: "regrouped"}
    axes = (Axis("arrangement", tuple(Choice(one.arrangement, grade, "") for one, grade in grades.items())),)
    return cast("Setting", SimpleNamespace(space=Space(YOURS, axes, 1000.0)))


def measured(candidate: Candidate, rate: float, spread: float = 0.0) -> TrialResult:
    return TrialResult(
        index=0,
        purpose="speed",
        candidate=candidate,
        label="",
        outcome="ok",
        rate=rate,
        rate_interval=(rate - spread, rate + spread),
    )


def chosen(*results: TrialResult) -> list[Candidate]:
    return [one.candidate for one in finalists(setting(), list(results), baseline_runs=True)]


def test_one_that_is_far_behind_is_not_confirmed() -> None:
    assert chosen(measured(YOURS, 1000), measured(SPLIT, 5000), measured(BALANCED, 4000, 100)) == [SPLIT]


def test_one_that_is_near_is_confirmed_beside_the_fastest() -> None:
    assert chosen(measured(YOURS, 1000), measured(SPLIT, 5000), measured(BALANCED, 4900)) == [SPLIT, BALANCED]


def test_a_lucky_pass_does_not_stand_alone_beside_one_that_is_known_badly() -> None:
    assert chosen(measured(YOURS, 1000), measured(SPLIT, 5300, 1260), measured(BALANCED, 4930, 397)) == [
        SPLIT,
        BALANCED,
    ]


def test_of_those_that_are_near_the_safest_grade_goes_along() -> None:
    assert chosen(measured(YOURS, 1000), measured(BALANCED, 5000), measured(PACKED, 4990), measured(SPLIT, 4900)) == [
        BALANCED,
        SPLIT,
    ]


def test_one_that_is_near_goes_before_one_that_only_may_be() -> None:
    assert chosen(
        measured(YOURS, 1000), measured(BALANCED, 5000), measured(PACKED, 4990), measured(SPLIT, 4500, 400)
    ) == [
        BALANCED,
        PACKED,
    ]
