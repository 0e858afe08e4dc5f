"""What a search knows of memory: the model of it, what trials told, and which candidates there is room for."""

from __future__ import annotations

import msgspec

from autotune.plan.activations import MicroBatch
from autotune.plan.data import Data
from autotune.plan.memory import MemoryEstimate, MemoryModel, largest_micro_batch
from autotune.plan.memory_room import Room, free_bytes_of, room
from autotune.plan.space import Candidate
from autotune.probe.lengths import Lengths
from autotune.search.samples import Sample
from autotune.search.setting import Setting
from autotune.trial.result import TrialResult


class MemoryUse:
    """Estimates of one search, brought to the peaks of the trials that have ended."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._model = MemoryModel(setting.data, setting.model, setting.job, setting.machine)
        self._free_bytes = free_bytes_of(setting.machine, setting.memory_limit_bytes)
        self._sample: Sample | None = None
        self._sampled: Data | None = None

    def tell(self, result: TrialResult, sample: Sample) -> None:
        """A trial has ended. One that was cut short, or failed in another way, may not have come to its peak."""
        if result.peak_bytes is None or result.outcome not in ("ok", "oom"):
            return
        self._model.tell(
            result.candidate,
            result.peak_bytes,
            micro_batch=self._largest_of(result.candidate, sample),
            out_of_memory=result.outcome == "oom",
        )

    def estimate(self, candidate: Candidate) -> MemoryEstimate:
        """Bytes the candidate needs on the whole data."""
        return self._model.estimate(candidate)

    def room(self, candidate: Candidate) -> Room:
        """Whether there is memory for the candidate on the whole data."""
        return room(self.estimate(candidate), self._free_bytes)

    def _largest_of(self, candidate: Candidate, sample: Sample) -> MicroBatch:
        setting = self._setting
        if self._sampled is None or sample != self._sample:
            lengths = _rows_of(setting.data.lengths, sample.row_numbers)
            self._sample, self._sampled = sample, Data(setting.job, lengths, setting.model)
        return largest_micro_batch(candidate, self._sampled, setting.machine)


def _rows_of(lengths: Lengths, numbers: tuple[int, ...]) -> Lengths:
    """The lengths of these rows of the data alone."""
    at = {number: place for place, number in enumerate(lengths.row_numbers)}
    places = [at.get(number, number) for number in numbers]
    return msgspec.structs.replace(
        lengths,
        rows=len(places),
        row_numbers=(),
        tokens=tuple(lengths.tokens[place] for place in places),
        first_loss=tuple(lengths.first_loss[place] for place in places),
        last_loss=tuple(lengths.last_loss[place] for place in places),
        loss_tokens=tuple(lengths.loss_tokens[place] for place in places),
    )
