"""The command line: what is wrong is said in two lines with exit code 2, and what may be asked for is known."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune import __version__, arguments, session
from autotune import folder as run_folder
from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.job_refusals import TUNER_OPTIONS
from autotune.probe import machine
from autotune.probe.machine import Machine
from tests import commands, tiny
from tests.commands import Answer, Run

# A new option needs its entry here, a line in the README and a test
OPTIONS = {
    "--allow", "--auto", "--budget", "--cold", "--cores", "--demo", "--dry-run", "--gpu-memory", "--gpus", "--help",
    "--json", "--launch", "--machine", "--memory-limit", "--precision", "--ram", "--resume", "--run-folder", "--trials",
    "--version",
}  # fmt: skip

JOB = """\
model_name_or_path: model
datasets: [{path: json, data_files: rows.jsonl, split: train}]
max_length: 128
output_dir: out
use_cpu: true
bf16: false
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a model, 40 rows of text, and `sft.yaml`."""
    (tmp_path / "model").symlink_to(model)
    tiny.write_rows(tmp_path / "rows.jsonl", [{"text": tiny.words(5 + row % 30, seed=row)} for row in range(40)])
    (tmp_path / "sft.yaml").write_text(JOB)
    commands.enter(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def run(folder: Path, children: Children, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return commands.in_this_process(monkeypatch, capfd)


def process(*arguments: str) -> Answer:
    """Runs the command as a person would, without a terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def check_refused(answer: Answer, what: str, hint: str, *, after_narration: bool = False) -> None:
    """Exit code 2, nothing on stdout, and on stderr `error:` and `hint:` as the last and, but for the narration of
    what was found before, the only lines."""
    assert answer.code == 2, answer.err
    assert answer.out == ""
    assert "Traceback" not in answer.err
    lines = answer.err.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith(("error: ", "hint: "))] == ["error", "hint"]
    assert after_narration or len(lines) == 2, answer.err
    assert answer.error.startswith("error: ")
    assert answer.hint.startswith("hint: ")
    assert what in answer.error
    assert hint in answer.hint
    assert not Path("autotune-runs").exists()


# --- what is wrong before anything is loaded ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        ("", "the wizard needs a terminal", "`trl-autotune sft --config sft.yaml --auto`"),
        ("sft --config sft.yaml", "the wizard needs a terminal", "`trl-autotune sft --config sft.yaml --auto`"),
        ("sft --config nowhere.yaml --auto", "there is no config file `nowhere.yaml`", "after `--config`"),
        ("sft --config model --auto", "cannot read `model`: Is a directory", "path of a YAML file"),
        ("sft --config --auto", "`--config` is given without a file", "write `--config FILE`"),
        ("sft --config", "`--config` is given without a file", "write `--config FILE`"),
        ("sft --config=sft.yaml --auto", "TRL does not know `--config=FILE`", "write `--config sft.yaml`"),
        ("stf --auto", "unknown method `stf`", "did you mean `sft`?"),
        ("foo --auto", "unknown method `foo`", "TRL's methods here are `sft`, `dpo`"),
        ("dpo --config sft.yaml --auto", "tuning `dpo` is not built yet", "`trl dpo` itself runs as before"),
        ("online_dpo --auto", "tuning `online_dpo` is not built yet", "TRL has no command for it"),
        ("--auto", "the method comes first, and `--auto` is an option", "trl-autotune sft"),
        ("--config sft.yaml", "the method comes first, and `--config` is an option", "trl-autotune sft"),
        ("sft --config sft.yaml --auto --allow all", "`--allow all` is not known", "rounded, changed"),
        ("sft --config sft.yaml --auto --allow changed,exakt", "`--allow exakt` is not known", "rounded, changed"),
        ("sft --config sft.yaml --auto --allow fewer-gpus", "`--allow fewer-gpus` is not built yet", "one GPU"),
        ("sft --config sft.yaml --auto --budget soon", "`--budget soon` is not a duration", "90s, 10m or 2h"),
        ("sft --config sft.yaml --auto --budget 0", "`--budget 0` is not a duration", "90s, 10m or 2h"),
        ("sft --config sft.yaml --auto --budget=-3m", "`--budget -3m` is not a duration", "90s, 10m or 2h"),
        ("sft --config sft.yaml --auto --budget nan", "`--budget nan` is not a duration", "90s, 10m or 2h"),
        ("sft --config sft.yaml --auto --budget inf", "`--budget inf` is not a duration", "90s, 10m or 2h"),
        ("sft --config sft.yaml --auto --budget=", "`--budget ` is not a duration", "90s, 10m or 2h"),
        ("sft --config sft.yaml --auto --budget", "--budget", "`trl-autotune --help` lists the options"),
        ("sft --config sft.yaml --auto --memory-limit lots", "`--memory-limit lots` is not a size", "8GiB or 500MB"),
        ("sft --config sft.yaml --auto --memory-limit 5", "`--memory-limit 5` is not a size", "100MB at least"),
        ("sft --config sft.yaml --auto --memory-limit 0GB", "`--memory-limit 0GB` is not a size", "8GiB or 500MB"),
        ("sft --config sft.yaml --auto --memory-limit=-1GB", "`--memory-limit -1GB` is not a size", "8GiB or 500MB"),
        ("sft --config sft.yaml --auto --memory-limit 1e999", "`--memory-limit 1e999` is not a size", "8GiB or 500MB"),
        ("sft --config sft.yaml --auto --trials 0", "`--trials` must be at least 1", "your own settings"),
        ("sft --config sft.yaml --auto --trials many", "invalid int value: 'many'", "--help"),
        ("sft --config sft.yaml --auto --run-folder full", "the run folder `full` is not empty", "`--resume`"),
        ("sft --config sft.yaml --auto --run-folder rows.jsonl", "rows.jsonl` is no folder", "`--run-folder DIR`"),
        ("sft --config sft.yaml --auto --run-folder rows.jsonl/x", "rows.jsonl` is no folder", "`--run-folder DIR`"),
        ("--resume nowhere", "`nowhere` is no run's folder", "autotune-runs/"),
        ("--resume full", "`full` is no run's folder", "autotune-runs/"),
        ("--resume torn", "`torn/run.msgpack` is damaged", "`trl sft --config torn/tuned.yaml` still works"),
        ("--resume other", "`other/run.msgpack` is of another version", "start a new run"),
        ("sft --config sft.yaml --auto --resume full", "`--config` would change it", "start a new run"),
        ("launch nowhere", "`nowhere` is no run's folder", "autotune-runs/"),
        ("launch", "required: RUN", "--help"),
        ("report nowhere", "there is no `nowhere/report.md`", "`--resume`"),
        ("report full extra", "unrecognized arguments: extra", "--help"),
        ("watch", "`trl-autotune watch` is not built yet", "--help"),
        ("sft --demo --config sft.yaml --auto", "`--demo` brings a config of its own", "leave out"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_two_lines(arguments: str, what: str, hint: str, run: Run, folder: Path) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "notes").touch()
    (folder / "torn").mkdir()
    (folder / "torn" / "run.msgpack").write_bytes(b"\x82\xa6schema\x01\xa3jo")
    (folder / "torn" / "tuned.yaml").touch()
    (folder / "other").mkdir()
    (folder / "other" / "run.msgpack").write_bytes(b"\x81\xa6schema\x01")
    (folder / "rows.jsonl").chmod(0o755)  # root may search what anyone may execute
    before = sorted(path.name for path in folder.iterdir())
    check_refused(run(*arguments.split()), what, hint)
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("max_length: [1\nbf16: false\n", "`sft.yaml` line 2, column", "correct that line"),
        (JOB + "packing: yes: no\n", "`sft.yaml` line 7, column 13", "quote a value"),
        ("", "`sft.yaml` is empty", "write TRL options as `option: value`"),
        ("- sft\n", "`sft.yaml` holds no `option: value` lines", "write TRL options as `option: value`"),
        (b"\xff\xfe\x00", "`sft.yaml` line 1: not UTF-8 text", "save the file as UTF-8"),
        (JOB + "max_length: 64\n", "`sft.yaml` line 7: `max_length` stands there twice", "remove one"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_with_its_place(
    text: str | bytes, what: str, hint: str, run: Run, folder: Path
) -> None:
    (folder / "sft.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    check_refused(run("sft", "--config", "sft.yaml", "--auto"), what, hint)


def test_the_command_that_a_hint_names_can_be_pasted(run: Run) -> None:
    answer = run("sft", "--config", "my file.yaml")
    check_refused(answer, "the wizard needs a terminal", "`trl-autotune sft --config 'my file.yaml' --auto`")


# --- what TRL's parser, the model and the data show ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "arguments", "what", "hint"),
    [
        ("lerning_rate: 1\n", "", "`sft.yaml` line 7: unknown option `lerning_rate`", "did you mean `learning_rate`?"),
        ("", "--lerning_rate 1e-4", "unknown option `lerning_rate`", "did you mean `learning_rate`?"),
        ("", "--budgt 3m", "unknown option `budgt`", "did you mean `--budget`?"),
        ("", "--dry_run", "unknown option `dry_run`", "did you mean `--dry-run`?"),
        ("budgt: 3m\n", "", "`sft.yaml` line 7: unknown option `budgt`", "did you mean `debug`?"),
        ("", "stray", "unexpected argument `stray`", "options begin with `--`"),
        ("learning_rate: fast\n", "", "`sft.yaml` line 7: `learning_rate`", "number"),
        ("", "--model_name_or_path ./nowhere", "the model folder `./nowhere` does not exist", "give a model's folder"),
        ("", "--model_name_or_path .", "the folder `.` holds no model", "`save_pretrained`"),
        ("packing: true\n", "--max_length none", "`packing: true` needs a `max_length`", "max_length: 1024"),
        ("num_processes: 2\n", "", "jobs of several processes are not tuned yet", "--num_processes 1"),
    ],
)  # fmt: skip
def test_what_trl_would_refuse_is_refused(
    line: str, arguments: str, what: str, hint: str, run: Run, folder: Path
) -> None:
    (folder / "sft.yaml").write_text(JOB + line)
    check_refused(run("sft", "--config", "sft.yaml", "--auto", *arguments.split()), what, hint)


def test_an_attention_that_nobody_knows_is_refused_with_those_that_run(run: Run, folder: Path) -> None:
    (folder / "sft.yaml").write_text(JOB + "attn_implementation: foo\n")
    answer = run("sft", "--config", "sft.yaml", "--auto")
    check_refused(
        answer, "`attn_implementation: foo` is neither one of `sdpa`", "`sdpa`, `eager`", after_narration=True
    )


def test_a_dry_run_says_that_the_jobs_attention_cannot_run_here(run: Run, folder: Path) -> None:
    (folder / "sft.yaml").write_text(JOB + "attn_implementation: flash_attention_2\n")
    answer = run("sft", "--config", "sft.yaml", "--dry-run")
    assert answer.code == 0, answer.err
    assert "as your job has it, and it cannot run here: needs a CUDA GPU" in answer.out
    assert "not flash_attention_2: cannot run here: needs a CUDA GPU" in answer.out


def test_bf16_on_a_cpu_that_has_none_is_refused(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bf16(environment: Mapping[str, str]) -> Machine:
        real = probe(environment)
        return msgspec.structs.replace(real, cpu=msgspec.structs.replace(real.cpu, bf16=False, bf16_flag=None))

    probe = machine.probe_machine
    monkeypatch.setattr(session, "probe_machine", without_bf16)
    (folder / "sft.yaml").write_text(JOB.replace("bf16: false", "bf16: true"))
    check_refused(run("sft", "--config", "sft.yaml", "--auto"), "this CPU has no bf16 arithmetic", "`bf16: false`")


@pytest.mark.parametrize(
    ("rows", "what", "hint"),
    [
        ("", "the data has no rows (`rows.jsonl`)", "written to its end"),
        ('{"text": "ba ko"}\n{"text": "ba', "`rows.jsonl`, line 2 is not JSON", "mend or remove that line"),
        ('{"body": "ba ko"}\n', "no column that SFT can train on; it has `body`", "SFT reads `text`"),
        (
            f'{{"prompt": "{"ba " * 200}", "completion": "ko"}}\n',
            "none of the 1 rows has a token left",
            "`max_length: 128`",
        ),
    ],
    ids=["no rows", "a torn line", "no column TRL knows", "rows without loss"],
)
def test_data_that_cannot_be_trained_on_is_refused(rows: str, what: str, hint: str, run: Run, folder: Path) -> None:
    (folder / "rows.jsonl").write_text(rows)
    check_refused(run("sft", "--config", "sft.yaml", "--auto"), what, hint, after_narration=True)


# --- as processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["", "sft --config sft.yaml", "sft --config nowhere.yaml --auto", "grpo --auto"])
def test_a_real_process_ends_with_code_2(arguments: str, folder: Path) -> None:
    check_refused(process(*arguments.split()), "", "")


def test_a_dry_run_says_what_would_be_tried_and_leaves_nothing(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    started = time.monotonic()
    answer = process("sft", "--config", "sft.yaml", "--dry-run", "--json")
    seconds = time.monotonic() - started
    assert (answer.code, answer.err) == (0, "")
    plan: dict[str, Any] = json.loads(answer.out)
    assert list(plan) == [
        "schema", "method", "machine", "gpu", "overridden", "precision", "memory", "notes", "candidates", "estimate",
        "axes", "apart",
    ]  # fmt: skip
    assert (plan["schema"], plan["method"]) == (1, "sft")
    assert set(plan["precision"]) == {"value", "reason"}
    assert set(plan["estimate"]) == {"seconds"}
    size = 1
    for axis in plan["axes"]:
        assert set(axis) == {"name", "choices", "rejected"}
        assert all(set(choice) == {"value", "grade", "reason"} for choice in axis["choices"])
        assert all(set(rejected) == {"value", "reason"} for rejected in axis["rejected"])
        size *= len(axis["choices"])
    assert all(set(apart) == {"axes", "values", "reason"} for apart in plan["apart"])
    assert 1 < plan["candidates"] <= size
    assert sorted(path.name for path in folder.iterdir()) == before
    assert seconds < 30  # 10 s on a quiet machine


# --- what may be asked for -----------------------------------------------------------------------------------------


def test_a_dry_run_in_words_lists_every_axis(run: Run) -> None:
    answer = run("sft", "--config", "sft.yaml", "--dry-run")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert re.fullmatch(r"\d+ candidates, \d axes; (about .+ \(est\.\), )?at most the budget of 10 min 00 s", lines[0])
    assert [line for line in lines if line and not line.startswith(" ")][1:][:4] == [
        "arrangement", "attention", "checkpointing", "workers",
    ]  # fmt: skip
    assert "  padded, 8 x 1  (exact) as you gave it" in lines
    assert "job      sft  model  on  rows.jsonl   (sft.yaml)" in answer.err
    assert not Path("autotune-runs").exists()


def test_help_tells_every_option(run: Run) -> None:
    answer = run("--help")
    assert answer.code == 0
    assert set(re.findall(r"--[a-z][a-z-]*", answer.out)) - {"--config", "--python"} == OPTIONS
    assert run("-h").out == answer.out


def test_the_winner_of_a_run_is_printed_as_python(run: Run, folder: Path) -> None:
    (folder / "done").mkdir()
    (folder / "done" / "report.md").write_text("# 2x\n\n```python\nSFTConfig(\n    packing=True,\n)\n```\n\nmore\n")
    (folder / "kept").mkdir()
    (folder / "kept" / "report.md").write_text("# kept\n")
    assert run("report", "--python", "done").out == "SFTConfig(\n    packing=True,\n)\n"
    assert run("report", "done", "--python").code == 0
    assert run("report", "kept", "--python").out == "# nothing to change: yours is kept\n"


def test_a_run_that_is_finished_is_not_searched_again_unless_it_may_try_more(run: Run, folder: Path) -> None:
    first = run("sft", "--config", "sft.yaml", "--auto", "--trials", "1", "--budget", "30s", "--run-folder", "done")
    assert first.code == 0, first.err
    before = {path: path.read_bytes() for path in (folder / "done").rglob("*") if path.is_file()}
    again = run("sft", "--resume", "done")
    assert again.code == 0, again.err
    assert again.out == first.out
    assert "this run is finished" in again.err
    assert {path: path.read_bytes() for path in (folder / "done").rglob("*") if path.is_file()} == before
    (folder / "done").rename(folder / "moved")
    assert run("sft", "--resume", "moved").out == "moved/tuned.yaml\n"
    more = run("sft", "--resume", "moved", "--trials", "2")
    assert more.code == 0, more.err
    assert "going on after 1 trial\n" in more.err


def test_the_hint_to_a_misspelt_option_knows_every_option() -> None:
    assert {f"--{name}" for name in TUNER_OPTIONS} == OPTIONS - {"--help", "--version"}


def test_the_version_is_the_packages(run: Run) -> None:
    assert run("--version") == Answer(0, f"trl-autotune {__version__}\n", "")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("45", 45), ("0.5m", 30), ("1e2s", 100)]
)
def test_a_budget_is_a_time(text: str, seconds: float) -> None:
    assert arguments._seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("8g", 8 * 10**9),
        ("500MB", 5 * 10**8),
        ("1.5T", 15 * 10**11),
        ("200000000", 2 * 10**8),
        ("300000KB", 3 * 10**8),
    ],
)
def test_a_memory_limit_is_a_size(text: str, size: int) -> None:
    assert arguments._bytes(text) == size


def test_a_run_folder_that_another_run_works_in_is_refused(folder: Path) -> None:
    with (
        run_folder.locked(folder / "busy"),
        pytest.raises(AutotuneError, match="another run is going on"),
        run_folder.locked(folder / "busy"),
    ):
        pass
    with run_folder.locked(folder / "busy"):  # let go of with the first
        run_folder.check_new(folder / "busy")  # the lock alone does not fill it


def test_a_job_that_evaluates_on_a_split_the_data_does_not_have_is_refused(run: Run) -> None:
    answer = run("sft", "--config", "sft.yaml", "--auto", "--eval_strategy", "steps", "--eval_steps", "5")
    assert answer.code == 2
    assert "evaluates on the split `test`" in answer.err
