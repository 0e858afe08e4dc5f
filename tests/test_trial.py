"""Trials: real child processes that work, fail in every way known, and take turns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autotune.child import Ending
from autotune.children import Children
from autotune.events import AnyEvent, Hello, PassEnd, Phase, Step
from autotune.trial.result import Pass, passes_of
from autotune.trial.runner import Deadlines, Trial, TrialPlan, classify_ending, environment_difference
from autotune.trial.worker import classify
from tests import tiny
from tests.processes import alive, eventually, read_numbers

PLAN = TrialPlan(
    index=4,
    purpose="speed",
    label="one",
    method="sft",
    config="learning_rate: 1.0e-4\n",
    working_folder="/",
    datasets_cache="/nowhere",
    threads=1,
    passes=2,
)


def start(name: str, folder: Path, children: Children, *, deadlines: Deadlines | None = None, **changes: Any) -> Trial:
    plan = msgspec.structs.replace(PLAN, **{"working_folder": str(folder), **changes})
    trial = Trial(plan, folder / "trial", children, deadlines=deadlines, target=f"tests.fake_workers:{name}")
    trial.start()
    return trial


def finish(trial: Trial, *, seconds: float = 20.0) -> list[AnyEvent]:
    """Poll until the trial has ended."""
    said: list[AnyEvent] = []

    def ended() -> bool:
        said.extend(trial.poll())
        return not trial.running

    assert eventually(ended, seconds=seconds)
    return said


def polled(trial: Trial) -> Trial:
    trial.poll()
    return trial


# --- outcomes -----------------------------------------------------------------------------------------------------


def test_a_trial_that_works_is_ok_with_its_steps_and_passes(children: Children, tmp_path: Path) -> None:
    trial = start("trial_that_works", tmp_path, children)
    said = finish(trial)
    assert trial.result_outcome() == ("ok", None, None)
    assert [event.phase for event in said if isinstance(event, Phase)] == [
        "start",
        "load_model",
        "prepare_data",
        "first_step",
        "measure",
    ]
    assert [(step.pass_index, step.step) for step in trial.steps] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip
    passes = passes_of(trial.steps, trial.ended_passes)
    assert [(one.index, one.steps, one.useful_tokens, one.micro_batches) for one in passes] == [
        (1, 3, 300, 6),
        (2, 3, 300, 6),
    ]
    assert passes[0].rate == pytest.approx(1000.0)
    assert trial.hello is not None
    assert trial.hello.actual_attention == "sdpa"


def test_the_folder_of_a_trial_holds_what_ran_and_what_was_said(children: Children, tmp_path: Path) -> None:
    trial = start("trial_that_works", tmp_path, children)
    finish(trial)
    assert (trial.folder / "trl.yaml").read_text() == PLAN.config
    assert (trial.folder / "command.txt").read_text() == f"trl sft --config {trial.folder}/trl.yaml\n"
    assert (trial.folder / "output.log").read_text() == "from the worker, on stdout\nfrom the worker, on stderr\n"


@pytest.mark.parametrize(
    ("name", "outcome", "where", "detail"),
    [
        (
            "trial_out_of_memory",
            "oom",
            "backward",
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …",
        ),
        ("trial_killed_in_a_step", "killed", "a step", "ended by signal 9 (Killed)"),
        ("trial_segfault_at_load", "killed", "load_model", "ended by signal 11 (Segmentation fault)"),
        ("trial_torn", "error", "a step", "exit code 3: no output"),
        ("trial_exit_3", "error", "prepare_data", "exit code 3: no output"),
        ("trial_traceback", "error", "prepare_data", "exit code 1: KeyError: 'text'"),
        ("trial_crashes_after_its_end", "ok", None, None),
    ],
)
def test_a_trial_is_classified_by_how_it_ended(
    children: Children, tmp_path: Path, name: str, outcome: str, where: str | None, detail: str | None
) -> None:
    trial = start(name, tmp_path, children)
    finish(trial)
    assert trial.result_outcome() == (outcome, where, detail)
    assert alive([trial.pid]) == []


def test_a_torn_line_costs_that_step_alone(children: Children, tmp_path: Path) -> None:
    trial = start("trial_torn", tmp_path, children)
    finish(trial)
    assert [(step.pass_index, step.step) for step in trial.steps] == [(0, 0)]


def test_a_trial_beyond_its_memory_limit_is_out_of_memory(children: Children, tmp_path: Path) -> None:
    trial = start("trial_holds_memory", tmp_path, children, memory_limit_bytes=900_000_000)
    finish(trial)
    outcome, where, detail = trial.result_outcome()
    assert (outcome, where) == ("oom", "a step")
    assert detail is not None
    held = float(detail.split()[1])
    assert detail == f"held {held:.2f} GB, more than the 0.90 GB a trial may take"
    assert held >= 0.9
    assert (trial.peak_bytes() or 0) > 900_000_000


def test_the_peak_is_what_the_guard_saw_where_the_worker_does_not_tell(children: Children, tmp_path: Path) -> None:
    trial = start("trial_slow_start", tmp_path, children)
    finish(trial)
    peak = trial.peak_bytes()
    assert peak is not None
    assert 10_000_000 < peak < 4_000_000_000


# --- deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "deadlines", "phase"),
    [
        ("trial_slow_start", Deadlines(start=0.3), "start"),
        ("trial_hangs_in_first_step", Deadlines(first_step=0.4), "first_step"),
        ("trial_hangs_after_a_step", Deadlines(first_step=600, step=0.4), "first_step"),
    ],
)
def test_a_silent_trial_is_hung_and_the_phase_is_named(
    children: Children, tmp_path: Path, name: str, deadlines: Deadlines, phase: str
) -> None:
    trial = start(name, tmp_path, children, deadlines=deadlines)
    finish(trial, seconds=5)
    time.sleep(1.0)  # the silence that is told is the one before the end
    assert trial.result_outcome() == ("hung", phase, f"no sign of life for 0 s in {phase}")
    assert alive([trial.pid]) == []
    if (trial.folder / "pids").exists():
        assert alive(read_numbers(trial.folder / "pids")) == []


def test_a_slow_start_within_its_deadline_is_no_hang(children: Children, tmp_path: Path) -> None:
    trial = start("trial_slow_start", tmp_path, children, deadlines=Deadlines(start=5))
    finish(trial)
    assert trial.result_outcome() == ("ok", None, None)


@pytest.mark.parametrize(("factor", "outcome"), [(20.0, "ok"), (1.0, "hung")])
def test_a_step_may_take_a_multiple_of_the_slowest_before_it(
    children: Children, tmp_path: Path, factor: float, outcome: str
) -> None:
    deadlines = Deadlines(step=0.3, step_factor=factor)
    trial = start("trial_long_step", tmp_path, children, deadlines=deadlines)
    finish(trial)
    assert trial.result_outcome()[0] == outcome


def test_a_trial_that_rests_is_not_hung(children: Children, tmp_path: Path) -> None:
    trial = start("trial_that_waits", tmp_path, children, deadlines=Deadlines(step=0.3, step_factor=0))
    assert eventually(lambda: polled(trial).ended_passes == {1}, seconds=10)
    trial.rest()
    time.sleep(0.5)
    assert polled(trial).running
    trial.grant_turns(2)
    finish(trial, seconds=5)
    assert trial.result_outcome()[0] == "hung"


# --- stopping -----------------------------------------------------------------------------------------------------


def test_a_killed_trial_is_stopped_and_leaves_nothing(children: Children, tmp_path: Path) -> None:
    trial = start("trial_hangs_in_first_step", tmp_path, children)
    pids = read_numbers(trial.folder / "pids")
    trial.poll()
    trial.kill()
    assert not trial.running
    assert alive(pids) == []
    assert trial.result_outcome() == ("stopped", "first_step", None)


def test_a_trial_that_is_asked_to_stop_ends_at_its_next_step(children: Children, tmp_path: Path) -> None:
    trial = start("trial_that_stops_when_asked", tmp_path, children)
    assert eventually(lambda: len(polled(trial).steps) > 2, seconds=10)
    trial.ask_to_stop()
    finish(trial, seconds=5)
    assert trial.result_outcome() == ("stopped", None, None)


def test_a_trial_that_is_run_again_starts_from_nothing(children: Children, tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    for name in ("result.json", "stop", "turns", "ending.json", "reply.json", "output.log"):
        (folder / name).write_text("of an attempt that was cut short")
    (folder / "events.jsonl").write_text('{"kind":"finished","outcome":"oom"}\n')
    trial = start("trial_that_works", tmp_path, children)
    finish(trial)
    assert trial.result_outcome() == ("ok", None, None)
    assert len(trial.steps) == 8
    assert sorted(path.name for path in folder.iterdir()) == [
        "command.txt",
        "ending.json",
        "events.jsonl",
        "output.log",
        "reply.json",
        "task.json",
        "trl.yaml",
    ]


def test_a_trial_goes_on_counting_where_an_earlier_child_of_it_ended(children: Children, tmp_path: Path) -> None:
    first = start("trial_that_works", tmp_path, children, passes=1)
    assert eventually(lambda: polled(first).ended_passes == {1}, seconds=10)
    first.kill()
    plan = msgspec.structs.replace(first.plan, passes=1)
    second = Trial(plan, first.folder, children, target="tests.fake_workers:trial_killed_in_a_step")
    second.continue_from(first)
    second.start()
    finish(second)
    # neither the first child's "ok" nor its step is the second's
    assert second.result_outcome() == ("killed", "a step", "ended by signal 9 (Killed)")
    third = Trial(plan, first.folder, children, target="tests.fake_workers:trial_that_works")
    third.continue_from(second)
    third.start()
    finish(third)
    assert third.result_outcome() == ("ok", None, None)
    assert third.ended_passes == {1, 2}
    assert [one.index for one in passes_of(third.steps, third.ended_passes)] == [1, 2]


def test_a_later_child_of_a_trial_has_as_long_to_load_as_the_first(children: Children, tmp_path: Path) -> None:
    first = start("trial_that_works", tmp_path, children, passes=1)
    finish(first)
    second = Trial(
        first.plan,
        first.folder,
        children,
        deadlines=Deadlines(start=5, step=0.2, step_factor=0),
        target="tests.fake_workers:trial_slow_start",
    )
    second.continue_from(first)
    second.start()
    finish(second)
    assert second.result_outcome()[0] == "ok"


# --- classification -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (
            Ending(exit_code=None, signal=9, over_memory_limit=True, peak_resident_bytes=2_340_000_000),
            ("oom", "a step", "held 2.34 GB, more than the 2.00 GB a trial may take"),
        ),
        (
            Ending(exit_code=None, signal=9, machine_oom_kills=1, peak_resident_bytes=61_000_000_000),
            ("oom", "a step", "the kernel killed it for memory at 61.00 GB"),
        ),
        (Ending(exit_code=None, signal=9), ("killed", "a step", "ended by signal 9 (Killed)")),
        (
            Ending(exit_code=None, signal=11, machine_oom_kills=1),
            ("killed", "a step", "ended by signal 11 (Segmentation fault)"),
        ),
        (Ending(exit_code=None, signal=7), ("killed", "a step", "ended by signal 7 (Bus error)")),
        (Ending(exit_code=1), ("error", "a step", "exit code 1: RuntimeError: no")),
        (Ending(exit_code=0), ("error", "a step", "exit code 0: RuntimeError: no")),
    ],
)
def test_an_end_without_a_word_is_classified_by_what_the_guard_and_the_kernel_saw(
    tmp_path: Path, ending: Ending, expected: tuple[str, str, str]
) -> None:
    log = tmp_path / "output.log"
    log.write_text("RuntimeError: no\n")
    plan = msgspec.structs.replace(PLAN, memory_limit_bytes=2_000_000_000)
    assert classify_ending(ending, "a step", log, plan) == expected


class OutOfResources(Exception):
    """Stands for Triton's, which is not installed where there is no GPU."""


class DistBackendError(RuntimeError):
    """Stands for torch.distributed's."""


def out_of_memory(text: str) -> BaseException:
    import torch

    error: BaseException = torch.OutOfMemoryError(text)
    return error


OUT_OF_MEMORY: tuple[tuple[str, Any], ...] = (
    (
        "allocator",
        lambda: out_of_memory(
            "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.20 GiB "
            "is free. Process 4711 has 77.93 GiB memory in use."
        ),
    ),
    ("allocator without words", lambda: out_of_memory("")),
    (
        "driver",
        lambda: RuntimeError(
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so "
            "the stacktrace below might be incorrect."
        ),
    ),
    ("driver, lazily", lambda: RuntimeError("CUDA driver error: out of memory")),
    (
        "cuBLAS",
        lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ),
    ("cuDNN", lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    (
        "Triton's shared memory",
        lambda: OutOfResources(
            "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or "
            "`num_stages` may help."
        ),
    ),
    ("Triton's driver", lambda: RuntimeError("Triton Error [CUDA]: out of memory")),
    ("ROCm", lambda: RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB")),
    ("Apple", lambda: RuntimeError("MPS backend out of memory (MPS allocated: 17.80 GB, other allocations: 1 GB)")),
    (
        "CPU",
        lambda: RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 34359738368 bytes. Error code 12 (Cannot allocate memory)"
        ),
    ),
    (
        "CPU of Windows",
        lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you"),
    ),
    ("Python", MemoryError),
    ("numpy", lambda: MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)")),
    ("fork", lambda: OSError(12, "Cannot allocate memory")),
    ("mmap", lambda: RuntimeError("unable to mmap 1192135096 bytes from file <model>: Cannot allocate memory (12)")),
    (
        "NCCL, of memory",
        lambda: DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL version 2.21.5\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
        ),
    ),
)  # fmt: skip

NOT_OUT_OF_MEMORY: tuple[tuple[str, Any], ...] = (
    (
        "NCCL",
        lambda: DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error (run with NCCL_DEBUG=INFO for details), "
            "NCCL version 2.20.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed "
            "or device error."
        ),
    ),
    (
        "NCCL, the same GPU twice",
        lambda: DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:275, invalid usage, NCCL version 2.21.5\n"
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50"
        ),
    ),
    ("disk full", lambda: OSError(28, "No space left on device")),
    (
        "disk full, in safetensors",
        lambda: RuntimeError(
            'Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })'
        ),
    ),
    (
        "shared memory of a dataloader",
        lambda: RuntimeError(
            "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are "
            "out of shared memory. Please try to raise your shared memory limit."
        ),
    ),
    ("illegal access", lambda: RuntimeError("CUDA error: an illegal memory access was encountered")),
    ("cuBLAS", lambda: RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`")),
    ("index", lambda: IndexError("index 151936 is out of range")),
    ("unscaling", lambda: ValueError("Attempting to unscale FP16 gradients.")),
    ("nothing said", RuntimeError),
)


@pytest.mark.parametrize("make", [make for _, make in OUT_OF_MEMORY], ids=[name for name, _ in OUT_OF_MEMORY])
def test_every_wording_of_out_of_memory_is_known(make: Any) -> None:
    error = make()
    assert classify(error)[0] == "oom"


@pytest.mark.parametrize("make", [make for _, make in NOT_OUT_OF_MEMORY], ids=[name for name, _ in NOT_OUT_OF_MEMORY])
def test_other_failures_are_not_taken_for_out_of_memory(make: Any) -> None:
    error = make()
    assert classify(error)[0] == "error"


def test_the_allocator_of_the_installed_torch_is_understood() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**59)
    outcome, _, detail = classify(caught.value)
    assert outcome == "oom"
    assert "DefaultCPUAllocator" in detail


@pytest.mark.parametrize("explicit", [True, False])
def test_an_error_raised_from_out_of_memory_is_out_of_memory(*, explicit: bool) -> None:
    def load() -> None:
        try:
            raise MemoryError("malloc of size 64 failed")
        except MemoryError as error:
            if explicit:
                raise ValueError("An error occurred while generating the dataset") from error
            raise ValueError("An error occurred while generating the dataset")  # noqa: B904

    with pytest.raises(ValueError, match="generating") as caught:
        load()
    assert classify(caught.value) == ("oom", None, "MemoryError: malloc of size 64 failed")


def test_a_cause_that_was_hidden_on_purpose_does_not_count() -> None:
    def load() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("too small a batch") from None

    with pytest.raises(ValueError, match="too small") as caught:
        load()
    assert classify(caught.value) == ("error", None, "ValueError: too small a batch")


@pytest.mark.parametrize(
    ("names", "where"),
    [
        (("train", "training_step", "compute_loss", "forward"), "forward"),
        (("train", "training_step", "backward"), "backward"),
        (("train", "training_step", "backward", "compute_loss"), "backward"),  # recomputed by checkpointing
        (("main", "__init__", "_prepare_dataset", "map"), "prepare_data"),
        (("main", "__init__", "create_model_from_path"), "load_model"),
        (("train", "step", "adamw"), "optimizer step"),
        (("main",), None),
    ],
)
def test_where_an_error_happened_is_read_from_its_traceback(names: tuple[str, ...], where: str | None) -> None:
    lines = ["def innermost():", "    raise ValueError('no')"]
    inner = "innermost"
    for name in reversed(names):
        lines += [f"def {name}(inner={inner}):", "    inner()"]
        inner = name
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    with pytest.raises(ValueError, match="no") as caught:
        scope[inner]()
    assert classify(caught.value) == ("error", where, "ValueError: no")


def test_the_difference_of_two_environments_sets_and_unsets() -> None:
    assert environment_difference({"A": "1", "B": "2"}, {"B": "3", "C": "4", "A": "1"}) == {"B": "2", "C": None}


def test_a_pass_counts_once_its_end_was_said_and_the_warm_up_never() -> None:
    def step(pass_index: int) -> Step:
        return Step(pass_index, 0, 0.5, 1, 10, 10, 1.0)

    steps = [step(0), step(1), step(1), step(2)]
    assert passes_of(steps, {0, 1}) == (
        Pass(index=1, steps=2, seconds=1.0, useful_tokens=20, padding_tokens=20, micro_batches=2),
    )
    assert passes_of(steps, {0, 1})[0].fill == 0.5


# --- the real worker ----------------------------------------------------------------------------------------------


def test_the_real_worker_waits_for_its_turns_and_passes_over_the_same_documents(
    children: Children, tmp_path: Path
) -> None:
    model = tiny.make_model(tmp_path / "model")
    counts = tiny.lengths(32, longest=60)
    tiny.write_rows(tmp_path / "rows.jsonl", [{"input_ids": [7] * count} for count in counts])
    config = {
        "model_name_or_path": str(model),
        "datasets": [{"path": "json", "data_files": "rows.jsonl", "split": "train"}],
        "output_dir": str(tmp_path / "output"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1_000_000,
        "max_length": 50,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "attn_implementation": "eager",
    }
    plan = msgspec.structs.replace(
        PLAN,
        config=yaml.safe_dump(config),
        working_folder=str(tmp_path),
        datasets_cache=str(tmp_path / "cache"),
        passes=2,
        turns=True,
    )
    trial = Trial(plan, tmp_path / "trial", children, target="autotune.trial.worker:run")
    trial.start()
    said: list[AnyEvent] = []

    def passes_ended(count: int) -> bool:
        said.extend(trial.poll())
        assert trial.running, (trial.folder / "output.log").read_text()
        return len(trial.steps) == 2 + 4 * count and len(trial.ended_passes) == count

    try:
        assert eventually(lambda: passes_ended(0), seconds=60)
        time.sleep(0.4)
        assert passes_ended(0)
        trial.grant_turns(1)
        assert eventually(lambda: passes_ended(1), seconds=30)
        time.sleep(0.4)
        assert passes_ended(1)
        trial.grant_turns(2)
        said += finish(trial, seconds=30)
    finally:
        trial.kill()
    assert trial.result_outcome() == ("ok", None, None)
    hello = next(event for event in said if isinstance(event, Hello))
    assert (hello.requested_attention, hello.actual_attention, hello.preloaded) == ("eager", "eager", True)
    kept = sum(min(count, 50) for count in counts)
    passes = passes_of(trial.steps, trial.ended_passes)
    assert [(one.index, one.steps, one.useful_tokens, one.micro_batches) for one in passes] == [
        (1, 4, kept, 8),
        (2, 4, kept, 8),
    ]
    assert all(one.padding_tokens > 0 for one in passes)
    assert all(step.loss is not None and 4 < step.loss < 9 for step in trial.steps)
    norms = [step.grad_norm for step in trial.steps]
    assert all(norm is not None and 0 < norm < 100 for norm in norms)
    assert len(set(norms)) == len(norms)
    assert [event.pass_index for event in said if isinstance(event, PassEnd)] == [1, 2]
    assert not (tmp_path / "output").exists() or list((tmp_path / "output").iterdir()) == []
