"""Values of TRL's options, seen from its dataclasses: what fits, how to say so, and what may leave the child."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import types
import typing
from collections.abc import Iterable
from typing import Any

# Values that are nobody's business but the job's own; exact names, since `eos_token` is no secret.
SECRET_NAMES = frozenset({"hub_token", "push_to_hub_token", "token", "use_auth_token", "api_key"})

SCRIPT = "script.py"  # stands for TRL's script where accelerate's parser wants one


def type_hints(kinds: Iterable[type]) -> dict[str, Any]:
    return {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}


def fits(value: Any, hint: Any) -> bool:
    """Whether TRL would run with a value from YAML that is not a string. Wide: only what cannot work is refused."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool) or value is None or (isinstance(value, int) and value in (0, 1))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is list or hint is list:
        return isinstance(value, list)
    if origin is dict or hint is dict:
        return isinstance(value, dict)
    return True


def takes(name: str, hint: Any, action: argparse.Action) -> str:
    if action.choices is not None:
        return f"`{name}` takes {', '.join(f'`{choice}`' for choice in action.choices)}"
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = {bool: "`true` or `false`", int: "a whole number", float: "a number", list: "a list", dict: "a mapping"}
    kinds = [words[typing.get_origin(part) or part] for part in parts if (typing.get_origin(part) or part) in words]
    kinds += ["text"] if str in parts else []
    if not kinds and action.type in words:
        kinds = [words[action.type]]
    return f"`{name}` takes {' or '.join(kinds)}" if kinds else f"correct `{name}`"


def shown(value: Any) -> str:
    text = "true" if value is True else "false" if value is False else str(value)
    return f"`{text if len(text) < 60 else text[:57] + '...'}`"


def jsonable(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return jsonable(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # a data set given by name on the command line: its other fields are TRL's defaults
        return {name: jsonable(part) for name, part in dataclasses.asdict(value).items() if part is not None}
    if isinstance(value, dict):
        return {str(jsonable(key)): jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [jsonable(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def is_jsonable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_jsonable, value))
    if isinstance(value, dict):
        return all(map(is_jsonable, value.values()))
    plain = value is None or isinstance(value, bool | int | float | str | enum.Enum)
    return plain or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: None if key in SECRET_NAMES else without_secrets(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_secrets(part) for part in value]
    return value
