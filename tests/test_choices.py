"""Each choice of a CPU's axes alone, in a real trial: TRL trains with it, and exact ones have the same losses."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from autotune.children import Children
from autotune.job import read_job
from autotune.plan.axes import build_space
from autotune.plan.data import Data
from autotune.plan.space import OFFERED, Candidate
from autotune.probe.abilities import probe_abilities
from autotune.probe.lengths import measure_lengths
from autotune.probe.model import probe_model
from autotune.search.measure import run_memory_trial
from autotune.search.samples import draw_longest
from autotune.search.setting import Setting
from tests import parts, tiny

pytestmark = pytest.mark.slow

JOB = """\
model_name_or_path: model
datasets: [{path: json, data_files: rows.jsonl, split: train}]
output_dir: out
bf16: false
max_length: null
"""
JOBS = {
    "all weights": "optim: adamw_torch\n",
    "LoRA": "use_peft: true\nlora_dropout: 0.0\ngradient_checkpointing_kwargs: {every_n_layers: 2}\n",
    "padding-free": "padding_free: true\ndataloader_num_workers: 1\ndataloader_persistent_workers: true\n",
}
EXACT = 1e-5
ROUNDED = 5e-2


@pytest.fixture
def setting(request: pytest.FixtureRequest, children: Children, tmp_path: Path) -> Setting:
    tiny.make_model(tmp_path / "model")
    rows = [{"text": tiny.words(5 + number % 30, seed=number)} for number in range(48)]
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "sft.yaml").write_text(JOB + JOBS[request.param])
    job = read_job(
        "sft", ["--config", "sft.yaml"], folder=tmp_path, children=children, accelerator=False, cpu_bf16=True
    )
    named = {"model": "model", "revision": None, "trust_remote_code": False}
    machine = msgspec.structs.replace(
        parts.cpu_machine(), abilities=probe_abilities(model=named, folder=tmp_path, children=children)
    )
    model = probe_model("model", folder=tmp_path, children=children)
    data = Data(job, measure_lengths(job.resolved, folder=tmp_path, children=children), model)
    run = tmp_path / "run"
    run.mkdir()
    return Setting(
        job=job,
        machine=machine,
        model=model,
        data=data,
        space=build_space(job, machine, data, allowed=OFFERED | {"rounded"}),
        children=children,
        folder=run,
        emit=lambda _event: None,
        budget_seconds=600.0,
    )


@pytest.mark.parametrize("setting", JOBS, indirect=True)
def test_each_choice_alone_trains_and_exact_ones_have_the_losses_of_the_baseline(setting: Setting) -> None:
    space = setting.space
    alone: dict[str, Candidate] = {"baseline": space.baseline}
    for axis in space.axes:
        for choice in axis.choices[1:]:
            if axis.name not in ("arrangement", "threads"):
                candidate = msgspec.structs.replace(space.baseline, **{axis.name: choice.value})
                alone[f"{choice.grade} {axis.name} {choice.value}"] = candidate
    padded = [one.value for one in space.axis("arrangement").choices if one.value != space.baseline.arrangement]
    alone["exact arrangement"] = msgspec.structs.replace(space.baseline, arrangement=padded[-1])
    sample = draw_longest(setting, space.baseline)
    losses: dict[str, list[float]] = {}
    for number, (name, candidate) in enumerate(alone.items()):
        result = run_memory_trial(setting, number, candidate, sample, reason="tried alone")
        assert (name, result.outcome, result.detail) == (name, "ok", None)
        losses[name] = [loss for loss in result.losses if loss is not None]
    assert {"exact checkpointing off", "exact checkpointing selective", "rounded dtype bfloat16"} <= losses.keys()
    assert len(losses["baseline"]) >= 2
    for name, own in losses.items():
        near = ROUNDED if name.startswith("rounded") else EXACT
        assert own == pytest.approx(losses["baseline"], abs=near), name
