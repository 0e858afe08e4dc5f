"""`doctor`: what is here on one screen, or as JSON that can be fed back, and nothing about the people."""

from __future__ import annotations

import io
import json
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune import cli, session
from autotune.arguments import doctor_options, doctor_parser
from autotune.children import ChildError, Children
from autotune.deliver import doctor
from autotune.deliver.redaction import redacted
from autotune.errors import AutotuneError
from autotune.probe import machine as machine_module
from autotune.probe.facts import Problem
from autotune.probe.gpus import GpuProcess, NvmlReport
from autotune.probe.machine import AttentionBackend, LayerKernels, Machine, machine_from_json, to_json
from autotune.probe.versions import TorchBuild
from tests import parts, tiny

MACHINES = Path(__file__).parent / "data" / "machines"
TRIED = (
    AttentionBackend("sdpa", True, "dense mask", "ran", milliseconds=1.234, error=0.0),
    AttentionBackend("kernels-community/flash-attn2", True, "variable length", "ran", milliseconds=0.41, revision="a1"),
    AttentionBackend("flex_attention", True, "dense mask", "ran", milliseconds=12.5),
    AttentionBackend("flash_attention_2", False, "variable length", "the package `flash-attn` is not installed"),
    AttentionBackend("flash_attention_3", False, "variable length", "the package `flash-attn-3` is not installed"),
    AttentionBackend("kernels-community/vllm-flash-attn3", False, "variable length", "fails in backward: no build"),
)


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command as a person would run it, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "autotune", "doctor", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def screen(machine: Machine, *, width: int = 80) -> list[str]:
    stream = io.StringIO()
    doctor.show(machine, stream, width=width)
    return stream.getvalue().splitlines()


def a100(**changes: Any) -> Machine:
    """One A100 without trouble, everything told."""
    versions = {
        "python": "3.11.7", "trl": "1.16.0", "transformers": "5.22.2", "torch": "2.13.0+cu130", "torch_cuda": "13.0",
        "accelerate": "1.15.0", "peft": "0.21.2", "datasets": "5.2.0", "kernels": "0.17.2", "vllm": None,
    }  # fmt: skip
    whole = {
        "backend": "cuda",
        "gpus": (parts.gpu(),),
        "driver": "580.95.05",
        "cuda_driver": (13, 0),
        "versions": versions,
        "attention": TRIED,
        "layer_kernels": LayerKernels(True, "ran forward and backward", ("RMSNorm", "SwiGLU")),
    }
    return parts.machine(**{**whole, **changes})


# --- as processes -------------------------------------------------------------------------------------------------


def test_doctor_tells_the_machine_in_json_that_can_be_fed_back(tmp_path: Path) -> None:
    told = run("--json")
    assert (told.returncode, told.stderr) == (0, "")
    document = json.loads(told.stdout)
    for field in ("schema", "backend", "gpus", "driver", "cuda_driver", "cpu", "ram_bytes", "versions", "precision",
                  "attention", "problems"):  # fmt: skip
        assert field in document
    assert {one["name"] for one in document["attention"]} >= {"sdpa", "eager", "flash_attention_2"}
    (tmp_path / "machine.json").write_text(told.stdout)
    fed_back = run("--machine", str(tmp_path / "machine.json"), "--json")
    assert (fed_back.returncode, fed_back.stderr) == (0, "")
    again = json.loads(fed_back.stdout)
    assert again["what_if"] is True
    assert {**again, "what_if": False} == document


def test_doctor_shows_a_machine_from_a_file() -> None:
    shown = run("--machine", str(MACHINES / "t4.json"))
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("what-if ")
    assert "Tesla T4, 14.6 of 15.0 GiB free" in shown.stdout
    assert "precision  fp16: compute capability 7.5 is older than Ampere" in shown.stdout
    assert lines[-1] == "problems   no problems found"
    assert "\x1b" not in shown.stdout


def test_doctor_shows_what_was_tried_there_unless_another_precision_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "machine.json").write_bytes(to_json(a100()))
    assert cli.main(["doctor", "--machine", str(tmp_path / "machine.json")]) == 0
    told = capfd.readouterr().out
    assert "attention  tried there" in told
    assert "sdpa 1.23 ms" in told
    assert cli.main(["doctor", "--machine", str(tmp_path / "machine.json"), "--ram", "64GiB", "--cores", "4"]) == 0
    told = capfd.readouterr().out
    assert "attention  tried there" in told
    assert "sdpa 1.23 ms" in told
    assert cli.main(["doctor", "--machine", str(tmp_path / "machine.json"), "--precision", "float32"]) == 0
    told = " ".join(capfd.readouterr().out.split())
    assert "attention expected, not tried" in told
    assert "flash kernels take bf16 and fp16, and the precision is float32" in told


def test_doctor_exits_with_0_where_it_found_problems() -> None:
    shown = run("--machine", str(MACHINES / "driver-without-nvml.json"))
    assert shown.returncode == 0
    assert "* the NVIDIA driver is installed and does not answer" in shown.stdout
    assert "hint: run `nvidia-smi`" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("--machine nowhere.json", "cannot read the machine file `nowhere.json`: No such file or directory"),
        ("--machine .", "cannot read the machine file `.`: Is a directory"),
        ("--machine README.md", "the machine file `README.md` is not JSON"),
        ("--jsn", "unrecognized arguments: --jsn"),
        ("--cores none", "`--cores none` is no number of cores"),
        ("--precision fp16", "`--precision fp16` has no effect on a CPU"),
        ("--gpu-memory 40GB", "`--gpu-memory` is given and there is no GPU here"),
        ("sft", "unrecognized arguments: sft"),
        ("--machine tests/data/machines/t4.json --model there", "`--model` names what attention is tried with"),
        ("--machine tests/data/machines/t4.json --ram -1GB", "`--ram -1GB` is not a size"),
        ("--machine tests/data/machines/t4.json --gpus 1", "`--gpus 1` names `1`, and that is no GPU there"),
        ("--machine=", "`--machine` is given without a file"),
    ],
)  # fmt: skip
def test_what_doctor_cannot_use_is_refused_in_two_lines(
    arguments: str, what: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    assert cli.main(["doctor", *arguments.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    error, hint = err.splitlines()
    assert error.startswith("error: ")
    assert what in error
    assert hint.startswith("hint: ")


def test_the_field_of_a_machine_file_that_is_wrong_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = json.loads((MACHINES / "t4.json").read_text())
    document["gpus"][0]["memory_bytes"] = "15 GB"
    (tmp_path / "machine.json").write_text(json.dumps(document))
    assert cli.main(["doctor", "--machine", str(tmp_path / "machine.json")]) == 2
    assert "wrong in `gpus[0].memory_bytes`: expected `int`, got `str`" in capfd.readouterr().err


def test_attention_is_tried_with_the_heads_of_the_model_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    monkeypatch.setattr(Children, "close", lambda self: None)  # the server that the tests share
    monkeypatch.chdir(tmp_path)
    tiny.make_model(tmp_path / "model")
    options = doctor_options(doctor_parser().parse_args([]))
    assert "sdpa" in [one.name for one in session.examine(options, model="model").attention if one.usable]
    with pytest.raises(AutotuneError, match="nowhere"):
        session.examine(options, model="./nowhere")


def test_a_probe_that_breaks_is_a_problem_and_the_rest_is_told(
    monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    def breaks(*_: Any, **__: Any) -> Any:
        raise ChildError("a helper process ended without an answer: ImportError: torch", hint="run again with `--cold`")

    monkeypatch.setattr(Children, "close", lambda self: None)
    monkeypatch.setattr(session, "probe_attention", breaks)
    machine = session.examine(doctor_options(doctor_parser().parse_args([])), model=None)
    assert machine.problems[-1].what.endswith("ImportError: torch")
    assert "attention  not looked at" in screen(machine)


def test_the_help_of_doctor_tells_its_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--help"]) == 0
    options = set(re.findall(r"--[a-z][a-z-]*", capfd.readouterr().out)) - {"--dry-run"}
    assert options == {
        "--cold", "--cores", "--gpu-memory", "--gpus", "--help", "--json", "--machine", "--model", "--precision",
        "--ram",
    }  # fmt: skip


# --- the screen ---------------------------------------------------------------------------------------------------


def test_one_gpu_without_trouble_is_one_screen() -> None:
    lines = screen(a100())
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", sorted(path.stem for path in MACHINES.glob("*.json")))
@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_machine_fits_the_terminal(name: str, width: int) -> None:
    machine = machine_from_json((MACHINES / f"{name}.json").read_bytes())
    lines = screen(machine, width=width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24 or width < 80


def test_the_screen_tells_what_is_usable_how_fast_and_why_not() -> None:
    text = "\n".join(screen(a100()))
    assert "  usable   dense mask: sdpa 1.23 ms, flex_attention 12.5 ms\n" in text
    assert "           variable length: flash-attn2 0.41 ms\n" in text
    assert "  not      flash_attention_2, flash_attention_3: the package is not installed\n" in text
    assert "           vllm-flash-attn3: fails in backward: no build\n" in text
    assert "layer kernels usable: RMSNorm, SwiGLU; ran forward and backward" in text
    assert "580.95.05, runs CUDA up to 13.0; torch is built for 13.0: they fit" in text
    assert "transformers and kernels fit together" in text


def test_a_driver_too_old_for_torch_and_kernels_that_do_not_fit_are_said() -> None:
    machine = a100(cuda_driver=(12, 4), versions={**a100().versions, "kernels": "0.16.0"})
    text = " ".join(" ".join(screen(machine)).split())
    assert "runs CUDA up to 12.4; torch is built for 13.0: the driver is too old" in text
    assert "transformers 5.22.2 takes kernels 0.17.2 or newer and older than 0.18.0" in text


@pytest.mark.parametrize(
    ("runs", "built_for", "too_old"),
    [((12, 4), "13.0", True), ((12, 4), "12.8", False), ((13, 0), "12.6", False), ((11, 8), "12.1", True)],
)
def test_a_driver_of_an_older_major_version_than_torch_is_a_problem(
    runs: tuple[int, int], built_for: str, too_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = NvmlReport(gpus=(parts.gpu(),), driver="550.54", cuda_driver=runs)
    monkeypatch.setattr(machine_module, "probe_gpus", lambda *_, **__: report)
    monkeypatch.setattr(machine_module, "probe_torch_build", lambda: TorchBuild(cuda=built_for))
    found = [problem.what for problem in machine_module.probe_machine({}).problems]
    said = f"torch is built for CUDA {built_for}, and the driver 550.54 runs CUDA up to {runs[0]}.{runs[1]}, so torch"
    assert sum(what.startswith(said) for what in found) == too_old


def test_bf16_that_is_said_of_a_gpu_without_it_is_told_to_be_emulated() -> None:
    shown = run("--machine", str(MACHINES / "t4.json"), "--precision", "bf16")
    text = " ".join(shown.stdout.split())
    assert "compute capability 7.5 emulates bf16, which is slow; `--precision fp16` is native there" in text
    assert "emulates" not in run("--machine", str(MACHINES / "t4.json")).stdout
    assert "emulates" not in run("--machine", str(MACHINES / "h200.json"), "--precision", "bf16").stdout


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a100-and-t4", "used 2 GPUs are there and one is used, GPU 0, NVIDIA A100-PCIE-40GB: several are not tuned"),
        ("2x-h100-one-busy", "since GPU 0 is in use and this one is like it and free"),
        ("2x-h100-one-busy", "* GPU 0 (NVIDIA H100 80GB HBM3) is in use by `python3` with 59.6 GiB hint: GPU 1,"),
        ("a100-mig", "used 2 MIG slices are there and the first is used: CUDA gives a process one MIG slice"),
        ("mi300x", "GPU 0 AMD Instinct MI300X, 191.5 of 192.0 GiB free; who else"),
    ],
)
def test_which_gpu_is_used_is_on_the_screen(name: str, told: str) -> None:
    assert told in " ".join(run("--machine", str(MACHINES / f"{name}.json")).stdout.split())


def test_a_driver_or_a_torch_that_does_not_fit_leaves_nothing_usable(tmp_path: Path) -> None:
    for changes, what in (
        ({"cuda_driver": [11, 4]}, "the driver is too old for it"),
        ({"gpus": [{**json.loads((MACHINES / "h200.json").read_text())["gpus"][0], "compute_capability": [7, 0]}]},
         "they fit, and torch is not built for the GPU"),
    ):  # fmt: skip
        document = {**json.loads((MACHINES / "h200.json").read_text()), **changes}
        (tmp_path / "machine.json").write_text(json.dumps(document))
        text = " ".join(run("--machine", str(tmp_path / "machine.json")).stdout.split())
        assert what in text
        assert " usable none not sdpa" in text.replace("; hub kernels are in kernels-community/", "")


def test_a_gpu_that_is_shared_held_back_and_linked_says_so() -> None:
    busy = msgspec.structs.replace(
        parts.gpu(),
        linked_to=(1, 2, 3),
        busy_processes=2,
        processes=(GpuProcess(7, "python3", 12 * 2**30), GpuProcess(8, None, None)),
        throttling=("heat",),
    )
    others = tuple(msgspec.structs.replace(parts.gpu(index), linked_to=(0,)) for index in (1, 2, 3, 4))
    text = " ".join(" ".join(screen(a100(gpus=(busy, *others)))).split())
    assert "NVLink to 1-3; busy: 2 other processes (python3 12.0 GiB, not told); throttled: heat" in text
    assert "GPU 1-4 4x NVIDIA A100-SXM4-80GB, 79.0 of 80.0 GiB free" in text


def test_a_slice_is_told_as_one() -> None:
    machine = machine_from_json((MACHINES / "a100-mig.json").read_bytes())
    assert "GPU 0      2x NVIDIA A100-SXM4-80GB MIG 3g.40gb, 39.2 of 39.2 GiB free" in "\n".join(screen(machine))


def test_problems_come_last_with_their_hints() -> None:
    lines = screen(a100(problems=(Problem("one thing", "do this"), Problem("another", "do that"))))
    assert lines[-4:] == [
        "problems   * one thing",
        "             hint: do this",
        "           * another",
        "             hint: do that",
    ]


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_nothing_is_said_by_colour(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FORCE_COLOR", "")
    assert not any("\x1b[3" in line for line in screen(a100()))  # 30 to 39 are colours


# --- what is nobody's business ------------------------------------------------------------------------------------


TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"
POISON = {
    "HOME": "/data/people/mallory",
    "USER": "mallory",
    "HOSTNAME": "secret-box-17.example.com",
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": "0123456789abcdef",
}
POISONED = (
    f"fails in loading: {TOKEN} is no token for /data/people/mallory/.cache/huggingface/hub, mallory@secret-box-17 "
    "(/home/evelyn/venv/lib, key 0123456789abcdef, https://mallory:pw@proxy.example.com, hf_AnotherTokenOfSomeone)"
)
SECRETS = (
    TOKEN,
    "mallory",
    "secret-box-17",
    "evelyn",
    "0123456789abcdef",
    "hf_AnotherTokenOfSomeone",
    "train.py",
    "--key",
)


def poisoned() -> Machine:
    process = GpuProcess(9, "/home/evelyn/venv/bin/python train.py --key 0123456789abcdef", 2**30)
    gpu = msgspec.structs.replace(parts.gpu(), busy_processes=1, processes=(process,))
    return a100(
        gpus=(gpu,),
        attention=(AttentionBackend("kernels-community/flash-attn2", False, "unknown", POISONED),),
        layer_kernels=LayerKernels(False, POISONED),
        problems=(Problem(POISONED, POISONED),),
    )


def test_nothing_about_the_people_is_told() -> None:
    machine = redacted(poisoned(), POISON)
    for text in (to_json(machine).decode(), "\n".join(screen(machine, width=1000))):
        assert [secret for secret in SECRETS if secret in text] == []
        assert "~/.cache/huggingface/hub" in text
    assert machine.gpus[0].processes[0].name == "python"


def test_whose_processes_are_on_a_gpu_is_told_by_name_and_not_by_number() -> None:
    gpu = msgspec.structs.replace(parts.gpu(), busy_processes=1, processes=(GpuProcess(31337, "python3", 2**30),))
    problem = Problem("GPU 0 is in use by `python3` (pid 31337) with 1.0 GiB", "stop it")
    machine = redacted(a100(gpus=(gpu,), problems=(problem,)), {})
    assert b"31337" not in to_json(machine)
    assert machine.gpus[0].processes == (GpuProcess(None, "python3", 2**30),)
    assert machine.gpus[0].uuid == gpu.uuid
    assert machine.problems[0].what == "GPU 0 is in use by `python3` with 1.0 GiB"
    assert gpu.uuid not in "\n".join(screen(machine, width=1000))


def test_the_screen_tells_this_program_and_the_operating_system() -> None:
    machine = a100(versions={"trl_autotune": "0.1.0", "os": "Ubuntu 24.04.3 LTS", "python": "3.11.7"})
    assert "trl-autotune 0.1.0  Ubuntu 24.04.3 LTS  python 3.11.7" in "\n".join(screen(machine))


def test_what_is_not_secret_stays_as_it_is() -> None:
    assert redacted(a100(), POISON) == a100()
    assert redacted(a100(), {}) == a100()


def test_names_that_are_words_leave_the_facts_alone() -> None:
    machine = redacted(a100(), {"HOME": "/", "USER": "sdpa", "HOSTNAME": "NVIDIA", "MY_TOKEN": "cuda"})
    assert (machine.backend, machine.attention, machine.gpus) == ("cuda", TRIED, a100().gpus)


def test_a_poisoned_environment_leaks_nothing_through_the_command(tmp_path: Path) -> None:
    home = tmp_path / "mallory"
    home.mkdir()
    document = json.loads(to_json(poisoned()))
    document["problems"][0]["what"] = f"see {home}/notes and {TOKEN}"
    (tmp_path / "machine.json").write_text(json.dumps(document))
    for arguments in (("--json",), ()):
        told = run(*arguments, "--machine", str(tmp_path / "machine.json"), environment={**POISON, "HOME": str(home)})
        assert told.returncode == 0
        assert [secret for secret in SECRETS if secret in told.stdout + told.stderr] == []
        assert "see ~/notes" in told.stdout


def test_this_machine_tells_neither_its_user_nor_its_home() -> None:
    told = run("--json", environment={"HF_TOKEN": TOKEN})
    user = pwd.getpwuid(os.getuid())
    assert told.returncode == 0
    assert TOKEN not in told.stdout
    assert f"{user.pw_dir}/" not in told.stdout
    assert f"/{user.pw_name}/" not in told.stdout
