"""The check that packed documents stay apart: what mixes them is told from what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.children import ChildError, Children
from autotune.search.gates import LEAKAGE, PARITY


def checked(children: Children, model: Path, attention: str, *, by: str = "autotune.trial.document_check:check") -> Any:
    request = {"model": str(model), "revision": None, "trust_remote_code": False, "attention": attention}
    return children.call(by, request, deadline_seconds=120.0)


@pytest.fixture(scope="module")
def models(children: Children, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = children.call("tests.trl_side:make_models", {"folder": str(folder)}, deadline_seconds=120.0)
    return {name: folder / name for name in names}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_stay_apart_in_a_model_with_full_attention(
    children: Children, models: dict[str, Path], attention: str
) -> None:
    found = checked(children, models["qwen3"], attention)
    assert found["dtype"] == "float32"
    assert found["leakage"] <= LEAKAGE["float32"]
    assert found["parity"] <= PARITY["float32"]


def test_an_attention_that_ignores_where_documents_begin_is_found_out(
    children: Children, models: dict[str, Path]
) -> None:
    found = checked(children, models["qwen3"], "blind", by="tests.trl_side:check_with_blind_attention")
    assert found["leakage"] > 100 * LEAKAGE["float32"]
    assert found["parity"] > 100 * PARITY["float32"]


def test_a_model_whose_layers_carry_state_across_documents_is_found_out(
    children: Children, models: dict[str, Path]
) -> None:
    found = checked(children, models["mamba"], "eager")
    assert found["leakage"] > 100 * LEAKAGE["float32"]
    assert found["parity"] > 100 * PARITY["float32"]


def test_a_model_that_refuses_packed_rows_here_fails_the_check(children: Children, models: dict[str, Path]) -> None:
    with pytest.raises(ChildError, match="can't keep packed sequences apart without `causal_conv1d`"):
        checked(children, models["lfm2"], "eager")
