"""Which attention backends a machine that is not here would have, judged by the builds that are published.

Nothing is tried and nothing is fetched: the reasons start with `expected`, and with `expected: not known` where what
is published does not say.
"""

from __future__ import annotations

import msgspec
from packaging.version import InvalidVersion, Version

from autotune.probe.architectures import Capability, dotted, number, supports, version_pair
from autotune.probe.attention_names import (
    GENERATION_ONLY,
    HUB_KERNELS,
    NATIVE,
    PACKAGES,
    malformed,
    not_there,
    packing_of,
    repository,
    twin,
)
from autotune.probe.facts import Fact
from autotune.probe.machine import AttentionBackend, Machine
from autotune.probe.torch_builds import FLEX_ATTENTION, driver_refuses, torch_refuses
from autotune.probe.used import used_gpu
from autotune.probe.versions import known_kernels_bounds

# Triton supports 8.0 and newer (its README, "Compatibility"); torch refuses it below 7.0 (torch 2.13,
# `_inductor/scheduler.py`, GPUTooOldForTriton)
TRITON_SUPPORTS, TRITON_CAPABILITY = (8, 0), (7, 0)
NOT_TOLD = "not known: the compute capability of the GPU is not told"
GENERATES = "it is for generation and has no backward"
FLASH_ATTENTION_4_NEEDS = (
    "not known: whether einops, apache-tvm-ffi and nvidia-cutlass-dsl are installed there is not told; "
    "`pip install einops apache-tvm-ffi nvidia-cutlass-dsl`"
)


class Builds(msgspec.Struct, frozen=True):
    """What a hub kernel is built for on CUDA: the architectures, and the oldest CUDA version of torch; empty
    architectures for a kernel in Python, which is compiled where it runs."""

    architectures: tuple[str, ...]
    cuda: tuple[int, int] | None = None


# The `build.toml` of each kernel in the repository huggingface/kernels-community, as it was in November 2026.
PUBLISHED = {
    "kernels-community/flash-attn2": Builds(("8.0", "9.0", "10.0", "12.0")),
    "kernels-community/flash-attn3": Builds(("8.0", "9.0a"), cuda=(12, 8)),
    "kernels-community/vllm-flash-attn3": Builds(("8.0", "9.0a"), cuda=(12, 8)),
    "kernels-community/flash-attn4": Builds(()),
}

# Where else than on CUDA a hub kernel has builds (transformers 5.22.2, FLASH_ATTN_KERNEL_DEVICES); how good they are
# is not told.
OTHER_DEVICES = {"kernels-community/flash-attn2": ("xpu",)}


def expected_attention(
    machine: Machine, *, job_attention: str | None = None, precision: str | None = None
) -> tuple[AttentionBackend, ...]:
    """Each backend, `job_attention` among them, as it should be on `machine`, by the GPU that is used.

    `precision` is what the job's attention computes in (`autotune.plan.precision.attention_precision`), None for
    what the machine's jobs compute in.
    """
    names = dict.fromkeys([*NATIVE, *PACKAGES, *HUB_KERNELS, *([job_attention] if job_attention else [])])
    if precision is not None:
        fact = Fact(precision, machine.precision.reason)
        machine = msgspec.structs.replace(machine, precision=fact)
    return tuple(_expected(name, machine, job_attention) for name in names)


def _expected(name: str, machine: Machine, job_attention: str | None) -> AttentionBackend:
    usable, reason = _judged(name, machine, as_asked=name == job_attention)
    same = twin(name, job_attention, installed=lambda one: machine.versions.get(one.replace("-", "_")) is not None)
    if usable and same is not None:
        usable, reason = False, same
    return AttentionBackend(
        name=name, usable=usable, packing=packing_of(name), reason=f"expected: {reason}", expected=True
    )


def _judged(name: str, machine: Machine, *, as_asked: bool) -> tuple[bool, str]:
    wrong = malformed(name) if name.removeprefix("paged|") not in (*NATIVE, *PACKAGES) else None
    if wrong is not None:
        return False, wrong
    refused = gpu_refuses(machine)
    if refused is not None:
        return False, refused
    if name in ("sdpa", "eager"):
        return True, "runs wherever torch does"
    if name == "flex_attention":
        return _flex(machine)
    if name in PACKAGES:
        return _package(name, machine, as_asked=as_asked)
    if name.startswith("paged|"):  # for generation; transformers trains with what stands behind it
        return _judged(name.removeprefix("paged|"), machine, as_asked=as_asked)
    return _hub(name, machine)


def gpu_refuses(machine: Machine) -> str | None:
    """Why nothing at all runs on the CUDA GPU that is used; None where something does, or where that is not known."""
    if machine.backend != "cuda":
        return None
    return driver_refuses(machine.versions, machine.cuda_driver) or torch_refuses(
        machine.versions, _capability(machine)
    )


def _flex(machine: Machine) -> tuple[bool, str]:
    if machine.backend == "cpu":
        return False, "flex_attention has no backward on a CPU"  # torch 2.13, `_higher_order_ops/flex_attention.py`
    if machine.backend != "cuda":
        return False, f"not known on {machine.backend}"
    torch = version_pair(machine.versions.get("torch"))
    if torch is not None and torch < FLEX_ATTENTION:
        return False, f"it came with torch {dotted(FLEX_ATTENTION)}, and {machine.versions['torch']} is installed"
    refused = _too_weak(machine, TRITON_CAPABILITY, "Triton, which compiles it,")
    if refused is None and _too_weak(machine, TRITON_SUPPORTS, "Triton"):
        refused = f"not known: Triton, which compiles it, supports 8.0 and newer, and this is {_told(machine)}"
    return (False, refused) if refused else (True, f"Triton compiles it for {number(_capability(machine))}")


def _package(name: str, machine: Machine, *, as_asked: bool) -> tuple[bool, str]:
    package = PACKAGES[name]
    if machine.backend == "cpu":
        return False, "needs a CUDA GPU"
    if machine.backend != "cuda":
        return False, f"not known on {machine.backend}"
    unfit = package_unfit(name, _capability(machine))
    if unfit is not None:
        return False, unfit
    installed = machine.versions.get(package.distribution.replace("-", "_"))
    if installed is None:
        if as_asked:
            usable, reason = _hub(package.stand_in, machine)
            return usable, f"`{package.stand_in}` in place of the package `{package.distribution}`: {reason}"
        return False, not_there(name)
    refused = package_refuses(name, installed) or _precision_refuses(machine)
    return (False, refused) if refused else (True, f"`{package.distribution}` {installed} is there")


def package_refuses(name: str, installed: str) -> str | None:
    """Why transformers would not take the installed version of a FlashAttention package; None when it would."""
    package = PACKAGES[name]
    if package.lowest is None:
        return None
    try:
        fits = Version(installed) >= Version(package.lowest)
    except InvalidVersion:
        fits = False
    if fits:
        return None
    return f"transformers takes `{package.distribution}` {package.lowest} or newer, and {installed} is installed"


def package_unfit(name: str, capability: Capability | None) -> str | None:
    """Why a FlashAttention package has nothing for a GPU: it is the hub's kernel under another name, and built for the
    same."""
    package = PACKAGES[name]
    if capability is None:
        return NOT_TOLD
    if capability < package.capability:
        wants = f"`{package.distribution}` needs compute capability {dotted(package.capability)} or newer"
        return f"{wants}, and this is {dotted(capability)}"
    architectures = PUBLISHED[package.stand_in].architectures
    if supports(architectures, capability):
        return None
    return f"`{package.distribution}` is for {', '.join(architectures)}, and {number(capability)} runs none of these"


def _hub(name: str, machine: Machine) -> tuple[bool, str]:
    kernel = repository(name)
    if kernel == GENERATION_ONLY:
        return False, GENERATES
    if machine.backend != "cuda":
        if machine.backend in OTHER_DEVICES.get(kernel, ()):
            return False, f"not known on {machine.backend}, where it has builds"
        if kernel in PUBLISHED:
            return False, "needs a CUDA GPU"
        return False, f"not known on {machine.backend}"
    if kernel not in PUBLISHED or name != kernel:
        what = "this revision or function" if kernel in PUBLISHED else "this kernel"
        return False, f"not known: what {what} is built for is not listed here"
    refused = kernels_pair_refuses(machine.versions) or _precision_refuses(machine) or _build_refuses(kernel, machine)
    if refused:
        return False, refused
    return (
        True,
        f"it is built for {', '.join(PUBLISHED[kernel].architectures)}, which {number(_capability(machine))} runs",
    )


def kernels_pair_refuses(versions: dict[str, str | None]) -> str | None:
    """Why hub kernels would not load with these versions of transformers and kernels; None when they would."""
    transformers, kernels = versions.get("transformers"), versions.get("kernels")
    if transformers is None or kernels is None:
        missing = "kernels" if kernels is None else "transformers"
        if missing in versions:
            return f"`{missing}` is not installed"
        return f"not known: the version of `{missing}` is not told"
    bounds = known_kernels_bounds(transformers)
    if bounds is None:
        return f"not known: which kernels transformers {transformers} takes is not listed here"
    lowest, below = bounds
    try:
        fits = Version(lowest) <= Version(kernels) < Version(below)
    except InvalidVersion:
        fits = False
    if fits:
        return None
    takes = f"transformers {transformers} takes kernels {lowest} or newer and older than {below}"
    return f"{takes}, and {kernels} is installed"


def _build_refuses(kernel: str, machine: Machine) -> str | None:
    builds = PUBLISHED[kernel]
    if kernel == PACKAGES["flash_attention_4"].stand_in:
        weak = _too_weak(machine, PACKAGES["flash_attention_4"].capability, "FlashAttention 4")
        return weak or FLASH_ATTENTION_4_NEEDS
    capability = _capability(machine)
    if capability is None:
        return NOT_TOLD
    if not supports(builds.architectures, capability):
        return f"it is built for {', '.join(builds.architectures)}, and {number(capability)} runs none of these"
    torch_cuda = version_pair(machine.versions.get("torch_cuda"))
    if builds.cuda is not None:
        needed = dotted(builds.cuda)
        if torch_cuda is None:
            return f"not known: it needs a torch for CUDA {needed} or newer, and the version of torch's is not told"
        if torch_cuda < builds.cuda:
            return f"it needs a torch for CUDA {needed} or newer, and this one is for {dotted(torch_cuda)}"
    return None


def _precision_refuses(machine: Machine) -> str | None:
    return precision_refuses(machine.precision.value)


def precision_refuses(precision: str) -> str | None:
    """Why flash kernels do not run in this precision; None where they do. They have no float32, and float32 weights
    are cast for them only under autocast (transformers 5.22.2, `integrations/flash_attention.py`,
    `get_target_dtype`)."""
    if precision in ("bf16", "fp16"):
        return None
    return f"flash kernels take bf16 and fp16, and the precision is {precision}"


def _too_weak(machine: Machine, needed: Capability, who: str) -> str | None:
    capability = _capability(machine)
    if capability is None:
        return NOT_TOLD
    if capability >= needed:
        return None
    return f"{who} needs compute capability {dotted(needed)} or newer, and this is {dotted(capability)}"


def _told(machine: Machine) -> str:
    return dotted(_capability(machine) or (0, 0))


def _capability(machine: Machine) -> Capability | None:
    used = used_gpu(machine.gpus)
    return None if used is None else used.compute_capability
