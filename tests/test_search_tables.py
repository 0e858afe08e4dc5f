"""The search played on tables: on recorded sweeps it comes near the best, on made-up GPU timings as well."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune import planning, session
from autotune.children import Children
from autotune.errors import AutotuneError, NoTrialFinishedError
from autotune.events import Note, TrialFinished
from autotune.plan.space import Candidate
from autotune.planning import Plan
from autotune.probe.machine import probe_machine
from autotune.search.tuner import Tuner
from benchmarks.other_searches import at_random, by_tpe, search
from benchmarks.replay import Busy, ReplaySetting, play
from benchmarks.search_jobs import JOBS, build
from benchmarks.sweep_journal import Entry, Journal, to_do
from benchmarks.sweep_table import SWEEPS, Measured, StepShape, Swept, Table, plan_of, read, with_axes, write
from benchmarks.truth import regret, true_rates
from tests import roofline

RECORDED = sorted(SWEEPS.glob("*.json"))


class Drawn(msgspec.Struct, frozen=True):
    """A table with its plan."""

    table: Table
    plan: Plan


@pytest.fixture(scope="module")
def planner(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """Children for plans, of which none trains: what a launch would set at their import makes no difference. Lengths
    are not kept with the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(children.environment, "OMP_NUM_THREADS", "1")
        yield children


@pytest.fixture(scope="module")
def made(planner: Children, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tables by the roofline, each made once."""
    known: dict[tuple[str, str], Drawn] = {}

    def make(chip: str, size: str) -> Drawn:
        if (chip, size) not in known:
            folder = tmp_path_factory.mktemp("job")
            plan = roofline.plan_for(chip, size, folder, planner)
            table = roofline.table_of(chip, size, plan, folder)
            known[chip, size] = Drawn(table, roofline.with_space_of(plan, table))
        return known[chip, size]

    return make


# --- GPU-sized jobs, made-up timings ------------------------------------------------------------------------------

BUDGET_SECONDS = 1800.0
DEFAULT_SECONDS = planning.DEFAULT_BUDGET_SECONDS

# 7B in float32, which TRL loads weights in by default, fits on no T4
gpu_jobs = pytest.mark.parametrize(
    ("chip", "size"),
    [
        ("T4", "LoRA 1.5B"),
        ("A100", "LoRA 7B"),
        ("A100", "full 1.5B"),
        ("H200", "LoRA 7B"),
        ("H200", "full 1.5B"),
    ],
)


@gpu_jobs
def test_on_made_up_gpu_timings_the_pick_is_within_3_percent_of_the_best_and_never_out_of_memory(
    chip: str, size: str, made: Any, tmp_path: Path
) -> None:
    drawn = made(chip, size)
    rates = true_rates(drawn.table, drawn.plan)
    played = play(drawn.table, drawn.plan, tmp_path, seed=0, budget_seconds=BUDGET_SECONDS)
    assert played.found.outcome == "improved"
    assert played.found.winner in rates
    assert regret(rates, played.found.winner) <= 0.03
    assert played.seconds <= BUDGET_SECONDS * 1.05


@gpu_jobs
def test_on_made_up_gpu_timings_the_default_budget_is_enough_for_within_5_percent(
    chip: str, size: str, made: Any, tmp_path: Path
) -> None:
    drawn = made(chip, size)
    played = play(drawn.table, drawn.plan, tmp_path, seed=0, budget_seconds=DEFAULT_SECONDS)
    assert regret(true_rates(drawn.table, drawn.plan), played.found.winner) <= 0.05
    assert played.seconds <= DEFAULT_SECONDS * 1.05


def test_what_fits_on_the_sample_but_not_on_the_longest_rows_is_not_delivered(made: Any, tmp_path: Path) -> None:
    drawn = made("A100", "full 1.5B")
    rates = true_rates(drawn.table, drawn.plan)
    best = max(rates, key=lambda one: rates[one])
    swept = tuple(
        msgspec.structs.replace(one, on_longest="oom") if one.candidate == best else one for one in drawn.table.swept
    )
    table = msgspec.structs.replace(drawn.table, swept=swept)
    played = play(table, drawn.plan, tmp_path, seed=0, budget_seconds=BUDGET_SECONDS)
    assert played.found.winner != best
    assert played.found.winner in true_rates(table, drawn.plan)


def test_a_table_in_which_nothing_fits_ends_without_a_pick(made: Any, tmp_path: Path) -> None:
    drawn = made("T4", "LoRA 1.5B")
    full = Measured(outcome="oom", where="load_model", detail="CUDA out of memory", seconds=5.0, peak_bytes=10**10)
    swept = tuple(Swept(one.candidate, (full,), "oom") for one in drawn.table.swept)
    with pytest.raises(NoTrialFinishedError):
        play(msgspec.structs.replace(drawn.table, swept=swept), drawn.plan, tmp_path, seed=0, budget_seconds=600.0)


# --- the replay itself --------------------------------------------------------------------------------------------


def test_the_same_seed_plays_the_same_search_and_another_one_another(made: Any, tmp_path: Path) -> None:
    drawn = made("T4", "LoRA 1.5B")

    def rates(name: str, seed: int) -> list[float | None]:
        (tmp_path / name).mkdir()
        played = play(drawn.table, drawn.plan, tmp_path / name, seed=seed, budget_seconds=600.0)
        return [one.rate for one in played.found.results]

    assert rates("one", 1) == rates("again", 1)
    assert rates("one more", 1) != rates("other", 2)


def test_a_played_trial_takes_its_start_and_its_steps(made: Any, tmp_path: Path) -> None:
    """The baseline alone: what it took is what the table says, to the search's own polling."""
    drawn = made("T4", "LoRA 1.5B")
    said: list[Any] = []
    setting = ReplaySetting(drawn.table, drawn.plan, tmp_path, budget_seconds=600.0, seed=0, emit=said.append)
    setting.trial_limit = 1
    found = Tuner(setting, []).run()
    (result,) = found.results
    recorded = drawn.table.swept[0].repetitions
    assert result.startup_seconds is not None
    assert min(abs(result.startup_seconds - one.startup_seconds) for one in recorded) < 1e-9
    passes = [sum(steps) for one in recorded for steps in one.step_seconds[1:]]
    assert all(min(abs(one.seconds - other) for other in passes) < 1e-9 for one in result.passes)
    assert result.seconds == pytest.approx(result.startup_seconds + result.step_seconds, abs=0.06)


def test_a_played_trial_runs_as_many_steps_as_a_check_asks_for(made: Any, tmp_path: Path) -> None:
    drawn = made("T4", "LoRA 1.5B")
    setting = ReplaySetting(drawn.table, drawn.plan, tmp_path, budget_seconds=600.0, seed=0)
    rows = len(drawn.table.sample_rows)
    trial = setting.trial(
        0, drawn.plan.space.baseline, tmp_path / f"sample-{rows}.parquet", purpose="gate", passes=0, warm_up_steps=20
    )
    trial.start()
    while trial.running:
        trial.poll()
        setting.clock.sleep(1.0)
    assert trial.result_outcome() == ("ok", None, None)
    assert [step.step for step in trial.steps] == list(range(20))
    assert trial.ended is not None
    assert trial.first_step_at is not None
    assert trial.ended - trial.first_step_at == pytest.approx(sum(step.seconds for step in trial.steps))


def test_a_busy_process_slows_what_needs_its_core_and_the_search_is_told(made: Any, tmp_path: Path) -> None:
    drawn = made("T4", "LoRA 1.5B")
    busy = Busy(0.0, 300.0, cores=4.0)  # all that the machine has
    said: list[Any] = []
    setting = ReplaySetting(
        drawn.table, drawn.plan, tmp_path, budget_seconds=600.0, seed=0, emit=said.append, busy=busy
    )
    Tuner(setting, []).run()
    notes = [event.text for event in said if isinstance(event, Note)]
    assert any("measuring it again" in text for text in notes), notes
    rates = true_rates(drawn.table, drawn.plan)
    first = next(event for event in said if isinstance(event, TrialFinished))
    assert first.rate is not None
    assert first.rate < 0.8 * rates[drawn.plan.space.baseline]


def test_a_table_is_read_back_as_it_was_written(made: Any, tmp_path: Path) -> None:
    drawn = made("T4", "LoRA 1.5B")
    write(drawn.table, tmp_path / "table.json")
    table = read(tmp_path / "table.json")
    assert table == drawn.table
    assert list(plan_of(table).space.candidates()) == list(drawn.plan.space.candidates())


@pytest.mark.parametrize("asks", [at_random, by_tpe])
def test_other_searches_begin_with_the_users_settings_and_end_with_the_budget(
    asks: Any, made: Any, tmp_path: Path
) -> None:
    drawn = made("T4", "LoRA 1.5B")
    found = search(drawn.table, drawn.plan, tmp_path, seed=0, budget_seconds=900.0, asks=asks)
    assert found[0][1] == drawn.plan.space.baseline
    assert found[-1][0] <= 900.0
    rates = true_rates(drawn.table, drawn.plan)
    assert rates[found[-1][1]] >= rates[found[0][1]]


# --- recorded sweeps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_on_a_recorded_sweep_a_fifth_of_one_repetition_finds_the_best_nearly(path: Path, tmp_path: Path) -> None:
    table = read(path)
    plan = plan_of(table)
    rates = true_rates(table, plan)
    budget = 0.2 * table.repetition_seconds()
    regrets = []
    for seed in range(5):
        (tmp_path / str(seed)).mkdir()
        played = play(table, plan, tmp_path / str(seed), seed=seed, budget_seconds=budget)
        regrets.append(regret(rates, played.found.winner))
    assert statistics.median(regrets) <= 0.02, regrets
    assert max(regrets) <= 0.05, regrets


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_sweep_is_whole_and_names_no_place_of_the_machine_it_was_made_on(path: Path) -> None:
    text = path.read_text()
    table = read(path)
    assert table.name == path.stem
    assert table.name in JOBS
    assert table.kind == "measured"
    assert table.repetitions >= 3
    assert len(table.swept) == plan_of(table).space.size >= 48
    assert path.stat().st_size < 400_000
    assert table.prepared.job.folder == "."
    for place in ("/home/", "/root/", "/tmp/", "/Users/"):
        assert place not in text


# --- sweeps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(JOBS))
def test_a_job_of_the_sweeps_has_at_least_48_candidates(name: str, planner: Children, tmp_path: Path) -> None:
    job = JOBS[name]
    if job.needs is not None and not job.needs.exists():
        pytest.skip(f"{job.needs.name} is not here")
    (tmp_path / "sft.yaml").write_text(job.config)
    build(job, tmp_path, planner)
    options = session.Options(method="sft", arguments=("--config", "sft.yaml"), folder=tmp_path)
    plan = planning.prepare(options, planner, probe_machine(), emit=lambda _event: None)
    assert with_axes(plan.space, job.axes).size >= 48


def test_a_sweep_that_was_stopped_goes_on_and_keeps_the_calmest_of_several_tries(made: Any, tmp_path: Path) -> None:
    one, other = (swept.candidate for swept in made("T4", "LoRA 1.5B").table.swept[:2])
    layout = ((StepShape(1, 10, 0),),)

    def measured(candidate: Candidate, others_cores: float) -> Entry:
        told = Measured(outcome="ok", step_seconds=((0.1,),), others_cores=others_cores, disturbed=others_cores > 1)
        return Entry(candidate, 0, layout, told)

    path = tmp_path / "measured.jsonl"
    journal = Journal(path, "key", anew=False)
    journal.add(measured(one, 1.5))
    with path.open("ab") as file:
        file.write(b'{"candidate":{"arr')  # killed while it wrote

    journal = Journal(path, "key", anew=False)
    left = to_do([one, other], journal, 1)
    assert next(left) == (0, other)
    journal.add(measured(other, 0.0))
    assert next(left) == (0, one)  # again, for others had the cores
    journal.add(measured(one, 0.5))
    assert list(left) == []
    kept = Journal(path, "key", anew=False).entries[one, 0].measured
    assert (kept.others_cores, kept.disturbed, kept.tries) == (0.5, False, 2)


def test_a_sweep_of_other_versions_is_not_gone_on_with(tmp_path: Path) -> None:
    Journal(tmp_path / "measured.jsonl", "key", anew=False)
    with pytest.raises(AutotuneError, match="is of another sweep"):
        Journal(tmp_path / "measured.jsonl", "another key", anew=False)
    assert Journal(tmp_path / "measured.jsonl", "another key", anew=True).entries == {}
