"""How long a trial takes to its first optimizer step, against a fresh `trl sft` process with the same config.

Both run in turns on the demo's model and data, the model and the tokenised sample in the file cache. From the start
of the child, or of the `trl` command, to the end of the first step.

    make bench-trial
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotune import engine
from autotune.deliver.files import tuned_yaml
from autotune.search.measure import Sample
from autotune.search.setting import Setting
from autotune.search.tuner import Tuner

STEP_WORDS = ("'loss'", '"loss"')


def trial_seconds(setting: Setting, index: int, sample: Sample) -> float:
    """Start a trial of the baseline and wait for its first step."""
    trial = setting.trial(index, setting.space.baseline, sample.path, purpose="speed", passes=1)
    began = time.perf_counter()
    trial.start()
    try:
        while not trial.steps:
            if not trial.running:
                raise SystemExit(f"the trial ended before its first step: {trial.result_outcome()}")
            trial.poll()
            time.sleep(0.001)
        return time.perf_counter() - began
    finally:
        trial.kill()


def fresh_seconds(config: Path, folder: Path, method: str) -> float:
    """Start `trl` on the same YAML and wait for the line that it logs after its first step."""
    command = [str(Path(sys.executable).with_name("trl")), method, "--config", str(config), "--max_steps", "1"]
    command += ["--logging_steps", "1", "--disable_tqdm", "true"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    began = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        try:
            for line in process.stdout:
                said.append(line)
                if any(words in line for words in STEP_WORDS):
                    return time.perf_counter() - began
        finally:
            process.kill()
    raise SystemExit("trl ended before its first step:\n" + "".join(said[-20:]))


def main() -> None:
    """Print both medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = engine.Options(method="sft", arguments=(), folder=folder, demo=True)
        with engine.children_for(options) as (children, options, machine):
            plan = engine.prepare(options, children, machine, emit=lambda _event: None)
            setting = engine.setting_of(plan, folder, children, emit=lambda _event: None, started=time.monotonic())
            tuner = Tuner(setting, [])
            sample = tuner.draw(12)
            config = folder / "baseline.yaml"
            config.write_text(tuned_yaml(plan.prepared.job, machine, []))
            trial_seconds(setting, 0, sample)  # fills the cache of the tokenised sample, as the baseline's trial does
            fresh_seconds(config, folder, "sft")
            forked, fresh = [], []
            for repeat in range(repeats):
                forked.append(trial_seconds(setting, repeat + 1, sample))
                fresh.append(fresh_seconds(config, folder, "sft"))
                print(f"trial {forked[-1]:.2f} s   fresh trl sft {fresh[-1]:.2f} s", flush=True)
    a, b = statistics.median(forked), statistics.median(fresh)
    print(f"start to first step, median of {repeats}: trial {a:.2f} s, fresh trl sft {b:.2f} s, ratio {a / b:.3f}")


if __name__ == "__main__":
    main()
