"""In what precision an online method generates on each kind of machine."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from autotune.job import Method
from autotune.plan.precision import EMULATED, NARROWER, ONLINE_METHODS, SAME, WIDER, vllm_dtype_axis
from autotune.plan.space import OFFERED, Axis, Choice, Grade, Rejected
from autotune.probe.facts import Fact
from autotune.probe.machine import Machine, choose_precision
from tests import parts

ROUNDED: frozenset[Grade] = OFFERED | {"rounded"}


def gpu_of(*capabilities: tuple[int, int] | None, **changes: Any) -> Machine:
    gpus = tuple(
        msgspec.structs.replace(parts.gpu(index), compute_capability=one) for index, one in enumerate(capabilities)
    )
    machine = parts.machine(backend="cuda", gpus=gpus)
    return msgspec.structs.replace(machine, **{"precision": choose_precision("cuda", gpus, machine.cpu), **changes})


def axis(machine: Machine, *, allowed: frozenset[Grade] = ROUNDED, method: str = "grpo") -> Axis:
    found = vllm_dtype_axis(method, machine, allowed)
    assert found is not None
    return found


def values(axis: Axis) -> list[tuple[str, Grade]]:
    return [(choice.value, choice.grade) for choice in axis.choices]


@pytest.mark.parametrize("method", [one for one in get_args(Method) if one not in ONLINE_METHODS])
def test_a_method_that_does_not_generate_has_no_such_axis(method: str) -> None:
    assert vllm_dtype_axis(method, gpu_of((9, 0)), ROUNDED) is None


@pytest.mark.parametrize("method", ONLINE_METHODS)
def test_from_ampere_on_both_half_precisions_are_choices(method: str) -> None:
    found = axis(gpu_of((8, 0)), method=method)
    assert found == Axis(
        "vllm_dtype",
        (
            Choice("bfloat16", "exact", f"{SAME}; compute capability 8.0 is Ampere or newer"),
            Choice("float16", "rounded", f"{NARROWER}; trainer and vLLM alike"),
        ),
    )


def test_the_other_half_precision_is_offered_only_when_asked_for() -> None:
    found = axis(gpu_of((9, 0)), allowed=OFFERED)
    assert values(found) == [("bfloat16", "exact")]
    assert [one.value for one in found.rejected] == ["float16"]
    assert found.rejected[0].reason.endswith("; ask for it with `--allow rounded`")


@pytest.mark.parametrize("capabilities", [[(7, 5)], [(7, 0)], [(7, 5), (9, 0)]])
def test_below_ampere_there_is_fp16_only(capabilities: list[tuple[int, int]]) -> None:
    found = axis(gpu_of(*capabilities))
    used = capabilities[0]
    assert values(found) == [("float16", "exact")]
    assert found.rejected == (Rejected("bfloat16", f"compute capability {used[0]}.{used[1]} is {EMULATED}"),)


def test_a_machine_told_to_use_fp16_may_be_asked_for_bf16() -> None:
    found = axis(gpu_of((8, 0), precision=Fact("fp16", "asked")))
    assert values(found) == [("float16", "exact"), ("bfloat16", "rounded")]
    assert found.choices[1].reason.startswith(WIDER)


def test_a_capability_that_is_not_told_is_not_guessed() -> None:
    found = axis(gpu_of(None, (8, 0)))
    assert values(found) == [("bfloat16", "exact")]
    assert {one.reason for one in found.rejected} == {"the driver does not tell the compute capability of the GPU"}


def test_on_a_cpu_there_is_no_fp16() -> None:
    found = axis(parts.cpu_machine())
    assert values(found) == [("bfloat16", "exact")]
    assert found.rejected == (Rejected("float16", "on a CPU fp16 is silently float32"),)


def test_another_accelerator_keeps_its_own_precision() -> None:
    found = axis(parts.machine(backend="rocm"))
    assert values(found) == [("bfloat16", "exact")]
    assert found.rejected == (Rejected("float16", "not known on rocm"),)
