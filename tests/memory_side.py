"""Models whose memory can be measured on a CPU, and trials of them beside what the memory model says.

`measure` is the engine's side. The rest runs in children.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from autotune.trial import worker
from tests import tiny

if TYPE_CHECKING:
    from autotune.children import Children
    from autotune.plan.memory import MemoryModel
    from autotune.plan.space import Candidate

Case = tuple[str, dict[str, Any]]  # a shape, and options of the job


def _shape(vocabulary: int, hidden: int, layers: int, heads: int, key_value_heads: int, *, tied: bool = True) -> Any:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": 64,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
    }


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("qwen3", _shape(1000, 64, 2, 1, 1)),
    "wide": ("qwen3", _shape(8000, 1024, 4, 16, 8)),
    "deep": ("qwen3", _shape(4000, 384, 20, 6, 3)),
    "vocabulary": ("qwen3", _shape(151_936, 256, 2, 4, 2)),
    "untied": ("qwen3", _shape(32_000, 512, 4, 8, 4, tied=False)),
    "llama": ("llama", _shape(8000, 768, 6, 12, 12, tied=False)),
}

OPTIONS: dict[str, Any] = {
    "max_length": 256,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "packing": False,
    "attn_implementation": "sdpa",
    "bf16": False,
    "use_cpu": True,
    "dataloader_num_workers": 0,
    "num_cpu_threads_per_process": 1,
}
MEMORY_LIMIT_BYTES = 6 * 10**9  # other processes are there as well


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes above what the child held before its model: by the formula, and measured."""

    candidate: Candidate
    model: MemoryModel
    estimate_bytes: int
    measured_bytes: int
    peak_bytes: int
    outcome: str


def measure(shape: str, options: dict[str, Any], folder: Path, children: Children) -> Compared:
    """Three steps of TRL on the longest of 200 rows, by the real worker. Model and rows stay in `folder`."""
    from autotune.plan.axes import baseline_candidate
    from autotune.plan.data import Data
    from autotune.plan.memory import MemoryModel
    from autotune.plan.space import Axis, Choice, Space
    from autotune.probe.lengths import measure_lengths
    from autotune.probe.model import probe_model
    from autotune.search.measure import run_memory_trial
    from autotune.search.samples import draw_longest
    from autotune.search.setting import Setting
    from tests import parts

    job = _job(shape, options, folder, children)
    machine = parts.cpu_machine()
    model = probe_model(str(folder / shape), children=children)
    data = Data(job, measure_lengths(job.resolved, folder=folder, children=children), model)
    base = baseline_candidate(job, machine)
    names = ("arrangement", "attention", "checkpointing", "workers", "threads")
    axes = tuple(Axis(name, (Choice(getattr(base, name), "exact", "measured"),)) for name in names)
    run = folder / f"run-{len(list(folder.glob('run-*')))}"
    run.mkdir()
    setting = Setting(
        job=job,
        machine=machine,
        model=model,
        data=data,
        space=Space(base, axes, 1.0),
        children=children,
        folder=run,
        emit=lambda _event: None,
        budget_seconds=600.0,
        memory_limit_bytes=MEMORY_LIMIT_BYTES,
        worker="tests.memory_side:run",
    )
    result = run_memory_trial(setting, 0, base, draw_longest(setting, base), reason="measured")
    floor = json.loads((setting.trial_folder(0) / "floor.json").read_text())
    memory = MemoryModel(data, model, job, machine)
    peak = result.peak_bytes or 0
    return Compared(
        candidate=base,
        model=memory,
        estimate_bytes=memory.terms(base).total - floor,
        measured_bytes=peak - floor,
        peak_bytes=peak,
        outcome=result.outcome,
    )


def _job(shape: str, options: dict[str, Any], folder: Path, children: Children) -> Any:
    from autotune.job import read_job

    kind, config = SHAPES[shape]
    model = folder / shape
    if not model.exists():
        model.mkdir()
        request = {"model": str(model), "type": kind, "config": config}
        children.call("tests.memory_side:make_model", request, deadline_seconds=300)
    rows = folder / "rows.jsonl"
    if not rows.exists():
        lengths = tiny.lengths(200, seed=3, median=150, longest=512)
        tiny.write_rows(rows, [{"input_ids": [7 + place % 900 for place in range(length)]} for length in lengths])
    written = {
        "model_name_or_path": str(model),
        "datasets": [{"path": "json", "data_files": str(rows), "split": "train"}],
        "output_dir": str(folder / "output"),
        **OPTIONS,
        **options,
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(written))
    return read_job("sft", ["--config", "sft.yaml"], folder=folder, children=children, accelerator=False, cpu_bf16=True)


def make_model(request: dict[str, Any], folder: Path) -> None:
    """Write a model of `type` (qwen3 or llama) with random weights, of the config options `config`, in the folder
    `model`."""
    import torch
    import transformers

    target = Path(request["model"])
    tokenizer = tiny.make_tokenizer(target)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        request["type"],
        **request["config"],
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(tiny.END),
        pad_token_id=tokenizer.convert_tokens_to_ids(tiny.PAD),
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(target)


def saved_by_a_layer(request: dict[str, Any], folder: Path) -> float:
    """Bytes that one layer of a model of `config` saves for the backward pass of a batch of `rows` x `length`.

    The difference between three layers and two, parameters and what is saved twice left out. `dtype` of the weights,
    `autocast` to bf16, `lora` on the default targets, `padded`: the last token of the first row is padding.
    """
    three, two = (_saved(request, layers) for layers in (3, 2))
    return three - two


def _saved(request: dict[str, Any], layers: int) -> int:
    import peft
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(
        request["type"],
        **{**request["config"], "num_hidden_layers": layers},
        attn_implementation=request["attention"],
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, request["dtype"])).model
    if request["lora"]:
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_dropout=0.05))
    model.train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    alive = []  # a freed block's address could be given to the next tensor

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    rows, length = request["rows"], request["length"]
    mask = torch.ones(rows, length, dtype=torch.long)
    if request["padded"]:
        mask[0, -1] = 0
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=request["autocast"]),
    ):
        model(input_ids=torch.full((rows, length), 7), attention_mask=mask, use_cache=False)
    return sum(saved.values())


def run(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A trial by the real worker; the bytes resident before it are left in `floor.json`."""
    import torch  # noqa: F401  counted as what a child holds: the fork server has it

    (folder / "floor.json").write_text(json.dumps(resident_bytes()))
    return worker.run(request, folder)


def resident_bytes() -> int:
    """Bytes of this process that are in memory now (proc(5), `statm`)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
