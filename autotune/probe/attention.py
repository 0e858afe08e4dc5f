"""Which attention backends work here: each is tried, forward and backward, on packed documents.

A name in a list proves nothing. Builds of a kernel have failed in backward for models whose heads share keys and
values, at the first step of a training, so a backend is tried with the model's own number and size of heads.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.errors import AutotuneError
from autotune.probe.attention_trial import Heads, Outcome, try_backend
from autotune.probe.machine import AttentionBackend, Backend, Machine
from autotune.probe.model import first_line

if TYPE_CHECKING:
    from autotune.children import Children

DENSE = "dense mask"
VARIABLE = "variable length"
UNKNOWN = "unknown"
WORKED = "ran forward and backward here on packed documents"

NATIVE = ("sdpa", "eager", "flex_attention")

# The distribution that each name stands for, and what runs in its place where that is not installed
# (transformers 5.22.2, modeling_flash_attention_utils.py, FLASH_ATTN_KERNEL_FALLBACK).
PACKAGES = {
    "flash_attention_2": ("flash-attn", "kernels-community/flash-attn2"),
    "flash_attention_3": ("flash-attn-3", "kernels-community/vllm-flash-attn3"),
    "flash_attention_4": ("flash-attn-4", "kernels-community/flash-attn4"),
}

# Hub kernels with builds for CUDA (the same file, FLASH_ATTN_KERNEL_DEVICES), in the order in which they are tried.
HUB_KERNELS = ("kernels-community/flash-attn2", "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3")

NATIVE_SECONDS = 60.0
KERNEL_SECONDS = 180.0  # a kernel may have to be downloaded, about 300 MB


def probe_attention(
    machine: Machine,
    *,
    job_attention: str | None,
    model: dict[str, Any] | None,
    folder: Path | None = None,
    children: Children,
) -> tuple[AttentionBackend, ...]:
    """Try each attention backend, `job_attention` among them, on the device that jobs would train on.

    `model` may tell `num_attention_heads`, `num_key_value_heads` and `head_dim`, or the `model` to read them from,
    with its `revision` and `trust_remote_code`; a relative path starts at `folder`. With `model` its class is asked
    what it supports, too: some have no sdpa, some run another kernel than the one named.

    On a CPU all are tried in one child (0.2 s when warm); on a GPU each kernel in a child of its own, so that one
    that crashes or hangs rejects itself only. Raises AutotuneError when the model cannot be read.
    """
    names = list(dict.fromkeys([*NATIVE, *PACKAGES, *HUB_KERNELS, *([job_attention] if job_attention else [])]))
    on_gpu = machine.backend != "cpu"
    groups = [["sdpa", "eager"], *([name] for name in names[2:])] if on_gpu else [names]
    found: list[AttentionBackend] = []
    for group in groups:
        request = {
            "names": group,
            "job_attention": job_attention,
            "backend": machine.backend,
            "precision": machine.precision.value,
            "model": model or {},
        }
        seconds = NATIVE_SECONDS if group[0] in NATIVE else KERNEL_SECONDS
        found += _call(children, group, request, seconds, folder=folder, one_may_fail=on_gpu and group[0] not in NATIVE)
    return tuple(found)


def _call(
    children: Children,
    group: list[str],
    request: dict[str, Any],
    seconds: float,
    *,
    folder: Path | None,
    one_may_fail: bool,
) -> list[AttentionBackend]:
    try:
        answer = children.call(
            "autotune.probe.attention:probe", request, deadline_seconds=seconds, working_folder=folder
        )
    except AutotuneError as error:
        if not one_may_fail:
            raise
        return [_rejected(name, error.what) for name in group]
    return msgspec.convert(answer, list[AttentionBackend])


def probe(request: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The child's side of `probe_attention`."""
    import torch

    torch.set_num_threads(1)  # the model is tiny: starting threads would take longer than it runs
    heads = Heads.of(request)
    judged = [_judge(name, heads, as_asked=name == request["job_attention"]) for name in request["names"]]
    return [msgspec.structs.asdict(backend) for backend in judged]


def _judge(name: str, heads: Heads, *, as_asked: bool) -> AttentionBackend:
    """`as_asked`: the job names this backend, so a stand-in that transformers puts in its place counts as it."""
    refusals: list[Callable[[], str | None]] = [lambda: _model_refuses(name, heads.architecture)]
    if name == "flex_attention":
        refusals.append(lambda: _flex_refuses(heads.device))
    elif name in PACKAGES:
        refusals.append(lambda: _package_refuses(name, heads.backend, as_asked=as_asked))
    elif "/" in name:
        refusals.append(lambda: _hub_refuses(name, heads.backend))
    for refusal in refusals:
        reason = refusal()
        if reason is not None:
            return _rejected(name, reason)
    outcome = try_backend(name, heads)
    return _rejected(name, outcome.failure) if outcome.failure is not None else _usable(name, outcome)


def _usable(name: str, outcome: Outcome) -> AttentionBackend:
    packing = _packing(outcome.actual)
    if packing == UNKNOWN and "flash" in outcome.actual:  # transformers gives those the documents' borders
        packing = VARIABLE
    reason = WORKED
    if outcome.actual != name:
        reason += f", as `{outcome.actual}`"
    if not outcome.apart:
        packing = UNKNOWN
        reason += ", which it does not keep apart"
    return AttentionBackend(name=name, usable=True, packing=packing, reason=reason)


def _rejected(name: str, reason: str) -> AttentionBackend:
    return AttentionBackend(name=name, usable=False, packing=_packing(name), reason=reason)


def _packing(name: str) -> str:
    if name in NATIVE:
        return DENSE
    return VARIABLE if name in PACKAGES or _repository(name) in HUB_KERNELS else UNKNOWN


def _repository(name: str) -> str:
    """`org/repo` of a hub kernel's name, `org/repo[@revision][:function]`."""
    return name.partition(":")[0].partition("@")[0]


def _model_refuses(name: str, architecture: Any) -> str | None:
    """What the model's class says of itself (transformers 5.22.2, `PreTrainedModel._supports_…`)."""
    if architecture is None:
        return None
    flash = "flash" in name  # transformers' own test (utils/generic.py, is_flash_attention_requested)
    only = getattr(architecture, "_compatible_flash_implementations", None)
    if flash and only and name not in only:
        return f"{architecture.__name__} would run `{only[0]}` instead"
    mark = "_supports_flash_attn" if flash else f"_supports_{name.replace('flex_attention', 'flex_attn')}"
    if name != "eager" and (flash or name in NATIVE) and not getattr(architecture, mark, False):
        return f"{architecture.__name__} does not support it"
    return None


def _flex_refuses(device: str) -> str | None:
    """Ask torch itself, without the compilation that transformers wraps around it (39 s of it on two CPU cores)."""
    if device not in ("cpu", "mps"):
        return None
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    heads = torch.zeros(1, 1, 16, 16, device=device, requires_grad=True)
    try:
        flex_attention(heads, heads, heads)
    except NotImplementedError:
        return f"flex_attention has no backward on {'a CPU' if device == 'cpu' else device}"
    return None


def _package_refuses(name: str, backend: Backend, *, as_asked: bool) -> str | None:
    distribution, stand_in = PACKAGES[name]
    if backend not in ("cuda", "rocm"):
        return "needs a CUDA GPU"
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        if as_asked:
            return _hub_refuses(stand_in, backend)
        return f"the package `{distribution}` is not installed; `{stand_in}` is the same from the hub"
    return None


def _hub_refuses(name: str, backend: Backend) -> str | None:
    from transformers.utils import is_kernels_available

    if not is_kernels_available():  # out of transformers' range counts as missing
        try:
            installed = importlib.metadata.version("kernels")
        except importlib.metadata.PackageNotFoundError:
            return "`kernels` is not installed"
        return f"the installed transformers does not take kernels {installed}"
    repository = _repository(name)
    if repository in _local_kernels():
        return None
    if backend != "cuda" and repository in (*HUB_KERNELS, *(stand_in for _, stand_in in PACKAGES.values())):
        return "needs a CUDA GPU"
    return _no_build(name)


def _local_kernels() -> Iterable[str]:
    """Repositories that `LOCAL_KERNELS` maps to folders: `org/repo=/folder:org/other=/folder`."""
    return [entry.partition("=")[0] for entry in os.environ.get("LOCAL_KERNELS", "").split(":")]


def _no_build(name: str) -> str | None:
    """Why the hub has no build of a kernel for this torch and this GPU; only its metadata is fetched."""
    import torch
    from kernels import has_kernel
    from transformers.integrations.hub_kernels import get_attn_kernel_version

    repository = _repository(name)
    _, _, revision = name.partition(":")[0].partition("@")
    which = {"revision": revision} if revision else {"version": get_attn_kernel_version(repository)}
    try:
        built = has_kernel(repository, **which)
    except Exception as error:  # the network, the cache, an untrusted publisher: kernels 0.17 has no error of its own
        return f"could not be looked up: {first_line(error)}"
    return None if built else f"no build for torch {torch.__version__} and this device"
