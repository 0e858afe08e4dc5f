"""The attention probe: what is offered has run forward and backward on packed documents; the rest has its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.plan.space import Arrangement, Candidate
from autotune.probe.attention import WORKED, _judge, probe_attention
from autotune.probe.attention_names import CONTAMINATES, FORMS, GENERATION_ONLY, HUB_KERNELS, PACKAGES
from autotune.probe.attention_trial import LIMITS, Heads
from autotune.probe.builds import GENERATES, package_refuses
from autotune.probe.machine import AttentionBackend, Machine, probe_machine
from autotune.search.gates import Gate, ran_as_asked
from autotune.trial.result import TrialResult
from autotune.trial.runner import Trial, TrialPlan
from tests import tiny
from tests.processes import eventually

GROUPED = {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64}


@pytest.fixture(scope="module")
def cpu() -> Machine:
    """This machine, as jobs see it that may use no GPU."""
    return probe_machine({"CUDA_VISIBLE_DEVICES": ""})


def probed(
    machine: Machine, children: Children, *, asked: str | None = None, model: dict[str, Any] | None = None
) -> dict[str, AttentionBackend]:
    return {one.name: one for one in probe_attention(machine, job_attention=asked, model=model, children=children)}


def test_sdpa_and_eager_are_run_forward_and_backward_on_a_cpu(cpu: Machine, children: Children) -> None:
    found = probed(cpu, children, model=GROUPED)
    for name in ("sdpa", "eager"):
        assert found[name].usable
        assert found[name].packing == "dense mask"
        assert found[name].reason.startswith(f"{WORKED}; ")


def judged_as_on_a_gpu(request: dict[str, Any], folder: Path) -> list[str]:
    """The reasons of backends that are not tried, in a child whose torch answers as one on a GPU would."""
    import torch

    answers = {
        "is_available": True,
        "device_count": 1,
        "get_arch_list": request["built_for"],
        "get_device_capability": (7, 5),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    heads = Heads(backend="cuda", precision=request["precision"], attention_heads=2, key_value_heads=2, head_dim=64)
    return [_judge(name, heads, as_asked=False).reason for name in request["names"]]


def test_where_torch_is_not_built_for_the_gpu_nothing_is_tried(children: Children) -> None:
    request = {
        "built_for": ["sm_80", "sm_90", "compute_120"],
        "precision": "fp16",
        "names": ["sdpa", "eager", "flex_attention", "flash_attention_2", HUB_KERNELS[0]],
    }
    reasons = children.call("tests.test_attention_probe:judged_as_on_a_gpu", request, deadline_seconds=60)
    version = probe_machine().versions["torch"]
    assert set(reasons) == {
        f"torch {version} is built for 8.0, 9.0, 12.0+PTX, and compute capability 7.5 runs none of these"
    }


def test_flash_kernels_are_not_tried_in_float32_and_nothing_is_fetched_for_it(children: Children) -> None:
    request = {"built_for": ["sm_75"], "precision": "float32", "names": [*PACKAGES, *HUB_KERNELS]}
    reasons = children.call("tests.test_attention_probe:judged_as_on_a_gpu", request, deadline_seconds=60)
    of_flash, of_generation = reasons[:-1], reasons[-1]
    assert set(of_flash) == {"flash kernels take bf16 and fp16, and the precision is float32"}
    assert of_generation == GENERATES


def test_a_hub_kernel_that_is_the_jobs_own_by_another_name_is_not_tried(cpu: Machine, children: Children) -> None:
    found = probed(cpu, children, asked="flash_attention_2")
    assert found["kernels-community/flash-attn2"].reason == (
        "it is what `flash_attention_2`, your job's name for it, runs without its package"
    )


def test_its_time_and_its_distance_from_sdpa_are_told_as_figures_and_in_words(cpu: Machine, children: Children) -> None:
    found = probed(cpu, children, model=GROUPED)
    sdpa, eager = found["sdpa"], found["eager"]
    assert sdpa.error == 0.0
    assert eager.error is not None
    assert 0.0 < eager.error < 1e-5
    assert eager.milliseconds is not None
    assert 0.0 < eager.milliseconds < 1000.0
    assert eager.reason == (
        f"{WORKED}; {eager.milliseconds:.2f} ms for 24 tokens; logits {eager.error:.1e} off sdpa's in float32"
    )
    assert found["flex_attention"].milliseconds is None


def test_every_backend_that_does_not_work_on_a_cpu_says_why(cpu: Machine, children: Children) -> None:
    found = probed(cpu, children)
    assert found["flex_attention"] == AttentionBackend(
        "flex_attention", False, "dense mask", "flex_attention has no backward on a CPU"
    )
    for name in (*PACKAGES, *HUB_KERNELS[:4]):
        assert found[name] == AttentionBackend(name, False, "variable length", "needs a CUDA GPU")
    assert found[GENERATION_ONLY] == AttentionBackend(GENERATION_ONLY, False, "unknown", GENERATES)


def test_flex_attention_fails_in_backward_on_a_cpu_as_the_reason_says() -> None:
    code = """
import torch
from torch.nn.attention.flex_attention import flex_attention
heads = torch.zeros(1, 1, 16, 16, requires_grad=True)
try:
    torch.compile(flex_attention)(heads, heads, heads).sum().backward()
except NotImplementedError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("FlexAttention does not support backward on CPU")


def test_the_whole_probe_takes_less_than_two_seconds_in_a_warm_child(cpu: Machine, children: Children) -> None:
    children.call("autotune.probe.attention:probe", request_for([]), deadline_seconds=60)  # wait for the server
    begin = time.perf_counter()
    probed(cpu, children, model=GROUPED)
    assert time.perf_counter() - begin < 2.0


def request_for(names: list[str]) -> dict[str, Any]:
    return {"names": names, "job_attention": None, "backend": "cpu", "precision": "float32", "model": {}}


@pytest.mark.parametrize("name", ["sdpa_paged", "flash-attn2", "kernels-community/flash-attn2/build", "mine/a b"])
def test_a_name_that_is_no_repository_is_rejected_with_the_forms_that_are_accepted(
    cpu: Machine, children: Children, name: str
) -> None:
    found = probed(cpu, children, asked=name)[name]
    assert not found.usable
    assert found.reason == (
        "is neither one of `sdpa`, `eager`, `flex_attention`, `flash_attention_2`, `flash_attention_3`, "
        f"`flash_attention_4` nor the name of a kernel's repository, {FORMS}"
    )


def test_a_name_that_stands_for_another_backend_says_so(cpu: Machine, children: Children) -> None:
    found = probed(cpu, children, asked="paged|sdpa")["paged|sdpa"]
    assert found.usable
    assert found.packing == "dense mask"
    assert found.reason.startswith(f"{WORKED}, as `sdpa`; ")


@pytest.mark.parametrize("name", ["mine/flash", "mine/flash@main", "mine/flash:forward", "mine/flash@main:forward"])
def test_offline_a_kernel_that_is_not_in_the_cache_says_so(cpu: Machine, tmp_path: Path, name: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    with Children(environment, log=tmp_path / "server.log", cold=True) as children:
        found = probed(cpu, children, asked=name)[name]
    assert found == AttentionBackend(name, False, "unknown", "not in the cache, and offline (`HF_HUB_OFFLINE` is set)")


def test_a_kernels_version_that_transformers_does_not_take_is_told_with_a_pair_that_works(children: Children) -> None:
    said = children.call("tests.test_attention_probe:refusal_without_kernels", {}, deadline_seconds=60)
    assert said == (
        "transformers 5.24.0 takes kernels 0.18.2 or newer and older than 0.19, and 0.17.2 is installed; "
        "a pair that works: `transformers==5.22.2 kernels==0.17.2`"
    )


def refusal_without_kernels(request: dict[str, Any], folder: Path) -> str | None:
    """As it is in an environment where pip chose transformers 5.24 and kernels 0.17."""
    from transformers import utils

    from autotune.probe import hub_kernels

    utils.is_kernels_available = lambda: False
    installed = {"transformers": "5.24.0", "kernels": "0.17.2"}
    vars(hub_kernels)["installed_version"] = installed.get
    return hub_kernels.hub_refuses("mine/flash", "cuda")


@pytest.mark.parametrize(
    ("name", "installed", "reason"),
    [
        ("flash_attention_2", "2.3.3", None),
        ("flash_attention_2", "2.3.2", "transformers takes `flash-attn` 2.3.3 or newer, and 2.3.2 is installed"),
        ("flash_attention_2", "a fork", "transformers takes `flash-attn` 2.3.3 or newer, and a fork is installed"),
        ("flash_attention_3", "3.0.0b1", None),
    ],
)
def test_a_package_must_have_a_version_that_transformers_takes(name: str, installed: str, reason: str | None) -> None:
    assert package_refuses(name, installed) == reason


def test_what_the_names_stand_for_is_what_transformers_says(children: Children) -> None:
    said = children.call("tests.test_attention_probe:transformers_names", {}, deadline_seconds=60)
    assert said["fallbacks"] == {name: package.stand_in for name, package in PACKAGES.items()}
    assert {kernel: "cuda" in said["devices"].get(kernel, ["cuda"]) for kernel in HUB_KERNELS} == dict.fromkeys(
        HUB_KERNELS, True
    )
    assert said["majors"] == {"flash_attention_3": 8, "flash_attention_4": 9}


def transformers_names(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    from transformers import modeling_flash_attention_utils as flash

    matrix = flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    return {
        "fallbacks": flash.FLASH_ATTN_KERNEL_FALLBACK,
        "devices": flash.FLASH_ATTN_KERNEL_DEVICES,
        "majors": {
            f"flash_attention_{number}": entry["cuda_min_major_version"]
            for number, entry in matrix.items()
            if "cuda_min_major_version" in entry
        },
    }


def test_the_known_kernels_stay_known_at_a_revision(cpu: Machine, children: Children) -> None:
    name = "kernels-community/flash-attn2@v2"
    assert probed(cpu, children, asked=name)[name] == AttentionBackend(
        name, False, "variable length", "needs a CUDA GPU"
    )


def test_a_backend_that_the_models_class_does_not_support_is_rejected(
    cpu: Machine, children: Children, tmp_path: Path
) -> None:
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_attention_heads": 8, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = probed(cpu, children, model={"model": str(tmp_path)})
    assert found["sdpa"] == AttentionBackend("sdpa", False, "dense mask", "GptOssForCausalLM does not support it")
    assert found["flash_attention_2"].reason.startswith("GptOssForCausalLM would run `")
    assert found["eager"].usable


def test_a_model_that_cannot_be_read_is_an_error_with_a_hint(cpu: Machine, children: Children, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(AutotuneError, match=r"the folder `empty` has no `config.json`"):
        probe_attention(cpu, job_attention=None, model={"model": "empty"}, folder=tmp_path, children=children)


def test_on_a_gpu_a_kernel_that_ends_its_child_rejects_itself_only(cpu: Machine, children: Children) -> None:
    """A machine that says it has a GPU, and a child that finds none: every kernel fails, and none takes the rest."""
    claimed = msgspec.structs.replace(cpu, backend="cuda")
    found = probe_attention(claimed, job_attention=None, model=GROUPED, children=children)
    assert [one.name for one in found] == ["sdpa", "eager", "flex_attention", *PACKAGES, *HUB_KERNELS]
    if cpu.versions["torch_cuda"] is None:
        assert not any(one.usable for one in found)
        assert found[0].reason.startswith("fails in loading: AssertionError: Torch not compiled with CUDA enabled")
    assert all(one.reason for one in found)


# a kernel of the user's own, in a folder

VARLEN = """
import torch

def attend(q, k, v, scale, causal):
    {before}
    one = [part.transpose(0, 1)[None] for part in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(
        *one, is_causal=causal, scale=scale * {scale}, enable_gqa=True)[0].transpose(0, 1)

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *others, causal=False, softmax_scale=None, **rest):
    borders = {borders}
    return torch.cat([
        attend(q[begin:end], k[begin:end], v[begin:end], softmax_scale, causal)
        for begin, end in zip(borders[:-1], borders[1:])
    ])

def flash_attn_func(q, k, v, causal=False, softmax_scale=None, **rest):
    return torch.stack([attend(*row, softmax_scale, causal) for row in zip(q, k, v)])
"""
APART = "cu_seqlens_q.tolist()"
MIXED = "[0, q.shape[0]]"


def kernel_of(folder: Path, *, borders: str = APART, before: str = "pass", scale: float = 1.0) -> Children:
    """Children that see the kernel `mine/flash` in a folder, in plain torch."""
    write_kernel(folder, borders=borders, before=before, scale=scale)
    environment = {**os.environ, "LOCAL_KERNELS": f"mine/flash={folder}", "HF_HUB_OFFLINE": "1"}
    return Children(environment, log=folder / "server.log", cold=True)


def write_kernel(folder: Path, *, borders: str = APART, before: str = "pass", scale: float = 1.0) -> None:
    build = folder / "build/torch-universal"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text(VARLEN.format(borders=borders, before=before, scale=scale))
    metadata = {"name": "flash", "id": "_flash", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (build / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": "cpu"}}))


def test_a_kernel_in_a_folder_is_tried_with_shared_heads(cpu: Machine, tmp_path: Path) -> None:
    with kernel_of(tmp_path) as children:
        found = probed(cpu, children, asked="mine/flash", model=GROUPED)["mine/flash"]
    assert found.usable
    assert (found.packing, found.revision) == ("variable length", "local")
    assert found.reason.startswith(f"{WORKED}, from a folder here; ")
    assert found.error is not None
    assert found.error < 1e-5


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("name", ["mine/flash", "mine/flash@v1", f"mine/flash@{COMMIT}"])
def test_a_kernel_in_the_cache_is_told_with_its_commit(cpu: Machine, tmp_path: Path, name: str) -> None:
    repository = tmp_path / "hub/kernels--mine--flash"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/v1").write_text(COMMIT)
    write_kernel(repository / "snapshots" / COMMIT)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    with Children(environment, log=tmp_path / "server.log", cold=True) as children:
        found = probed(cpu, children, asked=name, model=GROUPED)[name]
    assert found.reason.startswith(f"{WORKED}, revision {COMMIT[:12]}; ")
    assert found.revision == COMMIT


def test_a_kernel_that_mixes_packed_documents_is_told(cpu: Machine, tmp_path: Path) -> None:
    with kernel_of(tmp_path, borders=MIXED) as children:
        found = probed(cpu, children, asked="mine/flash", model=GROUPED)["mine/flash"]
    assert found.usable
    assert found.packing == CONTAMINATES
    assert found.reason.startswith(f"{WORKED}, from a folder here, which it does not keep apart; ")


def test_a_kernel_that_computes_something_else_is_rejected_with_the_figure(cpu: Machine, tmp_path: Path) -> None:
    with kernel_of(tmp_path, scale=1.1) as children:
        found = probed(cpu, children, asked="mine/flash", model=GROUPED)["mine/flash"]
    assert not found.usable
    assert found.error is not None
    assert found.error > max(LIMITS["float32"], 1e-3)
    assert found.reason == f"its logits are {found.error:.1e} off sdpa's in float32, at most 1e-04"


def test_a_kernel_whose_backward_is_off_is_rejected_with_the_figure(cpu: Machine, tmp_path: Path) -> None:
    halved = "q.register_hook(lambda gradient: gradient / 2) if q.requires_grad else None"
    with kernel_of(tmp_path, before=halved) as children:
        found = probed(cpu, children, asked="mine/flash", model=GROUPED)["mine/flash"]
    assert not found.usable
    assert found.reason.startswith("its gradients are ")
    assert found.reason.endswith(" off sdpa's in float32, at most 1e-04")


def test_a_kernel_that_fails_in_backward_is_rejected_with_its_error(cpu: Machine, tmp_path: Path) -> None:
    error = "(_ for _ in ()).throw(RuntimeError('no such head size. More'))"
    raising = f"q.requires_grad and q.register_hook(lambda gradient: {error})"
    with kernel_of(tmp_path, before=raising) as children:
        found = probed(cpu, children, asked="mine/flash", model=GROUPED)["mine/flash"]
    assert not found.usable
    assert found.reason == "fails in backward: RuntimeError: no such head size"


def test_the_heads_are_read_from_the_model(cpu: Machine, tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 48,
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    raising = "raise RuntimeError(f'heads {q.shape[1]} {k.shape[1]} {q.shape[2]}')"
    with kernel_of(tmp_path, before=raising) as children:
        found = probed(cpu, children, asked="mine/flash", model={"model": str(tmp_path / "model")})["mine/flash"]
    assert found.reason == "fails in forward: RuntimeError: heads 6 3 48"


# --- in a trial ---------------------------------------------------------------------------------------------------


def test_a_trial_says_what_attention_ran_and_that_its_kernel_is_local(children: Children, tmp_path: Path) -> None:
    write_kernel(tmp_path / "kernel")
    model = tiny.make_model(tmp_path / "model")
    tiny.write_rows(tmp_path / "rows.jsonl", [{"input_ids": [7] * 20} for _ in range(16)])
    config = {
        "model_name_or_path": str(model),
        "datasets": [{"path": "json", "data_files": "rows.jsonl", "split": "train"}],
        "output_dir": str(tmp_path / "output"),
        "max_length": 64,
        "packing": True,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "attn_implementation": "mine/flash",
    }
    plan = TrialPlan(
        index=1,
        purpose="speed",
        label="one",
        method="sft",
        config=yaml.safe_dump(config),
        working_folder=str(tmp_path),
        datasets_cache=str(tmp_path / "cache"),
        threads=1,
        environment={"LOCAL_KERNELS": f"mine/flash={tmp_path / 'kernel'}"},
        warm_up_steps=1,
        passes=0,
    )
    trial = Trial(plan, tmp_path / "trial", children, target="autotune.trial.worker:run")
    trial.start()

    def ended() -> bool:
        trial.poll()
        return not trial.running

    try:
        assert eventually(ended, seconds=60)
    finally:
        trial.kill()
    assert trial.result_outcome() == ("ok", None, None)
    assert trial.hello is not None
    assert (trial.hello.requested_attention, trial.hello.actual_attention) == ("mine/flash", "mine/flash")
    assert trial.hello.kernel_revision == "local"


ARRANGEMENT = Arrangement("padded", 8, 1)


@pytest.mark.parametrize(
    ("asked", "actual", "revision", "passed", "detail"),
    [
        ("sdpa", "sdpa", None, True, "sdpa ran as asked"),
        ("mine/flash", "mine/flash", "local", True, "mine/flash ran as asked, from a folder here"),
        ("mine/flash", "mine/flash", COMMIT, True, "mine/flash ran as asked, revision 0123456789ab"),
        ("mine/flash", "sdpa", None, False, "asked for mine/flash, and sdpa ran"),
    ],
)
def test_the_gate_says_which_revision_of_a_kernel_ran(
    asked: str, actual: str, revision: str | None, passed: bool, detail: str
) -> None:
    baseline = Candidate(ARRANGEMENT, "sdpa", checkpointing="full", workers=0)
    result = TrialResult(
        index=1,
        purpose="confirm",
        candidate=msgspec.structs.replace(baseline, attention=asked),
        label="one",
        outcome="ok",
        actual_attention=actual,
        kernel_revision=revision,
    )
    assert ran_as_asked(result, None, baseline) == Gate("kernel", passed, detail)
