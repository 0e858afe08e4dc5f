"""The model's probe: its size from its config alone, and errors in words for what cannot be read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.probe.model import ModelShape, probe_model

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def offline_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """Fresh processes that know no hub: what a library reads at import cannot be changed in a forked child."""
    cache = tmp_path_factory.mktemp("cache")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    with Children(environment, log=cache / "server.log", cold=True) as started:
        yield started


def model_folder(folder: Path, config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def test_a_model_is_sized_from_its_config_alone(children: Children, tmp_path: Path) -> None:
    assert probe_model(model_folder(tmp_path, QWEN3_0_6B), children=children) == ModelShape(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        parameters=596_049_920,  # what the hub shows for Qwen/Qwen3-0.6B, tied embeddings counted once
        layers=28,
        hidden_size=1024,
        vocabulary=151936,
        attention_heads=16,
        key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        linear_attention=False,
        dtype="bfloat16",
        intermediate_size=3072,
        tied_embeddings=True,
    )


def test_the_width_of_a_head_follows_from_the_hidden_size_where_it_is_not_told(
    children: Children, tmp_path: Path
) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_embd": 96, "n_head": 3}
    shape = probe_model(model_folder(tmp_path, config), children=children)
    assert (shape.head_dim, shape.attention_heads, shape.key_value_heads) == (32, 3, 3)
    assert (shape.layers, shape.max_position_embeddings, shape.dtype) == (2, 1024, None)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64},
        {
            "model_type": "qwen3_next", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64,
            "layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "num_experts_per_tok": 1,
        },
    ],
)  # fmt: skip
def test_a_model_that_carries_a_state_is_recognised(children: Children, tmp_path: Path, config: Any) -> None:
    assert probe_model(model_folder(tmp_path, config), children=children).linear_attention


def test_a_model_that_reads_images_has_the_size_of_its_language_model(children: Children, tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "text_config": {
            "model_type": "qwen2_5_vl_text", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 128, "intermediate_size": 64,
        },
        "vision_config": {"model_type": "qwen2_5_vl", "depth": 1, "hidden_size": 32, "out_hidden_size": 64},
    }  # fmt: skip
    shape = probe_model(model_folder(tmp_path, config), children=children)
    assert (shape.architecture, shape.layers, shape.hidden_size, shape.vocabulary) == (
        "Qwen2_5_VLForConditionalGeneration",
        3,
        64,
        128,
    )


@pytest.mark.parametrize(
    ("config", "what", "hint"),
    [
        ("{bad", "cannot be read: OSError", "config.json"),
        ({"model_type": "martian"}, "does not know the model type", "newer transformers"),
        ({"hidden_size": 3}, "cannot be read: ValueError", "config.json"),
        ({**QWEN3_0_6B, "hidden_size": "wide"}, "cannot be read", "config.json"),
        ({"model_type": "t5"}, "is a `t5`, which is no language model", "TRL trains"),
        ({**QWEN3_0_6B, "num_hidden_layers": 1, "vocab_size": -4}, "cannot be built from its config", "config"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_in_words(
    children: Children, tmp_path: Path, config: Any, what: str, hint: str
) -> None:
    with pytest.raises(AutotuneError) as raised:
        probe_model(model_folder(tmp_path, config), children=children)
    assert what in raised.value.what
    assert hint in raised.value.hint
    assert "Traceback" not in raised.value.what
    assert "\n" not in raised.value.what


def test_a_folder_that_is_not_there_is_named(children: Children, tmp_path: Path) -> None:
    with pytest.raises(AutotuneError, match=r"there is no model folder `.*/none`") as raised:
        probe_model(str(tmp_path / "none"), children=children)
    assert "relative paths" in raised.value.hint


def test_an_adapter_is_told_from_a_model(children: Children, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(AutotuneError, match=r"has no `config.json`") as raised:
        probe_model(str(tmp_path), children=children)
    assert "PEFT adapter" in raised.value.hint


def remote_model(folder: Path) -> str:
    """A model whose code leaves a mark when it runs."""
    (folder / "code.py").write_text(
        "from pathlib import Path\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        f"Path({str(folder / 'ran')!r}).touch()\n"
        "class MineConfig(Qwen3Config):\n    model_type = 'mine'\n"
        "class Mine(Qwen3ForCausalLM):\n    config_class = MineConfig\n"
    )
    auto_map = {"AutoConfig": "code.MineConfig", "AutoModelForCausalLM": "code.Mine"}
    return model_folder(folder, {**QWEN3_0_6B, "architectures": ["Mine"], "model_type": "mine", "auto_map": auto_map})


def test_a_models_own_code_does_not_run_unless_the_user_said_so(children: Children, tmp_path: Path) -> None:
    with pytest.raises(AutotuneError, match="its own code") as raised:
        probe_model(remote_model(tmp_path), children=children)
    assert "--trust_remote_code" in raised.value.hint
    assert not (tmp_path / "ran").exists()


def test_a_models_own_code_runs_when_the_user_trusts_it(children: Children, tmp_path: Path) -> None:
    shape = probe_model(remote_model(tmp_path), trust_remote_code=True, children=children)
    assert (shape.architecture, shape.parameters) == ("Mine", 596_049_920)


def test_offline_a_model_that_is_not_cached_is_an_error_with_a_hint(offline_children: Children) -> None:
    with pytest.raises(AutotuneError) as raised:
        probe_model("Qwen/Qwen3-0.6B", children=offline_children)
    assert raised.value.what == (
        "`Qwen/Qwen3-0.6B` is not in the local cache, and the hub is offline (`HF_HUB_OFFLINE` is set)"
    )
    assert "hf download Qwen/Qwen3-0.6B" in raised.value.hint


def test_a_cached_model_needs_no_network(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--some--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    model_folder(snapshot, QWEN3_0_6B)
    (tmp_path / "hub/models--some--model/refs").mkdir()
    (tmp_path / "hub/models--some--model/refs/main").write_text("abc")
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}  # nothing answers there
    with Children(environment, log=tmp_path / "server.log", cold=True) as cold:
        assert probe_model("some/model", children=cold).layers == 28
