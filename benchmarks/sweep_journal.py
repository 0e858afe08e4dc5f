"""What a sweep has measured so far, so that one that is stopped can go on, and what is left to do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from autotune.child import write_whole
from autotune.errors import AutotuneError
from autotune.plan.space import Candidate
from benchmarks.sweep_table import Layout, Measured

MOST_TRIES = 3  # of one measurement on a busy machine


class Entry(msgspec.Struct, frozen=True):
    """One line of the sweep's own record: a measurement, or the start of a sweep that all lines after it belong to."""

    candidate: Candidate
    repetition: int
    layout: Layout
    measured: Measured


class Journal:
    """What was measured so far, in a file of JSON lines, of which a torn last one does not count."""

    def __init__(self, path: Path, key: str, *, anew: bool) -> None:
        self._path = path
        self.entries: dict[tuple[Candidate, int], Entry] = {}
        first, *lines = path.read_bytes().split(b"\n") if path.exists() and not anew else [b""]
        if first and first.decode() != key:
            raise AutotuneError(
                f"`{path}` is of another sweep: versions, machine, data or candidates differ",
                hint="begin afresh with `--anew`",
            )
        if not first:
            write_whole(path, key.encode() + b"\n")
        for line in lines[:-1]:
            self._keep(msgspec.json.decode(line, type=Entry))
        if lines and lines[-1]:
            write_whole(path, b"\n".join([first, *lines[:-1]]) + b"\n")

    def add(self, entry: Entry) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
        self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        """Of several tries the one beside which others had least."""
        place = (entry.candidate, entry.repetition)
        known = self.entries.get(place)
        if known is None:
            self.entries[place] = entry
            return
        calmest = min(known, entry, key=lambda one: one.measured.others_cores)
        tries = known.measured.tries + 1
        self.entries[place] = msgspec.structs.replace(
            calmest, measured=msgspec.structs.replace(calmest.measured, tries=tries)
        )


def to_do(candidates: list[Candidate], journal: Journal, repetitions: int) -> Iterator[tuple[int, Candidate]]:
    """Repetition by repetition, each in an order of its own; then again what others disturbed."""
    for repetition in range(repetitions):
        order = random.Random(repetition).sample(candidates, len(candidates))
        for candidate in order:
            if (candidate, repetition) not in journal.entries:
                yield repetition, candidate
        for _ in range(MOST_TRIES - 1):
            for candidate in order:
                known = journal.entries[candidate, repetition].measured
                if known.disturbed and known.tries < MOST_TRIES:
                    yield repetition, candidate
