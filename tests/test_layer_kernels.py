"""Layer kernels: what would be replaced, why not, and whether it computes the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.children import Children
from autotune.probe.layer_kernels import probe, probe_layer_kernels
from autotune.probe.machine import LayerKernels
from tests import parts, tiny

NORM = """
import torch

class Norm(torch.nn.Module):
    def forward(self, hidden_states):
        variance = hidden_states.float().pow(2).mean(-1, keepdim=True)
        return {factor} * self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("model"))


def write_kernel(folder: Path, *, factor: float = 1.0) -> Path:
    """A kernel repository with one layer, in plain torch."""
    build = folder / "build/torch-universal"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text("from . import layers\n")
    (build / "layers.py").write_text(NORM.format(factor=factor))
    metadata = {"name": "norm", "id": "_norm", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (build / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": "cpu"}}))
    return folder


def probe_with_norm(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`probe` where the default mapping has a kernel for RMSNorm on a CPU."""
    os.environ["LOCAL_KERNELS"] = f"mine/norm={request['kernel']}"
    from kernels import LayerRepository, Mode
    from transformers.integrations import hub_kernels

    repository = LayerRepository("mine/norm", layer_name="Norm", revision="v1")
    hub_kernels._KERNEL_MAPPING_CACHE = {request.get("layer", "RMSNorm"): {"cpu": {Mode.TRAINING: repository}}}
    return probe(request, folder)


def with_norm(children: Children, model: Path, kernel: Path, **more: Any) -> LayerKernels:
    request = {"backend": "cpu", "precision": "float32", "model": str(model), "kernel": str(kernel), **more}
    answer = children.call("tests.test_layer_kernels:probe_with_norm", request, deadline_seconds=60)
    return msgspec.convert(answer, LayerKernels)


def test_on_a_cpu_the_default_mapping_has_none_for_training(children: Children, model: Path) -> None:
    assert probe_layer_kernels(parts.cpu_machine(), model={"model": str(model)}, children=children) == LayerKernels(
        False,
        "the default mapping has no kernel for training on a CPU; for inference alone it has MegaBlocksMoeMLP",
    )


def test_a_layer_that_is_replaced_and_computes_the_same_is_usable(
    children: Children, model: Path, tmp_path: Path
) -> None:
    found = with_norm(children, model, write_kernel(tmp_path))
    assert found.usable
    assert found.names == ("RMSNorm",)
    assert found.reason.startswith("ran forward and backward here; logits ")


def test_a_layer_that_computes_something_else_is_rejected_with_the_figure(
    children: Children, model: Path, tmp_path: Path
) -> None:
    found = with_norm(children, model, write_kernel(tmp_path, factor=1.5))
    assert not found.usable
    assert found.names == ("RMSNorm",)
    assert found.reason.startswith("its logits are ")
    assert found.reason.endswith(" off those of plain layers in float32, at most 1e-04")


def test_a_model_without_such_layers_says_so(children: Children, model: Path, tmp_path: Path) -> None:
    found = with_norm(children, model, write_kernel(tmp_path), layer="MegaBlocksMoeMLP")
    assert found == LayerKernels(False, "Qwen3ForCausalLM has none of the layers with kernels for training here")


def test_a_kernel_that_is_not_there_is_told_with_its_layer(model: Path, tmp_path: Path) -> None:
    """On a GPU the mapping has kernels; offline and without a cache there is none to load."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    machine = parts.gpu_machine()
    with Children(environment, log=tmp_path / "server.log", cold=True) as children:
        found = probe_layer_kernels(machine, model={"model": str(model)}, children=children)
    assert found == LayerKernels(
        False, "RMSNorm: not in the cache, and offline (`HF_HUB_OFFLINE` is set)", ("RMSNorm",)
    )


def test_kernels_that_are_switched_off_are_told(model: Path, tmp_path: Path) -> None:
    with Children({**os.environ, "USE_HUB_KERNELS": "NO"}, log=tmp_path / "server.log", cold=True) as children:
        found = probe_layer_kernels(parts.cpu_machine(), model={"model": str(model)}, children=children)
    assert found == LayerKernels(False, "switched off by `USE_HUB_KERNELS`")


def test_without_a_model_it_is_said_that_the_layers_depend_on_it(children: Children) -> None:
    found = probe_layer_kernels(parts.gpu_machine(), model=None, children=children)
    assert found == LayerKernels(False, "which layers have kernels depends on the model, and none was given")
