"""Whether `model_init_kwargs: {use_kernels: true}` works here: layers replaced by kernels from the hub, tried.

With that option transformers replaces the layers that its default mapping has a kernel for, and keeps without a word
those for which there is none (5.22.2, `integrations/hub_kernels.py`, `kernelize`). So the layers that were replaced
are counted.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.children import ChildError
from autotune.probe.attention_trial import LIMITS, distance
from autotune.probe.hub_kernels import kernels_refusal, no_build
from autotune.probe.machine import Backend, LayerKernels, Machine
from autotune.probe.model import first_line, model_class, read_config

if TYPE_CHECKING:
    from autotune.children import Children

DEADLINE_SECONDS = 180.0  # kernels may have to be downloaded
TOKENS = 64
VOCABULARY = 256


def probe_layer_kernels(
    machine: Machine, *, model: dict[str, Any] | None, folder: Path | None = None, children: Children
) -> LayerKernels:
    """Look for the layers of a model that have kernels here, and run one layer of it with them and without.

    `model`: `model`, `revision`, `trust_remote_code`, or None; a relative path starts at `folder`. Takes 0.2 s in a
    warm child where there is nothing to try. Raises AutotuneError when the model cannot be read.
    """
    request = {"backend": machine.backend, "precision": machine.precision.value, **(model or {})}
    try:
        answer = children.call(
            "autotune.probe.layer_kernels:probe", request, deadline_seconds=DEADLINE_SECONDS, working_folder=folder
        )
    except ChildError as error:
        return LayerKernels(usable=False, reason=error.what)  # a kernel that crashes or hangs rejects itself
    return msgspec.convert(answer, LayerKernels)


def probe(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The child's side of `probe_layer_kernels`."""
    return msgspec.structs.asdict(_judged(request))


def _judged(request: dict[str, Any]) -> LayerKernels:
    from transformers.integrations import hub_kernels
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        return LayerKernels(False, kernels_refusal())
    if not hub_kernels._kernels_enabled:
        return LayerKernels(False, "switched off by `USE_HUB_KERNELS`")
    backend: Backend = request["backend"]
    mapped = _for_training(backend)
    if not mapped:
        return LayerKernels(False, _none_for(backend))
    if request.get("model") is None:
        return LayerKernels(False, "which layers have kernels depends on the model, and none was given")
    trust = bool(request.get("trust_remote_code"))
    config = read_config(request["model"], revision=request.get("revision"), trust_remote_code=trust)
    architecture = model_class(config, request["model"], trust_remote_code=trust)
    try:
        there = _layer_names(architecture, config)
    except Exception as error:
        return LayerKernels(False, f"its layers cannot be looked at: {first_line(error)}")
    names = sorted(there & mapped.keys())
    if not names:
        return LayerKernels(False, f"{architecture.__name__} has none of the layers with kernels for training here")
    without = {name: no_build(*_place(mapped[name])[:1], **_place(mapped[name])[1]) for name in names}
    if all(without.values()):
        reasons = "; ".join(f"{name}: {why}" for name, why in without.items())
        return LayerKernels(False, reasons, tuple(names))
    return _tried(architecture, config, backend, request["precision"])


def _for_training(backend: Backend) -> dict[str, Any]:
    """Layer names with the repository that has a kernel for training on this kind of device.

    A layer for training with `torch.compile` serves for training without, too; one for inference does not (kernels
    0.17.2, `layer/repos.py`, `_MODE_FALLBACK_PRIORITY`).
    """
    from kernels import Mode

    found: dict[str, Any] = {}
    for name, devices in _devices_of(backend).items():
        for modes in devices:
            if not isinstance(modes, dict):
                found[name] = modes
                continue
            for mode in (Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE, Mode.FALLBACK):
                if mode in modes:
                    found[name] = modes[mode]
                    break
    return found


def _devices_of(backend: Backend) -> dict[str, list[Any]]:
    """The default mapping's entries for this kind of device; those for one model of GPU alone are left out."""
    from transformers.integrations.hub_kernels import get_kernel_mapping_transformers

    mapping = get_kernel_mapping_transformers()
    there = {
        name: [entry for device, entry in devices.items() if device == backend] for name, devices in mapping.items()
    }
    return {name: entries for name, entries in there.items() if entries}


def _none_for(backend: Backend) -> str:
    for_inference = sorted(_devices_of(backend))
    where = "a CPU" if backend == "cpu" else backend
    also = f"; for inference alone it has {', '.join(for_inference)}" if for_inference else ""
    return f"the default mapping has no kernel for training on {where}{also}"


def _place(repository: Any) -> tuple[str, dict[str, Any]]:
    """The hub repository of a layer with its revision or version, which `kernels` keeps to itself (0.17.2,
    `layer/layer.py`, `LayerRepository`)."""
    return repository._repo_id, {"revision": repository._revision, "version": repository._version}


def _layer_names(architecture: Any, config: Any) -> set[str]:
    """The names by which the model's layers and functions can be replaced."""
    import torch

    with torch.device("meta"):
        model = architecture._from_config(config)
    return {name for name, _ in _replaceable(model)}


def _replaceable(model: Any) -> list[tuple[str, Any]]:
    found = []
    for module in model.modules():
        for one in (module, *getattr(module, "_kernel_funcs", {}).values()):
            name = getattr(type(one), "kernel_layer_name", None)
            if name is not None:
                found.append((str(name), one))
    return found


def _tried(architecture: Any, config: Any, backend: Backend, precision: str) -> LayerKernels:
    """One layer of the model, of its own width, forward and backward with kernels and without."""
    import torch

    arithmetic = "float32" if backend == "cpu" else precision
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(arithmetic, torch.float32)
    device = "cuda" if backend == "rocm" else backend
    step = "loading"
    try:
        torch.manual_seed(0)
        plain = architecture._from_config(_one_layer(config)).to(device=device, dtype=dtype).train()
        with_kernels = copy.deepcopy(plain)
        with_kernels.set_use_kernels(True)
        # `kernels` gives a layer that it replaces a forward of its own (0.17.2, `layer/layer.py`, `_replace_forward`)
        replaced = sorted({name for name, one in _replaceable(with_kernels) if _is_replaced(one)})
        if not replaced:
            return LayerKernels(False, "no layer was replaced: transformers kept its own for each")
        step = "forward or backward"
        tokens = {"input_ids": (torch.arange(TOKENS) % VOCABULARY).to(device)[None]}
        logits, gradients = distance(with_kernels, plain.float(), tokens)
    except Exception as error:  # whatever a kernel raises, it is the reason
        return LayerKernels(False, f"fails in {step}: {first_line(error)}")
    limit = LIMITS[arithmetic]
    for what, far in (("logits", logits), ("gradients", gradients)):
        if not far <= limit:
            reason = f"its {what} are {far:.1e} off those of plain layers in float32, at most {limit:.0e}"
            return LayerKernels(False, reason, tuple(replaced))
    return LayerKernels(
        True,
        f"ran forward and backward here; logits {logits:.1e} off those of plain layers in float32",
        tuple(replaced),
    )


def _is_replaced(layer: Any) -> bool:
    forward = getattr(layer.forward, "__func__", None)
    return forward is not None and forward is not type(layer).forward


def _one_layer(config: Any) -> Any:
    """The model's config with one layer of its own and a small vocabulary."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers = 1
    text.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    return small
