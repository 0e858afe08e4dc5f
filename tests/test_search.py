"""A whole search with workers whose steps take what a table says: it finds the table's best, and says why not."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from autotune import folder as run_folder
from autotune.children import Children
from autotune.deliver.files import write_so_far
from autotune.errors import NoTrialFinishedError
from autotune.events import AnyEvent, BestChanged, Note, TrialFinished, TrialStarted
from autotune.folder import Earlier
from autotune.job import Job, read_job
from autotune.plan.axes import build_space
from autotune.plan.data import Data
from autotune.plan.space import OFFERED, Arrangement, Candidate, Space
from autotune.probe.lengths import measure_lengths
from autotune.search.confirm import FEWEST_ROUNDS, MOST_ROUNDS
from autotune.search.found import Found, why_kept
from autotune.search.proposals import Proposals, needs_as_much_memory
from autotune.search.setting import Setting
from autotune.search.statistics import Estimate
from autotune.search.stopping import FEWEST_TRIALS, PATIENCE
from autotune.search.tuner import Tuner
from autotune.trial.result import TrialResult
from tests import parts, tiny

MACHINE = parts.cpu_machine()
ROWS_A_STEP = 8
STEP_SECONDS = 0.02  # said, not spent
RATE = 256 / STEP_SECONDS

Rule = dict[str, Any]

BASE: Rule = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "packing": False,
    "train_sampling_strategy": "random",
}
BFD_128: Rule = {"packing": True, "max_length": 128}


class Material(NamedTuple):
    """A real job on rows of 32 tokens each, so that no arrangement has padding and rates are what the table says."""

    job: Job
    data: Data
    space: Space


@pytest.fixture(scope="module")
def material(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("job")
    model = tiny.make_model(folder / "model")
    tiny.write_rows(folder / "rows.jsonl", [{"input_ids": [7] * 32} for _ in range(200)])
    (folder / "sft.yaml").write_text(f"""\
model_name_or_path: {model}
datasets:
  - path: json
    data_files: rows.jsonl
    split: train
output_dir: {folder}/output
max_length: 128
num_train_epochs: 100000
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing: true
packing: false
train_sampling_strategy: random
attn_implementation: sdpa
dataloader_num_workers: 0
num_cpu_threads_per_process: 1
bf16: false
use_cpu: true
""")
    job = read_job("sft", ["--config", "sft.yaml"], folder=folder, children=children, accelerator=False, cpu_bf16=False)
    data = Data(job, measure_lengths(job.resolved, folder=folder, children=children))
    return Material(job, data, build_space(job, MACHINE, data, allowed=OFFERED))


class Run:
    """One search in a folder of its own, and what it said."""

    def __init__(self, material: Material, children: Children, folder: Path, rules: list[Rule], **changes: Any) -> None:
        self.said: list[AnyEvent] = []
        self.folder = folder
        folder.mkdir(exist_ok=True)
        table = {"seconds": STEP_SECONDS, "rows_a_step": ROWS_A_STEP, "rules": rules}
        (folder / "table.json").write_text(json.dumps(table))
        options: dict[str, Any] = {"space": material.space, "budget_seconds": 300.0, "emit": self.said.append} | changes
        earlier = options.pop("earlier", [])
        options["earlier"] = options.pop("earlier_run", None)
        setting = Setting(
            job=material.job,
            machine=MACHINE,
            model=parts.SHAPE,
            data=material.data,
            children=children,
            folder=folder,
            worker="tests.fake_workers:trial_by_table",
            **options,
        )
        self.tuner = Tuner(setting, earlier)

    def search(self) -> Found:
        return self.tuner.run()

    def notes(self) -> list[str]:
        return [event.text for event in self.said if isinstance(event, Note)]

    def started(self, purpose: str = "speed") -> list[str]:
        return [event.label for event in self.said if isinstance(event, TrialStarted) and event.purpose == purpose]


def narrowed(material: Material, *names: str) -> Space:
    """The space with a choice on these axes alone."""
    space = material.space
    axes = [
        axis if axis.name in names else msgspec.structs.replace(axis, choices=axis.choices[:1]) for axis in space.axes
    ]
    return msgspec.structs.replace(space, axes=tuple(axes))


# --- what is found ------------------------------------------------------------------------------------------------


def test_the_best_of_the_table_is_found_and_its_speedup_is_the_tables(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [
        {"if": BFD_128, "seconds": 0.8},
        {"if": {**BFD_128, "per_device_train_batch_size": 2}, "seconds": 0.6},
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.7},
        {"if": {"gradient_checkpointing": True}, "seconds": 1.4},
        {"if": {"attn_implementation": "eager"}, "seconds": 1.5},
        {"if": {"dataloader_num_workers": 1}, "seconds": 1.2},
    ]
    run = Run(material, children, tmp_path / "run", rules)
    found = run.search()
    assert found.outcome == "improved"
    assert found.winner == msgspec.structs.replace(
        material.space.baseline, arrangement=Arrangement("bfd", 2, 1, 128), checkpointing="off", threads=2
    )
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(1.4 / (0.8 * 0.6 * 0.7))
    assert found.speedup.low == pytest.approx(found.speedup.value)
    assert found.baseline is not None
    assert found.best is not None
    assert found.baseline.rate == pytest.approx(RATE / 1.4)
    assert found.best.rate == pytest.approx(RATE / (0.8 * 0.6 * 0.7))
    assert found.baseline.index == 0
    assert [gate.name for gate in found.gates] == ["kernel", "finite", "leakage", "parity", "longest rows"]
    assert all(gate.passed for gate in found.gates)
    # far fewer than all were needed
    assert len(found.results) < material.space.size / 4
    assert len({result.candidate for result in found.results}) == len(found.results)


def test_the_baseline_is_trial_0_and_runs_with_the_users_own_options(
    material: Material, children: Children, tmp_path: Path
) -> None:
    run = Run(material, children, tmp_path / "run", [], trial_limit=1)
    found = run.search()
    assert [result.candidate for result in found.results] == [material.space.baseline]
    first = next(event for event in run.said if isinstance(event, TrialStarted))
    assert (first.trial, first.purpose, first.reason) == (0, "speed", "your own settings")
    assert first.label == "yours (padded, 4 x 2, sdpa, checkpointing, 1 thread)"
    assert found.outcome == "kept"


def test_nothing_better_keeps_what_the_user_had(material: Material, children: Children, tmp_path: Path) -> None:
    run = Run(material, children, tmp_path / "run", [], space=narrowed(material, "threads", "checkpointing"))
    found = run.search()
    assert found.outcome == "kept"
    assert found.winner == material.space.baseline
    assert found.speedup is not None
    assert (found.speedup.value, found.speedup.low) == (1.0, 1.0)
    assert found.best is not None
    assert found.best.candidate == material.space.baseline


def test_settings_that_are_all_slower_keep_what_the_user_had(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [{"if": {"num_cpu_threads_per_process": 2}, "seconds": 1.3}]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads"))
    found = run.search()
    assert found.outcome == "kept"
    assert [one.rate for one in found.results] == pytest.approx([RATE, RATE / 1.3])


def test_a_gain_within_the_noise_of_its_passes_is_not_taken(
    material: Material, children: Children, tmp_path: Path
) -> None:
    # faster in the search, and slower in every pass of the confirmation
    rules: list[Rule] = [
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.97, "when": "speed"},
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 1.05, "when": "confirm"},
    ]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads"))
    found = run.search()
    assert found.outcome == "kept"
    assert found.winner == material.space.baseline
    assert found.speedup is not None
    assert found.speedup.value == 1.0  # of what is delivered, which is what the user had


def test_the_best_so_far_is_told_with_its_ratio(material: Material, children: Children, tmp_path: Path) -> None:
    rules: list[Rule] = [{"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5}]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads"))
    run.search()
    best = [event for event in run.said if isinstance(event, BestChanged)]
    assert [event.trial for event in best] == [1]
    assert best[0].ratio == pytest.approx(2.0)


# --- what fails ---------------------------------------------------------------------------------------------------


def test_what_surely_beats_the_baseline_is_written_at_once_and_taken_back_with_its_score(
    material: Material, children: Children, tmp_path: Path
) -> None:
    """So that a killed run leaves it; what fails its checks is taken back."""
    rules: list[Rule] = [
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5},
        {"if": {"num_cpu_threads_per_process": 2}, "fail": "oom", "where": "backward", "when": "memory"},
    ]
    told: list[int | None] = []
    space = narrowed(material, "threads")
    run = Run(material, children, tmp_path, rules, space=space, budget_seconds=60.0)
    config = tmp_path / "tuned.yaml"
    texts: list[str] = []

    def faster(fastest: TrialResult | None) -> None:
        told.append(fastest.index if fastest is not None else None)
        write_so_far(run.tuner.setting, fastest, tmp_path)
        texts.append(config.read_text() if config.exists() else "")

    run.tuner = Tuner(run.tuner.setting, [], faster=faster)
    found = run.search()
    by_index = {one.index: one.candidate for one in found.results}
    assert told[0] is not None
    assert by_index[told[0]].threads == 2
    assert texts[0].startswith(f"# The fastest so far (#{told[0]}) of a run that has not ended: neither confirmed")
    assert yaml.safe_load(texts[0])["num_cpu_threads_per_process"] == 2
    assert found.outcome == "kept"
    assert told[-1] is None
    assert not config.exists()


def test_a_baseline_out_of_memory_ends_improved_without_a_speedup(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [
        {"if": BASE, "fail": "oom", "where": "backward", "detail": "OutOfMemoryError: CUDA out of memory"}
    ]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "arrangement"))
    found = run.search()
    assert found.outcome == "improved"
    assert found.speedup is None
    assert found.baseline is None
    assert found.best is not None
    assert found.best.rate == pytest.approx(RATE)
    assert found.winner != material.space.baseline
    assert found.results[0].outcome == "oom"
    assert found.results[0].rate is None
    assert any(
        text.startswith("yours did not run: out of memory in backward (OutOfMemoryError") for text in run.notes()
    )


def test_out_of_memory_rules_out_what_needs_as_much(material: Material, children: Children, tmp_path: Path) -> None:
    rules: list[Rule] = [{"if": BASE, "fail": "oom", "where": "backward"}]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "arrangement", "checkpointing"))
    found = run.search()
    reason = "needs at least the memory of #0, which ran out"
    ruled_out = {(str(one.arrangement), one.checkpointing): why for one, why in found.ruled_out.items()}
    assert ruled_out == {
        ("padded, 4 x 2", "off"): reason,
        ("padded, 8 x 1", "off"): reason,
        ("padded, 8 x 1", "full"): reason,
    }
    assert not set(found.ruled_out) & {result.candidate for result in found.results}


def test_an_arrangement_ruled_out_by_memory_leaves_smaller_ones(material: Material) -> None:
    base = material.space.baseline
    big = msgspec.structs.replace(base, arrangement=Arrangement("bfd", 4, 1, 64))
    assert needs_as_much_memory(big, big)
    assert needs_as_much_memory(msgspec.structs.replace(big, checkpointing="off"), big)
    assert not needs_as_much_memory(big, msgspec.structs.replace(big, checkpointing="off"))
    assert not needs_as_much_memory(msgspec.structs.replace(big, attention="eager"), big)
    assert not needs_as_much_memory(msgspec.structs.replace(big, arrangement=Arrangement("bfd", 2, 2, 64)), big)
    assert needs_as_much_memory(msgspec.structs.replace(big, arrangement=Arrangement("bfd", 4, 1, 128)), big)
    assert not needs_as_much_memory(base, big)


def test_a_failed_trial_has_no_rate_and_never_wins(material: Material, children: Children, tmp_path: Path) -> None:
    rules: list[Rule] = [
        {"if": {"num_cpu_threads_per_process": 2}, "fail": "error", "detail": "ValueError: no"},
        {"if": {"gradient_checkpointing": False}, "seconds": 0.9},
    ]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads", "checkpointing"))
    found = run.search()
    assert found.outcome == "improved"
    assert (found.winner.threads, found.winner.checkpointing) == (1, "off")
    failed = [result for result in found.results if result.candidate.threads == 2]
    assert [(one.outcome, one.rate, one.rate_interval, one.detail) for one in failed] == [
        ("error", None, None, "ValueError: no")
    ] * 2
    told = [event for event in run.said if isinstance(event, TrialFinished) and event.outcome == "error"]
    assert [(event.rate, event.ratio) for event in told] == [(None, None)] * 2


def test_a_search_without_one_trial_that_works_names_the_commonest_cause(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [
        {"if": BASE, "fail": "error", "where": "load_model", "detail": "OSError: rare"},
        {"fail": "error", "where": "prepare_data", "detail": "KeyError: common"},
    ]
    run = Run(material, children, tmp_path / "run", rules)
    with pytest.raises(NoTrialFinishedError) as caught:
        run.search()
    trials = len(run.tuner.record.results)
    assert caught.value.what == (
        f"none of {trials} trials finished; most often: an error in prepare_data (KeyError: common)"
    )
    assert str(tmp_path / "run") in caught.value.hint
    assert trials == PATIENCE
    assert run.tuner.found("failed").best is None


def test_a_search_that_fails_in_one_way_only_ends_early(material: Material, children: Children, tmp_path: Path) -> None:
    run = Run(material, children, tmp_path / "run", [{"fail": "error", "detail": "KeyError: common"}])
    with pytest.raises(NoTrialFinishedError, match="none of 4 trials finished"):
        run.search()


def test_a_finalist_that_does_not_run_again_cannot_win(material: Material, children: Children, tmp_path: Path) -> None:
    rules: list[Rule] = [
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5},
        {
            "if": {"num_cpu_threads_per_process": 2},
            "fail": "error",
            "where": "a step",
            "detail": "flaky",
            "when": "confirm",
        },
    ]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads"))
    found = run.search()
    assert found.outcome == "kept"
    assert found.winner == material.space.baseline
    assert any("is out: did not run again: an error in a step (flaky)" in text for text in run.notes())


def test_the_next_best_wins_when_the_best_does_not_run_again(
    material: Material, children: Children, tmp_path: Path
) -> None:
    both = {"num_cpu_threads_per_process": 2, "gradient_checkpointing": False}
    rules: list[Rule] = [
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5},
        {"if": {"gradient_checkpointing": False}, "seconds": 0.5},
        {"if": both, "fail": "killed", "when": "confirm"},
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.9},
    ]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads", "checkpointing"))
    found = run.search()
    assert found.outcome == "improved"
    assert (found.winner.threads, found.winner.checkpointing) == (2, "full")
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(1 / 0.45)


@pytest.mark.parametrize(
    ("rule", "gate"),
    [
        ({"attention": "eager"}, "kernel: asked for sdpa, and eager ran"),
        ({"loss": None}, "finite: the loss in 0 of "),
        ({"loss": 2.1}, "parity: first-step losses 1.0e-01 apart, at most 1e-05"),
        ({"fail": "oom", "where": "backward", "when": "memory"}, "longest rows: out of memory in backward"),
    ],
)
def test_a_winner_that_is_another_training_is_dropped(
    material: Material, children: Children, tmp_path: Path, rule: Rule, gate: str
) -> None:
    faster = {"num_cpu_threads_per_process": 2}
    rules: list[Rule] = [{"if": faster, "seconds": 0.5}, {"if": faster, **rule}]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads"))
    found = run.search()
    assert found.outcome == "kept"
    assert found.winner == material.space.baseline
    assert any(f" is out: {gate}" in text for text in run.notes()), run.notes()


def test_a_search_whose_only_survivors_fail_their_checks_has_failed(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [
        {"if": {"num_cpu_threads_per_process": 1}, "fail": "error", "where": "a step", "detail": "KeyError: no"},
        {"fail": "oom", "where": "backward", "when": "memory"},
    ]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads"))
    with pytest.raises(NoTrialFinishedError, match="none of 2 trials finished"):
        run.search()


def test_an_attention_that_does_not_run_here_is_tried_in_the_baseline_only(
    material: Material, children: Children, tmp_path: Path
) -> None:
    sdpa = msgspec.structs.replace(parts.SDPA, usable=False, reason="it broke in backward")
    machine = parts.machine(attention=(sdpa, parts.EAGER))
    space = build_space(material.job, machine, material.data, allowed=OFFERED)
    rules: list[Rule] = [{"if": {"attn_implementation": "sdpa"}, "fail": "error", "detail": "ImportError: no"}]
    run = Run(material, children, tmp_path / "run", rules, space=space, trial_limit=6)
    found = run.search()
    assert [one.candidate.attention for one in found.results] == ["sdpa", *["eager"] * 5]
    assert found.outcome == "improved"
    assert found.winner.attention == "eager"
    own = space.axis("attention").choices[0]
    assert own.reason == "as your job has it, and it cannot run here: it broke in backward"
    assert "sdpa" in [one.value for one in space.axis("attention").rejected]


def test_what_all_failed_trials_have_in_common_is_left_before_the_search_gives_up(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [{"if": {"attn_implementation": "sdpa"}, "fail": "error", "detail": "RuntimeError: no"}]
    found = Run(material, children, tmp_path / "run", rules, trial_limit=8).search()
    assert found.outcome == "improved"
    assert found.winner.attention == "eager"
    assert [one.rate is None for one in found.results[:3]] == [True, True, False]


# --- limits -------------------------------------------------------------------------------------------------------


def test_no_more_trials_are_run_than_allowed(material: Material, children: Children, tmp_path: Path) -> None:
    run = Run(material, children, tmp_path / "run", [], trial_limit=3)
    found = run.search()
    assert len(found.results) == 3
    assert len(run.started()) == 3
    assert "the limit of 3 trials is reached" in run.notes()


def test_a_fall_back_is_never_credited_with_what_was_asked_for(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [{"if": {"attn_implementation": "eager"}, "seconds": 0.3, "attention": "sdpa"}]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "attention"))
    found = run.search()
    assert (found.outcome, found.winner) == ("kept", material.space.baseline)
    eager = next(one for one in found.results if one.candidate.attention == "eager")
    assert (eager.outcome, eager.rate, eager.partial_rate) == ("error", None, None)
    assert eager.detail == "asked for eager, and sdpa ran"
    assert not [event for event in run.said if isinstance(event, BestChanged)]


def test_a_confirmation_that_looks_sure_at_once_goes_on_for_a_tenth_of_the_budget(
    material: Material, children: Children, tmp_path: Path
) -> None:
    # a round of these arms takes 0.1 s, and all rounds say the same
    rules: list[Rule] = [{"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5}]
    space = narrowed(material, "threads")
    short = Run(material, children, tmp_path / "short", rules, space=space, budget_seconds=6.0).search()
    long = Run(material, children, tmp_path / "long", rules, space=space, budget_seconds=600.0).search()
    assert FEWEST_ROUNDS <= short.confirmed_rounds < MOST_ROUNDS
    assert long.confirmed_rounds == MOST_ROUNDS


def test_a_finalist_that_is_outrun_leaves_the_others_its_turns(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5},
        {"if": {"gradient_checkpointing": False, "num_cpu_threads_per_process": 2}, "seconds": 0.99},
        {"if": {"gradient_checkpointing": False}, "seconds": 1.3, "when": "confirm"},
    ]
    space = narrowed(material, "threads", "checkpointing")
    run = Run(material, children, tmp_path / "run", rules, space=space)
    found = run.search()
    passes = {
        result.label: len(result.passes)
        for result in run_folder.results(tmp_path / "run")
        if result.purpose == "confirm"
    }
    outrun = next(label for label in passes if "no checkpointing" in label)
    assert found.winner.checkpointing == "full"
    assert passes.pop(outrun) <= 3  # one turn
    assert len(passes) == 2
    assert min(passes.values()) >= FEWEST_ROUNDS


def test_the_budget_is_kept_with_time_for_the_confirmation(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [{"pause": 0.4, "when": "speed"}, {"if": {"gradient_checkpointing": False}, "seconds": 0.9}]
    run = Run(material, children, tmp_path / "run", rules, budget_seconds=8.0)
    began = time.monotonic()
    found = run.search()
    assert time.monotonic() - began < 11.0
    assert "what is left of the budget goes to the confirmation" in run.notes()
    assert 2 <= len(found.results) < PATIENCE + 2
    assert found.confirmed_rounds >= 1 or found.outcome == "kept"


def test_what_the_budget_leaves_no_time_to_confirm_and_check_is_not_delivered(
    material: Material, children: Children, tmp_path: Path
) -> None:
    # a pass of 12 steps is said to take 2.4 s: two arms do not fit into what two trials leave of the budget
    rules: list[Rule] = [{"seconds": 10.0}, {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5}]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads"), trial_limit=2)
    run.tuner.setting.budget_seconds = 300.0
    run.tuner.setting.seconds_left = lambda: 200.0 if len(run.tuner.record.results) < 2 else 6.0  # type: ignore[method-assign]
    found = run.search()
    assert run.started("confirm") == []
    assert found.confirmed_rounds == 0
    assert "what is left of the budget is too short to confirm or check anything" in run.notes()
    assert (found.outcome, found.winner, found.speedup) == ("kept", found.results[0].candidate, Estimate(1, 1, 1))
    assert found.contender == found.results[1]
    assert "was neither confirmed nor checked to be the same training, so nothing is changed" in why_kept(found)


def test_what_was_faster_in_the_search_alone_is_named_and_yours_is_kept(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5, "when": "speed"},
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 1.5, "when": "confirm"},
    ]
    found = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads")).search()
    assert found.outcome == "kept"
    assert found.contender is not None
    assert why_kept(found).startswith("#1 was faster than yours in the search and 0.67x as fast in turns with it")


def test_a_confirmation_ends_with_the_time_it_has(material: Material, children: Children, tmp_path: Path) -> None:
    rules: list[Rule] = [{"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.9}]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads"), budget_seconds=6.0)
    began = time.monotonic()
    found = run.search()
    assert time.monotonic() - began < 1.1 * 6.0 + 2.0
    assert found.confirmed_rounds >= 1


def test_rounds_in_which_others_had_the_cores_are_left_out(
    material: Material, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = itertools.count()
    monkeypatch.setattr("autotune.search.confirm.disturbed", lambda *_: next(turns) == 2)
    rules: list[Rule] = [{"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5}]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads"))
    found = run.search()
    assert not found.busy
    rounds = found.confirmed_rounds + 1
    assert f"1 of {rounds} rounds are left out: other processes had the cores" in run.notes()


def test_a_confirmation_on_a_machine_that_stays_busy_says_so(
    material: Material, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.confirm.disturbed", lambda *_: True)
    rules: list[Rule] = [{"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5}]
    space = narrowed(material, "threads")
    found = Run(material, children, tmp_path / "run", rules, space=space, budget_seconds=60.0).search()
    assert found.busy
    assert found.outcome == "improved"


def test_a_search_ends_when_every_candidate_was_tried(material: Material, children: Children, tmp_path: Path) -> None:
    space = narrowed(material, "threads", "checkpointing")
    run = Run(material, children, tmp_path / "run", [], space=space)
    found = run.search()
    assert {result.candidate for result in found.results} == set(space.candidates())
    assert "every allowed candidate was tried" in run.notes()


def test_a_search_ends_when_nothing_gains_any_more(material: Material, children: Children, tmp_path: Path) -> None:
    run = Run(material, children, tmp_path / "run", [{"if": BASE, "seconds": 0.5}])
    found = run.search()
    assert f"no gain in the last {PATIENCE} trials" in run.notes()
    assert len(found.results) >= PATIENCE


def test_a_search_ends_when_another_trial_takes_longer_than_it_may_save(
    material: Material, children: Children, tmp_path: Path
) -> None:
    """Of one epoch, which takes half a second, nothing that is left could save the time of a trial."""
    resolved = {**material.job.resolved, "num_train_epochs": 1.0}
    short = material._replace(job=msgspec.structs.replace(material.job, resolved=resolved))
    rules: list[Rule] = [{"if": {"gradient_checkpointing": True}, "seconds": 1.4}, {"if": BFD_128, "seconds": 0.5}]
    run = Run(short, children, tmp_path, rules)
    found = run.search()
    assert found.outcome == "improved"
    assert FEWEST_TRIALS <= len(found.results) < PATIENCE
    told = next(note for note in run.notes() if note.startswith("another trial of"))
    assert re.search(r"would save about 0\.0 s of the 0\.\d s that the training takes \(est\.\)", told)


def test_a_hopeless_trial_is_cut_short_and_has_no_rate(material: Material, children: Children, tmp_path: Path) -> None:
    rules: list[Rule] = [{"if": {"num_cpu_threads_per_process": 2}, "seconds": 3.0}]
    run = Run(material, children, tmp_path / "run", rules, space=narrowed(material, "threads"))
    found = run.search()
    slow = found.results[1]
    assert slow.outcome in ("ok", "pruned")  # the table's steps come all at once, so a whole pass may have been seen
    assert found.outcome == "kept"


# --- the same again, and on from where it was ---------------------------------------------------------------------


def test_the_same_results_give_the_same_order_of_trials(material: Material, children: Children, tmp_path: Path) -> None:
    rules: list[Rule] = [
        {"if": BFD_128, "seconds": 0.8},
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.7},
        {"if": {"dataloader_num_workers": 1}, "fail": "error", "detail": "no"},
    ]
    orders = []
    for name in ("one", "two"):
        run = Run(material, children, tmp_path / name, rules, trial_limit=6)
        orders.append([str(result.candidate) for result in run.search().results])
    assert orders[0] == orders[1]
    assert len(set(orders[0])) == 6


def told(candidate: Candidate, index: int, rate: float | None) -> TrialResult:
    return TrialResult(
        index=index,
        purpose="speed",
        candidate=candidate,
        label=str(candidate),
        outcome="ok" if rate is not None else "error",
        rate=rate,
    )


def test_proposals_visit_every_candidate_once_with_the_same_order_each_time(material: Material) -> None:
    space = narrowed(material, "arrangement", "threads", "checkpointing")

    def visit(seed: int) -> list[Candidate]:
        proposals = Proposals(space, lambda one: float(one.arrangement.micro_batch), seed=seed)
        proposals.tell(told(material.space.baseline, 0, 100.0))
        order: list[Candidate] = []
        for index in itertools.count(1):
            proposal = proposals.next()
            if proposal is None:
                return order
            candidate, _ = proposal
            order.append(candidate)
            rate = 100.0 + candidate.arrangement.micro_batch if index % 5 else None
            proposals.tell(told(candidate, index, rate))
        raise AssertionError

    first = visit(0)
    assert len(first) == len(set(first)) == space.size - 1
    assert visit(0) == first


@pytest.fixture
def interrupted(material: Material, children: Children, tmp_path: Path) -> tuple[Path, list[Rule], Run]:
    """A run that Ctrl-C ended at the start of its fifth trial."""
    rules: list[Rule] = [
        {"if": BFD_128, "seconds": 0.8},
        {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.7},
    ]
    run = Run(material, children, tmp_path / "run", rules, trial_limit=8)

    def emit(event: AnyEvent) -> None:
        run.said.append(event)
        if isinstance(event, TrialStarted) and event.trial == 4:
            raise KeyboardInterrupt

    run.tuner.setting.emit = emit
    with pytest.raises(KeyboardInterrupt):
        run.search()
    return tmp_path / "run", rules, run


def test_an_interrupted_search_has_its_best_so_far(interrupted: tuple[Path, list[Rule], Run]) -> None:
    folder, _, run = interrupted
    found = run.tuner.found("interrupted")
    assert found.outcome == "interrupted"
    assert len(found.results) == 4
    assert found.best is not None
    assert found.best.rate == max(result.rate or 0.0 for result in found.results)
    assert [result.index for result in run_folder.results(folder)] == [0, 1, 2, 3]


def test_a_resumed_search_runs_no_trial_again_and_ends_as_if_it_had_not_been_cut_short(
    material: Material, children: Children, tmp_path: Path, interrupted: tuple[Path, list[Rule], Run]
) -> None:
    folder, rules, before = interrupted
    earlier = run_folder.results(folder)
    resumed = Run(material, children, folder, rules, trial_limit=8, earlier=earlier)
    found = resumed.search()
    whole = Run(material, children, tmp_path / "whole", rules, trial_limit=8)
    expected = whole.search()
    assert not set(resumed.started()) & set(before.started()[:4])
    assert len(resumed.started()) == 4
    assert [one.candidate for one in found.results] == [one.candidate for one in expected.results]
    assert [one.index for one in found.results] == list(range(8))
    assert (found.outcome, found.winner) == (expected.outcome, expected.winner)
    assert found.speedup is not None
    assert expected.speedup is not None
    assert found.speedup.value == pytest.approx(expected.speedup.value)


def test_a_resumed_search_has_all_that_was_measured_before_it_does_anything(
    material: Material, children: Children, interrupted: tuple[Path, list[Rule], Run]
) -> None:
    folder, rules, before = interrupted
    resumed = Run(material, children, folder, rules, earlier=run_folder.results(folder))
    found = resumed.tuner.found("interrupted")
    assert found.results == before.tuner.found("interrupted").results
    assert found.best == before.tuner.record.best
    assert found.session_index == 4


def test_a_trial_that_is_interrupted_while_it_is_measured_again_is_kept_and_wins_nothing(
    material: Material, children: Children, tmp_path: Path
) -> None:
    rules: list[Rule] = [{"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.5}]
    folder = tmp_path / "run"
    run = Run(material, children, folder, rules, space=narrowed(material, "threads"))

    def emit(event: AnyEvent) -> None:
        run.said.append(event)
        if isinstance(event, TrialStarted) and event.reason.startswith("again"):
            raise KeyboardInterrupt

    run.tuner.setting.emit = emit
    run.tuner._disturbed = lambda result: result.index == 1  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.search()
    found = run.tuner.found("interrupted")
    assert [(one.index, one.busy) for one in found.results] == [(0, False), (1, True)]
    assert found.results[1].rate == pytest.approx(2 * RATE)
    assert found.winner == material.space.baseline
    assert [(one.index, one.busy) for one in run_folder.results(folder)] == [(0, False), (1, True)]


class Meter(NamedTuple):
    """Says what others had."""

    cores: float

    def sample(self) -> None:
        pass

    def others(self) -> float:
        return self.cores


@pytest.mark.parametrize("calmest", [1, 2])
def test_the_folder_of_a_trial_holds_the_attempt_that_counts_and_the_other_is_set_aside(
    calmest: int, material: Material, children: Children, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = Run(material, children, folder, [], space=narrowed(material, "threads"))
    cores = itertools.chain([0.0, 0.5, 0.9] if calmest == 1 else [0.0, 0.9, 0.5], itertools.repeat(0.0))
    run.tuner.setting.load_meter = lambda trial: Meter(next(cores))  # type: ignore[method-assign,assignment,return-value]
    run.tuner._disturbed = lambda result: result.others_cores > 0  # type: ignore[method-assign]
    found = run.search()
    other = folder / f"attempt-0001-{3 - calmest}"
    assert json.loads((folder / "trial-0001" / "result.json").read_bytes())["others_cores"] == 0.5
    assert json.loads((other / "result.json").read_bytes())["others_cores"] == 0.9
    first, second = sorted((folder / "trial-0001", other), key=lambda one: (one / "events.jsonl").stat().st_mtime_ns)
    assert (first if calmest == 1 else second).name == "trial-0001"
    assert [one.others_cores for one in found.set_aside] == [0.9]
    assert [result.index for result in run_folder.results(folder) if result.purpose == "speed"] == [
        one.index for one in found.results
    ]


def test_no_trial_is_measured_again_where_its_time_belongs_to_the_confirmation(
    material: Material, children: Children, tmp_path: Path
) -> None:
    run = Run(material, children, tmp_path / "run", [], space=narrowed(material, "threads"), budget_seconds=300.0)
    run.tuner.setting.seconds_left = lambda: 200.0 if len(run.tuner.record.results) < 1 else 32.0  # type: ignore[method-assign]
    run.tuner._disturbed = lambda result: True  # type: ignore[method-assign]
    run.search()
    assert sum("measuring it again" in text for text in run.notes()) == 1


EARLIER_RULES: list[Rule] = [
    {"if": BFD_128, "seconds": 0.8},
    {"if": {"num_cpu_threads_per_process": 2}, "seconds": 0.7},
    {"if": {"gradient_checkpointing": True}, "seconds": 1.4},
]


def earlier_run(material: Material, **changes: Any) -> Earlier:
    """A run that found the best of `EARLIER_RULES`."""
    rows = next(one.value for one in material.space.axis("arrangement").choices if one.value.row_length == 128)
    pick = msgspec.structs.replace(material.space.baseline, arrangement=rows, checkpointing="off", threads=2)
    return msgspec.structs.replace(Earlier("one", pick, str(pick), speedup=2.5), **changes)


def test_a_search_of_an_unchanged_job_measures_the_earlier_pick_again_and_little_else(
    material: Material, children: Children, tmp_path: Path
) -> None:
    earlier = earlier_run(material)
    run = Run(material, children, tmp_path / "run", EARLIER_RULES, earlier_run=earlier)
    found = run.search()
    assert (found.outcome, found.winner) == ("improved", earlier.candidate)
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(1.4 / (0.8 * 0.7))
    assert found.results[1].candidate == earlier.candidate
    assert found.confirmed_rounds >= FEWEST_ROUNDS
    assert 4 <= len(found.results) <= 6  # yours, the pick, and two to four others
    assert any(text.startswith("what the earlier run found still holds, after ") for text in run.notes())


@pytest.mark.parametrize("changes", [{"changed": ("the data (other lengths)",)}, {"speedup": 4.0}])
def test_a_search_goes_on_where_the_job_has_changed_or_the_pick_is_not_what_it_was(
    material: Material, children: Children, tmp_path: Path, changes: dict[str, Any]
) -> None:
    earlier = earlier_run(material, **changes)
    run = Run(material, children, tmp_path / "run", EARLIER_RULES, earlier_run=earlier)
    found = run.search()
    assert found.winner == earlier.candidate
    assert found.results[1].candidate == earlier.candidate
    assert not any(text.startswith("what the earlier run found still holds") for text in run.notes())


def test_an_earlier_pick_that_no_longer_runs_is_not_taken_over(
    material: Material, children: Children, tmp_path: Path
) -> None:
    earlier = earlier_run(material)
    failing: Rule = {"if": {**BFD_128, "num_cpu_threads_per_process": 2}, "fail": "error", "detail": "no"}
    run = Run(material, children, tmp_path / "run", [failing, *EARLIER_RULES], earlier_run=earlier)
    found = run.search()
    assert found.results[1].candidate == earlier.candidate
    assert found.winner != earlier.candidate
    assert found.outcome == "improved"


def test_a_trial_without_a_whole_result_is_run_again(
    material: Material, children: Children, interrupted: tuple[Path, list[Rule], Run]
) -> None:
    folder, rules, before = interrupted
    (folder / "trial-0002" / "result.json").write_text('{"index": 2, "purp')
    (folder / "trial-0003" / "result.json").unlink()
    resumed = Run(material, children, folder, rules, trial_limit=4, earlier=run_folder.results(folder))
    found = resumed.search()
    assert resumed.started() == before.started()[2:4]
    assert len(found.results) == 4


def test_a_slow_baseline_is_measured_on_fewer_documents_also_after_a_resume(
    material: Material, children: Children, tmp_path: Path
) -> None:
    space = narrowed(material, "threads")
    # 12 steps of 0.6 s said are more than the 4 s that a pass may take at least
    rules: list[Rule] = [{"seconds": 30.0}, {"pause": 0.4, "when": "speed"}]
    run = Run(material, children, tmp_path / "run", rules, space=space, budget_seconds=40.0)
    found = run.search()
    shorter = found.results[0].passes[0].steps
    assert 4 <= shorter < 12
    assert [one.passes[0].steps for one in found.results] == [shorter, shorter]
    assert any(f"so trials pass over the documents of {shorter} steps, not of 12" in text for text in run.notes())
    assert found.results[0].index == 0
    earlier = [one for one in run_folder.results(tmp_path / "run") if one.index == 0]
    resumed = Run(material, children, tmp_path / "run", rules, space=space, budget_seconds=40.0, earlier=earlier)
    again = resumed.search()
    assert [one.passes[0].steps for one in again.results] == [shorter, shorter]
