"""What a search does with estimates of memory: what is tried last, what is not tried, and what trials teach it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.children import Children
from autotune.events import Outcome
from autotune.plan.activations import MicroBatch
from autotune.plan.data import Data
from autotune.plan.memory import terms_of
from autotune.plan.memory_room import Room
from autotune.plan.space import Arrangement, Axis, Candidate, Choice, Space
from autotune.search.memory_use import MemoryUse
from autotune.search.proposals import Proposals
from autotune.search.samples import Sample
from autotune.search.setting import Setting
from autotune.trial.result import TrialResult
from tests import parts
from tests.test_memory import QWEN_0_6B, job

GB = 10**9
PADDED = [Arrangement("padded", micro_batch, 8 // micro_batch) for micro_batch in (1, 2, 4, 8)]
BASELINE = Candidate(arrangement=PADDED[0], attention="sdpa", checkpointing="off", workers=0)
FITS = Room("fits")
TIGHT = Room("tight")
NONE = Room("none", "needs about 31 GB (est.), 24 GB are free")

Rooms = Callable[[Candidate], Room]


def space(*, baseline: Candidate = BASELINE) -> Space:
    axes = (
        Axis("arrangement", tuple(Choice(one, "exact", "as good as any") for one in PADDED)),
        Axis("attention", (Choice("sdpa", "exact", ""), Choice("eager", "exact", ""))),
        Axis("checkpointing", (Choice("off", "exact", ""), Choice("full", "exact", ""))),
    )
    return Space(baseline, axes, 460.0)


def result(candidate: Candidate, outcome: Outcome = "ok", *, peak_bytes: int | None = None) -> TrialResult:
    return TrialResult(
        index=3,
        purpose="speed",
        candidate=candidate,
        label=str(candidate),
        outcome=outcome,
        rate=1.0 if outcome == "ok" else None,
        peak_bytes=peak_bytes,
    )


def proposed(proposals: Proposals, outcome: Callable[[Candidate], Outcome] = lambda _: "ok") -> list[Candidate]:
    tried = []
    while (proposal := proposals.next()) is not None:
        tried.append(proposal[0])
        proposals.tell(result(proposal[0], outcome(proposal[0])))
    return tried


def by_rows(verdicts: dict[int, Room]) -> Rooms:
    return lambda candidate: verdicts.get(candidate.arrangement.micro_batch, FITS)


def test_what_may_not_fit_is_tried_after_everything_that_does() -> None:
    def cost(candidate: Candidate) -> float:
        return 1.0 / candidate.arrangement.micro_batch  # the most rows are predicted to be fastest

    def room(candidate: Candidate) -> Room:
        return TIGHT if candidate.arrangement.micro_batch == 8 else FITS

    proposals = Proposals(space(), cost, room=room)
    tried = proposed(proposals, lambda one: "error" if one.arrangement.micro_batch < 8 else "ok")
    assert {one.arrangement.micro_batch for one in tried[:12]} == {1, 2, 4}
    assert {one.arrangement.micro_batch for one in tried[12:]} == {8}
    assert not proposals.ruled_out


def test_the_first_of_an_arrangement_is_the_best_that_fits() -> None:
    def cost(candidate: Candidate) -> float:
        return 1.25 if candidate.checkpointing == "full" else 1.0

    def room(candidate: Candidate) -> Room:
        large = candidate.arrangement.micro_batch == 8 and candidate.checkpointing == "off"
        return TIGHT if large else FITS

    proposals = Proposals(space(), cost, room=room)
    tried = []
    while (proposal := proposals.next()) is not None and proposal[1] == "predicted among the fastest":
        tried.append(proposal[0])
        proposals.tell(result(proposal[0], "pruned"))
    assert [(one.arrangement.micro_batch, one.checkpointing) for one in tried] == [
        (1, "off"),
        (2, "off"),
        (4, "off"),
        (8, "full"),
    ]


def test_what_is_far_beyond_is_not_tried_and_the_figure_is_said() -> None:
    proposals = Proposals(space(), lambda one: 1.0, room=by_rows({8: NONE}))
    tried = proposed(proposals)
    assert len(tried) == 12
    assert {one.arrangement.micro_batch for one in proposals.ruled_out} == {8}
    assert set(proposals.ruled_out.values()) == {"needs about 31 GB (est.), 24 GB are free"}
    assert proposals.left == 0


def test_an_estimate_never_rules_out_the_baseline() -> None:
    base = msgspec.structs.replace(BASELINE, arrangement=PADDED[3])
    proposals = Proposals(space(baseline=base), lambda one: 1.0, room=lambda _: NONE)
    assert proposed(proposals)[0] == base
    assert base not in proposals.ruled_out


def test_nothing_smaller_than_what_ran_is_ruled_out() -> None:
    base = msgspec.structs.replace(BASELINE, arrangement=PADDED[2])
    proposals = Proposals(space(baseline=base), lambda one: 1.0, room=lambda _: NONE)
    tried = proposed(proposals)
    assert {(one.arrangement.micro_batch, one.attention) for one in tried} == {(4, "sdpa"), (2, "sdpa"), (1, "sdpa")}
    assert {one.checkpointing for one in tried} == {"off", "full"}


def test_an_estimate_that_gets_better_gives_back_what_it_had_ruled_out() -> None:
    verdicts = {8: NONE}
    proposals = Proposals(space(), lambda one: 1.0, room=by_rows(verdicts))
    assert len(proposals.ruled_out) == 4
    verdicts.clear()
    assert not proposals.ruled_out
    assert len(proposed(proposals)) == 16


# --- with the model of memory -------------------------------------------------------------------------------------


def setting(children: Children, folder: Path, *, free_bytes: int, **options: Any) -> Setting:
    one = job(bf16=True, **options)
    machine = msgspec.structs.replace(
        parts.gpu_machine(), gpus=(msgspec.structs.replace(parts.gpu(), free_bytes=free_bytes),)
    )
    return Setting(
        job=one,
        machine=machine,
        model=QWEN_0_6B,
        data=Data(one, parts.lengths_of([256] * 60 + [2048] * 4), QWEN_0_6B),
        space=space(),
        children=children,
        folder=folder,
        emit=lambda _event: None,
        budget_seconds=60.0,
    )


def test_a_large_batch_on_a_small_card_is_ruled_out_in_words(children: Children, tmp_path: Path) -> None:
    memory = MemoryUse(setting(children, tmp_path, free_bytes=16 * GB))
    largest = msgspec.structs.replace(BASELINE, arrangement=PADDED[3], attention="eager")
    assert memory.room(largest).verdict == "none"
    assert memory.room(largest).reason.endswith(" GB (est.), 16 GB are free")
    assert memory.room(msgspec.structs.replace(BASELINE, checkpointing="full")).verdict == "fits"


def test_peaks_of_a_sample_are_compared_with_the_sample(children: Children, tmp_path: Path) -> None:
    """The sample has short rows alone: what it needed says nothing against the formula for the long ones."""
    here = setting(children, tmp_path, free_bytes=24 * GB)
    memory, short = MemoryUse(here), Sample(Path("short"), 8, 1, tuple(range(8)))
    candidate = msgspec.structs.replace(BASELINE, arrangement=PADDED[1])
    before = memory.estimate(candidate)
    terms = terms_of(candidate, MicroBatch(2, 256, masked=False), QWEN_0_6B, here.job, here.machine)
    memory.tell(result(candidate, peak_bytes=terms.total - terms.process), short)
    assert memory.estimate(candidate).fitted
    assert memory.estimate(candidate).total_bytes == pytest.approx(before.total_bytes, rel=1e-3)


@pytest.mark.parametrize(("outcome", "counts"), [("ok", True), ("pruned", False), ("oom", True), ("killed", False)])
def test_only_trials_that_reached_their_peak_count(
    children: Children, tmp_path: Path, outcome: Outcome, counts: bool
) -> None:
    memory = MemoryUse(setting(children, tmp_path, free_bytes=24 * GB))
    memory.tell(result(BASELINE, outcome, peak_bytes=9 * GB), Sample(Path("short"), 8, 1, tuple(range(8))))
    assert memory.estimate(BASELINE).fitted is counts
