"""What the user takes away: files that say what was found, and that TRL, bash and a stranger can read."""

from __future__ import annotations

import ast
import getpass
import io
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autotune.children import Children
from autotune.deliver import closing, files, wording
from autotune.deliver.narrator import Narrator
from autotune.events import Outcome, RunFinished, RunOutcome
from autotune.folder import Earlier
from autotune.job import Job, read_job
from autotune.plan import recipe
from autotune.plan.axes import build_space
from autotune.plan.data import Data
from autotune.plan.space import Arrangement, Candidate, Grade
from autotune.probe.machine import LayerKernels, Machine
from autotune.search.found import Found, why_kept
from autotune.search.gates import Gate
from autotune.search.setting import Setting
from autotune.search.statistics import Estimate
from autotune.trial.result import TrialResult
from profiles import Profile
from tests import parts, tiny

ODD_FOLDER = 'Ann\'s "best" $runs; (1)'

MINE = """\
# Our support bot, third attempt
model_name_or_path: ../model   # the small one

datasets:
  - path: json
    data_files: rows.jsonl     # not to leave the house
    split: train
per_device_train_batch_size: 8
learning_rate: 2e-5            # from the paper
max_length: 512
model_init_kwargs:
  attn_implementation: sdpa    # flash does not run here
output_dir: out
use_cpu: true
bf16: false
"""

BFD = Arrangement("bfd", 1, 1, 464)
MakeSetting = Callable[..., Setting]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job's folder, with a name that needs quotes in a shell; the model is beside it."""
    folder = tmp_path_factory.mktemp("deliver") / ODD_FOLDER
    folder.mkdir()
    tiny.make_model(folder.parent / "model")
    return folder


@pytest.fixture(scope="module")
def make_setting(children: Children, folder: Path) -> MakeSetting:
    """A search's setting for a job given by its YAML and arguments."""

    def make(
        text: str | None = MINE,
        *arguments: str,
        machine: Machine | None = None,
        allowed: frozenset[Grade] = frozenset({"exact", "regrouped"}),
    ) -> Setting:
        here = machine or parts.cpu_machine()
        given = list(arguments)
        if text is not None:
            (folder / "sft.yaml").write_text(text)
            given = ["--config", "sft.yaml", *given]
        job = read_job(
            "sft", given, folder=folder, children=children, accelerator=here.backend == "cuda", cpu_bf16=True
        )
        data = Data(job, parts.lengths_of(tiny.lengths(300)))
        return Setting(
            job=job,
            machine=here,
            model=parts.SHAPE,
            data=data,
            space=build_space(job, here, data, allowed=allowed),
            children=children,
            folder=folder / "run",
            emit=lambda event: None,
            budget_seconds=60.0,
        )

    return make


def winner_of(setting: Setting) -> Candidate:
    """Packed, without checkpointing, with eager attention; on a CPU with two threads."""
    base = setting.space.baseline
    return msgspec.structs.replace(
        base, arrangement=BFD, attention="eager", checkpointing="off", threads=None if base.threads is None else 2
    )


def trial(
    setting: Setting, index: int, candidate: Candidate, rate: float | None = None, outcome: Outcome = "ok", **more: Any
) -> TrialResult:
    return TrialResult(
        index=index,
        purpose="speed",
        candidate=candidate,
        label=setting.label(candidate),
        outcome=outcome,
        rate=rate,
        peak_bytes=more.pop("peak_bytes", 700_000_000),
        startup_seconds=1.0,
        step_seconds=4.0,
        seconds=5.0,
        **more,
    )


def found_in(setting: Setting, outcome: RunOutcome = "improved") -> Found:
    """A search of five trials: the baseline, the winner, one slower, one out of memory, one stopped early."""
    base = setting.space.baseline
    baseline = trial(setting, 0, base, 1200.0)
    best = trial(setting, 1, winner_of(setting), 3120.0, peak_bytes=900_000_000)
    eager = msgspec.structs.replace(base, attention="eager")
    at_once = msgspec.structs.replace(base, arrangement=Arrangement("padded", 4, 2), checkpointing="off")
    results = (
        baseline,
        best,
        trial(setting, 2, eager, 999.7),
        trial(
            setting, 3, at_once, outcome="oom", where="backward", detail="RuntimeError: 5 | 7\nbytes", peak_bytes=None
        ),
        trial(setting, 4, msgspec.structs.replace(eager, checkpointing="off"), outcome="pruned", partial_rate=200.0),
    )
    return Found(
        outcome=outcome,
        winner=winner_of(setting),
        baseline=baseline,
        best=best,
        speedup=Estimate(2.6, 2.512, 2.691),
        confirmed_rounds=5,
        results=results,
        ruled_out={msgspec.structs.replace(at_once, workers=1): "needs at least the memory of #3, which ran out"},
        gates=(
            Gate("leakage", True, "moves its neighbour's logits by 1.0e-06", 1e-6),
            Gate("kernel", True, "eager ran"),
        ),
        memory=(msgspec.structs.replace(best, peak_bytes=2_100_000_000),),
        search_seconds=40.0,
        confirm_seconds=15.0,
    )


def kept_in(setting: Setting) -> Found:
    baseline = trial(setting, 0, setting.space.baseline, 1200.0)
    return msgspec.structs.replace(
        found_in(setting, "kept"),
        winner=setting.space.baseline,
        best=baseline,
        speedup=Estimate(1.0, 1.0, 1.0),
        gates=(),
    )


def failed_in(setting: Setting) -> Found:
    base = setting.space.baseline
    return Found(
        outcome="failed",
        winner=base,
        baseline=None,
        best=None,
        speedup=None,
        confirmed_rounds=0,
        results=(trial(setting, 0, base, outcome="error", where="forward", detail="ValueError: no"),),
        ruled_out={},
        search_seconds=4.0,
    )


@pytest.fixture
def delivered(make_setting: MakeSetting, tmp_path: Path) -> Path:
    """A folder with the files of a run that found something better."""
    setting = make_setting()
    files.write(setting, found_in(setting), tmp_path, seconds=61.0)
    return tmp_path


# --- tuned.yaml ------------------------------------------------------------------------------------------------------


def test_the_tuned_config_is_the_users_with_the_changes_in_place(delivered: Path) -> None:
    lines = (delivered / "tuned.yaml").read_text().splitlines()
    for line in MINE.splitlines():
        name = line.split(":")[0].strip()
        if name not in ("per_device_train_batch_size", "max_length", "attn_implementation"):
            assert line in lines
    untouched = [line for line in MINE.splitlines() if line in lines]
    assert [line for line in lines if line in untouched] == untouched
    assert any(line.startswith("per_device_train_batch_size: 1 ") for line in lines)
    assert any(line.startswith("  attn_implementation: eager") for line in lines)


def test_every_changed_line_of_the_tuned_config_carries_grade_and_reason(delivered: Path) -> None:
    text = (delivered / "tuned.yaml").read_text()
    for line in text.splitlines():
        name = line.split(":")[0].strip()
        if name in ("per_device_train_batch_size", "packing", "packing_strategy", "max_length"):
            assert "# regrouped: " in line
        if name in ("attn_implementation", "gradient_checkpointing", "num_cpu_threads_per_process"):
            assert " exact: " in line
    assert "# flash does not run here; exact: " in text  # the user's own comment stays in front
    assert text.count(" regrouped: ") == 4
    assert text.count(" exact: ") == 3


def test_trl_reads_the_tuned_config_as_the_winner(delivered: Path, children: Children, folder: Path) -> None:
    [answer] = children.call(
        "tests.trl_side:parse_all",
        {"configs": [(delivered / "tuned.yaml").read_text()]},
        deadline_seconds=60,
        working_folder=folder,
    )
    fields = answer["fields"]
    assert answer["launcher"] == ["--num_cpu_threads_per_process", "2"]
    assert (fields["packing"], fields["packing_strategy"], fields["max_length"]) == (True, "bfd", 464)
    assert (fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]) == (1, 1)
    assert fields["gradient_checkpointing"] is False
    assert fields["model_init_kwargs"] == {"attn_implementation": "eager"}
    assert fields["learning_rate"] == 2e-5
    assert fields["datasets"][0]["data_files"] == "rows.jsonl"


def test_options_of_the_command_line_are_in_the_tuned_config(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting(MINE, "--learning_rate", "1e-4", "--num_train_epochs", "2")
    files.write(setting, found_in(setting), tmp_path, seconds=61.0)
    read = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    assert float(read["learning_rate"]) == 1e-4
    assert read["num_train_epochs"] == 2


def test_a_job_without_a_file_gets_one(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting(
        None, "--model_name_or_path", "../model", "--dataset_name", "data", "--max_length", "512", "--bf16", "false"
    )
    files.write(setting, found_in(setting), tmp_path, seconds=61.0)
    text = (tmp_path / "tuned.yaml").read_text()
    read = yaml.safe_load(text)
    assert list(read)[:2] == ["model_name_or_path", "dataset_name"]
    assert (read["packing"], read["bf16"], read["use_cpu"]) == (True, False, True)
    assert re.search(r"^use_cpu: true +# no GPU here", text, re.MULTILINE)


def test_what_is_kept_is_the_users_config_to_the_letter(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting()
    delivered = files.write(setting, kept_in(setting), tmp_path, seconds=61.0)
    assert (tmp_path / "tuned.yaml").read_text() == MINE
    assert delivered.options == {}


def test_without_a_trial_that_ran_there_is_only_a_report(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting()
    delivered = files.write(setting, failed_in(setting), tmp_path, seconds=61.0)
    assert (delivered.config, delivered.profile) == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    assert (tmp_path / "report.md").read_text().startswith("# No trial finished\n")


def test_of_several_gpus_the_tuned_config_uses_the_one_that_was_tuned_on(
    make_setting: MakeSetting, tmp_path: Path
) -> None:
    setting = make_setting(MINE.replace("use_cpu: true\n", "env: {MINE: 1}\n"), machine=parts.gpu_machine(gpus=2))
    files.write(setting, found_in(setting), tmp_path, seconds=61.0)
    read = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    assert read["num_processes"] == 1
    assert read["env"] == {"MINE": 1, "CUDA_VISIBLE_DEVICES": parts.gpu(0).uuid}
    assert f"export CUDA_VISIBLE_DEVICES={parts.gpu(0).uuid}" in (tmp_path / "launch.sh").read_text().splitlines()
    profile = yaml.safe_load((tmp_path / "profile.yaml").read_text())
    assert "env" not in profile["options"]
    assert profile["placement"] == {"processes": 1}


def test_with_one_gpu_the_config_names_none(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting(MINE.replace("use_cpu: true\n", ""), machine=parts.gpu_machine())
    files.write(setting, found_in(setting), tmp_path, seconds=61.0)
    assert not {"num_processes", "env"} & set(yaml.safe_load((tmp_path / "tuned.yaml").read_text()))


# --- launch.sh -------------------------------------------------------------------------------------------------------


def test_the_launch_script_runs_trl_in_the_jobs_folder_whatever_its_name(
    make_setting: MakeSetting, tmp_path: Path
) -> None:
    run = tmp_path / "it's a `run` $HOME"
    run.mkdir()
    setting = make_setting(MINE, "--cpu")
    files.write(setting, found_in(setting), run, seconds=61.0)
    script = run / "launch.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    said = run_with_fake_trl(script, tmp_path, "--num_train_epochs", "3")
    assert said == [
        setting.job.folder, "sft", "--config", str(run / "tuned.yaml"), "--cpu", "--num_train_epochs", "3",
    ]  # fmt: skip


def run_with_fake_trl(script: Path, tmp_path: Path, *arguments: str) -> list[str]:
    """Run the script with a `trl` that says where it is and what it is given. The script puts its own folder of
    programs in front, so that line is taken out."""
    (tmp_path / "bin").mkdir()
    trl = tmp_path / "bin" / "trl"
    trl.write_text('#!/bin/sh\npwd\nfor one in "$@"; do echo "$one"; done\n')
    trl.chmod(0o755)
    lines = [line for line in script.read_text().splitlines() if not line.startswith("export PATH=")]
    assert len(lines) == len(script.read_text().splitlines()) - 1
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines), "launch.sh", *arguments],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


# --- report.md -------------------------------------------------------------------------------------------------------


def report_of(setting: Setting, found: Found, tmp_path: Path) -> str:
    files.write(setting, found, tmp_path, seconds=61.0)
    return (tmp_path / "report.md").read_text()


def rows_below(heading: str, text: str) -> list[list[str]]:
    """The rows of the table below a heading, as cells."""
    section = text.split(f"## {heading}\n")[1].split("\n## ", maxsplit=1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_report_begins_with_the_result_and_has_its_sections_in_order(delivered: Path) -> None:
    text = (delivered / "report.md").read_text()
    assert re.findall(r"^#+ .*", text, re.MULTILINE) == [
        "# 2.60x (2.51 to 2.69) as fast as yours",
        "## What changed",
        "## In Python",
        "## Still the same training",
        "## What was tried",
        "## What failed most",
        "## What was out, and why",
        "## Where the time went",
    ]
    assert "| yours: padded, 8 x 1, sdpa, checkpointing, 1 thread | 1.20k | 14 s | 0.7 GB |" in text
    assert "| tuned: bfd 464, 1 x 1, eager, no checkpointing, 2 threads | 3.12k | 5.5 s | 2.1 GB |" in text


def test_the_report_lists_every_trial_the_fastest_first(delivered: Path) -> None:
    rows = rows_below("What was tried", (delivered / "report.md").read_text())
    assert [row[0] for row in rows] == ["1", "0", "2", "3", "4"]
    assert {len(row) for row in rows} == {7}
    assert rows[0][2:] == ["regrouped", "3.12k", "2.60x", "0.9 GB", "ok"]
    assert rows[1][1] == "yours (padded, 8 x 1, sdpa, checkpointing, 1 thread)"
    assert rows[2][3:5] == ["1.00k", "0.83x"]
    assert rows[3][3:] == ["", "", "-", r"out of memory in backward (RuntimeError: 5 \| 7 bytes)"]
    assert rows[4][3:] == ["", "", "0.7 GB", "stopped early: it could not reach the best"]


def test_the_report_says_what_changed_with_grade_and_reason(delivered: Path) -> None:
    rows = rows_below("What changed", (delivered / "report.md").read_text())
    assert {row[0]: row[1:4] for row in rows} == {
        "`per_device_train_batch_size`": ["`8`", "`1`", "regrouped"],
        "`packing`": ["`false`", "`true`", "regrouped"],
        "`packing_strategy`": ["`bfd`", "`bfd`", "regrouped"],
        "`max_length`": ["`512`", "`464`", "regrouped"],
        "`attn_implementation`": ["`sdpa`", "`eager`", "exact"],
        "`gradient_checkpointing`": ["`true`", "`false`", "exact"],
        "`num_cpu_threads_per_process`": ["`1`", "`2`", "exact"],
    }
    assert all(row[4] for row in rows)


def test_the_report_says_what_was_out_and_why(delivered: Path) -> None:
    rows = rows_below("What was out, and why", (delivered / "report.md").read_text())
    assert ["attention", "flash_attention_2", "no GPU here"] in rows
    assert rows[-1][2] == "needs at least the memory of #3, which ran out"


def test_the_python_of_the_report_is_the_winner(delivered: Path) -> None:
    text = (delivered / "report.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    threads, config = ast.parse(code).body
    assert ast.unparse(threads) == "torch.set_num_threads(2)"
    assert isinstance(config, ast.Expr)
    call = config.value
    assert isinstance(call, ast.Call)
    assert {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords} == {
        "per_device_train_batch_size": 1,
        "packing": True,
        "packing_strategy": "bfd",
        "max_length": 464,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"attn_implementation": "eager"},
    }


def test_layer_kernels_stand_beside_the_users_own_keys_which_no_profile_has(
    make_setting: MakeSetting, tmp_path: Path
) -> None:
    machine = msgspec.structs.replace(
        parts.cpu_machine(), layer_kernels=LayerKernels(usable=True, reason="ran", names=("RMSNorm",))
    )
    own = "model_init_kwargs:\n  attn_implementation: sdpa  # mine\n  token: secret\n  cache_dir: /home/me\n"
    setting = make_setting(
        MINE.replace("model_init_kwargs:\n  attn_implementation: sdpa    # flash does not run here\n", own),
        machine=machine,
    )
    base = setting.space.baseline
    winner = msgspec.structs.replace(base, layer_kernels=True, attention="eager", checkpointing="off")
    found = found_in(setting)
    best = msgspec.structs.replace(found.results[1], candidate=winner)
    found = msgspec.structs.replace(found, winner=winner, best=best, results=(found.results[0], best))
    text = report_of(setting, found, tmp_path)
    tuned = (tmp_path / "tuned.yaml").read_text()
    assert yaml.safe_load(tuned)["model_init_kwargs"] == {
        "attn_implementation": "eager",
        "token": "secret",
        "cache_dir": "/home/me",
        "use_kernels": True,
    }
    assert "RMSNorm: ran" in tuned
    assert "'use_kernels': True" in text.split("```python\n")[1]
    assert "secret" not in text
    options = yaml.safe_load((tmp_path / "profile.yaml").read_text())["options"]
    assert options == {
        "attn_implementation": "eager",
        "gradient_checkpointing": False,
        "model_init_kwargs": {"use_kernels": True},
    }


def test_a_report_without_a_gain_says_so_and_still_lists_what_was_tried(
    make_setting: MakeSetting, tmp_path: Path
) -> None:
    setting = make_setting()
    text = report_of(setting, kept_in(setting), tmp_path)
    assert text.startswith("# Your settings are kept: nothing beat yours beyond the noise\n")
    assert "## What changed" not in text
    assert "| tuned" not in text
    assert len(rows_below("What was tried", text)) == 5


def test_a_report_of_a_baseline_that_did_not_run_says_why_where_its_figures_would_stand(
    make_setting: MakeSetting, tmp_path: Path
) -> None:
    setting = make_setting()
    found = found_in(setting)
    out = trial(setting, 0, setting.space.baseline, outcome="oom", where="backward")
    found = msgspec.structs.replace(found, baseline=None, speedup=None, results=(out, *found.results[1:]))
    text = report_of(setting, found, tmp_path)
    assert text.startswith("# Yours did not run here, and this does\n")
    assert "| yours | did not run: out of memory in backward |  |  |" in text
    profile = yaml.safe_load((tmp_path / "profile.yaml").read_text())
    assert profile["evidence"]["baseline_rate"] is None
    assert profile["evidence"]["speedup"] is None


def test_a_report_says_when_it_was_interrupted_or_not_confirmed(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting()
    found = msgspec.structs.replace(found_in(setting, "interrupted"), confirmed_rounds=0)
    assert report_of(setting, found, tmp_path).startswith(
        "# 2.60x (2.51 to 2.69) as fast as yours, not confirmed (interrupted)\n"
    )


def test_the_report_shows_the_first_real_traceback_of_the_commonest_failure(
    make_setting: MakeSetting, tmp_path: Path
) -> None:
    setting = make_setting()
    base = setting.space.baseline
    rare = trial(setting, 0, base, outcome="oom", where="backward", detail="OutOfMemoryError: CUDA out of memory")
    eager = msgspec.structs.replace(base, attention="eager")
    common = [
        trial(setting, number, eager, outcome="error", where="forward", detail="ValueError: no ```")
        for number in (1, 2)
    ]
    found = msgspec.structs.replace(failed_in(setting), results=(rare, *common))
    for number in (0, 1, 2):
        setting.trial_folder(number).mkdir(parents=True, exist_ok=True)
        (setting.trial_folder(number) / "output.log").write_text(
            f"noise\nTraceback (most recent call last):\n  File 'of trial {number}', line 1\nValueError: no ```\n"
            "Traceback (most recent call last):\n  File 'launcher', line 2\nSystemExit: 1\n"
        )
    report = report_of(setting, found, tmp_path)
    section = report.split("## What failed most\n\n")[1].split("\n## ")[0].rstrip()
    assert section == (
        "2 of 3 failures, first in #1: an error in forward (ValueError: no ```)\n\n"
        "````text\nTraceback (most recent call last):\n  File 'of trial 1', line 1\nValueError: no ```\n````"
    )


def test_the_report_tells_of_the_earlier_run_it_started_from(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting()
    setting.earlier = Earlier("one", winner_of(setting), "bfd 464", speedup=2.5, changed=("`max_length` 512 -> 1024",))
    report = report_of(setting, found_in(setting), tmp_path)
    assert (
        "* an earlier run (one) found bfd 464, 2.50x as fast as yours; changed since: `max_length` 512 -> 1024: that "
        "is tried first in a full search\n" in report
    )


def test_the_report_says_why_the_search_ended_and_how_near_its_predictions_came(
    make_setting: MakeSetting, tmp_path: Path
) -> None:
    setting = make_setting()
    found = found_in(setting)
    assert "How the search went" not in report_of(setting, found, tmp_path)
    results = tuple(msgspec.structs.replace(one, at_speed=0.8 if one.index < 2 else 1.0) for one in found.results)
    said = msgspec.structs.replace(found, ended="no gain in the last 14 trials", predicted="half of 9", results=results)
    section = report_of(setting, said, tmp_path).split("## How the search went\n\n")[1].split("\n\n")[0]
    assert section.splitlines() == [
        "* it ended: no gain in the last 14 trials",
        "* half of 9",
        "* the machine changed its speed meanwhile: the figures of #0, #1 are brought to that of its end",
    ]


def test_a_rate_that_was_brought_to_another_speed_is_called_an_estimate_beside_what_was_measured(
    make_setting: MakeSetting, tmp_path: Path
) -> None:
    setting = make_setting()
    found = found_in(setting)
    base = setting.space.baseline
    results = tuple(msgspec.structs.replace(one, at_speed=0.8) if one.rate else one for one in found.results)
    rows = rows_below("What was tried", report_of(setting, msgspec.structs.replace(found, results=results), tmp_path))
    outcomes = {row[0]: row[-1] for row in rows if row[3]}
    scaled = [one for one in results if one.rate and one.candidate != base]
    assert scaled
    for one in scaled:
        assert f"est.: {wording.rate((one.rate or 0.0) / 0.8)} was measured before" in outcomes[str(one.index)]
    assert "est." not in outcomes["0"]


def test_a_run_without_a_failure_has_no_section_of_them(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting()
    kept = kept_in(setting)
    fine = tuple(one for one in kept.results if one.outcome in ("ok", "pruned"))
    report = report_of(setting, msgspec.structs.replace(kept, results=fine), tmp_path)
    assert "## What was tried" in report
    assert "What failed most" not in report


def test_the_time_of_earlier_sessions_is_not_counted_with_this_ones(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting()
    found = found_in(setting)
    results = tuple(msgspec.structs.replace(one, step_seconds=30.0, startup_seconds=1.0) for one in found.results)
    found = msgspec.structs.replace(found, results=results, session_index=4)
    text = report_of(setting, found, tmp_path)
    assert " in this session, to which these figures belong, 40 s of it searching" in text
    assert "75% inside measured and warm-up steps, 2% starting trials, 22% elsewhere" in text
    assert len(rows_below("What was tried", text)) == len(results)


def test_what_ran_on_a_busy_machine_is_listed_last_and_says_so(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting()
    found = found_in(setting)
    results = tuple(msgspec.structs.replace(one, busy=one.index == 2, rate=one.rate) for one in found.results)
    rows = rows_below("What was tried", report_of(setting, msgspec.structs.replace(found, results=results), tmp_path))
    assert rows[-1][0] == "2"
    assert rows[-1][-1] == "ok; the machine was busy"


# --- profile.yaml ----------------------------------------------------------------------------------------------------


def test_the_profile_comes_back_as_it_was(make_setting: MakeSetting, delivered: Path) -> None:
    setting = make_setting()
    found = found_in(setting)
    options = {change.name: change.value for change in recipe.changes(setting.job, setting.space, found.winner)}
    made = files.profile_of(setting, found, options)
    read = yaml.safe_load((delivered / "profile.yaml").read_text())
    assert msgspec.convert(read, Profile) == made
    assert read["schema"] == 1
    assert read["options"] == options
    assert read["evidence"]["gates"]["leakage"] == 1e-6
    assert read["evidence"]["speedup_interval"] == [2.512, 2.691]
    assert read["valid_for"]["lengths"]["max_length"] == 512


def test_the_profile_names_no_path_host_or_person(make_setting: MakeSetting, delivered: Path, folder: Path) -> None:
    text = (delivered / "profile.yaml").read_text()
    for private in (
        str(folder), folder.parent.name, ODD_FOLDER, str(delivered), "../model", "rows.jsonl", "sft.yaml",
        socket.gethostname(), str(Path.home()), os.sep + "tmp",
    ):  # fmt: skip
        assert private not in text
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)


def test_the_profile_of_a_gpu_names_the_gpu_and_that_of_a_cpu_the_cpu(
    make_setting: MakeSetting, delivered: Path, tmp_path: Path
) -> None:
    on_cpu = yaml.safe_load((delivered / "profile.yaml").read_text())["valid_for"]
    assert (on_cpu["gpus"], on_cpu["cpu"]) == ([], {"name": "AMD EPYC", "cores": 2})
    setting = make_setting(MINE.replace("use_cpu: true\n", ""), machine=parts.gpu_machine(gpus=2))
    files.write(setting, found_in(setting), tmp_path, seconds=61.0)
    on_gpu = yaml.safe_load((tmp_path / "profile.yaml").read_text())["valid_for"]
    assert on_gpu["cpu"] is None
    assert on_gpu["gpus"] == [
        {"name": "NVIDIA A100-SXM4-80GB", "compute_capability": [8, 0], "memory_bytes": 80 * 2**30, "count": 1}
    ]
    assert on_gpu["versions"]["driver"] == "580.95.05"
    assert parts.gpu(0).uuid not in (tmp_path / "profile.yaml").read_text()


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0.0 s"), (0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (10.4, "10 s"), (59.4, "59 s"),
        (59.6, "1 min 00 s"), (60.0, "1 min 00 s"), (348.0, "5 min 48 s"), (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"), (11100.0, "3 h 05 min"), (360000.0, "100 h 00 min"),
    ],
)  # fmt: skip
def test_seconds_in_words(value: float, words: str) -> None:
    assert wording.seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"), (930.4, "930"), (999.4, "999"), (999.6, "1.00k"), (1000.0, "1.00k"), (4708.0, "4.71k"),
        (9994.0, "9.99k"), (9996.0, "10.0k"), (43_000.0, "43.0k"), (1_250_000.0, "1250.0k"),
    ],
)  # fmt: skip
def test_rates_in_words(value: float, words: str) -> None:
    assert wording.rate(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "-"), (0, "0.0 GB"), (49_000_000, "0.0 GB"), (51_000_000, "0.1 GB"), (85_899_345_920, "85.9 GB")],
)
def test_bytes_in_words(value: int | None, words: str) -> None:
    assert wording.gigabytes(value) == words


def test_a_ratio_that_says_nothing_is_not_told_in_numbers() -> None:
    assert wording.ratio(Estimate(2.5, 0.01, 603.0)) == "not known (too unsure to tell; try again on an idle machine)"


def test_a_ratio_has_its_interval() -> None:
    assert wording.ratio(Estimate(2.614, 2.566, 2.656)) == "2.61x (2.57 to 2.66)"


@pytest.mark.parametrize(
    ("mixture", "name"),
    [
        ([{"path": "json", "data_files": "a/b.jsonl"}], "b.jsonl"),
        ([{"path": "someone/data", "name": "de"}], "de"),
        ([{"path": "someone/data"}], "someone/data"),
        ([{"path": f"data-{number}"} for number in range(5)], "data-0, data-1, data-2 and 2 more"),
    ],
)
def test_data_is_named_as_the_user_names_it(
    mixture: list[dict[str, str]], name: str, make_setting: MakeSetting
) -> None:
    job: Job = make_setting().job
    assert wording.data_name(msgspec.structs.replace(job, resolved={**job.resolved, "datasets": mixture})) == name


def test_the_last_lines_tell_what_an_epoch_saves(make_setting: MakeSetting) -> None:
    setting = make_setting()
    said = dict(closing.lines(setting, found_in(setting), seconds=61.0))
    assert said["best"].startswith("#1  bfd 464, 1 x 1, eager, no checkpointing, 2 threads   2.60x (2.51 to 2.69)")
    assert said["epoch"] == "3 epochs 43 s -> 17 s; tuning took 1 min 01 s, paid back after 2.3 trainings"
    assert dict(closing.lines(setting, failed_in(setting), seconds=61.0)) == {}
    assert list(dict(closing.lines(setting, kept_in(setting), seconds=61.0))) == ["best", "epoch"]


def test_what_is_learnt_otherwise_is_said_wherever_the_result_is(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting(MINE, allowed=frozenset({"exact", "regrouped", "changed"}))
    wrapped = next(
        one for one in setting.space.candidates() if one.arrangement.name == "wrapped" and one.attention == "sdpa"
    )
    found = found_in(setting)
    best = trial(setting, 1, wrapped, 2600.0)
    found = msgspec.structs.replace(found, winner=wrapped, best=best, results=(found.results[0], best))
    hazard = "changes what is learnt: documents attend to their neighbours in the row"

    said = [text for topic, text in closing.lines(setting, found, seconds=61.0) if topic == "best"]
    assert said[1].startswith(hazard)
    text = report_of(setting, found, tmp_path)
    below = text.split("## Not the same training\n\n")[1].splitlines()
    assert below[0].startswith(f"* {hazard}")
    assert "Still the same training" not in text
    comments = [line for line in (tmp_path / "tuned.yaml").read_text().splitlines() if "packing_strategy" in line]
    assert hazard in comments[0]
    evidence = yaml.safe_load((tmp_path / "profile.yaml").read_text())["evidence"]
    assert evidence["grade"] == "changed"
    assert evidence["differences"][0].startswith(hazard)


@pytest.mark.parametrize(
    ("grade", "said"),
    [
        ("exact", "2.60x as fast as yours\n"),
        ("rounded", "2.60x as fast as yours, in lower precision\n"),
        ("changed", "2.60x as fast as yours, and another training\n"),
    ],
)
def test_the_result_line_says_what_grade_of_result_it_is(grade: str, said: str) -> None:
    stream = io.StringIO()
    narrator = Narrator(stream)
    narrator(
        RunFinished(
            outcome="improved",
            run="run",
            rate_unit="useful tokens/s",
            baseline_rate=1000.0,
            best_rate=2600.0,
            speedup=2.6,
            speedup_interval=(2.5, 2.7),
            trials=2,
            seconds=5.0,
            best={},
            config=None,
            profile=None,
            grade=grade,
        )
    )
    assert stream.getvalue().endswith(said)


def test_yours_is_kept_for_the_reason_there_is(make_setting: MakeSetting, tmp_path: Path) -> None:
    setting = make_setting()
    kept = kept_in(setting)
    alone = msgspec.structs.replace(kept, results=kept.results[:1])
    assert "nothing but yours was measured" in closing_of(setting, alone)
    fast = trial(setting, 1, winner_of(setting), 2600.0)
    slower = Estimate(0.4, 0.2, 0.7)
    turns = (trial(setting, 5, setting.space.baseline, 1000.0), trial(setting, 6, winner_of(setting), 400.0))
    found = msgspec.structs.replace(
        kept,
        results=(kept.results[0], fast),
        contender=fast,
        contender_ratio=slower,
        in_turns=turns,
        confirmed_rounds=5,
        busy=True,
    )
    why = "#1 was faster than yours in the search and 0.40x as fast in turns with it, on a busy machine"
    assert closing_of(setting, found).startswith(why)
    text = report_of(setting, found, tmp_path)
    assert text.startswith(f"# Your settings are kept: {why}")
    assert [row[1:3] for row in rows_below("Measured in turns", text)] == [["1.00k", "1.00x"], ["400", "0.40x"]]
    assert "Other processes had the cores in every round." in text


def closing_of(setting: Setting, found: Found) -> str:
    """The line about the best."""
    return dict(closing.lines(setting, found, seconds=61.0))["best"]


def test_an_interrupted_run_says_how_to_go_on_with_it() -> None:
    stream = io.StringIO()
    narrator = Narrator(stream)
    narrator._method = "sft"
    narrator(
        RunFinished(
            outcome="interrupted",
            run="autotune-runs/my run",
            rate_unit="useful tokens/s",
            baseline_rate=None,
            best_rate=None,
            speedup=None,
            speedup_interval=None,
            trials=1,
            seconds=5.0,
            best={},
            config="autotune-runs/my run/tuned.yaml",
            profile=None,
        )
    )
    assert "go on    trl-autotune sft --resume 'autotune-runs/my run'\n" in stream.getvalue()


def test_a_training_of_so_many_steps_is_told_in_steps(make_setting: MakeSetting) -> None:
    setting = make_setting()
    setting.job = msgspec.structs.replace(setting.job, resolved={**setting.job.resolved, "max_steps": 8})
    text = dict(closing.lines(setting, found_in(setting), seconds=61.0))["epoch"]

    assert text.startswith("8 steps ")


def test_what_is_said_of_a_result_that_is_kept_is_why(make_setting: MakeSetting) -> None:
    kept = kept_in(make_setting())
    alone = msgspec.structs.replace(kept, results=kept.results[:1])
    unsure = msgspec.structs.replace(kept, contender=kept.results[1], contender_ratio=Estimate(1.88, 0.9, 3.5))
    unknown = msgspec.structs.replace(unsure, contender_ratio=Estimate(1.88, 0.01, 603.0))

    assert why_kept(kept) == "nothing beat yours beyond the noise"
    assert why_kept(alone).startswith("nothing but yours was measured")
    assert "1.88x as fast as yours, and 0.90 to 3.50 is too unsure" in why_kept(unsure)
    assert why_kept(unknown) == (
        "whether #1 is faster than yours is not known: too unsure to tell; try again on an idle machine"
    )
