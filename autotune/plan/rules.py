"""What does not go together: options that TRL, transformers or torch refuse, and some that would gain nothing.

Each rule is a predicate on TRL's options and says where it comes from. `by` tells who refuses: the config when it is
built, the trainer when it is, the training when it starts (tests build each and see), or this program, where the two
would run and be no use together or have never been tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from autotune.job import Job
from autotune.plan.checkpointing import parse
from autotune.plan.recipe import checkpointing_mode, checkpointing_option, resolved_as
from autotune.plan.space import Apart, Axis, Candidate, Rejected

Options = Mapping[str, Any]


class Rule(msgspec.Struct, frozen=True):
    """`axes`: those whose options it looks at. `says`: the reason, as a user reads it."""

    name: str
    axes: tuple[str, ...]
    breaks: Callable[[Options], bool]
    says: str
    source: str
    by: Literal["config", "trainer", "training", "here"]


def _kwargs(options: Options) -> Options:
    return options.get(f"{checkpointing_option(dict(options))}_kwargs") or {}


def _checkpoints(options: Options) -> bool:
    return bool(options.get(checkpointing_option(dict(options))))


def _attention(options: Options) -> str:
    inside = options.get("model_init_kwargs") or {}
    return str(inside.get("attn_implementation", options.get("attn_implementation")) or "sdpa")


def _uses_kernels(options: Options) -> bool:
    return bool((options.get("model_init_kwargs") or {}).get("use_kernels"))


def _way(options: Options, part: str) -> bool:
    return bool(getattr(parse(checkpointing_mode(dict(options))), part))


def _names_head(options: Options) -> bool:
    named = options.get("lora_target_modules") or ()
    return bool(options.get("use_peft")) and "lm_head" in ([named] if isinstance(named, str) else named)


RULES: tuple[Rule, ...] = (
    Rule(
        "packing without a length",
        ("arrangement",),
        lambda options: bool(options.get("packing")) and options.get("max_length") is None,
        "TRL packs only with a `max_length`",
        "trl 1.16, trainer/sft_trainer.py, _prepare_dataset",
        "trainer",
    ),
    Rule(
        "padding-free rows with a length",
        ("arrangement",),
        lambda options: (
            bool(options.get("padding_free")) and not options.get("packing") and options.get("max_length") is not None
        ),
        "TRL takes `padding_free` without packing only where `max_length` is null",
        "trl 1.16, trainer/sft_trainer.py, __init__",
        "trainer",
    ),
    Rule(
        "selective without checkpointing",
        ("checkpointing",),
        lambda options: bool(_kwargs(options).get("selective")) and not _checkpoints(options),
        "TRL refuses `selective` where checkpointing is off",
        "trl 1.16, trainer/sft_trainer.py, __init__",
        "trainer",
    ),
    Rule(
        "selective and reentrant",
        ("checkpointing",),
        lambda options: bool(_kwargs(options).get("selective")) and bool(_kwargs(options).get("use_reentrant")),
        "TRL refuses `selective` with your `use_reentrant: true`",
        "trl 1.16, trainer/sft_trainer.py, __init__",
        "trainer",
    ),
    Rule(
        "prefetch without workers",
        ("workers", "prefetch"),
        lambda options: (
            options.get("dataloader_prefetch_factor") is not None and not options.get("dataloader_num_workers")
        ),
        "batches are fetched ahead by workers",
        "transformers 5.22, training_args.py, __post_init__",
        "config",
    ),
    Rule(
        "persistent workers without workers",
        ("workers",),
        lambda options: (
            bool(options.get("dataloader_persistent_workers")) and not options.get("dataloader_num_workers")
        ),
        "workers that stay need workers",
        "torch 2.13, utils/data/dataloader.py, __init__",
        "training",
    ),
    Rule(
        "two half precisions",
        (),
        lambda options: bool(options.get("fp16")) and bool(options.get("bf16")),
        "`fp16` and `bf16` exclude each other",
        "transformers 5.22, training_args.py, __post_init__",
        "config",
    ),
    Rule(
        "TF32 without a GPU",
        ("tf32",),
        lambda options: bool(options.get("tf32")) and bool(options.get("use_cpu")),
        "TF32 is arithmetic of GPUs from Ampere on",
        "transformers 5.22, training_args.py, __post_init__",
        "config",
    ),
    Rule(
        "offloading without a GPU",
        ("activation_offloading",),
        lambda options: bool(options.get("activation_offloading")) and bool(options.get("use_cpu")),
        "on a CPU activations are in host memory as it is, and TRL fails",
        "trl 1.16, models/activation_offloading.py, OffloadActivations",
        "trainer",
    ),
    Rule(
        "adapters on the head",
        (),
        _names_head,
        "TRL computes the loss from `lm_head.weight` itself, so an adapter there would not be trained",
        "trl 1.16, trainer/sft_trainer.py, __init__",
        "trainer",
    ),
    Rule(
        "selective without fused attention",
        ("checkpointing", "attention"),
        lambda options: (
            _way(options, "selective") and _attention(options) != "sdpa" and "flash" not in _attention(options)
        ),
        "`selective` keeps what sdpa or flash attention computed, and this attention is neither",
        "trl 1.16, models/selective_activation_checkpointing.py, _build_policy_fn",
        "here",
    ),
    Rule(
        "selective and compiled",
        ("checkpointing", "torch_compile"),
        lambda options: _way(options, "selective") and bool(options.get("torch_compile")),
        "`selective` chooses operations as they run one by one, and torch.compile joins them",
        "trl 1.16, models/selective_activation_checkpointing.py, enable_selective_activation_checkpointing",
        "here",
    ),
    Rule(
        "offloaded twice",
        ("checkpointing", "activation_offloading"),
        lambda options: _way(options, "offload") and bool(options.get("activation_offloading")),
        "both move activations to host memory",
        "transformers 5.22, modeling_utils.py, gradient_checkpointing_enable",
        "here",
    ),
    Rule(
        "offloading and compiled",
        ("activation_offloading", "torch_compile"),
        lambda options: bool(options.get("activation_offloading")) and bool(options.get("torch_compile")),
        "offloading hooks each saved activation, which torch.compile does not see; never tried together",
        "trl 1.16, models/activation_offloading.py",
        "here",
    ),
    Rule(
        "layer kernels and compiled",
        ("layer_kernels", "torch_compile"),
        lambda options: _uses_kernels(options) and bool(options.get("torch_compile")),
        "the layer kernels were tried without torch.compile, and some have no build for it",
        "kernels 0.17.2, layer/repos.py, _MODE_FALLBACK_PRIORITY",
        "here",
    ),
)


def broken(options: Options) -> Rule | None:
    """The first rule that these options break."""
    return next((rule for rule in RULES if rule.breaks(options)), None)


def divide(job: Job, baseline: Candidate, axes: Sequence[Axis]) -> tuple[tuple[Axis, ...], tuple[Apart, ...]]:
    """The axes without the choices that break a rule whatever the others are, and what is not to be tried together.

    The baseline's own choices stay: whether the job itself runs is TRL's to say.
    """
    known = {axis.name: axis for axis in axes}
    apart: list[Apart] = []
    for rule in RULES:
        names = tuple(name for name in rule.axes if name in known)
        combinations = list(itertools.product(*([one.value for one in known[name].choices] for name in names)))
        bad = {values for values in combinations if names and rule.breaks(_with(job, baseline, names, values))}
        for place, name in enumerate(names):
            for value in {values[place] for values in bad} - {getattr(baseline, name)}:
                of_value = {values for values in combinations if values[place] == value}
                if of_value <= bad:
                    known[name] = _without(known[name], value, rule.says)
                    bad -= of_value
        apart += [Apart(names, values, rule.says) for values in combinations if values in bad]
    return tuple(known[axis.name] for axis in axes), tuple(apart)


def _with(job: Job, baseline: Candidate, names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    return resolved_as(job, msgspec.structs.replace(baseline, **dict(zip(names, values, strict=True))))


def _without(axis: Axis, value: Any, reason: str) -> Axis:
    choices = tuple(choice for choice in axis.choices if choice.value != value)
    return msgspec.structs.replace(axis, choices=choices, rejected=(*axis.rejected, Rejected(value, reason)))
