"""Changes to a YAML text, with everything else in it left as it is.

They are spliced in at the places where PyYAML, with which TRL reads, found the values: what is not changed stays to
the byte. A round trip through ruamel.yaml 0.19 rewrote dates, escapes, indentation and line ends.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

OptionPath = tuple[str, ...]

_COMMENT = re.compile(r"(?:^|(?<=[ \t]))#")

_DUMP: dict[str, Any] = {"width": math.inf, "allow_unicode": True, "sort_keys": False}


def merge(text: str, intended: Mapping[str, Any], reasons: Mapping[OptionPath, str]) -> str:
    """The text with the options in `intended` (all of them, `env` included), and a comment beside each change.

    `reasons` maps an option, or a key inside one, to its comment. The result is read back with PyYAML, and each value
    is what was intended; where the text cannot be edited in place, it is written anew below the comment it begins
    with. Raises RuntimeError if a value cannot be written.
    """
    import yaml

    wanted: dict[str, Any] = plain(intended)
    if text.strip("\ufeff \t\r\n"):
        try:
            merged = _Splice(text).merge(wanted, reasons)
            if same(yaml.safe_load(merged) or {}, wanted):
                return merged
        except (yaml.YAMLError, _CannotSpliceError):
            pass
    merged = _leading_comments(text) + _written_anew(wanted, reasons)
    if not same(yaml.safe_load(merged) or {}, wanted):
        raise RuntimeError(f"these options do not survive YAML: {wanted!r}")
    return merged


def plain(value: Any) -> Any:
    """The value in the types that YAML has."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {plain(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same to TRL: equal, and of one type (1, 1.0 and true are three things)."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def as_yaml(value: Any) -> str:
    """The value in one line, as PyYAML reads it back, at any place in a file: `1.0e-05`, `'no'`, `{a: [1, 2]}`."""
    import yaml

    # inside brackets the emitter quotes all that would mean something in a flow collection
    return str(yaml.dump([value], Dumper=_dumper(), default_flow_style=True, **_DUMP)).strip()[1:-1]


def _dumper() -> Any:
    import yaml

    class OneLine(yaml.SafeDumper):
        """Repeats a value instead of pointing at it, and keeps a string in its line."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = None if value.isprintable() else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    OneLine.add_representer(str, text)
    return OneLine


def _leading_comments(text: str) -> str:
    lines = []
    for line in text.lstrip("\ufeff").splitlines():
        if line.strip() and not line.startswith("#"):
            break
        lines.append(line.rstrip() + "\n")
    return "".join(lines)


def _written_anew(options: Mapping[str, Any], reasons: Mapping[OptionPath, str]) -> str:
    import yaml

    lines = []
    for name, value in options.items():
        reason = reasons.get((name,)) or "; ".join(reasons[path] for path in reasons if path[:1] == (name,))
        if isinstance(value, list | dict) and value and not reason:
            lines.append(yaml.dump({name: value}, Dumper=_dumper(), default_flow_style=False, **_DUMP))
        else:
            lines.append(f"{as_yaml(name)}: {as_yaml(value)}{_comment(reason)}\n")
    return "".join(lines)


def _comment(reason: str | None) -> str:
    return f"  # {_one_line(reason)}" if reason else ""


def _one_line(reason: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in reason).strip()


class _CannotSpliceError(Exception):
    """The text has a form that is not edited in place."""


class _Node(msgspec.Struct):
    """Where a value stands in the text. `items` of a mapping are its keys and values by turns."""

    kind: Literal["scalar", "mapping", "sequence", "alias"]
    start: int
    end: int
    inline: bool  # it ends where its last character stands: not a block scalar, list or mapping
    text: str = ""
    items: list[_Node] = []

    def pairs(self) -> Iterator[tuple[_Node, _Node]]:
        return zip(self.items[::2], self.items[1::2], strict=True)

    def last(self) -> _Node:
        return self if self.inline or not self.items else self.items[-1].last()


class _Splice:
    """Edits to one text, collected at its own positions and applied at the end."""

    def __init__(self, text: str) -> None:
        import yaml

        self._text = text
        self._line_break = "\r\n" if "\r\n" in text else "\n"
        self._edits: list[tuple[int, int, str]] = []
        self._comments: dict[int, list[str]] = {}  # position of a line's end -> what to say there
        self._inline: list[_Node] = []
        self._root: _Node | None = None
        events: Iterator[Any] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                self._root = self._node(next(events), events)
        self._before = yaml.safe_load(text) or {}

    def merge(self, wanted: Mapping[str, Any], reasons: Mapping[OptionPath, str]) -> str:
        root = self._root
        if root is None or (root.kind == "scalar" and root.start == root.end):
            return self._whole_lines() + _written_anew(wanted, reasons)
        if root.kind != "mapping" or root.inline:
            raise _CannotSpliceError
        self._mapping(root, self._before, wanted, (), reasons)
        return self._apply()

    def _node(self, event: Any, events: Iterator[Any]) -> _Node:
        import yaml

        start, end = event.start_mark.index, event.end_mark.index
        if isinstance(event, yaml.AliasEvent):
            node = _Node("alias", start, end, inline=True)
        elif isinstance(event, yaml.ScalarEvent):
            node = _Node("scalar", start, end, inline=event.style not in ("|", ">"), text=event.value)
        else:
            mapping = isinstance(event, yaml.MappingStartEvent)
            node = _Node("mapping" if mapping else "sequence", start, end, inline=bool(event.flow_style), items=[])
            for part in events:
                if isinstance(part, yaml.CollectionEndEvent):
                    closing: Any = part.end_mark
                    node.end = closing.index
                    break
                node.items.append(self._node(part, events))
        if node.inline:
            self._inline.append(node)
        return node

    def _mapping(
        self,
        node: _Node,
        before: Mapping[str, Any],
        wanted: Mapping[str, Any],
        path: OptionPath,
        reasons: Mapping[OptionPath, str],
    ) -> None:
        places = {key.text: (key, value) for key, value in node.pairs() if key.kind == "scalar"}
        added: list[str] = []
        for name, value in wanted.items():
            if name in before and same(before[name], value):
                continue
            reason = reasons.get((*path, name))
            if name not in places:
                added.append(name)
                continue
            key, place = places[name]
            old = before[name]
            if (
                place.kind == "mapping"
                and isinstance(old, dict)
                and isinstance(value, dict)
                and old.keys() <= value.keys()
            ):
                if reason:
                    reasons = {**{(*path, name, part): reason for part in value}, **reasons}
                self._mapping(place, old, value, (*path, name), reasons)
            else:
                self._replace(key, place, as_yaml(value), reason)
        if node.inline:
            self._add_inline(node, {name: wanted[name] for name in added})
            for name in added:
                self._say(node.end, reasons.get((*path, name)))
        elif added:
            self._add_lines(node, {name: (wanted[name], reasons.get((*path, name))) for name in added})

    def _replace(self, key: _Node, place: _Node, written: str, reason: str | None) -> None:
        if place.inline:
            space = " " if place.start == place.end else ""
            self._edits.append((place.start, place.end, space + written))
            self._say(place.end, reason)
            return
        colon = self._text.find(":", key.end)
        if self._text[key.end : colon].strip() or colon < 0:
            raise _CannotSpliceError
        head = self._text[colon + 1 : self._line_end(colon)]
        found = _COMMENT.search(head)
        comments = [head[found.start() + 1 :].strip()] if found else []
        comments += [reason] if reason else []
        tail = written + _comment("; ".join(comments)) + self._line_break
        self._edits.append((colon + 1, self._next_line(place), f" {tail}"))

    def _add_inline(self, node: _Node, added: Mapping[str, Any]) -> None:
        if not added:
            return
        written = ", ".join(f"{as_yaml(name)}: {as_yaml(value)}" for name, value in added.items())
        position = node.items[-1].end if node.items else self._text.index("{", node.start) + 1
        self._edits.append((position, position, f", {written}" if node.items else written))

    def _add_lines(self, node: _Node, added: Mapping[str, tuple[Any, str | None]]) -> None:
        first = node.items[0].start
        indent = self._text[self._text.rfind("\n", 0, first) + 1 : first].lstrip("\ufeff")
        if indent.strip():
            raise _CannotSpliceError
        position = self._next_line(node.items[-1])
        written = "".join(
            f"{indent}{as_yaml(name)}: {as_yaml(value)}{_comment(reason)}{self._line_break}"
            for name, (value, reason) in added.items()
        )
        whole = self._text[:position].endswith("\n")
        self._edits.append((position, position, written if whole else self._line_break + written))

    def _say(self, position: int, reason: str | None) -> None:
        """Put a comment at the end of the line of `position`, unless a string goes on over that end."""
        end = self._line_end(position)
        if reason and not any(one.kind == "scalar" and one.start < end < one.end for one in self._inline):
            self._comments.setdefault(end, []).append(_one_line(reason))

    def _line_end(self, position: int) -> int:
        end = self._text.find("\n", position)
        end = len(self._text) if end < 0 else end
        return end - 1 if self._text[end - 1 : end] == "\r" and end > position else end

    def _next_line(self, node: _Node) -> int:
        """Where the line after a value begins."""
        last = node.last()
        if not last.inline:
            return last.end
        end = self._text.find("\n", last.end)
        return len(self._text) if end < 0 else end + 1

    def _whole_lines(self) -> str:
        return self._text if self._text.endswith("\n") else self._text + self._line_break

    def _apply(self) -> str:
        for end, said in self._comments.items():
            start = max((node.end for node in self._inline if node.end <= end), default=0)
            found = _COMMENT.search(self._text[start:end])
            kept = self._text[start:end].rstrip() if found else ""
            joined = "; ".join(dict.fromkeys(said))
            start = start + len(kept) if found else end
            self._edits.append((start, end, f"; {joined}" if found else f"  # {joined}"))
        pieces, position = [], 0
        for start, end, new in sorted(self._edits, key=lambda edit: (edit[0], edit[1])):
            if start < position:
                raise _CannotSpliceError
            pieces += [self._text[position:start], new]
            position = end
        merged = "".join([*pieces, self._text[position:]])
        return merged if merged.endswith("\n") else merged + self._line_break
