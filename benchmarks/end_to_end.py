"""The claimed speed-up against real `trl` commands: the user's config and tuned.yaml, in turns.

Each arm is `trl METHOD --config FILE` in a fresh process over the same number of documents; its rate is TRL's own
`num_tokens` over TRL's own `train_runtime`.

    make bench-e2e                      tunes the demo first
    make bench-e2e ARGS="--run RUN"     takes a run that is there
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from autotune import folder as run_folder
from autotune.deliver.files import tuned_yaml
from autotune.events import RunFinished, decode_line

NUMBER = r"['\"]%s['\"]: ['\"]?([0-9.e+]+)"


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
    seconds = float(re.findall(NUMBER % "train_runtime", done.stdout)[-1])
    tokens = float(re.findall(NUMBER % "num_tokens", done.stdout)[-1])
    return tokens / seconds, seconds


def main() -> None:
    """Print each pair, then the measured ratio beside the claimed one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, help="a run's folder; without it the demo is tuned")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, help="optimizer steps of each arm; default: one epoch")
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
        ratios = []
        for repeat in range(given.repeats):
            arms = [before, after] if repeat % 2 == 0 else [after, before]
            found = {arm: rate(job.method, arm, Path(job.folder), steps) for arm in arms}
            ratios.append(found[after][0] / found[before][0])
            print(
                f"before {found[before][0]:.0f} tokens/s in {found[before][1]:.1f} s   "
                f"after {found[after][0]:.0f} tokens/s in {found[after][1]:.1f} s   ratio {ratios[-1]:.3f}",
                flush=True,
            )
    measured = math.exp(statistics.fmean(map(math.log, ratios)))
    claim = claimed.speedup or 1.0
    print(f"claimed {claim:.3f}   end to end {measured:.3f}   apart {measured / claim - 1:+.1%}")


def finished(run: Path) -> RunFinished:
    """The last line of a run."""
    for line in reversed((run / "events.jsonl").read_bytes().splitlines()):
        event = decode_line(line)
        if isinstance(event, RunFinished):
            return event
    raise SystemExit(f"{run} has not ended: {json.dumps(str(run))}")


if __name__ == "__main__":
    main()
