"""The environment that `accelerate launch` will set, foreseen, against what TRL and accelerate themselves say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import cli
from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.job import import_environment, read_job
from autotune.launcher import check_environment, check_threads

MINIMAL = "model_name_or_path: model\ndataset_name: data\nuse_cpu: true\n"

# Runs the real `trl`, up to where accelerate would start the training process, and prints the environment it would get.
REAL_TRL = """
import json, sys
from accelerate.commands import launch
launch.simple_launcher = lambda arguments: print(json.dumps(launch.prepare_simple_launcher_cmd_env(arguments)[1]))
from trl.cli.main import main
main(["sft", *sys.argv[1:]])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "arguments", "environment", "default_config"),
    [
        ("", [], {}, None),
        ("", [], {"OMP_NUM_THREADS": "3"}, None),
        ("env: {OMP_NUM_THREADS: 3}\n", [], {"OMP_NUM_THREADS": "5"}, None),
        ("num_cpu_threads_per_process: 7\n", [], {"OMP_NUM_THREADS": "3"}, None),
        ("num-cpu-threads-per-process: 7\n", [], {}, None),
        ("num_cpu_threads_per_process: 7\n", ["--num_cpu_threads_per_process", "9"], {}, None),
        ("", ["--num-cpu-threads-per-process=9"], {}, None),
        ("", ["--cpu"], {}, None),
        ("", ["--cpu", "--num_processes", "1"], {}, None),
        ("", ["--cpu", "--num_processes", "1"], {"OMP_NUM_THREADS": "0"}, None),
        ("", [], {"OMP_NUM_THREADS": "-3"}, None),
        ("accelerate_config: single_gpu\n", [], {}, None),
        ("", ["--accelerate_config", "mine.yaml"], {}, None),
        ("", ["--config_file", "mine.yaml"], {}, None),
        ("", [], {}, "distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n"),
        ("", [], {}, "distributed_type: 'NO'\nuse_cpu: true\n"),
        ("", ["--cpu"], {}, "distributed_type: 'NO'\nnum_processes: 1\n"),
    ],
)
def test_the_environment_foreseen_is_the_one_accelerate_makes(
    children: Children,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    arguments: list[str],
    environment: dict[str, str],
    default_config: str | None,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (folder / "mine.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n")
    if default_config is not None:
        (folder / "home" / "accelerate").mkdir(parents=True)
        (folder / "home" / "accelerate" / "default_config.yaml").write_text(default_config)
    (folder / "sft.yaml").write_text(MINIMAL + text)
    given = ["--config", "sft.yaml", *arguments]
    foreseen = import_environment(given, folder)
    job = read_job("sft", given, folder=folder, children=children, accelerator=False, cpu_bf16=True)
    exact = {**os.environ, **job.environment, **job.launch_environment}
    names = {name for name in (*foreseen, *exact) if name.startswith(("OMP_", "KMP_"))}
    assert {name: foreseen.get(name) for name in names} == {name: exact.get(name) for name in names}


def test_a_job_has_the_environment_that_the_real_trl_would_launch_it_in(children: Children, folder: Path) -> None:
    (folder / "sft.yaml").write_text(
        MINIMAL + "env: {MINE: 1}\nmixed_precision: bf16\nnum_cpu_threads_per_process: 2\n"
    )
    given = ["--config", "sft.yaml", "--dynamo_backend", "no", "--packing"]
    answer = subprocess.run(
        [sys.executable, "-c", REAL_TRL, *given], cwd=folder, capture_output=True, check=True, text=True
    )
    real = json.loads(answer.stdout.splitlines()[-1])
    job = read_job("sft", given, folder=folder, children=children, accelerator=False, cpu_bf16=True)
    made = {**os.environ, **job.environment, **job.launch_environment}
    for name in ("COLUMNS", "LINES", "TORCHINDUCTOR_CACHE_DIR"):  # what libraries set for themselves when imported
        real.pop(name, None)
        made.pop(name, None)
    assert made == real


def test_the_environment_of_the_file_is_there_when_libraries_are_imported(folder: Path) -> None:
    (folder / "sft.yaml").write_text("env: {HF_HUB_OFFLINE: 1}\n")
    assert import_environment(["--config", "sft.yaml"], folder)["HF_HUB_OFFLINE"] == "1"


def test_a_config_that_accelerate_cannot_read_is_left_to_the_parse(folder: Path) -> None:
    (folder / "broken.yaml").write_text("a: [")
    foreseen = import_environment(["--accelerate_config", "broken.yaml"], folder)
    assert foreseen["OMP_NUM_THREADS"] == "1"


def test_a_job_file_that_cannot_be_read_is_refused_before_anything_is_started(folder: Path) -> None:
    with pytest.raises(AutotuneError, match=r"there is no config file `gone\.yaml`"):
        import_environment(["--config", "gone.yaml"], folder)


@pytest.mark.parametrize(
    ("value", "hint"), [("4,2", "4"), ("", "1"), ("abc", "1"), ("2.5", "1"), (" ", "1"), ("-1,2", "1")]
)
def test_threads_that_accelerate_cannot_read_are_refused_by_their_name(value: str, hint: str) -> None:
    with pytest.raises(AutotuneError) as raised:
        check_threads({"OMP_NUM_THREADS": value})
    assert raised.value.what.startswith(f"`OMP_NUM_THREADS` in the environment is `{value}`, and `accelerate")
    assert raised.value.hint == f"set `OMP_NUM_THREADS={hint}`, or unset it"


@pytest.mark.parametrize("environment", [{}, *({"OMP_NUM_THREADS": value} for value in ("4", " 4 ", "0", "-3"))])
def test_threads_that_accelerate_reads_are_left_to_it(environment: dict[str, str]) -> None:
    check_threads(environment)


def test_what_is_no_number_of_threads_and_long_is_not_repeated() -> None:
    with pytest.raises(AutotuneError) as raised:
        check_threads({"OMP_NUM_THREADS": "correct-horse-battery"})
    assert "horse" not in raised.value.what + raised.value.hint


def test_threads_of_the_file_that_accelerate_cannot_read_are_refused_with_their_place(folder: Path) -> None:
    (folder / "sft.yaml").write_text(MINIMAL + "env: {OMP_NUM_THREADS: '4,2'}\n")
    with pytest.raises(AutotuneError, match=r"`OMP_NUM_THREADS` in `env:` of `sft.yaml` is `4,2`"):
        import_environment(["--config", "sft.yaml"], folder)


@pytest.mark.parametrize(("value", "threads"), [("4,2", "4"), ("abc", "1"), ("2.5", "1"), ("", "1"), ("-3", "1")])
def test_where_no_trial_starts_the_first_number_of_threads_counts(
    value: str, threads: str, folder: Path, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert import_environment([], folder)["OMP_NUM_THREADS"] == threads
    (folder / "sft.yaml").write_text(MINIMAL)
    job = read_job("sft", ["--config", "sft.yaml"], folder=folder, children=children, accelerator=False, cpu_bf16=True)
    assert job.launch_environment["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({"LOCAL_RANK": "1"}, "`LOCAL_RANK` is set"),
        ({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}, "`LOCAL_RANK` and `RANK` are set"),
        ({"LOCAL_RANK": "1", "RANK": "5", "WORLD_SIZE": "8"}, "`LOCAL_RANK`, `RANK` and `WORLD_SIZE` are set"),
    ],
)
def test_a_process_of_a_distributed_launch_is_told_to_be_one(environment: dict[str, str], names: str) -> None:
    with pytest.raises(AutotuneError) as raised:
        check_environment(environment)
    assert raised.value.what == f"{names} in the environment: this looks like one process of a distributed launch"
    assert "`env -u LOCAL_RANK" in raised.value.hint


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "-1", "RANK": ""}])
def test_an_environment_of_no_distributed_launch_is_left_alone(environment: dict[str, str]) -> None:
    check_environment(environment)


def test_every_command_that_looks_at_a_job_refuses_to_be_one_process_of_many(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LOCAL_RANK", "1")
    (folder / "sft.yaml").write_text(MINIMAL)
    for command in ("sft --config sft.yaml --dry-run", "sft --config sft.yaml --auto", "lengths sft --config sft.yaml"):
        assert cli.main(command.split()) == 2
        assert "this looks like one process of a distributed launch" in capfd.readouterr().err


def test_reading_the_environment_imports_nothing_heavy(folder: Path) -> None:
    (folder / "sft.yaml").write_text(MINIMAL)
    code = (
        "import sys; from pathlib import Path; from autotune.job import import_environment;"
        "import_environment(['--config', 'sft.yaml', '--accelerate_config', 'single_gpu'], Path());"
        "print(*{'torch', 'trl', 'transformers', 'accelerate', 'numpy', 'ruamel'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=True, text=True)
    assert answer.stdout.strip() == ""


TRL_FACTS = """
import json, os, sys, tempfile
from trl.cli.accelerate_launcher import launch_training_script
from accelerate.commands.launch import launch_command_parser
from trl.scripts.sft import make_parser
def parse(text, *arguments):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return make_parser().parse_args_and_config(
            ["--config", file.name, *arguments], return_remaining_strings=True, separate_remaining_strings=True
        )
base = "use_cpu: true\\n"
unknown = parse(base + "packng: true\\n")
switch = launch_command_parser().parse_args([*parse(base + "cpu: true\\n")[-2], "sft.py"])
choice = parse(base + "packing_strategy: foo\\n")[1]
twice = parse(base + "seed: 1\\nseed: 2\\n")[1]
print(json.dumps({
    "unknown": unknown[-2],
    "script": switch.training_script,
    "choice": choice.packing_strategy,
    "twice": twice.seed,
    "joined": make_parser().parse_args_and_config(
        ["--config=f.yaml", "--use_cpu"], return_remaining_strings=True, separate_remaining_strings=True)[-1],
}))
"""


def test_the_installed_trl_still_misreads_what_is_refused_here() -> None:
    answer = subprocess.run([sys.executable, "-c", TRL_FACTS], capture_output=True, check=True, text=True)
    assert json.loads(answer.stdout.splitlines()[-1]) == {
        "unknown": ["--packng", "True"],
        "script": "True",
        "choice": "foo",
        "twice": 2,
        "joined": ["--config=f.yaml"],
    }
