"""Axes of what feeds the steps: dataloader workers, how far they fetch ahead, pinned memory, threads."""

from __future__ import annotations

from autotune.job import Job
from autotune.plan.space import Axis, Choice, Rejected
from autotune.probe.machine import Machine

FURTHER = 4  # batches that a worker has ready; torch's own number is 2


def threads_axis(machine: Machine, base: int) -> Axis:
    cores = machine.cpu.cores
    counts = sorted({2**power for power in range(10) if 2**power <= cores} | {cores})
    choices = [Choice(base, "exact", "what `accelerate launch` gives your job")]
    choices += [
        Choice(count, "exact", f"{count} of {cores} cores; `accelerate launch` gives {base} unless told otherwise")
        for count in counts
        if count != base
    ]
    return Axis("threads", tuple(choices))


def workers_axis(machine: Machine, base: int) -> Axis:
    choices = [Choice(base, "exact", "as your job has it")]
    rejected: list[Rejected] = []
    for count in (0, 1 if machine.backend == "cpu" else 2):
        if count == base:
            continue
        if machine.backend == "cpu" and count >= machine.cpu.cores:
            rejected.append(Rejected(count, f"{machine.cpu.cores} core leaves none for a worker"))
            continue
        reason = "batches are collated in the step" if count == 0 else "batches are collated beside the step"
        choices.append(Choice(count, "exact", reason))
    return Axis("workers", tuple(choices), tuple(rejected))


def prefetch_axis(job: Job) -> Axis:
    """Batches that each worker has ready, on a GPU."""
    base = job.resolved.get("dataloader_prefetch_factor")
    choices = [Choice(base, "exact", "as your job has it" if base else "as your job has it: torch fetches 2 ahead")]
    if (base or 2) < FURTHER:
        choices.append(Choice(FURTHER, "exact", f"each worker has {FURTHER} batches ready instead of {base or 2}"))
    return Axis("prefetch", tuple(choices))


def pin_memory_axis(job: Job) -> Axis:
    """Batches in pinned host memory, from which a GPU copies while it computes."""
    base = bool(job.resolved.get("dataloader_pin_memory"))
    choices, rejected = [Choice(base, "exact", "as your job has it")], []
    if base:
        rejected.append(Rejected(False, "copies to the GPU would wait for the step"))
    else:
        choices.append(Choice(True, "exact", "batches are copied to the GPU beside the step"))
    return Axis("pin_memory", tuple(choices), tuple(rejected))
