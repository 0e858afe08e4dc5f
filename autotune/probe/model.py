"""What model a job trains: its architecture and size, read in a child from its config, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.children import Children

# An uncached model on a machine without network: huggingface_hub 2.4 retries for 23 s before it gives up.
DEADLINE_SECONDS = 120.0


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model's size. None: its config does not tell, as a model without attention has no heads.

    `parameters` counts tied weights once. `linear_attention`: some layers carry a state from token to token (linear
    attention, Mamba, RWKV), so packed documents may not be kept apart. `dtype` is that of the checkpoint.
    """

    architecture: str
    model_type: str
    parameters: int
    layers: int
    hidden_size: int
    vocabulary: int
    attention_heads: int | None
    key_value_heads: int | None
    head_dim: int | None
    max_position_embeddings: int | None
    linear_attention: bool
    dtype: str | None
    intermediate_size: int | None = None
    tied_embeddings: bool = False
    dropout: float = 0.0  # the largest rate of any dropout in the config
    router_loss: float | None = None  # weight of the experts' load-balancing loss; None for a model without a router


def probe_model(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    folder: Path | None = None,
    children: Children,
) -> ModelShape:
    """Read what `model` is: a folder, or a hub id that is in the cache or can be reached. About 0.2 s in a warm child.

    `folder` is where a relative path starts.
    The model's own code runs only with `trust_remote_code`, which is the user's to say. Raises AutotuneError with
    a hint when the model cannot be read.
    """
    request = {"model": model, "revision": revision, "trust_remote_code": trust_remote_code}
    answer = children.call(
        "autotune.probe.model:probe", request, deadline_seconds=DEADLINE_SECONDS, working_folder=folder
    )
    return msgspec.convert(answer, ModelShape)


def probe(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The child's side of `probe_model`."""
    import torch

    model: str = request["model"]
    config = read_config(model, revision=request["revision"], trust_remote_code=request["trust_remote_code"])
    architecture = model_class(config, model, trust_remote_code=request["trust_remote_code"])
    try:
        with torch.device("meta"):
            built = architecture._from_config(config)
    except Exception as error:
        raise AutotuneError(
            f"`{model}` cannot be built from its config: {first_line(error)}",
            hint="loading it for training would fail in the same way; check the config and the transformers version",
        ) from None
    text = config.get_text_config()
    heads = _whole(text, "num_attention_heads")
    shape = ModelShape(
        architecture=type(built).__name__,
        model_type=config.model_type,
        parameters=sum(parameter.numel() for parameter in built.parameters()),
        layers=_whole(text, "num_hidden_layers") or 0,
        hidden_size=_whole(text, "hidden_size") or 0,
        vocabulary=_whole(text, "vocab_size") or 0,
        attention_heads=heads,
        key_value_heads=_whole(text, "num_key_value_heads") or heads,
        head_dim=head_dim(text),
        max_position_embeddings=_whole(text, "max_position_embeddings"),
        linear_attention=_carries_state(text, type(built)),
        dtype=str(config.dtype).removeprefix("torch.") if config.dtype is not None else None,
        intermediate_size=_whole(text, "intermediate_size"),
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        dropout=_largest_dropout(text),
        router_loss=float(getattr(text, "router_aux_loss_coef", 0.0))
        if hasattr(text, "output_router_logits")
        else None,
    )
    return msgspec.structs.asdict(shape)


def _largest_dropout(config: Any) -> float:
    """Configs name their dropouts in many ways, all with `drop` or `pdrop` in the name."""
    rates = [value for name, value in vars(config).items() if "drop" in name and isinstance(value, int | float)]
    return max([0.0, *(float(rate) for rate in rates if not isinstance(rate, bool))])


def read_config(model: str, *, revision: str | None, trust_remote_code: bool) -> Any:
    """The transformers config of a folder or hub id; the cache first, so that a model in it needs no network.

    Raises AutotuneError. Runs in a child.
    """
    from transformers import AutoConfig

    folder = Path(model)
    local = folder.is_dir()
    if local and not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        raise AutotuneError(
            f"the folder `{model}` has no `config.json`, so it is no model",
            hint="it is a PEFT adapter: give the model that it was made for"
            if adapter
            else "give the folder that `save_pretrained` wrote, or a hub id such as `Qwen/Qwen3-0.6B`",
        )
    if not local and _looks_like_a_path(model):
        raise AutotuneError(
            f"there is no model folder `{model}`",
            hint="relative paths count from the folder where the command runs",
        )
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        try:
            return AutoConfig.from_pretrained(model, local_files_only=True, **options)
        except OSError:
            if local:
                raise
            return AutoConfig.from_pretrained(model, **options)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its own validation errors
        raise _unreadable(model, revision, error, local=local) from None


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or model in (".", "..")


def _unreadable(model: str, revision: str | None, error: Exception, *, local: bool) -> AutotuneError:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    said = str(error)
    if "trust_remote_code" in said:
        return AutotuneError(
            f"`{model}` comes with its own code, which would have to be run to load it",
            hint="read that code, and if you trust it add `--trust_remote_code`",
        )
    if "does not recognize this architecture" in said:
        from transformers import __version__

        return AutotuneError(
            f"transformers {__version__} does not know the model type of `{model}`: {first_line(error)}",
            hint="a newer transformers may know it; otherwise check `model_type` in its `config.json`",
        )
    if local or isinstance(error, ValueError):
        return AutotuneError(
            f"the config of `{model}` cannot be read: {first_line(error)}",
            hint="check its `config.json`",
        )
    if constants.HF_HUB_OFFLINE:
        return AutotuneError(
            f"`{model}` is not in the local cache, and the hub is offline (`HF_HUB_OFFLINE` is set)",
            hint=f"unset `HF_HUB_OFFLINE`, or fetch it where there is a network: `hf download {model}`",
        )
    causes = _causes(error)
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return AutotuneError(
            f"`{model}` is gated, and this machine has no access to it",
            hint=f"ask for access at {constants.ENDPOINT}/{model}, then `hf auth login`",
        )
    at = f" at revision `{revision}`" if revision else ""
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return AutotuneError(
            f"there is no folder and no hub model `{model}`{at}",
            hint="check the name; a private model needs `hf auth login`",
        )
    return AutotuneError(
        f"`{model}`{at} is not in the local cache and could not be read from {constants.ENDPOINT}: {first_line(error)}",
        hint="check the network and the name, or give the folder of a model that is here",
    )


def _causes(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def model_class(config: Any, model: str, *, trust_remote_code: bool) -> Any:
    """The class that TRL would load the model with: the first architecture of its config, or the causal language
    model of its type (TRL 1.16, `trl/trainer/utils.py`, `create_model_from_path`). Raises AutotuneError."""
    import transformers

    named = getattr(transformers, config.architectures[0], None) if config.architectures else None
    if named is not None:
        return named
    auto_map = getattr(config, "auto_map", None) or {}
    if trust_remote_code and "AutoModelForCausalLM" in auto_map:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(auto_map["AutoModelForCausalLM"], model)
    causal = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if causal is None:
        raise AutotuneError(
            f"`{model}` is a `{config.model_type}`, which is no language model that can be trained here",
            hint="TRL trains causal language models and models that read images and text",
        )
    return causal


def head_dim(text_config: Any) -> int | None:
    """Width of one attention head: the config's own, or the hidden size over the heads."""
    told = _whole(text_config, "head_dim")
    if told:
        return told
    hidden, heads = _whole(text_config, "hidden_size"), _whole(text_config, "num_attention_heads")
    return hidden // heads if hidden and heads else None


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)  # configs differ from model to model, and some hold a list per layer
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _carries_state(text_config: Any, architecture: Any) -> bool:
    # "hybrid" layers join attention and a state (transformers 5.22, configuration_utils.py, ALLOWED_ATTN_LAYER_TYPES)
    kinds = set(getattr(text_config, "layer_types", None) or ())
    return bool(getattr(architecture, "_is_stateful", False)) or any(
        kind in ("linear_attention", "mamba", "conv") or kind.startswith("hybrid") for kind in kinds
    )


def first_line(error: BaseException, *, limit: int = 200) -> str:
    """The kind of an error and the first sentence that it says, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0].partition(". ")[0][:limit].rstrip(".") if lines else ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
