"""What tests share: children forked from one server, which takes 5 s to import TRL."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from autotune.children import Children


@pytest.fixture(scope="session")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    with Children(dict(os.environ), log=tmp_path_factory.mktemp("server") / "server.log") as started:
        yield started
