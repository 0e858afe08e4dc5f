"""`trl-autotune lengths`: through the real command, and its figures against TRL's own collators."""

from __future__ import annotations

import io
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from autotune import data_look
from autotune.children import Children
from autotune.deliver.lengths_screen import _broken, print_lengths
from autotune.deliver.narrator import Narrator
from autotune.job import read_job
from autotune.plan.histogram import histogram
from autotune.plan.lengths_report import LengthsReport, job_report
from autotune.plan.sampled import intervals_of
from autotune.probe import sampling
from autotune.probe.lengths import Lengths, measure_lengths
from tests import commands, tiny
from tests.commands import Answer, Run
from tests.processes import REPOSITORY, eventually

SFT: dict[str, Any] = {
    "max_length": 128,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "truncation_mode": "keep_start",
}
GRPO: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "generation_batch_size": 8,
    "steps_per_generation": 2,
    "num_generations": 4,
    "num_iterations": 1,
    "max_completion_length": 100,
    "use_vllm": False,
    "vllm_max_model_length": None,
}
WORDS = tiny.lengths(20, seed=3, median=12, longest=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("lengths") / "model")


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a model, and a config for each kind of data."""
    (tmp_path / "model").symlink_to(model)
    for kind, rows in {
        "text": text_rows(),
        "pairs": pair_rows(),
        "labels": label_rows(),
        "prompts": prompt_rows(),
    }.items():
        tiny.write_rows(tmp_path / f"{kind}.jsonl", rows)
        (tmp_path / f"{kind}.yaml").write_text(config(kind))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    commands.enter(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def run(folder: Path, children: Children, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return commands.in_this_process(monkeypatch, capfd)


def config(kind: str) -> str:
    return (
        f"model_name_or_path: model\ndatasets: [{{path: json, data_files: {kind}.jsonl, split: train}}]\n"
        "output_dir: out\nuse_cpu: true\nbf16: false\n"
    )


def text_rows() -> list[dict[str, Any]]:
    return [{"text": tiny.words(5 + row % 30, seed=row)} for row in range(40)]


def pair_rows() -> list[dict[str, Any]]:
    return [
        {
            "prompt": tiny.words(4 + row % 9, seed=row),
            "chosen": " " + tiny.words(words, seed=row + 1),
            "rejected": " " + tiny.words(1 + words // 2, seed=row + 2),
        }
        for row, words in enumerate(WORDS)
    ]


def label_rows() -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 4 == 0}
        for number, row in enumerate(pair_rows())
    ]


def prompt_rows() -> list[dict[str, Any]]:
    return [{"prompt": tiny.words(words, seed=row)} for row, words in enumerate(WORDS)]


def report_of(method: str, kind: str, folder: Path, children: Children, *arguments: str) -> LengthsReport:
    job = read_job(
        method,
        ["--config", f"{kind}.yaml", *arguments],
        folder=folder,
        children=children,
        accelerator=False,
        cpu_bf16=True,
        for_data=True,
    )
    lengths = measure_lengths(job.resolved, folder=folder, children=children, method=job.method)
    return job_report(lengths, job.resolved)


def lengths_of(method: str, tokens: Sequence[int], **parts: Any) -> Lengths:
    return msgspec.convert(
        {"rows": len(tokens), "tokens": tokens, "method": method, "format": "", "columns": [], "seconds": 0.0} | parts,
        Lengths,
    )


def prompts_of(tokens: Sequence[int]) -> Lengths:
    return lengths_of("grpo", tokens, prompt_tokens=tokens)


# --- for a person and for a program ------------------------------------------------------------------------------


def test_the_screen_is_on_stdout_and_the_narration_on_stderr(run: Run) -> None:
    answer = run("lengths", "sft", "--config", "text.yaml", "--max_length", "32")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[0].startswith("40 rows (text), ")
    assert lines[1].startswith("tokens per row   50 %: ")
    assert "at max_length 32 and 8 x 1 rows a step" in lines
    assert [line.split()[0] for line in lines if line.startswith(("padded", "rebalanced", "bfd", "wrapped"))] == [
        "padded", "bfd", "bfd_split", "wrapped",
    ]  # fmt: skip
    assert answer.err == "job      sft  model  on  text.jsonl   (text.yaml)\n"


def test_json_is_one_object_on_stdout_and_nothing_else(run: Run) -> None:
    answer = run("lengths", "sft", "--config", "text.yaml", "--json")
    assert (answer.code, answer.err) == (0, "")
    told = json.loads(answer.out)
    assert (told["schema"], told["rows"], told["rows_measured"], told["max_length"]) == (1, 40, 40, 1024)
    assert set(told["percentiles"]) == {"50", "90", "99", "100"}
    assert set(told["arrangements"]) == {"padded", "bfd", "bfd_split", "wrapped"}
    assert "intervals" not in told


def test_a_second_look_at_the_same_data_reads_nothing_anew(run: Run) -> None:
    first = run("lengths", "sft", "--config", "text.yaml").out.splitlines()
    second = run("lengths", "sft", "--config", "text.yaml").out.splitlines()
    assert ", read in " in first[0]
    assert second[0].endswith(", read earlier")
    assert first[1:] == second[1:]


def test_all_rows_is_taken(run: Run) -> None:
    answer = run("lengths", "sft", "--config", "text.yaml", "--json", "--all-rows")
    assert json.loads(answer.out)["rows_measured"] == 40


@pytest.mark.parametrize(
    ("method", "kind", "unit"),
    [
        ("dpo", "pairs", "20 pairs, "),
        ("reward", "pairs", "20 pairs, "),
        ("kto", "labels", "20 rows (prompt-completion-label)"),
        ("kto", "pairs", "40 rows (pairs)"),
        ("grpo", "prompts", "20 prompts, "),
        ("rloo", "prompts", "20 prompts, "),
        ("online_dpo", "prompts", "20 prompts, "),
    ],
)  # fmt: skip
def test_every_method_has_its_screen_without_packing(method: str, kind: str, unit: str, run: Run) -> None:
    answer = run("lengths", method, "--config", f"{kind}.yaml")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(unit)
    assert "padded" in answer.out
    assert "bfd" not in answer.out
    told = json.loads(run("lengths", method, "--config", f"{kind}.yaml", "--json").out)
    assert told["method"] == method
    assert list(told["arrangements"]) == ["padded"]


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_a_line_is_broken_between_its_figures_and_not_within_one(width: int) -> None:
    parts = ["tokens per row", "50 %: 102", "90 %: 324", "100 %: 1,903 or more"]
    lines = _broken("   ".join(parts), width).splitlines()
    assert [part for line in lines for part in line.split("   ")] == parts
    assert max(map(len, lines)) <= max(width, 20)


def test_a_look_at_the_data_takes_jobs_that_are_not_tuned_yet(run: Run) -> None:
    answer = run("lengths", "grpo", "--config", "prompts.yaml", "--num_processes", "2", "--json",
                 "--per_device_train_batch_size", "4")  # fmt: skip
    assert answer.code == 0, answer.err
    padded = json.loads(answer.out)["arrangements"]["padded"]
    assert (padded["rows"], padded["steps_per_epoch"]) == (20, 20)


def test_the_data_of_a_job_for_a_gpu_can_be_looked_at_without_one(run: Run, folder: Path) -> None:
    text = config("text").replace("use_cpu: true\nbf16: false\n", "bf16: true\ntf32: true\n")
    (folder / "text.yaml").write_text(text)
    answer = run("lengths", "sft", "--config", "text.yaml")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("40 rows (text), ")


def test_the_first_rows_of_a_stream_are_told_as_such(run: Run, folder: Path) -> None:
    (folder / "text.yaml").write_text(config("text") + "streaming: true\n")
    answer = run("lengths", "sft", "--config", "text.yaml", "--max_steps", "5")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("40 rows (text), ")


def test_tuning_another_method_is_still_refused(run: Run) -> None:
    answer = run("dpo", "--config", "pairs.yaml", "--auto")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: tuning `dpo` is not built yet\nhint: ")


@pytest.mark.slow
def test_the_demo_is_looked_at_as_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-m", "autotune", "lengths", "sft", "--demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["rows"] == 2000


# --- what is wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        ("", "`lengths` needs a method first", "lengths sft --config sft.yaml"),
        ("--json", "`lengths` needs a method first", "lengths sft --config sft.yaml"),
        ("stf --config text.yaml", "unknown method `stf`", "did you mean `sft`?"),
        ("sft --config nowhere.yaml", "there is no config file `nowhere.yaml`", "after `--config`"),
        ("sft --config text.yaml --lerning_rate 1", "unknown option `lerning_rate`", "did you mean `learning_rate`?"),
        ("sft --config text.yaml --packing --max_length none", "`packing: true` needs a `max_length`", "1024"),
        ("dpo --config prompts.yaml", "no column that DPO can train on; it has `prompt`", "`chosen` and `rejected`"),
        ("sft --config pairs.yaml", "no column that SFT can train on", "use `dpo` or `reward`"),
        ("grpo --config text.yaml", "no column that GRPO can train on; it has `text`", "GRPO reads `prompt`"),
        ("sft --config text.yaml --auto", "`--auto` is for tuning, and `lengths` only looks", "leave it out"),
        ("sft --config text.yaml --budget=3m", "`--budget` is for tuning", "leave it out"),
        ("dpo --demo", "`--demo` is a training of `sft`, not of `dpo`", "sft --demo"),
        ("sft --config text.yaml --demo", "`--demo` brings a config of its own", "leave out"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_two_lines(arguments: str, what: str, hint: str, run: Run) -> None:
    check_refused(run("lengths", *arguments.split()), what, hint)


@pytest.mark.parametrize(
    ("rows", "what", "hint"),
    [
        (None, "the data is not there", "relative paths"),
        ("", "the data has no rows", "written to its end"),
        ('{"text": "ba ko"}\n{"text": "ba', "`text.jsonl`, line 2 is not JSON", "mend or remove that line"),
        ('{"text": "ba", "image": "ba.png"}\n', "the data has images", "drop the image column"),
        ('{"messages": [{"role": "user", "content": null}]}\n', "TRL cannot prepare row 1", "mend or remove that row"),
    ],
    ids=["no file", "no rows", "a torn line", "vision data", "a template that raises"],
)
def test_data_that_cannot_be_used_is_refused_as_in_tuning(
    rows: str | None, what: str, hint: str, run: Run, folder: Path
) -> None:
    if rows is None:
        (folder / "text.jsonl").unlink()
    else:
        (folder / "text.jsonl").write_text(rows)
    answer = run("lengths", "sft", "--config", "text.yaml")
    check_refused(answer, what, hint)
    tuning = run("sft", "--config", "text.yaml", "--auto")
    assert tuning.err.splitlines()[-2:] == answer.err.splitlines()[-2:]


def test_chats_without_a_chat_template_are_refused(run: Run, folder: Path) -> None:
    bare = folder / "bare"
    tiny.make_tokenizer(bare, chat_template=None)
    (bare / "config.json").write_bytes((folder / "model" / "config.json").read_bytes())
    tiny.write_rows(folder / "text.jsonl", [{"messages": [{"role": "user", "content": "ba"}]}])
    answer = run("lengths", "sft", "--config", "text.yaml", "--model_name_or_path", "./bare")
    check_refused(answer, "the tokenizer has no chat template", "`chat_template_path`")


def check_refused(answer: Answer, what: str, hint: str) -> None:
    assert (answer.code, answer.out) == (2, ""), answer.err
    assert "Traceback" not in answer.err
    error, its_hint = answer.err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert what in error
    assert its_hint.startswith("hint: ")
    assert hint in its_hint


# --- figures against TRL's own collators -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        ("dpo", "pairs", {"max_length": None}),
        ("dpo", "pairs", {"max_length": 14}),
        ("dpo", "pairs", {"max_length": 30, "pad_to_multiple_of": 8}),
        ("reward", "pairs", {"max_length": None}),
        ("reward", "pairs", {"max_length": 40}),
        ("kto", "labels", {"max_length": None}),
        ("kto", "labels", {"max_length": 14}),
        ("kto", "labels", {"max_length": 30, "loss_type": "apo_zero_unpaired"}),
        ("kto", "pairs", {"max_length": 30}),
    ],
)
def test_micro_batches_of_preferences_are_those_of_trls_collators(
    method: str, kind: str, options: dict[str, Any], folder: Path, model: Path, children: Children
) -> None:
    options = {"per_device_train_batch_size": 3, **options}
    batches = children.call(
        "tests.batches_side:preferences",
        {
            "method": method,
            "model": str(model),
            "options": options,
            "rows": label_rows() if kind == "labels" else pair_rows(),
        },
        deadline_seconds=120,
    )
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    report = report_of(method, kind, folder, children, *arguments, "--train_sampling_strategy", "sequential")
    figures = report.figures["padded"]
    sequences = sum(one["sequences"] for one in batches)
    assert figures.rows * (1 if method == "kto" else 2) == sequences
    assert figures.micro_batches == len(batches)
    assert figures.computed_positions == sum(one["positions"] for one in batches)
    assert figures.useful_tokens == sum(one["tokens"] for one in batches)
    if method != "reward":
        assert figures.loss_tokens == sum(one["loss_tokens"] for one in batches)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_prompts_are_padded_to_the_longest_of_a_generation_batch(
    method: str, folder: Path, model: Path, children: Children
) -> None:
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_generations": 4,
        "num_iterations": 2,
        "max_completion_length": 2,
    }
    made = children.call(
        "tests.batches_side:prompts",
        {"method": method, "model": str(model), "options": options, "rows": prompt_rows()},
        deadline_seconds=120,
    )
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    report = report_of(method, "prompts", folder, children, *arguments)
    figures = report.figures["padded"]
    tokens = report.lengths.tokens
    whole = [tokens[start : start + 3] for start in range(0, 18, 3)]  # the last two prompts fill no batch
    assert figures.micro_batch == 3
    assert [one["width"] for one in made["batches"]] == [max(batch) for batch in whole]
    assert [one["tokens"][::4] for one in made["batches"]] == [list(batch) for batch in whole]
    assert report.steps_per_epoch(figures) == made["steps"]


def test_the_fill_of_pairs_is_the_mean_over_all_orders() -> None:
    chosen, rejected = (5, 9, 2, 7, 3), (4, 1, 8, 7, 3)
    lengths = lengths_of(
        "reward", list(map(sum, zip(chosen, rejected, strict=True))), chosen_tokens=chosen, rejected_tokens=rejected
    )
    figures = job_report(lengths, SFT | {"per_device_train_batch_size": 2}).figures["padded"]
    longest = list(map(max, zip(chosen, rejected, strict=True)))
    passes = [
        sum(2 * len(batch) * max(batch) for batch in (order[0:2], order[2:4], order[4:5]))
        for order in itertools.permutations(longest)
    ]
    assert figures.computed_positions == round(statistics.mean(passes))
    assert (figures.largest_rows, figures.largest_positions) == (4, 4 * 9)


# --- what is likely wrong ----------------------------------------------------------------------------------------


def test_pairs_that_trl_drops_are_warned_of() -> None:
    pairs = {"prompt_tokens": [10, 50, 64], "chosen_tokens": [5, 5, 5], "rejected_tokens": [5, 5, 5]}
    report = job_report(lengths_of("dpo", [30, 110, 138], **pairs), SFT | {"max_length": 64})
    (warning,) = report.findings.warnings
    assert warning.what == "1 of 3 pairs have a prompt that fills `max_length` 64, and TRL drops them"
    assert warning.hint == "`max_length: 65` would drop none"
    assert report.figures["padded"].rows == 2

    kept_ends = SFT | {"max_length": 64, "truncation_mode": "keep_end"}
    assert job_report(lengths_of("dpo", [30, 110, 138], **pairs), kept_ends).findings.warnings == ()


def test_data_of_which_reward_training_keeps_nothing_is_warned_of() -> None:
    lengths = lengths_of("reward", [300, 300], chosen_tokens=[200, 50], rejected_tokens=[100, 250])
    report = job_report(lengths, SFT)
    assert report.findings.warnings[0].what == (
        "2 of 2 pairs have a sequence longer than `max_length` 128, and TRL drops them: none is left to train on"
    )
    assert report.findings.warnings[0].hint == "`max_length: 250` would drop none"
    assert report.figures["padded"].fill == 0.0


def test_sequences_beyond_the_models_positions_are_warned_of() -> None:
    lengths = lengths_of("reward", [300], chosen_tokens=[200], rejected_tokens=[100])
    (warning,) = job_report(lengths, SFT | {"max_length": None}, position_limit=128).findings.warnings
    assert warning.what == "sequences of 200 tokens are longer than the 128 positions the model was made for"


def test_prompts_that_leave_no_room_for_the_answer_are_warned_of() -> None:
    lengths = prompts_of([20, 30, 60])
    assert job_report(lengths, GRPO, position_limit=160).findings.warnings == ()
    (warning,) = job_report(lengths, GRPO, position_limit=150).findings.warnings
    assert warning.what == (
        "1 of 3 prompts with `max_completion_length` 100 are longer than the 150 positions the model was made for"
    )


def test_prompts_beyond_vllms_context_are_warned_of_where_vllm_is_used() -> None:
    limited = GRPO | {"vllm_max_model_length": 125}
    assert job_report(prompts_of([20, 30, 60]), limited).findings.warnings == ()
    (warning,) = job_report(prompts_of([20, 30, 60]), limited | {"use_vllm": True}).findings.warnings
    assert warning.what == "2 of 3 prompts with `max_completion_length` 100 do not fit into `vllm_max_model_length` 125"
    assert warning.hint == "raise `vllm_max_model_length` to 160, or leave out those rows"


def test_prompts_whose_start_online_dpo_cuts_off_are_warned_of() -> None:
    online = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_new_tokens": 10,
        "max_length": 60,
    }
    lengths = lengths_of("online_dpo", [20, 51], prompt_tokens=[20, 51])
    (warning,) = job_report(lengths, online).findings.warnings
    assert warning.what == (
        "1 of 2 prompts with `max_new_tokens` 10 are longer than `max_length` 60, and TRL cuts their start off"
    )


def test_tuning_says_each_warning_once(run: Run, folder: Path) -> None:
    tiny.write_rows(folder / "text.jsonl", [{"text": tiny.words(30, seed=row)} for row in range(40)])
    answer = run("sft", "--config", "text.yaml", "--auto", "--dry-run", "--max_length", "8")
    assert answer.code == 0, answer.err
    assert answer.err.count("most tokens are dropped: `max_length` 8 keeps ") == 1
    assert answer.err.count("packing would pack nothing: ") == 1


# --- samples -----------------------------------------------------------------------------------------------------


def sampled(tokens: Sequence[int], count: int) -> Lengths:
    """A look at `count` of the rows, drawn as those of large data are."""
    import numpy

    places = sampling.by_size(numpy.array(tokens), count).tolist()
    some = [tokens[place] for place in places]
    return text_lengths(some, rows=len(tokens), row_numbers=places, text_bytes=some)


def text_lengths(tokens: Sequence[int], **parts: Any) -> Lengths:
    ends = {"first_loss": [0] * len(tokens), "last_loss": [one - 1 for one in tokens], "loss_tokens": tokens}
    return lengths_of("sft", tokens, **ends, **parts)


def test_intervals_of_arrangements_hold_the_whole_datas_figures() -> None:
    inside = looked = 0
    for seed in range(12):
        tokens = tiny.lengths(6000, seed=seed)
        whole = job_report(text_lengths(tokens), SFT)
        look = sampled(tokens, 1500)
        found = intervals_of(job_report(look, SFT), SFT)
        assert found is not None
        rows = {one.high: one.rows for one in histogram(tokens)}
        for one, its in zip(histogram(look.tokens), found.histogram, strict=True):
            looked += 1
            inside += its.low <= rows[one.high] <= its.high
        for name in ("padded", "bfd", "wrapped"):
            told = found.arrangements[name]
            for figure, true in {"fill": whole.figures[name].fill, "rows": whole.figures[name].rows}.items():
                looked += 1
                inside += told[figure].low <= true <= told[figure].high
    assert inside / looked > 0.95


def test_intervals_are_in_the_json() -> None:
    report = job_report(sampled(tiny.lengths(5000), 500), SFT)
    told = data_look.to_builtins(data_look.DataLook(report=report, intervals=intervals_of(report, SFT)))
    assert (told["rows"], told["rows_measured"]) == (5000, 500)
    tokens = told["intervals"]["tokens"]
    assert tokens["low"] < told["tokens"] < tokens["high"]
    assert set(told["intervals"]["arrangements"]) == set(told["arrangements"])
    assert set(told["intervals"]["sequences"]["row"]) == {"50", "90", "99"}
    json.dumps(told)


def test_intervals_of_every_other_method_are_found() -> None:
    tokens = [one + 2 for one in tiny.lengths(3000)]
    half = [one // 2 for one in tokens]
    rest = [one - part for one, part in zip(tokens, half, strict=True)]
    sample = {"rows": 9000, "text_bytes": tokens, "row_numbers": list(range(0, 9000, 3))}
    kto = SFT | {"loss_type": "kto", "train_sampling_strategy": "sequential"}
    for method, parts, options in (
        ("dpo", {"prompt_tokens": half, "chosen_tokens": rest, "rejected_tokens": rest}, SFT),
        ("reward", {"chosen_tokens": half, "rejected_tokens": rest}, SFT),
        ("kto", {"prompt_tokens": half, "completion_tokens": rest, "desirable": [1] * 3000}, kto),
        ("grpo", {"prompt_tokens": tokens}, GRPO),
    ):
        report = job_report(lengths_of(method, tokens, **parts, **sample), options)
        found = intervals_of(report, options)
        assert found is not None
        fill = found.arrangements["padded"]["fill"]
        assert 0 < fill.low < fill.value < fill.high < 1


def test_a_stream_is_no_sample_of_what_follows() -> None:
    assert intervals_of(job_report(text_lengths([10, 20, 30], rows_known=False), SFT), SFT) is None


def test_figures_of_all_rows_have_no_intervals() -> None:
    assert intervals_of(job_report(text_lengths([10, 20, 30]), SFT), SFT) is None


@pytest.mark.parametrize("width", [60, 80])
def test_every_figure_of_a_sample_is_marked(width: int) -> None:
    report = job_report(sampled(tiny.lengths(5000), 500), SFT)
    stream = io.StringIO()
    print_lengths(report, Console(file=stream, width=width, highlight=False, markup=False), intervals_of(report, SFT))
    lines = stream.getvalue().splitlines()
    assert "from a sample of 500 rows" in lines
    text = " ".join(stream.getvalue().split())
    assert " or more" in text
    rows = [line for line in lines if line.startswith(("padded", "rebalanced", "bfd", "wrapped"))]
    assert len(rows) == 4
    assert all(" est." in row for row in rows)
    assert sum(line.startswith("  95 %") for line in lines) == 4
    assert text.count("* ") == text.count("(est.)") > 0
    assert text.endswith("hint: `--all-rows` measures every row")
    assert max(map(len, lines)) <= width


def test_progress_tells_rows_per_second_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 10.5, 21.0])
    monkeypatch.setattr("autotune.deliver.narrator.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    narrator = Narrator(stream)
    for done in (0, 10_500, 21_000):
        narrator.progress("reading the data", done, 42_000)
    assert stream.getvalue().splitlines() == [
        "data     reading the data: 10,500 of 42,000 rows, 1,000 rows/s, 32 s left",
        "         reading the data: 21,000 of 42,000 rows, 1,000 rows/s, 21 s left",
    ]


@pytest.mark.parametrize(("value", "what"), [(None, "is null"), (5, "is 5, not text"), (0.5, "is 0.5, not text")])
def test_text_that_is_none_is_told_by_its_column_and_row(folder: Path, run: Run, value: object, what: str) -> None:
    rows = text_rows()
    rows[3]["text"] = value
    if isinstance(value, int | float):  # a column of text alone would be read as text
        rows = [{"text": value} for _ in rows]
    tiny.write_rows(folder / "text.jsonl", rows)
    answer = run("lengths", "sft", "--config", "text.yaml")
    assert answer.code == 2
    number = 4 if value is None else 1
    assert f"error: `text` of row {number} {what}\n" in answer.err
    assert answer.err.endswith("hint: mend or remove that row; rows are counted from 1\n")


def test_a_prompt_that_is_null_is_told_by_its_row(folder: Path, run: Run) -> None:
    tiny.write_rows(folder / "pairs.jsonl", [*pair_rows()[:4], {**pair_rows()[0], "chosen": None}])
    answer = run("lengths", "dpo", "--config", "pairs.yaml")
    assert (answer.code, answer.err.splitlines()[-2]) == (2, "error: `chosen` of row 5 is null")


def test_one_row_is_told_as_one(folder: Path, run: Run) -> None:
    tiny.write_rows(folder / "text.jsonl", text_rows()[:1])
    answer = run("lengths", "sft", "--config", "text.yaml")
    assert answer.out.startswith("1 row (text), ")
    assert "`max_length` 1,024 cuts nothing\n" in answer.out


# --- what is left ----------------------------------------------------------------------------------------------------


def started(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """The real command, with a temporary folder of its own."""
    (folder / "temporary").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "temporary"), "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    "command", [("lengths", "dpo", "--config", "pairs.yaml"), ("sft", "--config", "text.yaml", "--dry-run")]
)
def test_no_text_of_the_data_is_left_behind(folder: Path, command: tuple[str, ...]) -> None:
    assert started(folder, *command).wait(timeout=120) == 0
    assert list((folder / "temporary").iterdir()) == []


def test_no_text_of_the_data_is_left_behind_by_a_command_that_is_killed(folder: Path) -> None:
    tiny.write_rows(folder / "pairs.jsonl", pair_rows() * 3000)
    command = started(folder, "lengths", "dpo", "--config", "pairs.yaml", "--all-rows")
    temporary = folder / "temporary"
    assert eventually(lambda: [*temporary.glob("trl-autotune-*/hf_datasets-*/*")], seconds=60)
    command.kill()
    command.wait()
    assert eventually(lambda: not [*temporary.glob("**/*.arrow"), *temporary.glob("**/hf_datasets-*")], seconds=30)
    assert not any(b"chosen" in path.read_bytes() for path in temporary.rglob("*") if path.is_file())
