"""The real command, ended in the middle: what was found is written, nothing is left, and it can go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.events import AnyEvent, EventReader, RunFinished, Step, TrialFinished, TrialStarted
from tests import tiny
from tests.processes import alive, eventually, marked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": os.environ.get("HOME", "/"),
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, 200 short rows, `tiny.yaml`, and files that must not be taken for libraries."""
    folder = tmp_path_factory.mktemp("job")
    tiny.make_model(folder / "model")
    counts = tiny.lengths(200, median=20, longest=120)
    tiny.write_rows(folder / "rows.jsonl", [{"text": tiny.words(count, seed=count)} for count in counts])
    for name in ("datasets", "yaml", "optuna"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')\n")
    (folder / "tiny.yaml").write_text("""\
# a comment that stays
model_name_or_path: model
datasets:
  - path: json
    data_files: rows.jsonl
output_dir: output
max_length: 256
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
bf16: false
use_cpu: true
""")
    return folder


class Command:
    """The command in a session of its own; `run` is its run folder, which also marks its processes."""

    def __init__(self, job: Path, run: Path, *arguments: str) -> None:
        self.run = run
        self.reader = EventReader(run / "events.jsonl")
        self.said: list[AnyEvent] = []
        self.stdout = run.with_name("stdout")
        self.temporary = run.with_name("temporary")
        self.temporary.mkdir(exist_ok=True)
        with self.stdout.open("wb") as stdout, run.with_name("stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "autotune", *arguments],
                cwd=job,
                env={**ENVIRONMENT, "MARKER": str(run), "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def wait_for_a_step_of(self, trial: int) -> None:
        def there() -> bool:
            self.said.extend(self.reader.read())
            assert self.process.poll() is None, self.stderr()
            return any(isinstance(event, Step) and event.trial == trial for event in self.said)

        assert eventually(there, seconds=90), self.stderr()

    def stderr(self) -> str:
        return self.run.with_name("stderr").read_text()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.read_text().splitlines()]

    def left_in_temporary_folder(self) -> list[str]:
        """What is left there but the kernels that torch has compiled."""
        return [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]

    def left(self) -> list[str]:
        """What is left in the run folder of the user's data."""
        kept = (".json", ".jsonl", ".log", ".yaml", ".txt", ".md", ".sh", ".msgpack")
        return sorted(
            str(path.relative_to(self.run))
            for path in self.run.rglob("*")
            if path.is_file()
            and path.name not in ("turns", "stop")
            and (path.suffix not in kept or path.name.startswith("."))
        )


@pytest.fixture
def commands(job: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts commands, and ends what a failed test leaves of them."""
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(job, tmp_path / "run", *arguments))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()


def tune(commands: Any, run: Path) -> Command:
    command: Command = commands(
        "sft", "--config", "tiny.yaml", "--auto", "--json", "--budget", "60s", "--run-folder", str(run)
    )
    return command


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_run_writes_its_best_so_far_and_leaves_nothing(
    commands: Any, tmp_path: Path, number: signal.Signals
) -> None:
    command = tune(commands, tmp_path / "run")
    command.wait_for_a_step_of(1)
    pids = marked(str(command.run))
    assert len(pids) >= 4  # engine, server, guard, worker
    if number == signal.SIGINT:
        os.killpg(command.process.pid, number)  # as a terminal sends it, to the server as well
    else:
        command.process.send_signal(number)
    assert command.process.wait(20) == 130, command.stderr()
    assert eventually(lambda: not alive(pids), seconds=1)  # multiprocessing's tracker ends a moment after its engine
    assert eventually(lambda: not marked(str(command.run)), seconds=1)

    tuned = yaml.safe_load((command.run / "tuned.yaml").read_text())
    assert tuned["model_name_or_path"] == "model"
    assert tuned["per_device_train_batch_size"] * tuned["gradient_accumulation_steps"] == 8
    assert "# a comment that stays" in (command.run / "tuned.yaml").read_text()
    events = list(EventReader(command.run / "events.jsonl").read())
    last = events[-1]
    assert isinstance(last, RunFinished)
    assert (last.outcome, last.config) == ("interrupted", str(command.run / "tuned.yaml"))
    assert last.trials == 1
    assert last.baseline_rate is not None
    assert command.lines()[-1]["kind"] == "run_finished"
    assert command.lines()[-1]["outcome"] == "interrupted"
    assert command.left() == []
    assert not (command.run / "cache").exists()
    assert (command.run / "report.md").exists()
    assert "Traceback" not in command.stderr()


@pytest.mark.parametrize("processes", [2, 5], ids=["while the server starts", "while a child works"])
def test_an_interruption_before_the_first_trial_ends_at_once_and_writes_nothing(
    commands: Any, tmp_path: Path, processes: int
) -> None:
    command = tune(commands, tmp_path / "run")
    assert eventually(lambda: len(marked(str(command.run))) >= processes, seconds=60)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.process.wait(20) == 130, command.stderr()
    assert eventually(lambda: not marked(str(command.run)), seconds=2)
    assert not command.run.exists()
    assert command.stderr() == "interrupted before the first trial; nothing was written\n"


def test_a_second_ctrl_c_tears_nothing_and_what_is_said_stays_true(commands: Any, tmp_path: Path) -> None:
    command = tune(commands, tmp_path / "run")
    command.wait_for_a_step_of(1)
    os.killpg(command.process.pid, signal.SIGINT)
    time.sleep(0.3)
    with contextlib.suppress(ProcessLookupError):  # it may have ended
        os.killpg(command.process.pid, signal.SIGINT)
    assert command.process.wait(20) == 130, command.stderr()
    assert eventually(lambda: not marked(str(command.run)), seconds=1)
    assert command.lines()[-1]["kind"] == "run_finished"
    assert "nothing was written" not in command.stderr()
    assert (command.run / "report.md").exists()


def test_a_terminal_that_closes_before_the_first_trial_leaves_all_or_nothing(commands: Any, tmp_path: Path) -> None:
    command = tune(commands, tmp_path / "run")
    assert eventually((command.run / "run.msgpack").exists, seconds=90)
    command.process.send_signal(signal.SIGHUP)
    assert command.process.wait(20) == 130, command.stderr()
    assert command.run.exists() != ("nothing was written" in command.stderr())
    assert not command.run.exists() or command.lines()[-1]["kind"] == "run_finished"


def test_a_run_that_is_killed_while_it_looks_around_leaves_nothing(commands: Any, tmp_path: Path) -> None:
    killed = tune(commands, tmp_path / "run")
    assert eventually(lambda: len(marked(str(killed.run))) >= 5, seconds=60)  # a child works
    killed.process.kill()
    killed.process.wait()
    assert eventually(lambda: not marked(str(killed.run)), seconds=3)
    assert eventually(lambda: killed.left_in_temporary_folder() == [], seconds=3)
    assert not killed.run.exists()


def test_a_killed_run_leaves_no_process_and_goes_on_where_it_was(commands: Any, tmp_path: Path) -> None:
    killed = tune(commands, tmp_path / "run")
    killed.wait_for_a_step_of(1)
    pids = marked(str(killed.run))
    killed.process.kill()
    assert eventually(lambda: not alive(pids), seconds=3)
    assert eventually(lambda: not marked(str(killed.run)), seconds=3)
    killed.process.wait()
    assert eventually(lambda: killed.left_in_temporary_folder() == [], seconds=3)
    with (killed.run / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","pass_ind')  # the worst moment for it

    resumed = commands("--resume", str(killed.run), "--trials", "2", "--budget", "25s", "--json")
    assert resumed.process.wait(120) == 0, resumed.stderr()
    assert eventually(lambda: not marked(str(killed.run)), seconds=1)
    events = list(EventReader(killed.run / "events.jsonl").read())
    started = [event for event in events if isinstance(event, TrialStarted) and event.purpose == "speed"]
    finished = [event for event in events if isinstance(event, TrialFinished) and event.purpose == "speed"]
    resumed_at = next(index for index, line in enumerate(resumed.lines()) if line["kind"] == "trial_started")
    assert resumed.lines()[resumed_at]["trial"] == 1
    assert {event.trial for event in started} == {event.trial for event in finished} == {0, 1}
    trials = [line for line in resumed.lines() if line["kind"] == "trial_started" and line["purpose"] == "speed"]
    assert {line["trial"] for line in trials} == {1}
    last = resumed.lines()[-1]
    assert last["kind"] == "run_finished"
    assert last["outcome"] in ("improved", "kept")
    assert last["trials"] == 2
    assert yaml.safe_load(Path(last["config"]).read_text())["model_name_or_path"] == "model"
    assert resumed.left() == []
