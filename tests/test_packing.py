"""Rows, fill and tokens of each arrangement, held against what TRL and transformers really make of the same lengths."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.trainer_pt_utils import BatchRebalanceSampler

from autotune.plan.figures import Figures
from autotune.plan.lengths_report import lengths_report, sampling_seed, to_builtins
from autotune.plan.order import random_order
from autotune.plan.packing import bfd, bfd_split, padded, rebalanced, truncate, wrapped
from autotune.probe.lengths import Lengths
from tests import tiny

PACKINGS = {"bfd": bfd, "bfd_split": bfd_split, "wrapped": wrapped}
GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k-test.jsonl"


@pytest.fixture(autouse=True, scope="module")
def quiet_datasets() -> Any:
    """No cache files and no bars from `datasets`."""
    datasets.disable_caching()
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    datasets.enable_caching()


def lengths_of(tokens: Sequence[int], *, prompt: Sequence[int] | None = None, rows: int | None = None) -> Lengths:
    """Rows of which the first `prompt` tokens bear no loss."""
    starts = prompt or [0] * len(tokens)
    pairs = list(zip(tokens, starts, strict=True))
    return Lengths(
        rows=rows or len(tokens),
        tokens=tuple(tokens),
        first_loss=tuple(start if start < length else -1 for length, start in pairs),
        last_loss=tuple(length - 1 if start < length else -1 for length, start in pairs),
        loss_tokens=tuple(max(0, length - start) for length, start in pairs),
        format="text",
        columns=("text",),
        seconds=0.0,
    )


def dataset_of(lengths: Lengths) -> datasets.Dataset:
    """Data of these lengths, prepared as TRL prepares it; a row's number is its token."""
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[number] * length for number, length in enumerate(lengths.tokens)],
            "labels": [
                [-100] * (first if first >= 0 else length) + [number] * loss
                for number, (length, first, loss) in enumerate(
                    zip(lengths.tokens, lengths.first_loss, lengths.loss_tokens, strict=True)
                )
            ],
        },
        features=datasets.Features({name: datasets.List(datasets.Value("int64")) for name in ("input_ids", "labels")}),
    )


def packed_by_trl(lengths: Lengths, max_length: int, strategy: str, num_proc: int | None = None) -> Any:
    return trl.pack_dataset(dataset_of(lengths), max_length, strategy, {"num_proc": num_proc})


def compare_with_trl(figures: Figures, lengths: Lengths, packed: Any, max_length: int) -> None:
    """Every figure of a packing against TRL's rows."""
    rows = packed[:]["input_ids"]
    useful = sum(map(len, rows))
    pieces: dict[int, int] = {}
    for row in rows:
        for number in set(row):
            pieces[number] = pieces.get(number, 0) + 1
    assert figures.rows == len(rows)
    assert figures.useful_tokens == useful
    assert figures.computed_positions == len(rows) * max_length
    assert figures.dropped_tokens == sum(lengths.tokens) - useful
    assert figures.loss_tokens == sum(label != -100 for row in packed[:]["labels"] for label in row)
    if figures.arrangement == "bfd_split":  # two pieces of one document may share a row
        assert figures.split_rows == sum(length > max_length for length in lengths.tokens)
    else:
        assert figures.split_rows == sum(count > 1 for count in pieces.values())


@pytest.mark.parametrize("strategy", PACKINGS)
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=80).filter(any),
    max_length=st.integers(1, 32),
)
@example(tokens=[20] * 7, max_length=8)
@example(tokens=[8] * 7, max_length=8)
@example(tokens=[1] * 17, max_length=8)
@example(tokens=[7, 8, 9], max_length=8)
@example(tokens=[0, 0, 5, 0], max_length=8)
@example(tokens=[3], max_length=8)
@example(tokens=[3], max_length=1)
def test_packed_rows_are_as_many_as_trl_makes(strategy: str, tokens: list[int], max_length: int) -> None:
    lengths = lengths_of(tokens)
    figures = PACKINGS[strategy](lengths, max_length)
    compare_with_trl(figures, lengths, packed_by_trl(lengths, max_length, strategy), max_length)
    assert figures.exact


@pytest.mark.parametrize("strategy", PACKINGS)
@pytest.mark.parametrize("max_length", [64, 256])
def test_packed_rows_of_realistic_data_are_as_many_as_trl_makes_over_several_blocks(
    strategy: str, max_length: int
) -> None:
    tokens = tiny.lengths(3210, seed=1, median=60, longest=2000)
    lengths = lengths_of(tokens, prompt=[length // 3 for length in tokens])
    packed = packed_by_trl(lengths, max_length, strategy)
    compare_with_trl(PACKINGS[strategy](lengths, max_length), lengths, packed, max_length)


@pytest.mark.parametrize("strategy", PACKINGS)
@pytest.mark.parametrize("num_proc", [1, 2, 3])
def test_packed_rows_follow_the_shards_of_dataset_num_proc(strategy: str, num_proc: int) -> None:
    lengths = lengths_of(tiny.lengths(1502, seed=2))
    figures = PACKINGS[strategy](lengths, 100, num_proc=num_proc)
    assert figures.rows == len(packed_by_trl(lengths, 100, strategy, num_proc))


def test_more_shards_than_rows_are_as_many_as_rows() -> None:
    assert bfd(lengths_of([5, 5, 5]), 100, num_proc=8).rows == 3


def test_bfd_keeps_rows_that_lost_their_loss_tokens_and_padding_drops_them() -> None:
    lengths = lengths_of([100, 100, 40, 30], prompt=[90, 10, 40, 0])
    figures = bfd(lengths, 50)
    kept = truncate(lengths, 50)
    assert figures.kept_without_loss == 2
    assert figures.useful_tokens == 50 + 50 + 40 + 30
    assert figures.dropped_tokens == 100
    assert kept.row_numbers == (1, 3)
    assert kept.dropped_rows == 2
    assert kept.dropped_tokens == 100 + 50 + 40
    assert bfd_split(lengths, 50).kept_without_loss == 1


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=30),
    max_length=st.none() | st.integers(1, 30),
    mode=st.sampled_from(["keep_start", "keep_end"]),
)
def test_padding_keeps_the_rows_that_trl_keeps(rows: list[tuple[int, int]], max_length: int | None, mode: Any) -> None:
    lengths = lengths_of([length for length, _ in rows], prompt=[start for _, start in rows])
    dataset = dataset_of(lengths)
    kept = truncate(lengths, max_length, mode)
    by_trl = prepared_by_trl(dataset, max_length, mode)
    assert list(kept.tokens) == [len(ids) for ids in by_trl["input_ids"]]
    assert list(kept.row_numbers) == [ids[0] for ids in by_trl["input_ids"]]
    assert list(kept.loss_tokens) == [sum(label != -100 for label in row) for row in by_trl["labels"]]


def prepared_by_trl(dataset: datasets.Dataset, max_length: int | None, mode: str) -> dict[str, Any]:
    from types import SimpleNamespace

    arguments = SimpleNamespace(
        dataset_num_proc=None, max_length=max_length, truncation_mode=mode, shuffle_dataset=False
    )
    stand_in = SimpleNamespace(completion_only_loss=False)
    prepared = trl.SFTTrainer._prepare_dataset(stand_in, dataset, None, arguments, False, None, "train")
    columns: dict[str, Any] = prepared[:]
    return columns


def test_padded_positions_are_the_mean_over_random_orders() -> None:
    kept = truncate(lengths_of(tiny.lengths(203, seed=3)), 256)
    figures = padded(kept, 8)
    passes = [padded(kept, 8, order=random_order(203, seed)).computed_positions for seed in range(400)]
    assert figures.computed_positions == pytest.approx(statistics.mean(passes), rel=0.003)
    assert figures.micro_batches == 26
    assert figures.largest_positions == 8 * max(kept.tokens)
    assert figures.fill == pytest.approx(sum(kept.tokens) / figures.computed_positions, rel=1e-4)


def test_padding_to_a_multiple_rounds_every_micro_batch_up() -> None:
    kept = truncate(lengths_of([3, 9, 17]), None)
    assert padded(kept, 1, pad_to_multiple_of=8).computed_positions == 8 + 16 + 24


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_a_micro_batch_of_everything_or_of_one_row_needs_no_chance(micro_batch: int) -> None:
    kept = truncate(lengths_of([7, 7, 7]), None)
    assert padded(kept, micro_batch).computed_positions == 21
    assert padded(kept, micro_batch).fill == 1.0


@pytest.mark.parametrize("rows", [0, 1, 2, 63, 1000, 5000])
@pytest.mark.parametrize("seed", [0, 42, 2**33 + 5])
def test_random_order_is_that_of_torch(rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    assert random_order(rows, seed) == torch.randperm(rows, generator=generator).tolist()


@pytest.mark.parametrize(("median", "longest"), [(40, 400), (300, 4096)])
@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "processes"),
    [(4, 8, 1), (8, 4, 1), (2, 4, 1), (1, 8, 1), (8, 1, 1), (8, 1, 4), (2, 2, 4), (4, 2, 2)],
)
def test_rebalanced_micro_batches_are_those_of_the_real_sampler(
    median: int, longest: int, micro_batch: int, accumulation: int, processes: int
) -> None:
    kept = truncate(lengths_of(tiny.lengths(1003, seed=4, median=median, longest=longest)), None)
    figures = rebalanced(kept, micro_batch, accumulation, processes=processes)
    real = [
        (len(batch) * max(kept.tokens[place] for place in batch), len(batch))
        for rank in range(processes)
        for batch in BatchRebalanceSampler(
            list(kept.tokens),
            micro_batch * accumulation * processes,
            processes,
            accumulation,
            rank=rank,
            drop_last=False,
        )
    ]
    assert figures.computed_positions == sum(positions for positions, _ in real)
    assert figures.micro_batches == len(real)
    assert figures.largest_positions == max(real)[0]


def test_rebalancing_repeats_the_first_rows_where_the_last_step_is_too_small_for_its_groups() -> None:
    kept = truncate(lengths_of([5, 9, 7, 8, 6]), None)
    figures = rebalanced(kept, 1, 4)
    real = list(BatchRebalanceSampler([5, 9, 7, 8, 6], 4, 1, 4, drop_last=False))
    assert figures.computed_positions == sum(kept.tokens[place] for batch in real for place in batch)


def test_a_sample_of_the_rows_stands_for_the_whole_data() -> None:
    tokens = tiny.lengths(6000, seed=5)
    whole, half = lengths_of(tokens), lengths_of(tokens[::2], rows=6000)
    for pack in PACKINGS.values():
        assert pack(half, 200, num_proc=4).rows == pytest.approx(pack(whole, 200).rows, rel=0.03)
        assert not pack(half, 200).exact
    assert padded(truncate(half, 200), 8).useful_tokens == pytest.approx(sum(truncate(whole, 200).tokens), rel=0.03)


def test_shuffled_data_is_packed_in_another_order_and_marked_as_an_estimate() -> None:
    lengths = lengths_of(sorted(tiny.lengths(4000, seed=6)))
    assert bfd(lengths, 200).exact
    shuffled = bfd(lengths, 200, shuffled=True)
    assert not shuffled.exact
    assert shuffled.fill > bfd(lengths, 200).fill  # sorted data has blocks of long rows only
    assert shuffled.useful_tokens == bfd(lengths, 200).useful_tokens


def test_fifty_thousand_rows_take_less_than_half_a_second() -> None:
    lengths = lengths_of(tiny.lengths(50_000, seed=7, median=150, longest=4000))
    kept = truncate(lengths, 1024)
    calls: dict[str, Callable[[], object]] = {
        "truncate": partial(truncate, lengths, 1024),
        "padded": partial(padded, kept, 8),
        "rebalanced": partial(rebalanced, kept, 4, 8),
        **{name: partial(pack, lengths, 1024) for name, pack in PACKINGS.items()},
    }
    for name, call in calls.items():
        seconds = min(_seconds(call) for _ in range(3))
        assert seconds < 0.5, name


def _seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def test_the_report_names_every_arrangement_and_is_json() -> None:
    lengths = lengths_of([10, 20, 30, 40, 500], prompt=[0, 0, 0, 0, 0])
    report = to_builtins(lengths_report(lengths, max_length=50, micro_batch=2, accumulation=2))
    assert json.loads(json.dumps(report)) == report
    assert report["rows"] == report["rows_measured"] == 5
    assert report["tokens"] == 600
    assert report["percentiles"] == {"50": 30, "90": 500, "99": 500, "100": 500}
    assert list(report["arrangements"]) == ["padded", "rebalanced", "bfd", "bfd_split", "wrapped"]
    assert report["arrangements"]["bfd"]["dropped_tokens"] == 450
    assert report["arrangements"]["bfd_split"]["split_rows"] == 1
    assert report["arrangements"]["padded"]["rows"] == 5
    assert report["arrangements"]["padded"]["steps_per_epoch"] == 2
    assert report["histogram"][0] == {"low": 8, "high": 15, "rows": 1}
    assert sum(one["rows"] for one in report["histogram"]) == 5


def test_without_max_length_the_report_has_no_packing() -> None:
    report = to_builtins(lengths_report(lengths_of([10, 20]), max_length=None, micro_batch=8))
    assert list(report["arrangements"]) == ["padded"]
    assert report["arrangements"]["padded"]["fill"] == 0.75


def test_the_order_is_drawn_with_the_seed_of_the_data_or_else_of_the_job() -> None:
    assert sampling_seed({}) == sampling_seed({"seed": 42, "data_seed": None}) == 42
    assert sampling_seed({"seed": 7, "data_seed": None}) == 7
    assert sampling_seed({"seed": 7, "data_seed": 0}) == 0


def test_rebalancing_is_reported_where_a_step_has_several_micro_batches() -> None:
    lengths = lengths_of([10, 20, 30, 40])
    one, two = (lengths_report(lengths, max_length=None, micro_batch=2, accumulation=count) for count in (1, 2))
    assert list(one.figures) == ["padded"]
    assert list(two.figures) == ["padded", "rebalanced"]
    assert list(lengths_report(lengths, max_length=None, micro_batch=2, processes=2).figures) == [
        "padded",
        "rebalanced",
    ]


def test_padded_rows_are_reported_in_the_order_that_the_sampler_has() -> None:
    """The first pass of `torch.randperm` seeded with the job's seed, as accelerate's sampler makes it."""
    import torch

    lengths = lengths_of(list(range(5, 400, 7)))
    for seed in (42, 7):
        order = torch.randperm(len(lengths.tokens), generator=torch.Generator().manual_seed(seed)).tolist()
        batches = [[lengths.tokens[place] for place in order[start : start + 4]] for start in range(0, len(order), 4)]
        figures = lengths_report(lengths, max_length=None, micro_batch=4, seed=seed).figures["padded"]
        assert figures.computed_positions == sum(len(batch) * max(batch) for batch in batches)
        assert figures.exact
    in_order = lengths_report(lengths, max_length=None, micro_batch=4, in_order=True).figures["padded"]
    assert in_order.computed_positions == padded(truncate(lengths, None), 4, order=range(len(order))).computed_positions


@pytest.mark.skipif(not GSM8K.exists(), reason="needs the GSM8K problems beside the project")
@pytest.mark.parametrize("strategy", PACKINGS)
def test_real_problems_pack_into_as_many_rows_as_trl_makes(strategy: str, tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(tmp_path)
    problems = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    questions = [len(ids) for ids in tokenizer([problem["question"] for problem in problems])["input_ids"]]
    answers = [len(ids) for ids in tokenizer([problem["answer"] for problem in problems])["input_ids"]]
    lengths = lengths_of(
        [question + answer for question, answer in zip(questions, answers, strict=True)], prompt=questions
    )
    for max_length in (256, 1024):
        packed = packed_by_trl(lengths, max_length, strategy)
        compare_with_trl(PACKINGS[strategy](lengths, max_length), lengths, packed, max_length)
