"""From a candidate to TRL options: the only file that knows their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from autotune.job import INSIDE_MODEL_INIT_KWARGS, Job, effective
from autotune.plan.checkpointing import Checkpointing, parse
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


def checkpointing_mode(resolved: dict[str, Any]) -> str:
    """How the job checkpoints activations, as `autotune.plan.checkpointing` calls it."""
    option = checkpointing_option(resolved)
    if not resolved.get(option):
        return str(Checkpointing(0))
    how = resolved.get(f"{option}_kwargs") or {}
    every = int(how.get("every_n_layers") or 1)
    return str(Checkpointing(every, bool(how.get("selective")), bool(how.get("offload"))))


def uses_layer_kernels(job: Job) -> bool:
    """Whether the job asks for kernels in place of the model's own layers."""
    return bool((job.resolved.get("model_init_kwargs") or {}).get("use_kernels"))


def computes_in_tf32(resolved: dict[str, Any], *, compiled: bool) -> bool:
    """Whether a machine that has TF32 computes float32 products in it: transformers switches it on for torch.compile
    where `tf32` says nothing (5.22, `training_args.py`)."""
    own = resolved.get("tf32")
    if own is not None:
        return bool(own)
    return compiled and (not resolved.get("fp16") or bool(resolved.get("bf16")))


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
            was = present.get(axis_name, {}).get(name, job.resolved.get(name))
            said_anyway = name == "packing_strategy" and not baseline.arrangement.packed
            if choice is None or (value == was and not said_anyway):
                continue
            reason = _batch_reason(candidate, baseline) if name in BATCH_OPTIONS else choice.reason
            changed.append(Change(name, value, was, choice.grade, reason))
    return changed


def portable(changes: Sequence[Change]) -> dict[str, Any]:
    """The options that change, without what of the user's own stands beside them in `model_init_kwargs`."""
    options: dict[str, Any] = {}
    for change in changes:
        options[change.name] = change.value
        if change.name == "model_init_kwargs":
            before = change.was or {}
            options[change.name] = {
                name: value
                for name, value in change.value.items()
                if name not in INSIDE_MODEL_INIT_KWARGS and (name not in before or before[name] != value)
            }
    return options


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


def resolved_as(job: Job, candidate: Candidate) -> dict[str, Any]:
    """Every option of TRL as the candidate has it."""
    resolved = dict(job.resolved)
    for options in _options(job, candidate).values():
        resolved |= options
    inside = resolved.get("model_init_kwargs")
    if isinstance(inside, dict):
        resolved["model_init_kwargs"] = inside | {
            name: resolved[name] for name in INSIDE_MODEL_INIT_KWARGS if name in inside
        }
    return resolved


def with_state_of(job: Job, candidate: Candidate) -> Job:
    """The job with the candidate's options that decide how many bytes weights and optimizer take."""
    state = _dtype(candidate) | _optimizer(candidate)
    if all(effective(job, name) == value for name, value in state.items()):
        return job
    inside = job.resolved.get("model_init_kwargs")
    resolved = job.resolved | state
    if isinstance(inside, dict) and "dtype" in inside and "dtype" in state:
        resolved["model_init_kwargs"] = inside | {"dtype": state["dtype"]}
    return msgspec.structs.replace(job, resolved=resolved)


def _options(job: Job, candidate: Candidate) -> dict[str, dict[str, Any]]:
    """axis -> TRL options of one candidate; none for what is as the job has it in any case."""
    options: dict[str, dict[str, Any]] = {
        "arrangement": _layout(job, candidate),
        "attention": {"attn_implementation": candidate.attention},
        "checkpointing": _checkpointing(job.resolved, candidate.checkpointing),
        "workers": _workers(job.resolved, candidate),
        "layer_kernels": _layer_kernels(job, candidate),
        "torch_compile": _compile(job.resolved, candidate),
        "optimizer": _optimizer(candidate),
        "dtype": _dtype(candidate),
        "tf32": _tf32(job.resolved, candidate),
    }
    if candidate.threads is not None:
        options["threads"] = {"num_cpu_threads_per_process": candidate.threads}
    if candidate.activation_offloading is not None:
        options["activation_offloading"] = {"activation_offloading": candidate.activation_offloading}
    own_prefetch = job.resolved.get("dataloader_prefetch_factor")
    if candidate.prefetch is not None and (candidate.workers or candidate.prefetch != own_prefetch):
        options["prefetch"] = {"dataloader_prefetch_factor": candidate.prefetch}
    if candidate.pin_memory is not None:
        options["pin_memory"] = {"dataloader_pin_memory": candidate.pin_memory}
    return options


def _layout(job: Job, candidate: Candidate) -> dict[str, Any]:
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
    elif arrangement.padding_free != bool(resolved.get("padding_free")):
        layout["padding_free"] = arrangement.padding_free
        layout["max_length"] = None  # TRL refuses one beside `padding_free`
    pins_evaluation = evaluates(job) and resolved.get("eval_packing") is None
    if arrangement.packed and not resolved["packing"] and pins_evaluation:
        # left unset it follows `packing`, and the evaluation loss would no longer compare with the user's others
        layout["eval_packing"] = False
    if arrangement.name == "batch_rebalance":
        layout["train_sampling_strategy"] = "batch_rebalance"
    elif resolved.get("train_sampling_strategy") == "batch_rebalance":
        layout["train_sampling_strategy"] = "random"
    return layout


def _checkpointing(resolved: dict[str, Any], name: str) -> dict[str, Any]:
    """The switch, and its options with the user's other ones kept; the user's are left as they are where the way is
    the job's own."""
    option = checkpointing_option(resolved)
    how, own = parse(name), resolved.get(f"{option}_kwargs")
    if name == checkpointing_mode(resolved):
        return {option: bool(how.every)}
    kept = {key: value for key, value in (own or {}).items() if key != "selective"}
    if how.every:  # where it is off, they say nothing
        kept = {key: value for key, value in kept.items() if key not in ("every_n_layers", "offload")}
        kept |= {"every_n_layers": how.every} if how.every > 1 else {}
        kept |= {"selective": True} if how.selective else {}
        kept |= {"offload": True} if how.offload else {}
    options: dict[str, Any] = {option: bool(how.every)}
    if kept != (own or {}):
        options[f"{option}_kwargs"] = kept or None
    return options


def _workers(resolved: dict[str, Any], candidate: Candidate) -> dict[str, Any]:
    options: dict[str, Any] = {"dataloader_num_workers": candidate.workers}
    if not candidate.workers:
        # torch and transformers refuse these two without workers
        options |= {"dataloader_prefetch_factor": None} if resolved.get("dataloader_prefetch_factor") else {}
        options |= {"dataloader_persistent_workers": False} if resolved.get("dataloader_persistent_workers") else {}
    return options


def _layer_kernels(job: Job, candidate: Candidate) -> dict[str, Any]:
    """Inside the user's own `model_init_kwargs`, whose other keys stay as the candidate has them."""
    if candidate.layer_kernels is None or candidate.layer_kernels == uses_layer_kernels(job):
        return {}
    inside = dict(job.resolved.get("model_init_kwargs") or {})
    for name, value in ({"attn_implementation": candidate.attention} | _dtype(candidate)).items():
        if name in inside:
            inside[name] = value
    return {"model_init_kwargs": inside | {"use_kernels": candidate.layer_kernels}}


def _compile(resolved: dict[str, Any], candidate: Candidate) -> dict[str, Any]:
    """Backend and mode switch it on by themselves (transformers 5.22, `training_args.py`), so they go with it."""
    if candidate.torch_compile is None or candidate.torch_compile == bool(resolved.get("torch_compile")):
        return {}
    if candidate.torch_compile:
        return {"torch_compile": True} | _pinned_tf32(resolved, candidate)
    named = [name for name in ("torch_compile_backend", "torch_compile_mode") if resolved.get(name)]
    return {"torch_compile": False} | dict.fromkeys(named) | _pinned_tf32(resolved, candidate)


def _pinned_tf32(resolved: dict[str, Any], candidate: Candidate) -> dict[str, Any]:
    """`tf32` as the job computes, where it would follow `torch_compile`."""
    if candidate.tf32 is None:  # a machine without
        return {}
    before = computes_in_tf32(resolved, compiled=bool(resolved.get("torch_compile")))
    after = computes_in_tf32(resolved, compiled=bool(candidate.torch_compile))
    return {} if candidate.tf32 != before or after == before else {"tf32": before}


def _tf32(resolved: dict[str, Any], candidate: Candidate) -> dict[str, Any]:
    compiled = bool(resolved.get("torch_compile"))
    if candidate.tf32 is None or candidate.tf32 == computes_in_tf32(resolved, compiled=compiled):
        return {}
    return {"tf32": candidate.tf32}


def _optimizer(candidate: Candidate) -> dict[str, Any]:
    return {} if candidate.optimizer is None else {"optim": candidate.optimizer}


def _dtype(candidate: Candidate) -> dict[str, Any]:
    return {} if candidate.dtype is None else {"dtype": candidate.dtype}


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
