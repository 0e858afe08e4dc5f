"""A job of a sweep tuned once for real, and its end-to-end comparison."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotune import folder as run_folder
from autotune import session
from autotune.plan.space import Candidate
from benchmarks.end_to_end import finished
from benchmarks.search_jobs import JOBS, build
from benchmarks.search_page import Live
from benchmarks.sweep_table import Table, plan_of
from benchmarks.truth import regret, true_rates

MEASURED = re.compile(r"end to end ([0-9.]+)")
STEPS = 100  # optimizer steps of each `trl` command
LEAST_BUDGET = 60.0  # planning takes some 10 s of it, which a played search does not


def tune(table: Table, *, budget_seconds: float) -> Live:
    """Tune the job here, for so long and for the planning. Raises SystemExit where that fails."""
    job = JOBS[table.name]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sft.yaml").write_text(job.config)
        options = session.Options(method="sft", arguments=("--config", "sft.yaml"), folder=folder)
        with session.children_for(options) as (children, _options, _machine):
            build(job, folder, children)
        run = folder / "run"
        command = [sys.executable, "-m", "autotune", "sft", "--config", "sft.yaml", "--auto", "--run-folder", str(run)]
        command += ["--budget", f"{max(LEAST_BUDGET, budget_seconds + 10):.0f}s"]
        began = time.monotonic()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - began
        compare = [sys.executable, str(Path(__file__).with_name("end_to_end.py")), "--run", str(run)]
        compare += ["--steps", str(STEPS)]
        compared = subprocess.run(compare, check=True, stdout=subprocess.PIPE, text=True)
        last = finished(run)
        plan = plan_of(table)
        picked = _winner(run, last.best) or plan.space.baseline
        rates = true_rates(table, plan)
        return Live(
            picked=str(picked),
            regret=regret(rates, picked) if picked in rates else None,
            claimed=last.speedup or 1.0,
            end_to_end=float(MEASURED.findall(compared.stdout)[-1]),
            seconds=seconds,
        )


def _winner(run: Path, options: dict[str, object]) -> Candidate | None:
    """The candidate that was delivered: the last whose longest rows were tried; None where nothing was changed."""
    if not options:
        return None
    tried = [one for one in run_folder.results(run) if one.purpose == "memory" and one.outcome == "ok"]
    return tried[-1].candidate if tried else None
