"""Failures as libraries print them: each is told by its outcome and the error that came first."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from autotune.child import Ending
from autotune.events import Outcome
from autotune.trial.failures import LONGEST, first_traceback, read_log
from autotune.trial.runner import classify_ending
from tests.test_trial import PLAN

RECORDED = sorted((Path(__file__).parent / "data" / "failures").glob("*.txt"))


class Recorded(msgspec.Struct):
    """One file: its heading, and what was printed."""

    outcome: Outcome
    ending: str
    error: str
    source: str
    text: str


def recorded(path: Path) -> Recorded:
    heading, rest = [], path.read_text().splitlines(keepends=True)
    while rest[0].startswith("# "):
        heading.append(rest.pop(0)[2:].rstrip("\n").split(": ", 1))
    return msgspec.convert(dict(heading) | {"text": "".join(rest)}, type=Recorded)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_failure_is_told_by_its_outcome_and_first_error(path: Path, tmp_path: Path) -> None:
    one = recorded(path)
    kind, number = one.ending.split()
    ending = Ending(exit_code=int(number)) if kind == "exit" else Ending(exit_code=None, signal=int(number))
    log = tmp_path / "output.log"
    log.write_text(one.text)
    outcome, where, detail = classify_ending(ending, "a step", log, PLAN)
    assert (outcome, where) == (one.outcome, "a step")
    assert detail is not None
    assert one.error in detail
    assert one.source


def test_every_kind_of_failure_is_recorded() -> None:
    assert {recorded(path).outcome for path in RECORDED} == {"oom", "error", "killed", "hung"}
    assert len(RECORDED) >= 25


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_traceback_that_is_shown_is_the_first_real_one(path: Path) -> None:
    one = recorded(path)
    shown = first_traceback(one.text)
    if "Traceback" not in one.text or one.outcome == "hung":
        assert shown is None
        return
    assert shown is not None
    lines = shown.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert shown.count("Traceback") == 1
    if path.stem != "vllm-startup-memory":  # its first is cut off at the top
        assert any(one.error in line for line in lines)
    assert not re.search(r"^\(|ERROR \d\d", shown, re.MULTILINE)


def test_a_traceback_of_the_error_that_is_told_goes_before_the_first() -> None:
    handled = "Traceback (most recent call last):\n  File 'a', line 1\nKeyError: 'handled'\n"
    real = "Traceback (most recent call last):\n  File 'b', line 2\nRuntimeError: real\n"
    assert first_traceback(handled + real) == handled.rstrip()
    assert first_traceback(handled + real, of="RuntimeError: real") == real.rstrip()
    assert first_traceback(handled + real, of="RuntimeError: another") == handled.rstrip()


def test_the_middle_of_a_long_traceback_is_left_out() -> None:
    frames = "".join(f'  File "a.py", line {number}, in f\n    g()\n' for number in range(100))
    shown = first_traceback(f"Traceback (most recent call last):\n{frames}ValueError: no\n")
    assert shown is not None
    lines = shown.splitlines()
    assert len(lines) == LONGEST
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "ValueError: no"
    assert "  ... 163 lines ..." in lines


def test_a_log_without_an_error_tells_of_none() -> None:
    assert read_log("") is None
    assert read_log("Loading weights: 100%\nto avoid running out of memory, use a smaller batch\n") is None
