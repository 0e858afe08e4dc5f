"""The NVIDIA GPUs that this process may use, as NVML tells them, without CUDA and without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from autotune.errors import AutotuneError
from autotune.probe.facts import Problem
from autotune.probe.gpu import MOST_BYTES, Bytes, Gpu, GpuProcess
from autotune.probe.nvml import (
    NVML_P2P_CAPS_INDEX_NVLINK,
    NVML_P2P_CAPS_INDEX_READ,
    NvmlUnavailableError,
    ask,
    compute_processes,
    held_back_by,
    list_cards,
    no_answer,
    open_nvml,
    slice_profile,
)
from autotune.probe.used import SHARING_RAM, busy_problem, mixed
from autotune.probe.visible import Card, Shown, chosen, chosen_of, visible

__all__ = [
    "MOST_BYTES",
    "Bytes",
    "Gpu",
    "GpuProcess",
    "NvmlReport",
    "choose_gpus",
    "chosen_of",
    "gpu_problems",
    "probe_gpus",
]


class NvmlReport(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML told; `cuda_driver` is the newest CUDA version that the driver runs."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver: tuple[int, int] | None = None
    problems: tuple[Problem, ...] = ()


def probe_gpus(
    environment: Mapping[str, str], *, ram_bytes: int, free_ram_bytes: int, root: Path = Path("/")
) -> NvmlReport:
    """Ask NVML about the GPUs that CUDA shows a program with this `environment`, in that order.

    A GPU that shares the machine's memory (GB10, Jetson) has none of its own to tell: it gets the figures for RAM.
    A machine without NVML has no NVIDIA GPU; an NVML that fails is a problem, not an error. `root` holds `dev`.
    """
    try:
        with open_nvml(root) as nvml:
            return _report(nvml, environment, ram_bytes, free_ram_bytes)
    except NvmlUnavailableError as error:
        return NvmlReport(problems=() if error.problem is None else (error.problem,))


def choose_gpus(asked: str) -> str:
    """What `--gpus` names, as a `CUDA_VISIBLE_DEVICES` of UUIDs.

    Raises AutotuneError, with the names that exist, where it names none, or one twice, or NVML cannot be asked.
    """
    try:
        with open_nvml() as nvml:
            return chosen(list_cards(nvml)[0], asked)
    except NvmlUnavailableError as error:
        raise AutotuneError(
            f"`--gpus {asked}` names no GPU that can be used here",
            hint=f"{error.problem.what}; {error.problem.hint}"
            if error.problem
            else "this machine has no NVIDIA GPU; leave out `--gpus`",
        ) from None


def _report(nvml: Any, environment: Mapping[str, str], ram_bytes: int, free_ram_bytes: int) -> NvmlReport:
    cards, problems = list_cards(nvml)
    shown = visible(cards, environment)
    problems += shown.problems
    gpus: list[Gpu] = []
    own: dict[str, int] = {}
    for one in shown.shown:
        try:
            gpu, own[one.uuid] = _gpu(nvml, one, cards, problems, ram_bytes, free_ram_bytes)
        except nvml.NVMLError as error:  # lost since it was listed, or its memory cannot be read
            problems.append(no_answer(one.card.index, error))
            continue
        gpus.append(gpu)
    problems += gpu_problems(gpus, own_bytes=own, ram_bytes=ram_bytes)
    cuda = ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    return NvmlReport(
        gpus=tuple(gpus),
        driver=ask(nvml, nvml.nvmlSystemGetDriverVersion),
        cuda_driver=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
        problems=tuple(problems),
    )


def _gpu(
    nvml: Any, one: Shown, cards: Sequence[Card], problems: list[Problem], ram_bytes: int, free_ram_bytes: int
) -> tuple[Gpu, int]:
    """A GPU, and the bytes of it that this process and its relatives hold."""
    card = one.card
    handle = card.handle if one.slice is None else one.slice.handle
    mig, slice_bytes = (None, None) if one.slice is None else slice_profile(nvml, handle)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = int(memory.total), int(memory.free)
    except nvml.NVMLError_NotSupported:
        if one.slice is not None and slice_bytes is None:
            raise
        total, free = (ram_bytes, free_ram_bytes) if slice_bytes is None else (slice_bytes, slice_bytes)
        if one.slice is None and not any(name in card.name for name in SHARING_RAM):
            problems.append(
                Problem(
                    what=f"GPU {card.index} ({card.name}) does not tell its memory, so it is taken to share the RAM",
                    hint="say how much it has with `--gpu-memory`",
                )
            )
    others, own_bytes = _processes(nvml, handle)
    power_milliwatts = ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, card.handle)
    gpu = Gpu(
        index=card.index,
        uuid=one.uuid,
        name=card.name if mig is None else f"{card.name} MIG {mig}",
        compute_capability=card.capability,
        memory_bytes=total,
        free_bytes=free,
        mig=mig,
        linked_to=_reached(nvml, one, cards, NVML_P2P_CAPS_INDEX_NVLINK),
        busy_processes=None if others is None else len(others),
        peer_access=_reached(nvml, one, cards, NVML_P2P_CAPS_INDEX_READ),
        pci=card.pci,
        processes=others or (),
        power_limit_watts=None if power_milliwatts is None else power_milliwatts / 1000,
        throttling=held_back_by(nvml, card.handle),
    )
    return gpu, own_bytes


def _reached(nvml: Any, one: Shown, cards: Sequence[Card], way: int) -> tuple[int, ...] | None:
    """The other GPUs that this one reaches in a `way` of NVML's; a MIG slice reaches none."""
    if one.slice is not None:
        return ()
    answers = {}
    for other in cards:
        if other.handle is None or other.index == one.card.index:
            continue
        try:
            answers[other.index] = ask(nvml, nvml.nvmlDeviceGetP2PStatus, one.card.handle, other.handle, way)
        except nvml.NVMLError:  # one of the two is lost; which, the other questions tell
            answers[other.index] = None
    if answers and all(status is None for status in answers.values()):
        return None
    return tuple(index for index, status in answers.items() if status == 0)


def _processes(nvml: Any, handle: Any) -> tuple[tuple[GpuProcess, ...] | None, int]:
    """The processes of others that compute on a GPU, and the bytes of this one, its ancestors and its children."""
    listed = compute_processes(nvml, handle)
    if not listed:  # whose children are ours is not worth asking
        return (None if listed is None else ()), 0
    this = psutil.Process()
    own = {this.pid, *(process.pid for process in (*this.parents(), *this.children(recursive=True)))}
    others = tuple(
        GpuProcess(process.pid, _name(nvml, process.pid), process.usedGpuMemory)
        for process in listed
        if process.pid not in own
    )
    return others, sum(process.usedGpuMemory or 0 for process in listed if process.pid in own)


def _name(nvml: Any, pid: int) -> str | None:
    """A process's name without its arguments, which may hold secrets."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        path = ask(nvml, nvml.nvmlSystemGetProcessName, pid)
        return Path(path).name if path else None


def gpu_problems(
    gpus: Sequence[Gpu], *, own_bytes: Mapping[str, int] | None = None, ram_bytes: int | None = None
) -> list[Problem]:
    """What is wrong with each GPU, and with all of them together. `own_bytes` are held by this process and its
    relatives, by UUID; a GPU with `ram_bytes` of memory shares it with the CPU."""
    together = mixed(gpus)
    found = [] if together is None else [together]
    for gpu in gpus:
        used = busy_problem(
            gpu, gpus, own_bytes=(own_bytes or {}).get(gpu.uuid, 0), shares_ram=gpu.memory_bytes == ram_bytes
        )
        found += [] if used is None else [used]
        if gpu.throttling:
            found.append(
                Problem(
                    what=f"GPU {gpu.index} ({gpu.name}) is held back by {' and '.join(gpu.throttling)}",
                    hint="see `nvidia-smi -q -d PERFORMANCE`; trials that are slowed down one by one do not compare",
                )
            )
    return found
