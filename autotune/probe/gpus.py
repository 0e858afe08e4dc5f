"""The NVIDIA GPUs that this process may use, as NVML tells them, without CUDA and without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from autotune.probe.facts import Problem

NVML_P2P_CAPS_INDEX_READ = 0  # pynvml.py 13.615 defines it as the tuple `(0,)`
NVML_P2P_CAPS_INDEX_NVLINK = 2

Bytes = Annotated[int, msgspec.Meta(ge=0)]


class GpuProcess(msgspec.Struct, frozen=True):
    """A process of somebody else that computes on a GPU; None for what the system does not tell."""

    pid: int
    name: str | None
    memory_bytes: Bytes | None


class Gpu(msgspec.Struct, frozen=True):
    """One GPU, or one MIG slice of it.

    `index` is NVML's, in PCI order; launches name a GPU by `uuid`. `mig` is the slice's profile, such as `3g.40gb`;
    the memory is then the slice's own. `linked_to` and `peer_access` are indices of other GPUs: reached over NVLink,
    and readable directly over any bus. None: the driver does not tell.
    """

    index: int
    uuid: str
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: Bytes
    free_bytes: Bytes
    mig: str | None
    linked_to: tuple[int, ...]
    busy_processes: int | None
    peer_access: tuple[int, ...] = ()
    pci: str | None = None  # its place on the bus, as `nvidia-smi` writes it
    processes: tuple[GpuProcess, ...] = ()
    power_limit_watts: float | None = None
    throttling: tuple[str, ...] | None = None  # why its clocks are held back, in words; None where not told


class NvmlReport(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML told; `cuda_driver` is the newest CUDA version that the driver runs."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver: tuple[int, int] | None = None
    problems: tuple[Problem, ...] = ()


class _Device(msgspec.Struct, frozen=True):
    """A GPU with its NVML handle; `slices` are its MIG devices, None where MIG is off."""

    index: int
    uuid: str
    handle: Any
    slices: tuple[tuple[str, Any], ...] | None


def probe_gpus(environment: Mapping[str, str], *, ram_bytes: int, free_ram_bytes: int) -> NvmlReport:
    """Ask NVML about the GPUs that `CUDA_VISIBLE_DEVICES` in `environment` leaves visible, in that order.

    A GPU that shares the machine's memory (GB10, Jetson) has none of its own to tell: it gets the figures for RAM.
    A machine without NVML has no NVIDIA GPU; an NVML that fails is a problem, not an error.
    """
    nvml: Any = importlib.import_module("pynvml")  # 25 ms
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return NvmlReport()
    except nvml.NVMLError as error:
        return NvmlReport(problems=(_nvml_failed(error),))
    try:
        return _report(nvml, environment, ram_bytes, free_ram_bytes)
    except nvml.NVMLError as error:
        return NvmlReport(problems=(_nvml_failed(error),))
    finally:
        nvml.nvmlShutdown()


def _nvml_failed(error: Exception) -> Problem:
    return Problem(
        what=f"the NVIDIA driver is installed and does not answer: {error}",
        hint="run `nvidia-smi`; if it fails too, load or repair the driver, or restart the container with its GPUs",
    )


def _report(nvml: Any, environment: Mapping[str, str], ram_bytes: int, free_ram_bytes: int) -> NvmlReport:
    problems: list[Problem] = []
    devices: list[_Device] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            devices.append(_device(nvml, index))
        except nvml.NVMLError as error:
            problems.append(
                Problem(
                    what=f"GPU {index} does not answer: {error}",
                    hint="see `nvidia-smi` and the kernel's log; the GPU may need a reset or a restart of the machine",
                )
            )
    chosen = _visible(devices, environment.get("CUDA_VISIBLE_DEVICES"), problems)
    gpus = [_gpu(nvml, device, uuid, handle, devices, ram_bytes, free_ram_bytes) for device, uuid, handle in chosen]
    cuda = _ask(nvml.NVMLError, nvml.nvmlSystemGetCudaDriverVersion)
    return NvmlReport(
        gpus=tuple(gpus),
        driver=_ask(nvml.NVMLError, nvml.nvmlSystemGetDriverVersion),
        cuda_driver=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
        problems=tuple(problems),
    )


def _ask(unsupported: type[Exception], call: Callable[..., Any], *arguments: Any) -> Any:
    """What NVML answers, None where this driver or GPU does not support the question."""
    try:
        return call(*arguments)
    except unsupported:
        return None


def _device(nvml: Any, index: int) -> _Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    mode = _ask(nvml.NVMLError, nvml.nvmlDeviceGetMigMode, handle)
    slices = None
    if mode and mode[0] == 1:
        slices = tuple(_slices(nvml, handle))
    return _Device(index, nvml.nvmlDeviceGetUUID(handle), handle, slices)


def _slices(nvml: Any, handle: Any) -> list[tuple[str, Any]]:
    found = []
    for place in range(_ask(nvml.NVMLError, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        piece = _ask(nvml.NVMLError, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        if piece is not None:  # places without a slice raise "not found"
            found.append((nvml.nvmlDeviceGetUUID(piece), piece))
    return found


def _visible(devices: list[_Device], setting: str | None, problems: list[Problem]) -> list[tuple[_Device, str, Any]]:
    """The GPUs and slices that CUDA would show, in its order: the list ends at the first entry that names none.

    The rules are CUDA's: indices, UUIDs or an unambiguous beginning of one, and a list with the same GPU twice
    shows none (torch 2.13, `torch/cuda/__init__.py`, `_parse_visible_devices`).
    """
    every: list[tuple[_Device, str, Any]] = []
    for device in devices:
        if device.slices is None:
            every.append((device, device.uuid, device.handle))
            continue
        if not device.slices:
            problems.append(
                Problem(
                    what=f"GPU {device.index} is in MIG mode and has no slice, so no program can use it",
                    hint="make a slice with `nvidia-smi mig -cgi <profile> -C`, or switch MIG mode off",
                )
            )
        every += [(device, uuid, handle) for uuid, handle in device.slices]
    if setting is None:
        return every
    chosen: list[tuple[_Device, str, Any]] = []
    for entry in (part.strip() for part in setting.split(",")):
        named = [one for one in every if _names(entry, one[0], one[1])]
        ambiguous = len(named if entry.startswith("MIG-") else {one[0].index for one in named}) > 1
        if not named or ambiguous:
            if entry not in ("", "-1") and every:
                problems.append(
                    Problem(
                        what=f"`CUDA_VISIBLE_DEVICES={setting}` names `{entry}`, and that is not one GPU here",
                        hint="CUDA ignores that entry and all after it; see `nvidia-smi -L` for the names",
                    )
                )
            break
        if named[0] in chosen:
            problems.append(
                Problem(
                    what=f"`CUDA_VISIBLE_DEVICES={setting}` names a GPU twice, so CUDA shows none",
                    hint="name each GPU once",
                )
            )
            return []
        chosen.append(named[0])
    return chosen


def _names(entry: str, device: _Device, uuid: str) -> bool:
    if entry.isdecimal():
        return int(entry) == device.index
    if entry.startswith("MIG-"):
        return uuid.startswith(entry)
    return entry.startswith("GPU-") and device.uuid.startswith(entry)


def _gpu(
    nvml: Any, device: _Device, uuid: str, handle: Any, devices: list[_Device], ram_bytes: int, free_ram_bytes: int
) -> Gpu:
    unsupported = nvml.NVMLError
    memory = _ask(unsupported, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(unsupported, nvml.nvmlDeviceGetCudaComputeCapability, device.handle)
    processes = _ask(unsupported, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    name = _ask(unsupported, nvml.nvmlDeviceGetName, handle) or _ask(unsupported, nvml.nvmlDeviceGetName, device.handle)
    name = name or "NVIDIA GPU"
    mig = None
    if device.slices is not None:
        mig = name.partition(" MIG ")[2] or "slice"  # "NVIDIA A100-SXM4-40GB MIG 3g.20gb"

    def reached(capability_index: int) -> tuple[int, ...]:
        if mig is not None:  # a slice has no peers
            return ()
        return tuple(
            other.index
            for other in devices
            if other.index != device.index
            and _ask(unsupported, nvml.nvmlDeviceGetP2PStatus, device.handle, other.handle, capability_index) == 0
        )

    return Gpu(
        index=device.index,
        uuid=uuid,
        name=name,
        compute_capability=(capability[0], capability[1]) if capability else None,
        memory_bytes=int(memory.total) if memory else ram_bytes,
        free_bytes=int(memory.free) if memory else free_ram_bytes,
        mig=mig,
        linked_to=reached(NVML_P2P_CAPS_INDEX_NVLINK),
        busy_processes=None if processes is None else len(processes),
        peer_access=reached(NVML_P2P_CAPS_INDEX_READ),
    )
