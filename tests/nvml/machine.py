"""A machine with NVIDIA GPUs in a few lines, and a probe of it: pynvml's own calls, in a child process, against
`fake_nvml.c`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from autotune.probe.gpus import NvmlReport
from autotune.probe.machine import Machine

MIB, GIB = 2**20, 2**30
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, GPU_IS_LOST, VERSION_MISMATCH, UNKNOWN = 3, 4, 9, 15, 18, 999
INSUFFICIENT_POWER = 8
REPOSITORY = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("fake_nvml.c")


class FakeSlice(msgspec.Struct, frozen=True):
    """A MIG slice; its UUID is made from its card and its place."""

    profile: str
    memory: int
    compute_slices: int | None = None
    named: bool = True  # whether its name ends in the profile, as that of a slice does
    used: int = 0
    processes: str = ""
    errors: dict[str, int] = {}


class FakeGpu(msgspec.Struct, frozen=True):
    """A card: memory in bytes, processes as `pid:bytes`, errors by question as `fake_nvml.c` names them."""

    name: str = "NVIDIA A100-SXM4-80GB"
    capability: str = "8.0"
    memory: int = 80 * GIB
    used: int = 0
    uuid: str = ""
    pci: str = ""
    cores: int = 6912
    clock: int = 1410
    bus_width: int = 5120
    memory_clock: int = 1593
    power_limit: int = 400_000
    reasons: int = 0
    processes: str = ""
    links: tuple[int, ...] = ()
    peers: tuple[int, ...] | None = None  # all others
    slices: tuple[FakeSlice, ...] | None = None
    errors: dict[str, int] = {}


A100 = FakeGpu()
H200 = FakeGpu("NVIDIA H200", "9.0", 141 * GIB, cores=16896, clock=1980, bus_width=6144, memory_clock=3201)
T4 = FakeGpu("Tesla T4", "7.5", 15 * GIB, cores=2560, clock=1590, bus_width=256, memory_clock=5001)
RTX_4090 = FakeGpu("NVIDIA GeForce RTX 4090", "8.9", 24 * GIB, cores=16384, clock=3105)
L4 = FakeGpu("NVIDIA L4", "8.9", 23 * GIB, cores=7424, clock=2040)
GB10 = FakeGpu("NVIDIA GB10", "12.1", errors={"memory": NOT_SUPPORTED, "mig": NOT_SUPPORTED})


MIG_A100 = FakeGpu(slices=(FakeSlice("3g.40gb", 40 * GIB), FakeSlice("2g.20gb", 20 * GIB)))


class FakeMachine(msgspec.Struct, frozen=True):
    """What NVML answers as a whole: `init` is the error that it starts with."""

    gpus: tuple[FakeGpu, ...] = ()
    init: int = 0
    count_error: int | None = None
    driver: str | None = "580.95.05"
    cuda: int | None = 13000
    process_names: dict[int, str] = {}

    def lines(self) -> list[str]:
        lines = [f"init={self.init}", f"count={len(self.gpus)}"]
        lines += [f"{key}={value}" for key, value in (("driver", self.driver), ("cuda", self.cuda)) if value]
        lines += [f"process{pid}={name}" for pid, name in self.process_names.items()]
        lines += [f"error.count={self.count_error}"] if self.count_error else []
        for index, gpu in enumerate(self.gpus):
            lines += _gpu_lines(index, gpu, len(self.gpus))
        return lines


def but(gpu: FakeGpu, **changes: object) -> FakeGpu:
    return msgspec.structs.replace(gpu, **changes)


def indices(report: NvmlReport) -> list[int]:
    return [gpu.index for gpu in report.gpus]


def whats(report: NvmlReport) -> str:
    return "\n".join(problem.what for problem in report.problems)


def uuid_of(index: int) -> str:
    """The UUID that a card gets when its description has none."""
    return f"GPU-{index}aaaaaaa-0000"


def slice_uuid(index: int, place: int) -> str:
    return f"MIG-{index}{place}bbbbbb-0000"


def _gpu_lines(index: int, gpu: FakeGpu, count: int) -> list[str]:
    peers = tuple(other for other in range(count) if other != index) if gpu.peers is None else gpu.peers
    answers = {
        "name": gpu.name,
        "uuid": gpu.uuid or uuid_of(index),
        "pci": gpu.pci or f"00000000:{16 + index:02X}:00.0",
        "peers": ",".join(map(str, peers)),
        "links": ",".join(map(str, gpu.links)),
        "mig": int(gpu.slices is not None),
    }
    for field in ("capability", "memory", "used", "cores", "clock", "bus_width", "memory_clock", "power_limit",
                  "reasons", "processes"):  # fmt: skip
        answers[field] = getattr(gpu, field)
    lines = [f"gpu{index}.{field}={value}" for field, value in answers.items()]
    lines += [f"gpu{index}.error.{question}={code}" for question, code in gpu.errors.items()]
    for place, piece in enumerate(gpu.slices or ()):
        key = f"gpu{index}.mig{place}"
        size = int(piece.profile.partition("g.")[0].rpartition(".")[2])
        answers = {
            "uuid": slice_uuid(index, place),
            "name": f"{gpu.name} MIG {piece.profile}" if piece.named else gpu.name,
            "memory": piece.memory,
            "memory_mib": piece.memory // 2**20,
            "used": piece.used,
            "gpu_slices": size,
            "compute_slices": piece.compute_slices or size,
            "gpu_instance": place + 1,
            "compute_instance": 0,
            "processes": piece.processes,
        }
        lines += [f"{key}.{field}={value}" for field, value in answers.items()]
        lines += [f"{key}.error.{question}={code}" for question, code in piece.errors.items()]
    return lines


def build_library(folder: Path, *, old_driver: bool = False) -> Path:
    """Compile `fake_nvml.c` where pynvml finds it through `LD_LIBRARY_PATH`; returns that folder."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the fake NVML is written in C and this machine has no C compiler")
    options = ["-DOLD_DRIVER"] if old_driver else []
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-Wall", "-Wextra", "-Werror", *options, "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return folder


class Laboratory(msgspec.Struct, frozen=True):
    """Where fake machines are probed: the two libraries, and a folder for their descriptions."""

    library: Path
    old_library: Path
    folder: Path

    def environment(self, machine: FakeMachine, *, old_driver: bool = False) -> dict[str, str]:
        """The environment of a process on such a machine, without what this one's says of GPUs."""
        description = self.folder / "machine.txt"
        description.write_text("\n".join(machine.lines()) + "\n")
        here = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        library = self.old_library if old_driver else self.library
        return {**here, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(description)}

    def run(
        self, code: str, machine: FakeMachine, *, old_driver: bool = False, environment: Mapping[str, str] = {}
    ) -> str:
        """What Python code prints on such a machine."""
        answer = subprocess.run(
            [sys.executable, "-c", code],
            check=False,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env={**self.environment(machine, old_driver=old_driver), **environment},
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def report(self, *gpus: FakeGpu, old_driver: bool = False, environment: Mapping[str, str] = {}) -> NvmlReport:
        """What the probe finds on a machine with 64 GiB of RAM, half of them free."""
        return self.report_of(FakeMachine(gpus), old_driver=old_driver, environment=environment)

    def report_of(
        self, machine: FakeMachine, *, old_driver: bool = False, environment: Mapping[str, str] = {}
    ) -> NvmlReport:
        answer = self.run(REPORT, machine, old_driver=old_driver, environment=environment)
        return msgspec.json.decode(answer, type=NvmlReport)

    def machine(self, *gpus: FakeGpu, torch_cuda: str | None = "13.0", environment: Mapping[str, str] = {}) -> Machine:
        """The whole probe with a torch that is built for CUDA, or for the CPU."""
        return self.machine_of(FakeMachine(gpus), torch_cuda=torch_cuda, environment=environment)

    def machine_of(
        self, machine: FakeMachine, *, torch_cuda: str | None = "13.0", environment: Mapping[str, str] = {}
    ) -> Machine:
        answer = self.run(WHOLE, machine, environment={"TORCH_CUDA": torch_cuda or "", **environment})
        return msgspec.json.decode(answer, type=Machine)


REPORT = """
import os, msgspec
from autotune.probe.gpus import probe_gpus
report = probe_gpus(os.environ, ram_bytes=64 * 2**30, free_ram_bytes=32 * 2**30)
print(msgspec.json.encode(report).decode())
"""

WHOLE = """
import os
from autotune.probe import machine, versions
build = versions.TorchBuild(cuda=os.environ["TORCH_CUDA"] or None)
machine.probe_torch_build = versions.probe_torch_build = lambda: build
print(machine.to_json(machine.probe_machine(os.environ)).decode())
"""
