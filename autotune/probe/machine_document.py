"""What a machine file can be wrong in beyond its types: such files come from strangers and are made by hand."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.probe.machine import Machine

SCHEMA = 1
NEW_FILE = "make one with `trl-autotune doctor --json`"
# characters that turn the direction of what follows, or of what stands before
DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def named(file: Path | None) -> str:
    return "the machine file" if file is None else f"the machine file `{file}`"


def wrong_field(file: Path | None, place: str, expected: str) -> AutotuneError:
    """`place` is empty or as " in `ram_bytes`"."""
    return AutotuneError(
        f"{named(file)} is wrong{place}: {expected}",
        hint="`trl-autotune doctor --json` prints this machine in that form, to start from",
    )


def check_content(content: bytes, file: Path | None) -> None:
    """Raises AutotuneError for a file that is empty, not UTF-8, not JSON, or of no or a newer schema."""
    if not content.strip():
        raise AutotuneError(f"{named(file)} is empty", hint=NEW_FILE)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:2]:
        raise AutotuneError(
            f"{named(file)} is not UTF-8, it looks like UTF-16", hint="save it as UTF-8, without a byte order mark"
        )
    if content.startswith(codecs.BOM_UTF8):
        raise AutotuneError(f"{named(file)} begins with a byte order mark", hint="save it as UTF-8 without one")
    try:
        read = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        schema = msgspec.json.decode(read["schema"]) if "schema" in read else None
    except msgspec.ValidationError:
        raise wrong_field(file, "", "expected `object`") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AutotuneError(f"{named(file)} is not JSON: {error}", hint=NEW_FILE) from None
    if schema is None:
        raise wrong_field(file, "", f"it has no `schema`, which is {SCHEMA}")
    if isinstance(schema, int) and schema > SCHEMA:
        raise AutotuneError(
            f"{named(file)} has `schema` {schema}, and this version reads {SCHEMA}",
            hint="update trl-autotune, or make the file with this version's `trl-autotune doctor --json`",
        )


def check_sense(machine: Machine, file: Path | None) -> None:
    """Raises AutotuneError for memory of which more is free than there is."""
    for place, free, total in _memories(machine):
        if free > total:
            raise wrong_field(file, f" in `{place}`", f"{free} bytes are free of {total}")


def _memories(machine: Machine) -> Iterator[tuple[str, int, int]]:
    yield "free_ram_bytes", machine.free_ram_bytes, machine.ram_bytes
    for number, gpu in enumerate(machine.gpus):
        yield f"gpus[{number}].free_bytes", gpu.free_bytes, gpu.memory_bytes


def printable(value: Any) -> Any:
    """JSON values without control characters in their strings: a terminal would obey them."""
    if isinstance(value, str):
        return "".join(" " if _obeyed(one) else one for one in value)
    if isinstance(value, list | tuple):
        return [printable(one) for one in value]
    if isinstance(value, dict):
        return {printable(name): printable(one) for name, one in value.items()}
    return value


def _obeyed(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Zl", "Zp") or character in DIRECTIONS
