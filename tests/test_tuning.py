"""Real tunings: the command as people run it, on tiny models, with TRL's own trials."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune import folder as run_folder
from autotune.events import RunFinished, decode_line
from tests.processes import marked
from tests.tiny import make_model, words, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
PROBLEMS = ROOT.parent / "shared" / "data" / "gsm8k-test.jsonl"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, where jobs are run from."""
    folder = tmp_path_factory.mktemp("jobs")
    make_model(folder / "model")
    return folder


def text_rows() -> list[dict[str, Any]]:
    return [{"text": words(4 + index % 60, seed=index)} for index in range(160)]


def prompt_completion_rows() -> list[dict[str, Any]]:
    return [
        {"prompt": words(5 + index % 20, seed=index), "completion": " " + words(3 + index % 30, seed=index + 1000)}
        for index in range(160)
    ]


def messages_rows() -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": words(5 + index % 10, seed=index)},
                {"role": "assistant", "content": words(3 + index % 50, seed=index + 1000)},
            ]
        }
        for index in range(160)
    ]


def problem_rows() -> list[dict[str, Any]]:
    lines = PROBLEMS.read_text().splitlines()
    return [{"prompt": row["question"], "completion": " " + row["answer"]} for row in map(json.loads, lines)]


DATA = {
    "text": text_rows,
    "prompt-completion": prompt_completion_rows,
    "messages": messages_rows,
    "real problems": problem_rows,
}


def autotune(home: Path, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autotune", "sft", *arguments]
    return subprocess.run(
        command, cwd=home, capture_output=True, text=True, timeout=timeout, check=False, env=environment()
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def last_event(output: str) -> RunFinished:
    event = decode_line(output.splitlines()[-1].encode())
    assert isinstance(event, RunFinished)
    return event


@pytest.mark.parametrize("kind", DATA)
def test_a_job_is_tuned_and_plain_trl_runs_the_result(kind: str, home: Path) -> None:
    if kind == "real problems" and not PROBLEMS.exists():
        pytest.skip("the real problems are not here")
    name = kind.replace(" ", "-")
    write_rows(home / f"{name}.jsonl", DATA[kind]())
    (home / f"{name}.yaml").write_text(
        "# mine\n"
        "model_name_or_path: model  # tiny\n"
        f"datasets:\n  - path: json\n    data_files: {name}.jsonl\n"
        "max_length: 256\nuse_cpu: true\nbf16: false\nlearning_rate: 2e-5\noutput_dir: out\n"
    )
    done = autotune(
        home, "--config", f"{name}.yaml", "--auto", "--json", "--trials", "4", "--run-folder", f"run-{name}"
    )
    assert done.returncode == 0, done.stderr
    last = last_event(done.stdout)
    run = home / f"run-{name}"
    assert last.outcome in ("improved", "kept")
    assert last.trials == 4
    assert last.baseline_rate is not None
    assert last.speedup is not None
    assert last.speedup >= 1.0
    assert {result.outcome for result in run_folder.results(run)} <= {"ok", "pruned"}
    tuned = (run / "tuned.yaml").read_text()
    assert "# mine" in tuned
    assert "model_name_or_path: model  # tiny" in tuned
    given = yaml.safe_load((home / f"{name}.yaml").read_text())
    assert {**given, **last.best} == yaml.safe_load(tuned)
    assert not list(run.glob("*.parquet"))
    assert not (home / "out").exists()
    assert marked(str(run)) == []
    gates = yaml.safe_load((run / "profile.yaml").read_text())["evidence"]["gates"]
    if last.outcome == "improved":
        assert 0.85 <= gates["end to end"] < 1.5
        assert gates["finite"] >= 20
        assert 0.02 < gates["longest rows"] < 1.0

    trained = subprocess.run(
        [Path(sys.executable).with_name("trl"), "sft", "--config", str(run / "tuned.yaml"), "--max_steps", "3"],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**environment(), "PYTHONPATH": ""},
    )
    assert trained.returncode == 0, trained.stderr
    assert "train_runtime" in trained.stdout
    shutil.rmtree(home / "out")


def test_a_second_run_of_the_same_job_starts_from_what_the_first_confirmed(home: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", text_rows())
    (tmp_path / "sft.yaml").write_text(
        f"model_name_or_path: {home}/model\ndatasets:\n  - path: json\n    data_files: rows.jsonl\n"
        "max_length: 256\nuse_cpu: true\nbf16: false\noutput_dir: out\n"
    )
    first = autotune(tmp_path, "--config", "sft.yaml", "--auto", "--json", "--budget", "60s")
    assert first.returncode == 0, first.stderr
    before = last_event(first.stdout)

    second = autotune(tmp_path, "--config", "sft.yaml", "--auto", "--json", "--budget", "60s", "--trials", "3")
    assert second.returncode == 0, second.stderr
    said = [json.loads(line) for line in second.stdout.splitlines()]
    started = [line["reason"] for line in said if line["kind"] == "trial_started" and line["purpose"] == "speed"]
    started = [reason for reason in started if not reason.startswith("again")]  # on a busy machine
    notes = [line["text"] for line in said if line["kind"] == "note"]
    name = Path(before.run).name
    assert started[0] == "your own settings"
    assert any(text.startswith(f"an earlier run ({name}) found ") for text in notes) == before.confirmed
    if before.confirmed and before.outcome == "improved":
        assert started[1] == f"the pick of an earlier run, {name}"


def test_a_trial_computes_what_plain_trl_computes(home: Path) -> None:
    """The same losses and the same threads: the child is held against the real command on the same documents."""
    write_rows(home / "same.jsonl", text_rows()[:64])
    (home / "same.yaml").write_text(
        "model_name_or_path: model\ndatasets:\n  - path: json\n    data_files: same.jsonl\n"
        "use_cpu: true\nbf16: false\noutput_dir: out-same\nlogging_steps: 1\n"
    )
    done = autotune(home, "--config", "same.yaml", "--auto", "--json", "--trials", "1", "--run-folder", "run-same")
    assert done.returncode == 0, done.stderr
    # all 64 documents are the sample, in the order of the data, so that both visit them in the same order
    losses = next(result.losses for result in run_folder.results(home / "run-same") if result.purpose == "speed")
    plain = subprocess.run(
        [Path(sys.executable).with_name("trl"), "sft", "--config", "same.yaml", "--max_steps", "2"],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env=environment(),
    )
    said = [float(loss) for loss in re.findall(r"['\"]loss['\"]: ['\"]?([0-9.]+)", plain.stdout)]
    assert len(said) == 2
    assert [round(loss, 3) for loss in losses[:2] if loss is not None] == pytest.approx(said, abs=6e-4)


def test_launch_refuses_further_options_that_trl_does_not_know(home: Path) -> None:
    write_rows(home / "few.jsonl", text_rows()[:64])
    (home / "few.yaml").write_text(
        "model_name_or_path: model\ndatasets:\n  - path: json\n    data_files: few.jsonl\n"
        "use_cpu: true\nbf16: false\noutput_dir: out-few\n"
    )
    done = autotune(home, "--config", "few.yaml", "--auto", "--json", "--trials", "1", "--run-folder", "run-few")
    assert done.returncode == 0, done.stderr
    refused = subprocess.run(
        [sys.executable, "-m", "autotune", "launch", "run-few", "--max_stps", "3"],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(),
    )
    assert refused.returncode == 2
    assert refused.stderr == "error: unknown option `max_stps`\nhint: did you mean `max_steps`?\n"
    assert not (home / "out-few").exists()


def test_a_baseline_that_runs_out_of_memory_gives_way_to_one_that_runs(tmp_path: Path) -> None:
    """The demo's settings hold 0.9 GB or more on its longest documents; smaller micro-batches do not."""
    done = autotune(
        tmp_path,
        *("--demo", "--auto", "--json", "--memory-limit", "750MB", "--trials", "4", "--budget", "60s"),
        *("--run-folder", "run"),
    )
    assert done.returncode == 0, done.stderr
    last = last_event(done.stdout)
    assert last.outcome == "improved"
    assert last.speedup is None
    assert last.baseline_rate is None
    assert last.best_rate is not None
    assert last.best
    first = run_folder.results(tmp_path / "run")[0]
    assert first.outcome == "oom"
    assert first.rate is None
    assert "more than the 0.75 GB a trial may take" in (first.detail or "")
    report = (tmp_path / "run" / "report.md").read_text()
    assert report.startswith("# Yours did not run here, and this does")
    assert "did not run: out of memory" in report
