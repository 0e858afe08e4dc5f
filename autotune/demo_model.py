"""The child's side of `--demo`: a tokenizer and a small random Qwen3, made here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotune import demo_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 2048
END = "<|im_end|>"
PAD = "<|endoftext|>"
START = "<|im_start|>"

# ChatML as Qwen writes it, with the answer marked so that `assistant_only_loss` works as well
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# 1.6 million parameters. On one core of an EPYC with AVX-512 a step of 8 conversations takes 0.64 s as TRL's defaults
# have it and 0.23 s as 2 x 4, rebalanced, without checkpointing; a model with no arithmetic to speak of 0.25 and 0.07.
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def make(request: dict[str, Any], folder: Path) -> None:
    """Write `model/` and `conversations.jsonl` into the folder `request["into"]`."""
    into = Path(request["into"])
    rows = demo_text.conversations()
    (into / "conversations.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    tokenizer = train_tokenizer([message.content for row in rows for message in row.messages], VOCABULARY)
    _save_tokenizer(tokenizer, into / "model")
    _save_model(tokenizer, into / "model")


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer of these texts; with few of them it has fewer entries than `vocabulary`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "user\nassistant\nsystem\n"], trainer)
    return tokenizer


def _save_tokenizer(tokenizer: Tokenizer, into: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MODEL["max_position_embeddings"],
    ).save_pretrained(into)


def _save_model(tokenizer: Tokenizer, into: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(demo_text.SEED)
    config = Qwen3Config(
        **MODEL,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    Qwen3ForCausalLM(config).save_pretrained(into)
