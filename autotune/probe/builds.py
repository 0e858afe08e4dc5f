"""Which attention backends a machine that is not here would have, judged by the builds that are published.

Nothing is tried and nothing is fetched: the reasons start with `expected`, and with `expected: not known` where what
is published does not say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from packaging.version import InvalidVersion, Version

from autotune.probe.attention_names import (
    GENERATION_ONLY,
    HUB_KERNELS,
    NATIVE,
    PACKAGES,
    malformed,
    packing_of,
    repository,
)
from autotune.probe.machine import AttentionBackend, Machine
from autotune.probe.versions import known_kernels_bounds

Capability = tuple[int, int]

TRITON_CAPABILITY = (7, 0)  # torch 2.13, `_inductor/scheduler.py`, GPUTooOldForTriton
GENERATES = "it is for generation and has no backward"
FLASH_ATTENTION_4_NEEDS = "`einops`, `apache-tvm-ffi` and `nvidia-cutlass-dsl`"


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


def expected_attention(machine: Machine, *, job_attention: str | None = None) -> tuple[AttentionBackend, ...]:
    """Each backend, `job_attention` among them, as it should be on `machine`. The weakest GPU decides."""
    names = dict.fromkeys([*NATIVE, *PACKAGES, *HUB_KERNELS, *([job_attention] if job_attention else [])])
    return tuple(_expected(name, machine, as_asked=name == job_attention) for name in names)


def _expected(name: str, machine: Machine, *, as_asked: bool) -> AttentionBackend:
    usable, reason = _judged(name, machine, as_asked=as_asked)
    return AttentionBackend(
        name=name, usable=usable, packing=packing_of(name), reason=f"expected: {reason}", expected=True
    )


def _judged(name: str, machine: Machine, *, as_asked: bool) -> tuple[bool, str]:
    if name in ("sdpa", "eager"):
        return True, "runs wherever torch does"
    if name == "flex_attention":
        return _flex(machine)
    if name in PACKAGES:
        return _package(name, machine, as_asked=as_asked)
    if name.startswith("paged|"):  # for generation; transformers trains with what stands behind it
        return _judged(name.removeprefix("paged|"), machine, as_asked=as_asked)
    wrong = malformed(name)
    return (False, wrong) if wrong is not None else _hub(name, machine)


def _flex(machine: Machine) -> tuple[bool, str]:
    if machine.backend == "cpu":
        return False, "flex_attention has no backward on a CPU"  # torch 2.13, `_higher_order_ops/flex_attention.py`
    if machine.backend != "cuda":
        return False, f"not known on {machine.backend}"
    refused = _too_weak(machine, TRITON_CAPABILITY, "Triton, which compiles it,") or _driver_refuses(machine)
    return (False, refused) if refused else (True, f"Triton compiles it for {_number(_weakest(machine))}")


def _package(name: str, machine: Machine, *, as_asked: bool) -> tuple[bool, str]:
    package = PACKAGES[name]
    if machine.backend == "cpu":
        return False, "needs a CUDA GPU"
    if machine.backend != "cuda":
        return False, f"not known on {machine.backend}"
    installed = machine.versions.get(package.distribution.replace("-", "_"))
    if installed is None:
        if as_asked:
            usable, reason = _hub(package.stand_in, machine)
            return usable, f"`{package.stand_in}` in place of the package `{package.distribution}`: {reason}"
        return (
            False,
            f"the package `{package.distribution}` is not there; `{package.stand_in}` is the same from the hub",
        )
    refused = (
        package_refuses(name, installed)
        or _too_weak(machine, package.capability, f"`{package.distribution}`")
        or _precision_refuses(machine)
        or _driver_refuses(machine)
    )
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
        f"it is built for {', '.join(PUBLISHED[kernel].architectures)}, which {_number(_weakest(machine))} runs",
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
        return weak or f"not known: it is Python that needs {FLASH_ATTENTION_4_NEEDS}"
    capabilities = _capabilities(machine)
    if capabilities is None:
        return "not known: the compute capability of a GPU is not told"
    for capability in sorted(capabilities):
        if not supports(builds.architectures, capability):
            return f"it is built for {', '.join(builds.architectures)}, and {_number(capability)} runs none of these"
    torch_cuda = _pair(machine.versions.get("torch_cuda"))
    if builds.cuda is not None:
        needed = _dotted(builds.cuda)
        if torch_cuda is None:
            return f"not known: it needs a torch for CUDA {needed} or newer, and the version of torch's is not told"
        if torch_cuda < builds.cuda:
            return f"it needs a torch for CUDA {needed} or newer, and this one is for {_dotted(torch_cuda)}"
    return _driver_refuses(machine)


def _driver_refuses(machine: Machine) -> str | None:
    """A driver runs any CUDA of its own major version or an older one (CUDA's minor version compatibility)."""
    torch_cuda, driver = _pair(machine.versions.get("torch_cuda")), machine.cuda_driver
    if torch_cuda is None or driver is None or driver[0] >= torch_cuda[0]:
        return None
    return f"torch is built for CUDA {_dotted(torch_cuda)}, and the driver runs CUDA up to {_dotted(driver)}"


def _precision_refuses(machine: Machine) -> str | None:
    if machine.precision.value in ("bf16", "fp16"):
        return None
    return f"flash kernels take bf16 and fp16, and the precision is {machine.precision.value}"


def _too_weak(machine: Machine, needed: Capability, who: str) -> str | None:
    capabilities = _capabilities(machine)
    if capabilities is None:
        return "not known: the compute capability of a GPU is not told"
    weakest = min(capabilities)
    if weakest >= needed:
        return None
    return f"{who} needs compute capability {_dotted(needed)} or newer, and this is {_dotted(weakest)}"


def _capabilities(machine: Machine) -> list[Capability] | None:
    told = [gpu.compute_capability for gpu in machine.gpus if gpu.compute_capability is not None]
    return told if told and len(told) == len(machine.gpus) else None


def _weakest(machine: Machine) -> Capability:
    return min(_capabilities(machine) or [(0, 0)])


def _number(capability: Capability) -> str:
    return f"compute capability {_dotted(capability)}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _pair(version: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


def supports(architectures: Sequence[str], capability: Capability) -> bool:
    """Whether a build for these CUDA architectures runs on a GPU of this compute capability.

    kernels 0.17.2, `archs.py`, `_supports_cuda_capability`: `9.0a` runs on exactly that capability, `9.0` and `9.0f`
    on the same generation from that minor version on, `9.0+PTX` on anything newer; a list in no known form on all.
    """
    known = [runs for runs in (_runs(one, capability) for one in architectures) if runs is not None]
    return not known or any(known)


def _runs(architecture: str, capability: Capability) -> bool | None:
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", architecture)
    if match is None:
        return None
    built = (int(match.group(1)), int(match.group(2)))
    if match.group(3) == "a":
        return capability == built
    if match.group(4) and not match.group(3):
        return capability >= built
    return capability[0] == built[0] and capability[1] >= built[1]
