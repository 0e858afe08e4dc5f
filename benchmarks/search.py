"""How far the tuner's pick is from the best of an exhaustive sweep, at which cost; writes docs/search.md.

For each recorded sweep (`make bench-sweep`) the real search is played on its table (`benchmarks/replay.py`) with a
fifth of the time that one repetition of the sweep takes, from several seeds; random search and plain Optuna TPE get the
same time on the same tables, and the tuner plays once more with another process that is busy for half of the time.

    make bench-search                         a minute; needs matplotlib, which `make install-dev` brings
    make bench-search ARGS="--live"           tunes each job once more for real: about 5 minutes a job
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from autotune.errors import NoTrialFinishedError
from autotune.plan.space import Candidate
from autotune.planning import Plan
from autotune.probe.machine import describe
from benchmarks import live_search
from benchmarks.other_searches import Search, at_random, by_tpe, search
from benchmarks.replay import NOBODY, Busy, Played, play
from benchmarks.search_jobs import JOBS
from benchmarks.search_page import DOCS, Curve, JobRows, page, plot
from benchmarks.sweep_table import SWEEPS, Table, plan_of, read
from benchmarks.truth import regret, true_rates

SEEDS = 5
SHARE = 0.2  # of one repetition of the sweep, which is what a search may take
MEDIAN_REGRET, WORST_REGRET = 0.02, 0.05  # what is promised
OTHERS: dict[str, Search] = {"random search": at_random, "Optuna TPE": by_tpe}
MOMENTS = 60  # of a curve


def examine(table: Table) -> JobRows:
    """All figures of one sweep."""
    plan = plan_of(table)
    rates = true_rates(table, plan)
    budget = SHARE * table.repetition_seconds()
    moments = [budget * (number + 1) / MOMENTS for number in range(MOMENTS)]
    began = time.perf_counter()
    played = [_play(table, plan, seed, budget) for seed in range(SEEDS)]
    real_seconds = (time.perf_counter() - began) / SEEDS
    beside = []
    for seed in range(SEEDS):
        half = budget / 2
        busy = Busy(0.0, half) if seed % 2 == 0 else Busy(half, budget)
        beside.append(_play(table, plan, seed, budget, busy=busy))
    curves = {"trl-autotune": [_curve(one.incumbents, rates, moments) for one in played]}
    for name, asks in OTHERS.items():
        curves[name] = []
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                found = search(table, plan, Path(folder), seed=seed, budget_seconds=budget, asks=asks)
            curves[name].append(_curve(found, rates, moments))
    delivered = [regret(rates, one.found.winner) for one in played]
    best = max(rates, key=lambda one: rates[one])
    return JobRows(
        name=table.name,
        about=_about(table),
        machine=describe(table.prepared.machine),
        date=table.date,
        candidates=len(table.swept),
        repetitions=table.repetitions,
        disturbed_share=table.disturbed_share,
        repetition_seconds=table.repetition_seconds(),
        noise=_noise(table, rates),
        budget_seconds=budget,
        best_over_baseline=rates[best] / rates[plan.space.baseline] if plan.space.baseline in rates else None,
        best=best.describe(other_than=plan.space.baseline),
        regrets=tuple(delivered),
        trials=tuple(len(one.found.results) for one in played),
        seconds=tuple(one.seconds for one in played),
        confirmed=sum(one.found.confirmed_rounds > 0 for one in played),
        busy_regrets=tuple(regret(rates, one.found.winner) for one in beside),
        busy_doubtful=tuple(doubtful(one) for one in beside),
        other_regrets={name: tuple(one[-1] for one in curves[name]) for name in OTHERS},
        curves=tuple(Curve(name, tuple(moments), tuple(map(tuple, lines))) for name, lines in curves.items()),
        real_seconds=real_seconds,
    )


def _about(table: Table) -> str:
    if table.kind == "made up":
        return "made-up timings, not measured"
    return JOBS[table.name].about if table.name in JOBS else "a job of another version"


def _play(table: Table, plan: Plan, seed: int, budget: float, *, busy: Busy = NOBODY) -> Played:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return play(table, plan, Path(folder), seed=seed, budget_seconds=budget, busy=busy)
        except NoTrialFinishedError as error:
            raise SystemExit(f"error: {table.name}, seed {seed}: {error.what}") from None


def doubtful(played: Played) -> bool:
    """Whether the search says that its result may be wrong: it keeps the user's settings because it is not sure, or
    others had the machine in every round of the confirmation, or there was no time for one."""
    found = played.found
    return found.busy or found.contender is not None or found.confirmed_rounds == 0


def _curve(
    incumbents: Sequence[tuple[float, Candidate]], rates: dict[Candidate, float], moments: Sequence[float]
) -> list[float]:
    """The regret of the best so far at each moment; that of the first trial before it has ended."""
    values = []
    for moment in moments:
        since = [candidate for second, candidate in incumbents if second <= moment]
        values.append(regret(rates, since[-1] if since else incumbents[0][1]))
    return values


def _noise(table: Table, rates: dict[Candidate, float]) -> float:
    """How far repetitions of one candidate are apart: the median over candidates of (most - least) / median, of the
    seconds of their passes."""
    spreads = []
    for one in table.swept:
        if one.candidate in rates:
            seconds = [sum(map(sum, measured.step_seconds[1:])) for measured in one.repetitions]
            spreads.append((max(seconds) - min(seconds)) / statistics.median(seconds))
    return statistics.median(spreads)


def held(rows: JobRows) -> bool:
    """Whether the promise holds for this sweep."""
    return statistics.median(rows.regrets) <= MEDIAN_REGRET and max(rows.regrets) <= WORST_REGRET


def main() -> None:
    """Play, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--live", action="store_true", help="tune each job for real, and compare with plain `trl`")
    parser.add_argument("--sweeps", type=Path, default=SWEEPS, help="the folder of the tables")
    parser.add_argument("--into", type=Path, default=DOCS, help="the folder of the page and its plot")
    given = parser.parse_args()
    paths = sorted(given.sweeps.glob("*.json"))
    if not paths:
        first = next(iter(JOBS))
        raise SystemExit(
            f'error: no sweep is recorded in `{given.sweeps}`\nhint: make bench-sweep ARGS="--job {first}" (20 to 40 '
            f"minutes); jobs: {', '.join(JOBS)}"
        )
    jobs = []
    for path in paths:
        table = read(path)
        rows = examine(table)
        if given.live and table.name in JOBS:
            rows = msgspec.structs.replace(rows, live=live_search.tune(table, budget_seconds=rows.budget_seconds))
        jobs.append(rows)
        print(
            f"{rows.name:10} {rows.candidates} candidates, budget {rows.budget_seconds:.0f} s   regret median "
            f"{statistics.median(rows.regrets):.1%}, worst {max(rows.regrets):.1%}   "
            + "   ".join(f"{name} {statistics.median(found):.1%}" for name, found in rows.other_regrets.items())
            + f"   busy {max(rows.busy_regrets):.1%}   {rows.real_seconds:.1f} s a replay",
            flush=True,
        )
    given.into.mkdir(parents=True, exist_ok=True)
    plot(jobs, given.into / "search.svg")
    (given.into / "search.md").write_text(page(jobs, share=SHARE, seeds=SEEDS), encoding="utf-8")
    print(f"{given.into / 'search.md'} is written")
    broken = [rows.name for rows in jobs if not held(rows)]
    if broken:
        raise SystemExit(
            f"error: the regret is more than {MEDIAN_REGRET:.0%} in the median or {WORST_REGRET:.0%} at worst: "
            f"{', '.join(broken)}"
        )


if __name__ == "__main__":
    main()
