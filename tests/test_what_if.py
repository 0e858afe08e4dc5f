"""`--machine FILE --dry-run`: a plan for a machine that is not here, as that machine would give it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune import cli
from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.job import Job, read_job
from autotune.probe.machine import as_torch_sees, read_machine
from tests import commands, tiny

MACHINES = Path(__file__).parent / "data" / "machines"
JOB = """\
model_name_or_path: model
datasets: [{path: json, data_files: rows.jsonl, split: train}]
max_length: 128
output_dir: out
"""


class Answer(commands.Answer, frozen=True):
    @property
    def plan(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        plan: dict[str, Any] = json.loads(self.out)
        return plan

    def axis(self, name: str) -> dict[str, Any]:
        return next(axis for axis in self.plan["axes"] if axis["name"] == name)


Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("what-if") / "model")


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a model, rows, `sft.yaml` that says nothing about precision, and the recorded machines."""
    (tmp_path / "model").symlink_to(model)
    tiny.write_rows(tmp_path / "rows.jsonl", [{"text": tiny.words(5 + row % 30, seed=row)} for row in range(40)])
    (tmp_path / "sft.yaml").write_text(JOB)
    for path in MACHINES.glob("*.json"):
        shutil.copy(path, tmp_path)
    commands.enter(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def ask(folder: Path, children: Children, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ask:
    """Plans for a recorded machine."""
    run = commands.in_this_process(monkeypatch, capfd)

    def ask(name: str, *arguments: str, text: str = "", as_json: bool = True, of_a_file: bool = True) -> Answer:
        (folder / "sft.yaml").write_text(JOB + text)
        config = ["--config", "sft.yaml"] if of_a_file else []
        given = ["sft", *config, "--machine", f"{name}.json", *arguments, "--dry-run"]
        answer = run(*given, *(["--json"] if as_json else []))
        return Answer(answer.code, answer.out, answer.err)

    return ask


# --- the plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "reason", "attention"),
    [
        ("t4", "fp16", "compute capability 7.5 is older than Ampere, which is the first with bf16",
         ["sdpa", "eager"]),
        ("b200", "bf16", "TRL's default, and compute capability 10.0 is Ampere or newer",
         ["sdpa", "eager", "flex_attention", "kernels-community/flash-attn2"]),
        ("mi300x", "bf16",
         "TRL's default, and AMD Instinct MI300X is CDNA 2 or newer, which has bf16 arithmetic", ["sdpa", "eager"]),
        ("cpu", "float32", "this CPU has no bf16 arithmetic; float32", ["sdpa", "eager"]),
    ],
)  # fmt: skip
def test_precision_and_attention_are_those_of_the_machine_asked_about(
    name: str, value: str, reason: str, attention: list[str], ask: Ask
) -> None:
    answer = ask(name)
    assert answer.plan["precision"] == {"value": value, "reason": reason}
    assert [choice["value"] for choice in answer.axis("attention")["choices"]] == attention
    assert all(one["reason"].startswith("expected: ") for one in answer.axis("attention")["rejected"])
    assert ("threads" in [axis["name"] for axis in answer.plan["axes"]]) == (name == "cpu")


def test_a_plan_for_another_machine_says_so_in_json(ask: Ask) -> None:
    plan = ask("t4").plan
    assert list(plan) == [
        "schema", "what_if", "method", "machine", "gpu", "overridden", "precision", "memory", "notes", "candidates",
        "estimate", "axes", "apart",
    ]  # fmt: skip
    assert plan["what_if"] is True
    assert plan["machine"] == "what-if: 1x Tesla T4, 14.6 GiB free"
    assert plan["gpu"]["name"] == "Tesla T4"


def test_the_plan_in_json_tells_what_its_text_tells(ask: Ask) -> None:
    plan = ask("2x-h100-one-busy", "--precision", "fp16", "--gpu-memory", "40GB").plan
    assert (plan["gpu"]["index"], plan["overridden"]) == (1, ["gpu_memory", "precision"])
    told = ask("2x-h100-one-busy", "--precision", "fp16", "--gpu-memory", "40GB", as_json=False).err
    assert {note["topic"] for note in plan["notes"]} == {"job", "machine", "kernels", "data", "plan"}
    for note in plan["notes"]:
        assert note["text"] in told


@pytest.mark.parametrize(
    ("name", "arguments", "fits"),
    [
        ("t4", (), "fits"),
        ("t4", ("--gpu-memory", "700MB"), "tight"),
        ("t4", ("--gpu-memory", "150MB"), "none"),
        ("cpu", (), "fits"),
        ("cpu", ("--memory-limit", "150MB"), "none"),
        ("cpu", ("--ram", "200MB"), "none"),
        ("mi300x", (), "fits"),
    ],
)
def test_a_plan_tells_whether_the_job_fits_into_memory(
    name: str, arguments: tuple[str, ...], fits: str, ask: Ask
) -> None:
    memory = ask(name, *arguments).plan["memory"]
    assert memory["baseline"] == fits
    assert (memory["tight"] + memory["out"] > 0) == (fits != "fits")
    assert (memory["out"] > 0) == (fits == "none")
    told = ask(name, *arguments, as_json=False).err
    verdict = {"fits": "it fits", "tight": "it may not fit; of ", "none": "it does not fit; of "}[fits]
    assert "yours needs about " in told
    assert f"are free: {verdict}" in told


def test_a_plan_for_another_machine_says_so_in_its_first_line(ask: Ask) -> None:
    answer = ask("8x-a100", as_json=False)
    assert answer.code == 0
    assert answer.out.splitlines()[0].startswith("what-if: the machine of `8x-a100.json` is not here")
    assert "what-if: 8x NVIDIA A100-SXM4-80GB" in answer.err
    assert "8 GPUs are here and one is used" not in answer.err
    assert "8 GPUs are there and one is used" in answer.err


def test_nothing_is_left_behind_and_no_trial_started(ask: Ask, folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert ask("t4").code == 0
    assert sorted(path.name for path in folder.iterdir()) == before


def test_what_the_job_writes_about_precision_is_kept_and_told(ask: Ask) -> None:
    answer = ask("t4", text="bf16: true\n", as_json=False)
    assert "your job has `bf16: true`, and compute capability 7.5 emulates bf16, which is slow" in answer.err
    assert ask("t4", text="bf16: true\n").plan["precision"] == {"value": "bf16", "reason": "as your job has it"}


def test_a_precision_that_is_said_beside_the_file_is_taken_and_marked(ask: Ask) -> None:
    plan = ask("2x-h100-one-busy", "--precision", "fp16").plan
    assert plan["precision"] == {
        "value": "fp16",
        "reason": "you said so (probed: bf16, compute capability 9.0 is Ampere or newer)",
    }


@pytest.mark.parametrize("cores", [1, 6])
def test_the_cores_that_are_said_bound_the_threads(cores: int, ask: Ask) -> None:
    answer = ask("cpu", "--cores", str(cores))
    threads = [choice["value"] for choice in answer.axis("threads")["choices"]]
    assert max(threads) == cores


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("t4", "fp16: true\ndtype: float16\n", "`fp16: true` with `dtype: float16`, which fails in the first step on"),
        ("t4", "fp16: true\ndtype: bfloat16\n", "not implemented for 'BFloat16'"),
        ("8x-a100", "fp16: true\ndtype: float16\n", "Attempting to unscale FP16 gradients"),
        ("t4", "tf32: true\n", "--tf32 requires Ampere or a newer GPU arch"),
        ("cpu", "tf32: true\n", "--tf32 requires Ampere or a newer GPU arch"),
        ("cpu", "bf16: true\n", "this CPU has no bf16 arithmetic"),
    ],
)
def test_what_that_machine_would_refuse_is_refused(name: str, text: str, what: str, ask: Ask) -> None:
    answer = ask(name, text=text)
    assert (answer.code, answer.out) == (2, "")
    error, hint = answer.err.splitlines()
    assert error.startswith("error: ")
    assert what in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("8x-a100", "tf32: true\n"),
        ("a100-and-t4", "tf32: true\n"),  # the first GPU has it
        ("cpu", "fp16: true\ndtype: float16\n"),  # accelerate ignores fp16 on a CPU
        ("t4", "fp16: true\ndtype: float16\nuse_peft: true\n"),
        ("t4", "bf16: true\ndtype: float16\n"),
        ("t4", "dtype: float16\n"),
        ("t4", "dtype: bfloat16\n"),
        ("t4", "dtype: bfloat16\nuse_peft: true\n"),
    ],
)
def test_what_that_machine_would_take_is_taken(name: str, text: str, ask: Ask) -> None:
    assert ask(name, text=text).code == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fp16_is_not_added_over_weights_whose_gradients_it_cannot_scale(dtype: str, ask: Ask) -> None:
    told = ask("t4", text=f"dtype: {dtype}\n", as_json=False)
    assert "`fp16: true` added" not in told.err
    assert (
        f"no `fp16: true` is added over {dtype} weights, whose gradients it cannot scale, and compute capability "
        "7.5 emulates bf16, which is slow; `fp16: true` with `dtype: float32` is native there" in told.err
    )
    assert ask("t4", text=f"dtype: {dtype}\n").plan["precision"] == {"value": "bf16", "reason": "TRL's default"}
    assert "`fp16: true` added" in ask("t4", text=f"dtype: {dtype}\nuse_peft: true\n", as_json=False).err


@pytest.mark.parametrize(
    ("text", "arguments", "flash"),
    [
        ("", (), True),
        ("bf16: false\n", (), False),
        ("bf16: false\ndtype: bfloat16\n", (), True),
        ("bf16: true\n", ("--precision", "float32"), True),
        ("", ("--precision", "float32"), False),
        ("fp16: true\n", (), True),
    ],
)
def test_flash_attention_is_offered_by_what_the_job_computes_in(
    text: str, arguments: tuple[str, ...], flash: bool, ask: Ask
) -> None:
    offered = {choice["value"] for choice in ask("h200", *arguments, text=text).axis("attention")["choices"]}
    assert ("kernels-community/flash-attn2" in offered) == flash


def test_a_job_for_amds_gpus_is_a_job_for_a_gpu(folder: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))  # where the demo's files go
    plan = ask("mi300x").plan
    assert plan["machine"] == "what-if: 1x AMD Instinct MI300X, 191.5 GiB free"
    assert plan["memory"]["free_bytes"] == 205669793792
    assert plan["memory"]["baseline"] == "fits"
    told = ask("mi300x", "--demo", "--precision", "fp16", of_a_file=False, as_json=False)
    assert told.code == 0
    assert "`fp16: true` added: you said so" in told.err
    assert "use_cpu" not in told.err
    assert "has no effect" not in told.err
    assert "not known on rocm" in told.err


# --- the parser on behalf of another machine ----------------------------------------------------------------------


def parsed(name: str, text: str, *, folder: Path, children: Children, pretend: bool = True) -> Job:
    machine = read_machine(folder / f"{name}.json")
    (folder / "sft.yaml").write_text(JOB + text)
    return read_job(
        "sft",
        ["--config", "sft.yaml"],
        folder=folder,
        children=children,
        accelerator=machine.backend != "cpu",
        cpu_bf16=machine.cpu.bf16,
        elsewhere=as_torch_sees(machine) if pretend else None,
    )


def test_trls_parser_takes_bf16_for_a_gpu_that_is_not_here(folder: Path, children: Children) -> None:
    assert parsed("8x-a100", "", folder=folder, children=children).resolved["bf16"] is True


def test_without_the_pretence_trls_parser_refuses_it(folder: Path, children: Children) -> None:
    with pytest.raises(AutotuneError, match="Your setup doesn't support bf16/gpu"):
        parsed("8x-a100", "", folder=folder, children=children, pretend=False)


def test_the_pretence_ends_with_its_child(folder: Path, children: Children) -> None:
    parsed("8x-a100", "tf32: true\n", folder=folder, children=children)
    with pytest.raises(AutotuneError, match="--tf32 requires Ampere"):
        parsed("cpu", "tf32: true\n", folder=folder, children=children, pretend=False)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("--machine t4.json --auto", "`--machine` is about a machine that is not here"),
        ("--machine t4.json --json", "`--machine` is about a machine that is not here"),
        ("--machine nowhere.json --dry-run", "cannot read the machine file `nowhere.json`: No such file or directory"),
        ("--machine model --dry-run", "cannot read the machine file `model`: Is a directory"),
        ("--machine sft.yaml --dry-run", "the machine file `sft.yaml` is not JSON"),
        ("--machine --dry-run", "expected one argument"),
        ("--machine wrong.json --dry-run", "wrong in `gpus[0].compute_capability`: expected `array | null`, got `str`"),
        ("--machine t4.json --gpus 1 --dry-run", "`--gpus 1` names `1`, and that is no GPU there"),
        ("--machine cpu.json --gpus 0 --dry-run", "`--gpus 0` is given and that machine has no GPU"),
        ("--machine t4.json --gpu-memory 80GB --dry-run", "no GPU here has more than 15.0 GiB"),
    ],
)  # fmt: skip
def test_a_machine_that_cannot_be_planned_for_is_refused(
    arguments: str, what: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((folder / "t4.json").read_text())
    document["gpus"][0]["compute_capability"] = "7.5"
    (folder / "wrong.json").write_text(json.dumps(document))
    assert cli.main(["sft", "--config", "sft.yaml", *arguments.split()]) == 2
    out, err = capfd.readouterr()
    error, hint = err.splitlines()
    assert (out, error.split(":")[0], hint.split(":")[0]) == ("", "error", "hint")
    assert what in error
