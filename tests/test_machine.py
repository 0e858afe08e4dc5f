"""The machine's probe: GPUs as NVML tells them, the CPU and memory a container leaves, versions that fit or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from autotune import __version__
from autotune.errors import AutotuneError
from autotune.probe import versions as versions_module
from autotune.probe.host import Cpu, probe_cpu, probe_memory
from autotune.probe.machine import (
    Fact,
    Machine,
    choose_precision,
    describe,
    machine_from_json,
    probe_machine,
    read_machine,
    to_json,
)
from autotune.probe.versions import kernels_bounds, kernels_problem

GIB = 2**30


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
        "trl_autotune", "os",
        "python", "trl", "transformers", "torch", "torch_cuda", "accelerate", "peft", "datasets", "kernels", "vllm",
        "flash_attn", "flash_attn_3", "flash_attn_4",
    }  # fmt: skip
    assert found["trl_autotune"] == __version__
    assert found["os"]


def test_the_machine_has_no_more_cores_or_memory_than_psutil_tells() -> None:
    machine = probe_machine({})
    assert 1 <= machine.cpu.cores <= len(os.sched_getaffinity(0))
    assert 0 < machine.free_ram_bytes <= machine.ram_bytes <= psutil.virtual_memory().total


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
        ({"ram_bytes": -1}, "the machine file is wrong in `ram_bytes`: expected `int` >= 1"),
        ({"ram_bytes": 10**18}, "the machine file is wrong in `ram_bytes`: expected `int` <= 1125899906842624"),
        ({"ram_bytes": 0}, "the machine file is wrong in `ram_bytes`: expected `int` >= 1"),
        (
            {"free_ram_bytes": 65 * GIB},
            "the machine file is wrong in `free_ram_bytes`: 69793218560 bytes are free of 68719476736",
        ),
        (
            {"cpu": {"name": "x", "cores": 0, "bf16": True}},
            "the machine file is wrong in `cpu.cores`: expected `int` >= 1",
        ),
        (
            {"attention": [{"name": "a", "usable": True, "packing": "", "reason": "", "milliseconds": -1}]},
            "the machine file is wrong in `attention[0].milliseconds`: expected `float` >= 0.0",
        ),
        ({"schema": 0}, "the machine file is wrong in `schema`: invalid enum value 0"),
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


def gpu_with(**changes: Any) -> dict[str, Any]:
    return {**json.loads(document())["gpus"][0], **changes}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"gpus": [gpu_with(compute_capability=[-1, 0])]},
         "wrong in `gpus[0].compute_capability[0]`: expected `int` >= 0"),
        ({"gpus": [gpu_with(compute_capability=[99, 0])]},
         "wrong in `gpus[0].compute_capability[0]`: expected `int` <= 20"),
        ({"gpus": [gpu_with(index=-5)]}, "wrong in `gpus[0].index`: expected `int` >= 0"),
        ({"gpus": [gpu_with(power_limit_watts=-1)]}, "wrong in `gpus[0].power_limit_watts`: expected `float` >= 0.0"),
        ({"gpus": [gpu_with(busy_processes=-3)]}, "wrong in `gpus[0].busy_processes`: expected `int` >= 0"),
        ({"gpus": [gpu_with(linked_to=[99])]}, "wrong in `gpus[0].linked_to[0]`: expected `int` <= 63"),
        ({"gpus": [gpu_with(linked_to=[0])]}, "wrong in `gpus[0].linked_to`: a GPU is not linked to itself"),
        ({"gpus": [gpu_with(), gpu_with(index=1)]}, "wrong in `gpus[1].uuid`: `GPU-1` is that of `gpus[0]` too"),
        ({"gpus": [gpu_with(), gpu_with(uuid="GPU-2")]}, "wrong in `gpus[1].index`: `0` is that of `gpus[0]` too"),
        ({"gpus": [gpu_with(memroy_bytes=1)]},
         "wrong in `gpus[0].memroy_bytes`: there is no such field, did you mean `memory_bytes`?"),
        ({"cpu": {"name": "x", "cores": 1, "bf16": True, "zzz": 1}},
         "wrong in `cpu.zzz`: there is no such field; known are bf16, bf16_flag, cores, name"),
        ({"percision": {}}, "wrong in `percision`: there is no such field, did you mean `precision`?"),
        ({"versions": {"python": "3.11.7", "torch": 7}}, "wrong in `versions.torch`: expected `str | null`, got `int`"),
        ({"versions": {"torch": "banana"}},
         "wrong in `versions.torch`: expected a version such as `2.13.0`, got `banana`"),
        ({"versions": {"torch_cuda": "13"}},
         "wrong in `versions.torch_cuda`: expected a version such as `13.0`, got `13`"),
    ],
)  # fmt: skip
def test_what_no_machine_can_be_is_refused_with_its_place(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(AutotuneError) as raised:
        machine_from_json(document(**changes))
    assert raised.value.what == f"the machine file is {what}"


def test_slices_of_one_card_share_its_index() -> None:
    slices = [gpu_with(uuid=f"MIG-{number}", mig="3g.40gb", linked_to=[]) for number in (1, 2)]
    assert len(machine_from_json(document(gpus=slices)).gpus) == 2


def test_a_machine_file_is_a_file_of_a_size_that_one_can_have(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large.json"
    os.mkfifo(pipe)
    large.write_bytes(document() + b" " * 4 * 2**20)
    for path, what in (
        (Path("/dev/zero"), "cannot read the machine file `/dev/zero`: it is no regular file"),
        (pipe, f"cannot read the machine file `{pipe}`: it is no regular file"),
        (large, f"the machine file `{large}` holds more than 4 MiB"),
        (tmp_path, f"cannot read the machine file `{tmp_path}`: Is a directory"),
        (tmp_path / "x\0y", f"cannot read the machine file `{tmp_path}/x\0y`: embedded null byte"),
    ):
        with pytest.raises(AutotuneError) as raised:
            read_machine(path)
        assert raised.value.what == what
    large.write_bytes(document() + b" " * (4 * 2**20 - len(document())))
    assert read_machine(large).what_if


def test_a_field_that_a_machine_file_lacks_is_named() -> None:
    with pytest.raises(AutotuneError) as raised:
        machine_from_json(b'{"schema": 1}')
    assert raised.value.what == "the machine file is wrong: object missing required field `backend`"


@pytest.mark.parametrize("size", [b"1" + b"0" * 30, b"1" + b"0" * 400, b"1e400", b"-1e30"])
def test_a_number_out_of_all_bounds_is_refused(size: bytes) -> None:
    content = document(ram_bytes=-12345).replace(b"-12345", size)
    with pytest.raises(AutotuneError, match=r"^the machine file is (wrong in `ram_bytes`|not JSON)"):
        machine_from_json(content)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b" \n", "the machine file `there.json` is empty"),
        (b"\xef\xbb\xbf" + document(), "the machine file `there.json` begins with a byte order mark"),
        (document().decode().encode("utf-16"), "the machine file `there.json` is not UTF-8, it looks like UTF-16"),
        (document().decode().encode("utf-16-be"), "the machine file `there.json` is not UTF-8, it looks like UTF-16"),
        (document(schema=2), "the machine file `there.json` has `schema` 2, and this version reads 1"),
        (b'{"backend": "cpu"}', "the machine file `there.json` is wrong: it has no `schema`, which is 1"),
        (b"[" * 100_000, "the machine file `there.json` is wrong: expected `object`"),
    ],
)
def test_what_is_wrong_with_a_machine_file_is_said_with_its_name(content: bytes, what: str) -> None:
    with pytest.raises(AutotuneError) as raised:
        machine_from_json(content, file=Path("there.json"))
    assert raised.value.what == what


def test_control_characters_of_a_machine_file_reach_no_terminal() -> None:
    machine = machine_from_json(document(driver="580\x1b[2J\u202e.95", cpu={"name": "x\ny", "cores": 1, "bf16": True}))
    assert (machine.driver, machine.cpu.name) == ("580 [2J .95", "x y")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null"])
def test_a_machine_file_that_is_no_object_is_refused_in_words(content: bytes) -> None:
    with pytest.raises(AutotuneError, match=r"^the machine file is "):
        machine_from_json(content)


def test_describing_a_machine_without_gpus_names_its_cpu() -> None:
    machine: Machine = msgspec.structs.replace(
        machine_from_json(document(backend="cpu", gpus=[])), free_ram_bytes=int(21.4 * GIB)
    )
    assert describe(machine) == "16-core x, 21.4 GiB free"
