"""The data in any arrangement: its figures, each computed once."""

from __future__ import annotations

import msgspec

from autotune.job import Job
from autotune.plan import packing
from autotune.plan.figures import Figures
from autotune.plan.padding import Kept, padded, truncate
from autotune.plan.rebalance import rebalanced
from autotune.plan.space import Arrangement
from autotune.probe.lengths import Lengths
from autotune.probe.model import ModelShape


class Data:
    """The data's figures in any arrangement, each computed once."""

    def __init__(self, job: Job, lengths: Lengths, model: ModelShape | None = None) -> None:
        resolved = job.resolved
        self.split_matters = _split_matters(job, model)
        self.lengths = lengths
        self.max_length: int | None = resolved["max_length"]
        self.kept: Kept = truncate(lengths, self.max_length, resolved["truncation_mode"])
        self.longest = max(lengths.tokens, default=0)
        self._multiple: int = resolved.get("pad_to_multiple_of") or 1
        self._num_proc: int | None = resolved.get("dataset_num_proc")
        self._shuffled = bool(resolved.get("shuffle_dataset"))
        self._figures: dict[Arrangement, Figures] = {}

    @property
    def truncates(self) -> bool:
        """Whether the job's `max_length` cuts any document."""
        return self.max_length is not None and self.longest > self.max_length

    def figures(self, arrangement: Arrangement) -> Figures:
        """One pass over the whole data in this arrangement."""
        found = self._figures.get(arrangement)
        if found is None:
            found = self._figures[arrangement] = self._compute(arrangement)
        return found

    def packed(self, micro_batch: int, accumulation: int) -> Figures | None:
        """The figures of `bfd` in rows of the job's `max_length`; None without one."""
        if self.max_length is None:
            return None
        return self.figures(Arrangement("bfd", micro_batch, accumulation, self.max_length))

    def tokens_per_step(self, arrangement: Arrangement) -> float:
        """Mean useful tokens per optimizer step."""
        figures = self.figures(arrangement)
        return figures.useful_tokens / figures.rows * arrangement.micro_batch * arrangement.accumulation

    def _compute(self, arrangement: Arrangement) -> Figures:
        length = arrangement.row_length
        match arrangement.name:
            case "padded":
                rows = padded(self.kept, arrangement.micro_batch, pad_to_multiple_of=self._multiple)
                return _unpadded(rows) if arrangement.padding_free else rows
            case "batch_rebalance":
                rows = rebalanced(self.kept, arrangement.micro_batch, arrangement.accumulation)
                return _unpadded(rows) if arrangement.padding_free else rows
            case "bfd":
                pack = packing.bfd
            case "bfd_split":
                pack = packing.bfd_split
            case "wrapped":
                pack = packing.wrapped
        assert length is not None
        return pack(
            self.lengths,
            length,
            micro_batch=arrangement.micro_batch,
            num_proc=self._num_proc,
            shuffled=self._shuffled,
        )


def _unpadded(figures: Figures) -> Figures:
    """With `padding_free` the rows of a micro-batch are laid end to end."""
    return msgspec.structs.replace(figures, computed_positions=figures.useful_tokens, fill=1.0)


def _split_matters(job: Job, model: ModelShape | None) -> str | None:
    """Why the split of a step into micro-batches shows in its loss, or None where it is the same sum in any split."""
    resolved = job.resolved
    own = resolved.get("router_aux_loss_coef")
    if model is not None and model.router_loss is not None and (model.router_loss if own is None else own):
        return "the experts' load-balancing loss is a mean of each micro-batch"  # trl 1.16, `SFTTrainer.compute_loss`
    if resolved.get("neftune_noise_alpha"):
        return "the noise of NEFTune depends on the padded length"
    rates = [model.dropout if model is not None else 0.0]
    if resolved.get("use_peft"):
        rates.append(resolved.get("lora_dropout") or 0.0)
    return f"dropout of {max(rates):g} draws other masks" if max(rates) else None
