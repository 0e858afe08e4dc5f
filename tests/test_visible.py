"""Which GPUs a program sees, as CUDA and torch read the environment, and what `--gpus` takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.nvml.machine import (
    A100,
    GIB,
    GPU_IS_LOST,
    H200,
    L4,
    MIB,
    MIG_A100,
    NOT_SUPPORTED,
    REPOSITORY,
    RTX_4090,
    T4,
    FakeGpu,
    FakeMachine,
    FakeSlice,
    Laboratory,
    but,
    indices,
    slice_uuid,
    uuid_of,
    whats,
)

# MIG


def test_a_slice_has_its_own_memory_and_the_capability_of_its_card(laboratory: Laboratory) -> None:
    gpu = laboratory.report(MIG_A100, A100, environment={"CUDA_VISIBLE_DEVICES": slice_uuid(0, 1)}).gpus[0]
    assert (gpu.index, gpu.uuid, gpu.mig, gpu.memory_bytes) == (0, slice_uuid(0, 1), "2g.20gb", 20 * GIB)
    assert gpu.compute_capability == (8, 0)
    assert (gpu.linked_to, gpu.peer_access) == ((), ())


@pytest.mark.parametrize(
    ("piece", "profile"),
    [
        (FakeSlice("3g.40gb", 40192 * MIB, named=False), "3g.40gb"),
        (FakeSlice("1g.5gb", 4864 * MIB, named=False), "1g.5gb"),
        (FakeSlice("3g.40gb", 40192 * MIB, compute_slices=1, named=False), "1c.3g.40gb"),
        (FakeSlice("1c.3g.40gb", 40192 * MIB, compute_slices=1), "1c.3g.40gb"),
        (FakeSlice("1g.5gb", 5 * GIB, named=False, errors={"memory_mib": NOT_SUPPORTED}), "slice"),
    ],
)
def test_a_profile_is_read_from_the_name_or_made_as_nvidia_makes_it(
    laboratory: Laboratory, piece: FakeSlice, profile: str
) -> None:
    assert laboratory.report(but(A100, slices=(piece,))).gpus[0].mig == profile


def test_a_slice_never_has_the_memory_of_its_card_or_of_the_machine(laboratory: Laboratory) -> None:
    piece = FakeSlice("3g.40gb", 40192 * MIB, errors={"memory": NOT_SUPPORTED})
    assert laboratory.report(but(A100, slices=(piece,))).gpus[0].memory_bytes == 40192 * MIB
    silent = msgspec.structs.replace(piece, errors={"memory": NOT_SUPPORTED, "memory_mib": NOT_SUPPORTED})
    report = laboratory.report(but(A100, slices=(silent,)))
    assert report.gpus == ()
    assert whats(report) == "GPU 0 does not answer: Not Supported"


@pytest.mark.parametrize(
    ("setting", "uuids"),
    [
        ("0", [slice_uuid(0, 0)]),  # a card in MIG mode is its first slice
        (uuid_of(0), [slice_uuid(0, 0)]),
        ("1", [uuid_of(1)]),
        ("1,0", [slice_uuid(0, 0)]),  # no whole GPU beside a slice
        (slice_uuid(0, 1), [slice_uuid(0, 1)]),
        ("MIG-01", [slice_uuid(0, 1)]),
        ("MIG-0", []),  # the beginning of two
        (f"{slice_uuid(0, 1)},{slice_uuid(0, 0)}", [slice_uuid(0, 1)]),
        (f"MIG-{uuid_of(0)}/2/0", [slice_uuid(0, 1)]),  # as drivers before R470 name it
        (f"MIG-{uuid_of(0)}/9/0", []),
        (f"{slice_uuid(0, 1)},{slice_uuid(0, 1)}", []),
        (f"{slice_uuid(0, 1)},{uuid_of(1)}", [slice_uuid(0, 1)]),
    ],
)
def test_slices_are_named_as_cuda_names_them(laboratory: Laboratory, setting: str, uuids: list[str]) -> None:
    report = laboratory.report(MIG_A100, A100, environment={"CUDA_VISIBLE_DEVICES": setting})
    assert [gpu.uuid for gpu in report.gpus] == uuids


# CUDA_VISIBLE_DEVICES


SETTINGS = {
    "1,0": [1, 0],
    "GPU-2": [2],
    f"{uuid_of(2)},{uuid_of(0)}": [2, 0],
    f"{uuid_of(2)}, {uuid_of(0)}": [2],  # a space before a UUID ends the list
    f" {uuid_of(2)}": [],
    " 2 , 1 ": [2, 1],
    "+1": [1],
    "1gpu,2": [1, 2],  # the digits at the beginning count
    "": [],
    "-1": [],
    "NoDevFiles": [],
    "none": [],
    "0,-1,2": [0],
    "0,9,2": [0],
    "0,,2": [0],
    "0,GPU-1": [0],  # the first entry decides what they are
    "GPU-1,0": [1],
    "GPU-": [],  # the beginning of all
    "GPU-7": [],
    "1,1": [],
    "1,01": [],
    "0,-1,0": [0],
    f"GPU-1,{uuid_of(1)}": [],
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_cuda_visible_devices_is_understood(laboratory: Laboratory, setting: str) -> None:
    report = laboratory.report(A100, A100, A100, environment={"CUDA_VISIBLE_DEVICES": setting})
    assert indices(report) == SETTINGS[setting]


def test_cuda_visible_devices_leaves_as_many_gpus_as_torch_counts(laboratory: Laboratory) -> None:
    code = f"""
import json, os, torch
counts = {{}}
for setting in {list(SETTINGS)!r}:
    os.environ["CUDA_VISIBLE_DEVICES"] = setting
    counts[setting] = torch.cuda._device_count_nvml()
print(json.dumps(counts))
"""
    counted = json.loads(laboratory.run(code, FakeMachine((A100, A100, A100))))
    assert counted == {setting: len(found) for setting, found in SETTINGS.items()}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("7", ["`CUDA_VISIBLE_DEVICES=7` names `7`, and that is not one GPU here"]),
        ("GPU-", ["`CUDA_VISIBLE_DEVICES=GPU-` names `GPU-`, and that is not one GPU here"]),
        ("none", ["`CUDA_VISIBLE_DEVICES=none` names `none`, and that is not one GPU here"]),
        ("0,0", ["`CUDA_VISIBLE_DEVICES=0,0` names a GPU twice, so CUDA shows none"]),
        ("0,GPU-1", ["`CUDA_VISIBLE_DEVICES=0,GPU-1` names `GPU-1`, and that is not one GPU here"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_a_mistake_in_cuda_visible_devices_is_named_and_hidden_gpus_are_none(
    laboratory: Laboratory, setting: str, said: list[str]
) -> None:
    report = laboratory.report(A100, A100, environment={"CUDA_VISIBLE_DEVICES": setting})
    assert [problem.what for problem in report.problems] == said


@pytest.mark.parametrize(
    ("cards", "order", "found"),
    [
        ((T4, A100, H200), None, [2, 1, 0]),  # compute capability
        ((L4, RTX_4090), None, [1, 0]),  # cores and clock
        ((but(A100, name="A100 PCIe", memory_clock=1215), A100), None, [1, 0]),  # memory
        ((T4, A100, H200), "FASTEST_FIRST", [2, 1, 0]),
        ((T4, A100, H200), "PCI_BUS_ID", [0, 1, 2]),
        ((but(A100, pci="00000000:90:00.0"), but(A100, pci="00000000:20:00.0")), None, [1, 0]),  # alike: the bus
    ],
)
def test_indices_count_in_cudas_order(
    laboratory: Laboratory, cards: tuple[FakeGpu, ...], order: str | None, found: list[int]
) -> None:
    environment = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    assert indices(laboratory.report(*cards, environment=environment)) == found
    first = laboratory.report(*cards, environment={**environment, "CUDA_VISIBLE_DEVICES": "0"})
    assert indices(first) == found[:1]


def test_an_order_that_is_assumed_is_said_where_an_index_depends_on_it(laboratory: Laboratory) -> None:
    def problems(**environment: str) -> list[str]:
        return [problem.hint for problem in laboratory.report(T4, A100, environment=environment).problems]

    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in problems(CUDA_VISIBLE_DEVICES="0")[0]
    assert problems(CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == []
    assert problems(CUDA_VISIBLE_DEVICES=uuid_of(0)) == []
    assert problems(CUDA_VISIBLE_DEVICES="") == []


def test_a_job_that_sets_its_gpus_itself_is_tuned_on_them_unless_gpus_names_others(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    (tmp_path / "sft.yaml").write_text("model_name_or_path: m\nenv:\n  CUDA_VISIBLE_DEVICES: '1'\n")
    code = f"""
from pathlib import Path
from autotune.probe import machine, versions
from autotune.session import Options, children_for
build = versions.TorchBuild(cuda="13.0")
machine.probe_torch_build = versions.probe_torch_build = lambda: build
for gpus in (None, "all", "0"):
    options = Options(
        method="sft", arguments=("--config", "sft.yaml"), folder=Path({str(tmp_path)!r}), gpus=gpus, cold=True
    )
    with children_for(options) as (children, _, found):
        print([gpu.index for gpu in found.gpus], children.environment["CUDA_VISIBLE_DEVICES"])
"""
    assert laboratory.run(code, FakeMachine((A100, A100))).splitlines() == [
        f"[1] {uuid_of(1)}",
        f"[1] {uuid_of(1)}",
        f"[0] {uuid_of(0)}",
    ]


def test_children_see_the_free_one_of_two_gpus_that_are_alike_unless_gpus_names_the_other(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    code = f"""
from pathlib import Path
from autotune.probe import machine, versions
from autotune.session import Options, children_for
build = versions.TorchBuild(cuda="13.0")
machine.probe_torch_build = versions.probe_torch_build = lambda: build
for gpus in (None, "0"):
    options = Options(method="sft", arguments=(), folder=Path({str(tmp_path)!r}), gpus=gpus, cold=True)
    with children_for(options) as (children, _, found):
        print([gpu.index for gpu in found.gpus], children.environment["CUDA_VISIBLE_DEVICES"])
"""
    busy = msgspec.structs.replace(A100, used=20 * GIB)
    assert laboratory.run(code, FakeMachine((busy, A100))).splitlines() == [
        f"[1, 0] {uuid_of(1)}",
        f"[0] {uuid_of(0)}",
    ]


# --gpus


def gpus_option(laboratory: Laboratory, asked: str, *cards: FakeGpu) -> tuple[int, str]:
    """The exit code and the errors of the command with `--gpus`."""
    machine = FakeMachine(cards)
    answer = subprocess.run(
        [sys.executable, "-m", "autotune", "sft", "--model_name_or_path", "m", "--auto", "--gpus", asked],
        check=False,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=laboratory.environment(machine),
    )
    return answer.returncode, answer.stderr


A, B = (f"{index}: NVIDIA A100-SXM4-80GB, {uuid_of(index)}" for index in range(2))


@pytest.mark.parametrize(
    ("asked", "what", "hint"),
    [
        ("7", "`--gpus 7` names `7`, and that is no GPU here", f"there are {A}; {B}"),
        ("GPU-9", "`--gpus GPU-9` names `GPU-9`, and that is no GPU here", f"there are {A}; {B}"),
        ("x", "`--gpus x` names `x`, and that is no GPU here", f"there are {A}; {B}"),
        (
            "0,-1",
            "`--gpus 0,-1` has an entry that names no GPU",
            f"there are {A}; {B}; to tune on the CPU, set `CUDA_VISIBLE_DEVICES=` and leave out `--gpus`",
        ),
        ("1,1", "`--gpus 1,1` names `1` twice", f"name each GPU once; there are {A}; {B}"),
        (
            "GPU-1,1",
            "`--gpus GPU-1,1` names one GPU twice, as `GPU-1` and as `1`",
            f"name each GPU once; there are {A}; {B}",
        ),
        (
            "GPU-",
            f"`--gpus GPU-` names `GPU-`, which begins both `{uuid_of(0)}` and `{uuid_of(1)}`",
            f"there are {A}; {B}",
        ),
    ],
)
def test_a_gpu_that_is_not_here_is_refused_with_the_names_that_are(
    laboratory: Laboratory, asked: str, what: str, hint: str
) -> None:
    assert gpus_option(laboratory, asked, A100, A100) == (2, f"error: {what}\nhint: {hint}\n")


def test_gpus_on_a_machine_without_any_are_refused(laboratory: Laboratory) -> None:
    code, said = gpus_option(laboratory, "0")
    assert code == 2
    assert "error: `--gpus 0` names `0`, and that is no GPU here\nhint: there is none\n" in said


def test_a_lost_gpu_cannot_be_chosen(laboratory: Laboratory) -> None:
    code, said = gpus_option(laboratory, "0", but(A100, errors={"handle": GPU_IS_LOST}), A100)
    assert code == 2
    assert said == f"error: `--gpus 0` names GPU 0, which does not answer\nhint: there is {B}\n"


@pytest.mark.parametrize(
    ("asked", "uuids"),
    [
        ("0,1", f"{uuid_of(0)},{uuid_of(1)}"),
        (" 1 , GPU-0 ", f"{uuid_of(1)},{uuid_of(0)}"),
        ("MIG-21", slice_uuid(2, 1)),
        ("2", uuid_of(2)),
    ],
)
def test_what_gpus_names_are_uuids_in_any_order(laboratory: Laboratory, asked: str, uuids: str) -> None:
    code = f"from autotune.probe.gpus import choose_gpus; print(choose_gpus({asked!r}))"
    assert laboratory.run(code, FakeMachine((T4, A100, MIG_A100))).strip() == uuids
