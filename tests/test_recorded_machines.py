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

from autotune.probe.builds import expected_attention
from autotune.probe.machine import (
    Machine,
    as_torch_sees,
    describe,
    for_one_gpu,
    machine_from_json,
    read_machine,
    to_json,
)

MACHINES = Path(__file__).parent / "data" / "machines"

# What precision a job that does not say is given, and the attention backends that should work; the hub's kernels go by
# their repository's name, all of them below `kernels-community`.
TABLE = {
    "cpu":                 ("float32", "sdpa eager"),
    "driver-without-nvml": ("float32", "sdpa eager"),
    "mi300x":              ("bf16",    "sdpa eager"),
    "2x-v100":             ("fp16",    "sdpa eager flex_attention"),
    "t4":                  ("fp16",    "sdpa eager flex_attention"),
    "a100-and-t4":         ("fp16",    "sdpa eager flex_attention"),
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
    "mi300x": "TRL's default",
    "2x-v100": "compute capability 7.0 is older than Ampere",
    "t4": "compute capability 7.5 is older than Ampere",
    "a100-and-t4": "compute capability 7.5, the lowest of the GPUs here, is older than Ampere",
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
    ("flash-attn2", "t4 a100-and-t4", "and compute capability 7.5 runs none of these"),
    ("flash-attn3", "2x-v100 t4 a100-and-t4", "runs none of these"),
    ("flash-attn3", "b200", "built for 8.0, 9.0a, and compute capability 10.0 runs none of these"),
    ("vllm-flash-attn3", "b200", "built for 8.0, 9.0a, and compute capability 10.0 runs none of these"),
    ("flash-attn2", "cpu driver-without-nvml mi300x", "needs a CUDA GPU"),
    ("flex_attention", "cpu driver-without-nvml", "no backward on a CPU"),
    ("flex_attention", "mi300x", "not known on rocm"),
    ("flash-attn4", "t4 8x-a100 rtx-4090", "needs compute capability 9.0 or newer"),
    ("flash-attn4", "h200 b200", "not known"),
    ("flash_attention_2", "t4 8x-a100 h200", "`kernels-community/flash-attn2` is the same from the hub"),
    ("paged-attention", "8x-a100 h200 b200", "for generation and has no backward"),
]

# One line of each, as runs and reports show it: the memory that is free on the fullest GPU
LINES = {
    "t4": "1x Tesla T4, 14.6 GiB free",
    "2x-v100": "2x Tesla V100-SXM2-32GB, 31.6 GiB free each",
    "rtx-4090": "1x NVIDIA GeForce RTX 4090, 23.5 GiB free",
    "8x-a100": "8x NVIDIA A100-SXM4-80GB, 79.6 GiB free each",
    "a100-mig": "2x NVIDIA A100-SXM4-80GB MIG 3g.40gb, 39.2 GiB free each",
    "2x-h100-one-busy": "2x NVIDIA H100 80GB HBM3, 19.6 GiB free each",
    "b200": "1x NVIDIA B200, 178.6 GiB free",
    "a100-and-t4": "1x NVIDIA A100-PCIE-40GB + 1x Tesla T4, 14.6 GiB free each",
    "cpu": "14-core Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz, 60.0 GiB free",
}


def recorded(name: str) -> Machine:
    return read_machine(MACHINES / f"{name}.json")


def backends(name: str) -> dict[str, Any]:
    return {one.name.removeprefix("kernels-community/"): one for one in expected_attention(recorded(name))}


def test_every_recorded_machine_stands_in_the_table() -> None:
    assert {path.stem for path in MACHINES.glob("*.json")} == set(TABLE) == set(REASONS)


@pytest.mark.parametrize("name", TABLE)
def test_the_precision_is_the_best_that_the_weakest_device_has(name: str) -> None:
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
    cuda = TABLE[name][1] != "sdpa eager"
    first_is_ampere = TABLE[name][0] == "bf16" or name == "a100-and-t4"  # TF32 is asked of the first GPU
    assert as_torch_sees(recorded(name)) == {
        "cuda": cuda or name == "mi300x",
        "bf16": cuda or name == "mi300x",  # emulated below Ampere, and accepted
        "tf32": cuda and first_is_ampere,
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


def test_a_job_on_one_of_several_gpus_computes_in_what_that_one_has() -> None:
    mixed = read_machine(MACHINES / "a100-and-t4.json")
    assert (mixed.precision.value, for_one_gpu(mixed).precision.value) == ("fp16", "bf16")
    assert for_one_gpu(mixed).precision.reason == "compute capability 8.0 is Ampere or newer"
    said = msgspec.structs.replace(mixed, overridden=("precision",))
    assert for_one_gpu(said).precision == mixed.precision
