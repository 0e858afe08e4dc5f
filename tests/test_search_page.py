"""docs/search.md: what it says of figures, and its plot."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.search_page import Curve, JobRows, Live, page, plot

ROWS = JobRows(
    name="chat",
    about="Qwen3, conversations, 8 x 1",
    machine="2-core CPU",
    date="2026-11-30",
    candidates=96,
    repetitions=3,
    disturbed_share=0.021,
    repetition_seconds=480.0,
    noise=0.034,
    budget_seconds=96.0,
    best_over_baseline=4.5,
    best="rebalanced, 2 x 4",
    regrets=(0.0, 0.012, 0.004, 0.031, 0.012),
    trials=(14, 15, 14, 16, 14),
    seconds=(90.0, 91.0, 92.0, 93.0, 94.0),
    confirmed=5,
    busy_regrets=(0.0, 0.3, 0.01, 0.0, 0.0),
    busy_doubtful=(False, True, False, False, False),
    other_regrets={"random search": (0.4, 0.1, 0.2), "Optuna TPE": (0.05, 0.3, 0.2)},
    curves=(Curve("trl-autotune", (1.0, 2.0, 3.0), ((3.0, 0.1, 0.0), (3.0, 0.2, 0.01))),),
    real_seconds=0.8,
)


def row_of(text: str, heading: str) -> list[str]:
    """The cells of the only row of the table below a heading."""
    table = [line for line in text.split(f"## {heading}\n")[1].splitlines() if line.startswith("|")]
    return [cell.strip() for cell in table[2].strip("|").split("|")]


def test_the_page_tells_median_and_worst_of_each_search_and_what_is_not_measured() -> None:
    text = page([ROWS], share=0.2, seeds=5)
    assert row_of(text, "Regret") == [
        *("`chat`", "96 s", "14 to 16", "92 s", "1.2%", "3.1%", "5 of 5"),
        *("20.0%, 40.0%", "20.0%, 30.0%"),
    ]
    assert row_of(text, "Beside another process") == ["`chat`", "0.0%", "30.0%", "1 of 5", "1.0%"]
    assert "**GPUs.** Every sweep here is of a CPU" in text
    assert "## For real" not in text


def test_a_tuning_for_real_stands_beside_what_the_commands_gave() -> None:
    live = Live(picked="rebalanced, 2 x 4", regret=None, claimed=4.41, end_to_end=4.2, seconds=104.0)
    text = page([msgspec.structs.replace(ROWS, live=live)], share=0.2, seeds=5)
    assert row_of(text, "For real") == ["`chat`", "rebalanced, 2 x 4", "not swept", "4.41x", "4.20x", "104 s"]


def test_the_same_figures_give_the_same_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot([ROWS], tmp_path / "one.svg")
    plot([ROWS], tmp_path / "other.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "other.svg").read_text()
    assert "regret of the best so far" in text
