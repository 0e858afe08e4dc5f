"""A machine that changes its speed while a search goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.children import Children
from autotune.events import AnyEvent, Note, TrialStarted
from autotune.plan.space import Candidate
from autotune.planning import Plan
from autotune.search.drift import moved, scaled
from autotune.search.found import Found
from autotune.search.statistics import Estimate
from autotune.search.tuner import Tuner
from autotune.trial.result import TrialResult
from benchmarks.replay import ReplaySetting
from benchmarks.sweep_table import Table
from benchmarks.truth import regret, true_rates
from tests import roofline

BUDGET_SECONDS = 1800.0


class Paced(ReplaySetting):
    """A machine whose steps take longer by a factor that depends on the time; nothing that can be read tells so."""

    pace: Callable[[float], float]

    def slowed(self, candidate: Candidate, moment: float) -> float:
        return self.pace(moment)


@pytest.fixture(scope="module")
def drawn(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Table, Plan]]:
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(children.environment, "OMP_NUM_THREADS", "1")
        plan = roofline.plan_for("H200", "LoRA 7B", folder, children)
        table = roofline.table_of("H200", "LoRA 7B", plan, folder)
        yield table, roofline.with_space_of(plan, table)


class Searched(msgspec.Struct, frozen=True):
    found: Found
    regret: float
    notes: list[str]
    looks: list[TrialStarted]


def search(drawn: tuple[Table, Plan], folder: Path, pace: Callable[[float], float]) -> Searched:
    table, plan = drawn
    said: list[AnyEvent] = []
    setting = Paced(table, plan, folder, budget_seconds=BUDGET_SECONDS, seed=0, emit=said.append)
    setting.pace = pace
    found = Tuner(setting, []).run()
    return Searched(
        found,
        regret(true_rates(table, plan), found.winner),
        [event.text for event in said if isinstance(event, Note)],
        [event for event in said if isinstance(event, TrialStarted) and event.reason.startswith("is the machine")],
    )


def changes(searched: Searched) -> list[str]:
    return [note for note in searched.notes if note.startswith("yours runs at ")]


def test_a_steady_machine_is_not_looked_at_again_within_minutes(drawn: Any, tmp_path: Path) -> None:
    searched = search(drawn, tmp_path, lambda _moment: 1.0)
    assert not searched.looks
    assert not changes(searched)


def test_a_machine_that_slows_down_for_good_is_noticed_and_what_was_measured_before_wins_nothing_by_it(
    drawn: Any, tmp_path: Path
) -> None:
    searched = search(drawn, tmp_path, lambda moment: 1.0 if moment < 120 else 1.5)
    assert len(searched.looks) == 1
    assert "of what was predicted" in searched.looks[0].reason
    (told,) = changes(searched)
    assert told.startswith(("yours runs at 0.66 of", "yours runs at 0.67 of", "yours runs at 0.68 of"))
    assert "; measured again: #" in told
    assert searched.regret <= 0.03
    assert searched.found.baseline is not None
    again = [one for one in searched.found.results if one.at_speed != 1.0]
    assert [one.candidate for one in again] == [searched.found.baseline.candidate]


def test_a_slow_spell_is_noticed_and_so_is_its_end(drawn: Any, tmp_path: Path) -> None:
    searched = search(drawn, tmp_path, lambda moment: 1.6 if 120 < moment < 220 else 1.0)
    assert len(changes(searched)) == 2
    assert searched.regret <= 0.05


def test_yours_is_measured_again_where_that_was_long_ago(
    drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.drift.OLDEST_SECONDS", 30.0)
    monkeypatch.setattr("autotune.search.drift.SHARE", 1.0)
    searched = search(drawn, tmp_path, lambda _moment: 1.0)
    assert searched.looks
    assert all("yours was measured " in one.reason for one in searched.looks)
    assert {one.purpose for one in searched.looks} == {"gate"}
    assert not changes(searched)
    assert len({one.candidate for one in searched.found.results}) == len(searched.found.results)


@pytest.mark.parametrize(
    ("before", "now", "ratio"),
    [
        (Estimate(100, 97, 103), Estimate(80, 77, 83), 0.8),
        (Estimate(100, 97, 103), Estimate(125, 120, 130), 1.25),
        (Estimate(100, 60, 140), Estimate(80, 77, 83), None),
        (Estimate(100, 99, 101), Estimate(97, 96, 98), None),
    ],
)
def test_a_rate_has_moved_beyond_both_intervals_and_by_more_than_a_few_percent(
    before: Estimate, now: Estimate, ratio: float | None
) -> None:
    assert moved(before, now) == ratio


def test_a_result_at_another_speed_keeps_what_was_measured_in_sight() -> None:
    base = Candidate(arrangement=None, attention="sdpa", checkpointing="off", workers=0)  # type: ignore[arg-type]
    measured = TrialResult(
        index=3, purpose="speed", candidate=base, label="", outcome="ok", rate=100.0, rate_interval=(96.0, 104.0)
    )
    slower = scaled(scaled(measured, 0.8), 0.5)
    assert slower.rate == pytest.approx(40.0)
    assert slower.rate_interval == pytest.approx((38.4, 41.6))
    assert slower.rate is not None
    assert slower.rate / slower.at_speed == pytest.approx(100.0)
    failed = msgspec.structs.replace(measured, rate=None, rate_interval=None, outcome="oom")
    assert scaled(failed, 0.8) == failed
