"""Counts of many rows in a file: a line of JSON, packed 32-bit integers, and a digest of both."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autotune.child import write_whole

NAME = "lengths"  # in the folder of the child that measures
MAGIC = b"trl-autotune lengths 1\n"
DIGEST_BYTES = 32


class LengthsFile(NamedTuple):
    """What goes with the counts, and the counts by name: 4 bytes each, where JSON and Python take 6 and 32."""

    facts: dict[str, Any]
    counts: dict[str, array[int]]


class _Header(msgspec.Struct, frozen=True):
    facts: dict[str, Any]
    sizes: dict[str, int]
    byte_order: str
    item_bytes: int


def write(path: Path, facts: Mapping[str, Any], counts: Mapping[str, array[int]]) -> None:
    """Write the file whole, readable by the user alone. `counts` are arrays of type `i`."""
    sizes = {name: len(values) for name, values in counts.items()}
    header = _Header(facts=dict(facts), sizes=sizes, byte_order=sys.byteorder, item_bytes=array("i").itemsize)
    body = b"".join([MAGIC, msgspec.json.encode(header), b"\n", *(values.tobytes() for values in counts.values())])
    write_whole(path, body + hashlib.sha256(body).digest())


def read(path: Path) -> LengthsFile:
    """Read it back. Raises OSError where it is not there, ValueError where it is torn or from another machine."""
    content = memoryview(path.read_bytes())
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if bytes(body[: len(MAGIC)]) != MAGIC or hashlib.sha256(body).digest() != digest:
        raise ValueError(f"{path} is torn")
    line, _, _ = bytes(body[len(MAGIC) :]).partition(b"\n")
    header = msgspec.json.decode(line, type=_Header)
    item_bytes = array("i").itemsize
    if (header.byte_order, header.item_bytes) != (sys.byteorder, item_bytes):
        raise ValueError(f"{path} is from another machine")
    counts: dict[str, array[int]] = {}
    start = len(MAGIC) + len(line) + 1
    for name, size in header.sizes.items():
        counts[name] = array("i")
        counts[name].frombytes(body[start : start + size * item_bytes])
        start += size * item_bytes
    return LengthsFile(header.facts, counts)
