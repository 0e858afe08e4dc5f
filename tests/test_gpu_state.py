"""A GPU that others use, or that is held back, when a trial has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.children import Children
from autotune.events import AnyEvent, Note, TrialStarted
from autotune.probe.gpu import GpuProcess
from autotune.probe.nvml import HELD_BACK_BY
from autotune.search.tuner import Tuner
from autotune.trial.gpu_state import COME_AND_GO, ask, disturbance
from benchmarks.replay import ReplaySetting
from tests import parts, roofline

GPU = parts.gpu()
LARGE, SMALL = 2**31, 2**20


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"throttling": ("its power limit",)}, None),
        ({"throttling": ("its power limit", "heat")}, "GPU 0 is held back by heat"),
        ({"processes": (GpuProcess(7, "python3", LARGE),)}, "GPU 0 is in use by python3"),
        ({"processes": (GpuProcess(None, None, None),)}, "GPU 0 is in use by another process"),
        ({"processes": (GpuProcess(7, "Xorg", SMALL),)}, None),
    ],
)
def test_what_comes_and_goes_disturbs_and_what_is_always_there_does_not(
    changes: dict[str, Any], said: str | None
) -> None:
    assert disturbance(msgspec.structs.replace(GPU, **changes)) == said


def test_the_reasons_are_those_that_the_probe_gives() -> None:
    assert set(COME_AND_GO) < set(HELD_BACK_BY.values())


def test_a_gpu_that_is_not_here_tells_nothing() -> None:
    assert ask("GPU-00000000-aaaa-bbbb-cccc-dddddddddddd") is None


class Shared(ReplaySetting):
    """The GPU is in use by another process at the second and third time of asking."""

    asked = 0

    def gpu_disturbance(self) -> str | None:
        self.asked += 1
        return "GPU 0 is in use by python3" if self.asked in (2, 3) else None


def test_a_trial_beside_others_on_the_gpu_is_measured_again(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(children.environment, "OMP_NUM_THREADS", "1")
    plan = roofline.plan_for("T4", "LoRA 1.5B", tmp_path / "job", children)
    table = roofline.table_of("T4", "LoRA 1.5B", plan, tmp_path / "job")
    said: list[AnyEvent] = []
    setting = Shared(
        table, roofline.with_space_of(plan, table), tmp_path, budget_seconds=900.0, seed=0, emit=said.append
    )
    setting.trial_limit = 2
    Tuner(setting, []).run()
    notes = [event.text for event in said if isinstance(event, Note)]
    assert "GPU 0 is in use by python3 during #1: measuring it again" in notes
    starts = [event.trial for event in said if isinstance(event, TrialStarted) and event.purpose == "speed"]
    assert starts == [0, 1, 1]
