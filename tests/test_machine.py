"""The machine's probe: GPUs as NVML tells them, the CPU and memory a container leaves, versions that fit or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from autotune.errors import AutotuneError
from autotune.probe import machine as machine_module
from autotune.probe import versions as versions_module
from autotune.probe.gpus import Gpu, NvmlReport, probe_gpus
from autotune.probe.host import Cpu, probe_cpu, probe_memory
from autotune.probe.machine import (
    Fact,
    Machine,
    choose_precision,
    describe,
    machine_from_json,
    probe_machine,
    to_json,
)
from autotune.probe.versions import TorchBuild, kernels_bounds, kernels_problem

GIB = 2**30


class NvmlError(Exception):
    """Stands for `pynvml.NVMLError`."""


class LibraryNotFoundError(NvmlError):
    """Stands for `pynvml.NVMLError_LibraryNotFound`."""


class FakeGpu(msgspec.Struct):
    name: str
    capability: tuple[int, int] = (8, 0)
    total: int = 80 * GIB
    used: int = 0
    processes: int = 0
    links: tuple[int, ...] = ()
    slices: tuple[tuple[str, int], ...] | None = None  # profile and memory of each MIG slice
    unsupported: tuple[str, ...] = ()
    lost: bool = False


class Handle(msgspec.Struct, frozen=True):
    gpu: int
    piece: int | None = None


class FakeNvml(types.ModuleType):
    """Answers as a driver with these GPUs would."""

    NVMLError = NvmlError
    NVMLError_LibraryNotFound = LibraryNotFoundError

    def __init__(self, gpus: list[FakeGpu], *, init_error: Exception | None = None) -> None:
        super().__init__("pynvml")
        self._gpus = gpus
        self._init_error = init_error

    def _check(self, handle: Handle, call: str) -> FakeGpu:
        gpu = self._gpus[handle.gpu]
        if call in gpu.unsupported:
            raise NvmlError("Not Supported")
        return gpu

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            raise self._init_error

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        if self._gpus[index].lost:
            raise NvmlError("GPU is lost")
        return Handle(index)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return f"GPU-{handle.gpu}aaa" if handle.piece is None else f"MIG-{handle.gpu}{handle.piece}bbb"

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        gpu = self._check(handle, "name")
        if handle.piece is None:
            return gpu.name
        assert gpu.slices is not None
        return f"{gpu.name} MIG {gpu.slices[handle.piece][0]}"

    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> Any:
        gpu = self._check(handle, "memory")
        total = gpu.total
        if handle.piece is not None:
            assert gpu.slices is not None
            total = gpu.slices[handle.piece][1]
        return types.SimpleNamespace(total=total, free=total - gpu.used, used=gpu.used)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]:
        return self._check(handle, "capability").capability

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> list[object]:
        return [object()] * self._check(handle, "processes").processes

    def nvmlDeviceGetMigMode(self, handle: Handle) -> tuple[int, int]:
        mode = int(self._check(handle, "mig").slices is not None)
        return mode, mode

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> Handle:
        slices = self._gpus[handle.gpu].slices
        if slices is None or index >= len(slices):
            raise NvmlError("Not Found")
        return Handle(handle.gpu, index)

    def nvmlDeviceGetP2PStatus(self, one: Handle, other: Handle, capability: int) -> int:
        gpu = self._check(one, "p2p")
        if capability == 2:
            return 0 if other.gpu in gpu.links else 5
        return 0


A100 = FakeGpu("NVIDIA A100-SXM4-80GB")
T4 = FakeGpu("Tesla T4", capability=(7, 5), total=15 * GIB)


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put these GPUs, and a torch built for CUDA, into this process's machine."""

    def put(*gpus: FakeGpu, init_error: Exception | None = None, torch_cuda: str | None = "13.0") -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(list(gpus), init_error=init_error))
        build = TorchBuild(cuda=torch_cuda)
        monkeypatch.setattr(machine_module, "probe_torch_build", lambda: build)
        monkeypatch.setattr(versions_module, "probe_torch_build", lambda: build)

    return put


def report(**environment: str) -> NvmlReport:
    return probe_gpus(environment, ram_bytes=64 * GIB, free_ram_bytes=32 * GIB)


def visible(setting: str) -> list[str]:
    return [gpu.uuid for gpu in report(CUDA_VISIBLE_DEVICES=setting).gpus]


# this machine


def test_probing_the_machine_is_quick_and_imports_no_torch() -> None:
    code = """
import sys, time
from autotune.probe.machine import describe, probe_machine, to_json
begin = time.perf_counter()
machine = probe_machine()
seconds = time.perf_counter() - begin
heavy = {"torch", "transformers", "trl", "datasets", "accelerate", "kernels", "vllm"} & set(sys.modules)
print(seconds, sorted(heavy), len(to_json(machine)) > 100)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert float(answer[0]) < 0.3
    assert answer[1:] == ["[]", "True"]


def test_the_machine_has_the_versions_that_are_installed() -> None:
    found = probe_machine().versions
    code = (
        "import trl, transformers, torch, kernels; print(trl.__version__, transformers.__version__, torch.__version__)"
    )
    trl, transformers, torch = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert (found["trl"], found["transformers"], found["torch"]) == (trl, transformers, torch)
    assert set(found) == {
        "python", "trl", "transformers", "torch", "torch_cuda", "accelerate", "peft", "datasets", "kernels", "vllm",
        "flash_attn", "flash_attn_3", "flash_attn_4",
    }  # fmt: skip


def test_the_machine_has_no_more_cores_or_memory_than_psutil_tells() -> None:
    machine = probe_machine({})
    assert 1 <= machine.cpu.cores <= len(os.sched_getaffinity(0))
    assert 0 < machine.free_ram_bytes <= machine.ram_bytes <= psutil.virtual_memory().total


# GPUs


def test_an_a100_trains_in_bf16_and_is_described(with_gpus: Any) -> None:
    with_gpus(FakeGpu("NVIDIA A100-SXM4-80GB", used=GIB, processes=2))
    machine = probe_machine({})
    assert machine.backend == "cuda"
    assert machine.precision == Fact("bf16", "compute capability 8.0 is Ampere or newer")
    assert machine.driver == "580.95.05"
    assert machine.cuda_driver == (13, 0)
    assert machine.gpus[0] == Gpu(0, "GPU-0aaa", "NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB, 79 * GIB, None, (), 2)
    assert describe(machine) == "1x NVIDIA A100-SXM4-80GB, 79.0 GiB free"


def test_a_t4_trains_in_fp16(with_gpus: Any) -> None:
    with_gpus(T4)
    assert probe_machine({}).precision == Fact(
        "fp16", "compute capability 7.5 is older than Ampere, which is the first with bf16"
    )


def test_the_weakest_of_several_gpus_decides_the_precision(with_gpus: Any) -> None:
    with_gpus(A100, T4)
    machine = probe_machine({})
    assert machine.precision.value == "fp16"
    assert "7.5, the lowest of the GPUs here" in machine.precision.reason
    assert describe(machine) == "1x NVIDIA A100-SXM4-80GB + 1x Tesla T4, 15.0 GiB free each"


def test_a_hidden_gpu_does_not_decide_the_precision(with_gpus: Any) -> None:
    with_gpus(A100, T4)
    assert probe_machine({"CUDA_VISIBLE_DEVICES": "0"}).precision.value == "bf16"


def test_a_driver_that_fails_is_a_problem_and_not_a_crash(with_gpus: Any) -> None:
    with_gpus(init_error=NvmlError("Driver/library version mismatch"))
    machine = probe_machine({})
    assert machine.backend == "cpu"
    assert machine.problems[0].what == (
        "the NVIDIA driver is installed and does not answer: Driver/library version mismatch"
    )
    assert "nvidia-smi" in machine.problems[0].hint


def test_a_machine_without_nvml_has_no_gpus_and_no_problem(with_gpus: Any) -> None:
    with_gpus(init_error=LibraryNotFoundError())
    machine = probe_machine({})
    assert machine.gpus == ()
    assert machine.backend == "cpu"
    assert machine.problems == ()


def test_a_lost_gpu_is_a_problem_and_the_others_are_found(with_gpus: Any) -> None:
    with_gpus(FakeGpu("NVIDIA A100-SXM4-80GB", lost=True), A100)
    found = report()
    assert [gpu.index for gpu in found.gpus] == [1]
    assert found.problems[0].what == "GPU 0 does not answer: GPU is lost"


def test_questions_that_a_driver_does_not_answer_are_none(with_gpus: Any) -> None:
    with_gpus(FakeGpu("NVIDIA GB10", unsupported=("memory", "capability", "processes", "mig", "p2p")), A100)
    gpu = report().gpus[0]
    assert (gpu.compute_capability, gpu.busy_processes, gpu.mig, gpu.linked_to) == (None, None, None, ())
    assert (gpu.memory_bytes, gpu.free_bytes) == (64 * GIB, 32 * GIB)  # it shares the machine's memory


def test_gpus_on_nvlink_are_told_from_those_on_the_bus(with_gpus: Any) -> None:
    linked = [FakeGpu("A", links=(1,)), FakeGpu("A", links=(0,)), FakeGpu("A")]
    with_gpus(*linked)
    gpus = report().gpus
    assert [gpu.linked_to for gpu in gpus] == [(1,), (0,), ()]
    assert [gpu.peer_access for gpu in gpus] == [(1, 2), (0, 2), (0, 1)]


def test_a_gpu_with_a_cpu_build_of_torch_is_a_problem(with_gpus: Any) -> None:
    with_gpus(A100, torch_cuda=None)
    machine = probe_machine({})
    assert machine.backend == "cpu"
    assert "is not built for CUDA" in machine.problems[0].what
    assert "13.0" in machine.problems[0].hint


@pytest.mark.parametrize(
    ("setting", "uuids"),
    [
        ("1,0", ["GPU-1aaa", "GPU-0aaa"]),
        ("GPU-2", ["GPU-2aaa"]),
        ("GPU-2aaa,GPU-0aaa", ["GPU-2aaa", "GPU-0aaa"]),
        (" 2 , 1 ", ["GPU-2aaa", "GPU-1aaa"]),
        ("", []),
        ("-1", []),
        ("0,-1,2", ["GPU-0aaa"]),
        ("0,9,2", ["GPU-0aaa"]),
        ("GPU-", []),
        ("1,1", []),
    ],
)
def test_cuda_visible_devices_is_understood(with_gpus: Any, setting: str, uuids: list[str]) -> None:
    with_gpus(A100, A100, A100)
    assert visible(setting) == uuids


def test_an_unknown_gpu_in_cuda_visible_devices_is_named(with_gpus: Any) -> None:
    with_gpus(A100)
    assert report(CUDA_VISIBLE_DEVICES="7").problems[0].what == (
        "`CUDA_VISIBLE_DEVICES=7` names `7`, and that is not one GPU here"
    )


def test_a_mig_slice_has_its_own_memory_and_is_found_by_uuid(with_gpus: Any) -> None:
    with_gpus(FakeGpu("NVIDIA A100-SXM4-80GB", slices=(("3g.40gb", 40 * GIB), ("2g.20gb", 20 * GIB))), A100)
    gpu = report(CUDA_VISIBLE_DEVICES="MIG-01").gpus[0]
    assert (gpu.uuid, gpu.mig, gpu.memory_bytes) == ("MIG-01bbb", "2g.20gb", 20 * GIB)
    assert gpu.compute_capability == (8, 0)
    assert visible("MIG-0") == []  # the beginning of two slices' names
    assert visible("1") == ["GPU-1aaa"]


def test_a_gpu_in_mig_mode_without_slices_is_a_problem(with_gpus: Any) -> None:
    with_gpus(FakeGpu("NVIDIA A100-SXM4-80GB", slices=()))
    found = report()
    assert found.gpus == ()
    assert "has no slice" in found.problems[0].what


# the CPU and the memory of a container


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


V2 = {
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n",
    "proc/self/mountinfo": (
        "33 31 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    ),
}


def test_the_memory_limit_of_a_v2_container_is_respected(tmp_path: Path) -> None:
    files = {
        "memory.max": f"{GIB}\n",
        "memory.current": f"{GIB // 2}\n",
        "memory.stat": f"anon 1\ninactive_file {GIB // 4}\n",
    }
    write(tmp_path, {**V2, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})
    memory = probe_memory(tmp_path)
    assert (memory.total_bytes, memory.free_bytes) == (GIB, GIB * 3 // 4)


def test_the_memory_limit_of_a_v1_container_is_respected(tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": f"{GIB}\n", "memory.usage_in_bytes": f"{GIB // 2}\n"}
    write(tmp_path, {**V1, **{f"sys/fs/cgroup/memory/{name}": text for name, text in files.items()}})
    memory = probe_memory(tmp_path)
    assert (memory.total_bytes, memory.free_bytes) == (GIB, GIB // 2)


def test_the_tightest_limit_above_a_group_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job/step\n",
            "proc/self/mountinfo": V2["proc/self/mountinfo"],
            "sys/fs/cgroup/slurm/job/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/slurm/job/memory.current": "0\n",
            "sys/fs/cgroup/slurm/job/step/memory.max": "max\n",
        },
    )
    assert probe_memory(tmp_path).total_bytes == GIB


def test_a_machine_without_limits_has_all_its_memory(tmp_path: Path) -> None:
    write(tmp_path, {**V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert probe_memory(tmp_path).total_bytes == psutil.virtual_memory().total


def cpu_with(root: Path, monkeypatch: pytest.MonkeyPatch, *, cpus: int, threads: int, files: dict[str, str]) -> Cpu:
    for cpu in range(cpus):
        first = cpu - cpu % threads
        siblings = f"{first}-{first + threads - 1}\n" if threads > 1 else f"{cpu}\n"
        write(root, {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": siblings})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    return probe_cpu(write(root, files))


def test_hyper_threads_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_with(tmp_path, monkeypatch, cpus=8, threads=2, files=V2).cores == 4


@pytest.mark.parametrize(("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8)])
def test_the_cpu_quota_of_a_v2_container_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    files = {**V2, "sys/fs/cgroup/cpu.max": f"{quota}\n"}
    assert cpu_with(tmp_path, monkeypatch, cpus=8, threads=1, files=files).cores == cores


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 8)])
def test_the_cpu_quota_of_a_v1_container_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct"
    files = {**V1, f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
    assert cpu_with(tmp_path, monkeypatch, cpus=8, threads=1, files=files).cores == cores


@pytest.mark.parametrize(
    ("cpuinfo", "name", "flag"),
    [
        ("model name\t: AMD EPYC\nflags\t\t: fpu avx512_bf16 avx2\n", "AMD EPYC", "avx512_bf16"),
        ("model name : Intel(R)  Xeon(R)\nflags : amx_bf16 avx512_bf16\n", "Intel(R) Xeon(R)", "amx_bf16"),
        ("processor : 0\nFeatures : fp asimd bf16 sve\n", None, "bf16"),
        ("model name : AMD Ryzen 5\nflags : fpu avx2\n", "AMD Ryzen 5", None),
    ],
)
def test_the_cpu_is_named_and_its_bf16_found(tmp_path: Path, cpuinfo: str, name: str | None, flag: str | None) -> None:
    cpu = probe_cpu(write(tmp_path, {"proc/cpuinfo": cpuinfo}))
    assert cpu.bf16 is (flag is not None)
    assert cpu.bf16_flag == flag
    assert cpu.name == name or (name is None and cpu.name.endswith(" CPU"))


def test_a_cpu_trains_in_bf16_only_where_it_has_the_instructions() -> None:
    assert choose_precision("cpu", (), Cpu("x", 2, True, "avx512_bf16")) == Fact(
        "bf16", "this CPU has bf16 arithmetic (avx512_bf16)"
    )
    assert choose_precision("cpu", (), Cpu("x", 2, False)).value == "float32"


# versions


def test_the_bounds_of_kernels_are_those_of_the_installed_transformers() -> None:
    code = "from transformers.utils import import_utils as u; print(u.KERNELS_MIN_VERSION, u.KERNELS_MAX_VERSION)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert list(kernels_bounds() or ()) == told


def test_the_installed_pair_of_transformers_and_kernels_works() -> None:
    assert kernels_problem(probe_machine().versions) is None


@pytest.mark.parametrize("kernels", ["0.16.2", "0.18.0", "nonsense"])
def test_kernels_out_of_range_is_a_problem_that_names_a_pair(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr(versions_module, "kernels_bounds", lambda: ("0.17.2", "0.18.0"))
    problem = kernels_problem({"transformers": "5.22.2", "kernels": kernels})
    assert problem is not None
    assert problem.what == (
        f"transformers 5.22.2 takes kernels 0.17.2 or newer and older than 0.18.0, and {kernels} is installed, "
        "so no attention kernel can come from the hub"
    )
    assert '"kernels>=0.17.2,<0.18.0"' in problem.hint
    assert "transformers==5.22.2 kernels==0.17.2" in problem.hint


# the machine as a file


def test_a_machine_survives_its_json() -> None:
    machine = probe_machine()
    assert machine_from_json(to_json(machine)) == machine


def document(**changes: Any) -> bytes:
    """The documented form, as a person would write it for a what-if."""
    gpu = {
        "index": 0, "uuid": "GPU-1", "name": "NVIDIA A100-SXM4-80GB", "compute_capability": [8, 0],
        "memory_bytes": 85899345920, "free_bytes": 85000000000, "mig": None, "linked_to": [1], "busy_processes": 0,
    }  # fmt: skip
    whole: dict[str, Any] = {
        "schema": 1, "backend": "cuda", "gpus": [gpu], "driver": "580.95.05", "cuda_driver": [13, 0],
        "cpu": {"name": "x", "cores": 16, "bf16": True}, "ram_bytes": 64 * GIB,
        "versions": {"python": "3.11.7", "vllm": None}, "precision": {"value": "bf16", "reason": "asked"},
        "attention": [{"name": "sdpa", "usable": True, "packing": "dense mask", "reason": "r"}], "problems": [],
    }  # fmt: skip
    return json.dumps({**whole, **changes}).encode()


def test_a_file_that_tells_no_free_memory_has_all_of_it_free() -> None:
    machine = machine_from_json(document())
    assert machine.free_ram_bytes == 64 * GIB
    assert describe(machine) == "1x NVIDIA A100-SXM4-80GB, 79.2 GiB free"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"ram_bytes": "64 GB"}, "the machine file is wrong in `ram_bytes`: expected `int`, got `str`"),
        ({"ram_bytes": -1}, "the machine file is wrong in `ram_bytes`: expected `int` >= 0"),
        ({"schema": 2}, "the machine file is wrong in `schema`: invalid enum value 2"),
        ({"backend": "tpu"}, "the machine file is wrong in `backend`: invalid enum value 'tpu'"),
        ({"gpus": [{"index": 0}]}, "the machine file is wrong in `gpus[0]`: object missing required field `uuid`"),
        (
            {"gpus": []},
            "the machine file is wrong in `gpus`: expected at least one GPU with the backend `cuda`, got none",
        ),
        (
            {"precision": {"value": "int4", "reason": ""}},
            "the machine file is wrong in `precision.value`: expected one of `bf16`, `fp16`, `float32`, got `int4`",
        ),
    ],
)
def test_a_wrong_field_of_a_machine_file_is_named(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(AutotuneError) as raised:
        machine_from_json(document(**changes))
    assert raised.value.what == what
    assert "doctor --json" in raised.value.hint


def test_a_field_that_a_machine_file_lacks_is_named() -> None:
    with pytest.raises(AutotuneError) as raised:
        machine_from_json(b'{"schema": 1}')
    assert raised.value.what == "the machine file is wrong: object missing required field `backend`"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null"])
def test_a_machine_file_that_is_no_object_is_refused_in_words(content: bytes) -> None:
    with pytest.raises(AutotuneError, match=r"^the machine file is "):
        machine_from_json(content)


def test_describing_a_machine_without_gpus_names_its_cpu() -> None:
    machine: Machine = msgspec.structs.replace(
        machine_from_json(document(backend="cpu", gpus=[])), free_ram_bytes=int(21.4 * GIB)
    )
    assert describe(machine) == "16-core x, 21.4 GiB free"


def test_probing_a_machine_with_eight_gpus_is_quick(with_gpus: Any) -> None:
    with_gpus(*[A100] * 8)
    begin = time.perf_counter()
    assert len(probe_machine({}).gpus) == 8
    assert time.perf_counter() - begin < 0.3
