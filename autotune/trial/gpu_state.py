"""Was the GPU ours, and at its full speed? What NVML tells, asked when a trial has measured, never while it does."""

from __future__ import annotations

from autotune.probe.gpu import Gpu
from autotune.probe.gpus import probe_gpus
from autotune.probe.used import LITTLE_BYTES

# Of the reasons for lower clocks (`autotune.probe.nvml.HELD_BACK_BY`) those that come and go. A power limit that is
# reached is how many cards train all day.
COME_AND_GO = (
    "heat",
    "heat, by the hardware",
    "the power supply",
    "a slowdown by the hardware, for heat or power",
)


def disturbance(gpu: Gpu) -> str | None:
    """What makes a rate that was measured on this GPU just now one of other circumstances, in words."""
    others = [one for one in gpu.processes if one.memory_bytes is None or one.memory_bytes > LITTLE_BYTES]
    if others:
        names = ", ".join(sorted({one.name or "another process" for one in others}))
        return f"GPU {gpu.index} is in use by {names}"
    held = [reason for reason in gpu.throttling or () if reason in COME_AND_GO]
    return f"GPU {gpu.index} is held back by {held[0]}" if held else None


def ask(uuid: str) -> str | None:
    """The disturbance of the GPU with this UUID now; None too where NVML does not tell."""
    report = probe_gpus({"CUDA_VISIBLE_DEVICES": uuid}, ram_bytes=0, free_ram_bytes=0)
    return next((told for gpu in report.gpus if (told := disturbance(gpu)) is not None), None)
