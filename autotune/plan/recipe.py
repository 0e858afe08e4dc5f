"""From a candidate to TRL options: the only file that knows their names."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.job import Job
from autotune.plan.space import Candidate, Grade, Space

BATCH_OPTIONS = ("per_device_train_batch_size", "gradient_accumulation_steps")
ATTENTION_DEFAULT = "sdpa"  # what transformers takes when nothing is asked for


class Change(msgspec.Struct, frozen=True):
    """One option that differs from the job's."""

    name: str
    value: Any
    was: Any
    grade: Grade
    reason: str


def checkpointing_option(resolved: dict[str, Any]) -> str:
    """`activation_checkpointing` from transformers 5.23 on, where it wins over the old name."""
    return "activation_checkpointing" if "activation_checkpointing" in resolved else "gradient_checkpointing"


def evaluates(job: Job) -> bool:
    """Whether the job evaluates while it trains."""
    return str(job.resolved.get("eval_strategy", "no")) != "no"


def changes(job: Job, space: Space, candidate: Candidate) -> list[Change]:
    """The options that turn the job into the candidate, each with grade and reason; empty for the baseline."""
    changed: list[Change] = []
    baseline = space.baseline
    wanted = _options(job, candidate)
    present = _options(job, baseline)
    for axis_name, options in wanted.items():
        choice = space.axis(axis_name).choice(getattr(candidate, axis_name)) if _has(space, axis_name) else None
        for name, value in options.items():
            was = present[axis_name].get(name, job.resolved.get(name))
            said_anyway = name == "packing_strategy" and not baseline.arrangement.packed
            if choice is None or (value == was and not said_anyway):
                continue
            reason = _batch_reason(candidate, baseline) if name in BATCH_OPTIONS else choice.reason
            changed.append(Change(name, value, was, choice.grade, reason))
    return changed


def _batch_reason(candidate: Candidate, baseline: Candidate) -> str:
    """What the batch options say by themselves; why this arrangement stands beside the others of its axis."""
    its, yours = candidate.arrangement, baseline.arrangement
    rows, before = its.micro_batch * its.accumulation, yours.micro_batch * yours.accumulation
    if its.packed == yours.packed:
        kept = " as before" if rows == before else f", before {before}"
        return f"{rows} rows per optimizer step{kept}, {its.micro_batch} at a time"
    kind = "packed rows" if its.packed else "documents"
    return f"{rows} {kind} per optimizer step, before {before} {'packed rows' if yours.packed else 'documents'}"


def _has(space: Space, axis_name: str) -> bool:
    return any(axis.name == axis_name for axis in space.axes)


def _options(job: Job, candidate: Candidate) -> dict[str, dict[str, Any]]:
    """axis -> TRL options of one candidate."""
    arrangement = candidate.arrangement
    resolved = job.resolved
    layout: dict[str, Any] = {
        "per_device_train_batch_size": arrangement.micro_batch,
        "gradient_accumulation_steps": arrangement.accumulation,
        "packing": arrangement.packed,
    }
    if arrangement.packed:
        layout["packing_strategy"] = arrangement.name
        layout["max_length"] = arrangement.row_length
    pins_evaluation = evaluates(job) and resolved.get("eval_packing") is None
    if arrangement.packed and not resolved["packing"] and pins_evaluation:
        # left unset it follows `packing`, and the evaluation loss would no longer compare with the user's others
        layout["eval_packing"] = False
    if arrangement.name == "batch_rebalance":
        layout["train_sampling_strategy"] = "batch_rebalance"
    elif resolved.get("train_sampling_strategy") == "batch_rebalance":
        layout["train_sampling_strategy"] = "random"
    options: dict[str, dict[str, Any]] = {
        "arrangement": layout,
        "attention": {"attn_implementation": candidate.attention},
        "checkpointing": {checkpointing_option(resolved): candidate.checkpointing},
        "workers": {"dataloader_num_workers": candidate.workers},
    }
    if candidate.threads is not None:
        options["threads"] = {"num_cpu_threads_per_process": candidate.threads}
    return options


def trial_options(*, sample: str, workers: int, output_folder: str) -> dict[str, Any]:
    """What a trial changes beside its candidate: all of it, in one place.

    The sample instead of the data, passes without end (the worker stops), nothing saved, evaluated, pushed, resumed
    or reported. None of it touches what a step computes.
    """
    options: dict[str, Any] = {
        "dataset_name": None,
        "dataset_config": None,
        "dataset_train_split": "train",
        "datasets": [{"path": "parquet", "data_files": sample, "split": "train"}],
        "test_split_size": None,
        "output_dir": output_folder,
        "num_train_epochs": 1_000_000,
        "max_steps": -1,
        "auto_find_batch_size": False,  # a trial is the candidate it says it is
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",  # some of the others ask for an evaluation
        "lr_scheduler_kwargs": None,
        "save_strategy": "no",
        "eval_strategy": "no",
        "eval_on_start": False,
        "do_eval": False,
        "load_best_model_at_end": False,
        "report_to": "none",
        "push_to_hub": False,
        "hub_token": None,
        "hub_model_id": None,
        "resume_from_checkpoint": None,
    }
    if workers:
        options["dataloader_persistent_workers"] = True  # a pass of a few steps must not pay for starting them
    return options
