"""The questions that NVML is asked, the cards that it lists, and its failures in words."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotune.probe.facts import Problem
from autotune.probe.used import NO_NAME
from autotune.probe.visible import Card, Slice

NVML_P2P_CAPS_INDEX_READ = 0  # pynvml.py 13.615 defines it as the tuple `(0,)`
NVML_P2P_CAPS_INDEX_NVLINK = 2

# NVML's clocks event reasons (nvml.h, `nvmlClocksEventReason…`; pynvml.py 13.615). Those that hold a card back: an idle
# card, application clocks and a display's clock are as somebody wants them.
HELD_BACK_BY = {
    0x4: "its power limit",
    0x8: "a slowdown by the hardware, for heat or power",
    0x10: "the slowest card of its sync boost group",
    0x20: "heat",
    0x40: "heat, by the hardware",
    0x80: "the power supply",
    0x200: "a limit of the board",
    0x400: "its reliability voltage",
}

FAILURES = {  # by the name of the error in pynvml 13.615
    "NVMLError_DriverNotLoaded": (
        "the NVIDIA driver is installed and its kernel module is not loaded",
        "load it with `sudo modprobe nvidia`, or start the container with its GPUs (`docker run --gpus all`)",
    ),
    "NVMLError_LibRmVersionMismatch": (
        "the NVIDIA driver's library and its kernel module are of different versions",
        "restart the machine, which an update of the driver needs; in a container, restart the container",
    ),
    "NVMLError_NoPermission": (
        "this user may not use the NVIDIA driver",
        "see who owns `/dev/nvidia*`; on many machines the user must be in the group `video` or `render`",
    ),
}


class NvmlUnavailableError(Exception):
    """NVML cannot be asked; `problem` is None where there is none, and so no NVIDIA GPU."""

    def __init__(self, problem: Problem | None) -> None:
        super().__init__(problem)
        self.problem = problem


@contextlib.contextmanager
def open_nvml(root: Path = Path("/")) -> Iterator[Any]:
    """NVML, ready to be asked. `root` holds `dev`. Raises NvmlUnavailableError, from what is asked inside too."""
    nvml: Any = importlib.import_module("pynvml")  # 25 ms
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        raise NvmlUnavailableError(_no_library(root)) from None
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(_failure(error)) from None
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(_failure(error)) from None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _no_library(root: Path) -> Problem | None:
    if not (root / "dev/nvidiactl").exists():
        return None
    return Problem(
        what="this machine has an NVIDIA driver and not `libnvidia-ml.so.1`, which tells about its GPUs",
        hint="in a container, set `NVIDIA_DRIVER_CAPABILITIES=compute,utility`; else install the driver's library",
    )


def _failure(error: Exception) -> Problem:
    what, hint = FAILURES.get(
        type(error).__name__,
        (
            "the NVIDIA driver is installed and does not answer",
            "run `nvidia-smi`; if it fails too, load or repair the driver, or restart the container with its GPUs",
        ),
    )
    return Problem(what=f"{what}: {error}", hint=hint)


def ask(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """What NVML answers, None where this driver or GPU does not support the question or this user may not ask it.

    Raises pynvml's error for a GPU that is lost: none of its answers counts.
    """
    try:
        return call(*arguments)
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
        raise
    except nvml.NVMLError:
        return None


def list_cards(nvml: Any) -> tuple[list[Card], list[Problem]]:
    """Every GPU with its slices; one that does not answer is listed without a handle and is a problem."""
    cards: list[Card] = []
    problems: list[Problem] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            cards.append(_card(nvml, index))
        except nvml.NVMLError as error:
            cards.append(Card(index=index, uuid="", name=NO_NAME, handle=None))
            problems.append(no_answer(index, error))
    return cards, problems


def no_answer(index: int, error: Exception) -> Problem:
    hints = {
        "NVMLError_NoPermission": f"see who owns `/dev/nvidia{index}`, and which GPUs the scheduler gave this job",
        "NVMLError_InsufficientPower": "its power cable may be missing or loose",
    }
    lost = "see `nvidia-smi` and the kernel's log; the GPU may need a reset or a restart of the machine"
    return Problem(what=f"GPU {index} does not answer: {error}", hint=hints.get(type(error).__name__, lost))


def _card(nvml: Any, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = ask(nvml, nvml.nvmlDeviceGetUUID, handle)
    pci = ask(nvml, nvml.nvmlDeviceGetPciInfo_v3, handle)
    capability = ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    cores = ask(nvml, nvml.nvmlDeviceGetNumGpuCores, handle)
    clock = ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    width = ask(nvml, nvml.nvmlDeviceGetMemoryBusWidth, handle)
    memory_clock = ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM)
    mode = ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return Card(
        index=index,
        uuid=uuid or str(index),  # `CUDA_VISIBLE_DEVICES` takes that too
        name=ask(nvml, nvml.nvmlDeviceGetName, handle) or NO_NAME,
        handle=handle,
        pci=pci.busId if pci else None,
        capability=(capability[0], capability[1]) if capability else None,
        cores_megahertz=cores * clock if cores and clock else None,
        memory_bandwidth=width * memory_clock if width and memory_clock else None,
        slices=_slices(nvml, handle, uuid) if mode and mode[0] == 1 else None,
    )


def _slices(nvml: Any, handle: Any, card_uuid: str | None) -> tuple[Slice, ...]:
    found = []
    for place in range(ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        piece = ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        if piece is None:  # places without a slice raise "not found"
            continue
        gpu_instance = ask(nvml, nvml.nvmlDeviceGetGpuInstanceId, piece)
        compute_instance = ask(nvml, nvml.nvmlDeviceGetComputeInstanceId, piece)
        old_name = f"MIG-{card_uuid}/{gpu_instance}/{compute_instance}"
        told = card_uuid is not None and gpu_instance is not None and compute_instance is not None
        found.append(Slice(nvml.nvmlDeviceGetUUID(piece), old_name if told else None, piece))
    return tuple(found)


def slice_profile(nvml: Any, handle: Any) -> tuple[str, int | None]:
    """A MIG slice's profile, such as `3g.40gb` or `1c.3g.40gb`, and its bytes where its attributes tell them.

    The profile ends its name; else it is made as NVIDIA makes it (MIG user guide, "MIG device names").
    """
    attributes = ask(nvml, nvml.nvmlDeviceGetAttributes_v2, handle)
    size = attributes.memorySizeMB * 2**20 if attributes else None
    name = ask(nvml, nvml.nvmlDeviceGetName, handle) or ""
    profile = name.partition(" MIG ")[2]
    if not profile and attributes:
        gpu, compute = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
        part = f"{compute}c." if compute != gpu else ""
        profile = f"{part}{gpu}g.{math.ceil(attributes.memorySizeMB / 1024)}gb"
    return profile or "slice", size


def held_back_by(nvml: Any, handle: Any) -> tuple[str, ...] | None:
    """Why a card's clocks are below what they could be, in words. Drivers before R535 know the question by its old
    name."""
    reasons = ask(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:
        reasons = ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if reasons is None:
        return None
    if reasons & (0x40 | 0x80):
        reasons &= ~0x8  # it only says that there is one of the two
    return tuple(words for bit, words in HELD_BACK_BY.items() if reasons & bit)


def compute_processes(nvml: Any, handle: Any) -> list[Any] | None:
    """The processes that compute on a GPU, by pynvml's `pid` and `usedGpuMemory`; drivers before R510 lack `_v3`."""
    processes = ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    if processes is None:
        processes = ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
    return None if processes is None else list(processes)
