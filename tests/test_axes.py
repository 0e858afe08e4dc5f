"""The axes of how a step computes and what feeds it: choices, grades and reasons on machines of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autotune.children import Children
from autotune.job import Job, read_job, write_job
from autotune.plan import axis_costs, cost, recipe
from autotune.plan.axes import build_space
from autotune.plan.data import Data
from autotune.plan.memory import MemoryModel
from autotune.plan.memory_room import room
from autotune.plan.space import OFFERED, Arrangement, Candidate, Choice, Grade, Space
from autotune.probe.builds import expected_attention
from autotune.probe.machine import Abilities, LayerKernels, Machine, as_torch_sees, read_machine
from autotune.search.proposals import Proposals, needs_as_much_memory
from tests import parts, tiny
from tests.test_memory import QWEN_0_6B
from tests.test_recorded_machines import MACHINES, TABLE

Read = Callable[..., Job]
ROUNDED: frozenset[Grade] = OFFERED | {"rounded"}
MINIMAL = """\
model_name_or_path: model
datasets: [{path: json, data_files: rows.jsonl, split: train}]
output_dir: out
"""
LENGTHS = parts.lengths_of(tiny.lengths(300))
KERNELS = LayerKernels(True, "ran forward and backward here", ("RMSNorm", "SwiGLU"))
GPU = msgspec.structs.replace(
    parts.gpu_machine(), abilities=parts.ABLE, attention=(parts.SDPA, parts.EAGER, parts.VARYING), layer_kernels=KERNELS
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes")
    tiny.make_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def read(children: Children, folder: Path) -> Iterator[Read]:
    """Reads a job of some options for a machine, each once; it need not be here."""
    known: dict[tuple[str, str], Job] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HOME", str(folder / "no-accelerate-config"))

        def read(options: str = "", machine: Machine = GPU) -> Job:
            key = (options, f"{machine.backend} {machine.precision.value} {as_torch_sees(machine)}")
            if key not in known:
                (folder / "sft.yaml").write_text(MINIMAL + options)
                known[key] = read_job(
                    "sft",
                    ["--config", "sft.yaml"],
                    folder=folder,
                    children=children,
                    accelerator=machine.backend != "cpu",
                    cpu_bf16=machine.cpu.bf16,
                    precision=(machine.precision.value, machine.precision.reason),
                    elsewhere=as_torch_sees(machine),
                )
            return known[key]

        yield read


def space_of(job: Job, machine: Machine = GPU, *, allowed: frozenset[Grade] = OFFERED) -> Space:
    return build_space(job, machine, Data(job, LENGTHS), allowed=allowed)


def values(space: Space, axis: str) -> list[Any]:
    return [choice.value for choice in space.axis(axis).choices]


def why_not(space: Space, axis: str) -> dict[Any, str]:
    return {rejected.value: rejected.reason for rejected in space.axis(axis).rejected}


def options_of(job: Job, space: Space, **choices: Any) -> dict[str, Any]:
    """The options that change where only these choices differ from the job."""
    candidate = msgspec.structs.replace(space.baseline, **choices)
    return {change.name: change.value for change in recipe.changes(job, space, candidate)}


def written(job: Job, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a config has beside those of every job here and the machine's precision."""
    config: dict[str, Any] = yaml.safe_load(write_job(job, options, {}))
    return {name: value for name, value in config.items() if name not in {*yaml.safe_load(MINIMAL), *job.additions}}


# --- every recorded machine ---------------------------------------------------------------------------------------


def recorded(name: str) -> Machine:
    machine = read_machine(MACHINES / f"{name}.json")
    return msgspec.structs.replace(
        machine, attention=expected_attention(machine), abilities=parts.ABLE, layer_kernels=KERNELS
    )


def some_of(space: Space) -> list[Candidate]:
    """The baseline, each choice of each axis alone, and a hundred of the others."""
    base = space.baseline
    alone = [
        msgspec.structs.replace(base, **{axis.name: choice.value}) for axis in space.axes for choice in axis.choices
    ]
    tried = list(space.candidates())
    return list(
        dict.fromkeys([base, *(one for one in tried if one in set(alone)), *random.Random(0).sample(tried, 100)])
    )


@pytest.mark.parametrize("name", TABLE)
def test_candidates_of_a_recorded_machine_are_read_by_trl_as_they_are_meant(
    name: str, read: Read, children: Children, folder: Path
) -> None:
    machine = recorded(name)
    job = read("gradient_accumulation_steps: 2\n", machine)
    space = space_of(job, machine, allowed=ROUNDED)
    candidates = some_of(space)
    options = [
        {change.name: change.value for change in recipe.changes(job, space, candidate)} for candidate in candidates
    ]
    answers = children.call(
        "tests.trl_side:parse_all_elsewhere",
        {"configs": [write_job(job, one, {}) for one in options], "seen": as_torch_sees(machine)},
        deadline_seconds=120,
        working_folder=folder,
    )
    for candidate, answer in zip(candidates, answers, strict=True):
        fields = answer["fields"]
        assert recipe.checkpointing_mode(fields) == candidate.checkpointing
        inside = fields["model_init_kwargs"] or {}
        assert bool(inside.get("use_kernels")) == candidate.layer_kernels
        assert (fields["torch_compile"], fields["activation_offloading"], fields["dataloader_num_workers"]) == (
            candidate.torch_compile,
            candidate.activation_offloading,
            candidate.workers,
        )
        assert fields["optim"] == f"OptimizerNames.{OPTIMIZERS[candidate.optimizer or '']}"
        assert fields["dtype"] == candidate.dtype
        assert fields["padding_free"] == candidate.arrangement.padding_free
        if machine.backend == "cpu":
            continue
        assert fields["dataloader_prefetch_factor"] == candidate.prefetch
        assert fields["dataloader_pin_memory"] == candidate.pin_memory
        if machine.backend == "cuda" and as_torch_sees(machine)["tf32"]:
            assert recipe.computes_in_tf32(fields, compiled=bool(candidate.torch_compile)) == candidate.tf32


OPTIMIZERS = {
    "adamw_torch_fused": "ADAMW_TORCH_FUSED",
    "adamw_torch": "ADAMW_TORCH",
    "adamw_bnb_8bit": "ADAMW_BNB",
}


@pytest.mark.parametrize("name", TABLE)
def test_every_choice_and_every_rejection_of_a_recorded_machine_has_its_reason(name: str, read: Read) -> None:
    machine = recorded(name)
    for axis in space_of(read("", machine), machine).axes:
        for reason in [one.reason for one in axis.choices] + [one.reason for one in axis.rejected]:
            assert reason.strip()
            assert not reason.endswith((".", ";"))
        kept = [choice.value for choice in axis.choices]
        assert not [rejected.value for rejected in axis.rejected if rejected.value in kept]


def test_the_largest_space_can_be_counted_out_and_put_in_order(read: Read) -> None:
    """At some 10 us for each candidate, a hundred thousand would take a second."""
    machine = recorded("h200")
    job = read("gradient_accumulation_steps: 8\ndataloader_num_workers: 2\n", machine)
    data = Data(job, LENGTHS)
    space = build_space(job, machine, data, allowed=ROUNDED)
    assert 10_000 < space.size < 100_000
    memory = MemoryModel(data, QWEN_0_6B, job, machine)
    proposals = Proposals(
        space,
        cost.CostModel(data, QWEN_0_6B, machine).terms,
        room=lambda one: room(memory.estimate(one), 140 * 10**9),
    )
    assert 0 < proposals.left <= space.size
    first = proposals.next()
    assert first is not None
    assert first[0].checkpointing == "off"  # there is room for it


# --- one axis at a time -------------------------------------------------------------------------------------------


def test_compiling_pins_tf32_to_what_the_job_computes_in(read: Read) -> None:
    job = read()
    space = space_of(job)
    assert space.axis("torch_compile").choice(True).grade == "exact"
    assert options_of(job, space, torch_compile=True) == {"torch_compile": True, "tf32": False}
    compiled = read("torch_compile: true\ntorch_compile_mode: max-autotune\n")
    assert options_of(compiled, space_of(compiled), torch_compile=False) == {
        "torch_compile": False,
        "torch_compile_backend": None,
        "torch_compile_mode": None,
        "tf32": True,
    }
    settled = read("tf32: true\n")
    assert options_of(settled, space_of(settled), torch_compile=True) == {"torch_compile": True}


def test_compiling_on_a_cpu_is_out_for_what_was_measured(read: Read) -> None:
    machine = parts.cpu_machine()
    reason = why_not(space_of(read("", machine), machine), "torch_compile")[True]
    assert "17 to 27 s" in reason
    assert "no faster" in reason


def test_layer_kernels_go_into_the_users_own_model_init_kwargs(read: Read) -> None:
    job = read("model_init_kwargs: {token: mine, attn_implementation: eager, device_map: null}\n")
    space = space_of(job)
    choice = space.axis("layer_kernels").choice(True)
    assert choice == Choice(True, "exact", "RMSNorm, SwiGLU: ran forward and backward here")
    options = options_of(job, space, layer_kernels=True, attention="sdpa")
    assert written(job, options)["model_init_kwargs"] == {
        "token": "mine",
        "attn_implementation": "sdpa",
        "device_map": None,
        "use_kernels": True,
    }
    plain = read()
    assert written(plain, options_of(plain, space_of(plain), layer_kernels=True))["model_init_kwargs"] == {
        "use_kernels": True
    }


def test_layer_kernels_that_do_not_work_here_are_out_for_the_reason_that_was_probed(read: Read) -> None:
    machine = msgspec.structs.replace(GPU, layer_kernels=LayerKernels(False, "fails in loading: no build"))
    assert why_not(space_of(read(), machine), "layer_kernels") == {True: "fails in loading: no build"}


def test_layer_kernels_that_could_pass_adapters_by_are_out_for_lora(read: Read) -> None:
    reason = why_not(space_of(read("use_peft: true\n")), "layer_kernels")[True]
    assert reason.startswith("SwiGLU may read weights that your adapters are added to")
    norms = msgspec.structs.replace(GPU, layer_kernels=LayerKernels(True, "ran", ("RMSNorm",)))
    assert values(space_of(read("use_peft: true\n"), norms), "layer_kernels") == [False, True]


def test_the_users_other_options_of_checkpointing_are_kept(read: Read) -> None:
    job = read("gradient_checkpointing_kwargs: {use_reentrant: false, every_n_layers: 3}\n")
    space = space_of(job)
    assert values(space, "checkpointing") == [
        "every 3 layers", "off", "full", "selective", "every 2 layers", "offload"
    ]  # fmt: skip
    told = {mode: options_of(job, space, checkpointing=mode) for mode in values(space, "checkpointing")}
    kwargs = "gradient_checkpointing_kwargs"
    assert told == {
        "every 3 layers": {},
        "off": {"gradient_checkpointing": False},
        "full": {kwargs: {"use_reentrant": False}},
        "selective": {kwargs: {"use_reentrant": False, "selective": True}},
        "every 2 layers": {kwargs: {"use_reentrant": False, "every_n_layers": 2}},
        "offload": {kwargs: {"use_reentrant": False, "offload": True}},
    }


def test_selective_goes_when_checkpointing_is_switched_off(read: Read) -> None:
    job = read("gradient_checkpointing_kwargs: {selective: true}\n")
    off = options_of(job, space_of(job), checkpointing="off")
    assert off == {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}
    assert written(job, off) == off


def test_ways_of_checkpointing_that_are_not_installed_are_out(read: Read) -> None:
    machine = msgspec.structs.replace(GPU, abilities=Abilities(("full",)))
    space = space_of(read(), machine)
    assert values(space, "checkpointing") == ["full", "off"]
    assert set(why_not(space, "checkpointing")) == {"selective", "every 2 layers", "offload"}


def test_a_cpu_is_offered_selective_and_nothing_that_moves_activations(read: Read) -> None:
    machine = msgspec.structs.replace(parts.cpu_machine(), abilities=parts.ABLE)
    space = space_of(read("", machine), machine)
    assert values(space, "checkpointing") == ["full", "off", "selective"]
    assert set(why_not(space, "checkpointing")) == {"every 2 layers", "offload"}
    assert "TRL fails" in why_not(space, "activation_offloading")[True]


def test_padding_free_rows_need_an_attention_of_variable_lengths_and_no_length(read: Read) -> None:
    job = read("max_length: 512\n")
    space = space_of(job)
    free = [one for one in values(space, "arrangement") if one.padding_free]
    assert [(one.micro_batch, one.accumulation) for one in free] == [(2, 4), (4, 2), (8, 1)]
    assert {space.axis("arrangement").choice(one).grade for one in free} == {"exact"}
    assert options_of(job, space, arrangement=free[-1]) == {"padding_free": True, "max_length": None}
    assert written(job, options_of(job, space, arrangement=free[-1]))["max_length"] is None
    by_default = read()
    assert written(by_default, options_of(by_default, space_of(by_default), arrangement=free[-1])) == {
        "padding_free": True,
        "max_length": None,
    }


@pytest.mark.parametrize(
    ("options", "machine", "why"),
    [
        ("max_length: 100\n", GPU, "yours of 100 cuts documents"),
        ("eval_strategy: epoch\n", GPU, "your evaluation has rows of its own"),
        ("neftune_noise_alpha: 5\n", GPU, "NEFTune"),
        ("", parts.gpu_machine(), "grows with the square of their tokens"),
    ],
)
def test_rows_stay_padded_for_a_reason(options: str, machine: Machine, why: str, read: Read) -> None:
    assert why in why_not(space_of(read(options), machine), "arrangement")["padding_free"]


def test_a_padding_free_job_is_offered_padded_rows(read: Read) -> None:
    job = read("padding_free: true\nmax_length: null\n")
    space = space_of(job)
    assert space.baseline.arrangement == Arrangement("padded", 8, 1, padding_free=True)
    padded = Arrangement("padded", 4, 2)
    assert space.axis("arrangement").choice(padded).grade == "exact"
    assert options_of(job, space, arrangement=padded) == {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "padding_free": False,
    }


def test_an_8_bit_optimizer_is_offered_only_when_asked_for_and_where_its_package_is(read: Read) -> None:
    job = read()
    assert values(space_of(job), "optimizer") == ["adamw_torch_fused"]
    assert why_not(space_of(job), "optimizer")["adamw_bnb_8bit"].endswith("ask for it with `--allow rounded`")
    asked = space_of(job, allowed=ROUNDED)
    assert values(asked, "optimizer") == ["adamw_torch_fused", "adamw_bnb_8bit"]
    assert asked.axis("optimizer").choice("adamw_bnb_8bit").grade == "rounded"
    without = msgspec.structs.replace(GPU, abilities=Abilities(("full",)))
    assert why_not(space_of(job, without, allowed=ROUNDED), "optimizer")["adamw_bnb_8bit"] == (
        "`bitsandbytes` is not installed"
    )
    small = why_not(space_of(read("use_peft: true\n"), allowed=ROUNDED), "optimizer")["adamw_bnb_8bit"]
    assert small == "the states of adapters are small already"


def test_plain_adamw_is_offered_the_fused_one(read: Read) -> None:
    job = read("optim: adamw_torch\n")
    space = space_of(job)
    assert space.axis("optimizer").choice("adamw_torch_fused").grade == "exact"
    assert options_of(job, space, optimizer="adamw_torch_fused") == {"optim": "adamw_torch_fused"}


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "galore_adamw"])
def test_an_optimizer_of_another_kind_stays(optim: str, read: Read) -> None:
    assert values(space_of(read(f"optim: {optim}\n"), allowed=ROUNDED), "optimizer") == [optim]


@pytest.mark.parametrize(
    ("options", "name", "offered"),
    [
        ("", "8x-a100", True),
        ("", "t4", False),
        ("bf16: false\nfp16: true\n", "8x-a100", False),
        ("dtype: bfloat16\n", "8x-a100", False),
        ("model_init_kwargs: {dtype: float16}\n", "8x-a100", False),
        ("", "cpu", False),
    ],
)
def test_half_weights_are_offered_when_asked_for_and_where_bf16_is_arithmetic(
    options: str, name: str, offered: bool, read: Read
) -> None:
    machine = recorded(name)
    job = read(options, machine)
    assert "bfloat16" not in values(space_of(job, machine), "dtype")[1:]
    asked = space_of(job, machine, allowed=ROUNDED)
    assert ("bfloat16" in values(asked, "dtype")[1:]) == offered
    if offered:
        assert asked.grade(msgspec.structs.replace(asked.baseline, dtype="bfloat16")) == "rounded"


def test_half_weights_are_written_where_the_user_wrote_the_dtype(read: Read) -> None:
    job = read("model_init_kwargs: {dtype: float32}\n")
    options = options_of(job, space_of(job, allowed=ROUNDED), dtype="bfloat16")
    assert written(job, options) == {"model_init_kwargs": {"dtype": "bfloat16"}}


def test_tf32_is_for_products_in_float32_and_only_when_asked_for(read: Read) -> None:
    assert why_not(space_of(read()), "tf32") == {True: "your job computes its products in bf16 as it is"}
    job = read("bf16: false\n")
    assert values(space_of(job), "tf32") == [False]
    assert values(space_of(job, allowed=ROUNDED), "tf32") == [False, True]
    t4 = recorded("t4")
    assert why_not(space_of(read("", t4), t4, allowed=ROUNDED), "tf32") == {True: "arithmetic of Ampere and newer"}


def test_nothing_is_compiled_and_no_layer_replaced_over_quantised_weights(read: Read) -> None:
    space = space_of(read("use_peft: true\nload_in_4bit: true\n"), allowed=ROUNDED)
    assert values(space, "torch_compile") == [False]
    assert values(space, "layer_kernels") == [False]
    assert "adapters are bfloat16 anyway" in space.axis("dtype").choice("bfloat16").reason


def test_adapters_stay_in_float32_over_half_weights(children: Children, folder: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        found = children.call(
            "tests.trl_side:trained_dtypes",
            {"model": str(folder / "model"), "dtype": dtype},
            deadline_seconds=60,
            working_folder=folder,
        )
        assert found == ["torch.float32"]


def test_lora_trains_the_same_with_every_way_of_checkpointing(children: Children, folder: Path) -> None:
    ways = [None, {"selective": True}, {"every_n_layers": 2}]
    runs: list[dict[str, Any]] = [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs} for kwargs in ways
    ]
    losses = children.call(
        "tests.trl_side:train_adapters",
        {"model": str(folder / "model"), "lengths": tiny.lengths(24, median=20, longest=60), "runs": runs},
        deadline_seconds=120,
        working_folder=folder,
    )
    assert losses[0][0] != losses[0][-1]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-6)


def test_workers_take_along_what_only_workers_can_have(read: Read) -> None:
    job = read("dataloader_num_workers: 2\ndataloader_prefetch_factor: 3\ndataloader_persistent_workers: true\n")
    without = options_of(job, space_of(job), workers=0)
    assert without == {
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
    }


def test_pinned_memory_is_offered_where_the_job_has_none(read: Read) -> None:
    assert values(space_of(read()), "pin_memory") == [True]
    job = read("dataloader_pin_memory: false\n")
    assert options_of(job, space_of(job), pin_memory=True) == {"dataloader_pin_memory": True}


# --- estimates and words ------------------------------------------------------------------------------------------

PLAIN = Candidate(Arrangement("padded", 8, 1), "sdpa", "off", workers=0)


def test_recomputing_costs_a_third_where_every_layer_is_recomputed() -> None:
    def factor(**choices: Any) -> float:
        return axis_costs.factor(msgspec.structs.replace(PLAIN, **choices), GPU)

    assert factor() == 1.0
    assert factor(checkpointing="full") == pytest.approx(4 / 3)
    assert factor(checkpointing="every 2 layers") == pytest.approx(7 / 6)
    assert 7 / 6 < factor(checkpointing="selective") < 4 / 3 < factor(checkpointing="offload")
    assert factor(activation_offloading=True) > 1.0 > factor(torch_compile=True)
    assert axis_costs.factor(msgspec.structs.replace(PLAIN, torch_compile=True), parts.cpu_machine()) == 1.0


def test_what_differs_is_said_in_words() -> None:
    other = msgspec.structs.replace(
        PLAIN,
        arrangement=Arrangement("padded", 8, 1, padding_free=True),
        checkpointing="every 2 layers",
        torch_compile=True,
        layer_kernels=True,
        optimizer="adamw_bnb_8bit",
        prefetch=4,
        dtype="bfloat16",
    )
    assert other.describe(other_than=PLAIN) == (
        "padding-free, 8 x 1, checkpointing (every 2 layers), layer kernels, torch.compile, adamw_bnb_8bit, "
        "prefetch 4, bfloat16 weights"
    )
    assert str(other) == "padding-free, 8 x 1, sdpa, checkpointing (every 2 layers), layer kernels, torch.compile"
    off = msgspec.structs.replace(other, torch_compile=False, prefetch=None, dtype="float32")
    assert off.describe(other_than=other) == "padding-free, 8 x 1, no torch.compile, prefetch 2, float32 weights"


@pytest.mark.parametrize("field", ["torch_compile", "layer_kernels", "activation_offloading"])
def test_memory_of_another_way_of_computing_is_not_inferred(field: str) -> None:
    assert not needs_as_much_memory(msgspec.structs.replace(PLAIN, **{field: True}), PLAIN)
    assert needs_as_much_memory(PLAIN, PLAIN)
