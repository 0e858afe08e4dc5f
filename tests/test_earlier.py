"""An earlier run of the same job: found, told with what has changed since, and the start of a later search."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune import earlier
from autotune import folder as run_folder
from autotune.events import EventWriter, RunFinished, RunOutcome
from autotune.folder import Earlier, Prepared
from autotune.job import Job
from autotune.plan.space import Arrangement, Axis, Candidate, Choice, Space
from autotune.trial.result import TrialResult
from autotune.trial.runner import to_json
from tests import parts

YOURS = Candidate(Arrangement("padded", 8, 1), attention="sdpa", checkpointing="full", workers=0, threads=1)
PICK = Candidate(Arrangement("bfd", 1, 2, 512), attention="sdpa", checkpointing="off", workers=0, threads=2)
SPACE = Space(
    YOURS,
    (
        Axis(
            "arrangement",
            (
                Choice(YOURS.arrangement, "exact", ""),
                Choice(PICK.arrangement, "regrouped", ""),
                Choice(Arrangement("bfd", 2, 1, 448), "regrouped", ""),
            ),
        ),
        Axis("checkpointing", (Choice("full", "exact", ""), Choice("off", "exact", ""))),
        Axis("threads", (Choice(1, "exact", ""), Choice(2, "exact", ""))),
    ),
    1000.0,
)
OPTIONS = {"model_name_or_path": "model", "max_length": 512, "learning_rate": 1e-5, "output_dir": "out"}


def prepared(**changes: Any) -> Prepared:
    options = OPTIONS | changes.pop("options", {})
    job = Job(
        method="sft",
        config_path=changes.pop("config_path", "sft.yaml"),
        config_text="",
        command_line={},
        options=options,
        launcher={},
        environment={},
        folder="/jobs",
        resolved=options,
        launch_environment={},
    )
    fields: dict[str, Any] = {
        "job": job,
        "machine": parts.cpu_machine(),
        "model": parts.SHAPE,
        "lengths": parts.lengths_of([10, 20, 30]),
        "allowed": ("exact", "regrouped"),
        "budget_seconds": 600.0,
        "trial_limit": None,
        "memory_limit_bytes": None,
    }
    return Prepared(**(fields | changes))


def ended_run(
    runs: Path, name: str, of: Prepared, *, outcome: RunOutcome = "improved", confirmed: bool = True, age: float = 0.0
) -> Path:
    """A run's folder as it is when the run is over: the baseline and the pick were confirmed, 2.5x apart."""
    folder = runs / name
    folder.mkdir(parents=True)
    run_folder.write_prepared(folder, of)
    for index, (candidate, rate) in enumerate(((YOURS, 1000.25), (PICK, 2500.625))):
        trial = folder / f"trial-{index:04d}"
        trial.mkdir()
        result = TrialResult(
            index=index, purpose="confirm", candidate=candidate, label="", outcome="ok", rate=rate, steps=50
        )
        (trial / "result.json").write_bytes(to_json(result))
    (folder / "tuned.yaml").write_text("")
    events = EventWriter(folder / "events.jsonl")
    improved = outcome == "improved"
    events.write(
        RunFinished(
            outcome=outcome,
            run=str(folder),
            rate_unit="useful tokens/s",
            baseline_rate=1000.25,
            best_rate=2500.625 if improved else 1000.25,
            speedup=2.5 if improved else 1.0,
            speedup_interval=(2.4, 2.6),
            trials=9,
            seconds=60.0,
            best={},
            config=str(folder / "tuned.yaml"),
            profile=None,
            confirmed=confirmed,
        )
    )
    events.close()
    when = (folder / "run.msgpack").stat().st_mtime - age
    os.utime(folder / "run.msgpack", (when, when))
    return folder


def test_a_run_of_the_very_same_job_is_where_the_next_one_starts(tmp_path: Path) -> None:
    ended_run(tmp_path, "one", prepared())
    found = earlier.find(prepared(options={"output_dir": "elsewhere"}), SPACE, tmp_path)
    assert found == Earlier("one", PICK, str(PICK), speedup=2.5)
    assert earlier.line(found) == (
        "an earlier run (one) found bfd 512, 1 x 2, sdpa, no checkpointing, 2 threads, 2.50x as fast as yours: nothing "
        "has changed since, so that is measured again first, and the search ends where it is confirmed"
    )


def test_a_run_that_kept_what_the_user_had_is_known_too(tmp_path: Path) -> None:
    ended_run(tmp_path, "one", prepared(), outcome="kept")
    found = earlier.find(prepared(), SPACE, tmp_path)
    assert found == Earlier("one", YOURS, "nothing faster than yours")
    assert "(one) found nothing faster than yours: nothing has changed since" in earlier.line(found)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"options": {"max_length": 1024}}, ("`max_length` 512 -> 1024",)),
        ({"options": {"packing": True}}, ("`packing` none -> true",)),
        ({"options": {"datasets": [{"path": "json"}]}}, ("`datasets`",)),
        ({"lengths": parts.lengths_of([10, 20, 31])}, ("the data (other lengths)",)),
        ({"lengths": parts.lengths_of([10, 20])}, ("the data (3 rows, 2 now)",)),
        ({"model": msgspec.structs.replace(parts.SHAPE, layers=3)}, ("the model",)),
        ({"allowed": ("changed", "exact")}, ("what is allowed",)),
        ({"machine": parts.cpu_machine(cores=8)}, ("CPU 2-core AMD EPYC -> 8-core AMD EPYC",)),
        (
            {"machine": parts.machine(versions={"trl": "1.17.0", "transformers": "5.22.2", "torch": "2.13.0"})},
            ("trl 1.16.0 -> 1.17.0", "kernels 0.17.2 -> none"),
        ),
    ],
)
def test_what_has_changed_since_is_told(tmp_path: Path, changes: dict[str, Any], told: tuple[str, ...]) -> None:
    ended_run(tmp_path, "one", prepared())
    found = earlier.find(prepared(**changes), SPACE, tmp_path)
    assert found is not None
    assert found.candidate == PICK
    assert found.changed == told
    assert earlier.line(found).endswith(f"changed since: {', '.join(told)}: that is tried first in a full search")


def test_what_is_free_at_the_moment_is_no_change(tmp_path: Path) -> None:
    ended_run(tmp_path, "one", prepared())
    found = earlier.find(prepared(machine=parts.machine(free_ram_bytes=2**30)), SPACE, tmp_path)
    assert found is not None
    assert found.changed == ()


def test_a_run_of_the_same_job_goes_before_a_newer_one_of_a_changed_job(tmp_path: Path) -> None:
    ended_run(tmp_path, "same", prepared(), age=100.0)
    ended_run(tmp_path, "other", prepared(options={"max_length": 256}))
    found = earlier.find(prepared(), SPACE, tmp_path)
    assert found is not None
    assert (found.run, found.changed) == ("same", ())


def test_the_newest_of_two_runs_counts(tmp_path: Path) -> None:
    ended_run(tmp_path, "b", prepared(), outcome="kept", age=100.0)
    ended_run(tmp_path, "a", prepared())
    found = earlier.find(prepared(), SPACE, tmp_path)
    assert found is not None
    assert found.run == "a"


def test_a_run_of_another_training_is_none_of_this_ones(tmp_path: Path) -> None:
    ended_run(tmp_path, "one", prepared(config_path="b.yaml", options={"model_name_or_path": "another"}))
    assert earlier.find(prepared(), SPACE, tmp_path) is None


def test_a_run_that_was_not_confirmed_or_is_damaged_is_passed_over(tmp_path: Path) -> None:
    ended_run(tmp_path, "unconfirmed", prepared(), confirmed=False)
    damaged = ended_run(tmp_path, "damaged", prepared())
    (damaged / "run.msgpack").write_bytes(b"\x00")
    half = ended_run(tmp_path, "half", prepared())
    (half / "events.jsonl").unlink()
    assert earlier.find(prepared(), SPACE, tmp_path) is None
    assert earlier.find(prepared(), SPACE, tmp_path / "nowhere") is None


def test_a_pick_that_the_space_no_longer_has_becomes_the_one_most_like_it() -> None:
    longer = msgspec.structs.replace(PICK, arrangement=Arrangement("bfd", 2, 1, 460), threads=4)
    like = earlier.nearest(SPACE, longer)
    assert like == msgspec.structs.replace(PICK, arrangement=Arrangement("bfd", 2, 1, 448), threads=1)
    wrapped = msgspec.structs.replace(PICK, arrangement=Arrangement("wrapped", 1, 2, 512))
    assert earlier.nearest(SPACE, wrapped) == msgspec.structs.replace(PICK, arrangement=YOURS.arrangement)


def test_what_was_found_before_stays_with_a_run_that_is_resumed(tmp_path: Path) -> None:
    found = Earlier("one", PICK, str(PICK), speedup=2.5, changed=("the data (other lengths)",))
    run_folder.write_prepared(tmp_path, msgspec.structs.replace(prepared(), earlier=found))
    assert run_folder.read(tmp_path).earlier == found
