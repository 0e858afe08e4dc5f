"""What only a GPU can show: the probe against `nvidia-smi`, CUDA in forked children, kernels, precision, memory.

Skipped where there is none. Takes about three minutes, most of it flex_attention's compilation.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autotune.children import Children
from autotune.probe.attention_trial import LIMITS
from autotune.probe.gpus import Gpu
from autotune.probe.machine import AMPERE, AttentionBackend, Machine, probe_machine
from autotune.trial.runner import Trial, TrialPlan
from tests import tiny
from tests.processes import eventually

HERE = probe_machine()
NO_GPU = f"no NVIDIA GPU that torch {HERE.versions['torch']} can use: {len(HERE.gpus)} found, backend {HERE.backend}"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(HERE.backend != "cuda", reason=NO_GPU)]

GROUPED = {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64}
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("model"))


# --- the probe ----------------------------------------------------------------------------------------------------


def nvidia_smi() -> dict[str, list[str]]:
    """What `nvidia-smi` tells of each card, by its UUID."""
    fields = "uuid,name,compute_cap,memory.total,driver_version"
    said = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return smi_rows(said)


def smi_rows(said: str) -> dict[str, list[str]]:
    rows = [[part.strip() for part in line.split(",")] for line in said.splitlines() if line.strip()]
    return {row[0]: row[1:] for row in rows}


def assert_as_told(gpu: Gpu, driver: str | None, told: list[str]) -> None:
    name, capability, memory, driver_told = told
    assert gpu.name == name
    assert gpu.compute_capability is not None
    assert ".".join(str(part) for part in gpu.compute_capability) == capability
    assert driver == driver_told
    if memory.isdecimal():  # a GPU that shares the machine's memory has none of its own to tell
        # NVML counts what the driver keeps for itself in one call and not in another
        assert gpu.memory_bytes / MIB == pytest.approx(int(memory), rel=0.02)
        assert 0 < gpu.free_bytes <= gpu.memory_bytes


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no `nvidia-smi` here")
def test_the_probe_tells_what_nvidia_smi_tells() -> None:
    told = nvidia_smi()
    whole = [gpu for gpu in HERE.gpus if gpu.mig is None]
    if not whole:
        pytest.skip("every GPU here is a MIG slice, whose memory `nvidia-smi --query-gpu` does not tell")
    for gpu in whole:
        assert_as_told(gpu, HERE.driver, told[gpu.uuid])


def test_the_probe_tells_what_torch_tells(children: Children) -> None:
    told = children.call("tests.test_gpu:as_torch_tells", {}, deadline_seconds=60)
    assert [told["name"], tuple(told["capability"])] == [
        HERE.gpus[0].name.split(" MIG ")[0],
        HERE.gpus[0].compute_capability,
    ]
    assert told["bf16"] == (HERE.precision.value == "bf16")


def as_torch_tells(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    return {
        "name": torch.cuda.get_device_name(0).split(" MIG ")[0],
        "capability": torch.cuda.get_device_capability(0),
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }


# --- forked children ----------------------------------------------------------------------------------------------


def test_a_child_forked_from_the_preloaded_server_can_use_cuda(children: Children) -> None:
    for _ in range(2):  # the first child must leave nothing behind that keeps the second from it
        said = children.call("tests.test_gpu:use_cuda", {"device": "cuda"}, deadline_seconds=60)
        assert said == {"preloaded": True, "initialised_by_preload": False, "spoilt_by_fork": False, "sum": 512.0}


def use_cuda(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    preloaded = "trl.trainer.sft_trainer" in sys.modules
    import torch

    before = torch.cuda.is_initialized()
    spoilt = torch.cuda._is_in_bad_fork()  # set in a child whose parent had initialised CUDA
    ones = torch.ones(512, 512, device=request["device"], requires_grad=True)
    (ones @ ones).mean().backward()
    total = float((ones @ ones).mean())
    return {"preloaded": preloaded, "initialised_by_preload": before, "spoilt_by_fork": spoilt, "sum": total}


# --- attention ----------------------------------------------------------------------------------------------------


def probed(children: Children, names: list[str], machine: Machine, *, seconds: float) -> dict[str, AttentionBackend]:
    """The backends as the probe's child judges them; `probe_attention` would also ask the hub for kernels."""
    request = {
        "names": names,
        "job_attention": None,
        "backend": machine.backend,
        "precision": machine.precision.value,
        "model": GROUPED,
    }
    answer = children.call("autotune.probe.attention:probe", request, deadline_seconds=seconds)
    return {one.name: one for one in msgspec.convert(answer, list[AttentionBackend])}


def assert_ran(backend: AttentionBackend, precision: str) -> None:
    assert backend.usable, backend.reason
    assert backend.packing == "dense mask", backend.reason
    assert backend.error is not None
    assert 0.0 <= backend.error <= LIMITS[precision]
    assert backend.milliseconds is not None, backend.reason
    assert 0.0 < backend.milliseconds < 5000.0
    print(f"{backend.name}: {backend.reason}")


def test_sdpa_and_eager_run_forward_and_backward_on_packed_documents(children: Children) -> None:
    found = probed(children, ["sdpa", "eager"], HERE, seconds=120)
    for backend in found.values():
        assert_ran(backend, HERE.precision.value)


@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    or not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
    reason="Triton needs a C compiler and Python's headers to compile flex_attention",
)
def test_flex_attention_runs_forward_and_backward_on_packed_documents(children: Children) -> None:
    found = probed(children, ["flex_attention"], HERE, seconds=240)
    assert_ran(found["flex_attention"], HERE.precision.value)


# --- precision ----------------------------------------------------------------------------------------------------


def test_bf16_is_as_fast_as_fp16_where_the_precision_is_bf16(children: Children) -> None:
    took = children.call(
        "tests.test_gpu:matmul_milliseconds", {"device": "cuda", "size": 4096, "repetitions": 20}, deadline_seconds=120
    )
    print(f"4096 x 4096 matrix product in milliseconds: {took}")
    capability = HERE.gpus[0].compute_capability
    assert capability is not None
    if capability >= AMPERE:
        assert 0.5 < took["bfloat16"] / took["float16"] < 2.0
    else:
        assert took["bfloat16"] > 1.5 * took["float16"]  # emulated


def matmul_milliseconds(request: dict[str, Any], folder: Path) -> dict[str, float]:
    """Median milliseconds of a matrix product in each half precision, taken in turns."""
    import time

    import torch

    on_gpu = request["device"] == "cuda"
    sizes = (request["size"], request["size"])
    matrices = {
        name: torch.ones(sizes, device=request["device"], dtype=getattr(torch, name))
        for name in ("bfloat16", "float16")
    }
    seconds: dict[str, list[float]] = {name: [] for name in matrices}
    for _ in range(3 + request["repetitions"]):
        for name, matrix in matrices.items():
            if on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            matrix @ matrix
            if on_gpu:
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    return {name: 1000 * statistics.median(taken[3:]) for name, taken in seconds.items()}


# --- trials -------------------------------------------------------------------------------------------------------


def run_trial(children: Children, folder: Path, model: Path, *, rows: list[int], **options: Any) -> Trial:
    """A trial of TRL itself on rows of these lengths, until its end."""
    tiny.write_rows(folder / "rows.jsonl", [{"input_ids": [7] * count} for count in rows])
    precision = HERE.precision.value
    config = {
        "model_name_or_path": str(model),
        "datasets": [{"path": "json", "data_files": "rows.jsonl", "split": "train"}],
        "output_dir": str(folder / "output"),
        "num_train_epochs": 1_000_000,
        "per_device_train_batch_size": 2,
        "max_length": None,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "save_strategy": "no",
        "report_to": "none",
        **options,
    }
    plan = TrialPlan(
        index=1,
        purpose="speed",
        label="one",
        method="sft",
        config=yaml.safe_dump(config),
        working_folder=str(folder),
        datasets_cache=str(folder / "cache"),
        threads=None,
        # with several cards to be seen, the Trainer would split each batch among them
        environment={"CUDA_VISIBLE_DEVICES": HERE.gpus[0].uuid} if HERE.gpus else {},
        warm_up_steps=2,
        passes=1,
    )
    trial = Trial(plan, folder / "trial", children, target="autotune.trial.worker:run")
    trial.start()

    def ended() -> bool:
        trial.poll()
        return not trial.running

    try:
        assert eventually(ended, seconds=120), (trial.folder / "output.log").read_text()
    finally:
        trial.kill()
    return trial


def test_a_trial_tells_the_memory_that_torch_has_reserved(children: Children, model: Path, tmp_path: Path) -> None:
    trial = run_trial(children, tmp_path, model, rows=[64] * 8)
    assert trial.result_outcome() == ("ok", None, None), (trial.folder / "output.log").read_text()
    assert [(step.pass_index, step.step) for step in trial.steps] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3),
    ]  # fmt: skip
    peaks = [step.peak_bytes or 0 for step in trial.steps]
    assert peaks == sorted(peaks)
    assert trial.peak_bytes() == peaks[-1]
    # torch reserves in pieces of 2 MiB (torch 2.13, c10/cuda/CUDACachingAllocator.cpp), and Adam keeps two figures
    # beside each weight and its gradient
    assert peaks[-1] % (2 * MIB) == 0
    assert 4 * 4 * parameters_of(model) < peaks[-1] < HERE.gpus[0].memory_bytes
    assert all(step.seconds > 0 and step.loss is not None for step in trial.steps)


def parameters_of(model: Path) -> int:
    """From the size of the weights' file, which holds them in float32."""
    return (model / "model.safetensors").stat().st_size // 4 - 10_000


def test_a_trial_that_needs_more_memory_than_the_gpu_has_is_out_of_memory(
    children: Children, model: Path, tmp_path: Path
) -> None:
    # eager attention holds the scores of every pair of tokens: 4 heads x 262,144^2 in half precision are 550 GB
    trial = run_trial(children, tmp_path, model, rows=[262_144] * 4, attn_implementation="eager")
    outcome, where, detail = trial.result_outcome()
    assert (outcome, where) == ("oom", "forward"), (trial.folder / "output.log").read_text()
    assert detail is not None
    assert detail.startswith("OutOfMemoryError: CUDA out of memory")
    after = probe_machine()
    assert after.gpus[0].free_bytes > 0.8 * HERE.gpus[0].free_bytes  # what it held is given back


# --- the options of GPUs ------------------------------------------------------------------------------------------


def test_what_only_a_gpu_has_trains_there_with_the_losses_of_the_baseline(
    children: Children, model: Path, tmp_path: Path
) -> None:
    offloaded = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
    options: list[dict[str, Any]] = [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": False, "activation_offloading": True},
        offloaded,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
        {"gradient_checkpointing": False, "torch_compile": True, "tf32": False},
        {"gradient_checkpointing": False, "dataloader_num_workers": 2, "dataloader_prefetch_factor": 4},
        {"gradient_checkpointing": False, "optim": "adamw_torch"},
    ]
    runs = [{"lengths": tiny.lengths(24, median=20, longest=60), "use_cpu": False, **one} for one in options]
    baseline, *others = children.call(
        "tests.trl_side:train", {"model": str(model), "runs": runs}, deadline_seconds=280, working_folder=tmp_path
    )
    assert baseline[0] != baseline[-1]
    for option, other in zip(options[1:], others, strict=True):
        assert (option, other) == (option, pytest.approx(baseline, abs=1e-4))
