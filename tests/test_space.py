"""What could run: every candidate as TRL's own parser reads it, and the grades against TRL's own trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.job import Job, effective, read_job, write_job
from autotune.plan import recipe
from autotune.plan.axes import baseline_candidate, build_space
from autotune.plan.data import Data
from autotune.plan.recipe import ATTENTION_DEFAULT
from autotune.plan.space import (
    GRADES,
    OFFERED,
    TOKENS_PER_STEP_TOLERANCE,
    Arrangement,
    Axis,
    Candidate,
    Choice,
    Grade,
    Rejected,
    Space,
)
from autotune.probe.lengths import Lengths
from autotune.probe.machine import AttentionBackend, Machine
from tests import parts, tiny

Read = Callable[..., Job]

MINIMAL = """\
model_name_or_path: model
datasets: [{path: json, data_files: rows.jsonl, split: train}]
output_dir: out
"""
CHANGED: frozenset[Grade] = OFFERED | {"changed"}
LENGTHS = parts.lengths_of(tiny.lengths(300))  # 300 rows, 57 tokens on average, the longest 354
LONG_TAIL = parts.lengths_of([*tiny.lengths(300), 900, 700])

JOBS = {
    "padded text, 8 x 1": "max_length: 512\n",
    "16 rows in 4 x 4": "max_length: 512\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 4\n",
    "packed": "max_length: 512\npacking: true\nper_device_train_batch_size: 2\n",
    "packed into wrapped rows": "max_length: 512\npacking: true\npacking_strategy: wrapped\n",
    "rebalanced": (
        "max_length: 512\ntrain_sampling_strategy: batch_rebalance\n"
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
    ),
    "in the data's order": "max_length: 512\ntrain_sampling_strategy: sequential\n",
    "padding_free": "max_length: null\npadding_free: true\n",
    "evaluated": "max_length: 512\neval_strategy: steps\neval_steps: 10\nper_device_train_batch_size: 9\n",
    "without max_length": "max_length: null\n",
    "seed 7": "max_length: 512\nseed: 7\n",
    "seed 7, data_seed 42": "max_length: 512\nseed: 7\ndata_seed: 42\n",
    "attention in model_init_kwargs": "max_length: 512\nmodel_init_kwargs: {attn_implementation: eager}\n",
    "without checkpointing": "max_length: 512\ngradient_checkpointing: false\nnum_cpu_threads_per_process: 2\n",
    "no row left over": "max_length: 512\ndataloader_drop_last: true\ndataloader_num_workers: 3\n",
    "workers with more to say": (
        "max_length: 512\ndataloader_num_workers: 2\ndataloader_prefetch_factor: 3\n"
        "dataloader_persistent_workers: true\n"
    ),
    "checkpointing of its own": (
        "max_length: 512\ngradient_checkpointing_kwargs: {use_reentrant: false, every_n_layers: 3}\n"
    ),
    "compiled": "max_length: 512\ntorch_compile: true\ntorch_compile_mode: reduce-overhead\noptim: adamw_torch\n",
    "kernels and half weights": "max_length: 512\nmodel_init_kwargs: {use_kernels: true, dtype: bfloat16}\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model."""
    folder = tmp_path_factory.mktemp("job")
    tiny.make_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def read(children: Children, folder: Path) -> Iterator[Read]:
    """Reads a job of some options on a CPU with bf16, in an environment of its own, each once."""
    known: dict[str, Job] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HOME", str(folder / "no-accelerate-config"))

        def read(options: str) -> Job:
            if options not in known:
                (folder / "sft.yaml").write_text(MINIMAL + options)
                known[options] = read_job(
                    "sft", ["--config", "sft.yaml"], folder=folder, children=children, accelerator=False, cpu_bf16=True
                )
            return known[options]

        yield read


def space_of(
    job: Job, lengths: Lengths = LENGTHS, *, machine: Machine | None = None, allowed: frozenset[Grade] = OFFERED
) -> Space:
    return build_space(job, machine or parts.cpu_machine(), Data(job, lengths), allowed=allowed)


def arrangements(space: Space) -> dict[Arrangement, Choice]:
    return {choice.value: choice for choice in space.axis("arrangement").choices}


def names(space: Space) -> set[str]:
    return {arrangement.name for arrangement in arrangements(space)}


def rejections(space: Space, name: str) -> list[str]:
    """The reasons for which arrangements of this name are out."""
    return [
        rejected.reason
        for rejected in space.axis("arrangement").rejected
        if name == (rejected.value.name if isinstance(rejected.value, Arrangement) else rejected.value)
    ]


def options_of(job: Job, space: Space, candidate: Candidate) -> dict[str, Any]:
    return {change.name: change.value for change in recipe.changes(job, space, candidate)}


def parsed(children: Children, folder: Path, configs: list[str]) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = children.call(
        "tests.trl_side:parse_all", {"configs": configs}, deadline_seconds=120, working_folder=folder
    )
    return answer


# --- every candidate, as TRL's parser reads it -------------------------------------------------------------------


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_every_candidate_is_read_by_trl_as_it_is_meant(
    options: str, read: Read, children: Children, folder: Path
) -> None:
    job = read(options)
    # a second core adds axes and fourfold candidates, of which three jobs are enough
    cores = 2 if options in list(JOBS.values())[-3:] else 1
    machine = msgspec.structs.replace(parts.cpu_machine(cores=cores), abilities=parts.ABLE)
    space = space_of(job, machine=machine, allowed=CHANGED)
    candidates = list(space.candidates())
    assert candidates[0] == space.baseline
    assert len(set(candidates)) == len(candidates) == space.size
    texts = [write_job(job, options_of(job, space, candidate), {}) for candidate in candidates]
    assert len(set(texts)) == len(texts)
    answers = parsed(children, folder, texts)
    untouched = answers[0]["fields"]
    for candidate, answer in zip(candidates, answers, strict=True):
        assert as_trl_reads_it(answer, job) == candidate
        unchanged = {
            name: value for name, value in answer["fields"].items() if name not in TUNED and value != untouched[name]
        }
        assert unchanged == {}


TUNED = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "packing",
    "packing_strategy",
    "max_length",
    "eval_packing",
    "train_sampling_strategy",
    "attn_implementation",
    "model_init_kwargs",
    "gradient_checkpointing",
    "activation_checkpointing",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
    "padding_free",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "activation_offloading",
    "optim",
    "dtype",
    "run_name",
}


def as_trl_reads_it(answer: dict[str, Any], job: Job) -> Candidate:
    """The candidate that a parsed config makes TRL run."""
    fields = answer["fields"]
    sampling = fields["train_sampling_strategy"]
    name: Any = fields["packing_strategy"] if fields["packing"] else "padded"
    if not fields["packing"] and sampling == "batch_rebalance":
        name = "batch_rebalance"
    elif job.resolved["train_sampling_strategy"] != "batch_rebalance":
        assert sampling == job.resolved["train_sampling_strategy"]
    if not fields["packing"] and fields["padding_free"] == job.resolved["padding_free"]:
        assert fields["max_length"] == job.resolved["max_length"]
    inside = fields["model_init_kwargs"] or {}
    attention = inside.get("attn_implementation", fields["attn_implementation"])
    launcher = dict(zip(answer["launcher"][::2], answer["launcher"][1::2], strict=True))
    return Candidate(
        arrangement=Arrangement(
            name,
            fields["per_device_train_batch_size"],
            fields["gradient_accumulation_steps"],
            fields["max_length"] if fields["packing"] else None,
            padding_free=fields["padding_free"],
        ),
        attention=attention or ATTENTION_DEFAULT,
        checkpointing=recipe.checkpointing_mode(fields),
        workers=fields["dataloader_num_workers"],
        threads=int(launcher.get("--num_cpu_threads_per_process", 1)),
        layer_kernels=bool(inside["use_kernels"]) if "use_kernels" in inside else None,
        torch_compile=fields["torch_compile"],
        activation_offloading=fields["activation_offloading"],
        optimizer=fields["optim"].removeprefix("OptimizerNames.").lower(),
        dtype=inside.get("dtype", fields["dtype"]),
    )


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_the_baseline_comes_first_on_every_axis_and_changes_nothing(options: str, read: Read) -> None:
    job = read(options)
    space = space_of(job)
    assert recipe.changes(job, space, space.baseline) == []
    for axis in space.axes:
        assert axis.choices[0].value == getattr(space.baseline, axis.name)
        assert axis.choices[0].grade == "exact"
    assert space.grade(space.baseline) == "exact"


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_every_choice_and_every_rejection_has_its_reason(options: str, read: Read) -> None:
    for lengths in (LENGTHS, LONG_TAIL):
        for axis in space_of(read(options), lengths).axes:
            values = [choice.value for choice in axis.choices]
            assert len(values) == len(set(values))
            for reason in [one.reason for one in axis.choices] + [one.reason for one in axis.rejected]:
                assert reason.strip()
                assert not reason.endswith((".", ";", "; "))


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("lengths", [LENGTHS, LONG_TAIL], ids=["nothing cut", "documents cut"])
def test_a_step_keeps_its_rows_in_exact_arrangements_and_its_tokens_in_regrouped_ones(
    options: str, lengths: Lengths, read: Read
) -> None:
    job = read(options)
    data = Data(job, lengths)
    space = space_of(job, lengths)
    base = space.baseline.arrangement
    for arrangement, choice in arrangements(space).items():
        if choice.grade == "exact":
            assert arrangement.micro_batch * arrangement.accumulation == base.micro_batch * base.accumulation
            assert arrangement.row_length == base.row_length
            assert arrangement.name in (base.name, "batch_rebalance")
        else:
            assert choice.grade == "regrouped"
            assert data.tokens_per_step(arrangement) == pytest.approx(
                space.tokens_per_step, rel=TOKENS_PER_STEP_TOLERANCE
            )


def rows_of(candidate: Candidate) -> int:
    return candidate.arrangement.micro_batch * candidate.arrangement.accumulation


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_changes_carry_the_grade_and_the_reason_of_their_choice(options: str, read: Read) -> None:
    job = read(options)
    space = space_of(job, allowed=CHANGED)
    for candidate in list(space.candidates())[::7]:
        for change in recipe.changes(job, space, candidate):
            choices = [axis.choice(getattr(candidate, axis.name)) for axis in space.axes]
            if change.name in recipe.BATCH_OPTIONS:
                assert f"{rows_of(candidate)} " in change.reason
                assert change.grade in [choice.grade for choice in choices]
            else:
                assert (change.grade, change.reason) in [(choice.grade, choice.reason) for choice in choices]
            assert change.value != change.was or change.name == "packing_strategy"


def test_the_axes_and_their_order_are_these(read: Read) -> None:
    first, then = ["arrangement", "attention", "checkpointing", "workers"], ["torch_compile", "activation_offloading"]
    on_cpu = space_of(read("max_length: 512\n"))
    assert [axis.name for axis in on_cpu.axes] == [*first, "threads", *then, "optimizer", "dtype"]
    on_gpu = space_of(read("max_length: 512\n"), machine=parts.gpu_machine())
    assert [axis.name for axis in on_gpu.axes] == [
        *first, *then, "optimizer", "dtype", "prefetch", "pin_memory", "tf32"
    ]  # fmt: skip
    assert on_gpu.baseline.threads is None
    assert set(GRADES) == set(get_args(Grade))


def test_the_grade_of_a_candidate_is_that_of_its_least_safe_choice(read: Read) -> None:
    space = space_of(read("max_length: 512\n"))
    packed = next(one for one, choice in arrangements(space).items() if choice.grade == "regrouped")
    assert space.grade(msgspec.structs.replace(space.baseline, attention="eager")) == "exact"
    assert space.grade(msgspec.structs.replace(space.baseline, attention="eager", arrangement=packed)) == "regrouped"


# --- what is offered, with which grade ---------------------------------------------------------------------------


def test_other_micro_batches_at_the_same_product_are_exact(read: Read) -> None:
    job = read(JOBS["16 rows in 4 x 4"])
    exact = [
        (one.micro_batch, one.accumulation)
        for one, choice in arrangements(space_of(job)).items()
        if one.name == "padded" and choice.grade == "exact"
    ]
    assert exact == [(4, 4), (1, 16), (2, 8), (8, 2), (16, 1)]


@pytest.mark.parametrize(
    ("options", "rows", "grades"),
    [
        ("", 64, {(2, 4): "exact", (4, 2): "exact"}),
        ("", 61, {(2, 4): "exact", (4, 2): "exact"}),
        ("", 58, {(2, 4): "regrouped", (4, 2): "exact"}),  # a last step of two rows for four groups
        ("", 57, {(2, 4): "regrouped", (4, 2): "regrouped"}),
        ("seed: 7\n", 64, {(2, 4): "regrouped", (4, 2): "regrouped"}),
        ("seed: 7\ndata_seed: 42\n", 64, {(2, 4): "exact", (4, 2): "exact"}),
        ("data_seed: 7\n", 64, {(2, 4): "regrouped", (4, 2): "regrouped"}),
        ("dataloader_drop_last: true\n", 61, {(2, 4): "exact", (4, 2): "exact"}),
        (
            "dataloader_drop_last: true\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n",
            61,
            {(2, 4): "regrouped", (4, 2): "regrouped"},
        ),
    ],
)
def test_rebalancing_is_exact_only_where_order_and_rows_of_an_epoch_are_the_samplers(
    options: str, rows: int, grades: dict[tuple[int, int], Grade], read: Read
) -> None:
    space = space_of(read("max_length: 512\n" + options), parts.lengths_of(tiny.lengths(rows)))
    assert grades == {
        (one.micro_batch, one.accumulation): choice.grade
        for one, choice in arrangements(space).items()
        if one.name == "batch_rebalance"
    }


def test_rebalancing_from_a_sample_of_the_rows_is_not_called_exact(read: Read) -> None:
    job = read("max_length: 512\n")
    sampled = parts.lengths_of(tiny.lengths(64), rows=64_000)
    assert {
        choice.grade for one, choice in arrangements(space_of(job, sampled)).items() if one.name == "batch_rebalance"
    } == {"regrouped"}
    nothing_cut = space_of(read("max_length: null\n"), sampled)
    assert {choice.grade for one, choice in arrangements(nothing_cut).items() if one.name == "batch_rebalance"} == {
        "exact"
    }


def test_rebalancing_is_out_where_the_order_is_not_random(read: Read) -> None:
    space = space_of(read(JOBS["in the data's order"]))
    assert "batch_rebalance" not in names(space)
    assert rejections(space, "batch_rebalance") == ["it shuffles, and your `train_sampling_strategy` is `sequential`"]


def test_rebalancing_needs_rows_to_balance(read: Read) -> None:
    space = space_of(read("max_length: 512\nper_device_train_batch_size: 3\n"))
    assert rejections(space, "batch_rebalance") == ["3 rows per optimizer step leave nothing to balance"]


def test_a_rebalanced_job_whose_other_split_repeats_other_rows_is_regrouped(read: Read) -> None:
    space = space_of(read(JOBS["rebalanced"]), parts.lengths_of(tiny.lengths(58)))
    grades = {(one.micro_batch, one.accumulation): choice.grade for one, choice in arrangements(space).items()}
    assert grades[4, 2] == "exact"
    assert grades[8, 1] == "exact"
    assert grades[2, 4] == "regrouped"
    assert "an epoch passes over 60 rows where yours passes over 58" in (
        space.axis("arrangement").choice(Arrangement("batch_rebalance", 2, 4)).reason
    )


def test_dropping_the_last_micro_batch_makes_other_splits_regrouped(read: Read) -> None:
    job = read("max_length: 512\ndataloader_drop_last: true\nper_device_train_batch_size: 4\n")
    space = space_of(job, parts.lengths_of(tiny.lengths(63)))
    grades = {one.micro_batch: choice.grade for one, choice in arrangements(space).items() if one.name == "padded"}
    assert grades == {4: "exact", 1: "regrouped", 2: "regrouped"}


def test_packing_needs_a_max_length(read: Read) -> None:
    space = space_of(read("max_length: null\n"), allowed=CHANGED)
    assert names(space) == {"padded", "batch_rebalance"}
    assert rejections(space, "packing") == ["TRL packs only with a `max_length`, and yours is null"]


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        ("packing: true\nmax_length: null\n", "`packing: true` needs a `max_length`", "max_length: 1024"),
        ("padding_free: true\nmax_length: 512\n", "`padding_free: true` with `max_length: 512`", "max_length: null"),
        ("padding_free: true\n", "`padding_free: true` with `max_length: 1024`", "max_length: null"),
    ],
)
def test_what_trl_would_refuse_when_model_and_data_are_loaded_is_said_at_once(
    options: str, what: str, hint: str, read: Read
) -> None:
    with pytest.raises(AutotuneError) as caught:
        read(options)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_bfd_split_is_out_when_no_document_is_longer_than_a_row(read: Read) -> None:
    space = space_of(read("max_length: 512\n"), allowed=CHANGED)
    assert rejections(space, "bfd_split") == ["no document is longer than `max_length`: the same as `bfd`"]


def test_bfd_split_is_changed_when_it_splits(read: Read) -> None:
    space = space_of(read("max_length: 512\n"), LONG_TAIL)
    assert "bfd_split" not in names(space)
    [reason] = rejections(space, "bfd_split")[:1]
    assert reason.startswith("grade changed: ")
    allowed = arrangements(space_of(read("max_length: 512\n"), LONG_TAIL, allowed=CHANGED))
    assert {choice.grade for one, choice in allowed.items() if one.name == "bfd_split"} == {"changed"}


def test_wrapped_rows_are_changed_and_offered_only_when_asked_for(read: Read) -> None:
    job = read("max_length: 512\nper_device_train_batch_size: 9\n")
    space = space_of(job)
    assert "wrapped" not in names(space)
    reasons = rejections(space, "wrapped")
    assert reasons
    for reason in reasons:
        assert reason.startswith("grade changed: ")
        assert "documents attend to their neighbours in the row" in reason
        assert reason.endswith("ask for it with `--allow changed`")
    allowed = arrangements(space_of(job, allowed=CHANGED))
    assert {choice.grade for one, choice in allowed.items() if one.name == "wrapped"} == {"changed"}


def test_bfd_that_cuts_what_padding_cuts_is_regrouped(read: Read) -> None:
    job = read("max_length: 512\nper_device_train_batch_size: 9\n")
    bfd = [choice for one, choice in arrangements(space_of(job, LONG_TAIL)).items() if one.name == "bfd"]
    assert {choice.grade for choice in bfd} == {"regrouped"}
    assert {choice.value.row_length for choice in bfd} == {512}


@pytest.mark.parametrize(
    ("options", "lengths", "why"),
    [
        ("truncation_mode: keep_end\n", LONG_TAIL, "your `truncation_mode` keeps the end"),
        ("", parts.lengths_of(LONG_TAIL.tokens, prompt=5), "documents whose loss tokens are all cut off"),
    ],
)
def test_bfd_that_trains_on_other_tokens_than_padding_is_changed(
    options: str, lengths: Lengths, why: str, read: Read
) -> None:
    space = space_of(read("max_length: 512\nper_device_train_batch_size: 9\n" + options), lengths)
    assert "bfd" not in names(space)
    assert why in rejections(space, "bfd")[0]


def test_where_nothing_is_cut_a_row_is_as_long_as_a_step_has_tokens(read: Read) -> None:
    space = space_of(read("max_length: 512\n"))
    bfd = [one for one in arrangements(space) if one.name == "bfd"]
    assert bfd == [Arrangement("bfd", 1, 1, 464)]
    assert space.tokens_per_step == pytest.approx(460, abs=1)


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ("eval_strategy: epoch\n", LENGTHS),
        ("", parts.lengths_of(LENGTHS.tokens, rows=60_000)),
        ("", LONG_TAIL),
    ],
    ids=["evaluation has rows of its own", "not all rows were measured", "documents are cut"],
)
def test_where_rows_could_be_cut_elsewhere_max_length_is_the_jobs(options: str, lengths: Lengths, read: Read) -> None:
    space = space_of(read("max_length: 512\n" + options), lengths, allowed=CHANGED)
    assert {one.row_length for one in arrangements(space) if one.packed} == {512}


def test_bfd_with_too_few_tokens_in_whole_rows_names_a_batch_that_fits(read: Read) -> None:
    space = space_of(read("max_length: 512\neval_strategy: epoch\n"))
    [reason] = rejections(space, "bfd")
    assert "1 x 507 tokens is +10.3% of your 460 a step" in reason
    assert "with 9 documents a step instead of your 8 it would be within 10%" in reason
    assert reason.startswith("grade changed: ")
    with_nine = space_of(read("max_length: 512\neval_strategy: epoch\nper_device_train_batch_size: 9\n"))
    assert "bfd" in names(with_nine)


def test_what_is_learnt_is_said_first_also_where_the_tokens_of_a_step_are_others_too(read: Read) -> None:
    # one packed row holds several times the tokens of a step of two documents
    options = "max_length: 512\neval_strategy: epoch\nper_device_train_batch_size: 2\n"
    space = space_of(read(options), LONG_TAIL, allowed=CHANGED)
    said = {one.value.name: one.reason for one in space.axis("arrangement").choices if one.grade == "changed"}
    assert "it would be within 10%" in said["wrapped"]
    assert said["wrapped"].startswith("documents attend to their neighbours in the row; ")
    assert "documents are cut into pieces that do not see each other; " in said["bfd_split"].split("%")[0]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("max_length", [400, 1000, 2500])
def test_the_batch_that_is_named_fits(rows: int, max_length: int, read: Read) -> None:
    options = f"max_length: {max_length}\neval_strategy: epoch\nper_device_train_batch_size: "
    space = space_of(read(f"{options}{rows}\n"))
    if "bfd" in names(space):
        return
    [reason] = rejections(space, "bfd")
    named = int(reason.split("; with ")[1].split()[0])
    assert named != rows
    assert "bfd" in names(space_of(read(f"{options}{named}\n")))


def test_a_packed_job_is_offered_padded_rows_with_as_many_tokens(read: Read) -> None:
    job = read(JOBS["packed"])
    space = space_of(job)
    padded = {one: choice for one, choice in arrangements(space).items() if one.name == "padded"}
    assert {one.micro_batch * one.accumulation for one in padded} == {18}
    assert {choice.grade for choice in padded.values()} == {"regrouped"}
    candidate = msgspec.structs.replace(space.baseline, arrangement=Arrangement("padded", 9, 2))
    assert options_of(job, space, candidate) == {
        "per_device_train_batch_size": 9,
        "gradient_accumulation_steps": 2,
        "packing": False,
    }


@pytest.mark.parametrize(
    ("options", "lengths", "why"),
    [
        ("truncation_mode: keep_end\n", LONG_TAIL, "it keeps the end of long documents"),
        ("", parts.lengths_of(LENGTHS.tokens, prompt=5), "drops the documents whose loss tokens are all cut off"),
        ("padding_free: true\n", LENGTHS, "your job is `padding_free`"),
        ("packing_strategy: bfd_split\n", LONG_TAIL, "your `bfd_split` rows hold pieces of documents"),
        ("packing_strategy: wrapped\n", LENGTHS, "your `wrapped` rows hold pieces of documents"),
        ("eval_strategy: epoch\neval_packing: true\n", LENGTHS, "`eval_packing` without `packing`"),
        (
            "per_device_train_batch_size: 1\n",
            parts.lengths_of([300, 300, 200] * 50),
            "2 x 267 tokens is +33.3% of your 400 a step; with 2 packed rows a step instead of your 1",
        ),
    ],
)
def test_padded_rows_are_not_offered_to_a_packed_job_that_would_train_on_something_else(
    options: str, lengths: Lengths, why: str, read: Read
) -> None:
    space = space_of(read("max_length: 512\npacking: true\n" + options), lengths)
    assert "padded" not in names(space)
    assert why in rejections(space, "padded")[0]


def test_evaluation_stays_unpacked_when_training_is_packed(read: Read) -> None:
    job = read(JOBS["evaluated"])
    space = space_of(job)
    packed = next(one for one in arrangements(space) if one.name == "bfd")
    candidate = msgspec.structs.replace(space.baseline, arrangement=packed)
    assert options_of(job, space, candidate)["eval_packing"] is False
    padded = next(one for one in arrangements(space) if one.name == "padded" and one != space.baseline.arrangement)
    assert "eval_packing" not in options_of(job, space, msgspec.structs.replace(space.baseline, arrangement=padded))
    settled = read(JOBS["evaluated"] + "eval_packing: true\n")
    assert "eval_packing" not in options_of(settled, space_of(settled), candidate)


def test_attention_that_does_not_run_here_is_out_for_the_reason_that_was_probed(read: Read) -> None:
    axis = space_of(read("max_length: 512\n")).axis("attention")
    assert axis.choices == (
        Choice("sdpa", "exact", "as your job has it"),
        Choice("eager", "exact", "plain matrix products; packed rows: dense mask"),
    )
    assert axis.rejected == (Rejected("flash_attention_2", "no GPU here"),)


MIXING = AttentionBackend("mine/flash", usable=True, packing="contaminates", reason="ran")


def test_attention_that_mixes_documents_is_for_padded_rows_only(read: Read) -> None:
    machine = msgspec.structs.replace(parts.cpu_machine(), attention=(parts.SDPA, MIXING))
    space = space_of(read(JOBS["padded text, 8 x 1"]), machine=machine)
    attentions = {(one.arrangement.name, one.attention) for one in space.candidates()}
    assert {("bfd", "sdpa"), ("padded", "mine/flash"), ("batch_rebalance", "mine/flash")} <= attentions
    assert ("bfd", "mine/flash") not in attentions
    assert space.size == len(list(space.candidates()))
    choice = space.axis("attention").choice("mine/flash")
    assert choice == Choice("mine/flash", "exact", "ran; for padded rows: of packed ones it mixes the documents")


def test_attention_that_mixes_documents_makes_packed_rows_changed(read: Read) -> None:
    machine = msgspec.structs.replace(parts.cpu_machine(), attention=(parts.SDPA, MIXING))
    space = space_of(read(JOBS["padded text, 8 x 1"]), machine=machine, allowed=CHANGED)
    mixed = [one for one in space.candidates() if one.arrangement.packed and one.attention == "mine/flash"]
    assert mixed
    assert {space.grade(one) for one in mixed} == {"changed"}
    assert space.size == len(list(space.candidates()))


def test_attention_that_mixes_documents_is_out_where_a_row_holds_several(read: Read) -> None:
    machine = msgspec.structs.replace(parts.cpu_machine(), attention=(parts.SDPA, MIXING))
    space = space_of(read(JOBS["padding_free"]), machine=machine)
    mixing = {one.arrangement.padding_free for one in space.candidates() if one.attention == "mine/flash"}
    assert mixing == {False}


def test_attention_is_the_one_that_takes_effect(read: Read) -> None:
    job = read("max_length: 512\nattn_implementation: sdpa\nmodel_init_kwargs: {attn_implementation: eager}\n")
    assert effective(job, "attn_implementation") == "eager"
    assert baseline_candidate(job, parts.cpu_machine()).attention == "eager"


@pytest.mark.parametrize(("cores", "threads"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_threads_go_up_to_the_cores(cores: int, threads: list[int], read: Read) -> None:
    axis = space_of(read("max_length: 512\n"), machine=parts.cpu_machine(cores=cores)).axis("threads")
    assert [choice.value for choice in axis.choices] == threads


def test_a_single_core_is_left_without_dataloader_workers(read: Read) -> None:
    axis = space_of(read("max_length: 512\n"), machine=parts.cpu_machine(cores=1)).axis("workers")
    assert [choice.value for choice in axis.choices] == [0]
    assert axis.rejected == (Rejected(1, "1 core leaves none for a worker"),)


def test_padding_free_rows_hold_nothing_but_tokens(read: Read) -> None:
    data = Data(read(JOBS["padding_free"]), LENGTHS)
    for name, micro_batch in (("padded", 8), ("batch_rebalance", 2)):
        arrangement = Arrangement(name, micro_batch, 8 // micro_batch, padding_free=True)  # type: ignore[arg-type]
        figures = data.figures(arrangement)
        assert figures.computed_positions == figures.useful_tokens == sum(LENGTHS.tokens)
        assert figures.fill == 1.0


def test_a_choice_that_an_axis_does_not_have_is_no_choice() -> None:
    axis = Axis("workers", (Choice(0, "exact", "as your job has it"),))
    with pytest.raises(StopIteration):
        axis.choice(1)


# --- trials --------------------------------------------------------------------------------------------------------


TRIED = """\
max_length: 512
eval_strategy: steps
eval_steps: 5
eval_on_start: true
save_strategy: steps
save_steps: 5
load_best_model_at_end: true
push_to_hub: true
hub_model_id: someone/private
resume_from_checkpoint: out/checkpoint-5
max_steps: 100
warmup_steps: 10
lr_scheduler_type: reduce_lr_on_plateau
lr_scheduler_kwargs: {patience: 3}
report_to: [wandb, tensorboard]
test_split_size: 0.1
dataset_train_split: train_sft
auto_find_batch_size: true
"""


def test_a_trial_saves_pushes_evaluates_and_resumes_nothing(read: Read, children: Children, folder: Path) -> None:
    job = read(TRIED)
    run = folder / "run" / "trial-0000"
    options = recipe.trial_options(sample="sample.parquet", workers=0, output_folder=str(run / "output"))
    [answer] = parsed(children, folder, [write_job(job, options, {})])
    fields = answer["fields"]
    for name, value in {
        "save_strategy": "SaveStrategy.NO",
        "eval_strategy": "IntervalStrategy.NO",
        "eval_on_start": False,
        "do_eval": False,
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "hub_model_id": None,
        "hub_token": None,
        "resume_from_checkpoint": None,
        "report_to": [],
        "auto_find_batch_size": False,
        "max_steps": -1,
        "warmup_steps": 0,
        "lr_scheduler_type": "SchedulerType.CONSTANT",
        "test_split_size": None,
        "dataset_name": None,
        "dataset_train_split": "train",  # the only split that `datasets` has
    }.items():
        assert (name, fields[name]) == (name, value)
    assert fields["datasets"][0]["path"] == "parquet"
    assert fields["datasets"][0]["data_files"] == "sample.parquet"
    assert Path(fields["output_dir"]).is_relative_to(run)
    assert fields["num_train_epochs"] >= 1_000_000


def test_a_trial_keeps_its_dataloader_workers_between_passes(read: Read, children: Children, folder: Path) -> None:
    job = read("max_length: 512\ndataloader_num_workers: 2\n")
    options = [recipe.trial_options(sample="s.parquet", workers=workers, output_folder="out") for workers in (0, 2)]
    without, with_workers = parsed(children, folder, [write_job(job, one, {}) for one in options])
    assert without["fields"]["dataloader_persistent_workers"] is False
    assert with_workers["fields"]["dataloader_persistent_workers"] is True


def test_a_trial_is_the_candidate_in_all_that_a_step_computes(read: Read, children: Children, folder: Path) -> None:
    job = read(JOBS["16 rows in 4 x 4"] + "learning_rate: 3e-4\nweight_decay: 0.1\nmax_grad_norm: 0.5\n")
    space = space_of(job)
    candidate = list(space.candidates())[-1]
    options = options_of(job, space, candidate)
    trial = options | recipe.trial_options(sample="s.parquet", workers=candidate.workers, output_folder="out")
    delivered, tried = parsed(children, folder, [write_job(job, one, {}) for one in (options, trial)])
    differing = {name for name, value in delivered["fields"].items() if tried["fields"][name] != value}
    assert differing <= {
        "datasets", "output_dir", "num_train_epochs", "save_strategy", "report_to", "run_name", "lr_scheduler_type",
        "dataloader_persistent_workers", "logging_dir",
    }  # fmt: skip
    assert as_trl_reads_it(tried, job) == as_trl_reads_it(delivered, job) == candidate


# --- grades against TRL's own trainer ----------------------------------------------------------------------------


def ask_trl(children: Children, folder: Path, function: str, runs: list[dict[str, Any]]) -> list[Any]:
    answer: list[Any] = children.call(
        f"tests.trl_side:{function}",
        {"model": str(folder / "model"), "runs": runs},
        deadline_seconds=240,
        working_folder=folder,
    )
    return answer


def test_what_is_called_exact_gives_the_losses_of_the_baseline(children: Children, folder: Path) -> None:
    tokens = tiny.lengths(29, seed=3, median=20, longest=100)  # a last step of five rows

    def run(micro_batch: int, accumulation: int, **options: Any) -> dict[str, Any]:
        return {
            "lengths": tokens,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": accumulation,
            **options,
        }

    eager = {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"}}
    rebalanced = {"train_sampling_strategy": "batch_rebalance"}
    baseline, *others = ask_trl(
        children,
        folder,
        "train",
        [
            run(8, 1),
            run(1, 8),
            run(2, 4),
            run(4, 2),
            run(4, 2, **rebalanced),
            run(2, 4, **rebalanced),
            run(8, 1, gradient_checkpointing=False),
            run(8, 1, **eager),
            run(2, 4, gradient_checkpointing=False, **rebalanced, **eager),
            run(4, 2, label_smoothing_factor=0.1),
            run(8, 1, label_smoothing_factor=0.1),
        ],
    )
    *others, smoothed, smoothed_at_once = others
    assert len(baseline) == 4
    assert baseline[0] - baseline[-1] > 1e-3  # it learns, so that an error would grow
    for other in others:
        assert other == pytest.approx(baseline, abs=1e-5)
    assert smoothed == pytest.approx(smoothed_at_once, abs=1e-5)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (26, {}),
        (25, {}),
        (26, {"dataloader_drop_last": True}),
        (24, {"dataloader_drop_last": True}),
        (24, {"seed": 7}),
        (24, {"seed": 7, "data_seed": 42}),
        (26, {"train_sampling_strategy": "batch_rebalance"}),
    ],
)
def test_the_documents_of_every_step_are_the_baselines_exactly_where_the_grade_says_so(
    rows: int, options: dict[str, Any], read: Read, children: Children, folder: Path
) -> None:
    tokens = [1 + number % 5 for number in range(rows)]
    text = "".join(f"{name}: {str(value).lower()}\n" for name, value in options.items())
    job = read(f"max_length: 512\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n{text}")
    space = space_of(job, parts.lengths_of(tokens))
    choices = [choice for choice in space.axis("arrangement").choices if not choice.value.packed]
    runs: list[dict[str, Any]] = []
    for choice in choices:
        candidate = msgspec.structs.replace(space.baseline, arrangement=choice.value)
        runs.append({"lengths": tokens, "max_length": 512, "per_device_train_batch_size": 4,
                     "gradient_accumulation_steps": 2, **options, **options_of(job, space, candidate)})  # fmt: skip
    baseline, *others = ask_trl(children, folder, "batches", runs)
    assert len(others) >= 3
    for choice, other in zip(choices[1:], others, strict=True):
        assert (choice.value, other["steps"] == baseline["steps"]) == (choice.value, choice.grade == "exact")


def test_packed_rows_are_as_many_as_planned(read: Read, children: Children, folder: Path) -> None:
    tokens = [*tiny.lengths(40, seed=5, median=15, longest=60), 90, 75]
    job = read("max_length: 64\n")
    space = space_of(job, parts.lengths_of(tokens), allowed=CHANGED)
    data = Data(job, parts.lengths_of(tokens))
    packed = {one.name: one for one in arrangements(space) if one.packed}
    assert set(packed) == {"bfd", "bfd_split", "wrapped"}
    runs = [
        {"lengths": tokens}
        | options_of(job, space, msgspec.structs.replace(space.baseline, arrangement=arrangement))
        | {"max_length": arrangement.row_length}
        for arrangement in packed.values()
    ]
    answers = ask_trl(children, folder, "batches", runs)
    assert [one["rows"] for one in answers] == [data.figures(arrangement).rows for arrangement in packed.values()]


@pytest.mark.parametrize(
    ("options", "shape", "why"),
    [
        ("", {"dropout": 0.1}, "dropout of 0.1"),
        ("use_peft: true\nlora_dropout: 0.05\n", {}, "dropout of 0.05"),
        ("neftune_noise_alpha: 5\n", {}, "NEFTune"),
        ("", {"router_loss": 0.001}, "load-balancing"),
    ],
)
def test_where_the_split_shows_in_the_loss_no_other_split_is_called_exact(
    options: str, shape: dict[str, float], why: str, read: Read
) -> None:
    job = read(options)
    data = Data(job, LENGTHS, msgspec.structs.replace(parts.SHAPE, **shape))
    space = build_space(job, parts.cpu_machine(), data, allowed=OFFERED)
    base = space.baseline.arrangement
    others = [choice for arrangement, choice in arrangements(space).items() if arrangement != base]

    assert others
    assert {choice.grade for choice in others} == {"regrouped"}
    assert any(why in choice.reason for choice in others)


def test_lora_without_dropout_and_a_dense_model_split_exactly(read: Read) -> None:
    space = space_of(read("use_peft: true\nlora_dropout: 0.0\n"))

    assert "exact" in {choice.grade for choice in list(arrangements(space).values())[1:]}
