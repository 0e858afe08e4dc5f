"""TRL's own parser of each method's options. Runs in a child: TRL and transformers are imported here."""

from __future__ import annotations

import functools
import importlib
from typing import Any


def parser_of(method: str) -> Any:
    """TRL's own `make_parser`; for online DPO, which has no command, one in TRL's form (1.16, `scripts/dpo.py`)."""
    if method != "online_dpo":
        return importlib.import_module(f"trl.scripts.{method}").make_parser
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
    from trl.experimental.online_dpo import OnlineDPOConfig

    return functools.partial(TrlParser, (ScriptArguments, OnlineDPOConfig, ModelConfig, DatasetMixtureConfig))


def count_processes(given: Any) -> None:
    """Let TRL count the job's processes where it divides a generation batch among them (trl 1.16, `GRPOConfig`)."""
    from transformers import TrainingArguments

    if str(given).isdecimal() and int(given) > 1:
        TrainingArguments.world_size = property(lambda _: int(given))
