"""Which attention backends work here: each is tried, forward and backward, on packed documents.

A name in a list proves nothing. Builds of a kernel have failed in backward for models whose heads share keys and
values, at the first step of a training, so a backend is tried with the model's own number and size of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.errors import AutotuneError
from autotune.kernel_revision import LOCAL
from autotune.probe.attention_names import (
    CONTAMINATES,
    FLASH_KERNELS,
    HUB_KERNELS,
    NATIVE,
    PACKAGES,
    UNKNOWN,
    VARIABLE,
    malformed,
    not_there,
    packing_of,
    repository,
    twin,
)
from autotune.probe.attention_trial import TIMED_TOKENS, Heads, Outcome, try_backend
from autotune.probe.builds import package_refuses, package_unfit, precision_refuses
from autotune.probe.hub_kernels import hub_refuses
from autotune.probe.machine import AttentionBackend, Backend, Machine
from autotune.probe.torch_builds import architectures_of, build_refuses
from autotune.probe.versions import installed_version

if TYPE_CHECKING:
    from autotune.children import Children

WORKED = "ran forward and backward here on packed documents"

NATIVE_SECONDS = 60.0
COMPILED_SECONDS = 240.0  # flex_attention is compiled for each of two sizes, a minute each on a slow machine
KERNEL_SECONDS = 180.0  # a kernel may have to be downloaded, about 300 MB


def probe_attention(
    machine: Machine,
    *,
    job_attention: str | None,
    model: dict[str, Any] | None,
    precision: str | None = None,
    folder: Path | None = None,
    children: Children,
) -> tuple[AttentionBackend, ...]:
    """Try each attention backend, `job_attention` among them, on the device that jobs would train on.

    `model` may tell `num_attention_heads`, `num_key_value_heads` and `head_dim`, or the `model` to read them from,
    with its `revision` and `trust_remote_code`; a relative path starts at `folder`. With `model` its class is asked
    what it supports, too: some have no sdpa, some run another kernel than the one named.

    `precision` is what the job's attention computes in, None for what the machine's jobs compute in; flash kernels are
    not tried in float32, which they do not have.

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
            "precision": precision or machine.precision.value,
            "model": model or {},
        }
        one_may_fail = on_gpu and group[0] not in ("sdpa", "eager")
        found += _call(children, group, request, _deadline(group[0]), folder=folder, one_may_fail=one_may_fail)
    return tuple(found)


def _deadline(name: str) -> float:
    if name == "flex_attention":
        return COMPILED_SECONDS
    return NATIVE_SECONDS if name in NATIVE else KERNEL_SECONDS


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
        return [_rejected(name, Outcome(failure=error.what)) for name in group]
    return msgspec.convert(answer, list[AttentionBackend])


def probe(request: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The child's side of `probe_attention`."""
    import torch

    torch.set_num_threads(1)  # the model is tiny: starting threads would take longer than it runs
    heads = Heads.of(request)
    asked = request["job_attention"]
    judged = [_same_as(name, asked) or _judge(name, heads, as_asked=name == asked) for name in request["names"]]
    return [msgspec.structs.asdict(backend) for backend in judged]


def _same_as(name: str, asked: str | None) -> AttentionBackend | None:
    same = twin(name, asked, installed=lambda distribution: installed_version(distribution) is not None)
    return None if same is None else _rejected(name, Outcome(failure=same))


def _judge(name: str, heads: Heads, *, as_asked: bool) -> AttentionBackend:
    """`as_asked`: the job names this backend, so a stand-in that transformers puts in its place counts as it."""
    refusals: list[Callable[[], str | None]] = [lambda: _model_refuses(name, heads.architecture)]
    if name == "flex_attention":
        refusals.append(lambda: _flex_refuses(heads.device))
    elif name in PACKAGES:
        refusals.append(lambda: _package_refuses(name, heads.backend, as_asked=as_asked))
    elif name not in NATIVE and not _is_known(name):
        refusals = [lambda: malformed(name), *refusals, lambda: hub_refuses(name, heads.backend)]
    if heads.backend != "cpu" and (name in PACKAGES or repository(name) in FLASH_KERNELS):
        refusals.insert(0, lambda: precision_refuses(heads.precision))
    if heads.backend == "cuda":
        refusals.insert(0, _torch_refuses)
    for refusal in refusals:
        reason = refusal()
        if reason is not None:
            return _rejected(name, Outcome(failure=reason))
    outcome = try_backend(name, heads)
    return _rejected(name, outcome) if outcome.failure is not None else _usable(name, outcome, heads)


def _is_known(name: str) -> bool:
    """Whether transformers has the implementation itself, as it has `paged|sdpa`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return name.removeprefix("paged|") in ALL_ATTENTION_FUNCTIONS.valid_keys()


def _usable(name: str, outcome: Outcome, heads: Heads) -> AttentionBackend:
    packing = packing_of(outcome.actual)
    if packing == UNKNOWN and "flash" in outcome.actual:  # transformers gives those the documents' borders
        packing = VARIABLE
    reason = WORKED
    if outcome.actual != name:
        reason += f", as `{outcome.actual}`"
    if outcome.revision is not None:
        reason += ", from a folder here" if outcome.revision == LOCAL else f", revision {outcome.revision[:12]}"
    if not outcome.apart:
        packing = CONTAMINATES
        reason += ", which it does not keep apart"
    tokens = sum(TIMED_TOKENS[heads.size])
    took = f"{outcome.milliseconds:.2f} ms" if outcome.milliseconds is not None else f"no time ({outcome.untimed})"
    reason += f"; {took} for {tokens:,} tokens; logits {outcome.error or 0.0:.1e} off sdpa's in float32"
    return AttentionBackend(
        name=name,
        usable=True,
        packing=packing,
        reason=reason,
        milliseconds=outcome.milliseconds,
        error=outcome.error,
        revision=outcome.revision,
    )


def _rejected(name: str, outcome: Outcome) -> AttentionBackend:
    return AttentionBackend(
        name=name, usable=False, packing=packing_of(name), reason=outcome.failure or "", error=outcome.error
    )


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
    package = PACKAGES[name]
    if backend not in ("cuda", "rocm"):
        return "needs a CUDA GPU"
    installed = installed_version(package.distribution)
    if installed is None:
        if as_asked:
            return hub_refuses(package.stand_in, backend)
        return not_there(name)
    return package_refuses(name, installed) or _package_unfit(name, backend)


def _package_unfit(name: str, backend: Backend) -> str | None:
    """transformers 5.22.2 asks for the capability only where the package is missing (`modeling_utils.py`,
    `_flash_attn_import_error`); with it, the first step of a training would fail."""
    import torch

    if backend != "cuda" or not torch.cuda.device_count():
        return None
    return package_unfit(name, torch.cuda.get_device_capability(0))


def _torch_refuses() -> str | None:
    """Why torch has nothing that runs on this GPU, asked of torch itself; None where it has."""
    import torch

    if not torch.cuda.is_available():
        return None  # trying says why
    built_for = architectures_of(torch.cuda.get_arch_list())
    return build_refuses(torch.__version__, built_for, torch.cuda.get_device_capability(0))
