"""What a machine file can be wrong in beyond its types: such files come from strangers and are made by hand."""

from __future__ import annotations

import codecs
import difflib
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect
from packaging.version import InvalidVersion, Version

from autotune.errors import AutotuneError
from autotune.probe.architectures import version_pair

if TYPE_CHECKING:
    from autotune.probe.machine import Machine

SCHEMA = 1
PARSED = ("torch", "transformers", "kernels", "trl")  # versions that something is judged by
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


def check_names(value: Any, kind: inspect.Type, file: Path | None, place: str = "") -> None:
    """Raises AutotuneError for a field that is not one of those of `kind`, which a file made by hand may have."""
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            check_names(value, one, file, place)
    elif isinstance(kind, inspect.VarTupleType) and isinstance(value, list):
        for number, one in enumerate(value):
            check_names(one, kind.item_type, file, f"{place}[{number}]")
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in kind.fields}
        for name, one in value.items():
            inside = f"{place}.{name}".lstrip(".")
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                meant = f", did you mean `{near[0]}`?" if near else f"; known are {', '.join(sorted(fields))}"
                raise wrong_field(file, f" in `{inside}`", f"there is no such field{meant}")
            check_names(one, fields[name], file, inside)


def field_of(told: str, value: Any) -> str:
    """The place of a wrong field as msgspec tells it, with the key of `versions` that it leaves out."""
    versions = value.get("versions") if isinstance(value, dict) else None
    if told == "versions[...]" and isinstance(versions, dict):
        wrong = (name for name, version in versions.items() if version is not None and not isinstance(version, str))
        return f"versions.{next(wrong, '...')}"
    return told


def check_sense(machine: Machine, file: Path | None) -> None:
    """Raises AutotuneError for what no machine can be: more memory free than there is, one GPU twice or linked to
    itself, a version that is none."""
    for place, free, total in _memories(machine):
        if free > total:
            raise wrong_field(file, f" in `{place}`", f"{free} bytes are free of {total}")
    seen: dict[Any, int] = {}
    for number, gpu in enumerate(machine.gpus):
        names = [("uuid", gpu.uuid), *([("index", gpu.index)] if gpu.mig is None else [])]
        for field, name in names:
            first = seen.setdefault(name, number)
            if first != number:
                raise wrong_field(file, f" in `gpus[{number}].{field}`", f"`{name}` is that of `gpus[{first}]` too")
        if gpu.index in (gpu.linked_to or ()):
            raise wrong_field(file, f" in `gpus[{number}].linked_to`", "a GPU is not linked to itself")
    for name in PARSED:
        version = machine.versions.get(name)
        if version is not None and not _is_version(version):
            raise wrong_field(file, f" in `versions.{name}`", f"expected a version such as `2.13.0`, got `{version}`")
    cuda = machine.versions.get("torch_cuda")
    if cuda is not None and version_pair(cuda) is None:
        raise wrong_field(file, " in `versions.torch_cuda`", f"expected a version such as `13.0`, got `{cuda}`")


def _is_version(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


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
