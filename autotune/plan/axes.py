"""The axes of an SFT job: what may be chosen on this machine for this data, with grade and reason."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from autotune.job import Job, effective
from autotune.plan.arrangements import arrangement_axis
from autotune.plan.data import Data
from autotune.plan.recipe import ATTENTION_DEFAULT, checkpointing_option
from autotune.plan.space import Arrangement, Axis, Candidate, Choice, Grade, Rejected, Space
from autotune.probe.attention_names import CONTAMINATES
from autotune.probe.machine import AttentionBackend, Machine

MIXES = "mixes the documents"


def baseline_candidate(job: Job, machine: Machine) -> Candidate:
    """The job exactly as the user gave it."""
    resolved = job.resolved
    sampling = resolved["train_sampling_strategy"]
    if resolved["packing"]:
        name: Any = resolved["packing_strategy"]
    else:
        name = "batch_rebalance" if sampling == "batch_rebalance" else "padded"
    return Candidate(
        arrangement=Arrangement(
            name,
            resolved["per_device_train_batch_size"],
            resolved["gradient_accumulation_steps"],
            resolved["max_length"] if resolved["packing"] else None,
        ),
        attention=effective(job, "attn_implementation") or ATTENTION_DEFAULT,
        checkpointing=bool(resolved[checkpointing_option(resolved)]),
        workers=resolved["dataloader_num_workers"],
        threads=int(job.launch_environment.get("OMP_NUM_THREADS", "1")) if machine.backend == "cpu" else None,
    )


def build_space(job: Job, machine: Machine, data: Data, *, allowed: Collection[Grade]) -> Space:
    """All that may be tried for the job on this machine."""
    baseline = baseline_candidate(job, machine)
    axes = [
        arrangement_axis(job, data, baseline.arrangement, allowed),
        _attention(job, machine, baseline.attention, allowed),
        _checkpointing(baseline.checkpointing),
        _workers(machine, baseline.workers),
    ]
    if baseline.threads is not None:
        axes.append(_threads(machine, baseline.threads))
    mixing = tuple(backend.name for backend in machine.attention if backend.usable and _mixes(backend))
    return Space(
        baseline,
        tuple(axes),
        data.tokens_per_step(baseline.arrangement),
        mixing=mixing,
        mixing_allowed="changed" in allowed,
        unusable=tuple(one.name for one in machine.attention if one.name == baseline.attention and not one.usable),
    )


def _mixes(backend: AttentionBackend) -> bool:
    """Whether it lets the documents of a packed row see each other: that changes what is learnt."""
    return backend.packing == CONTAMINATES


def _attention(job: Job, machine: Machine, base: str, allowed: Collection[Grade]) -> Axis:
    broken = next((one.reason for one in machine.attention if one.name == base and not one.usable), None)
    own = "as your job has it"
    choices = [Choice(base, "exact", own if broken is None else f"{own}, and it cannot run here: {broken}")]
    rejected = [] if broken is None else [Rejected(base, f"cannot run here: {broken}; tried as your job has it only")]
    # a padding-free job has the documents of a micro-batch in one row, whatever its arrangement
    one_row = bool(job.resolved.get("padding_free")) and "changed" not in allowed
    for backend in machine.attention:
        if backend.name == base:
            continue
        if backend.usable and _mixes(backend) and one_row:
            rejected.append(Rejected(backend.name, f"your job is `padding_free`, and it {MIXES}: {backend.reason}"))
        elif backend.usable and _mixes(backend):
            choices.append(
                Choice(backend.name, "exact", f"{backend.reason}; for padded rows: of packed ones it {MIXES}")
            )
        elif backend.usable:
            choices.append(Choice(backend.name, "exact", f"{backend.reason}; packed rows: {backend.packing}"))
        else:
            rejected.append(Rejected(backend.name, backend.reason))
    return Axis("attention", tuple(choices), tuple(rejected))


def _checkpointing(base: bool) -> Axis:
    reasons = {
        True: "recomputes activations in the backward pass to save memory",
        False: "keeps activations instead of computing them twice",
    }
    choices = (Choice(base, "exact", "as your job has it"), Choice(not base, "exact", reasons[not base]))
    return Axis("checkpointing", choices)


def _threads(machine: Machine, base: int) -> Axis:
    cores = machine.cpu.cores
    counts = sorted({2**power for power in range(10) if 2**power <= cores} | {cores})
    choices = [Choice(base, "exact", "what `accelerate launch` gives your job")]
    choices += [
        Choice(count, "exact", f"{count} of {cores} cores; `accelerate launch` gives {base} unless told otherwise")
        for count in counts
        if count != base
    ]
    return Axis("threads", tuple(choices))


def _workers(machine: Machine, base: int) -> Axis:
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
