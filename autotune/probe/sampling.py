"""The child's side of choosing rows to measure, by how many bytes of text each has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy
    import numpy.typing
    import pyarrow

Sizes: TypeAlias = "numpy.typing.NDArray[numpy.int64]"

READ_ROWS = 10_000
BATCH_ROWS = 1_000
BATCH_BYTES = 4 * 2**20  # of text: with its tokens some 60 MB


def row_sizes(data: Any) -> Sizes:
    """Bytes of text in each row of a `datasets.Dataset`, and one for each number in its lists.

    Read off Arrow's offsets, without touching the text: 1M rows of text take 0.03 s.
    """
    import numpy

    tables = data.with_format("arrow")
    parts = [_table_bytes(tables[start : start + READ_ROWS]) for start in range(0, len(data), READ_ROWS)]
    return numpy.concatenate(parts)


def by_size(sizes: Sizes, count: int) -> Sizes:
    """Choose `count` rows that are spread evenly over the rows in order of size; their numbers, ascending.

    A row's tokens follow its bytes, so that rows next to each other in that order are nearly alike: the mean of every
    n-th of them has an interval 3 times as narrow as that of random rows, where tokens of a long tail are 3 to 5 bytes
    each, and the long tail is in it in proportion. Blocks by position would gain nothing where a file is shuffled.
    Every row has the same chance, so that each stands for the same number of rows; rows of one size are taken at
    random.
    """
    import numpy

    generator = numpy.random.default_rng(0)
    order = numpy.lexsort((generator.random(len(sizes)), sizes))
    places = ((numpy.arange(count) + generator.random()) * (len(sizes) / count)).astype(numpy.int64)
    return numpy.sort(order[places])


def batches(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Where batches of at most 1,000 rows and 4 MB of text start and end; a row that is larger is one of its own."""
    import numpy

    ends = numpy.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        end = int(numpy.searchsorted(ends, before + BATCH_BYTES, side="right"))
        end = min(max(end, start + 1), start + BATCH_ROWS, len(sizes))
        yield start, end
        start = end


def _table_bytes(table: pyarrow.Table) -> Sizes:
    return _total([_column_bytes(column) for column in table.itercolumns()], table.num_rows)


def _column_bytes(column: pyarrow.ChunkedArray) -> Sizes:
    import numpy

    return numpy.concatenate([_array_bytes(chunk) for chunk in column.chunks])


def _array_bytes(values: pyarrow.Array) -> Sizes:
    import numpy
    import pyarrow.compute

    if isinstance(values, pyarrow.ExtensionArray):
        values = values.storage
    kind = values.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        return _filled(pyarrow.compute.binary_length(values))
    if pyarrow.types.is_struct(kind):
        return _total([_array_bytes(field) for field in values.flatten()], len(values))
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        inner = values.flatten()
        ends = numpy.cumsum(_filled(values.value_lengths()))
        upto = numpy.concatenate(([0], numpy.cumsum(_item_bytes(inner))))
        return numpy.diff(upto[ends], prepend=0)
    return numpy.zeros(len(values), dtype=numpy.int64)


def _item_bytes(values: pyarrow.Array) -> Sizes:
    import numpy
    import pyarrow

    return (
        numpy.ones(len(values), dtype=numpy.int64) if pyarrow.types.is_primitive(values.type) else _array_bytes(values)
    )


def _filled(lengths: pyarrow.Array) -> Sizes:
    import numpy

    return numpy.asarray(lengths.fill_null(0).to_numpy(zero_copy_only=False), dtype=numpy.int64)


def _total(parts: Sequence[Sizes], rows: int) -> Sizes:
    import numpy

    return numpy.sum(parts, axis=0, dtype=numpy.int64) if parts else numpy.zeros(rows, dtype=numpy.int64)
