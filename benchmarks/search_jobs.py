"""The jobs that sweeps are made of: small models with random weights and data of three kinds, for a CPU.

The files of a job are made by a child, since this takes transformers; paths in its config are relative to its folder,
so that a recorded table names nobody's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from autotune import demo_text
from autotune.child import write_whole
from autotune.children import Children
from autotune.demo_model import CHAT_TEMPLATE, END, PAD, train_tokenizer

# GSM8K's test problems (MIT licence, OpenAI 2021), which are no part of this project
PROBLEMS = Path(__file__).parents[2] / "shared" / "data" / "gsm8k-test.jsonl"
BUILD_SECONDS = 120.0
SEED = 5

CONFIG = """\
model_name_or_path: model
datasets: [{path: json, data_files: rows.jsonl, split: train}]
num_train_epochs: 1
output_dir: output
report_to: none
use_cpu: true
bf16: false
"""


class SearchJob(msgspec.Struct, frozen=True, kw_only=True):
    """`axes` are swept, on others the job's own choice stays; `needs` is a file without which there is no job."""

    name: str
    about: str
    options: str  # of its config, beside `CONFIG`
    model_type: str
    vocabulary: int
    shape: dict[str, int]
    axes: tuple[str, ...]
    needs: Path | None = None

    @property
    def config(self) -> str:
        return CONFIG + self.options


JOBS = {
    job.name: job
    for job in (
        SearchJob(
            name="chat",
            about="Qwen3, conversations with a long tail (log-normal, median 96 tokens), 8 x 1",
            options="max_length: 512\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 1\n",
            model_type="qwen3",
            vocabulary=2048,
            shape={
                "hidden_size": 64,
                "intermediate_size": 160,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
            axes=("arrangement", "attention", "checkpointing", "workers", "threads"),
        ),
        SearchJob(
            name="problems",
            about="Llama, GSM8K's problems as prompt and completion, 4 x 4",
            options="max_length: 384\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 4\n",
            model_type="llama",
            vocabulary=2048,
            shape={
                "hidden_size": 48,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
            },
            axes=("arrangement", "attention", "checkpointing", "threads"),
            needs=PROBLEMS,
        ),
        SearchJob(
            name="long",
            about="Qwen2 with a vocabulary of 8192, texts of nearly one length (about 229 tokens), 2 x 4",
            options="max_length: 232\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n",
            model_type="qwen2",
            vocabulary=8192,
            shape={
                "hidden_size": 64,
                "intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            axes=("arrangement", "attention", "checkpointing", "threads"),
        ),
    )
}


def build(job: SearchJob, folder: Path, children: Children) -> None:
    """Write the job's model and rows into `folder`, which has its config, unless they are there. Raises ChildError."""
    whole = folder / "complete.json"
    if whole.exists() and json.loads(whole.read_text()) == msgspec.to_builtins(job, enc_hook=str):
        return
    children.call(
        "benchmarks.search_jobs:make", {"name": job.name, "into": str(folder)}, deadline_seconds=BUILD_SECONDS
    )
    write_whole(whole, msgspec.json.encode(job, enc_hook=str))


def make(request: dict[str, Any], _folder: Path) -> None:
    """The child's side of `build`."""
    job, into = JOBS[request["name"]], Path(request["into"])
    rows = list(ROWS[job.name]())
    (into / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    texts = [text for row in rows for text in _texts(row)]
    tokenizer = _tokenizer(texts, job.vocabulary, into / "model")
    _model(job, tokenizer, into / "model")


def _chat() -> Iterable[dict[str, Any]]:
    return (msgspec.to_builtins(row) for row in demo_text.conversations())


def _problems() -> Iterable[dict[str, Any]]:
    for line in PROBLEMS.read_text("utf-8").splitlines():
        row = json.loads(line)
        yield {"prompt": row["question"], "completion": row["answer"]}


def _long() -> Iterable[dict[str, Any]]:
    """What the demo's conversations say, end to end, cut into texts of nearly the same number of words."""
    chance = random.Random(SEED)
    words = [word for row in demo_text.conversations() for message in row.messages for word in message.content.split()]
    start = 0
    for _ in range(800):
        count = round(chance.gauss(198, 3))  # about 1.16 tokens a word
        yield {"text": " ".join(words[start : start + count])}
        start += count


ROWS = {"chat": _chat, "problems": _problems, "long": _long}


def _texts(row: dict[str, Any]) -> list[str]:
    if "messages" in row:
        return [message["content"] for message in row["messages"]]
    return [row["text"]] if "text" in row else [row["prompt"], row["completion"]]


def _tokenizer(texts: list[str], vocabulary: int, into: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(texts, vocabulary),
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )
    fast.save_pretrained(into)
    return fast


def _model(job: SearchJob, tokenizer: Any, into: Path) -> None:
    """The vocabulary is as asked for also where the texts gave the tokenizer fewer tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        job.model_type,
        **job.shape,
        vocab_size=job.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(into)
