"""A job as TRL's own parser reads it, in a real child, and written back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autotune.children import Children
from autotune.errors import AutotuneError, NotYetError
from autotune.job import Job, check_method, effective, read_job, write_job

Read = Callable[..., Job]

MINIMAL = "model_name_or_path: model\ndataset_name: data\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with something that looks like a model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def read(children: Children, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads a job from YAML text and arguments, on a CPU with bf16 unless told otherwise."""
    for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(folder / "no-accelerate-config"))

    def read(text: str | None, *arguments: str, accelerator: bool = False, cpu_bf16: bool = True) -> Job:
        given = list(arguments)
        if text is not None:
            (folder / "sft.yaml").write_bytes(text.encode())
            given = ["--config", "sft.yaml", *given]
        return read_job("sft", given, folder=folder, children=children, accelerator=accelerator, cpu_bf16=cpu_bf16)

    return read


def written(job: Job, **changes: Any) -> dict[str, Any]:
    text = write_job(job, changes, {})
    read: dict[str, Any] = yaml.safe_load(text)
    return read


# --- reading -------------------------------------------------------------------------------------------------------


def test_options_of_the_command_line_win_over_the_file(read: Read) -> None:
    job = read(MINIMAL + "learning_rate: 2e-5\npacking: false\n", "--learning_rate", "1e-4", "--packing")
    assert job.command_line == {"learning_rate": 1e-4, "packing": True}
    assert job.options["learning_rate"] == 1e-4
    assert job.resolved["learning_rate"] == 1e-4
    assert job.resolved["packing"] is True
    assert job.resolved["max_length"] == 1024


def test_a_number_that_yaml_reads_as_text_is_taken_as_trl_takes_it(read: Read) -> None:
    assert read(MINIMAL + "learning_rate: 2e-5\n").resolved["learning_rate"] == 2e-5


def test_a_job_needs_no_file(read: Read) -> None:
    job = read(None, "--model_name_or_path", "model", "--dataset_name", "data", "--no_gradient_checkpointing")
    assert job.config_path is None
    assert job.config_text == ""
    assert job.options == {"model_name_or_path": "model", "dataset_name": "data", "gradient_checkpointing": False}


def test_options_with_dashes_and_shortened_ones_are_read_as_trl_reads_them(read: Read) -> None:
    job = read(MINIMAL, "--max-length", "none", "--per_device_train_batch", "4")
    assert job.command_line == {"max_length": None, "per_device_train_batch_size": 4}


def test_a_mapping_given_as_json_is_kept_as_a_mapping(read: Read) -> None:
    job = read(MINIMAL, "--model_init_kwargs", '{"attn_implementation": "eager", "use_cache": "false"}')
    assert job.options["model_init_kwargs"] == {"attn_implementation": "eager", "use_cache": False}
    assert job.resolved["model_init_kwargs"] == job.options["model_init_kwargs"]


def test_launcher_options_are_told_apart_from_trls(read: Read) -> None:
    job = read(MINIMAL + "num_cpu_threads_per_process: 2\n", "--num_processes", "1", "--cpu")
    assert job.launcher == {"num_cpu_threads_per_process": 2, "num_processes": 1, "cpu": True}
    assert job.flags == ["--cpu"]
    assert set(job.options) == {"model_name_or_path", "dataset_name"}


def test_the_environment_is_what_accelerate_would_set(read: Read) -> None:
    job = read(MINIMAL + "env: {MINE: 1}\nnum_cpu_threads_per_process: 2\nmixed_precision: bf16\n")
    assert job.environment == {"MINE": "1"}
    assert job.launch_environment["OMP_NUM_THREADS"] == "2"
    assert job.launch_environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "MINE" not in job.launch_environment


def test_one_thread_is_what_accelerate_gives_a_process_by_default(read: Read) -> None:
    assert read(MINIMAL).launch_environment["OMP_NUM_THREADS"] == "1"
    assert read(MINIMAL + "env: {OMP_NUM_THREADS: 3}\n").launch_environment["OMP_NUM_THREADS"] == "3"


def test_an_import_environment_that_is_not_as_foreseen_is_told(read: Read, children: Children) -> None:
    differs = read(MINIMAL, "--cpu", "--num_cpu_threads_per_process", "57").import_environment_differs
    assert differs == {
        "KMP_AFFINITY": "granularity=fine,compact,1,0",
        "KMP_BLOCKTIME": "1",
        "OMP_NUM_THREADS": "57",
    }


def test_the_default_config_of_accelerate_is_read(read: Read, folder: Path) -> None:
    default = folder / "no-accelerate-config" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: fp16\n")
    assert read(MINIMAL).launch_environment["ACCELERATE_MIXED_PRECISION"] == "fp16"


def test_an_accelerate_config_by_name_is_trls_own(read: Read) -> None:
    job = read(MINIMAL + "accelerate_config: single_gpu\n")
    assert job.launcher == {"accelerate_config": "single_gpu"}
    assert job.launch_environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_tokens_are_kept_out(read: Read) -> None:
    text = MINIMAL + "hub_token: hf_secret1\nmodel_init_kwargs: {token: hf_secret2}\n"
    job = read(text, "--eos_token", "<end>")
    assert job.resolved["hub_token"] is None
    assert job.resolved["eos_token"] == "<end>"
    assert "hf_secret" not in json.dumps(msgspec.structs.asdict(msgspec.structs.replace(job, config_text="")))
    given_on_the_command_line = read(MINIMAL, "--hub_token", "hf_secret3")
    assert "hf_secret" not in json.dumps(msgspec.structs.asdict(given_on_the_command_line))
    assert "hub_token" not in written(given_on_the_command_line)


def test_every_option_of_sft_is_accepted_in_a_file_with_the_value_it_has_anyway(read: Read) -> None:
    job = read(MINIMAL)
    values = {name: value for name, value in job.resolved.items() if name not in ("datasets", "use_cpu")}
    again = read(yaml.safe_dump(values))
    assert again.resolved == job.resolved


def test_a_warm_child_reads_a_job_in_well_under_a_second(read: Read) -> None:
    read(MINIMAL)
    seconds = []
    for _ in range(5):
        started = time.monotonic()
        read(MINIMAL)
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 0.6  # 0.12 on two quiet cores


# --- what this machine needs ---------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_adds_use_cpu_and_keeps_trls_bf16(read: Read) -> None:
    job = read(MINIMAL, cpu_bf16=True)
    assert job.additions == {"use_cpu": True}
    assert job.addition_reasons == {"use_cpu": "no GPU here: TRL refuses to start without it"}
    assert (job.resolved["use_cpu"], job.resolved["bf16"]) == (True, True)


def test_a_cpu_without_bf16_trains_in_float32(read: Read) -> None:
    job = read(MINIMAL, cpu_bf16=False)
    assert job.additions == {"use_cpu": True, "bf16": False}
    assert job.resolved["bf16"] is False


def test_a_precision_that_was_asked_for_is_left_alone(read: Read) -> None:
    assert read(MINIMAL + "fp16: true\n", cpu_bf16=False).additions == {"use_cpu": True}
    assert read(MINIMAL + "bf16: false\n", cpu_bf16=False).additions == {"use_cpu": True}


def test_nothing_is_added_where_use_cpu_is_given(read: Read) -> None:
    assert read(MINIMAL + "use_cpu: true\n", cpu_bf16=False).additions == {}


def test_a_gpu_older_than_ampere_computes_in_fp16_unless_the_job_says_otherwise(
    read: Read, folder: Path, children: Children
) -> None:
    reason = "compute capability 7.5 is older than Ampere"
    for given, added in (("", {"fp16": True}), ("bf16: true\n", {}), ("fp16: false\n", {})):
        (folder / "old.yaml").write_text(MINIMAL + "use_cpu: true\n" + given)  # so that TRL accepts it without a GPU
        job = read_job(
            "sft",
            ["--config", "old.yaml"],
            folder=folder,
            children=children,
            accelerator=True,
            cpu_bf16=True,
            precision=("fp16", reason),
        )
        assert job.additions == added
        assert job.addition_reasons == dict.fromkeys(added, reason)
        assert (job.resolved["fp16"], job.resolved["bf16"]) == (bool(added), not added)


def test_bf16_that_the_cpu_does_not_have_is_refused(read: Read) -> None:
    with pytest.raises(AutotuneError, match="no bf16 arithmetic") as raised:
        read(MINIMAL + "bf16: true\n", cpu_bf16=False)
    assert "`bf16: false`" in raised.value.hint


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arguments", "what", "hint"),
    [
        ("packng: true\n", (), "`sft.yaml` line 3: unknown option `packng`", "did you mean `packing`?"),
        ("learning-rate: 1e-4\n", (), "line 3: unknown option `learning-rate`", "did you mean `learning_rate`?"),
        ("", ("--packng",), "unknown option `packng`", "did you mean `packing`?"),
        ("", ("--num_procesess=1",), "unknown option `num_procesess`", "did you mean `num_processes`?"),
        ("qqqq: 1\n", (), "unknown option `qqqq`", "neither TRL nor `accelerate launch` has it"),
        ("", ("stray",), "unexpected argument `stray`", "options begin with `--`"),
        ("cpu: true\n", (), "line 3: `cpu` is a switch of `accelerate launch`", "give `--cpu` on the command line"),
        ("packing_strategy: foo\n", (), "`packing_strategy` cannot be `foo`", "`bfd`, `bfd_split`, `wrapped`"),
        ("", ("--packing_strategy", "foo"), "`packing_strategy`: invalid choice: 'foo'", "`bfd_split`"),
        ("lr_scheduler_type: foo\n", (), "`lr_scheduler_type` cannot be `foo`", "`linear`, `cosine`"),
        ("save_strategy: no\n", (), "`save_strategy` cannot be `false`", "quote it"),
        ("per_device_train_batch_size: eight\n", (), "invalid int value: 'eight'", "takes a whole number"),
        ("per_device_train_batch_size: 8.5\n", (), "cannot be `8.5`", "takes a whole number"),
        ("per_device_train_batch_size: true\n", (), "cannot be `true`", "takes a whole number"),
        ("per_device_train_batch_size:\n", (), "`per_device_train_batch_size` has no value", "remove the line"),
        ("learning_rate: [1]\n", (), "`learning_rate` cannot be `[1]`", "takes a number"),
        ("packing: maybe\n", (), "line 3: `packing`: Truthy value expected", "`true` or `false`"),
        ("packing: 3\n", (), "`packing` cannot be `3`", "`true` or `false`"),
        ("", ("--packing", "maybe"), "`packing`: Truthy value expected", "`true` or `false`"),
        ("", ("--learning_rate",), "`learning_rate`: expected one argument", "takes a number"),
        ("bf16: true\nfp16: true\n", (), "At most one of fp16 and bf16", "`fp16` or `bf16`"),
        ("use_cpu: false\n", (), "Your setup doesn't support bf16/gpu", "`use_cpu: true`"),
        ("datasets: [{pth: json}]\n", (), "unexpected keyword argument 'pth'", "`trl sft --help`"),
        ("", ("--model_init_kwargs", "{a: 1}"), "`model_init_kwargs` is no JSON", "--model_init_kwargs '{"),
        ("accelerate_config: nowhere\n", (), "nowhere is neither a file nor a valid config", "`trl sft --help`"),
        ("", ("--accelerate_config",), "`--accelerate_config` is given without a value", "a name or a file"),
        ("", ("--help",), "`--help` is given", "`trl sft --help`"),
        ("num_machines: many\n", (), "`num_machines`: invalid int value: 'many'", ""),
        ("dataloader_prefetch_factor: 2\n", (), "can only be set when data is loaded", "`dataloader_prefetch_factor`"),
    ],
)
def test_what_trl_would_refuse_or_misread_is_an_error_with_a_hint(
    read: Read, text: str, arguments: tuple[str, ...], what: str, hint: str
) -> None:
    with pytest.raises(AutotuneError) as raised:
        read(MINIMAL + text, *arguments)
    assert type(raised.value) is AutotuneError
    assert what in raised.value.what
    assert hint in raised.value.hint
    assert not raised.value.what.endswith(".")


@pytest.mark.parametrize(
    ("text", "arguments", "what"),
    [
        ("num_processes: 2\n", (), "several processes"),
        ("", ("--multi_gpu", "--num_processes", "2"), "several processes"),
        ("accelerate_config: multi_gpu\n", (), "several processes"),
        ("accelerate_config: zero2\n", (), "DeepSpeed"),
        ("accelerate_config: fsdp2\n", (), "FSDP"),
        ("", ("--use_fsdp",), "FSDP"),
        ("dataset_streaming: true\n", (), "`dataset_streaming: true`"),
        ("streaming: true\n", (), "`streaming: true`"),
    ],
)
def test_a_job_that_is_not_tuned_yet_says_so(read: Read, text: str, arguments: tuple[str, ...], what: str) -> None:
    with pytest.raises(NotYetError) as raised:
        read(MINIMAL + text, *arguments)
    assert what in raised.value.what
    assert "not tuned yet" in raised.value.what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("dataset_name: data\n", "no model is given"),
        ("model_name_or_path: model\n", "no data is given"),
        ("model_name_or_path: ./gone\ndataset_name: d\n", "the model folder `./gone` does not exist"),
        ("model_name_or_path: ./model/config.json\ndataset_name: d\n", "`./model/config.json` is a file"),
        ("model_name_or_path: empty\ndataset_name: d\n", "`empty` holds no model"),
        ("model_name_or_path: ~/model\ndataset_name: d\n", "TRL does not expand `~`"),
    ],
)
def test_a_model_or_data_that_cannot_be_there_is_told_at_once(read: Read, folder: Path, text: str, what: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(AutotuneError) as raised:
        read(text)
    assert what in raised.value.what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: 1\nb: [1\nc: 2\n", "`sft.yaml` line 3, column 2: "),
        ("a: 1\n\tb: 2\n", "`sft.yaml` line 2, column 1: "),
        ("a: b: c\n", "`sft.yaml` line 1, column 5: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2\n", "`sft.yaml` line 2, column 1: but found another document"),
        ("a: !!python/object:os.system {}\n", "`sft.yaml` line 1, column 4: could not determine a constructor"),
        ("a: *nothing\n", "found undefined alias"),
        ("a: 2026-13-45\n", "not YAML that TRL can read"),
        ("a: \x07\n", "not YAML that TRL can read"),
        ("", "`sft.yaml` is empty"),
        ("# nothing\n", "`sft.yaml` is empty"),
        ("- a\n", "`sft.yaml` holds no `option: value` lines"),
        ("text\n", "`sft.yaml` holds no `option: value` lines"),
        ("a: 1\nb: 2\na: 3\n", "`sft.yaml` line 3: `a` stands there twice, first in line 1"),
        ("a: {b: 1, b: 2}\n", "`sft.yaml` line 1: `b` stands there twice"),
        ("env: 1\n", "`sft.yaml` line 1: `env` is no mapping"),
        ("env:\na: 1\n", "`sft.yaml` line 1: `env` is no mapping"),
        ("on: 1\n", "the key `True`, which YAML does not read as text"),
        ("a: 1\nb: &b [*b]\n", "`sft.yaml` line 2: a value contains itself by an alias"),
        ("a: &a {b: {c: *a}}\n", "`sft.yaml` line 1: a value contains itself by an alias"),
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{one}: &a{one} [*a{one - 1}, *a{one - 1}]\n" for one in range(1, 40)),
            "`sft.yaml` holds more than 100,000 values",
        ),
    ],
)
def test_a_file_that_trl_cannot_read_is_refused_with_its_place(read: Read, text: str, what: str) -> None:
    with pytest.raises(AutotuneError) as raised:
        read(text)
    assert what in raised.value.what


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["--config"], "`--config` is given without a file", "--config FILE"),
        (["--config", "--packing"], "`--config` is given without a file", "--config FILE"),
        (["--config=a.yaml"], "TRL does not know `--config=FILE`", "`--config a.yaml`"),
        (["--config", "a.yaml", "--config", "b.yaml"], "`--config` is given twice", "one file"),
        (["--config", "gone.yaml"], "there is no config file `gone.yaml`", "after `--config`"),
        (["--config", "model"], "cannot read `model`: Is a directory", "after `--config`"),
        (["--config", "/dev/zero"], "cannot read `/dev/zero`: it is no regular file", "after `--config`"),
        (["--config", "pipe"], "cannot read `pipe`: it is no regular file", "after `--config`"),
        (["--config", "large.yaml"], "`large.yaml` holds more than 4 MiB", "after `--config`"),
        (["--config", "latin.yaml"], "`latin.yaml` line 2: not UTF-8 text", "UTF-8"),
    ],
)
def test_a_config_file_that_cannot_be_opened_is_refused(
    children: Children, folder: Path, arguments: list[str], what: str, hint: str
) -> None:
    (folder / "latin.yaml").write_bytes("a: 1\nb: é\n".encode("latin-1"))
    (folder / "large.yaml").write_bytes(b"# " + b"x" * 4 * 2**20)
    os.mkfifo(folder / "pipe")
    with pytest.raises(AutotuneError) as raised:
        read_job("sft", arguments, folder=folder, children=children, accelerator=False, cpu_bf16=True)
    assert what in raised.value.what
    assert hint in raised.value.hint


def test_an_unknown_method_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(AutotuneError, match="unknown method `stf`") as raised:
        check_method("stf")
    assert raised.value.hint.startswith("did you mean `sft`?")


@pytest.mark.parametrize(
    ("name", "value", "reach"),
    [
        ("per_device_train_batch_size", "0", "1 or more"),
        ("per_device_train_batch_size", "-1", "1 or more"),
        ("gradient_accumulation_steps", "0", "1 or more"),
        ("max_length", "0", "1 or more"),
        ("max_length", "-5", "1 or more"),
        ("dataloader_num_workers", "-1", "0 or more"),
        ("dataset_num_proc", "0", "1 or more"),
        ("learning_rate", "nan", "0 or more"),
        ("max_length", str(10**12), f"{2**31 - 1} or less"),
    ],
)
def test_a_number_that_trl_would_fail_on_later_is_refused(read: Read, name: str, value: str, reach: str) -> None:
    with pytest.raises(AutotuneError, match=rf"^`{name}` cannot be {value}") as of_command_line:
        read(MINIMAL, f"--{name}", value)
    with pytest.raises(AutotuneError, match=rf"^`sft.yaml` line 3: `{name}` cannot be {value}") as of_file:
        read(MINIMAL + f"{name}: {value}\n")
    assert of_command_line.value.hint == of_file.value.hint == f"give it {reach}"


def test_no_generations_are_refused(children: Children, folder: Path) -> None:
    arguments = ["--model_name_or_path", "model", "--dataset_name", "data", "--num_generations", "0"]
    with pytest.raises(AutotuneError, match=r"^`num_generations` cannot be 0$"):
        read_job("grpo", arguments, folder=folder, children=children, accelerator=False, cpu_bf16=True, for_data=True)


@pytest.mark.parametrize("method", ["dpo", "kto", "reward", "grpo", "rloo", "online_dpo"])
def test_a_method_that_is_not_built_yet_says_so(method: str) -> None:
    with pytest.raises(NotYetError, match=f"tuning `{method}` is not built yet"):
        check_method(method)


# --- writing -------------------------------------------------------------------------------------------------------


def test_a_job_comes_back_with_its_comments_its_command_line_and_the_changes(read: Read) -> None:
    job = read("# mine\n" + MINIMAL + "learning_rate: 2e-5  # slow\n", "--learning_rate", "1e-4", "--packing")
    text = write_job(job, {"per_device_train_batch_size": 2}, {"per_device_train_batch_size": "exact: 1.4x"})
    assert text == (
        "# mine\nmodel_name_or_path: model\ndataset_name: data\n"
        "learning_rate: 0.0001  # slow; from the command line\n"
        "packing: true  # from the command line\n"
        "use_cpu: true  # no GPU here: TRL refuses to start without it\n"
        "per_device_train_batch_size: 2  # exact: 1.4x\n"
    )


def test_a_job_that_is_written_reads_as_the_same_job(read: Read) -> None:
    job = read(
        MINIMAL + "datasets:\n- path: json\n  data_files: a\n", "--learning_rate", "1e-4", "--max_length", "none"
    )
    again = read(write_job(job, {}, {}))
    assert again.resolved == job.resolved
    assert again.additions == {}


def test_a_job_without_a_file_gets_one_with_model_and_data_first(read: Read) -> None:
    job = read(None, "--packing", "--datasets", "json", "--model_name_or_path", "model")
    assert write_job(job, {}, {}) == (
        "model_name_or_path: model\ndatasets:\n- path: json\n  split: train\npacking: true\n"
        "use_cpu: true  # no GPU here: TRL refuses to start without it\n"
    )


def test_a_switch_that_no_file_can_give_is_left_to_the_command_line(read: Read) -> None:
    job = read(MINIMAL, "--cpu", "--num_cpu_threads_per_process", "2")
    assert "cpu" not in written(job)
    assert written(job)["num_cpu_threads_per_process"] == 2


def test_the_attention_is_changed_where_it_takes_effect(read: Read) -> None:
    job = read(MINIMAL + "attn_implementation: sdpa\nmodel_init_kwargs: {attn_implementation: eager}\n")
    assert effective(job, "attn_implementation") == "eager"
    changed = written(job, attn_implementation="flex_attention", dtype="bfloat16")
    assert changed["model_init_kwargs"] == {"attn_implementation": "flex_attention"}
    assert changed["attn_implementation"] == "sdpa"
    assert changed["dtype"] == "bfloat16"


def test_the_attention_is_changed_within_json_too(read: Read) -> None:
    job = read(MINIMAL + 'model_init_kwargs: \'{"attn_implementation": "eager"}\'\n')
    assert effective(job, "attn_implementation") == "eager"
    assert written(job, attn_implementation="sdpa")["model_init_kwargs"] == {"attn_implementation": "sdpa"}


def test_environment_variables_are_added_to_the_users_own(read: Read) -> None:
    job = read(MINIMAL + "env:\n  MINE: 1  # keep\n")
    text = write_job(job, {"env": {"NEW": 2}}, {"env": "exact: why"})
    assert "  MINE: 1  # keep\n  NEW: '2'  # exact: why\n" in text


def test_clearing_an_option_that_is_not_given_writes_nothing(read: Read) -> None:
    job = read(MINIMAL + "max_length: 512\n")
    assert written(job, max_length=None, eval_packing=None) == {
        **yaml.safe_load(MINIMAL),
        "max_length": None,
        "use_cpu": True,
    }


def test_null_is_written_where_trl_would_take_a_default_instead(read: Read) -> None:
    job = read(MINIMAL)
    assert job.resolved["max_length"] == 1024
    assert written(job, max_length=None)["max_length"] is None


@pytest.mark.parametrize(
    "own",
    [
        "model_init_kwargs: {token: mine, num_labels: 3}\n",
        'model_init_kwargs: \'{"token": "mine", "num_labels": 3}\'\n',
    ],
)
def test_the_users_own_model_init_kwargs_stay_with_their_token(own: str, read: Read) -> None:
    job = read(MINIMAL + own)
    inside = {**job.resolved["model_init_kwargs"], "use_kernels": True}
    assert written(job, model_init_kwargs=inside)["model_init_kwargs"] == {
        "token": "mine",
        "num_labels": 3,
        "use_kernels": True,
    }


def test_checkpointing_is_written_under_the_name_that_wins() -> None:
    old = Job("sft", None, "gradient_checkpointing: true\n", {}, {}, {}, {}, "/", {"gradient_checkpointing": True}, {})
    new = msgspec.structs.replace(old, resolved={**old.resolved, "activation_checkpointing": True})
    assert written(old, activation_checkpointing=False) == {"gradient_checkpointing": False}
    assert written(new, gradient_checkpointing=False) == {
        "gradient_checkpointing": False,
        "activation_checkpointing": False,
    }


def test_an_option_of_the_launcher_with_dashes_is_changed_where_it_stands(read: Read) -> None:
    job = read(MINIMAL + "num-cpu-threads-per-process: 1\n")
    changed = written(job, num_cpu_threads_per_process=2)
    assert changed["num-cpu-threads-per-process"] == 2
    assert "num_cpu_threads_per_process" not in changed
    assert effective(job, "num_cpu_threads_per_process") == 1
