"""The attention probe: what is offered has run forward and backward on packed documents; the rest has its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.probe.attention import HUB_KERNELS, PACKAGES, WORKED, probe_attention
from autotune.probe.machine import AttentionBackend, Machine, probe_machine

GROUPED = {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64}


@pytest.fixture(scope="module")
def cpu() -> Machine:
    """This machine, as jobs see it that may use no GPU."""
    return probe_machine({"CUDA_VISIBLE_DEVICES": ""})


def probed(
    machine: Machine, children: Children, *, asked: str | None = None, model: dict[str, Any] | None = None
) -> dict[str, AttentionBackend]:
    return {one.name: one for one in probe_attention(machine, job_attention=asked, model=model, children=children)}


def test_sdpa_and_eager_are_run_forward_and_backward_on_a_cpu(cpu: Machine, children: Children) -> None:
    found = probed(cpu, children, model=GROUPED)
    assert found["sdpa"] == AttentionBackend("sdpa", True, "dense mask", WORKED)
    assert found["eager"] == AttentionBackend("eager", True, "dense mask", WORKED)


def test_every_backend_that_does_not_work_on_a_cpu_says_why(cpu: Machine, children: Children) -> None:
    found = probed(cpu, children)
    assert found["flex_attention"] == AttentionBackend(
        "flex_attention", False, "dense mask", "flex_attention has no backward on a CPU"
    )
    for name in (*PACKAGES, *HUB_KERNELS):
        assert found[name] == AttentionBackend(name, False, "variable length", "needs a CUDA GPU")


def test_flex_attention_fails_in_backward_on_a_cpu_as_the_reason_says() -> None:
    code = """
import torch
from torch.nn.attention.flex_attention import flex_attention
heads = torch.zeros(1, 1, 16, 16, requires_grad=True)
try:
    torch.compile(flex_attention)(heads, heads, heads).sum().backward()
except NotImplementedError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("FlexAttention does not support backward on CPU")


def test_the_whole_probe_takes_less_than_two_seconds_in_a_warm_child(cpu: Machine, children: Children) -> None:
    children.call("autotune.probe.attention:probe", request_for([]), deadline_seconds=60)  # wait for the server
    begin = time.perf_counter()
    probed(cpu, children, model=GROUPED)
    assert time.perf_counter() - begin < 2.0


def request_for(names: list[str]) -> dict[str, Any]:
    return {"names": names, "job_attention": None, "backend": "cpu", "precision": "float32", "model": {}}


def test_a_name_that_transformers_does_not_know_is_rejected_with_its_words(cpu: Machine, children: Children) -> None:
    found = probed(cpu, children, asked="sdpa_paged")["sdpa_paged"]
    assert not found.usable
    assert found.reason == (
        'fails in loading: ValueError: Specified `attn_implementation="sdpa_paged"` is not supported'
    )


def test_a_name_that_stands_for_another_backend_says_so(cpu: Machine, children: Children) -> None:
    found = probed(cpu, children, asked="paged|sdpa")["paged|sdpa"]
    assert found == AttentionBackend("paged|sdpa", True, "dense mask", f"{WORKED}, as `sdpa`")


def test_the_known_kernels_stay_known_at_a_revision(cpu: Machine, children: Children) -> None:
    name = "kernels-community/flash-attn2@v2"
    assert probed(cpu, children, asked=name)[name] == AttentionBackend(
        name, False, "variable length", "needs a CUDA GPU"
    )


def test_a_backend_that_the_models_class_does_not_support_is_rejected(
    cpu: Machine, children: Children, tmp_path: Path
) -> None:
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_attention_heads": 8, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = probed(cpu, children, model={"model": str(tmp_path)})
    assert found["sdpa"] == AttentionBackend("sdpa", False, "dense mask", "GptOssForCausalLM does not support it")
    assert found["flash_attention_2"].reason.startswith("GptOssForCausalLM would run `")
    assert found["eager"].usable


def test_a_model_that_cannot_be_read_is_an_error_with_a_hint(cpu: Machine, children: Children, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(AutotuneError, match=r"the folder `empty` has no `config.json`"):
        probe_attention(cpu, job_attention=None, model={"model": "empty"}, folder=tmp_path, children=children)


def test_on_a_gpu_a_kernel_that_ends_its_child_rejects_itself_only(cpu: Machine, children: Children) -> None:
    """A machine that says it has a GPU, and a child that finds none: every kernel fails, and none takes the rest."""
    claimed = msgspec.structs.replace(cpu, backend="cuda")
    found = probe_attention(claimed, job_attention=None, model=GROUPED, children=children)
    assert [one.name for one in found] == ["sdpa", "eager", "flex_attention", *PACKAGES, *HUB_KERNELS]
    if cpu.versions["torch_cuda"] is None:
        assert not any(one.usable for one in found)
        assert found[0].reason.startswith("fails in loading: AssertionError: Torch not compiled with CUDA enabled")
    assert all(one.reason for one in found)


# a kernel of the user's own, in a folder

VARLEN = """
import torch

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *others, causal=False, softmax_scale=None, **rest):
    pieces = []
    borders = {borders}
    for begin, end in zip(borders[:-1], borders[1:]):
        one = [part[begin:end].transpose(0, 1)[None] for part in (q, k, v)]
        {before}
        pieces.append(torch.nn.functional.scaled_dot_product_attention(
            *one, is_causal=causal, scale=softmax_scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(pieces)

def flash_attn_func(q, k, v, causal=False, softmax_scale=None, **rest):
    raise RuntimeError("documents were not packed")
"""
APART = "cu_seqlens_q.tolist()"
MIXED = "[0, q.shape[0]]"


def kernel_of(folder: Path, *, borders: str = APART, before: str = "pass") -> Children:
    """Children that see the kernel `mine/flash` in a folder, in plain torch."""
    build = folder / "build/torch-universal"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text(VARLEN.format(borders=borders, before=before))
    metadata = {"name": "flash", "id": "_flash", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (build / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": "cpu"}}))
    environment = {**os.environ, "LOCAL_KERNELS": f"mine/flash={folder}", "HF_HUB_OFFLINE": "1"}
    return Children(environment, log=folder / "server.log", cold=True)


def test_a_kernel_in_a_folder_is_tried_with_shared_heads(cpu: Machine, tmp_path: Path) -> None:
    with kernel_of(tmp_path) as children:
        found = probed(cpu, children, asked="mine/flash", model=GROUPED)["mine/flash"]
    assert found == AttentionBackend("mine/flash", True, "variable length", WORKED)


def test_a_kernel_that_mixes_packed_documents_is_told(cpu: Machine, tmp_path: Path) -> None:
    with kernel_of(tmp_path, borders=MIXED) as children:
        found = probed(cpu, children, asked="mine/flash", model=GROUPED)["mine/flash"]
    assert found == AttentionBackend("mine/flash", True, "unknown", f"{WORKED}, which it does not keep apart")


def test_a_kernel_that_fails_in_backward_is_rejected_with_its_error(cpu: Machine, tmp_path: Path) -> None:
    raising = "one[0].register_hook(lambda gradient: (_ for _ in ()).throw(RuntimeError('no such head size. More')))"
    with kernel_of(tmp_path, before=raising) as children:
        found = probed(cpu, children, asked="mine/flash", model=GROUPED)["mine/flash"]
    assert not found.usable
    assert found.reason == "fails in backward: RuntimeError: no such head size"


def test_the_heads_are_read_from_the_model(cpu: Machine, tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 48,
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    raising = "raise RuntimeError(f'heads {q.shape[1]} {k.shape[1]} {q.shape[2]}')"
    with kernel_of(tmp_path, before=raising) as children:
        found = probed(cpu, children, asked="mine/flash", model={"model": str(tmp_path / "model")})["mine/flash"]
    assert found.reason == "fails in forward: RuntimeError: heads 6 3 48"
