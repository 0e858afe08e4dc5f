"""What tests share: children forked from one server, which takes 5 s to import TRL, and machines with fake GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from autotune.children import Children
from tests.nvml.machine import Laboratory, build_library


@pytest.fixture(scope="session")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    with Children(dict(os.environ), log=tmp_path_factory.mktemp("server") / "server.log") as started:
        yield started


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    """Where fake machines with NVIDIA GPUs are probed; skips where there is no C compiler."""
    return Laboratory(
        build_library(tmp_path_factory.mktemp("nvml")),
        build_library(tmp_path_factory.mktemp("old-nvml"), old_driver=True),
        tmp_path_factory.mktemp("machines"),
    )
