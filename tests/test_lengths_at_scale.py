"""Large data: the sample and its intervals, the cache of lengths, and where data may come from."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from array import array
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import datasets
import msgspec
import numpy
import pytest

from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.probe import cores, lengths_cache, lengths_file, sampling
from autotune.probe.intervals import Estimates, estimates, mean
from autotune.probe.lengths import Lengths, kept_lengths, measure_lengths
from tests import tiny
from tests.trl_rows import job_of

ROWS = [{"text": tiny.words(number % 40 + 1, seed=number)} for number in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("model"))


# ---- the sample


def population(seed: int, rows: int = 20_000) -> tuple[list[int], list[int]]:
    """Tokens with a long tail and, loosely tied to them, bytes of text."""
    generator = random.Random(seed)
    tokens = tiny.lengths(rows, seed=seed, median=200, longest=20_000)
    return tokens, [round(count * generator.uniform(3.0, 5.0)) for count in tokens]


def sampled(tokens: list[int], text_bytes: list[int], count: int) -> Lengths:
    numbers = sampling.by_size(numpy.array(text_bytes), count).tolist()
    chosen = tuple(tokens[number] for number in numbers)
    return Lengths(
        rows=len(tokens),
        tokens=chosen,
        first_loss=(0,) * count,
        last_loss=tuple(each - 1 for each in chosen),
        loss_tokens=chosen,
        format="text",
        columns=("text",),
        seconds=1.0,
        row_numbers=tuple(numbers),
        text_bytes=tuple(text_bytes[number] for number in numbers),
    )


def figures_of(tokens: list[int], max_length: int) -> dict[str, float]:
    ascending = sorted(tokens)
    return {
        "mean": sum(tokens) / len(tokens),
        "total": sum(tokens),
        "cut": sum(max(0, each - max_length) for each in tokens),
        **{f"p{percent}": ascending[-(-len(tokens) * percent // 100) - 1] for percent in (50, 90, 95, 99)},
    }


def intervals_of(found: Estimates) -> dict[str, tuple[float, float, float]]:
    named = {"mean": found.mean_tokens, "total": found.total_tokens, "cut": found.cut_tokens}
    named |= {f"p{percent}": each for percent, each in found.percentiles.items()}
    return {name: (each.low, each.value, each.high) for name, each in named.items()}


def test_intervals_hold_the_true_figures_nineteen_times_in_twenty() -> None:
    inside: dict[str, int] = {}
    for seed in range(100):
        tokens, text_bytes = population(seed, 6000)
        found = intervals_of(estimates(sampled(tokens, text_bytes, 600), 1024))
        for name, true in figures_of(tokens, 1024).items():
            low, _, high = found[name]
            inside[name] = inside.get(name, 0) + (low <= true <= high)
    assert set(inside) == {"mean", "total", "cut", "p50", "p90", "p95", "p99"}
    assert all(held >= 90 for held in inside.values()), inside


def test_a_sample_by_size_has_narrower_intervals_than_a_random_one() -> None:
    tokens, text_bytes = population(1)
    lengths = sampled(tokens, text_bytes, 2000)
    at_random = random.Random(0).sample(range(len(tokens)), 2000)
    blind = msgspec.structs.replace(
        lengths, tokens=tuple(tokens[number] for number in at_random), text_bytes=tuple(range(2000))
    )
    by_size, random_rows = (mean(each, each.tokens) for each in (lengths, blind))
    assert (random_rows.high - random_rows.low) / (by_size.high - by_size.low) > 3


def test_every_row_has_the_same_chance() -> None:
    sizes = numpy.array([1, 5, 5, 9] * 250)
    numbers = sampling.by_size(sizes, 700)
    assert len(set(numbers.tolist())) == 700
    assert numbers.tolist() == sorted(numbers.tolist())
    taken = [sizes[number] for number in numbers.tolist()]
    assert [taken.count(size) for size in (1, 5, 9)] == [175, 350, 175]


def test_figures_of_all_rows_are_certain() -> None:
    tokens, _ = population(3, 500)
    lengths = sampled(tokens, tokens, 500)
    for low, value, high in intervals_of(estimates(lengths, None)).values():
        assert low == value == high


def test_rows_are_sized_by_their_text_alone() -> None:
    rows = [
        {"text": "ba", "messages": [{"role": "a", "content": "xyz"}, {"role": "b", "content": None}], "ids": [1, 2]},
        {"text": None, "messages": None, "ids": None},
        {"text": "漢字", "messages": [], "ids": [7]},
    ]
    data = datasets.Dataset.from_list(rows)
    assert sampling.row_sizes(data).tolist() == [2 + 1 + 3 + 1 + 2, 0, 6 + 1]
    assert sampling.row_sizes(data.select([2, 0])).tolist() == [7, 9]


def test_batches_hold_so_many_rows_and_bytes() -> None:
    huge = sampling.BATCH_BYTES + 1
    spans = list(sampling.batches(numpy.array([10] * 2500 + [huge, huge] + [10] * 3)))
    assert spans == [(0, 1000), (1000, 2000), (2000, 2500), (2500, 2501), (2501, 2502), (2502, 2505)]


@pytest.mark.slow
def test_of_more_than_200_000_rows_a_sample_is_measured(children: Children, model: Path, tmp_path: Path) -> None:
    words = [tiny.words(count, seed=count) for count in range(40)]
    text = "".join(json.dumps({"text": words[number % 37 + 1]}) + "\n" for number in range(203_500))
    job = job_of(model, text, tmp_path)
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert (lengths.rows, lengths.rows_measured, lengths.by) == (203_500, 200_000, "batched")
    assert list(lengths.row_numbers) == sorted(set(lengths.row_numbers))
    assert all(len(words[number % 37 + 1]) == size
               for number, size in zip(lengths.row_numbers, lengths.text_bytes, strict=True))  # fmt: skip
    everything = measure_lengths(job, folder=tmp_path, children=children, all_rows=True)
    assert (everything.rows_measured, everything.row_numbers) == (203_500, ())
    assert lengths.tokens == tuple(everything.tokens[number] for number in lengths.row_numbers)
    found = estimates(lengths, None).total_tokens
    assert found.low <= sum(everything.tokens) <= found.high


def test_tokens_in_the_data_are_counted_however_many(children: Children, model: Path, tmp_path: Path) -> None:
    lengths_there = [number % 50 + 1 for number in range(210_000)]
    data = datasets.Dataset.from_dict({"input_ids": [[5] * count for count in lengths_there]})
    (tmp_path / "data").mkdir()
    data.to_parquet(tmp_path / "data" / "train.parquet")
    job = {"model_name_or_path": str(model), "dataset_name": "data"}
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert list(lengths.tokens) == lengths_there
    assert lengths.row_numbers == ()


# ---- all cores


def square_or_die(number: int) -> int:
    if number < 0:
        os._exit(9)
    return 100 // number


def test_results_come_in_order_from_every_process() -> None:
    assert list(cores.each(square_or_die, range(1, 101), processes=3)) == [100 // number for number in range(1, 101)]
    assert list(cores.each(square_or_die, [5, 4], processes=1)) == [20, 25]


def test_what_ends_a_process_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        list(cores.each(square_or_die, [1, 0, 2], processes=2))
    with pytest.raises(BrokenProcessPool):
        list(cores.each(square_or_die, [1, -1, 2], processes=2))


# ---- the cache


def look(job: dict[str, Any], children: Children, folder: Path, **options: Any) -> Lengths:
    return measure_lengths(job, folder=folder, children=children, cache=folder / "kept", **options)


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "kept").iterdir())


def test_a_second_look_at_the_same_data_is_read(children: Children, model: Path, tmp_path: Path) -> None:
    job = job_of(model, ROWS, tmp_path)
    first, second = (look(job, children, tmp_path) for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert second == msgspec.structs.replace(first, cached=True, seconds=second.seconds)
    (file,) = kept(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert ROWS[30]["text"][:20].encode() not in file.read_bytes()


def test_lengths_are_kept_beside_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_lengths() == tmp_path / "trl-autotune" / "lengths"


def changed_data(job: dict[str, Any], folder: Path) -> None:
    tiny.write_rows(folder / "rows.jsonl", [*ROWS, {"text": "ba"}])


def touched_data(job: dict[str, Any], folder: Path) -> None:
    os.utime(folder / "rows.jsonl", ns=(1, 1))


def changed_in_place(job: dict[str, Any], folder: Path) -> None:
    """Another text of the same size, in a file that says that it is as old."""
    path = folder / "rows.jsonl"
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"ba", b"zz", 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def another_template(job: dict[str, Any], folder: Path) -> None:
    (folder / "other.jinja").write_text("{{ messages }}", encoding="utf-8")
    job["chat_template_path"] = "other.jinja"


def another_end(job: dict[str, Any], folder: Path) -> None:
    job["eos_token"] = tiny.PAD


@pytest.mark.parametrize("change", [changed_data, touched_data, changed_in_place, another_template, another_end])
def test_what_changes_the_lengths_is_measured_anew(
    change: Callable[[dict[str, Any], Path], None], children: Children, model: Path, tmp_path: Path
) -> None:
    job = job_of(model, ROWS, tmp_path)
    look(job, children, tmp_path)
    change(job, tmp_path)
    assert not look(job, children, tmp_path).cached
    assert len(kept(tmp_path)) == 2


def test_another_tokenizer_in_the_same_folder_is_another(children: Children, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    tiny.make_model(tmp_path / "tokens")
    job = job_of(tmp_path / "tokens", ROWS, tmp_path)
    before = look(job, children, tmp_path)
    path = tmp_path / "tokens" / "tokenizer.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    written["model"]["merges"] = written["model"]["merges"][:5]
    path.write_text(json.dumps(written), encoding="utf-8")
    after = look(job, children, tmp_path)
    assert not after.cached
    assert sum(after.tokens) > sum(before.tokens)


@pytest.mark.parametrize("damage", [b"", b"trl-autotune lengths 1\n{}", None])
def test_a_torn_file_is_measured_and_written_anew(
    damage: bytes | None, children: Children, model: Path, tmp_path: Path
) -> None:
    job = job_of(model, ROWS, tmp_path)
    whole = look(job, children, tmp_path)
    (file,) = kept(tmp_path)
    file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
    again = look(job, children, tmp_path)
    assert (again.cached, again.tokens) == (False, whole.tokens)
    assert look(job, children, tmp_path).cached


def test_a_folder_that_cannot_be_written_is_no_failure(children: Children, model: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file where the folder should be", encoding="utf-8")
    assert look(job_of(model, ROWS, tmp_path), children, tmp_path).rows == 60


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "written"
    lengths_file.write(written, {}, {"tokens": array("i", range(1000))})
    monkeypatch.setattr(lengths_cache, "KEPT_BYTES", 3 * written.stat().st_size)
    for number in range(5):
        lengths_cache.keep(tmp_path / "kept", f"{number}", written)
        os.utime(tmp_path / "kept" / f"{number}.lengths", (number, number))
    assert [path.name for path in kept(tmp_path)] == ["2.lengths", "3.lengths", "4.lengths"]
    assert lengths_cache.find(tmp_path / "kept", "2") is not None  # what is used is the newest again
    lengths_cache.keep(tmp_path / "kept", "5", written)
    assert [path.name for path in kept(tmp_path)] == ["2.lengths", "4.lengths", "5.lengths"]


def test_what_an_interrupted_write_left_goes_too(tmp_path: Path) -> None:
    written = tmp_path / "written"
    lengths_file.write(written, {}, {"tokens": array("i", [1])})
    (tmp_path / "kept").mkdir()
    for name, age in ((".a.lengths.17", 1), (".b.lengths.18", 2**31)):
        (tmp_path / "kept" / name).write_bytes(b"torn")
        os.utime(tmp_path / "kept" / name, (age, age))
    lengths_cache.keep(tmp_path / "kept", "c", written)
    assert [path.name for path in kept(tmp_path)] == [".b.lengths.18", "c.lengths"]


# ---- where data comes from


def as_json(folder: Path) -> dict[str, Any]:
    (folder / "rows.json").write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    return {"datasets": [{"path": "json", "data_files": "rows.json"}]}


def as_csv(folder: Path) -> dict[str, Any]:
    lines = ["text", *(row["text"] for row in ROWS)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"datasets": [{"path": "csv", "data_files": "rows.csv"}]}


def as_parquet(folder: Path) -> dict[str, Any]:
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "rows.parquet")
    return {"datasets": [{"path": "parquet", "data_files": ["rows.parquet"]}]}


def as_arrow(folder: Path) -> dict[str, Any]:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    (file,) = (folder / "saved").glob("*.arrow")
    shutil.copy(file, folder / "rows.arrow")
    return {"datasets": [{"path": "arrow", "data_files": "rows.arrow"}]}


def as_lines_of_text(folder: Path) -> dict[str, Any]:
    (folder / "rows.txt").write_text("\n".join(row["text"] for row in ROWS), encoding="utf-8")
    return {"datasets": [{"path": "text", "data_files": "rows.txt"}]}


def as_stream(folder: Path) -> dict[str, Any]:
    tiny.write_rows(folder / "rows.jsonl", ROWS)
    return {"datasets": [{"path": "json", "data_files": "rows.jsonl"}], "streaming": True}


def as_folder(folder: Path) -> dict[str, Any]:
    (folder / "data").mkdir()
    tiny.write_rows(folder / "data" / "train.jsonl", ROWS)
    return {"dataset_name": "data"}


def as_streamed_folder(folder: Path) -> dict[str, Any]:
    return as_folder(folder) | {"dataset_streaming": True}


def as_mixture(folder: Path) -> dict[str, Any]:
    tiny.write_rows(folder / "one.jsonl", [{"text": row["text"], "topic": "a"} for row in ROWS[:20]])
    tiny.write_rows(folder / "two.jsonl", [{"text": row["text"], "score": 1.5} for row in ROWS[20:]])
    sources = [{"path": "json", "data_files": name, "columns": ["text"]} for name in ("one.jsonl", "two.jsonl")]
    return {"datasets": sources}


SOURCES = [
    as_json, as_csv, as_parquet, as_arrow, as_lines_of_text, as_stream, as_folder, as_streamed_folder, as_mixture,
]  # fmt: skip


@pytest.mark.parametrize("write", SOURCES)
def test_the_same_rows_have_the_same_lengths_from_any_source(
    write: Callable[[Path], dict[str, Any]], children: Children, model: Path, tmp_path: Path
) -> None:
    plain = measure_lengths(job_of(model, ROWS, tmp_path), folder=tmp_path, children=children)
    job = {"model_name_or_path": str(model), "dataset_train_split": "train"} | write(tmp_path)
    first, second = (look(job, children, tmp_path) for _ in range(2))
    assert first.tokens == second.tokens == plain.tokens
    assert (first.rows_known, second.cached) == (True, True)


def test_data_in_the_cache_of_the_hub_is_measured_and_remembered(model: Path, tmp_path: Path) -> None:
    """Data that `datasets` converted before is found by its name without a network, as hub data is."""
    home = tmp_path / "hub"
    source = tmp_path / "maker"
    source.mkdir()
    tiny.write_rows(source / "train.jsonl", ROWS)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    made = datasets.load_dataset("json", data_files=str(source / "train.jsonl"), cache_dir=str(tmp_path / "made"))
    (arrow,) = (Path(file["filename"]) for file in made["train"].cache_files)
    version = "0" * 40
    there = home / "datasets" / "somebody___words" / "default" / "0.0.0" / version
    shutil.copytree(arrow.parent, there)
    arrow_there = there / arrow.name
    arrow_there.rename(there / "words-train.arrow")
    children = Children(environment, log=tmp_path / "server.log", cold=True)
    job = {"model_name_or_path": str(model), "dataset_name": "somebody/words"}
    first, second = (look(job, children, tmp_path) for _ in range(2))
    assert (first.rows, first.cached, second.cached) == (60, False, True)
    assert first.tokens == second.tokens


# ---- what is wrong with data


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "ba"}\n{"text": "\xff\xfe"}\n', "row 2 of the data"),
        (b'{"text": "\xff\xfe"}\n{"text": "ba"}\n', "row 1 of the data"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}\n', "row 1 of the data"),
        (b'{"text": "ba"}\n{"text": "k', "line 2 is not JSON"),
        (b'{"text": "ba"}\n[1, 2]\n', "line 2 is a JSON list"),
        (b'{"text": "ba"}\n{"text": 3}\n{"text": ["ko"]}\n', "`text` of row 2 is 3"),
        (b'{"text": "ba"}\n{"other": "ko"}\n', "`text` of row 2 is null"),
        (b'{"messages": [{"role": "user", "content": "ba"}]}\n{"messages": null}\n', "`messages` of row 2 is null"),
        (b'{"messages": [{"role": "user", "content": "ba"}]}\n{"messages": [{"role": "user"}]}\n', "row 2 of the data"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(
    content: bytes, said: str, children: Children, model: Path, tmp_path: Path
) -> None:
    job = job_of(model, "", tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(AutotuneError) as caught:
        look(job, children, tmp_path)
    assert said in caught.value.what
    assert caught.value.hint
    assert not (tmp_path / "kept").exists()
