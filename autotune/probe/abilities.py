"""What the installed TRL and transformers can do that other versions cannot, asked of them in a child.

Ways of checkpointing differ with the versions and with the model, and some optimizers need a package of their own.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.probe.machine import Abilities
from autotune.probe.model import model_class, read_config

if TYPE_CHECKING:
    from autotune.children import Children

DEADLINE_SECONDS = 60.0


def probe_abilities(*, model: dict[str, Any] | None, folder: Path | None = None, children: Children) -> Abilities:
    """Ask the installed versions, for a model where one is given.

    `model`: `model`, `revision`, `trust_remote_code`, or None; a relative path starts at `folder`. About 0.2 s in a
    warm child. Raises AutotuneError when the model cannot be read.
    """
    answer = children.call(
        "autotune.probe.abilities:probe", model or {}, deadline_seconds=DEADLINE_SECONDS, working_folder=folder
    )
    return msgspec.convert(answer, Abilities)


def probe(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The child's side of `probe_abilities`."""
    from transformers import PreTrainedModel

    architecture: Any = PreTrainedModel
    blocks = True
    if request.get("model") is not None:
        trust = bool(request.get("trust_remote_code"))
        config = read_config(request["model"], revision=request.get("revision"), trust_remote_code=trust)
        architecture = model_class(config, request["model"], trust_remote_code=trust)
        blocks = _has_blocks(architecture, config)
    found = Abilities(checkpointing=_ways(architecture, blocks=blocks), optimizers=_optimizers())
    return msgspec.structs.asdict(found)


def _ways(architecture: Any, *, blocks: bool) -> tuple[str, ...]:
    if not architecture.supports_gradient_checkpointing and architecture.__name__ != "PreTrainedModel":
        return ()
    takes = inspect.signature(architecture.gradient_checkpointing_enable).parameters
    return (
        "full",
        *(["selective"] if _selective() else []),
        *(["every_n_layers"] if "every_n_layers" in takes and blocks else []),
        *(["offload"] if "offload" in takes else []),
    )


def _selective() -> bool:
    """TRL takes the key `selective` out of the options for the SFT trainer alone (1.16, `sft_trainer.py`)."""
    from trl import SFTTrainer

    return "enable_selective_activation_checkpointing" in SFTTrainer.__init__.__code__.co_names


def _has_blocks(architecture: Any, config: Any) -> bool:
    """Whether the model has the layers that `every_n_layers` counts; with others it would checkpoint all."""
    import torch
    from transformers.modeling_layers import GradientCheckpointingLayer

    with torch.device("meta"):
        model = architecture._from_config(config)
    return any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def _optimizers() -> tuple[str, ...]:
    """8-bit AdamW by the names of `optim`, whose packages are here (transformers 5.22, `trainer_optimizer.py`)."""
    from transformers.utils import is_bitsandbytes_available, is_torchao_available

    found = ["adamw_bnb_8bit"] if is_bitsandbytes_available() else []
    return (*found, *(["adamw_torch_8bit"] if is_torchao_available() else []))
