"""The claimed speed-up against real `trl` commands: the user's config and tuned.yaml, in turns.

Each arm is `trl METHOD --config FILE` in a fresh process over the same number of documents; its rate is TRL's own
`num_tokens` over TRL's own `train_runtime`. A host that is faster in one minute than in the next moves the ratio
between the run and this comparison; with `--trials` each command is followed by a trial of the same steps on the
same documents, so that what trials measure stands beside what the command gives in the same minute.

    make bench-e2e                                tunes the demo first
    make bench-e2e ARGS="--run RUN --trials"      takes a run that is there
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune import folder as run_folder
from autotune import planning, session
from autotune.deliver.files import tuned_yaml
from autotune.events import RunFinished, decode_line
from autotune.probe.lengths import sample_rows
from autotune.search.end_to_end import tokens_and_seconds
from autotune.search.measure import POLL_SECONDS
from autotune.search.setting import WARM_UP_STEPS


def rate(method: str, config: Path, folder: Path, steps: int) -> tuple[float, float]:
    """Useful tokens per second of one `trl` run of so many optimizer steps, and its `train_runtime`."""
    command = [str(Path(sys.executable).with_name("trl")), method, "--config", str(config)]
    command += ["--max_steps", str(steps), "--save_strategy", "no", "--disable_tqdm", "true"]
    command += ["--output_dir", str(config.with_suffix(".output"))]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"trl failed:\n{done.stdout[-2000:]}")
    told = tokens_and_seconds(done.stdout)
    if told is None:
        raise SystemExit(f"trl told no rate:\n{done.stdout[-2000:]}")
    tokens, seconds = told
    return tokens / seconds, seconds


def main() -> None:
    """Print each pair, then the measured ratio beside the claimed one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, help="a run's folder; without it the demo is tuned")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, help="optimizer steps of each arm; default: one epoch")
    parser.add_argument("--trials", action="store_true", help="measure the same steps by trials as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        run = given.run
        if run is None:
            run = work / "run"
            tune = [sys.executable, "-m", "autotune", "sft", "--demo", "--auto", "--budget", "100s"]
            subprocess.run([*tune, "--run-folder", str(run)], check=True, stdout=subprocess.DEVNULL)
        prepared = run_folder.read(run)
        job = prepared.job
        claimed = finished(run)
        before, after = work / "before.yaml", work / "after.yaml"
        before.write_text(tuned_yaml(job, prepared.machine, []))
        after.write_text((run / "tuned.yaml").read_text())
        resolved = job.resolved
        rows = resolved["per_device_train_batch_size"] * resolved["gradient_accumulation_steps"]
        steps = given.steps or max(1, prepared.lengths.rows // rows)
        ratios: list[float] = []
        by_trials: list[float] = []
        with trials_of(run, work) if given.trials else contextlib.nullcontext() as trial_rate:
            for repeat in range(given.repeats):
                found: dict[Path, float] = {}
                tried: dict[Path, float] = {}
                for arm in (before, after) if repeat % 2 == 0 else (after, before):
                    found[arm], seconds = rate(job.method, arm, Path(job.folder), steps)
                    line = f"{arm.stem:6} {found[arm]:.0f} tokens/s in {seconds:.1f} s"
                    if trial_rate is not None:
                        tried[arm] = trial_rate(arm == after, steps)
                        line += f"   by a trial {tried[arm]:.0f}"
                    print(line, flush=True)
                ratios.append(found[after] / found[before])
                print(f"ratio  {ratios[-1]:.3f}", end="")
                if tried:
                    by_trials.append(tried[after] / tried[before])
                    print(f"   by trials {by_trials[-1]:.3f}", end="")
                print(flush=True)
    measured, claim = statistics.geometric_mean(ratios), claimed.speedup or 1.0
    print(f"claimed {claim:.3f}   end to end {measured:.3f}   apart {measured / claim - 1:+.1%}")
    if by_trials:
        same = statistics.geometric_mean(by_trials)
        print(f"by trials in the same minutes {same:.3f}   apart {measured / same - 1:+.1%}")


@contextlib.contextmanager
def trials_of(run: Path, work: Path) -> Iterator[Callable[[bool, int], float]]:
    """Measures so many optimizer steps of the run's winner, or of the user's own, by a trial on the whole data."""
    plan = planning.resume(session.Options(method="", arguments=(), folder=Path.cwd(), resume=run))
    prepared = plan.prepared
    winner = next(
        one.candidate
        for one in reversed(run_folder.results(run))
        if one.purpose == "memory" and one.outcome == "ok"  # the last check of a winner
    )
    count = itertools.count()
    with session.children_of(prepared.job, prepared.machine, cold=False) as children:
        setting = planning.setting_of(plan, work, children, emit=lambda _event: None, started=time.monotonic())
        rows = setting.data.kept.row_numbers
        documents = work / "documents.parquet"
        sample_rows(prepared.job.resolved, rows, documents, folder=setting.job_folder, children=children)

        def measure(tuned: bool, steps: int) -> float:
            candidate = winner if tuned else plan.space.baseline
            trial = setting.trial(next(count), candidate, documents, purpose="memory", passes=0, warm_up_steps=steps)
            trial.start()
            while trial.running:
                time.sleep(POLL_SECONDS)
                trial.poll()
            measured = trial.steps[
                WARM_UP_STEPS:
            ]  # the first steps allocate, in a forked process more than in a fresh one
            return sum(one.useful_tokens for one in measured) / sum(one.seconds for one in measured)

        yield measure


def finished(run: Path) -> RunFinished:
    """The last line of a run."""
    for line in reversed((run / "events.jsonl").read_bytes().splitlines()):
        event = decode_line(line)
        if isinstance(event, RunFinished):
            return event
    raise SystemExit(f"{run} has not ended: {json.dumps(str(run))}")


if __name__ == "__main__":
    main()
