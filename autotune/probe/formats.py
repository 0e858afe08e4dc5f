"""What kind of data a row is, by TRL's rules, for each method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from autotune.errors import AutotuneError, NotYetError

Method = Literal["sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo"]
ONLINE: tuple[Method, ...] = ("grpo", "rloo", "online_dpo")

WANTED: dict[Method, str] = {
    "sft": "SFT reads `text` (or the column named by `dataset_text_field`), `messages`, `prompt` with `completion`, "
    "`conversations` of from/value pairs, or `input_ids`",
    "dpo": "DPO reads `chosen` and `rejected`, with a `prompt` or with one that both begin with",
    "kto": "KTO reads `prompt`, `completion` and `label` (true or false), or pairs of `chosen` and `rejected`",
    "reward": "the reward trainer reads `chosen` and `rejected`, with or without a `prompt`",
    "grpo": "GRPO reads `prompt`, as text or as a list of messages",
    "rloo": "RLOO reads `prompt`, as text or as a list of messages",
    "online_dpo": "online DPO reads `prompt`, as text or as a list of messages",
}
# What TRL's preparation looks at, besides the column named by `dataset_text_field`; any other is left unread
COLUMNS = frozenset(
    "prompt completion messages conversations chosen rejected label tools chat_template_kwargs input_ids labels "
    "completion_mask assistant_masks chosen_ids rejected_ids".split()
)


def format_of(row: Mapping[str, Any], text_field: str, method: Method = "sft") -> str:
    """What kind of data this is, by TRL's rules (1.16). Raises AutotuneError where the method has no use for it."""
    if "image" in row or "images" in row:
        raise NotYetError(
            "the data has images, which cannot be tuned yet",
            hint="drop the image column and keep the text, or train with `trl` as before: TRL packs no images, but "
            "padded batches work",
        )
    found = _sft_format(row, text_field) if method == "sft" else _other_format(row, method)
    if found is not None:
        return found
    columns = ", ".join(f"`{column}`" for column in row)
    raise AutotuneError(
        f"the data has no column that {_named(method)} can train on; it has {columns}", hint=_hint(row, method)
    )


def is_chat(data_format: str) -> bool:
    """Whether rows of this format go through the chat template."""
    return data_format in {"messages", "conversations"} or data_format.startswith("conversational")


def _sft_format(row: Mapping[str, Any], text_field: str) -> str | None:
    if "input_ids" in row:
        return "input_ids"
    if _pairs(row.get("conversations"), "from"):
        return "conversations"
    if "prompt" in row and "completion" in row:
        return "conversational prompt-completion" if _pairs(row["prompt"], "role") else "prompt-completion"
    if _pairs(row.get("messages"), "role"):
        return "messages"
    return "text" if text_field in row and "prompt" not in row else None


def _other_format(row: Mapping[str, Any], method: Method) -> str | None:
    if method == "reward" and {"chosen_ids", "rejected_ids"} <= set(row):
        return "chosen_ids"
    paired = "chosen" in row and "rejected" in row
    if method in {"dpo", "reward"} or (method == "kto" and paired):
        if not paired:
            return None
        chat = "conversational " if _pairs(row["chosen"], "role") else ""
        return f"{chat}{'pairs' if 'prompt' in row else 'pairs with an implicit prompt'}"
    if "prompt" not in row or (method == "kto" and not {"completion", "label"} <= set(row)):
        return None
    chat = "conversational " if _pairs(row["prompt"], "role") else ""
    return f"{chat}{'prompt-completion-label' if method == 'kto' else 'prompt'}"


def _named(method: Method) -> str:
    return "online DPO" if method == "online_dpo" else "the reward trainer" if method == "reward" else method.upper()


def _hint(row: Mapping[str, Any], method: Method) -> str:
    wanted = WANTED[method]
    if method != "sft":
        if "chosen" not in row and {"messages", "text", "completion"} & set(row):
            return f"this is data to imitate: `sft` trains on it. {wanted}"
        return wanted
    if "chosen" in row:
        return f"this is preference data: use `dpo` or `reward`. {wanted}"
    if "prompt" in row:
        return f"there is a `prompt` without a `completion`. {wanted}"
    if "messages" in row:
        return f"`messages` must be a list of objects with `role` and `content`. {wanted}"
    if "conversations" in row:
        return (
            "`conversations` must be a list of objects with `from` and `value`; with `role` and `content` call it "
            f"`messages`. {wanted}"
        )
    return wanted


def _pairs(value: Any, key: str) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and key in value[0]
