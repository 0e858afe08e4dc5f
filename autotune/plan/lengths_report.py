"""What `lengths --json` prints and `lengths.json` in the run folder holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autotune.plan.figures import Arrangement, Figures, weight_of
from autotune.plan.findings import LENGTHS, Findings, find, kept_share
from autotune.plan.histogram import histogram
from autotune.plan.order import random_order
from autotune.plan.packing import bfd, bfd_split, wrapped
from autotune.plan.padding import Kept, TruncationMode, padded, truncate
from autotune.plan.prompts import generation_of, padded_prompts, sentences, steps_per_epoch, warnings
from autotune.plan.rebalance import rebalanced
from autotune.plan.sequence_findings import find_in_sequences
from autotune.plan.sequences import padded_sequences, sequences_of
from autotune.probe.formats import ONLINE
from autotune.probe.lengths import Lengths

SEED = 42  # transformers' default
PERCENTILES = (50, 90, 99, 100)


class LengthsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The data's lengths and every arrangement of them, for one `max_length` and batch."""

    lengths: Lengths
    max_length: int | None
    micro_batch: int
    accumulation: int
    processes: int
    kept: Kept
    figures: dict[Arrangement, Figures]
    findings: Findings
    steps: int | None = None  # of an epoch, where they do not follow from rows and batch

    def steps_per_epoch(self, figures: Figures) -> int:
        """Optimizer steps of one pass over the data; the last may hold fewer rows."""
        if self.steps is not None:
            return self.steps
        return -(-figures.rows // (self.micro_batch * self.accumulation * self.processes))


def lengths_report(
    lengths: Lengths,
    *,
    max_length: int | None,
    micro_batch: int,
    accumulation: int = 1,
    truncation_mode: TruncationMode = "keep_start",
    num_proc: int | None = None,
    shuffled: bool = False,
    processes: int = 1,
    position_limit: int | None = None,
    seed: int = SEED,
    in_order: bool = False,
) -> LengthsReport:
    """Plan every arrangement, of padded rows the batches of the first pass: `in_order` as the rows come, else as
    `seed` shuffles them.

    Without `max_length` nothing can be packed, and packing is left out; with one micro-batch a step there is nothing
    to rebalance.
    """
    kept = truncate(lengths, max_length, truncation_mode)
    rows = len(kept.tokens)
    order = range(rows) if in_order else random_order(rows, seed)
    arrangements = [padded(kept, micro_batch, order=order)]
    if accumulation * processes > 1:
        arrangements.append(rebalanced(kept, micro_batch, accumulation, processes=processes))
    if shuffled:  # the data itself, before all that
        arrangements = [msgspec.structs.replace(one, exact=False) for one in arrangements]
    if max_length is not None:
        arrangements += [
            pack(lengths, max_length, micro_batch=micro_batch, num_proc=num_proc, shuffled=shuffled)
            for pack in (bfd, bfd_split, wrapped)
        ]
    figures: dict[Arrangement, Figures] = {one.arrangement: one for one in arrangements}
    return LengthsReport(
        lengths=lengths,
        max_length=max_length,
        micro_batch=micro_batch,
        accumulation=accumulation,
        processes=processes,
        kept=kept,
        figures=figures,
        findings=find(
            lengths,
            figures,
            kept,
            max_length=max_length,
            micro_batch=micro_batch,
            position_limit=position_limit,
        ),
    )


def job_report(
    lengths: Lengths, resolved: Mapping[str, Any], *, position_limit: int | None = None, processes: int = 1
) -> LengthsReport:
    """The report of a job of any method, from its options as TRL's parser made them."""
    if lengths.method in ONLINE:
        return _prompts_report(lengths, resolved, position_limit=position_limit, processes=processes)
    if lengths.method != "sft":
        return _sequences_report(lengths, resolved, position_limit=position_limit, processes=processes)
    return lengths_report(
        lengths,
        max_length=resolved["max_length"],
        micro_batch=resolved["per_device_train_batch_size"],
        accumulation=resolved["gradient_accumulation_steps"],
        truncation_mode=resolved["truncation_mode"],
        num_proc=resolved.get("dataset_num_proc"),
        shuffled=bool(resolved.get("shuffle_dataset")),
        processes=processes,
        position_limit=position_limit,
        seed=sampling_seed(resolved),
        in_order=resolved.get("train_sampling_strategy") == "sequential",
    )


def sampling_seed(resolved: Mapping[str, Any]) -> int:
    """What the order of the rows is drawn with: accelerate takes `data_seed`, and without one what `seed` has seeded
    torch with (1.15, `SeedableRandomSampler`)."""
    given = resolved.get("seed") if resolved.get("data_seed") is None else resolved["data_seed"]
    return SEED if given is None else int(given)


def _sequences_report(
    lengths: Lengths, resolved: Mapping[str, Any], *, position_limit: int | None, processes: int
) -> LengthsReport:
    max_length, micro_batch = resolved["max_length"], resolved["per_device_train_batch_size"]
    data = sequences_of(
        lengths,
        max_length,
        truncation_mode=resolved.get("truncation_mode", "keep_start"),
        micro_batch=micro_batch,
        # TRL 1.16, `KTOTrainer.__init__`: of all losses only this one has no KL term
        estimates_kl=lengths.method == "kto" and resolved["loss_type"] != "apo_zero_unpaired",
    )
    figures = padded_sequences(
        data,
        micro_batch,
        in_order=resolved.get("train_sampling_strategy") == "sequential",
        pad_to_multiple_of=resolved.get("pad_to_multiple_of") or 1,
    )
    return LengthsReport(
        lengths=lengths,
        max_length=max_length,
        micro_batch=micro_batch,
        accumulation=resolved["gradient_accumulation_steps"],
        processes=processes,
        kept=data.kept,
        figures={"padded": figures},
        findings=find_in_sequences(
            lengths, data, figures, max_length=max_length, micro_batch=micro_batch, position_limit=position_limit
        ),
    )


def _prompts_report(
    lengths: Lengths, resolved: Mapping[str, Any], *, position_limit: int | None, processes: int
) -> LengthsReport:
    generation = generation_of(lengths.method, resolved, processes=processes)
    figures = padded_prompts(lengths, generation, pad_to_multiple_of=resolved.get("pad_to_multiple_of") or 1)
    return LengthsReport(
        lengths=lengths,
        max_length=generation.total,
        micro_batch=resolved["per_device_train_batch_size"],
        accumulation=resolved["gradient_accumulation_steps"],
        processes=processes,
        kept=Kept(
            row_numbers=tuple(lengths.row_numbers or range(len(lengths.tokens))),
            tokens=lengths.tokens,
            loss_tokens=(0,) * len(lengths.tokens),
            dropped_tokens=0,
            dropped_rows=0,
            weight=weight_of(lengths),
        ),
        figures={"padded": figures},
        findings=Findings(
            sentences=tuple(sentences(lengths, figures, generation)),
            warnings=tuple(warnings(lengths, generation, position_limit)),
        ),
        steps=steps_per_epoch(lengths.method, resolved, lengths.rows, processes=processes),
    )


def sequence_tokens(lengths: Lengths) -> dict[str, Sequence[int]]:
    """Token lengths of what a row holds, by what it is called, before truncation."""
    prompt = lengths.prompt_tokens
    match lengths.method:
        case "sft":
            return {"row": lengths.tokens}
        case "dpo":
            return {
                "prompt": prompt,
                "prompt and chosen": tuple(map(sum, zip(prompt, lengths.chosen_tokens, strict=True))),
                "prompt and rejected": tuple(map(sum, zip(prompt, lengths.rejected_tokens, strict=True))),
            }
        case "reward":
            return {"chosen": lengths.chosen_tokens, "rejected": lengths.rejected_tokens}
        case "kto":
            return {"prompt": prompt, "prompt and completion": lengths.tokens}
        case _:
            return {"prompt": lengths.tokens}


def sequences_counted(lengths: Lengths) -> Sequence[int]:
    """The lengths that the histogram counts: of whole rows, of both sequences of each pair, or of prompts."""
    by_name = sequence_tokens(lengths)
    if lengths.method in ("dpo", "reward"):
        return tuple(itertools.chain(*list(by_name.values())[-2:]))
    return lengths.tokens


def to_builtins(report: LengthsReport) -> dict[str, Any]:
    """The report as JSON values (schema 1)."""
    lengths = report.lengths
    weight = weight_of(lengths)
    told: dict[str, Any] = {
        "schema": 1,
        "rows": lengths.rows,
        "rows_measured": lengths.rows_measured,
        "rows_known": lengths.rows_known,
        "format": lengths.format,
        "tokens": round(sum(lengths.tokens) * weight),
        "percentiles": percentiles(lengths),
        "histogram": [
            {"low": one.low, "high": one.high, "rows": round(one.rows * weight)}
            for one in histogram(sequences_counted(lengths))
        ],
        "max_length": report.max_length,
        "arrangements": {name: _described(report, figures) for name, figures in report.figures.items()},
        "findings": list(report.findings.sentences),
        "warnings": [msgspec.to_builtins(one) for one in report.findings.warnings],
    }
    if lengths.method == "sft":
        shorter = [one for one in LENGTHS if one < max(lengths.tokens, default=0)]
        told["loss_tokens"] = round(sum(lengths.loss_tokens) * weight)
        told["keeps"] = {str(one): round(kept_share(lengths, one), 4) for one in shorter}
    else:
        told["method"] = lengths.method
        told["sequences"] = {name: percentiles_of(tokens) for name, tokens in sequence_tokens(lengths).items()}
    return told


def percentiles(lengths: Lengths) -> dict[str, int]:
    """Lengths before truncation that 50, 90, 99 and 100 % of the rows do not exceed; empty for no rows."""
    return percentiles_of(lengths.tokens)


def percentiles_of(tokens: Sequence[int]) -> dict[str, int]:
    """As `percentiles`, of any lengths."""
    ascending = sorted(tokens)
    if not ascending:
        return {}
    return {str(percent): ascending[-(-percent * len(ascending) // 100) - 1] for percent in PERCENTILES}


def _described(report: LengthsReport, figures: Figures) -> dict[str, Any]:
    return {
        "rows": figures.rows,
        "micro_batches": figures.micro_batches,
        "steps_per_epoch": report.steps_per_epoch(figures),
        "fill": round(figures.fill, 4),
        "useful_tokens": figures.useful_tokens,
        "loss_tokens": figures.loss_tokens,
        "dropped_tokens": figures.dropped_tokens,
        "dropped_rows": figures.dropped_rows,
        "split_rows": figures.split_rows,
        "kept_without_loss": figures.kept_without_loss,
        "largest_micro_batch": {"rows": figures.largest_rows, "positions": figures.largest_positions},
        "exact": figures.exact,
    }
