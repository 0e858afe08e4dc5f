"""Whether a winner is still the same training: each check lets through what is, and finds out what is not."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from autotune.children import Children
from autotune.events import Step, TrialFinished
from autotune.job import read_job
from autotune.plan.axes import build_space
from autotune.plan.data import Data
from autotune.plan.space import OFFERED, Arrangement, Candidate
from autotune.probe.lengths import measure_lengths
from autotune.search import end_to_end, samples
from autotune.search.checking import Checking
from autotune.search.end_to_end import run_end_to_end
from autotune.search.gates import FINITE_STEPS, holds_longest_rows, stays_finite
from autotune.search.measure import finite_in_a_row, measure
from autotune.search.parity import parity
from autotune.search.samples import Sample
from autotune.search.setting import Setting
from autotune.trial.result import Pass, TrialResult
from tests import parts, tiny
from tests.fake_workers import write_table
from tests.processes import alive, eventually, marked, read_numbers

GIB = 2**30


class Material(NamedTuple):
    folder: Path
    sample: Sample


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("job")
    tiny.make_model(folder / "model")
    tiny.write_rows(folder / "rows.jsonl", [{"input_ids": [7] * 32} for _ in range(96)])
    return Material(folder, Sample(folder / "sample-96.parquet", 96, 12))


class Checks:
    """A search whose winner is to be checked, with workers that do what `rules` say."""

    def __init__(
        self,
        material: Material,
        children: Children,
        run: Path,
        *,
        precision: str = "bf16",
        rules: list[dict[str, Any]] | None = None,
        machine: Any = None,
        **changes: Any,
    ) -> None:
        folder = material.folder
        (folder / "sft.yaml").write_text(
            "model_name_or_path: model\ndatasets:\n  - path: json\n    data_files: rows.jsonl\n"
            "output_dir: out\nmax_length: 128\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
            f"attn_implementation: sdpa\nuse_cpu: true\nbf16: {str(precision == 'bf16').lower()}\n"
        )
        job = read_job(
            "sft", ["--config", "sft.yaml"], folder=folder, children=children, accelerator=False, cpu_bf16=True
        )
        data = Data(job, measure_lengths(job.resolved, folder=folder, children=children))
        here = parts.cpu_machine()
        run.mkdir(exist_ok=True)
        write_table(run, rules or [])
        self.said: list[Any] = []
        self.setting = Setting(
            job=job,
            machine=here,
            model=parts.SHAPE,
            data=data,
            space=build_space(job, here, data, allowed=OFFERED | frozenset(changes.pop("allowed", ()))),
            children=children,
            folder=run,
            emit=self.said.append,
            budget_seconds=changes.pop("budget_seconds", 600.0),
            worker="tests.fake_workers:trial_by_table",
            **changes,
        )
        self.base = self.setting.space.baseline
        self.numbers = itertools.count(10)
        self.sample = material.sample

    def other(self, **changes: Any) -> Candidate:
        return msgspec.structs.replace(self.base, **changes)

    def result(self, candidate: Candidate, *losses: float | None, **changes: Any) -> TrialResult:
        """A confirmation of four passes of 12 steps, 0.02 s and 256 tokens each."""
        passes = tuple(Pass(number, 12, 0.24, 12 * 256, 0, 24) for number in range(1, 5))
        fields: dict[str, Any] = {
            "index": 1,
            "purpose": "confirm",
            "candidate": candidate,
            "label": "",
            "outcome": "ok",
            "passes": passes,
            "losses": losses or (2.0, 2.0, 2.0),
            "steps": 50,
            "finite_steps": 50,
            "finite_in_a_row": 50,
            "warm_up_steps": 2,
            "warm_up_seconds": 0.04,
            "startup_seconds": 0.1,
        }
        return TrialResult(**(fields | changes))

    def checking(self, result: TrialResult) -> Checking:
        return Checking(self.setting, self.sample, lambda: next(self.numbers), like=result, known={})

    def parity(self, winner: Candidate, mine: float | None, theirs: float | None = 2.0) -> list[Any]:
        result = self.result(winner, mine)
        return parity(winner, result, self.result(self.base, theirs), self.checking(result))

    @property
    def trials(self) -> int:
        """How many trials the checks took."""
        return sum(isinstance(event, TrialFinished) for event in self.said)


SPLIT = Arrangement("padded", 2, 4)
IN_FLOAT32 = {"bf16": False}


# --- the same maths -----------------------------------------------------------------------------------------------


def test_losses_that_agree_in_the_jobs_own_precision_need_no_further_trial(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run")
    (gate,) = checks.parity(checks.other(arrangement=SPLIT), 2.0 + 3e-6)
    assert (gate.name, gate.passed) == ("parity", True)
    assert gate.value == pytest.approx(3e-6)
    assert checks.trials == 0


def test_a_half_precision_arrangement_is_judged_in_float32_and_its_rounding_by_the_users_own_spread(
    material: Material, children: Children, tmp_path: Path
) -> None:
    # another split of the user's own batch moves the bf16 loss by 4e-5; in float32 all is equal
    rules = [{"if": {"per_device_train_batch_size": 2, "bf16": True}, "loss": 2.0 + 4e-5}]
    checks = Checks(material, children, tmp_path / "run", rules=rules)
    exact, rounding = checks.parity(checks.other(arrangement=SPLIT), 2.0 + 1e-4)
    assert (exact.name, exact.passed, exact.value) == ("parity", True, 0.0)
    assert exact.detail.startswith("in float32 ")
    assert (rounding.name, rounding.passed) == ("rounding", True)
    assert rounding.value == pytest.approx(1e-4)
    assert "at most 4e-04: 10 times what rounding moves your own, 4.0e-05" in rounding.detail


def test_an_arrangement_that_is_other_maths_hides_behind_no_rounding(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules = [
        {"if": {"per_device_train_batch_size": 2, **IN_FLOAT32}, "loss": 2.0 + 5e-5},
        {"if": {"per_device_train_batch_size": 2, "bf16": True}, "loss": 2.0 + 5e-5},
    ]
    checks = Checks(material, children, tmp_path / "run", rules=rules)
    exact, rounding = checks.parity(checks.other(arrangement=SPLIT), 2.0 + 5e-5)
    assert rounding.passed  # the spread of the user's own splits would let it through
    assert (exact.passed, exact.value) == (False, pytest.approx(5e-5))


def test_kernels_are_judged_against_the_spread_and_not_against_a_constant(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules = [{"if": {"per_device_train_batch_size": 2}, "loss": 2.0 + 2e-5}]
    checks = Checks(material, children, tmp_path / "run", rules=rules)
    eager = checks.other(attention="eager")
    (near,) = checks.parity(eager, 2.0 + 1.9e-4)
    (far,) = checks.parity(eager, 2.0 + 2.1e-4)
    assert (near.name, near.passed) == ("rounding", True)
    assert (far.name, far.passed) == ("rounding", False)


def test_how_far_half_precision_is_from_float32_is_rounding_too(
    material: Material, children: Children, tmp_path: Path
) -> None:
    # no split moves yours, and in float32 it is 3e-5 from what it is in bf16
    checks = Checks(material, children, tmp_path / "run", rules=[{"if": IN_FLOAT32, "loss": 2.0 + 3e-5}])
    eager = checks.other(attention="eager")
    (near,) = checks.parity(eager, 2.0 + 2.9e-4)
    (far,) = checks.parity(eager, 2.0 + 3.1e-4)
    assert near.passed
    assert near.detail.endswith("at most 3e-04: 10 times what rounding moves your own, 3.0e-05")
    assert not far.passed


def test_what_one_winners_checks_found_of_yours_is_not_run_again_for_the_next(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run")
    known: dict[Any, float] = {}
    for attention in ("eager", "flex_attention"):
        winner = checks.other(attention=attention)
        result, reference = checks.result(winner, 2.1), checks.result(checks.base, 2.0)
        checking = Checking(checks.setting, checks.sample, lambda: next(checks.numbers), like=result, known=known)
        (gate,) = parity(winner, result, reference, checking)
        assert not gate.passed
    assert checks.trials == 3  # two splits of yours, and yours in float32


def test_another_arrangement_in_float32_gets_no_spread_to_hide_behind(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run", precision="float32")
    (gate,) = checks.parity(checks.other(arrangement=SPLIT), 2.0 + 2e-5)
    assert (gate.name, gate.passed) == ("parity", False)
    assert checks.trials == 0


def test_the_kernels_of_packed_rows_are_tried_on_the_users_own_batch(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules = [{"if": {"attn_implementation": "eager"}, "loss": 2.5}]
    checks = Checks(material, children, tmp_path / "run", precision="float32", rules=rules)
    packed = next(one.value for one in checks.setting.space.axis("arrangement").choices if one.value.name == "bfd")
    assert checks.parity(checks.other(arrangement=packed), 3.0) == []  # other documents: their losses say nothing
    (gate,) = checks.parity(checks.other(arrangement=packed, attention="eager"), 3.0)
    assert (gate.name, gate.passed, gate.value) == ("rounding", False, 0.5)


def test_without_time_the_spread_is_not_known_and_that_is_said(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run", budget_seconds=0.0)
    exact, gate = checks.parity(checks.other(arrangement=SPLIT), 2.001)
    assert (exact.name, exact.passed, exact.value) == ("parity", True, None)
    assert exact.detail.startswith("not judged in float32: no time was left")
    assert (gate.name, gate.passed) == ("rounding", True)
    assert gate.detail.endswith("at most 5e-03: how far yours moves by rounding could not be measured")
    assert checks.trials == 0


def test_without_time_the_kernels_of_packed_rows_are_not_judged_and_that_is_said(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run", precision="float32", budget_seconds=0.0)
    packed = next(one.value for one in checks.setting.space.axis("arrangement").choices if one.value.name == "bfd")
    (gate,) = checks.parity(checks.other(arrangement=packed, attention="eager"), 3.0)
    assert (gate.name, gate.passed, gate.value) == ("rounding", True, None)
    assert gate.detail.startswith("not judged on your own batch: no time was left")


def test_a_winner_that_told_no_loss_fails(material: Material, children: Children, tmp_path: Path) -> None:
    checks = Checks(material, children, tmp_path / "run")
    winner = checks.other(arrangement=SPLIT)
    result = checks.result(winner, losses=())
    (gate,) = parity(winner, result, checks.result(checks.base, 2.0), checks.checking(result))
    assert (gate.name, gate.passed) == ("parity", False)


def test_precision_that_the_user_allowed_may_round_as_it_does(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run", precision="float32", allowed=("rounded",))
    bfloat16 = checks.other(dtype="bfloat16")
    assert checks.setting.space.grade(bfloat16) == "rounded"
    (near,) = checks.parity(bfloat16, 2.0 + 4e-4)
    (far,) = checks.parity(bfloat16, 2.1)
    assert near.passed
    assert not far.passed


# --- finite -------------------------------------------------------------------------------------------------------


def steps(*finite: bool) -> list[Step]:
    return [Step(0, number, 0.1, 1, 10, 0, 2.0, finite=one) for number, one in enumerate(finite)]


def test_steps_count_as_finite_back_to_the_last_that_is_not() -> None:
    assert finite_in_a_row(steps(True, False, True, True)) == 2
    assert finite_in_a_row(steps(True, True, False)) == 0
    assert finite_in_a_row([msgspec.structs.replace(steps(True)[0], loss=None)]) == 0


@pytest.mark.parametrize(
    ("run", "in_a_row", "losses", "scaled", "passed"),
    [
        (50, 50, 50, False, True),
        (50, 47, 50, False, False),  # a gradient of bf16 that is no number
        (50, 47, 50, True, True),  # of fp16: the scaler skipped a step at the start
        (50, 3, 50, True, False),
        (50, 0, 49, True, False),
    ],
)
def test_a_winner_whose_loss_or_gradient_is_no_number_is_found_out(
    material: Material,
    children: Children,
    tmp_path: Path,
    run: int,
    in_a_row: int,
    losses: int,
    scaled: bool,
    passed: bool,
) -> None:
    checks = Checks(material, children, tmp_path / "run")
    result = checks.result(checks.base, steps=run, finite_steps=losses, finite_in_a_row=in_a_row)
    assert stays_finite(result, checks.checking(result), scaled=scaled).passed == passed
    assert checks.trials == 0


@pytest.mark.parametrize(("loss", "passed"), [(2.0, True), (None, False)])
def test_a_winner_with_few_steps_goes_on_for_20(
    material: Material,
    children: Children,
    tmp_path: Path,
    loss: float | None,
    passed: bool,
) -> None:
    checks = Checks(material, children, tmp_path / "run", rules=[{"loss": loss}])
    result = checks.result(checks.base, steps=9, finite_steps=9, finite_in_a_row=9)
    gate = stays_finite(result, checks.checking(result), scaled=False)
    assert gate.passed == passed
    assert checks.trials == 1
    assert gate.value == (FINITE_STEPS if passed else 0)


def test_without_time_for_20_steps_that_is_said(material: Material, children: Children, tmp_path: Path) -> None:
    checks = Checks(material, children, tmp_path / "run", budget_seconds=0.0)
    result = checks.result(checks.base, steps=9, finite_steps=9, finite_in_a_row=9)
    gate = stays_finite(result, checks.checking(result), scaled=False)
    assert gate.passed
    assert gate.detail == "loss and gradient norm, in all of 9 steps: no time was left for 20"


# --- memory -------------------------------------------------------------------------------------------------------


def test_the_longest_rows_must_leave_some_memory_and_how_much_is_told(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run")
    worst = checks.result(checks.base, peak_bytes=3 * GIB)
    roomy = holds_longest_rows(worst, 4 * GIB)
    assert (roomy.passed, roomy.value) == (True, 0.25)
    assert roomy.detail == "3.2 GB at most of 4.3 GB that are free: 25% left"
    assert not holds_longest_rows(worst, int(3.01 * GIB)).passed
    assert holds_longest_rows(worst, None).passed
    assert not holds_longest_rows(msgspec.structs.replace(worst, outcome="oom", peak_bytes=None), 4 * GIB).passed


# --- from end to end ----------------------------------------------------------------------------------------------

RATE = 256 / 0.02


def fake_trl(folder: Path, body: str) -> Path:
    """A command that stands for `trl`: `options` are those of the YAML it is given."""
    folder.mkdir(exist_ok=True)
    command = folder / "trl"
    command.write_text(
        f"#!{sys.executable}\nimport os, pathlib, subprocess, sys, time, yaml\n"
        "options = yaml.safe_load(open(sys.argv[3]))\n"
        "tokens = 256 * options['max_steps']\n"
        f"{body}\n"
    )
    command.chmod(0o700)
    return command


def says(rate: float) -> str:
    return f"print({{'num_tokens': tokens}}, {{'train_runtime': str(tokens / {rate})}})"


def by_command(checks: Checks, *, yours: float = 0.5 * RATE, **changes: Any) -> Any:
    """The gate of a winner whose trial had `RATE`, where the user's own had `yours`."""
    winner = checks.other(arrangement=SPLIT)
    result = checks.result(winner, **changes)
    passes = (Pass(1, 12, 12 * 256 / yours, 12 * 256, 0, 24),)
    return run_end_to_end(winner, result, checks.result(checks.base, passes=passes), checks.checking(result))


def test_a_command_that_is_as_fast_as_the_trial_passes_with_its_figure(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run", trl=fake_trl(tmp_path / "bin", says(0.97 * RATE)))
    gate = by_command(checks)
    assert (gate.name, gate.passed, gate.value) == ("end to end", True, pytest.approx(0.97))
    assert gate.detail == "`trl sft` gives 12,416 useful tokens/s in 504 steps, 97% of its trial's; 85% at least"
    options = yaml.safe_load((tmp_path / "run" / "trial-0010" / "trl.yaml").read_text())
    assert options["per_device_train_batch_size"] == 2
    assert (options["save_strategy"], options["max_steps"], options["logging_steps"]) == ("no", 504, 504)
    assert options["output_dir"] == str(tmp_path / "run" / "trial-0010" / "output")


def test_a_command_that_is_slower_than_the_trial_of_the_same_minute_fails(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run", trl=fake_trl(tmp_path / "bin", says(0.5 * RATE)))
    gate = by_command(checks)
    assert (gate.passed, gate.value) == (False, pytest.approx(0.5))
    assert "a trial of the same steps gives 12,800 now, 50% of its trial's" in gate.detail


def test_a_machine_that_has_become_slower_is_not_the_winners_fault(
    material: Material, children: Children, tmp_path: Path
) -> None:
    # the winner's steps take twice as long as they did, and yours three times
    rules: list[dict[str, Any]] = [{"seconds": 2.0}, {"if": {"per_device_train_batch_size": 4}, "seconds": 1.5}]
    checks = Checks(material, children, tmp_path / "run", rules=rules, trl=fake_trl(tmp_path / "bin", says(RATE / 2)))
    gate = by_command(checks, yours=0.6 * RATE)
    assert (gate.passed, gate.value) == (True, pytest.approx(1.0))
    assert gate.detail.endswith(
        "; a trial of the same steps gives 6,400 now, 100% of its trial's; yours gives 4,267 now; 85% at least"
    )


def test_a_command_that_is_as_fast_as_its_trial_and_slower_than_yours_fails(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run", trl=fake_trl(tmp_path / "bin", says(0.9 * RATE)))
    gate = by_command(checks, yours=RATE)
    assert (gate.passed, gate.value) == (False, pytest.approx(0.9))
    assert gate.detail.endswith("; slower than yours, which gives 12,800 now")


def test_a_command_that_fails_says_why(material: Material, children: Children, tmp_path: Path) -> None:
    checks = Checks(material, children, tmp_path / "run", trl=fake_trl(tmp_path / "bin", "raise KeyError('text')"))
    gate = by_command(checks)
    assert not gate.passed
    assert gate.detail == "`trl sft` did not run: KeyError: 'text'"


def test_without_time_for_it_the_run_from_end_to_end_is_skipped_and_said_to_be(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(
        material, children, tmp_path / "run", budget_seconds=5.0, trl=fake_trl(tmp_path / "bin", says(RATE))
    )
    gate = by_command(checks)
    assert (gate.passed, gate.value, gate.detail) == (True, None, "not run: no time was left")
    assert not list((tmp_path / "run").glob("trial-*"))


def test_what_compiling_took_in_the_trial_is_not_held_against_the_command(
    material: Material, children: Children, tmp_path: Path
) -> None:
    # 504 steps of 0.02 s, and 20 s more at their beginning: a third of the rate of later steps
    rate = 504 * 256 / (504 * 0.02 + 20)
    checks = Checks(material, children, tmp_path / "run", trl=fake_trl(tmp_path / "bin", says(rate)))
    gate = by_command(checks, warm_up_seconds=20.0 + 5 * 0.02, warm_up_steps=5)
    assert gate.value == pytest.approx(1.0)


def test_an_interruption_ends_the_command_and_what_it_started(
    material: Material, children: Children, tmp_path: Path
) -> None:
    body = (
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "pathlib.Path('pids.part').write_text(f'{os.getpid()} {one.pid}\\n')\n"
        "os.rename('pids.part', 'pids')\ntime.sleep(600)"
    )
    checks = Checks(material, children, tmp_path / "run", trl=fake_trl(tmp_path / "bin", body))
    pids: list[int] = []

    def interrupt(_seconds: float) -> None:
        if not pids:
            pids.extend(read_numbers(material.folder / "pids"))
            assert alive(pids) == pids
        raise KeyboardInterrupt

    checks.setting.clock.sleep = interrupt  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        by_command(checks)
    (material.folder / "pids").unlink()
    assert eventually(lambda: alive(pids) == [], seconds=2)


def test_a_command_that_hangs_is_ended_and_fails(
    material: Material, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_to_end, "PATIENCE", -10.0)
    checks = Checks(material, children, tmp_path / "run", trl=fake_trl(tmp_path / "bin", "time.sleep(600)"))
    gate = by_command(checks)
    assert not gate.passed
    assert "it was not done in " in gate.detail


def test_the_budget_ends_a_command_that_takes_longer_and_nothing_is_held_against_it(
    material: Material, children: Children, tmp_path: Path
) -> None:
    checks = Checks(material, children, tmp_path / "run", trl=fake_trl(tmp_path / "bin", "time.sleep(600)"))
    ends = time.monotonic() + 1.0
    left = checks.setting.seconds_left
    checks.setting.seconds_left = lambda: left() if time.monotonic() < ends else 0.0  # type: ignore[method-assign]
    gate = by_command(checks)
    assert (gate.passed, gate.value, gate.detail) == (True, None, "not run to its end: no time was left")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_command_is_run_on_the_documents_of_the_trial_and_agrees_with_it(
    children: Children, tmp_path: Path
) -> None:
    tiny.make_model(tmp_path / "model")
    rows = [{"text": tiny.words(20 + index % 40, seed=index)} for index in range(64)]
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: model\ndatasets:\n  - path: json\n    data_files: rows.jsonl\n"
        "output_dir: out\nmax_length: 128\nuse_cpu: true\nbf16: false\nlogging_steps: 1\nsave_steps: 1\n"
    )
    job = read_job(
        "sft", ["--config", "sft.yaml"], folder=tmp_path, children=children, accelerator=False, cpu_bf16=False
    )
    data = Data(job, measure_lengths(job.resolved, folder=tmp_path, children=children))
    here = parts.cpu_machine()
    run = tmp_path / "run"
    run.mkdir()
    setting = Setting(
        job=job,
        machine=here,
        model=parts.SHAPE,
        data=data,
        space=build_space(job, here, data, allowed=OFFERED),
        children=children,
        folder=run,
        emit=lambda _event: None,
        budget_seconds=300.0,
        trl=end_to_end.command_here(),
    )
    sample = samples.draw(setting, samples.first_pass_steps(setting))
    winner = setting.space.baseline
    result = measure(setting, 0, winner, sample, reason="", best=None, baseline_rate=None)
    numbers = itertools.count(1)
    checking = Checking(setting, sample, lambda: next(numbers), like=result, known={})
    gate = run_end_to_end(winner, result, None, checking)
    assert gate is not None
    assert gate.value is not None, gate.detail
    assert 0.3 < gate.value < 3.0, gate.detail  # of a busy machine; that it passes is the gate's own rule
    log = (run / "trial-0001" / "output.log").read_text()
    assert "train_runtime" in log
    assert "num_tokens" in log
    assert not (tmp_path / "out").exists()
    assert not (run / "trial-0001" / "output").exists()  # where `trl` saves the model at its end
    assert marked(str(run)) == []
