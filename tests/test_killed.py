"""A run that is killed with SIGKILL at any event leaves no process, and goes on with all that was measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from autotune import folder as run_folder
from autotune.events import EventReader, RunFinished, TrialStarted
from autotune.trial.result import TrialResult
from tests import tiny
from tests.killed_search import TRIALS
from tests.processes import REPOSITORY, eventually, marked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FAKE_TRL = f"""\
#!{sys.executable}
import sys, time, yaml
steps = yaml.safe_load(open(sys.argv[3]))["max_steps"]
time.sleep(0.5)
print({{"num_tokens": 256 * steps}}, {{"train_runtime": 0.014 * steps}})
"""


class Ended(NamedTuple):
    """A run that came to its end."""

    last: RunFinished
    speed: list[TrialResult]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    tiny.make_model(folder / "model")
    tiny.write_rows(folder / "rows.jsonl", [{"input_ids": [7] * 32} for _ in range(200)])
    (folder / "sft.yaml").write_text(
        "model_name_or_path: model\ndatasets:\n  - path: json\n    data_files: rows.jsonl\noutput_dir: output\n"
        "max_length: 128\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
        "gradient_checkpointing: true\nattn_implementation: sdpa\ndataloader_num_workers: 0\n"
        "num_cpu_threads_per_process: 1\nbf16: false\nuse_cpu: true\n"
    )
    (folder / "trl").write_text(FAKE_TRL)
    (folder / "trl").chmod(0o700)
    return folder


def search(job: Path, run: Path, how: str, *event: str) -> int:
    """The exit code of a search in a process of its own; what it and its children say goes beside its folder."""
    with run.with_name(f"{run.name}.said").open("ab") as said:
        return subprocess.run(
            [sys.executable, "-m", "tests.killed_search", str(run), how, *event],
            cwd=job,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "MARKER": str(run)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            timeout=120,
            check=False,
        ).returncode


def ended(run: Path) -> Ended:
    last = list(EventReader(run / "events.jsonl").read())[-1]
    assert isinstance(last, RunFinished)
    return Ended(last, [one for one in run_folder.results(run) if one.purpose == "speed"])


@pytest.fixture(scope="module")
def whole(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The same search, left alone."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert search(job, run, "start") == 0, run.with_name("run.said").read_text()
    found = ended(run)
    assert found.last.outcome == "improved"
    assert len(found.speed) == TRIALS
    return found


@pytest.mark.parametrize(
    "event",
    [
        "trial_started:0",
        "trial_finished:0",
        "trial_started:3",
        "trial_started:confirm",
        "trial_finished:confirm",
        "trial_started:memory",
        "trial_started:gate",
        "trial_finished:gate",
    ],
)
def test_a_run_that_is_killed_at_an_event_goes_on_with_nothing_lost(
    job: Path, whole: Ended, tmp_path: Path, event: str
) -> None:
    run = tmp_path / "run"
    assert search(job, run, "start", event) == -9, run.with_name("run.said").read_text()
    assert eventually(lambda: not marked(str(run)), seconds=5)
    measured = {path: path.read_bytes() for path in run.glob("trial-*/result.json")}
    done = [one for one in run_folder.results(run) if one.purpose == "speed"]
    events = EventReader(run / "events.jsonl")
    list(events.read())

    assert search(job, run, "resume") == 0, run.with_name("run.said").read_text()
    assert not marked(str(run))
    resumed = ended(run)
    started = [one for one in events.read() if isinstance(one, TrialStarted)]
    again = dict.fromkeys(one.trial for one in started if one.purpose == "speed")  # one may be measured twice
    assert list(again) == list(range(len(done), TRIALS))
    assert {path: path.read_bytes() for path in measured} == measured
    # the same order of candidates, and the same end
    assert [one.candidate for one in resumed.speed] == [one.candidate for one in whole.speed]
    assert [one.outcome for one in resumed.speed] == [one.outcome for one in whole.speed]
    assert (resumed.last.outcome, resumed.last.best) == (whole.last.outcome, whole.last.best)
    assert resumed.last.speedup == pytest.approx(whole.last.speedup)
    gates = yaml.safe_load((run / "profile.yaml").read_text())["evidence"]["gates"]
    assert {"finite", "longest rows", "end to end"} <= gates.keys()
    assert not list(run.glob("*.parquet"))


def test_a_run_that_is_killed_leaves_the_fastest_so_far_and_says_that_it_is_not_confirmed(
    job: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert search(job, run, "start", "trial_started:confirm") == -9, run.with_name("run.said").read_text()
    text = (run / "tuned.yaml").read_text()
    assert text.startswith("# The fastest so far (#")
    assert "neither confirmed nor checked" in text.partition("\n")[0]
    assert yaml.safe_load(text)["num_cpu_threads_per_process"] == 2
    assert not (run / "report.md").exists()
