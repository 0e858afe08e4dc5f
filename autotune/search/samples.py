"""The documents that trials train on, drawn from the data and written into the run folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autotune.plan.sample import draw_sample
from autotune.plan.space import Candidate
from autotune.probe.lengths import sample_rows
from autotune.search.setting import Setting

PASS_STEPS = 12  # optimizer steps of the baseline in one pass over the sample
FEWEST_ROWS = 96  # below this the sample's packing is too far from the data's
MEMORY_STEPS = 3


class Sample(msgspec.Struct, frozen=True):
    """What every arm passes over: a Parquet file of rows, and the baseline's optimizer steps in one pass.

    `row_numbers` are those of the rows in the data, from 0.
    """

    path: Path
    rows: int
    steps: int
    row_numbers: tuple[int, ...] = ()


def first_pass_steps(setting: Setting) -> int:
    """Steps of a pass as long as would be good, or as there are documents."""
    arrangement = setting.space.baseline.arrangement
    rows_a_step = arrangement.micro_batch * arrangement.accumulation
    available = len(setting.data.kept.tokens) // rows_a_step
    wanted = max(PASS_STEPS, -(-FEWEST_ROWS // rows_a_step))
    return max(1, min(wanted, available))


def draw(setting: Setting, steps: int) -> Sample:
    """Documents for so many optimizer steps of the baseline, with the lengths of the whole data."""
    arrangement = setting.space.baseline.arrangement
    data = setting.data
    documents_a_step = arrangement.micro_batch * arrangement.accumulation
    if arrangement.packed:
        figures = data.figures(arrangement)
        documents_a_step = max(1, round(documents_a_step * len(data.kept.tokens) * data.kept.weight / figures.rows))
    rows = draw_sample(
        data.kept,
        rows=min(len(data.kept.tokens), steps * documents_a_step),
        seed=_sampling_seed(setting),
        micro_batch=1 if arrangement.packed else arrangement.micro_batch,
        effective_batch=documents_a_step,
    )
    path = setting.folder / f"sample-{len(rows)}.parquet"
    _write(setting, rows, path)
    return Sample(path, len(rows), max(1, len(rows) // documents_a_step), tuple(rows))


def draw_longest(setting: Setting, candidate: Candidate) -> Sample:
    """The longest documents of the data, enough for three steps of the candidate and of the baseline."""
    kept = setting.data.kept
    arrangements = (candidate.arrangement, setting.space.baseline.arrangement)
    rows = MEMORY_STEPS * max(one.micro_batch * one.accumulation for one in arrangements)
    longest = sorted(range(len(kept.tokens)), key=lambda place: -kept.tokens[place])[:rows]
    path = setting.folder / f"longest-{len(longest)}.parquet"
    numbers = tuple(kept.row_numbers[place] for place in longest)
    _write(setting, numbers, path)
    return Sample(path, len(longest), MEMORY_STEPS, numbers)


def _write(setting: Setting, rows: tuple[int, ...], path: Path) -> None:
    if not path.exists():
        sample_rows(setting.job.resolved, rows, path, folder=setting.job_folder, children=setting.children)


def _sampling_seed(setting: Setting) -> int:
    resolved = setting.job.resolved
    seed = resolved.get("data_seed")
    return int(seed if seed is not None else resolved["seed"])
