"""Lengths of data that was measured before, by what the data and the tokenizer hold. No text is kept."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.child import write_whole
from autotune.probe import lengths_file
from autotune.probe.tokenizer import Tokenizer

KEPT_BYTES = 48 * 2**20  # 2 million rows
TORN_SECONDS = 3600.0  # what an interrupted write left behind is as old as this
SAMPLED_BLOCKS = 16  # of a file; fewer where there are many files, down to the last one
ALL_BLOCKS = 1024
BLOCK_BYTES = 64 * 2**10
LIBRARIES = ("trl", "transformers", "tokenizers", "datasets")
OWN_MODULES = (
    "batched cores counts formats measuring preferences preparation rendering sampling tokenizer training_data".split()
)


def key_of(request: Mapping[str, Any], tokenizer: Tokenizer, files: Sequence[Path]) -> str | None:
    """What the lengths depend on, as a name for their file; None where it cannot be told.

    That is the options in `request`, the tokenizer with its chat template, the files' content, the libraries that do
    the work, and the code of this package that does. Content is told by size, time of change, and 16 blocks of 64 kB:
    a change that keeps all three is missed.
    """
    backend = getattr(tokenizer.inner, "backend_tokenizer", None)
    if backend is None:
        return None
    digest = hashlib.sha256(json.dumps(request, sort_keys=True, default=repr).encode())
    for library in LIBRARIES:
        digest.update(f"{library} {importlib.metadata.version(library)}\n".encode())
    for module in OWN_MODULES:
        digest.update((Path(__file__).parent / f"{module}.py").read_bytes())
    for part in (tokenizer.processing_class, tokenizer.inner):
        told = [type(part).__name__, getattr(part, "chat_template", None), str(getattr(part, "eos_token", None))]
        digest.update(json.dumps([*told, tokenizer.inner.split_special_tokens]).encode())
    digest.update(backend.to_str().encode())
    try:
        blocks = max(1, min(SAMPLED_BLOCKS, ALL_BLOCKS // max(1, len(files))))
        for path in files:
            _add(digest, path, blocks)
    except OSError:
        return None
    return digest.hexdigest()


def find(folder: Path, key: str) -> lengths_file.LengthsFile | None:
    """The lengths under this key; None where there are none, or they cannot be read."""
    path = _path(folder, key)
    try:
        found = lengths_file.read(path)
        os.utime(path)  # what is used stays longest
    except (OSError, ValueError):
        return None
    return found


def keep(folder: Path, key: str, written: Path) -> None:
    """Keep the file `written` under this key, and let go of the oldest beyond 48 MB. A full disk is no failure."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if written.stat().st_size <= KEPT_BYTES:
            write_whole(_path(folder, key), written.read_bytes())
        _prune(folder)


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.lengths"


def _add(digest: Any, path: Path, blocks: int) -> None:
    state = path.stat()
    digest.update(f"{state.st_size} {state.st_mtime_ns}\n".encode())
    last = max(0, state.st_size - BLOCK_BYTES)
    with path.open("rb") as file:
        for start in sorted({last, *(last * block // blocks for block in range(blocks - 1))}):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))


def _prune(folder: Path) -> None:
    for torn in folder.glob(".*.lengths.*"):
        if torn.stat().st_mtime < time.time() - TORN_SECONDS:
            torn.unlink(missing_ok=True)
    files = sorted(folder.glob("*.lengths"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > KEPT_BYTES:
            path.unlink(missing_ok=True)
