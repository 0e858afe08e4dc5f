"""Backends of a machine that is not here: judged by what is published, each with its reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autotune.children import Children
from autotune.deliver.wording import attention_out
from autotune.probe.architectures import supports
from autotune.probe.attention_names import FORMS, HUB_KERNELS, NATIVE
from autotune.probe.builds import PUBLISHED, expected_attention
from autotune.probe.facts import Fact
from autotune.probe.machine import AttentionBackend, Machine, judged
from autotune.probe.torch_builds import architectures_of, build_refuses
from tests import parts

CAPABILITIES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
LISTS = (
    *(list(builds.architectures) for builds in PUBLISHED.values()),
    ["9.0f"],
    ["10.0f"],
    ["8.0+PTX"],
    ["9.0a+PTX"],
    ["sm_80"],
    ["sm_80", "9.0"],
)
FLASH2, FLASH3, VLLM_FLASH3, FLASH4 = HUB_KERNELS[:4]
VERSIONS = {
    "transformers": "5.22.2", "kernels": "0.17.2", "torch": "2.13.0", "torch_cuda": "12.8", "flash_attn": None,
}  # fmt: skip


def gpu_of(*capabilities: tuple[int, int] | None, versions: dict[str, Any] | None = None, **changes: Any) -> Machine:
    gpus = tuple(
        msgspec.structs.replace(parts.gpu(index), compute_capability=one) for index, one in enumerate(capabilities)
    )
    return parts.machine(backend="cuda", gpus=gpus, versions={**VERSIONS, **(versions or {})}, **changes)


def expected(machine: Machine, *, asked: str | None = None) -> dict[str, AttentionBackend]:
    return {one.name: one for one in expected_attention(machine, job_attention=asked)}


def usable(machine: Machine) -> list[str]:
    return [one.name for one in expected_attention(machine) if one.usable]


def architecture_answers(request: dict[str, Any], folder: object) -> list[list[bool]]:
    from kernels.archs import _supports_cuda_capability

    return [[_supports_cuda_capability(one, tuple(at)) for at in request["capabilities"]] for one in request["lists"]]


def test_the_rule_of_architectures_is_that_of_kernels(children: Children) -> None:
    answers = children.call(
        "tests.test_builds:architecture_answers",
        {"lists": LISTS, "capabilities": CAPABILITIES},
        deadline_seconds=60,
    )
    assert [[supports(one, at) for at in CAPABILITIES] for one in LISTS] == answers


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [
        ((7, 0), []),
        ((7, 5), []),
        ((8, 0), [FLASH2, FLASH3, VLLM_FLASH3]),
        ((8, 9), [FLASH2, FLASH3, VLLM_FLASH3]),
        ((9, 0), [FLASH2, FLASH3, VLLM_FLASH3]),
        ((10, 0), [FLASH2]),
        ((10, 3), [FLASH2]),
        ((12, 0), [FLASH2]),
    ],
)
def test_hub_kernels_are_expected_where_they_are_built_for(capability: tuple[int, int], kernels: list[str]) -> None:
    works = usable(gpu_of(capability, versions={"torch_cuda": "12.8" if capability >= (7, 5) else "12.6"}))
    assert works == [*(NATIVE if capability >= (8, 0) else ("sdpa", "eager")), *kernels]


def test_every_reason_says_that_it_is_expected() -> None:
    for machine in (gpu_of((8, 0)), parts.cpu_machine(), parts.machine(backend="rocm"), parts.machine(backend="mps")):
        for backend in expected_attention(machine, job_attention="mine/flash"):
            assert backend.expected
            assert backend.reason.startswith("expected: ")


def test_the_gpu_that_is_used_decides() -> None:
    assert FLASH3 in usable(gpu_of((9, 0), (7, 5)))
    assert usable(gpu_of((7, 5), (9, 0))) == ["sdpa", "eager"]
    assert expected(gpu_of((12, 0), (9, 0)))[FLASH3].reason == (
        "expected: it is built for 8.0, 9.0a, and compute capability 12.0 runs none of these"
    )


def test_flex_attention_needs_a_gpu_that_triton_compiles_for() -> None:
    pascal = gpu_of((6, 1), versions={"torch_cuda": "12.6"})
    assert expected(pascal)["flex_attention"].reason == (
        "expected: Triton, which compiles it, needs compute capability 7.0 or newer, and this is 6.1"
    )
    assert expected(gpu_of((7, 5)))["flex_attention"].reason == (
        "expected: not known: Triton, which compiles it, supports 8.0 and newer, and this is 7.5"
    )
    assert expected(parts.cpu_machine())["flex_attention"].reason == (
        "expected: flex_attention has no backward on a CPU"
    )


def test_flex_attention_came_with_torch_2_5() -> None:
    old = gpu_of((8, 0), versions={"torch": "2.1.0+cu121", "torch_cuda": "12.1"})
    assert expected(old)["flex_attention"].reason == ("expected: it came with torch 2.5, and 2.1.0+cu121 is installed")
    assert expected(gpu_of((8, 0), versions={"torch": "2.5.0"}))["flex_attention"].usable


def test_flash_attention_3_needs_cuda_12_8() -> None:
    assert expected(gpu_of((9, 0), versions={"torch_cuda": "12.6"}))[FLASH3].reason == (
        "expected: it needs a torch for CUDA 12.8 or newer, and this one is for 12.6"
    )
    assert expected(gpu_of((9, 0), versions={"torch_cuda": None}))[FLASH3].reason.startswith("expected: not known: ")
    assert FLASH3 in usable(gpu_of((9, 0), versions={"torch_cuda": "13.0"}, cuda_driver=(13, 1)))


def test_a_driver_older_than_torchs_cuda_runs_no_kernel() -> None:
    machine = gpu_of((9, 0), versions={"torch_cuda": "13.0"}, cuda_driver=(12, 4))
    assert usable(machine) == []
    assert {one.reason for one in expected_attention(machine)} == {
        "expected: torch is built for CUDA 13.0, and the driver runs CUDA up to 12.4"
    }


@pytest.mark.parametrize(
    ("capability", "versions", "reason"),
    [
        ((7, 0), {"torch": "2.13.0+cu130", "torch_cuda": "13.0"}, "with CUDA 13.0, which compiles for 7.5 and newer"),
        ((7, 0), {"torch": "2.13.0a0+nv25.8", "torch_cuda": "13.0"}, "CUDA 13.0, which compiles for 7.5 and newer"),
        ((6, 1), {"torch": "2.13.0+cu130", "torch_cuda": "13.0"}, "and this is compute capability 6.1"),
        ((3, 7), {"torch": "2.13.0+cu126", "torch_cuda": "12.6"}, "CUDA 12.6, which compiles for 5.0 and newer"),
        ((10, 0), {"torch": "2.13.0+cu126", "torch_cuda": "12.6"}, "and compute capability 10.0 runs none of these"),
        ((12, 0), {"torch": "2.13.0+cu126", "torch_cuda": "12.6"}, "built for 5.0, 6.0, 7.0, 7.5, 8.0, 8.6, 9.0, and"),
        ((6, 0), {"torch": "2.13.0+cu128", "torch_cuda": "12.8"}, "and compute capability 6.0 runs none of these"),
        ((9, 0), {"torch": "2.13.0+cpu", "torch_cuda": None}, "torch 2.13.0+cpu is not built for CUDA"),
        ((9, 0), {"torch": "2.13.0+rocm7.1", "torch_cuda": None}, "torch 2.13.0+rocm7.1 is not built for CUDA"),
    ],
)
def test_a_torch_that_is_not_built_for_the_gpu_runs_nothing_on_it_and_is_a_problem(
    capability: tuple[int, int], versions: dict[str, Any], reason: str
) -> None:
    machine = gpu_of(capability, versions=versions, cuda_driver=(13, 0))
    assert usable(machine) == []
    assert all(reason in one.reason for one in expected_attention(machine))
    (problem,) = [one for one in judged(machine).problems if "torch" in one.what]
    assert reason in problem.what
    assert "install a torch" in problem.hint


@pytest.mark.parametrize(
    ("capability", "versions"),
    [
        ((7, 0), {"torch": "2.13.0+cu126", "torch_cuda": "12.6"}),
        ((7, 0), {"torch": "2.9.0+cu128", "torch_cuda": "12.8"}),  # some releases have it
        ((8, 7), {"torch": "2.13.0+cu130", "torch_cuda": "13.0"}),  # Jetson has builds of its own
        ((8, 9), {"torch": "2.13.0+cu130", "torch_cuda": "13.0"}),
        ((12, 1), {"torch": "2.13.0+cu130", "torch_cuda": "13.0"}),
        ((10, 0), {"torch": "2.7.0a0+nv25.3", "torch_cuda": "12.6"}),  # not a wheel of PyTorch's
        ((9, 0), {"torch": "2.13.0", "torch_cuda": None}),
        ((9, 0), {"torch": None, "torch_cuda": None}),
        (None, {"torch": "2.13.0+cu130", "torch_cuda": "13.0"}),
    ],
)
def test_a_torch_that_may_be_built_for_the_gpu_is_no_problem(
    capability: tuple[int, int] | None, versions: dict[str, Any]
) -> None:
    machine = gpu_of(capability, versions=versions, cuda_driver=(13, 0))
    assert [one for one in judged(machine).problems if "torch" in one.what] == []
    assert usable(machine)[:2] == ["sdpa", "eager"]


def test_what_torch_lists_is_read_as_architectures() -> None:
    listed = ["sm_75", "sm_90a", "sm_100", "sm_120", "compute_120", "gfx942"]
    assert architectures_of(listed) == ("7.5", "9.0a", "10.0", "12.0", "12.0+PTX")
    assert build_refuses("2.13.0", architectures_of(["sm_80", "sm_90"]), (7, 5)) == (
        "torch 2.13.0 is built for 8.0, 9.0, and compute capability 7.5 runs none of these"
    )
    assert build_refuses("2.13.0", (), (7, 5)) is None


def test_a_capability_that_is_not_told_is_not_guessed() -> None:
    assert expected(gpu_of(None, (8, 0)))[FLASH2].reason == (
        "expected: not known: the compute capability of the GPU is not told"
    )
    told = judged(gpu_of(None))
    assert told.precision == Fact("bf16", "TRL's default; the driver does not tell the compute capability of the GPU")


@pytest.mark.parametrize(
    ("transformers", "kernels", "reason"),
    [
        ("5.17.0", "0.16.2", None),
        ("5.18.1", "0.17.0", None),
        ("5.22.0", "0.17.2", None),
        ("5.24.0", "0.17.2", "transformers 5.24.0 takes kernels 0.18.2 or newer and older than 0.19, and 0.17.2 is"),
        ("5.17.0", "0.17.2", "transformers 5.17.0 takes kernels 0.16.0 or newer and older than 0.17, and 0.17.2 is"),
        ("5.40.0", "0.17.2", "not known: which kernels transformers 5.40.0 takes is not listed here"),
        ("5.22.2", None, "`kernels` is not installed"),
    ],
)
def test_hub_kernels_need_a_pair_of_versions_that_works(
    transformers: str, kernels: str | None, reason: str | None
) -> None:
    found = expected(gpu_of((8, 0), versions={"transformers": transformers, "kernels": kernels}))[FLASH2]
    assert found.usable == (reason is None)
    assert reason is None or found.reason.startswith(f"expected: {reason}")


def test_a_package_is_expected_by_its_version_and_its_gpu() -> None:
    assert expected(gpu_of((8, 0), versions={"flash_attn": "2.8.3"}))["flash_attention_2"].usable
    old = expected(gpu_of((8, 0), versions={"flash_attn": "2.2.0"}))["flash_attention_2"]
    assert old.reason == "expected: transformers takes `flash-attn` 2.3.3 or newer, and 2.2.0 is installed"
    weak = expected(gpu_of((8, 0), versions={"flash_attn_4": "4.0.0"}))["flash_attention_4"]
    assert weak.reason == "expected: `flash-attn-4` needs compute capability 9.0 or newer, and this is 8.0"
    for version in ("flash_attn_3", "flash_attn_4"):
        blackwell = expected(gpu_of((10, 0), versions={version: "4.0.0"}))["flash_attention_3"]
        assert blackwell.reason == (
            "expected: `flash-attn-3` is for 8.0, 9.0a, and compute capability 10.0 runs none of these"
        )
    turing = expected(gpu_of((7, 5), versions={"flash_attn": "2.8.3"}))["flash_attention_2"]
    assert turing.reason == "expected: `flash-attn` needs compute capability 8.0 or newer, and this is 7.5"


def test_the_jobs_own_name_without_its_package_is_expected_as_the_hubs_kernel() -> None:
    assert expected(gpu_of((8, 0)), asked="flash_attention_2")["flash_attention_2"].usable
    assert not expected(gpu_of((8, 0)))["flash_attention_2"].usable


def test_of_a_package_that_is_not_there_and_the_hubs_kernel_one_is_offered_by_the_jobs_own_name() -> None:
    found = expected(gpu_of((9, 0)), asked="flash_attention_2")
    assert (found["flash_attention_2"].usable, found[FLASH2].usable, found[FLASH3].usable) == (True, False, True)
    assert found[FLASH2].reason == (
        "expected: it is what `flash_attention_2`, your job's name for it, runs without its package"
    )
    installed = expected(gpu_of((9, 0), versions={"flash_attn": "2.8.3"}), asked="flash_attention_2")
    assert (installed["flash_attention_2"].usable, installed[FLASH2].usable) == (True, True)
    assert expected(gpu_of((9, 0)), asked=FLASH2)[FLASH2].usable


def test_reasons_that_differ_in_what_they_quote_are_told_as_one() -> None:
    out = {reason: names for names, reason in attention_out(expected_attention(gpu_of((9, 0))))}
    assert out["without its package; the hub has the same"] == ["flash_attention_2", "flash_attention_3",
                                                                "flash_attention_4"]  # fmt: skip
    old = {reason: names for names, reason in attention_out(expected_attention(gpu_of((7, 5))))}
    assert old["needs compute capability 8.0 or newer, and this is 7.5"] == ["flash_attention_2", "flash_attention_3"]


def test_flash_kernels_are_not_expected_in_float32() -> None:
    machine = gpu_of((8, 0), versions={"flash_attn": "2.8.3"}, precision=Fact("float32", "asked"))
    found = expected(machine)
    for name in (FLASH2, FLASH3, "flash_attention_2"):
        assert found[name].reason == "expected: flash kernels take bf16 and fp16, and the precision is float32"
    # what the job computes in counts, not what the machine's jobs would
    asked = {one.name: one.usable for one in expected_attention(machine, precision="bf16")}
    assert asked[FLASH2]
    bf16 = gpu_of((8, 0), precision=Fact("bf16", "Ampere"))
    asked = {one.name: one.usable for one in expected_attention(bf16, precision="float32")}
    assert (asked[FLASH2], asked["sdpa"]) == (False, True)


def test_a_kernel_for_generation_is_never_expected() -> None:
    assert expected(gpu_of((9, 0)))["kernels-community/paged-attention"] == AttentionBackend(
        "kernels-community/paged-attention",
        usable=False,
        packing="unknown",
        reason="expected: it is for generation and has no backward",
        expected=True,
    )


@pytest.mark.parametrize("name", ["flash-attn", "kernels-community/flash-attn2/build", "mine/", "mine/a b", ""])
def test_a_name_that_is_no_repository_is_rejected_with_the_forms_that_are_accepted(name: str) -> None:
    found = expected(gpu_of((8, 0)), asked=name)
    if not name:
        assert name not in found
        return
    assert not found[name].usable
    assert found[name].reason.endswith(f"nor the name of a kernel's repository, {FORMS}")


@pytest.mark.parametrize("name", ["mine/flash", "mine/flash@main", "mine/flash:forward", "mine/flash@main:forward"])
def test_a_kernel_that_is_not_listed_is_not_known(name: str) -> None:
    assert expected(gpu_of((8, 0)), asked=name)[name].reason == (
        "expected: not known: what this kernel is built for is not listed here"
    )


def test_other_accelerators_are_told_as_not_known() -> None:
    rocm = expected(parts.machine(backend="rocm"))
    assert rocm["flex_attention"].reason == "expected: not known on rocm"
    assert rocm[FLASH2].reason == "expected: needs a CUDA GPU"
    assert rocm["sdpa"].usable
    xpu = expected(parts.machine(backend="xpu"))
    assert xpu[FLASH2].reason == "expected: not known on xpu, where it has builds"
