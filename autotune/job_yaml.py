"""A job's YAML file, read as TRL reads it and checked for what TRL would misread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autotune.errors import AutotuneError
from autotune.given_file import read_given

GIVE_A_FILE = "give the path of a YAML file after `--config`"
MOST_VALUES = 100_000  # of one file, aliases written out; a TRL config has some tens


class Config(msgspec.Struct, frozen=True):
    """What a file says. `lines` has the line of each top-level option, counted from 1."""

    text: str
    options: dict[str, Any]
    environment: dict[str, str]
    lines: dict[str, int]


def read_config(path: Path, *, name: str) -> Config:
    """Read a TRL config file; `name` is what errors call it.

    Raises AutotuneError for a file that TRL cannot read, and for an option that stands there twice: PyYAML takes the
    last one without a word.
    """
    import yaml  # 15 ms

    try:
        # TRL reads it again, so a pipe would be empty by then
        content = read_given(path, named=f"`{name}`", absent=f"there is no config file `{name}`", hint=GIVE_A_FILE)
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise AutotuneError(f"`{name}` line {line}: not UTF-8 text", hint="save the file as UTF-8") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        options = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise AutotuneError(f"`{name}`{place}: {error.problem or error.context}", hint=_syntax_hint(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise AutotuneError(f"`{name}` is not YAML that TRL can read: {error}", hint="correct the file") from None
    if not isinstance(options, dict) or not isinstance(node, yaml.MappingNode):
        what = "is empty" if options is None else "holds no `option: value` lines"
        raise AutotuneError(f"`{name}` {what}", hint="write TRL options as `option: value`, one a line")
    _refuse_endless(node, name)
    _refuse_twice(node, name)
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
    for key in options:
        if not isinstance(key, str):
            raise AutotuneError(
                f"`{name}` holds the key `{key}`, which YAML does not read as text",
                hint="a bare `on`, `off`, `yes`, `no` or number as a key has to be quoted",
            )
    environment = options.pop("env", {})
    if not isinstance(environment, dict):
        raise AutotuneError(
            f"`{name}` line {lines['env']}: `env` is no mapping",
            hint="write the variables below `env:`, indented, as `NAME: value`",
        )
    return Config(text, options, {str(key): str(value) for key, value in environment.items()}, lines)


def split_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The path after `--config`, and the arguments without the two. Raises AutotuneError."""
    rest = list(arguments)
    joined = next((one for one in rest if one.startswith("--config=")), None)
    if joined is not None:
        raise AutotuneError(
            "TRL does not know `--config=FILE`: it would run without the file",
            hint=f"write `--config {joined.removeprefix('--config=') or 'FILE'}`",
        )
    if "--config" not in rest:
        return None, rest
    position = rest.index("--config")
    if position + 1 == len(rest) or rest[position + 1].startswith("--"):
        raise AutotuneError("`--config` is given without a file", hint="write `--config FILE`")
    path = rest[position + 1]
    del rest[position : position + 2]
    if "--config" in rest:
        raise AutotuneError("`--config` is given twice", hint="TRL reads one file: put all options in it")
    return path, rest


def _syntax_hint(error: Any) -> str:
    if "found character '\\t'" in str(error.problem):
        return "indent with spaces: YAML does not take tabs there"
    if "mapping values are not allowed" in str(error.problem):
        return "quote a value that holds `: `, and align options of one level"
    if "single document" in str(error.context):
        return "keep one document: remove what follows the second `---`"
    return "correct that line"


def _refuse_endless(root: Any, name: str) -> None:
    """Raise for aliases that contain themselves, and for ones that repeat each other into more than can be read."""
    sizes: dict[int, int] = {}  # values below a node, repeated ones as often as they are repeated
    open_nodes: set[int] = set()

    def size_of(node: Any) -> int:
        if isinstance(node.value, str):  # a scalar's text
            return 1
        known = sizes.get(id(node))
        if known is None:
            if id(node) in open_nodes:
                raise AutotuneError(
                    f"`{name}` line {node.start_mark.line + 1}: a value contains itself by an alias",
                    hint="write the value out instead of `*name`",
                )
            open_nodes.add(id(node))
            children = [one for pair in node.value for one in (pair if isinstance(pair, tuple) else (pair,))]
            known = sizes[id(node)] = 1 + sum(map(size_of, children))
            open_nodes.discard(id(node))
        return known

    if size_of(root) > MOST_VALUES:
        raise AutotuneError(
            f"`{name}` holds more than {MOST_VALUES:,} values", hint="its aliases repeat each other: write values out"
        )


def _refuse_twice(node: Any, name: str) -> None:
    """Raise for a mapping, at any depth, that has a key twice."""
    import yaml

    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
            continue
        first: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            waiting.append(value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            before = first.get((key.tag, key.value))
            first[key.tag, key.value] = line
            if before is not None:
                raise AutotuneError(
                    f"`{name}` line {line}: `{key.value}` stands there twice, first in line {before}",
                    hint="TRL would take the last one without a word: remove one of them",
                )
