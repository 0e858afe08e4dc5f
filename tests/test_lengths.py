"""Lengths measured in a real child, held against what TRL's own trainer makes of the same rows."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest

from autotune.children import Children
from autotune.errors import AutotuneError, NotYetError
from autotune.probe.lengths import measure_lengths, sample_rows
from tests import tiny
from tests.trl_rows import by_the_trainer, check_against_the_trainer, job_of

TEMPLATE_WITHOUT_MARKS = tiny.CHAT_TEMPLATE.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def chat(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": tiny.words(number % 17 + 1, seed=number)},
        {"role": "assistant", "content": tiny.words(number % 5 + 1, seed=number + 1)},
        {"role": "user", "content": "ba ko"},
        {"role": "assistant", "content": tiny.words(number % 29 + 1, seed=number + 2)},
    ]


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"place": {"type": "string"}}}}]

FORMATS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": tiny.words(number % 40 + 1, seed=number), "source": "made up"} for number in range(60)],
    "prompt-completion": [
        {"prompt": tiny.words(number % 20 + 1, seed=number) + " ", "completion": tiny.words(number % 9 + 1, seed=7)}
        for number in range(60)
    ],
    "conversational prompt-completion": [
        {"prompt": chat(number)[:1], "completion": chat(number)[1:2]} for number in range(60)
    ],
    "messages": [
        {"messages": chat(number), "tools": TOOLS if number % 3 else None, "id": number} for number in range(60)
    ],
    "conversations": [
        {"conversations": [{"from": turn["role"], "value": turn["content"]} for turn in chat(number)]}
        for number in range(60)
    ],
    "input_ids": [{"input_ids": list(range(5, 6 + number % 30))} for number in range(60)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True, scope="module")
def quiet_datasets() -> Iterator[None]:
    datasets.disable_caching()
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    datasets.enable_caching()


@pytest.mark.parametrize("data_format", FORMATS)
def test_lengths_are_those_of_the_rows_that_trl_trains_on(
    data_format: str, children: Children, model: Path, tmp_path: Path
) -> None:
    job = job_of(model, FORMATS[data_format], tmp_path)
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert lengths.format == data_format
    assert lengths.rows == lengths.rows_measured == 60
    assert set(lengths.columns) == set(FORMATS[data_format][0])
    check_against_the_trainer(lengths, by_the_trainer(job, tmp_path))


@pytest.mark.parametrize(
    ("data_format", "options"),
    [
        ("messages", {"assistant_only_loss": True}),
        ("conversational prompt-completion", {"assistant_only_loss": True}),
        ("conversational prompt-completion", {"completion_only_loss": False}),
        ("prompt-completion", {"completion_only_loss": False}),
        ("text", {"eos_token": tiny.PAD}),
    ],
)
def test_lengths_follow_the_options_that_change_tokens_or_loss(
    data_format: str, options: dict[str, Any], children: Children, model: Path, tmp_path: Path
) -> None:
    job = job_of(model, FORMATS[data_format], tmp_path, **options)
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    check_against_the_trainer(lengths, by_the_trainer(job, tmp_path))


def test_another_text_column_and_another_template_are_used(children: Children, model: Path, tmp_path: Path) -> None:
    rows = [{"body": row["text"]} for row in FORMATS["text"]]
    job = job_of(model, rows, tmp_path, dataset_text_field="body")
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    check_against_the_trainer(lengths, by_the_trainer(job, tmp_path))
    template = "{%- for message in messages %}{{ message.content }}{%- endfor %}"
    (tmp_path / "short.jinja").write_text(template, encoding="utf-8")
    job = job_of(model, FORMATS["messages"], tmp_path, chat_template_path="short.jinja")
    short = measure_lengths(job, folder=tmp_path, children=children)
    job["chat_template_path"] = str(tmp_path / "short.jinja")
    check_against_the_trainer(short, by_the_trainer(job, tmp_path))


def test_a_folder_named_by_dataset_name_is_read_as_trl_reads_it(
    children: Children, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    tiny.write_rows(tmp_path / "data" / "train.jsonl", FORMATS["text"])
    job = {"model_name_or_path": str(model), "dataset_name": "data"}
    assert measure_lengths(job, folder=tmp_path, children=children).rows == 60


def test_progress_is_told_in_rows(children: Children, model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    job = job_of(model, FORMATS["messages"] * 20, tmp_path)
    measure_lengths(job, folder=tmp_path, children=children, progress=lambda done, rows: seen.append((done, rows)))
    assert seen
    assert all(0 <= done <= rows == 1200 for done, rows in seen)
    assert seen == sorted(seen)


def test_a_stream_is_measured_by_its_first_rows(children: Children, model: Path, tmp_path: Path) -> None:
    job = job_of(model, FORMATS["text"], tmp_path, streaming=True)
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert (lengths.rows, lengths.rows_known) == (60, True)


def test_a_random_test_split_leaves_the_same_rows_each_time(children: Children, model: Path, tmp_path: Path) -> None:
    job = job_of(model, FORMATS["text"], tmp_path, test_split_size=0.2)
    first, second = (measure_lengths(job, folder=tmp_path, children=children) for _ in range(2))
    assert first.rows == 48
    assert first.tokens == second.tokens


@pytest.mark.parametrize("data_format", FORMATS)
def test_a_sample_holds_the_raw_rows_in_the_order_asked_for(
    data_format: str, children: Children, model: Path, tmp_path: Path
) -> None:
    job = job_of(model, FORMATS[data_format], tmp_path)
    path = tmp_path / "sample.parquet"
    numbers = [59, 3, 4, 0, 17]
    sample_rows(job, numbers, path, folder=tmp_path, children=children)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    sample = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert list(sample) == [FORMATS[data_format][number] for number in numbers]
    whole = measure_lengths(job, folder=tmp_path, children=children)
    job["datasets"] = [{"path": "parquet", "data_files": str(path)}]
    again = measure_lengths(job, folder=tmp_path, children=children)
    assert list(again.tokens) == [whole.tokens[number] for number in numbers]
    assert list(again.loss_tokens) == [whole.loss_tokens[number] for number in numbers]


def test_rows_with_mixed_kinds_of_values_survive_in_a_sample(children: Children, model: Path, tmp_path: Path) -> None:
    call = {"id": "1", "function": {"name": "weather", "arguments": {"place": "Rome", "days": 3}}}
    rows: list[dict[str, Any]] = [
        {"messages": chat(0), "tools": TOOLS},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}], "tools": None},
        {"messages": chat(1), "tools": [{"type": "function", "function": {"name": "x", "parameters": {"a": "b"}}}]},
    ]
    job = job_of(model, rows, tmp_path)
    path = tmp_path / "sample.parquet"
    sample_rows(job, [2, 0, 1], path, folder=tmp_path, children=children)
    sample = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert [sample[number] for number in range(3)] == [rows[2], rows[0], rows[1]]
    whole = measure_lengths(job, folder=tmp_path, children=children)
    job["datasets"] = [{"path": "parquet", "data_files": str(path)}]
    again = measure_lengths(job, folder=tmp_path, children=children)
    assert again.tokens == tuple(whole.tokens[number] for number in (2, 0, 1))


def test_nothing_is_written_to_the_users_caches(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_", "XDG_"))
    }
    children = Children({**environment, "HOME": str(home)}, log=tmp_path / "server.log", cold=True)
    measure_lengths(job_of(model, FORMATS["text"], tmp_path), folder=tmp_path, children=children)
    assert [path for path in home.rglob("*") if path.is_file()] == []


def failure(children: Children, folder: Path, job: Mapping[str, Any]) -> AutotuneError:
    with pytest.raises(AutotuneError) as caught:
        measure_lengths(job, folder=folder, children=children)
    return caught.value


def test_data_that_is_not_there_is_named(children: Children, model: Path, tmp_path: Path) -> None:
    job = job_of(model, FORMATS["text"], tmp_path) | {"datasets": [{"path": "json", "data_files": "gone.jsonl"}]}
    error = failure(children, tmp_path, job)
    assert "gone.jsonl" in error.what
    assert str(tmp_path) in error.hint
    error = failure(children, tmp_path, {"model_name_or_path": str(model), "dataset_name": "./gone"})
    assert error.what == "there is no folder `./gone`"
    error = failure(children, tmp_path, {"model_name_or_path": str(model)})
    assert error.what == "the job names no data"


def test_a_file_as_dataset_name_is_answered_with_the_form_that_works(
    children: Children, model: Path, tmp_path: Path
) -> None:
    job = job_of(model, FORMATS["text"], tmp_path) | {"datasets": [], "dataset_name": "rows.jsonl"}
    error = failure(children, tmp_path, job)
    assert "is a file" in error.what
    assert "datasets: [{path: json, data_files: rows.jsonl}]" in error.hint


def test_a_torn_line_is_named_by_its_number(children: Children, model: Path, tmp_path: Path) -> None:
    whole = [json.dumps(row) for row in FORMATS["text"]]
    whole[40] = whole[40][:-3]
    error = failure(children, tmp_path, job_of(model, "\n".join(whole), tmp_path))
    assert "rows.jsonl`, line 41 is not JSON" in error.what
    error = failure(children, tmp_path, job_of(model, "\n".join(whole[:41]), tmp_path))
    assert "line 41" in error.what


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_data_is_told(text: str, children: Children, model: Path, tmp_path: Path) -> None:
    error = failure(children, tmp_path, job_of(model, text, tmp_path))
    assert "has no rows" in error.what
    assert "rows.jsonl" in error.what


def test_a_missing_split_is_answered_with_those_there_are(children: Children, model: Path, tmp_path: Path) -> None:
    job = job_of(model, FORMATS["text"], tmp_path, dataset_train_split="training")
    error = failure(children, tmp_path, job)
    assert error.what == "the data has no split `training`"
    assert "`train`" in error.hint
    job = job_of(model, FORMATS["text"], tmp_path)
    job["datasets"][0]["split"] = "validation"
    assert "validation" in failure(children, tmp_path, job).what


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "a", "answer": "b"}, "`question`, `answer`"),
        ({"prompt": "a"}, "`prompt` without a `completion`"),
        ({"chosen": "a", "rejected": "b"}, "preference data"),
        ({"conversations": [{"role": "user", "content": "a"}]}, "call it `messages`"),
        ({"messages": "a"}, "a list of objects"),
    ],
)
def test_columns_that_sft_does_not_know_are_listed_with_those_it_wants(
    row: dict[str, Any], said: str, children: Children, model: Path, tmp_path: Path
) -> None:
    error = failure(children, tmp_path, job_of(model, [row, row], tmp_path))
    assert "no column that SFT can train on" in error.what
    assert said in error.what + error.hint
    assert "`input_ids`" in error.hint


def test_images_are_not_yet_tuned(children: Children, model: Path, tmp_path: Path) -> None:
    job = job_of(model, [{"messages": chat(0), "images": ["a.png"]}], tmp_path)
    assert isinstance(failure(children, tmp_path, job), NotYetError)


def test_chats_without_a_chat_template_are_told(children: Children, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    tiny.make_model(tmp_path / "bare")
    for name in ("chat_template.jinja",):
        (tmp_path / "bare" / name).unlink()
    error = failure(children, tmp_path, job_of(tmp_path / "bare", FORMATS["messages"], tmp_path))
    assert "no chat template" in error.what
    assert "chat_template_path" in error.hint


def test_a_row_that_breaks_the_template_is_named_by_its_number(children: Children, model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": chat(number)} for number in range(60)]
    rows[37] = {"messages": [{"role": "assistant", "content": None}]}
    rows[50] = {"messages": []}
    error = failure(children, tmp_path, job_of(model, rows, tmp_path))
    assert "row 38 of the data" in error.what
    error = failure(children, tmp_path, job_of(model, [{"text": "a"}, {"text": None}, {"text": "b"}], tmp_path))
    assert "of row 2 is " in error.what


def test_answers_that_no_template_marks_are_told(children: Children, tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "unmarked")
    (tmp_path / "unmarked" / "chat_template.jinja").write_text(TEMPLATE_WITHOUT_MARKS, encoding="utf-8")
    job = job_of(tmp_path / "unmarked", FORMATS["conversations"], tmp_path, assistant_only_loss=True)
    assert "cannot mark the answers" in failure(children, tmp_path, job).what
    job = job_of(tmp_path / "unmarked", FORMATS["text"], tmp_path, assistant_only_loss=True)
    assert "not conversational" in failure(children, tmp_path, job).what


def test_a_model_that_is_not_there_is_told(children: Children, model: Path, tmp_path: Path) -> None:
    error = failure(children, tmp_path, job_of(tmp_path / "gone", FORMATS["text"], tmp_path))
    assert "there is no model folder" in error.what
    (tmp_path / "empty").mkdir()
    error = failure(children, tmp_path, job_of(tmp_path / "empty", FORMATS["text"], tmp_path))
    assert "the tokenizer of" in error.what
    error = failure(children, tmp_path, job_of(model, FORMATS["text"], tmp_path, eos_token="<none>"))
    assert "not in the vocabulary" in error.what


def test_a_model_folder_without_tokenizer_files_is_told(children: Children, model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    error = failure(children, tmp_path, job_of(bare, FORMATS["text"], tmp_path))
    assert "has no tokenizer files, and transformers makes one up" in error.what


def test_offline_without_a_cache_is_told(tmp_path: Path, model: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    children = Children(environment, log=tmp_path / "server.log", cold=True)
    error = failure(children, tmp_path, {"model_name_or_path": str(model), "dataset_name": "trl-lib/tldr"})
    assert "neither here nor to be had from the hub" in error.what
    error = failure(children, tmp_path, job_of(Path("Qwen/Qwen3-0.6B"), FORMATS["text"], tmp_path))
    assert "the tokenizer of `Qwen/Qwen3-0.6B` cannot be loaded" in error.what
