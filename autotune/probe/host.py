"""The CPU and the memory that this process may use: what the machine has, within what a container allows."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

# The instructions that make bfloat16 faster than float32 on a CPU, not merely possible.
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")

MOST_CORES = 4096


class Cpu(msgspec.Struct, frozen=True):
    name: str
    cores: Annotated[int, msgspec.Meta(ge=1, le=MOST_CORES)]  # physical cores this process may use
    bf16: bool
    bf16_flag: str | None = None  # the CPU's own name for its bf16 instructions


class Memory(msgspec.Struct, frozen=True):
    """Bytes this process may use in all, and those free now."""

    total_bytes: int
    free_bytes: int


def probe_cpu(root: Path = Path("/")) -> Cpu:
    """The CPU's name, its cores and its bf16 instructions. `root` holds `proc` and `sys`."""
    text = _read(root / "proc/cpuinfo")
    flags = _cpuinfo_field(text, "flags", "Features").split()
    flag = next((name for name in BF16_FLAGS if name in flags), None)
    if not text:
        flag = _apple_bf16()
    return Cpu(name=_cpu_name(text), cores=_cores(root), bf16=flag is not None, bf16_flag=flag)


def probe_memory(root: Path = Path("/")) -> Memory:
    """The memory of the machine, or of the tightest cgroup around this process. What the page cache can give back
    counts as free."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        if limit is None or limit >= machine.total:  # v1 writes 2^63 rounded down for "no limit"
            continue
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
        total = min(total, limit)
        free = min(free, max(0, limit - used + _inactive_file(folder)))
    return Memory(total_bytes=total, free_bytes=free)


def _cores(root: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cores = {
        _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        for cpu in os.sched_getaffinity(0)
    }
    limit = len(cores)
    for folder in _cgroup_folders(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            limit = min(limit, int(quota))
    return max(1, limit)


def _cpu_quota(folder: Path) -> float | None:
    """CPUs' worth of time per period, None without a limit (v2 `cpu.max`, v1 `cpu.cfs_quota_us`)."""
    pair = _read(folder / "cpu.max").split()
    if not pair:
        pair = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    try:
        quota, period = int(pair[0]), int(pair[1])
    except (ValueError, IndexError):  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The folders of this process's cgroup and of all above it, for v2 and for `controller` in v1.

    Inside a container the path of the group can be the host's, which is not mounted: what is missing is skipped, and
    the root of the mount, which is then the container's own group, is always in the list.
    """
    groups: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            groups[name] = path
    folders: list[Path] = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            group = groups.get("")
        elif kind == "cgroup" and controller in options.split(" ")[-1].split(","):
            group = groups.get(controller)
        else:
            continue
        if group is None:
            continue
        mounted_root, mounted_at = before.split(" ")[3:5]
        if mounted_root != "/" and (group == mounted_root or group.startswith(mounted_root + "/")):
            group = group[len(mounted_root) :]
        mount = root / mounted_at.lstrip("/")
        below = mount / group.strip("/")
        folders.append(mount)
        while below != mount and mount in below.parents:
            folders.append(below)
            below = below.parent
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _inactive_file(folder: Path) -> int:
    """Page cache of a group that the kernel drops before it kills: `docker stats` takes it off too."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("total_inactive_file", "inactive_file") and value.isdecimal():
            return int(value)
    return 0


def _cpu_name(cpuinfo: str) -> str:
    name = _cpuinfo_field(cpuinfo, "model name")
    if not name and sys.platform == "darwin":
        name = _sysctl("machdep.cpu.brand_string")
    return name or f"{platform.machine()} CPU"


def _apple_bf16() -> str | None:
    return "FEAT_BF16" if sys.platform == "darwin" and _sysctl("hw.optional.arm.FEAT_BF16") == "1" else None


def _sysctl(name: str) -> str:
    try:
        answer = subprocess.run(["sysctl", "-n", name], check=False, capture_output=True, text=True, timeout=1.0)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()


def _cpuinfo_field(cpuinfo: str, *names: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return " ".join(value.split())
    return ""


def _number(*paths: Path) -> int | None:
    for path in paths:
        text = _read(path)
        if text.isdecimal():
            return int(text)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
