"""docs/search.md and its plot: what `make bench-search` measured, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

DOCS = Path(__file__).parent.parent / "docs"
LEAST_REGRET = 1e-3  # the bottom of the plot; a regret of nothing lies there


class Curve(msgspec.Struct, frozen=True):
    """The regret of the best so far, at `moments` in seconds, one line a seed."""

    name: str
    moments: tuple[float, ...]
    lines: tuple[tuple[float, ...], ...]


class Live(msgspec.Struct, frozen=True):
    """One tuning for real. Ratios are to the user's own settings."""

    picked: str
    regret: float | None  # by the sweep's table
    claimed: float
    end_to_end: float  # of plain `trl` commands
    seconds: float


class JobRows(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one sweep. Regrets are shares: by how much the sweep's best is faster than what was delivered."""

    name: str
    about: str
    machine: str
    date: str
    candidates: int
    repetitions: int
    disturbed_share: float
    repetition_seconds: float
    noise: float
    budget_seconds: float
    best_over_baseline: float | None
    best: str
    regrets: tuple[float, ...]
    trials: tuple[int, ...]
    seconds: tuple[float, ...]
    confirmed: int
    busy_regrets: tuple[float, ...]
    busy_doubtful: tuple[bool, ...]
    other_regrets: dict[str, tuple[float, ...]]
    curves: tuple[Curve, ...]
    real_seconds: float
    live: Live | None = None


def page(jobs: Sequence[JobRows], *, share: float, seeds: int) -> str:
    """The page in Markdown."""
    others = list(jobs[0].other_regrets)
    return "\n".join(
        (
            "# How good the search is",
            "",
            f"Written by `make bench-search` on {time.strftime('%Y-%m-%d')}. Every row is of that one run.",
            "",
            "A sweep measures every allowed candidate of a job several times, each by the tool's own trial. The",
            "*regret* of a search is by how much the sweep's best candidate (median of its repetitions) is faster than",
            f"the one that the search delivered. The search gets {share:.0%} of the time that one repetition of the",
            f"sweep takes, and is played from {seeds} seeds on the recorded times: the code that runs is the search",
            "itself, and each trial takes what one of the recorded repetitions of that candidate took. The repetitions",
            "differ, so the noise of the machine is in it.",
            "",
            *_sweeps(jobs),
            "",
            *_regrets(jobs, others),
            "",
            "![Regret of the best so far over time](search.svg)",
            "",
            *_busy(jobs),
            "",
            *_live(jobs),
            "## What this does not show",
            "",
            "* **GPUs.** Every sweep here is of a CPU. What a search finds on a GPU, and how its trials differ from",
            "  each other there, is not measured.",
            "* Models of a few hundred thousand parameters: a step takes a tenth of a second, and the start of a trial",
            "  is a larger part of it than with a large model.",
            "* The time that the search needs to think is not in the played seconds: "
            f"{max(one.real_seconds for one in jobs):.1f} s of real time a run at most.",
            "* A sweep's best is the best of many noisy medians, so a little of every regret is the sweep's own luck.",
            "",
            "Sweeps are made by `make bench-sweep` and lie in `tests/data/sweeps`.",
            "",
        )
    )


def _sweeps(jobs: Sequence[JobRows]) -> list[str]:
    lines = [
        "## The sweeps",
        "",
        "| job | candidates x repetitions | one repetition | repetitions apart | disturbed | best over yours | where |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in jobs:
        gain = f"{one.best_over_baseline:.2f}x" if one.best_over_baseline else "yours did not run"
        lines.append(
            f"| `{one.name}`: {one.about} | {one.candidates} x {one.repetitions} | {one.repetition_seconds:.0f} s "
            f"| {one.noise:.1%} | {one.disturbed_share:.1%} | {gain} ({one.best}) | {one.machine}, {one.date} |"
        )
    return [
        *lines,
        "",
        "*Repetitions apart*: how far those of one candidate are from each other, the median over candidates.",
        "*Disturbed*: trials beside which others had cores that they needed, each measured again up to twice.",
    ]


def _regrets(jobs: Sequence[JobRows], others: Sequence[str]) -> list[str]:
    lines = [
        "## Regret",
        "",
        f"| job | budget | trials | used | median regret | worst | confirmed | {' | '.join(others)} |",
        f"|---|---|---|---|---|---|---|{'---|' * len(others)}",
    ]
    for one in jobs:
        found = " | ".join(_spread(one.other_regrets[name]) for name in others)
        lines.append(
            f"| `{one.name}` | {one.budget_seconds:.0f} s | {_span(one.trials)} "
            f"| {statistics.median(one.seconds):.0f} s | {statistics.median(one.regrets):.1%} | {max(one.regrets):.1%} "
            f"| {one.confirmed} of {len(one.regrets)} | {found} |"
        )
    return [
        *lines,
        "",
        "*Budget* is what the search was given, *used* what it took with its confirmation and checks (median).",
        "The last columns: median and worst regret of random search and of Optuna's TPE with its defaults, with the",
        "same budget and the same trials; both begin with the user's settings, prune nothing, confirm nothing and",
        "go on to the end of the budget, where the search stops when it finds no more.",
    ]


def _busy(jobs: Sequence[JobRows]) -> list[str]:
    lines = [
        "## Beside another process",
        "",
        "The same with a second process that keeps one core busy for half of the budget, the first half or the second:",
        "steps that need that core are slowed, and the load meter tells. The pick must be as good, or be called",
        "doubtful by the search itself.",
        "",
        "| job | regret: median | worst | called doubtful | worst that was not |",
        "|---|---|---|---|---|",
    ]
    for one in jobs:
        sure = [value for value, doubtful in zip(one.busy_regrets, one.busy_doubtful, strict=True) if not doubtful]
        worst = f"{max(sure):.1%}" if sure else "none was"
        lines.append(
            f"| `{one.name}` | {statistics.median(one.busy_regrets):.1%} | {max(one.busy_regrets):.1%} "
            f"| {sum(one.busy_doubtful)} of {len(one.busy_doubtful)} | {worst} |"
        )
    return lines


def _live(jobs: Sequence[JobRows]) -> list[str]:
    tuned = [(one.name, one.live) for one in jobs if one.live is not None]
    if not tuned:
        return []
    lines = [
        "## For real",
        "",
        "One tuning of each job on the machine itself, and then plain `trl sft` with the config before and after.",
        "",
        "| job | picked | regret by the sweep | claimed | `trl` before and after | took |",
        "|---|---|---|---|---|---|",
    ]
    for name, live in tuned:
        by_table = f"{live.regret:.1%}" if live.regret is not None else "not swept"
        lines.append(
            f"| `{name}` | {live.picked} | {by_table} | {live.claimed:.2f}x | {live.end_to_end:.2f}x "
            f"| {live.seconds:.0f} s |"
        )
    return [*lines, ""]


def _span(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1%}, {max(values):.1%}"


def plot(jobs: Sequence[JobRows], path: Path) -> None:
    """The median regret of the best so far over time, with the span of the seeds; one panel a job. SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    # text stays text, and the same figures give the same file
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "search", "font.size": 9})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(jobs), figsize=(3.2 * len(jobs) + 0.6, 3.0), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, one in zip(panels[0], jobs, strict=True):
        for curve, style in zip(one.curves, ("-", "--", ":"), strict=False):
            columns = [[max(LEAST_REGRET, value) for value in column] for column in zip(*curve.lines, strict=True)]
            middle = [statistics.median(column) for column in columns]
            panel.plot(curve.moments, middle, style, label=curve.name)
            panel.fill_between(curve.moments, [min(c) for c in columns], [max(c) for c in columns], alpha=0.12)
        panel.set(title=one.name, xlabel="seconds", yscale="log")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("regret of the best so far")
    panels[0][0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
