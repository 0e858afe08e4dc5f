"""Whether a candidate's memory is there: what fits, what is tried last, and what is not tried at all."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from autotune.plan.memory import DECIDE_MEMORY, MemoryEstimate, MemoryModel
from autotune.plan.space import Space
from autotune.probe.machine import Machine
from autotune.probe.used import used_gpu

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
    """What a trial may take: the free memory of the GPU that is used, or the limit of a trial on a CPU; None: not
    known."""
    if machine.backend != "cpu":
        used = used_gpu(machine.gpus)
        return None if used is None else used.free_bytes
    return memory_limit_bytes or machine.free_ram_bytes or None


def room(estimate: MemoryEstimate, free_bytes: int | None) -> Room:
    """Whether a candidate of this estimate fits."""
    if free_bytes is None or estimate.total_bytes <= (1 - MARGIN) * free_bytes:
        return Room("fits")
    far = FAR_BEYOND_FITTED if estimate.fitted else FAR_BEYOND
    if estimate.total_bytes <= far * free_bytes:
        return Room("tight")
    return Room("none", f"needs about {_gigabytes(estimate.total_bytes)} (est.), {_gigabytes(free_bytes)} are free")


class Outlook(msgspec.Struct, frozen=True):
    """What memory says of a plan before anything has run; every size but the free one is an estimate.

    `baseline_bytes` is the peak of the job as the user gave it and `baseline` whether that fits. Of `candidates`, the
    baseline among them, `tight` may not fit and `out` are not tried for it. `free_bytes`: None where it is not known.
    """

    baseline_bytes: int
    free_bytes: int | None
    baseline: Literal["fits", "tight", "none"]
    candidates: int
    tight: int
    out: int

    def __str__(self) -> str:
        """In one line for people."""
        needs = f"yours needs about {_gigabytes(self.baseline_bytes)} at its peak (est.)"
        if self.free_bytes is None:
            return f"{needs}; how much is free is not known"
        verdict = {"fits": "fits", "tight": "may not fit", "none": "does not fit"}[self.baseline]
        line = f"{needs} and {_gigabytes(self.free_bytes)} are free: it {verdict}"
        others = [f"{count:,} {what}" for count, what in ((self.out, "do not fit"), (self.tight, "may not")) if count]
        return line + (f"; of {self.candidates:,} candidates {' and '.join(others)}" if others else "")


def outlook(space: Space, model: MemoryModel, free_bytes: int | None) -> Outlook:
    """What memory says of the candidates of a space. Takes 3 us for each of them."""
    verdicts: dict[tuple[Any, ...], str] = {}  # by what memory depends on
    counts = {"fits": 0, "tight": 0, "none": 0}
    for candidate in space.candidates():
        decides = tuple(getattr(candidate, name) for name in DECIDE_MEMORY)
        verdict = verdicts.get(decides)
        if verdict is None:
            verdict = verdicts[decides] = room(model.estimate(candidate), free_bytes).verdict
        counts[verdict] += 1
    baseline = model.estimate(space.baseline)
    return Outlook(
        baseline_bytes=baseline.total_bytes,
        free_bytes=free_bytes,
        baseline=room(baseline, free_bytes).verdict,
        candidates=sum(counts.values()),
        tight=counts["tight"],
        out=counts["none"],
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.0f} GB" if count >= 10e9 else f"{count / 1e9:.1f} GB"
