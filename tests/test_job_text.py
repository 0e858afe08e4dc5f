"""A YAML text with changes: read back by PyYAML, with the other options, the comments and the order left."""

from __future__ import annotations

import datetime
import enum
import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.job_text import as_yaml, merge, plain, same

MINE = """\
# my run
model_name_or_path: Qwen/Qwen3-0.6B   # the small one

learning_rate: 2e-5
save_strategy: no # a bare no
report_to: none
run_name: 'it''s mine'
model_init_kwargs:
  attn_implementation: eager  # safe
  dtype: "float32"
datasets:
- path: json
  data_files: [a.jsonl, b.jsonl]
chat_template_path: >-
  a folded
  text
per_device_train_batch_size: 8
# the end
"""


def changed(text: str, **changes: Any) -> str:
    wanted = {**(yaml.safe_load(text) or {}), **changes}
    return merge(text, wanted, {(name,): "why" for name in changes})


def test_every_line_that_is_not_changed_stays_to_the_byte() -> None:
    after = changed(MINE, per_device_train_batch_size=4)
    assert after == MINE.replace("size: 8\n", "size: 4  # why\n")


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb:\n    c: 1   # deep\n    # still deep\n\n# d\nd: [1, {e: no}]\n",
        "a: 1\nb:\n  - c: 2e-5\n    d: ~\n  # between\n  - {c: 1}\n\n\ne:\n  f:\n  g: 'x'\n",
        "# top\n\n---\n# below\na: 1\nb: |  # text\n  # no comment\n\n# end\n",
        "a: 1\r\n\r\n# b\r\nb: 2  # c\r\n",
        "\ufeffa: 1\nb: 2 # bom\n",
    ],
)
def test_indentation_blank_lines_and_line_ends_are_the_users(text: str) -> None:
    assert changed(text, a=2) == text.replace("a: 1", "a: 2  # why", 1)


def test_a_comment_of_the_user_is_kept_and_the_reason_follows_it() -> None:
    assert "model_name_or_path: other  # the small one; why\n" in changed(MINE, model_name_or_path="other")


def test_new_options_come_after_the_last_one_and_before_the_closing_comment() -> None:
    assert "size: 8\npacking: true  # why\ngradient_checkpointing: false  # why\n# the end\n" in changed(
        MINE, packing=True, gradient_checkpointing=False
    )


def test_an_option_within_a_mapping_is_changed_where_it_stands() -> None:
    wanted = yaml.safe_load(MINE)
    wanted["model_init_kwargs"] |= {"attn_implementation": "sdpa", "use_kernels": True}
    after = merge(MINE, wanted, {("model_init_kwargs", "attn_implementation"): "exact: faster"})
    assert "  attn_implementation: sdpa  # safe; exact: faster\n" in after
    assert '  dtype: "float32"\n  use_kernels: true\ndatasets:\n' in after


def test_a_new_option_within_a_mapping_leaves_the_comment_of_what_follows_with_it() -> None:
    text = "env:\n  A: 1  # mine\n\n# the data\ndataset_name: d\n"
    after = merge(text, {"env": {"A": 1, "B": "x"}, "dataset_name": "d"}, {("env", "B"): "why"})
    assert after == "env:\n  A: 1  # mine\n  B: x  # why\n\n# the data\ndataset_name: d\n"


def test_an_option_within_a_mapping_on_one_line_is_changed_where_it_stands() -> None:
    text = "model_init_kwargs: {attn_implementation: eager, x: '# no comment'}\n"
    wanted = {"model_init_kwargs": {"attn_implementation": "sdpa", "x": "# no comment", "y": [1, 2]}}
    assert merge(text, wanted, {("model_init_kwargs", "attn_implementation"): "why"}) == (
        "model_init_kwargs: {attn_implementation: sdpa, x: '# no comment', y: [1, 2]}  # why\n"
    )


def test_a_value_over_several_lines_gives_way_to_one_line() -> None:
    after = changed(MINE, datasets=[{"path": "text"}], chat_template_path="new")
    assert "datasets: [{path: text}]  # why\nchat_template_path: new  # why\nper_device" in after
    text = "a:\n  # before\n  - 1\n  - 2  # two\n\n# about b\nb: |  # head\n  text\n# end\n"
    after = changed(text, a=[3], b="x")
    assert after == "a: [3]  # before; why\n\n# about b\nb: x  # head; why\n# end\n"
    assert changed("a:\n  - {b: 1}\n# about c\nc: 1\n", a=2) == "a: 2  # why\n# about c\nc: 1\n"


def test_a_value_that_stays_the_same_is_not_touched() -> None:
    assert changed(MINE, learning_rate="2e-5", save_strategy=False) == MINE


def test_a_float_is_written_so_that_pyyaml_reads_a_float() -> None:
    assert "learning_rate: 1.0e-05  # why\n" in changed(MINE, learning_rate=1e-05)


@pytest.mark.parametrize(
    "text", ["no", "off", "on", "yes", "y", "1e-05", "1.0e-05", "012", "0o7", "1:30", "null", "~", ""]
)
def test_a_string_that_yaml_would_read_as_something_else_is_quoted(text: str) -> None:
    assert yaml.safe_load(f"a: {as_yaml(text)}") == {"a": text}
    assert yaml.safe_load(f"a: {{b: {as_yaml(text)}}}") == {"a": {"b": text}}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a: 1\r\nb: 2  # c\r\n", "b: 2  # c\r\n"),
        ("a: 1\nb: 0o7\nc: 012\nd: 1_000\ne: 1:30\n", "b: 0o7\nc: 012\nd: 1_000\ne: 1:30\n"),
        ("a: 1\nb: 2001-12-14t21:59:43.10-05:00\nc: 2026-11-30\n", "b: 2001-12-14t21:59:43.10-05:00\nc: 2026-11-30\n"),
        ("a: 1\nb: &x {k: v}\nc: *x\nd:\n  <<: *x\n  e: 1\n", "b: &x {k: v}\nc: *x\nd:\n  <<: *x\n  e: 1\n"),
        ('a: 1\nb: |+\n   two\n   lines\n\nc: "\\u00e9"\nd: é\n', 'b: |+\n  two\n  lines\n\nc: "é"\nd: é\n'),
        ("a: 1\nb: no\nc: On\nd: Y\n", "b: no\nc: On\nd: Y\n"),
        ("a: 1\nb: 1E-5\nc: +1.5\nd: .5\ne: 5.\n", "b: 1E-5\nc: +1.5\nd: .5\ne: 5.\n"),
        ("\ufeffa: 1\nb: 2 # bom\n", "b: 2 # bom\n"),
        ("%YAML 1.1\n---\na: 1\nb: 2 # c\n...\n", "b: 2 # c\n"),
        ("  a: 1\n  b: 2\n", "b: 2\nnew: x"),
        ("a: 1\nb:\n- 1\n-   2\n", "b:\n- 1\n- 2\n"),
        ("a: 1\nb: 2", "b: 2\nnew: x"),
        ("a:\nb: two\n  lines\n", "b: two lines\n"),
        ("a:     # nothing yet\nb: 2\n", "a: 7  # nothing yet; why\nb: 2\n"),
        ("a: !!int '1'\nb: !!str 2\n", "b: !!str 2\n"),
        ("? b\n: 2\n", "b: 2\n"),
        ("a: 'over\n\n  lines'  # c\nb: 2\n", "a: 7  # c; why\nb: 2\n"),
    ],
)
def test_whatever_else_is_in_the_file_stays_as_it_is(text: str, kept: str) -> None:
    after = changed(text, a=7, new="x")
    assert kept in after
    assert yaml.safe_load(after) == {**yaml.safe_load(text), "a": 7, "new": "x"}


def test_an_anchor_on_a_changed_value_leaves_its_other_uses_with_the_old_value() -> None:
    assert yaml.safe_load(changed("# mine\na: &x 1\nb: *x\n", a=2)) == {"a": 2, "b": 1}
    assert changed("# mine\na: &x 1\nb: *x\n", b=2) == "# mine\na: &x 1\nb: 2  # why\n"


def test_a_form_that_is_not_edited_in_place_is_written_anew() -> None:
    assert changed("# mine\nb: {c: }\n", a=1) == "# mine\nb:\n  c: null\na: 1  # why\n"
    assert changed("# mine\r\nb: {c: }\r\n", a=1) == "# mine\r\nb:\r\n  c: null\r\na: 1  # why\r\n"


def test_json_is_yaml_too() -> None:
    assert changed('{"a": 1,\n "b": ["x", 2]}', a=2) == '"a": 2  # why\n"b": ["x", 2]\n'


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "# only a comment", "---\n", "\ufeff"])
def test_a_file_without_options_gets_them(text: str) -> None:
    after = changed(text, a=1, save_strategy="no")
    assert yaml.safe_load(after) == {"a": 1, "save_strategy": "no"}
    assert after.startswith(text.strip("\ufeff\n"))
    assert after.endswith("\n")


def test_a_new_list_of_mappings_is_written_over_several_lines() -> None:
    assert merge("", {"datasets": [{"path": "json"}]}, {}) == "datasets:\n- path: json\n"


def test_a_reason_stays_in_its_line() -> None:
    after = merge("a: 1\n", {"a": 2}, {("a",): "first\nb: 3 \x07"})
    assert after == "a: 2  # first b: 3\n"


def test_values_of_python_become_values_of_yaml() -> None:
    class Strategy(enum.Enum):
        NO = "no"

    assert plain({"a": (1, Strategy.NO), "b": {2: 1.5}}) == {"a": [1, "no"], "b": {2: 1.5}}


def test_one_is_neither_true_nor_a_float() -> None:
    assert not same(1, True)
    assert not same([1], [1.0])
    assert same({"a": [float("nan")]}, {"a": [float("nan")]})
    assert same(datetime.date(2026, 11, 30), datetime.date(2026, 11, 30))


NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,12}", fullmatch=True).filter(lambda name: yaml.safe_load(name) == name)
LETTERS = st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t") | st.sampled_from(
    "#:'\"{}[],&*!|>%@`- \\"
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(LETTERS, max_size=20)
    | st.sampled_from(["no", "on", "1e-05", "2e-5", "0x1", "1_0", "=", "<<", "2026-11-30", "a: b", "a #b", "- x"])
    | st.dates()
)
VALUES = st.recursive(
    SCALARS, lambda parts: st.lists(parts, max_size=3) | st.dictionaries(NAMES, parts, max_size=3), max_leaves=6
)
OPTIONS = st.dictionaries(NAMES, VALUES, max_size=5)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A config as people write them: each option in some style, comments and blank lines between."""
    lines = []
    for name, value in draw(OPTIONS).items():
        flow = draw(st.sampled_from([True, False, None]))
        style = draw(st.sampled_from([None, None, "'", '"', "|", ">"])) if isinstance(value, str) else None
        width = draw(st.sampled_from([20, 80, 1000]))
        indent = draw(st.sampled_from([2, 4]))
        written = yaml.safe_dump(
            {name: value},
            default_flow_style=flow,
            default_style=style,
            width=width,
            indent=indent,
            allow_unicode=draw(st.booleans()),
        )
        written = written.rstrip("\n")
        if written.startswith("{"):
            written = written[1:-1]
        if isinstance(value, int | float) and draw(st.booleans()):
            written += draw(st.sampled_from(["  # mine", " #", " # a # b"]))
        lines += [written, *draw(st.lists(st.sampled_from(["", "# a comment", "  # indented"]), max_size=2))]
    text = "\n".join(lines) + draw(st.sampled_from(["\n", "", "\n\n# end\n"]))
    return text.replace("\n", "\r\n") if draw(st.booleans()) else text


def readable(text: str) -> bool:
    try:
        return isinstance(yaml.safe_load(text), dict | None)
    except yaml.YAMLError:
        return False


@settings(max_examples=300, deadline=None)
@given(text=texts().filter(readable), changes=OPTIONS, reason=st.none() | st.text(max_size=20))
def test_every_change_comes_back_through_pyyaml_as_it_was_meant(
    text: str, changes: dict[str, Any], reason: str | None
) -> None:
    before = yaml.safe_load(text) or {}
    wanted = {**before, **changes}
    after = merge(text, wanted, {(name,): reason for name in changes} if reason else {})
    assert same(yaml.safe_load(after) or {}, wanted)
    assert after.endswith("\n") or not wanted


@settings(max_examples=150, deadline=None)
@given(text=texts().filter(readable), value=VALUES)
def test_a_new_option_leaves_the_scalars_the_order_and_the_comments_of_the_others(text: str, value: Any) -> None:
    before = yaml.safe_load(text) or {}
    after = merge(text, {**before, "new_option": value}, {("new_option",): "why"})
    assert list(yaml.safe_load(after)) == [*before, "new_option"]
    assert scalars(after)[: len(scalars(text))] == scalars(text)
    if re.search("- +- ", text):
        return  # ruamel.yaml 0.19 loses the comment below a list in a list
    for comment in ("# a comment", "# indented", "# mine", "# a # b", "# end"):
        assert after.count(comment) == text.count(comment)


def scalars(text: str) -> list[tuple[str, str | None]]:
    """What stands in the text for each scalar, and in which quotes."""
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    return [(event.value, event.style) for event in events if isinstance(event, yaml.ScalarEvent)]
