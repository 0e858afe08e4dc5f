"""Whether a candidate's memory is there: what fits, what is tried last, and what is not tried at all."""

from __future__ import annotations

from typing import Literal

import msgspec

from autotune.plan.memory import MemoryEstimate
from autotune.probe.machine import Machine

MARGIN = 0.08  # of the free memory, left for what the estimate does not know
# Beyond this times the free memory a candidate is not tried: the formula is within 15 % nearly everywhere it was
# measured, and models of other families may be further off
FAR_BEYOND = 1.5
FAR_BEYOND_FITTED = 1.25


class Room(msgspec.Struct, frozen=True):
    """`reason` says why a candidate is not tried; "" for others."""

    verdict: Literal["fits", "tight", "none"]
    reason: str = ""


def free_bytes_of(machine: Machine, memory_limit_bytes: int | None) -> int | None:
    """What a trial may take: the free memory of the GPU that is used, the first, or the limit of a trial on a CPU;
    None: not known."""
    if machine.backend != "cpu":
        return machine.gpus[0].free_bytes if machine.gpus else None
    return memory_limit_bytes or machine.free_ram_bytes or None


def room(estimate: MemoryEstimate, free_bytes: int | None) -> Room:
    """Whether a candidate of this estimate fits."""
    if free_bytes is None or estimate.total_bytes <= (1 - MARGIN) * free_bytes:
        return Room("fits")
    far = FAR_BEYOND_FITTED if estimate.fitted else FAR_BEYOND
    if estimate.total_bytes <= far * free_bytes:
        return Room("tight")
    return Room("none", f"needs about {_gigabytes(estimate.total_bytes)} (est.), {_gigabytes(free_bytes)} are free")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.0f} GB" if count >= 10e9 else f"{count / 1e9:.1f} GB"
