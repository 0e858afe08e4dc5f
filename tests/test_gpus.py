"""The GPUs as NVML tells them: pynvml's own calls in child processes, against a library that describes machines."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from autotune.probe.facts import Fact
from autotune.probe.gpus import Gpu, GpuProcess, NvmlReport, probe_gpus
from autotune.probe.machine import describe
from tests.nvml.machine import (
    A100,
    DRIVER_NOT_LOADED,
    GB10,
    GIB,
    GPU_IS_LOST,
    H200,
    INSUFFICIENT_POWER,
    L4,
    MIB,
    MIG_A100,
    NO_PERMISSION,
    NOT_SUPPORTED,
    T4,
    UNKNOWN,
    VERSION_MISMATCH,
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

# machines in words: what each is, and what is found


MACHINES: list[tuple[str, tuple[FakeGpu, ...], dict[str, str], list[str], list[str]]] = [
    # (machine, its cards, its environment, the GPUs found in their order, what is said)
    ("no card", (), {}, [], []),
    ("one A100", (A100,), {}, ["0 NVIDIA A100-SXM4-80GB 80 GiB"], []),
    ("two H200", (H200, H200), {}, ["0 NVIDIA H200 141 GiB", "1 NVIDIA H200 141 GiB"], []),
    ("two H200, the first hidden", (H200, H200), {"CUDA_VISIBLE_DEVICES": "1"}, ["1 NVIDIA H200 141 GiB"], []),
    ("a card that shares the RAM", (GB10,), {}, ["0 NVIDIA GB10 64 GiB"], []),
    (
        "a card that tells no memory",
        (but(L4, errors={"memory": NOT_SUPPORTED}),),
        {},
        ["0 NVIDIA L4 64 GiB"],
        ["GPU 0 (NVIDIA L4) does not tell its memory, so it is taken to share the RAM"],
    ),
    (
        "an old card beside a new one",
        (T4, H200),
        {},
        ["1 NVIDIA H200 141 GiB", "0 Tesla T4 15 GiB"],
        [
            "the GPUs differ, and CUDA counts the fastest first by a rule of its own: "
            "taken as 0 = NVIDIA H200, 1 = Tesla T4",
            "the GPUs are not alike, and GPU 1, NVIDIA H200, is the one that is used",
        ],
    ),
    (
        "the same, counted along the bus",
        (T4, H200),
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        ["0 Tesla T4 15 GiB", "1 NVIDIA H200 141 GiB"],
        ["the GPUs are not alike, and GPU 0, Tesla T4, is the one that is used"],
    ),
    (
        "two slices of one A100",
        (MIG_A100,),
        {},
        ["0 NVIDIA A100-SXM4-80GB MIG 3g.40gb 40 GiB"],
        [
            f"CUDA shows a program one MIG slice and no GPU beside it: `{slice_uuid(0, 0)}` of GPU 0 is used and "
            "1 more is not"
        ],
    ),
    (
        "a sliced A100 and a whole one",
        (A100, MIG_A100),
        {},
        ["1 NVIDIA A100-SXM4-80GB MIG 3g.40gb 40 GiB"],
        [
            f"CUDA shows a program one MIG slice and no GPU beside it: `{slice_uuid(1, 0)}` of GPU 1 is used and "
            "2 more are not"
        ],
    ),
    (
        "an A100 in MIG mode without a slice",
        (but(A100, slices=()), A100),
        {},
        ["1 NVIDIA A100-SXM4-80GB 80 GiB"],
        ["GPU 0 is in MIG mode and has no slice, so no program can use it"],
    ),
    (
        "a lost card and one that works",
        (but(A100, errors={"handle": GPU_IS_LOST}), A100),
        {},
        ["1 NVIDIA A100-SXM4-80GB 80 GiB"],
        ["GPU 0 does not answer: GPU is lost"],
    ),
    (
        "a hot card",
        (but(A100, reasons=0x20),),
        {},
        ["0 NVIDIA A100-SXM4-80GB 80 GiB"],
        ["GPU 0 (NVIDIA A100-SXM4-80GB) is held back by heat"],
    ),
    (
        "a card that is full, in a container that shows no processes",
        (but(A100, used=30 * GIB),),
        {},
        ["0 NVIDIA A100-SXM4-80GB 80 GiB"],
        ["30.0 GiB of GPU 0 (NVIDIA A100-SXM4-80GB) are in use by nothing that is seen here"],
    ),
]


@pytest.mark.parametrize(
    ("cards", "environment", "found", "said"),
    [machine[1:] for machine in MACHINES],
    ids=[machine[0] for machine in MACHINES],
)
def test_a_machine_is_found_as_it_is(
    laboratory: Laboratory, cards: tuple[FakeGpu, ...], environment: dict[str, str], found: list[str], said: list[str]
) -> None:
    report = laboratory.report_of(FakeMachine(cards), environment=environment)
    assert [f"{gpu.index} {gpu.name} {gpu.memory_bytes // GIB} GiB" for gpu in report.gpus] == found
    assert [problem.what for problem in report.problems] == said
    assert all(problem.hint for problem in report.problems)


# what is told of one card


def test_everything_that_a_card_tells_is_kept(laboratory: Laboratory) -> None:
    report = laboratory.report(but(H200, used=GIB, power_limit=700_000, links=(1,)), but(H200, links=(0,)))
    assert report.driver == "580.95.05"
    assert report.cuda_driver == (13, 0)
    assert report.gpus[0] == Gpu(
        index=0,
        uuid=uuid_of(0),
        name="NVIDIA H200",
        compute_capability=(9, 0),
        memory_bytes=141 * GIB,
        free_bytes=140 * GIB,
        mig=None,
        linked_to=(1,),
        busy_processes=0,
        peer_access=(1,),
        pci="00000000:10:00.0",
        processes=(),
        power_limit_watts=700.0,
        throttling=(),
    )


NOT_TOLD = {
    "name": ("name", "NVIDIA GPU"),
    "uuid": ("uuid", "0"),  # which names it in `CUDA_VISIBLE_DEVICES`
    "pci": ("pci", None),
    "capability": ("compute_capability", None),
    "power_limit": ("power_limit_watts", None),
    "reasons": ("throttling", None),
    "processes": ("busy_processes", None),
    "p2p": ("linked_to", None),
    "mig": ("mig", None),
    "cores": ("uuid", uuid_of(0)),
    "clock": ("uuid", uuid_of(0)),
}


@pytest.mark.parametrize("question", NOT_TOLD)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN], ids=["unsupported", "forbidden", "failed"])
def test_a_question_that_a_card_does_not_answer_is_not_known_and_its_neighbour_is(
    laboratory: Laboratory, question: str, code: int
) -> None:
    along_the_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    report = laboratory.report(but(A100, errors={question: code}), A100, environment=along_the_bus)
    field, expected = NOT_TOLD[question]
    assert getattr(report.gpus[0], field) == expected
    assert report.gpus[1] == laboratory.report(A100, A100).gpus[1]
    assert report.problems == ()


@pytest.mark.parametrize("question", [*NOT_TOLD, "memory"])
def test_a_card_that_is_lost_while_it_is_asked_is_a_problem(laboratory: Laboratory, question: str) -> None:
    report = laboratory.report(but(A100, errors={question: GPU_IS_LOST}), A100)
    assert 1 in indices(report)
    if question != "p2p":  # two cards are asked, and NVML does not say which is lost
        assert indices(report) == [1]
        assert whats(report) == "GPU 0 does not answer: GPU is lost"


@pytest.mark.parametrize(
    ("code", "what", "hint"),
    [
        (GPU_IS_LOST, "GPU 0 does not answer: GPU is lost", "reset"),
        (NO_PERMISSION, "GPU 0 does not answer: Insufficient Permissions", "/dev/nvidia0"),
        (INSUFFICIENT_POWER, "GPU 0 does not answer: Insufficient External Power", "power cable"),
        (1234, "GPU 0 does not answer: Error 1234", "nvidia-smi"),
    ],
)
def test_a_card_that_cannot_be_reached_is_a_problem_with_a_hint(
    laboratory: Laboratory, code: int, what: str, hint: str
) -> None:
    problem = laboratory.report(but(A100, errors={"handle": code})).problems[0]
    assert problem.what == what
    assert hint in problem.hint


def test_the_library_of_an_old_driver_tells_what_it_can(laboratory: Laboratory) -> None:
    card = but(A100, reasons=0x4, processes=f"self:{GIB}")
    gpu = laboratory.report(card, old_driver=True).gpus[0]
    assert gpu.throttling == ("its power limit",)
    assert gpu.busy_processes == 0  # and it is told which
    assert gpu.mig is None
    assert gpu.compute_capability == (8, 0)


def test_a_gpu_that_shares_the_ram_has_its_figures(laboratory: Laboratory) -> None:
    gpu = laboratory.report(GB10).gpus[0]
    assert (gpu.memory_bytes, gpu.free_bytes) == (64 * GIB, 32 * GIB)


def test_gpus_on_nvlink_are_told_from_those_on_the_bus(laboratory: Laboratory) -> None:
    gpus = laboratory.report(but(A100, links=(1,)), but(A100, links=(0,)), but(A100, peers=())).gpus
    assert [gpu.linked_to for gpu in gpus] == [(1,), (0,), ()]
    assert [gpu.peer_access for gpu in gpus] == [(1, 2), (0, 2), ()]


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (0x0, ()),
        (0x1, ()),  # idle
        (0x2, ()),  # application clocks
        (0x100, ()),  # a display's clock
        (0x4, ("its power limit",)),
        (0x8, ("a slowdown by the hardware, for heat or power",)),
        (0x20, ("heat",)),
        (0x48, ("heat, by the hardware",)),
        (0x88, ("the power supply",)),
        (0x25, ("its power limit", "heat")),
    ],
)
def test_what_holds_a_card_back_is_said_in_words(laboratory: Laboratory, reasons: int, words: tuple[str, ...]) -> None:
    report = laboratory.report(but(A100, reasons=reasons))
    assert report.gpus[0].throttling == words
    assert bool(report.problems) is bool(words)


# processes


def test_a_process_of_somebody_else_is_named(laboratory: Laboratory) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:  # neither an ancestor nor a child of the probe
        report = laboratory.report(but(A100, used=20 * GIB, processes=f"{other.pid}:{20 * GIB}"))
        other.kill()
    assert report.gpus[0].busy_processes == 1
    assert report.gpus[0].processes == (GpuProcess(other.pid, "sleep", 20 * GIB),)
    assert report.problems[0].what == (
        f"GPU 0 (NVIDIA A100-SXM4-80GB) is in use by `sleep` (pid {other.pid}) with 20.0 GiB"
    )
    assert "--gpus" in report.problems[0].hint


def test_this_process_and_its_family_are_not_others(laboratory: Laboratory) -> None:
    code = """
import os, subprocess, msgspec
from pathlib import Path
from autotune.probe.gpus import probe_gpus
child = subprocess.Popen(["sleep", "60"])
file = Path(os.environ["FAKE_NVML"])
file.write_text(file.read_text().replace("child", str(child.pid)))
report = probe_gpus(os.environ, ram_bytes=1, free_ram_bytes=1)
child.kill()
child.wait()
print(msgspec.json.encode(report).decode())
"""
    card = but(A100, used=60 * GIB, processes=",".join(f"{who}:{20 * GIB}" for who in ("self", "parent", "child")))
    report = msgspec.json.decode(laboratory.run(code, FakeMachine((card,))), type=NvmlReport)
    assert (report.gpus[0].busy_processes, report.gpus[0].processes, report.problems) == (0, (), ())


GONE = 4_000_000  # above the highest pid of this machine, as that of a process outside a container can be


@pytest.mark.parametrize(
    ("names", "name", "said"),
    [({GONE: "/usr/bin/python3"}, "python3", "`python3` (pid 4000000)"), ({}, None, "a process (pid 4000000)")],
    ids=["NVML knows it", "nobody knows it"],
)
def test_a_process_that_cannot_be_seen_has_the_name_that_nvml_gives_it(
    laboratory: Laboratory, names: dict[int, str], name: str | None, said: str
) -> None:
    card = but(A100, used=20 * GIB, processes=f"{GONE}:-1")
    report = laboratory.report_of(FakeMachine((card,), process_names=names))
    assert report.gpus[0].processes == (GpuProcess(GONE, name, None),)
    assert report.problems[0].what == f"GPU 0 (NVIDIA A100-SXM4-80GB) is in use by {said}"


def test_a_process_that_holds_little_is_counted_and_no_problem(laboratory: Laboratory) -> None:
    report = laboratory.report(but(A100, used=600 * MIB, processes=f"{GONE}:{30 * MIB}"))
    assert report.gpus[0].busy_processes == 1
    assert report.problems == ()


def test_a_slice_tells_of_its_own_processes(laboratory: Laboratory) -> None:
    busy = FakeSlice("3g.40gb", 40 * GIB, used=9 * GIB, processes=f"{GONE}:{9 * GIB}")
    card = but(A100, slices=(FakeSlice("3g.40gb", 40 * GIB), busy))
    first, second = (
        laboratory.report(card, environment={"CUDA_VISIBLE_DEVICES": slice_uuid(0, place)}) for place in range(2)
    )
    assert (first.gpus[0].busy_processes, first.problems) == (0, ())
    assert second.gpus[0].busy_processes == 1
    assert "MIG 3g.40gb) is in use by a process" in whats(second)


# an NVML that fails


@pytest.mark.parametrize(
    ("machine", "what", "hint"),
    [
        (
            FakeMachine(init=VERSION_MISMATCH),
            "the NVIDIA driver's library and its kernel module are of different versions",
            "restart the machine",
        ),
        (
            FakeMachine(init=DRIVER_NOT_LOADED),
            "the NVIDIA driver is installed and its kernel module is not loaded",
            "modprobe nvidia",
        ),
        (FakeMachine(init=NO_PERMISSION), "this user may not use the NVIDIA driver", "/dev/nvidia"),
        (FakeMachine(init=UNKNOWN), "the NVIDIA driver is installed and does not answer", "nvidia-smi"),
        (FakeMachine((A100,), count_error=GPU_IS_LOST), "the NVIDIA driver is installed and does not", "nvidia-smi"),
    ],
)
def test_an_nvml_that_fails_is_a_problem_with_a_hint(
    laboratory: Laboratory, machine: FakeMachine, what: str, hint: str
) -> None:
    found = laboratory.machine_of(machine)
    assert (found.backend, found.gpus, len(found.problems)) == ("cpu", (), 1)
    assert found.problems[0].what.startswith(what)
    assert hint in found.problems[0].hint


def test_a_driver_without_versions_is_not_known(laboratory: Laboratory) -> None:
    report = laboratory.report_of(FakeMachine((A100,), driver=None, cuda=None))
    assert (report.driver, report.cuda_driver, len(report.gpus)) == (None, None, 1)


def test_a_container_with_a_gpu_and_without_nvml_is_told_from_a_machine_without_a_gpu(tmp_path: Path) -> None:
    def report() -> NvmlReport:
        return probe_gpus({}, ram_bytes=1, free_ram_bytes=1, root=tmp_path)

    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has NVML itself")
    assert report() == NvmlReport()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert "libnvidia-ml.so.1" in report().problems[0].what
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in report().problems[0].hint


# the whole machine


def test_an_a100_trains_in_bf16_and_is_described(laboratory: Laboratory) -> None:
    machine = laboratory.machine(but(A100, used=GIB))
    assert machine.backend == "cuda"
    assert machine.precision == Fact("bf16", "compute capability 8.0 is Ampere or newer")
    assert describe(machine) == "1x NVIDIA A100-SXM4-80GB, 79.0 GiB free"


def test_a_t4_trains_in_fp16(laboratory: Laboratory) -> None:
    assert laboratory.machine(T4).precision == Fact(
        "fp16", "compute capability 7.5 is older than Ampere, which is the first with bf16"
    )


def test_the_gpu_that_is_used_decides_the_precision(laboratory: Laboratory) -> None:
    machine = laboratory.machine(A100, T4)
    assert machine.precision == Fact("bf16", "compute capability 8.0 is Ampere or newer")
    assert describe(machine) == "1x NVIDIA A100-SXM4-80GB, 80.0 GiB free + 1x Tesla T4, 15.0 GiB free"


def test_a_hidden_gpu_does_not_decide_the_precision(laboratory: Laboratory) -> None:
    assert laboratory.machine(A100, T4, environment={"CUDA_VISIBLE_DEVICES": "0"}).precision.value == "bf16"


def test_a_gpu_with_a_cpu_build_of_torch_is_a_problem(laboratory: Laboratory) -> None:
    machine = laboratory.machine(A100, torch_cuda=None)
    assert machine.backend == "cpu"
    assert "is not built for CUDA" in machine.problems[0].what
    assert "13.0" in machine.problems[0].hint


def test_probing_a_machine_with_eight_busy_gpus_is_quick_and_imports_no_torch(laboratory: Laboratory) -> None:
    code = """
import os, sys, time
from autotune.probe.machine import probe_machine
begin = time.perf_counter()
probe_machine(os.environ)
heavy = {"torch", "transformers", "trl", "datasets", "accelerate", "kernels", "vllm"} & set(sys.modules)
print(time.perf_counter() - begin, sorted(heavy))
"""
    cards = (but(H200, processes=f"self:{GIB},{os.getpid()}:{GIB}"),) * 8
    seconds, _, heavy = laboratory.run(code, FakeMachine(cards)).strip().partition(" ")
    assert heavy == "[]"
    assert float(seconds) < 0.3
