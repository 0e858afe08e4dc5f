"""Changes to a YAML text, with the user's options, comments and order left as they are.

ruamel.yaml carries the text through, each bare value as its characters; PyYAML, with which TRL reads, has the say.
"""

from __future__ import annotations

import enum
import io
import math
import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

OptionPath = tuple[str, ...]
Reasons = Mapping[OptionPath, str]

# What ruamel.yaml would drop: a byte order mark, `---`, and the comments and directives above it.
_HEAD = re.compile(r"\A\ufeff?(?:(?:\s|[#%].*\n)*---[ \t]*(?:#.*)?\n)?")


def merge(text: str, intended: Mapping[str, Any], reasons: Reasons) -> str:
    """The text with the options in `intended` (all of them, `env` included), and a comment beside each change.

    `reasons` maps an option, or a key inside one, to its comment. PyYAML reads the result as intended: where that
    fails, the text is written anew below the comment it begins with. Raises RuntimeError if that fails, too.
    """
    import yaml

    wanted: dict[str, Any] = plain(intended)
    crlf = 0 < text.count("\n") == text.count("\r\n")
    text = text.replace("\r\n", "\n")
    text += "\n" if text and not text.endswith("\n") else ""
    lines = text.lstrip("\ufeff").splitlines(keepends=True)
    beginning = takewhile(lambda line: not line.strip() or line.startswith("#"), lines)
    for given in (text, "".join(beginning)):
        try:
            merged = _changed(given, wanted, reasons)
            merged = merged.replace("\n", "\r\n") if crlf else merged
            if same(yaml.safe_load(merged) or {}, wanted):
                return merged
        except Exception:  # ruamel.yaml does not always raise its YAMLError
            pass
    raise RuntimeError(f"these options do not survive YAML: {wanted!r}")


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
    # inside brackets the emitter quotes all that would mean something in a flow collection
    return _dump([value], one_line=True).strip()[1:-1]


def _dump(value: Any, *, one_line: bool) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="" if value.isprintable() else '"')

    Dumper.add_representer(str, text)
    return yaml.dump(value, None, Dumper, default_flow_style=one_line, width=1e9, allow_unicode=True, sort_keys=False)


def _changed(text: str, wanted: dict[str, Any], reasons: Reasons) -> str:
    import yaml

    had = yaml.safe_load(text)
    if same(had, wanted):
        return text
    body = "" if had is None else _HEAD.sub("", text)
    round_trip = _round_trip()
    options = round_trip.load(body) if body else round_trip.map()
    options.fa.set_block_style()  # JSON has no lines to put comments beside
    for value in filter(_has_lines, options.values()):
        columns = value.lc.col - options.lc.col
        if isinstance(value, dict):
            round_trip.map_indent = columns
        else:
            round_trip.sequence_dash_offset = columns
            round_trip.sequence_indent = max(value.lc.item(0)[1] - options.lc.col, columns + 2)
    _change(options, had or {}, wanted, (), reasons)
    stream = io.StringIO()
    round_trip.dump(options, stream)
    return text.removesuffix(body) + stream.getvalue()


def _round_trip() -> Any:
    """Reads every bare value as a string, and writes it as it was."""
    from ruamel.yaml import YAML
    from ruamel.yaml.resolver import VersionedResolver

    class NoTypes(VersionedResolver):
        versioned_resolver: Any = {}

    yaml = YAML()
    yaml.Resolver = NoTypes
    yaml.preserve_quotes = yaml.brace_single_entry_mapping_in_flow_sequence = True
    yaml.width = 1 << 30
    return yaml


def _has_lines(value: Any) -> bool:
    """Whether this is a list or mapping with lines of its own, which no alias repeats."""
    return hasattr(value, "fa") and value.fa.flow_style() is False and not value.anchor.value


def _change(place: Any, had: dict[Any, Any], wanted: dict[Any, Any], path: OptionPath, reasons: Reasons) -> None:
    """Put what differs into a mapping."""
    from ruamel.yaml.scalarstring import PlainScalarString

    for name, value in wanted.items():
        before: Any = had.get(name)
        if name in had and same(before, value):
            continue
        inside = (*path, name)
        parts = dict.fromkeys(said for part, said in reasons.items() if part[: len(inside)] == inside)
        reason = reasons.get(inside) or "; ".join(parts) or reasons.get(path, "")
        ((key, new),) = _round_trip().load(_dump({name: value}, one_line=bool(reason or had))).items()
        dicts = isinstance(before, dict) and isinstance(value, dict)
        if dicts and _has_lines(place.get(key)) and before.keys() <= value.keys():
            _change(place[key], before, value, inside, reasons)
            continue
        below = "".join(_take_below(place, one) for one in ([key] if key in place else [*place][-1:]))
        # a bare `str` would take the quotes of the string in whose place it comes
        place[key] = PlainScalarString(new) if type(new) is str else new
        _say(place, key, reason, below)


def _take_below(place: Any, key: Any) -> str:
    """Take away the comments and blank lines below an option, which ruamel.yaml keeps with it."""
    below = ""
    while _has_lines(place[key]):
        place = place[key]
        key = [*place][-1] if isinstance(place, dict) else len(place) - 1
        below += "".join(comment.value for comment in place.ca.end)
        place.ca.end = []
    slots, after = place.ca.items.get(key), 2 if isinstance(place, dict) else 0
    if slots and slots[after]:
        token, is_block = slots[after], getattr(place[key], "style", "") in ("|", ">")
        own, _, text = ("", "", token.value) if is_block else token.value.partition("\n")
        token.value = f"{own}\n"
        slots[after] = token if own else None
        below = text + below
    return below


def _say(place: Any, key: Any, reason: str, below: str) -> None:
    """Put a comment beside an option, after the user's own, and text below it."""
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.tokens import CommentToken

    *above, after, between = place.ca.items.get(key) or [None] * 4
    own = "".join(getattr(one, "value", one) for one in (after, *(between or ())) if one)
    beside, _, under = own.partition("\n")
    reason = "".join(letter if letter.isprintable() else " " for letter in reason)
    said = "; ".join(filter(None, (beside.strip().removeprefix("#").strip(), reason.strip())))
    text = (f" # {said}" if said else "") + "\n" + under + below
    place.ca.items[key] = [*above, CommentToken(text, CommentMark(0)) if text != "\n" else None, None]
