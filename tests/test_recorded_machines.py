"""Machines of every kind, as files: what each would train in and with, held against rules that are written out here.

The figures are the vendors': names as NVML gives them, compute capability, memory as the driver reports it, links.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.errors import AutotuneError
from autotune.plan.memory_room import free_bytes_of
from autotune.probe.architectures import version_pair
from autotune.probe.builds import expected_attention, gpu_refuses
from autotune.probe.machine import (
    Machine,
    as_torch_sees,
    describe,
    for_one_gpu,
    machine_from_json,
    read_machine,
    to_json,
)
from autotune.probe.overrides import with_gpus
from autotune.probe.torch_builds import WHEELS
from autotune.probe.used import used_gpu, used_line

MACHINES = Path(__file__).parent / "data" / "machines"

# What precision a job that does not say is given, and the attention backends that should work; the hub's kernels go by
# their repository's name, all of them below `kernels-community`.
TABLE = {
    "cpu":                 ("float32", "sdpa eager"),
    "driver-without-nvml": ("float32", "sdpa eager"),
    "mi300x":              ("bf16",    "sdpa eager"),
    "2x-v100":             ("fp16",    "sdpa eager"),
    "t4":                  ("fp16",    "sdpa eager"),
    "a100-and-t4":         ("bf16",    "sdpa eager flex_attention flash-attn2 flash-attn3 vllm-flash-attn3"),
    "8x-a100":             ("bf16",    "sdpa eager flex_attention flash-attn2 flash-attn3 vllm-flash-attn3"),
    "a100-mig":            ("bf16",    "sdpa eager flex_attention flash-attn2 flash-attn3 vllm-flash-attn3"),
    "rtx-3090":            ("bf16",    "sdpa eager flex_attention flash-attn2 flash-attn3 vllm-flash-attn3"),
    "rtx-4090":            ("bf16",    "sdpa eager flex_attention flash-attn2 flash-attn3 vllm-flash-attn3"),
    "2x-h100-one-busy":    ("bf16",    "sdpa eager flex_attention flash-attn2 flash-attn3 vllm-flash-attn3"),
    "h200":                ("bf16",    "sdpa eager flex_attention flash-attn2 flash-attn3 vllm-flash-attn3"),
    "b200":                ("bf16",    "sdpa eager flex_attention flash-attn2"),
}  # fmt: skip

# Why the precision is what it is
REASONS = {
    "cpu": "this CPU has no bf16 arithmetic",
    "driver-without-nvml": "this CPU has no bf16 arithmetic",
    "mi300x": "TRL's default, and AMD Instinct MI300X is CDNA 2 or newer, which has bf16 arithmetic",
    "2x-v100": "compute capability 7.0 is older than Ampere",
    "t4": "compute capability 7.5 is older than Ampere",
    "a100-and-t4": "compute capability 8.0 is Ampere or newer",
    "8x-a100": "compute capability 8.0 is Ampere or newer",
    "a100-mig": "compute capability 8.0 is Ampere or newer",
    "rtx-3090": "compute capability 8.6 is Ampere or newer",
    "rtx-4090": "compute capability 8.9 is Ampere or newer",
    "2x-h100-one-busy": "compute capability 9.0 is Ampere or newer",
    "h200": "compute capability 9.0 is Ampere or newer",
    "b200": "compute capability 10.0 is Ampere or newer",
}

# Why a backend is out, by the backend and the machines
OUT = [
    ("flash-attn2", "2x-v100", "built for 8.0, 9.0, 10.0, 12.0, and compute capability 7.0 runs none of these"),
    ("flash-attn2", "t4", "and compute capability 7.5 runs none of these"),
    ("flash-attn3", "2x-v100 t4", "runs none of these"),
    ("flash-attn3", "b200", "built for 8.0, 9.0a, and compute capability 10.0 runs none of these"),
    ("vllm-flash-attn3", "b200", "built for 8.0, 9.0a, and compute capability 10.0 runs none of these"),
    ("flash-attn2", "cpu driver-without-nvml mi300x", "needs a CUDA GPU"),
    ("flex_attention", "cpu driver-without-nvml", "no backward on a CPU"),
    ("flex_attention", "mi300x", "not known on rocm"),
    ("flash-attn4", "t4 8x-a100 rtx-4090", "needs compute capability 9.0 or newer"),
    ("flash-attn4", "h200 b200", "not known"),
    ("flex_attention", "t4 2x-v100", "not known: Triton, which compiles it, supports 8.0 and newer"),
    ("flash_attention_2", "t4", "`flash-attn` needs compute capability 8.0 or newer, and this is 7.5"),
    ("flash_attention_2", "8x-a100 h200", "the hub has the same, `kernels-community/flash-attn2`"),
    ("paged-attention", "8x-a100 h200 b200", "for generation and has no backward"),
]

# One line of each, as runs and reports show it, with the memory that is free on each GPU
LINES = {
    "t4": "1x Tesla T4, 14.6 GiB free",
    "2x-v100": "2x Tesla V100-SXM2-32GB, 31.6 GiB free each",
    "rtx-4090": "1x NVIDIA GeForce RTX 4090, 23.5 GiB free",
    "8x-a100": "8x NVIDIA A100-SXM4-80GB, 79.6 GiB free each",
    "a100-mig": "2x NVIDIA A100-SXM4-80GB MIG 3g.40gb, 39.2 GiB free each",
    "2x-h100-one-busy": "1x NVIDIA H100 80GB HBM3, 19.6 GiB free + 1x NVIDIA H100 80GB HBM3, 79.2 GiB free",
    "b200": "1x NVIDIA B200, 178.6 GiB free",
    "a100-and-t4": "1x NVIDIA A100-PCIE-40GB, 39.6 GiB free + 1x Tesla T4, 14.6 GiB free",
    "mi300x": "1x AMD Instinct MI300X, 191.5 GiB free",
    "cpu": "14-core Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz, 60.0 GiB free",
}


def recorded(name: str) -> Machine:
    return read_machine(MACHINES / f"{name}.json")


def backends(name: str) -> dict[str, Any]:
    return {one.name.removeprefix("kernels-community/"): one for one in expected_attention(recorded(name))}


def test_every_recorded_machine_stands_in_the_table() -> None:
    assert {path.stem for path in MACHINES.glob("*.json")} == set(TABLE) == set(REASONS)


@pytest.mark.parametrize("name", TABLE)
def test_the_precision_is_the_best_that_the_device_that_is_used_has(name: str) -> None:
    machine = recorded(name)
    assert machine.precision.value == TABLE[name][0]
    assert machine.precision.reason.startswith(REASONS[name])
    stored = json.loads((MACHINES / f"{name}.json").read_text())["precision"]
    assert stored == {"value": machine.precision.value, "reason": machine.precision.reason}


@pytest.mark.parametrize("name", TABLE)
def test_the_backends_are_those_with_builds_for_the_machine(name: str) -> None:
    assert [kernel for kernel, one in backends(name).items() if one.usable] == TABLE[name][1].split()


@pytest.mark.parametrize("name", TABLE)
def test_every_backend_of_a_machine_that_is_not_here_is_expected_with_a_reason(name: str) -> None:
    for one in backends(name).values():
        assert one.expected
        assert re.fullmatch(r"expected: \S.*[^.\s]", one.reason)


@pytest.mark.parametrize(("kernel", "names", "reason"), OUT, ids=lambda value: value[:24])
def test_a_backend_is_out_for_the_reason_that_its_builds_give(kernel: str, names: str, reason: str) -> None:
    for name in names.split():
        assert not backends(name)[kernel].usable
        assert reason in backends(name)[kernel].reason


@pytest.mark.parametrize("name", LINES)
def test_a_machine_is_told_in_one_line(name: str) -> None:
    assert describe(recorded(name)) == f"what-if: {LINES[name]}"


@pytest.mark.parametrize("name", TABLE)
def test_transformers_is_told_what_torch_would_say_there(name: str) -> None:
    cuda = name not in ("cpu", "driver-without-nvml", "mi300x")
    assert as_torch_sees(recorded(name)) == {
        "cuda": cuda or name == "mi300x",
        "bf16": cuda or name == "mi300x",  # emulated below Ampere, and accepted
        "tf32": cuda and TABLE[name][0] == "bf16",
    }


@pytest.mark.parametrize("name", TABLE)
def test_a_recorded_machine_is_in_the_form_that_is_documented_and_survives_it(name: str) -> None:
    machine = machine_from_json((MACHINES / f"{name}.json").read_bytes())
    assert machine_from_json(to_json(machine)) == machine
    assert not machine.what_if
    assert recorded(name).what_if


@pytest.mark.parametrize("name", TABLE)
def test_links_of_a_recorded_machine_lead_both_ways(name: str) -> None:
    links = {gpu.index: gpu.linked_to or () for gpu in recorded(name).gpus}
    assert all(index in links[other] for index, others in links.items() for other in others)


def test_a_file_whose_precision_its_gpus_contradict_is_taken_by_its_gpus(tmp_path: Path) -> None:
    document = json.loads((MACHINES / "t4.json").read_text())
    document["precision"] = {"value": "bf16", "reason": "copied from elsewhere"}
    (tmp_path / "machine.json").write_text(json.dumps(document))
    machine = read_machine(tmp_path / "machine.json")
    assert machine.precision.value == "fp16"
    (problem,) = machine.problems
    assert problem.what.startswith("the machine file says bf16, and what it tells of that machine gives fp16: ")
    assert "`--precision`" in problem.hint


def test_a_precision_that_somebody_chose_there_stays(tmp_path: Path) -> None:
    document = json.loads((MACHINES / "t4.json").read_text())
    document |= {"precision": {"value": "float32", "reason": "you said so"}, "overridden": ["precision"]}
    (tmp_path / "machine.json").write_text(json.dumps(document))
    machine = read_machine(tmp_path / "machine.json")
    assert (machine.precision.value, machine.problems) == ("float32", ())


def test_of_gpus_that_are_not_alike_the_first_is_used_and_the_other_can_be_chosen() -> None:
    mixed = recorded("a100-and-t4")
    assert used_gpu(mixed.gpus) is mixed.gpus[0]
    (problem,) = mixed.problems
    assert problem.what == "the GPUs are not alike, and GPU 0, NVIDIA A100-PCIE-40GB, is the one that is used"
    assert problem.hint == "`--gpus 1` chooses Tesla T4"
    assert used_line(mixed.gpus) == (
        "2 GPUs are here and one is used, GPU 0, NVIDIA A100-PCIE-40GB: several are not tuned yet"
    )
    turing = with_gpus(mixed, "1")
    assert (describe(turing), turing.precision.value, turing.problems) == (
        "what-if: 1x Tesla T4, 14.6 GiB free", "fp16", (),
    )  # fmt: skip


def test_a_free_gpu_is_used_in_place_of_one_like_it_that_is_busy() -> None:
    machine = recorded("2x-h100-one-busy")
    assert for_one_gpu(machine).gpus == machine.gpus[::-1]
    assert free_bytes_of(for_one_gpu(machine), None) == machine.gpus[1].free_bytes
    (problem,) = machine.problems
    assert problem.what == "GPU 0 (NVIDIA H100 80GB HBM3) is in use by `python3` (pid 4242) with 59.6 GiB"
    assert problem.hint == (
        "GPU 1, NVIDIA H100 80GB HBM3, is like it and free, and is used instead; `--gpus 1` names it: "
        "figures are wrong beside other work"
    )
    line = used_line(machine.gpus, there=True)
    assert line is not None
    assert "one is used, GPU 1, NVIDIA H100 80GB HBM3 since GPU 0 is in use and this one is like it and free" in line
    assert with_gpus(machine, "1").problems == ()
    held = with_gpus(machine, machine.gpus[0].uuid)
    assert used_gpu(held.gpus) == machine.gpus[0]
    assert "wait for it" in held.problems[0].hint


def test_a_busy_gpu_is_used_where_the_free_one_is_another_kind() -> None:
    mixed = recorded("a100-and-t4")
    busy = msgspec.structs.replace(mixed.gpus[0], free_bytes=2**30)
    assert used_gpu((busy, mixed.gpus[1])) is busy


def test_of_several_slices_a_process_gets_one() -> None:
    machine = recorded("a100-mig")
    line = used_line(machine.gpus, there=True)
    assert line is not None
    assert line.endswith("CUDA gives a process one MIG slice")
    assert len(with_gpus(machine, machine.gpus[1].uuid).gpus) == 1


@pytest.mark.parametrize("asked", ["2", "GPU-f", "0,0", ""])
def test_a_gpu_that_is_not_in_the_file_is_refused(asked: str) -> None:
    with pytest.raises(AutotuneError, match=r"`--gpus "):
        with_gpus(recorded("a100-and-t4"), asked)


@pytest.mark.parametrize("name", TABLE)
def test_the_torch_of_a_recorded_machine_is_built_for_its_gpu(name: str) -> None:
    machine = recorded(name)
    told = [problem.what for problem in machine.problems if "torch" in problem.what]
    assert (told, gpu_refuses(machine)) == ([], None)
    torch, cuda = machine.versions["torch"], machine.versions["torch_cuda"]
    assert torch is not None
    assert cuda is None or (torch.endswith(f"+cu{cuda.replace('.', '')}") and version_pair(cuda) in WHEELS)
