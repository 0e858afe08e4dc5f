"""`--demo`: made once, the same everywhere, never taken from half a build, and with lengths like real chat data."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune import demo_text
from autotune.children import Children
from autotune.demo import DemoFiles, build_demo, cache_folder


@pytest.fixture(scope="module")
def built(children: Children, tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    return build_demo(tmp_path_factory.mktemp("cache"), children, accelerator=False)


def contents(home: Path) -> dict[str, str]:
    return {
        str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.rglob("*"))
        if path.is_file() and path.suffix != ".yaml"  # the config names the folder
    }


def measure_tokens(request: dict[str, Any], folder: Path) -> list[int]:
    """In a child: each conversation's tokens, as TRL's template makes them."""
    import json

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    rows = [json.loads(line)["messages"] for line in Path(request["data"]).read_text().splitlines()]
    return [len(tokenizer.apply_chat_template(row)["input_ids"]) for row in rows]


def look_at_model(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """In a child: whether what TRL needs of the model and the tokenizer is there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    model = AutoModelForCausalLM.from_pretrained(request["model"])
    question = [{"role": "user", "content": "Why does everyone like the quiet moonboat?"}]
    encoded = tokenizer.apply_chat_template(
        [*question, {"role": "assistant", "content": "The moonboat hums."}],
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    answered = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    return {
        "parameters": model.num_parameters(),
        "vocabulary": [len(tokenizer), model.config.vocab_size],
        "end": [tokenizer.eos_token_id, model.config.eos_token_id],
        "padding": [tokenizer.pad_token_id, model.config.pad_token_id],
        "answer": tokenizer.decode(answered),
    }


def test_two_builds_are_identical(built: DemoFiles, children: Children, tmp_path: Path) -> None:
    again = build_demo(tmp_path, children, accelerator=False)

    assert contents(again.model.parent) == contents(built.model.parent)
    assert {"conversations.jsonl", "model/model.safetensors", "model/tokenizer.json"} <= set(
        contents(again.model.parent)
    )


def test_second_call_starts_no_child(built: DemoFiles, tmp_path: Path) -> None:
    unusable = Children({}, log=tmp_path / "missing" / "server.log")  # starting it would raise

    started = time.perf_counter()
    again = build_demo(built.model.parent.parent, unusable, accelerator=False)

    assert again == built
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize("name", ["complete.json", "conversations.jsonl", "model/model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_torn_build_is_made_again(built: DemoFiles, children: Children, tmp_path: Path, name: str, damage: str) -> None:
    shutil.copytree(built.model.parent, tmp_path / built.model.parent.name)
    torn = tmp_path / built.model.parent.name / name
    if damage == "missing":
        torn.unlink()
    else:
        os.truncate(torn, torn.stat().st_size // 2)

    again = build_demo(tmp_path, children, accelerator=False)

    assert contents(again.model.parent) == contents(built.model.parent)
    assert [path.name for path in tmp_path.iterdir()] == [built.model.parent.name]


def test_builds_at_the_same_time_leave_one_whole_build(built: DemoFiles, children: Children, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build_demo(tmp_path, children, accelerator=False), range(2))

    assert first == second
    assert contents(first.model.parent) == contents(built.model.parent)
    assert [path.name for path in tmp_path.iterdir()] == [first.model.parent.name]


def test_lengths_have_the_long_tail_of_chat_data(built: DemoFiles, children: Children) -> None:
    tokens = children.call(
        "tests.test_demo:measure_tokens",
        {"model": str(built.model), "data": str(built.data)},
        deadline_seconds=60,
    )

    assert len(tokens) == demo_text.ROWS
    percentiles = statistics.quantiles(tokens, n=100)
    assert percentiles[49] == pytest.approx(96, rel=0.15)
    assert percentiles[89] == pytest.approx(310, rel=0.15)
    assert percentiles[98] == pytest.approx(800, rel=0.15)
    assert 1500 < max(tokens) < 2048


def test_model_and_tokenizer_belong_together(built: DemoFiles, children: Children) -> None:
    facts = children.call("tests.test_demo:look_at_model", {"model": str(built.model)}, deadline_seconds=60)

    assert 1_000_000 < facts["parameters"] < 3_000_000
    assert facts["vocabulary"] == [2048, 2048]
    assert facts["end"][0] == facts["end"][1]
    assert facts["padding"][0] == facts["padding"][1] != facts["end"][0]
    assert facts["answer"] == "The moonboat hums.<|im_end|>"


def test_config_says_what_trl_needs_and_slows_nothing_down(built: DemoFiles, children: Children) -> None:
    config = yaml.safe_load(built.config.read_text())

    assert config == {
        "model_name_or_path": str(built.model),
        "datasets": [{"path": "json", "data_files": str(built.data)}],
        "max_length": 512,
        "num_train_epochs": 1,
        "output_dir": "trl-autotune-demo-output",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    with_accelerator = build_demo(built.model.parent.parent, children, accelerator=True)
    assert yaml.safe_load(with_accelerator.config.read_text()) == {
        name: value for name, value in config.items() if name not in {"use_cpu", "bf16"}
    }


def test_folder_with_awkward_name_survives_the_yaml(built: DemoFiles, children: Children, tmp_path: Path) -> None:
    folder = tmp_path / 'a "b": #c é'
    shutil.copytree(built.model.parent, folder / built.model.parent.name)

    config = yaml.safe_load(build_demo(folder, children, accelerator=False).config.read_text())

    assert config["model_name_or_path"] == str(folder / built.model.parent.name / "model")


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "trl-autotune"

    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says to ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "trl-autotune"
