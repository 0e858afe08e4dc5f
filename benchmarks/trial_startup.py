"""How long a trial takes until it trains, against a fresh `trl sft` process with the same config and documents.

Both run in turns, the model and the tokenised sample in the file cache: from the start of the child, or of the `trl`
command, until TRL's trainer begins its first optimizer step (for `trl`: until it reports, less its `train_runtime`).

    make bench-trial
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotune import planning, session
from autotune.events import Phase
from autotune.search.samples import Sample, draw
from autotune.search.setting import Setting

RUNTIME = re.compile(r"['\"]train_runtime['\"]: ['\"]?([0-9.e+]+)")


def trial_seconds(setting: Setting, index: int, sample: Sample) -> float:
    """Start a trial of the baseline and wait until it trains."""
    trial = setting.trial(index, setting.space.baseline, sample.path, purpose="speed", passes=1)
    trial.start()
    try:
        while trial.running:
            for event in trial.poll():
                if isinstance(event, Phase) and event.phase == "first_step":
                    return event.seconds
            time.sleep(0.001)
        raise SystemExit(f"the trial ended before its first step: {trial.result_outcome()}")
    finally:
        trial.kill()


def fresh_seconds(config: Path, folder: Path, method: str) -> float:
    """Run one step of the same YAML with `trl`; what it took until the step."""
    command = [str(Path(sys.executable).with_name("trl")), method, "--config", str(config), "--max_steps", "1"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    began = time.perf_counter()
    said = []
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            found = RUNTIME.search(line)
            if found:
                seconds = time.perf_counter() - began - float(found[1])
                process.kill()
                return seconds
    raise SystemExit("trl ended before its first step:\n" + "".join(said[-20:]))


def main() -> None:
    """Print both medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = session.Options(method="sft", arguments=(), folder=folder, demo=True)
        with session.children_for(options) as (children, options, machine):
            plan = planning.prepare(options, children, machine, emit=lambda _event: None)
            setting = planning.setting_of(plan, folder, children, emit=lambda _event: None, started=time.monotonic())
            sample = draw(setting, 12)
            trial_seconds(setting, 0, sample)  # fills the cache of the tokenised sample, as the baseline's trial does
            config = setting.trial_folder(0) / "trl.yaml"
            fresh_seconds(config, folder, "sft")
            forked, fresh = [], []
            for repeat in range(repeats):
                forked.append(trial_seconds(setting, repeat + 1, sample))
                fresh.append(fresh_seconds(config, folder, "sft"))
                print(f"trial {forked[-1]:.2f} s   fresh trl sft {fresh[-1]:.2f} s", flush=True)
    a, b = statistics.median(forked), statistics.median(fresh)
    print(
        f"start until the first step, median of {repeats}: trial {a:.2f} s, fresh trl sft {b:.2f} s, ratio {a / b:.3f}"
    )


if __name__ == "__main__":
    main()
