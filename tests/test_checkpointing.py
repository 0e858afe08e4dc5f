"""Ways of checkpointing: their names, what each holds, what the installed versions have; none changes a loss."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune import folder as run_folder
from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.plan.activations import MicroBatch
from autotune.plan.axes_memory import REASONS
from autotune.plan.checkpointing import Checkpointing, keeps_at_least, parse
from autotune.plan.memory import moments, terms_of
from autotune.plan.recipe import checkpointing_mode
from autotune.plan.space import Arrangement, Candidate
from autotune.probe.abilities import probe_abilities
from autotune.probe.machine import Abilities
from tests import parts, tiny
from tests.test_memory import QWEN_0_6B, job

NAMES = ("off", "full", "every 2 layers", "every 4 layers", "selective", "offload", "every 2 layers, offload")
LONG = MicroBatch(1, 4096, masked=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_way_of_checkpointing_is_read_back_from_its_name(name: str) -> None:
    assert str(parse(name)) == name


@pytest.mark.parametrize("name", ["", "on", "True", "every 1 layers", "every two layers", "offload, selective"])
def test_a_name_that_stands_for_no_way_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no way of checkpointing"):
        parse(name)


def test_the_first_layer_and_each_nth_after_it_are_checkpointed() -> None:
    assert [Checkpointing(every).layers(7) for every in (0, 1, 2, 3, 7, 8)] == [0, 7, 4, 3, 1, 1]


def held(name: str) -> int:
    candidate = Candidate(Arrangement("padded", 1, 8), "sdpa", name, workers=0)
    return terms_of(candidate, LONG, QWEN_0_6B, job(), parts.gpu_machine()).total


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(NAMES, 2)))
def test_a_way_that_surely_keeps_as_much_needs_no_less_memory_by_the_formula(one: str, other: str) -> None:
    if keeps_at_least(one, other):
        assert held(one) >= held(other)


def test_what_each_way_keeps_is_in_this_order() -> None:
    assert held("offload") < held("full") < held("selective") < held("every 2 layers") < held("off")
    assert keeps_at_least("off", "full")
    assert not keeps_at_least("full", "off")
    assert not keeps_at_least("selective", "every 2 layers")


def test_selective_keeps_the_result_of_attention_and_a_float_for_each_head_and_row() -> None:
    candidate = Candidate(Arrangement("padded", 1, 8), "sdpa", "selective", workers=0)
    full = msgspec.structs.replace(candidate, checkpointing="full")
    kept = [
        sum(one.bytes for one in moments(each, LONG, QWEN_0_6B, job(), parts.gpu_machine())["head"])
        for each in (candidate, full)
    ]
    heads, head_dim = QWEN_0_6B.attention_heads or 0, QWEN_0_6B.head_dim or 0
    assert kept[0] - kept[1] == QWEN_0_6B.layers * 4096 * (heads * head_dim * 2 + heads * 4)


def test_offloaded_activations_leave_only_those_on_their_way() -> None:
    candidate = Candidate(Arrangement("padded", 1, 8), "sdpa", "off", workers=0)
    moved = msgspec.structs.replace(candidate, activation_offloading=True)
    machine = parts.gpu_machine()
    plain, less = (terms_of(one, LONG, QWEN_0_6B, job(), machine) for one in (candidate, moved))
    assert less.activations < plain.activations / 4
    assert less.weights == plain.weights
    # on a CPU there is nowhere to move them
    cpu = parts.cpu_machine()
    assert terms_of(moved, LONG, QWEN_0_6B, job(), cpu) == terms_of(candidate, LONG, QWEN_0_6B, job(), cpu)


def test_weights_and_optimizer_are_those_of_the_candidate() -> None:
    candidate = Candidate(Arrangement("padded", 1, 8), "sdpa", "off", workers=0)
    machine = parts.gpu_machine()
    plain, half, eight = (
        terms_of(one, LONG, QWEN_0_6B, job(), machine)
        for one in (
            candidate,
            msgspec.structs.replace(candidate, dtype="bfloat16"),
            msgspec.structs.replace(candidate, optimizer="adamw_bnb_8bit"),
        )
    )
    assert (half.weights, half.gradients, half.optimizer_state) == (
        plain.weights // 2,
        plain.gradients // 2,
        plain.optimizer_state // 2,
    )
    assert (eight.weights, eight.optimizer_state) == (plain.weights, plain.optimizer_state // 4)


@pytest.mark.parametrize(
    ("resolved", "name"),
    [
        ({"gradient_checkpointing": True}, "full"),
        ({"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "off"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "full"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 3}}, "every 3 layers"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}}, "selective"),
        (
            {
                "gradient_checkpointing": False,  # the new name wins
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"offload": True, "every_n_layers": 2},
            },
            "every 2 layers, offload",
        ),
    ],
)
def test_the_jobs_own_way_is_read_from_its_options(resolved: dict[str, Any], name: str) -> None:
    assert checkpointing_mode(resolved) == name


def test_the_installed_versions_have_every_way_for_a_model_of_today(children: Children, tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "model")
    asked = {"model": "model", "revision": None, "trust_remote_code": False}
    found = probe_abilities(model=asked, folder=tmp_path, children=children)
    assert found.checkpointing == ("full", "selective", "every_n_layers", "offload")


def without_ways(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The probe where transformers has an older `gradient_checkpointing_enable`, and TRL no `selective`."""
    import transformers
    import trl

    from autotune.probe import abilities

    def enable(self: Any, gradient_checkpointing_kwargs: Any = None) -> None:
        pass

    def init(self: Any) -> None:
        pass

    transformers.PreTrainedModel.gradient_checkpointing_enable = enable
    trl.SFTTrainer.__init__ = init
    return abilities.probe(request, folder)


def test_versions_without_these_ways_have_full_alone(children: Children) -> None:
    answer = children.call("tests.test_checkpointing:without_ways", {}, deadline_seconds=60)
    assert msgspec.convert(answer, Abilities).checkpointing == ("full",)


def test_no_way_of_checkpointing_changes_a_loss(children: Children, tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "model")
    options: list[dict[str, Any]] = [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ]
    runs = [{"lengths": tiny.lengths(24, seed=3, median=20, longest=60), **one} for one in options]
    off, *others = children.call(
        "tests.trl_side:train",
        {"model": str(tmp_path / "model"), "runs": runs},
        deadline_seconds=120,
        working_folder=tmp_path,
    )
    assert off[0] != off[-1]
    for other in others:
        assert other == pytest.approx(off, abs=1e-6)


def test_every_way_has_its_reason() -> None:
    assert set(REASONS) == {"off", "full", "selective", "every 2 layers", "offload"}


def test_a_run_folder_of_an_older_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "run.msgpack").write_bytes(msgspec.msgpack.encode({"schema": 1, "job": {}}))
    with pytest.raises(AutotuneError, match="of another version of trl-autotune"):
        run_folder.read(tmp_path)
