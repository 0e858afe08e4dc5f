"""What does not go together, held against TRL, transformers and torch themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from autotune.children import Children
from autotune.plan import recipe, rules
from autotune.plan.axes import build_space
from autotune.plan.data import Data
from autotune.plan.rules import RULES, broken
from autotune.plan.space import OFFERED, Candidate, Space
from autotune.probe.machine import LayerKernels, Machine
from tests import parts, tiny
from tests.test_memory import job

# For each rule options that break it, and the same with one of them changed so that they do not.
SIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packing without a length": ({"packing": True, "max_length": None}, {"packing": True, "max_length": 64}),
    "padding-free rows with a length": (
        {"padding_free": True, "max_length": 64},
        {"padding_free": True, "max_length": None},
    ),
    "selective without checkpointing": (
        {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"selective": True}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
    ),
    "selective and reentrant": (
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"selective": True, "use_reentrant": True},
        },
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"selective": True, "use_reentrant": False},
        },
    ),
    "prefetch without workers": (
        {"dataloader_prefetch_factor": 4, "dataloader_num_workers": 0},
        {"dataloader_prefetch_factor": 4, "dataloader_num_workers": 1},
    ),
    "persistent workers without workers": (
        {"dataloader_persistent_workers": True, "dataloader_num_workers": 0},
        {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
    ),
    "two half precisions": ({"bf16": True, "fp16": True}, {"bf16": True, "fp16": False}),
    "TF32 without a GPU": ({"tf32": True}, {"tf32": False}),
    "offloading without a GPU": ({"activation_offloading": True}, {"activation_offloading": False}),
    "adapters on the head": (
        {"use_peft": True, "lora_target_modules": ["q_proj", "lm_head"]},
        {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]},
    ),
    "selective without fused attention": (
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"selective": True},
            "attn_implementation": "eager",
        },
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"selective": True},
            "attn_implementation": "kernels-community/flash-attn2",
        },
    ),
    "selective and compiled": (
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"selective": True},
            "torch_compile": True,
        },
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {}, "torch_compile": True},
    ),
    "offloaded twice": (
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"offload": True},
            "activation_offloading": True,
        },
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}},
    ),
    "offloading and compiled": (
        {"activation_offloading": True, "torch_compile": True},
        {"activation_offloading": True, "torch_compile": False},
    ),
    "layer kernels and compiled": (
        {"model_init_kwargs": {"use_kernels": True}, "torch_compile": True},
        {"model_init_kwargs": {"use_kernels": True}, "torch_compile": False},
    ),
}
BY_TRL = [rule for rule in RULES if rule.by != "here"]
DEFAULTS = {"gradient_checkpointing": True, "use_cpu": True}


def test_every_rule_has_both_its_sides_here() -> None:
    assert list(SIDES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_tells_what_breaks_it_from_what_does_not(rule: rules.Rule) -> None:
    breaks, does_not = SIDES[rule.name]
    assert rule.breaks(DEFAULTS | breaks)
    assert not rule.breaks(DEFAULTS | does_not)
    assert rule.says
    assert not rule.says.endswith(".")
    assert rule.source.split(",")[0].split()[0] in ("trl", "transformers", "torch", "kernels")


@pytest.fixture(scope="module")
def answers(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """For each rule that is somebody else's, where each of its two sides is refused; None where it trains."""
    folder = tmp_path_factory.mktemp("rules")
    tiny.make_model(folder / "model")
    runs = [side for rule in BY_TRL for side in SIDES[rule.name]]
    found = children.call(
        "tests.trl_side:refused",
        {"model": str(folder / "model"), "lengths": [9, 12, 30, 7], "runs": runs},
        deadline_seconds=240,
        working_folder=folder,
    )
    return {rule.name: (found[2 * number], found[2 * number + 1]) for number, rule in enumerate(BY_TRL)}


@pytest.mark.parametrize("rule", BY_TRL, ids=lambda rule: rule.name)
def test_what_breaks_a_rule_is_refused_where_it_says_and_the_other_side_trains(
    rule: rules.Rule, answers: Mapping[str, Any]
) -> None:
    breaks, does_not = answers[rule.name]
    assert breaks is not None
    assert breaks["where"] == rule.by
    assert does_not is None


def test_the_first_rule_that_is_broken_is_told() -> None:
    found = broken(DEFAULTS | {"packing": True, "max_length": None, "tf32": True})
    assert found is not None
    assert found.name == "packing without a length"
    assert broken(DEFAULTS) is None


# --- in a space ---------------------------------------------------------------------------------------------------


def space_of(machine: Machine, **options: Any) -> Space:
    one = job(**RESOLVED | options)
    return build_space(one, machine, Data(one, parts.lengths_of(tiny.lengths(300))), allowed=OFFERED)


RESOLVED: dict[str, Any] = {
    "packing": False,
    "padding_free": False,
    "packing_strategy": "bfd",
    "max_length": 512,
    "truncation_mode": "keep_start",
    "train_sampling_strategy": "random",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": None,
    "dataloader_num_workers": 0,
    "dataloader_drop_last": False,
    "dataloader_pin_memory": True,
    "optim": "adamw_torch_fused",
    "seed": 42,
    "bf16": True,
}
GPU = msgspec.structs.replace(
    parts.gpu_machine(),
    abilities=parts.ABLE,
    attention=(parts.SDPA, parts.EAGER, parts.VARYING),
    layer_kernels=LayerKernels(True, "ran", ("RMSNorm",)),
)


def test_no_candidate_but_the_baseline_breaks_a_rule() -> None:
    one = job(**RESOLVED)
    space = space_of(GPU)
    tried = list(space.candidates())
    assert space.size == len(tried) == len(set(tried))
    for candidate in tried[::37]:
        assert broken(recipe.resolved_as(one, candidate)) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"workers": 0}, {"prefetch": 4}),
        ({"attention": "eager"}, {"checkpointing": "selective"}),
        ({"torch_compile": True}, {"checkpointing": "selective"}),
        ({"torch_compile": True}, {"layer_kernels": True}),
        ({"torch_compile": True}, {"activation_offloading": True}),
        ({"checkpointing": "offload"}, {"activation_offloading": True}),
    ],
)
def test_what_a_rule_keeps_apart_is_tried_alone_and_never_together(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    tried = list(space_of(GPU).candidates())

    def has(candidate: Candidate, values: dict[str, Any]) -> bool:
        return all(getattr(candidate, name) == value for name, value in values.items())

    assert any(has(one, first) for one in tried)
    assert any(has(one, second) for one in tried)
    assert not any(has(one, first | second) for one in tried)


def test_a_choice_that_breaks_a_rule_with_every_other_is_out_with_the_rules_reason() -> None:
    space = space_of(GPU, gradient_checkpointing_kwargs={"use_reentrant": True})
    assert "selective" not in [choice.value for choice in space.axis("checkpointing").choices]
    reasons = {one.value: one.reason for one in space.axis("checkpointing").rejected}
    assert reasons == {"selective": "TRL refuses `selective` with your `use_reentrant: true`"}


def test_axes_that_matter_little_add_to_the_product_instead_of_multiplying_it() -> None:
    space = space_of(GPU, dataloader_pin_memory=False, dataloader_num_workers=2)
    assert {one.pin_memory for one in space.candidates()} == {False, True}
    assert {one.prefetch for one in space.candidates()} == {None, 4}
    assert not [one for one in space.candidates() if one.pin_memory and one.prefetch == 4]
