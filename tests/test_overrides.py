"""What the user says about the machine instead of the probe: it takes effect, and it is marked wherever it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autotune.arguments import options_of, parse
from autotune.children import Children
from autotune.deliver import doctor, wording
from autotune.errors import AutotuneError
from autotune.job import Job, read_job
from autotune.job_limits import check_half_weights
from autotune.probe.machine import Fact, Machine, describe, machine_from_json, to_json
from autotune.probe.overrides import Overrides, overridden, precision_to_add
from profiles import Profile, to_yaml
from tests import parts

GIB = 2**30
JOB = "model_name_or_path: model\ndataset_name: data\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def job_on(machine: Machine, text: str, *, folder: Path, children: Children) -> Job:
    """The job as it is read for a machine, one that is not here so that its GPUs count."""
    (folder / "sft.yaml").write_text(JOB + text)
    return read_job(
        "sft",
        ["--config", "sft.yaml"],
        folder=folder,
        children=children,
        accelerator=machine.backend != "cpu",
        cpu_bf16=machine.cpu.bf16,
        precision=precision_to_add(machine),
        elsewhere={"cuda": True, "bf16": True, "tf32": True} if machine.backend == "cuda" else None,
    )


def t4() -> Machine:
    gpu = msgspec.structs.replace(parts.gpu(), name="Tesla T4", compute_capability=(7, 5), memory_bytes=15 * GIB)
    reason = "compute capability 7.5 is older than Ampere, which is the first with bf16"
    return msgspec.structs.replace(parts.gpu_machine(), gpus=(gpu,), precision=Fact("fp16", reason))


# --- the facts ----------------------------------------------------------------------------------------------------


def test_nothing_said_changes_nothing() -> None:
    assert overridden(parts.gpu_machine(), Overrides()) == parts.gpu_machine()


def test_gpu_memory_bounds_the_total_and_the_free_of_each_gpu() -> None:
    machine = overridden(parts.gpu_machine(gpus=2), Overrides(gpu_memory_bytes=40 * GIB))
    assert [(gpu.memory_bytes, gpu.free_bytes) for gpu in machine.gpus] == [(40 * GIB, 40 * GIB)] * 2
    assert machine.overridden == ("gpu_memory",)


def test_gpu_memory_does_not_add_to_what_is_free() -> None:
    full = msgspec.structs.replace(parts.gpu(), free_bytes=3 * GIB)
    machine = overridden(parts.machine(backend="cuda", gpus=(full,)), Overrides(gpu_memory_bytes=40 * GIB))
    assert machine.gpus[0].free_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("said", "free"),
    [(4 * GIB, 4 * GIB), (12 * GIB, 8 * GIB), (16 * GIB, 8 * GIB), (64 * GIB, 56 * GIB)],
    ids=["less than is free", "less than the probe saw", "the same", "more than the probe saw"],
)
def test_ram_that_others_hold_stays_held(said: int, free: int) -> None:
    machine = overridden(parts.cpu_machine(), Overrides(ram_bytes=said))  # 8 of 16 GiB free
    assert (machine.ram_bytes, machine.free_ram_bytes, machine.overridden) == (said, free, ("ram",))


def test_cores_are_those_that_were_said() -> None:
    machine = overridden(parts.cpu_machine(cores=2), Overrides(cores=6))
    assert (machine.cpu.cores, machine.overridden) == (6, ("cores",))


def test_a_precision_that_was_said_keeps_what_was_probed_in_its_reason() -> None:
    probed = msgspec.structs.replace(
        parts.gpu_machine(), precision=Fact("bf16", "compute capability 9.0 is Ampere or newer")
    )
    machine = overridden(probed, Overrides(precision="fp16"))
    assert machine.precision == Fact("fp16", "you said so (probed: bf16, compute capability 9.0 is Ampere or newer)")
    again = overridden(machine, Overrides(precision="float32"))
    assert again.precision == Fact("float32", "you said so (probed: bf16, compute capability 9.0 is Ampere or newer)")


@pytest.mark.parametrize(
    ("machine", "said", "what", "hint"),
    [
        (parts.cpu_machine(), Overrides(gpu_memory_bytes=GIB), "there is no GPU here", "`--memory-limit`"),
        (parts.gpu_machine(), Overrides(gpu_memory_bytes=81 * GIB), "no GPU here has more than 80.0 GiB", "bound"),
        (parts.cpu_machine(), Overrides(precision="fp16"), "has no effect on a CPU", "`--precision bf16`"),
        (parts.gpu_machine(), Overrides(precision="int8"), "`--precision int8` is not known", "`bf16`, `fp16`"),
        (parts.gpu_machine(), Overrides(cores=0), "`--cores 0` is no number of cores", "1 or more"),
    ],
)
def test_what_could_have_no_effect_is_refused(machine: Machine, said: Overrides, what: str, hint: str) -> None:
    with pytest.raises(AutotuneError) as raised:
        overridden(machine, said)
    assert what in raised.value.what
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        ("--gpu-memory lots", "`--gpu-memory lots` is not a size", "8GB"),
        ("--ram 5", "`--ram 5` is not a size", "100MB at least"),
        ("--ram -1GB", "`--ram -1GB` is not a size", "100MB at least"),
        ("--ram 1e30", "`--ram 1e30` is not a size", "8GiB"),
        ("--ram 2000TB", "`--ram 2000TB` is not a size", "no machine has more"),
        ("--gpu-memory 9999999999TB", "is not a size", "no machine has more"),
        ("--budget -5s", "`--budget -5s` is not a duration", "90s"),
        ("--trials -3", "`--trials` must be at least 1", "your own settings"),
        ("--cores two", "`--cores two` is no number of cores", "whole number from 1"),
        ("--cores 0", "`--cores 0` is no number of cores", "whole number from 1"),
        ("--cores 1.5", "`--cores 1.5` is no number of cores", "whole number from 1"),
        ("--cores 99999999999", "is no number of cores", "to 4096"),
        ("--machine there.json --auto", "`--machine` is about a machine that is not here", "`--dry-run`"),
    ],
)
def test_what_is_no_such_value_is_refused(arguments: str, what: str, hint: str) -> None:
    with pytest.raises(AutotuneError) as raised:
        options_of(parse(["sft", *arguments.split()]))
    assert what in raised.value.what
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        ("64GB", 64 * 10**9),
        ("64 gib", 64 * GIB),
        ("512MiB", 512 * 2**20),
        ("0.5T", 5 * 10**11),
        ("200000000", 2 * 10**8),
    ],
)
def test_sizes_are_in_powers_of_ten_or_of_two(size: str, size_bytes: int) -> None:
    assert options_of(parse(["sft", "--ram", size])).overrides.ram_bytes == size_bytes


def test_a_run_that_is_resumed_keeps_its_machine() -> None:
    with pytest.raises(AutotuneError, match="`--cores` comes too late"):
        options_of(parse(["--resume", "run", "--cores", "2"]))


# --- their effect on the job --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "said", "added", "resolved"),
    [
        (parts.gpu_machine(), None, {}, (True, False)),
        (parts.gpu_machine(), "fp16", {"fp16": True}, (False, True)),
        (parts.gpu_machine(), "bf16", {"bf16": True}, (True, False)),
        (parts.gpu_machine(), "float32", {"bf16": False}, (False, False)),
        (t4(), None, {"fp16": True}, (False, True)),
        (t4(), "bf16", {"bf16": True}, (True, False)),
        (parts.cpu_machine(), "float32", {"use_cpu": True, "bf16": False}, (False, False)),
        (parts.cpu_machine(), "bf16", {"use_cpu": True, "bf16": True}, (True, False)),
    ],
)
def test_a_job_that_does_not_say_computes_in_what_was_said(
    machine: Machine,
    said: str | None,
    added: dict[str, Any],
    resolved: tuple[bool, bool],
    folder: Path,
    children: Children,
) -> None:
    machine = overridden(machine, Overrides(precision=said))
    job = job_on(machine, "", folder=folder, children=children)
    assert job.additions == added
    assert (job.resolved["bf16"], job.resolved["fp16"]) == resolved
    if said is not None:
        assert wording.precision(job, machine) == machine.precision
        assert machine.precision.reason.startswith("you said so (probed: ")


@pytest.mark.parametrize("text", ["bf16: true\n", "bf16: false\n", "fp16: true\n"])
def test_what_the_job_says_stays_and_the_user_is_told(text: str, folder: Path, children: Children) -> None:
    machine = overridden(parts.gpu_machine(), Overrides(precision="fp16"))
    job = job_on(machine, text, folder=folder, children=children)
    assert job.additions == {}
    assert wording.precision(job, machine).reason == "as your job has it"
    if text == "fp16: true\n":  # they agree
        assert wording.precision_notes(job, machine) == []
    else:
        (note,) = wording.precision_notes(job, machine)
        assert note == f"`--precision fp16` has no effect: your job says `{text.strip()}`, and that stays"


def test_a_job_that_asks_a_t4_for_bf16_is_told_that_it_is_emulated(folder: Path, children: Children) -> None:
    job = job_on(t4(), "bf16: true\n", folder=folder, children=children)
    assert job.additions == {}
    assert wording.precision_notes(job, t4()) == [
        "your job has `bf16: true`, and compute capability 7.5 emulates bf16, which is slow; `fp16: true` is native "
        "there; not changed, since you asked for it"
    ]


@pytest.mark.parametrize(("machine", "text"), [(parts.gpu_machine(), "bf16: true\n"), (t4(), "fp16: true\n")])
def test_a_precision_that_the_gpu_has_needs_no_note(
    machine: Machine, text: str, folder: Path, children: Children
) -> None:
    assert wording.precision_notes(job_on(machine, text, folder=folder, children=children), machine) == []


@pytest.mark.parametrize(
    ("options", "checkpoint", "shown"),
    [
        ({"fp16": True, "dtype": "float16"}, None, "`dtype: float16`"),
        ({"fp16": True, "dtype": "auto"}, "float16", "`dtype: auto`, which is float16 for this model"),
        ({"fp16": True, "dtype": "float32", "model_init_kwargs": {"dtype": "float16"}}, None, "`model_init_kwargs"),
        ({"fp16": True, "dtype": "bfloat16"}, None, "`dtype: bfloat16`"),
        ({"fp16": True, "dtype": "auto"}, "bfloat16", "`dtype: auto`, which is bfloat16 for this model"),
    ],
)
def test_half_weights_under_fp16_autocast_are_refused(
    options: dict[str, Any], checkpoint: str | None, shown: str
) -> None:
    with pytest.raises(
        AutotuneError, match=r"Attempting to unscale FP16 gradients|not implemented for 'BFloat16'"
    ) as raised:
        check_half_weights(options, checkpoint_dtype=checkpoint)
    assert shown in raised.value.what
    assert "float32" in raised.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"fp16": True, "dtype": "float32"},
        {"fp16": True, "dtype": "auto"},
        {"fp16": False, "dtype": "float16"},
        {"fp16": False, "dtype": "bfloat16"},
        {"fp16": True, "dtype": "float16", "use_peft": True},
        {"fp16": True, "dtype": "float16", "use_cpu": True},
    ],
)
def test_weights_that_the_scaler_takes_are_not_refused(options: dict[str, Any]) -> None:
    check_half_weights(options, checkpoint_dtype="float32")


# --- their marks --------------------------------------------------------------------------------------------------


EVERY = Overrides(gpu_memory_bytes=40 * GIB, precision="fp16", ram_bytes=4 * GIB, cores=1)


def test_what_was_said_is_marked_in_the_line_that_runs_and_reports_show() -> None:
    machine = overridden(parts.gpu_machine(), EVERY)
    assert describe(machine) == "1x NVIDIA A100-SXM4-80GB, 40.0 GiB free (GPU memory, RAM, cores: you said so)"
    assert machine.precision.reason.startswith("you said so")


def test_what_was_said_is_marked_on_the_screen() -> None:
    shown = dict(doctor.rows(overridden(parts.gpu_machine(), EVERY)))
    assert shown["machine"] == "1-core AMD EPYC (you said so), 4.0 of 4.0 GiB free (you said so)"
    assert "40.0 of 40.0 GiB free (you said so)" in shown["GPU 0"]
    assert shown["precision"].startswith("fp16: you said so (probed: bf16, ")


def test_what_was_said_survives_the_machines_json() -> None:
    machine = overridden(parts.gpu_machine(), EVERY)
    assert machine_from_json(to_json(machine)).overridden == ("gpu_memory", "ram", "cores", "precision")


@pytest.mark.parametrize("names", [(), ("cores", "precision")])
def test_a_profile_tells_what_was_said_and_only_then(names: tuple[str, ...]) -> None:
    profile = msgspec.convert(
        {
            "method": "sft",
            "options": {},
            "placement": {"processes": 1},
            "valid_for": {
                "gpus": [], "cpu": None, "versions": {}, "model": {}, "lengths": {}, "overridden": list(names),
            },
            "evidence": {
                "rate_unit": "useful tokens/s", "baseline_rate": 1.0, "best_rate": 2.0, "speedup": 2.0,
                "speedup_interval": None, "trials": 2, "gates": {}, "grade": "exact",
            },
            "measured": "2026-11-30",
        },
        Profile,
    )  # fmt: skip
    valid_for = yaml.safe_load(to_yaml(profile))["valid_for"]
    assert valid_for.get("overridden") == (list(names) or None)
