"""Planning packed rows from lengths alone, beside TRL's own packing of the same data, on one core.

    make bench-packing                       a million rows; TRL packs the first 200,000 of them
    make bench-packing ARGS="--rows 100000"

Rates are rows a second. TRL's is that of `pack_dataset` on data that is tokenised and in memory; ours is all of a
strategy's figures, the loss tokens and split documents among them. Where both make other rows it ends with an error.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import numpy
import pyarrow
import trl

from autotune.plan.packing import bfd, bfd_split, padded, truncate, wrapped
from autotune.probe.lengths import Lengths

STRATEGIES = {"bfd": bfd, "bfd_split": bfd_split, "wrapped": wrapped}


def main() -> None:
    """Print the seconds of each arrangement, and the ratio to TRL's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--packed-by-trl", type=int, default=200_000, help="rows that TRL packs")
    parser.add_argument("--max-length", type=int, default=1024)
    given = parser.parse_args()
    generator = random.Random(0)
    tokens = [max(1, min(8000, int(generator.lognormvariate(5.3, 0.9)))) for _ in range(given.rows)]
    lengths = lengths_of(tokens)

    arrangements: dict[str, Callable[[], Any]] = {
        "padded": lambda: padded(truncate(lengths, given.max_length), 8),
        **{name: partial(pack, lengths, given.max_length) for name, pack in STRATEGIES.items()},
    }
    total = 0.0
    rates: dict[str, float] = {}
    for name, plan in arrangements.items():
        spent, _ = timed(plan)
        total += spent
        rates[name] = given.rows / spent
        print(f"{name:9} {spent:6.2f} s   {rates[name]:12,.0f} rows/s", flush=True)
    print(f"all four  {total:6.2f} s for {given.rows:,} rows")
    fewer = tokens[: given.packed_by_trl]
    data = dataset_of(fewer)
    datasets.disable_progress_bars()
    datasets.disable_caching()
    for name, pack in STRATEGIES.items():
        spent, packed = timed(partial(trl.pack_dataset, data, given.max_length, name))
        ours = pack(lengths_of(fewer), given.max_length).rows
        if ours != len(packed):
            raise SystemExit(f"{name}: {ours} rows planned, and TRL made {len(packed)}")
        rate = len(fewer) / spent
        ratio = f"ours {rates[name] / rate:.0f}x, the same {ours:,} rows"
        print(f"TRL {name:9} {spent:6.2f} s   {rate:10,.0f} rows/s   {ratio}", flush=True)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of a call, and what it gave."""
    began = time.process_time()
    answer = call()
    return time.process_time() - began, answer


def lengths_of(tokens: list[int]) -> Lengths:
    """Rows of these lengths, every token of which bears loss."""
    counts = tuple(tokens)
    return Lengths(
        rows=len(counts),
        tokens=counts,
        first_loss=(0,) * len(counts),
        last_loss=tuple(one - 1 for one in counts),
        loss_tokens=tuple(one for one in counts),
        format="text",
        columns=("text",),
        seconds=0.0,
    )


def dataset_of(tokens: list[int]) -> datasets.Dataset:
    """Rows of these lengths with the columns that TRL's preparation leaves."""
    ends = numpy.concatenate(([0], numpy.cumsum(tokens))).astype("int32")
    ids = pyarrow.ListArray.from_arrays(pyarrow.array(ends), pyarrow.array(numpy.ones(ends[-1], dtype="int64")))
    return datasets.Dataset(pyarrow.table({"input_ids": ids, "labels": ids}))


if __name__ == "__main__":
    main()
