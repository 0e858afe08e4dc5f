"""The child's side of turning many texts and chats into tokens at once, as TRL does one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from autotune.probe.tokenizer import Tokenizer

# Arguments of `apply_chat_template` that say something of the tokens, not of the text; per row TRL passes them on
ABOUT_TOKENS = frozenset(
    "tokenize return_dict padding truncation max_length return_tensors tokenizer_kwargs sanitize_control_tokens "
    "return_assistant_tokens_mask add_generation_prompt conversation".split()
)


class UnknownHereError(Exception):
    """Something that only TRL's own preparation knows how to do."""


class Marked(NamedTuple):
    """A chat's tokens and, for each, whether the assistant said it."""

    ids: list[int]
    said: list[int]


class Renderer:
    """Renders and encodes in batches: one call of the template's renderer, one of the encoder, without offsets.

    `template` stands in for the tokenizer's own, as TRL's training templates do. Raises UnknownHereError for a
    tokenizer that encodes by code of its own.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        kind = type(tokenizer.inner)
        if tokenizer.processing_class is not tokenizer.inner:
            raise UnknownHereError("a processor of images and text")
        if not issubclass(kind, TokenizersBackend):
            raise UnknownHereError("a slow tokenizer")
        for name, base in (
            ("_encode_plus", TokenizersBackend),
            ("__call__", PreTrainedTokenizerBase),
            ("apply_chat_template", PreTrainedTokenizerBase),
        ):
            if getattr(kind, name) is not getattr(base, name):
                raise UnknownHereError(f"the tokenizer's own `{name}`")
        self._inner = tokenizer.inner
        self._template = template
        self._backend = tokenizer.inner.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = tokenizer.inner.split_special_tokens

    def lengths(self, texts: Sequence[str], *, special: bool) -> list[int]:
        """How many tokens each text has; `special` adds what the tokenizer begins and ends plain text with."""
        return [len(encoding) for encoding in self._encoded(texts, special)]

    def ids(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """The tokens of each text."""
        return [encoding.ids for encoding in self._encoded(texts, special)]

    def _encoded(self, texts: Sequence[str], special: bool) -> Any:
        if not all(type(text) is str for text in texts):
            raise UnknownHereError("text that is none")
        # Without offsets: 1.3 times as fast
        return self._backend.encode_batch_fast(list(texts), add_special_tokens=special)

    def texts(
        self, chats: Sequence[Any], options: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> list[str]:
        """Each chat as text, with `options` of its row."""
        rendered = [""] * len(chats)
        for places in _alike(options):
            together = self._inner.apply_chat_template(
                [_messages(chats[place]) for place in places],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._arguments(options[places[0]]),
            )
            for place, text in zip(places, together, strict=True):
                rendered[place] = text
        return rendered

    def marked(self, chats: Sequence[Any], options: Sequence[Mapping[str, Any]]) -> list[Marked]:
        """Each chat's tokens with the assistant's marked, by `transformers`' own marking."""
        found: list[Marked | None] = [None] * len(chats)
        for places in _alike(options):
            together = self._inner.apply_chat_template(
                [_messages(chats[place]) for place in places],
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self._arguments(options[places[0]]),
            )
            for place, ids, said in zip(places, together["input_ids"], together["assistant_masks"], strict=True):
                found[place] = Marked(ids, said)
        return [each for each in found if each is not None]

    def _arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if ABOUT_TOKENS & set(options):
            raise UnknownHereError("`chat_template_kwargs` that are about tokens")
        return {"chat_template": self._template, **options}


def row_options(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each row gives to the chat template: its `tools` and `chat_template_kwargs` (TRL 1.16)."""
    tools = [row.get("tools") for row in rows]
    return [
        {"tools": json.loads(own) if isinstance(own, str) else own, **row.get("chat_template_kwargs", {})}
        for own, row in zip(tools, rows, strict=True)
    ]


def common_prefix(ids: list[int], longer: list[int]) -> int:
    """How many tokens both begin with: all of `ids` where a prompt ends on a token, which is compared at once."""
    from trl.data_utils import common_prefix_length

    if longer[: len(ids)] == ids:
        return len(ids)
    return int(common_prefix_length(ids, longer))


def _messages(chat: Any) -> Any:
    if not isinstance(chat, list) or not chat:
        raise UnknownHereError("a chat without messages")
    return chat


def _alike(options: Sequence[Mapping[str, Any]]) -> Iterable[list[int]]:
    """The places of rows that give the same to the template, which can be rendered in one call."""
    groups: dict[str, list[int]] = {}
    plain = {"tools": None}
    for place, own in enumerate(options):
        key = "" if own == plain else json.dumps(own, default=repr)
        groups.setdefault(key, []).append(place)
    return groups.values()
