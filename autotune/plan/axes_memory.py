"""Axes that trade time for memory: checkpointing and activation offloading."""

from __future__ import annotations

from autotune.job import Job
from autotune.plan.checkpointing import FULL, OFF, OFFLOAD, SELECTIVE, Checkpointing
from autotune.plan.recipe import checkpointing_mode
from autotune.plan.space import Axis, Choice, Rejected
from autotune.probe.machine import Machine

EVERY = str(Checkpointing(2))

REASONS = {
    OFF: "keeps activations instead of computing them twice",
    FULL: "recomputes activations in the backward pass to save memory",
    SELECTIVE: "recomputes all but the results of attention: less time than `full`, a little more memory",
    EVERY: "recomputes every second layer only: half of what `full` computes twice, half of what `off` keeps",
    OFFLOAD: "`full` with each layer's input in host memory: the least on the GPU, and copies wait for the computation",
}

# The ability that a way of checkpointing needs of the installed versions
NEEDS = {SELECTIVE: "selective", EVERY: "every_n_layers", OFFLOAD: "offload"}


def checkpointing_axis(job: Job, machine: Machine) -> Axis:
    """The ways that the installed versions have for this model; on, off and the job's own where they were not asked."""
    base = checkpointing_mode(job.resolved)
    choices, rejected = [Choice(base, "exact", "as your job has it")], []
    abilities = machine.abilities
    for name, reason in REASONS.items():
        if name == base:
            continue
        missing = None
        if abilities is None:
            if name in NEEDS:
                continue
        elif name != OFF and NEEDS.get(name, FULL) not in abilities.checkpointing:
            missing = (
                "the installed TRL and transformers do not have it for this model"
                if abilities.checkpointing
                else "this model has no checkpointing"
            )
        elif machine.backend == "cpu" and name == OFFLOAD:
            missing = "on a CPU activations are in host memory as it is"
        elif machine.backend == "cpu" and name == EVERY:
            missing = "between `full` and `off` in time as in memory, and tried where a GPU's memory is short"
        if missing is not None:
            rejected.append(Rejected(name, missing))
        else:
            choices.append(Choice(name, "exact", reason))
    return Axis("checkpointing", tuple(choices), tuple(rejected))


def activation_offloading_axis(job: Job, machine: Machine) -> Axis:
    """All that the backward pass needs, moved to host memory and back beside the computation."""
    base = bool(job.resolved.get("activation_offloading"))
    choices, rejected = [Choice(base, "exact", "as your job has it")], []
    if base:
        choices.append(Choice(False, "exact", "keeps activations on the GPU instead of moving them"))
    elif machine.backend == "cpu":
        rejected.append(Rejected(True, "on a CPU activations are in host memory as it is, and TRL fails"))
    elif machine.backend not in ("cuda", "rocm", "xpu"):
        rejected.append(Rejected(True, f"not known on {machine.backend}"))
    else:
        choices.append(Choice(True, "exact", "holds activations in host memory; the same values come back"))
    return Axis("activation_offloading", tuple(choices), tuple(rejected))
