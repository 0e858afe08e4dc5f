"""The TRL command to speed up: read, checked by TRL's own parser, written back."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Method = Literal["sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo"]


class Job(msgspec.Struct, frozen=True):
    """A TRL method with its options, as the user would give them to `trl`.

    `options` and `launcher` hold what was given in the YAML file or on the command line (which wins), TRL's own and
    `accelerate launch`'s apart; `resolved` holds every field of TRL's dataclasses as TRL's parser made them.
    """

    method: Method
    config_path: str | None
    config_text: str  # "" when there is no file
    command_line: dict[str, Any]  # name -> value, of what stood on the command line, launcher options included
    options: dict[str, Any]
    launcher: dict[str, Any]
    environment: dict[str, str]  # the YAML's `env:`
    folder: str  # where relative paths mean what they meant
    resolved: dict[str, Any]
    launch_environment: dict[str, str]  # what `accelerate launch` sets for the training process, by accelerate itself
    additions: dict[str, Any] = {}  # options this machine needs for the job to start at all, with `addition_reasons`
    addition_reasons: dict[str, str] = {}
