"""What the lengths of preferences mean for a job of dpo, reward or kto."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from autotune.plan.figures import Figures, weight_of
from autotune.plan.findings import Findings
from autotune.plan.sequences import Sequences
from autotune.probe.facts import Problem
from autotune.probe.lengths import Lengths


def find_in_sequences(
    lengths: Lengths,
    data: Sequences,
    padded: Figures,
    *,
    max_length: int | None,
    micro_batch: int,
    position_limit: int | None,
) -> Findings:
    """`position_limit` is the model's `max_position_embeddings`."""
    return Findings(
        sentences=tuple(_sentences(lengths, data, padded, max_length, micro_batch)),
        warnings=tuple(_warnings(lengths, data, max_length, position_limit)),
    )


def _sentences(
    lengths: Lengths, data: Sequences, padded: Figures, max_length: int | None, micro_batch: int
) -> Iterator[str]:
    if lengths.method == "kto":
        if data.mismatched:
            yield f"a micro-batch is {micro_batch} sequences, and {micro_batch} mismatched ones for the KL term"
    else:
        yield f"a micro-batch of {micro_batch} pairs is {2 * micro_batch} sequences, padded to the longest of them"
    yield f"{1 - padded.fill:.0%} of computed positions are padding at batch {micro_batch}"
    tokens = sum(lengths.tokens)
    if max_length is not None and tokens:
        share = sum(data.kept.tokens) / tokens
        kept = "cuts nothing" if share == 1.0 else f"keeps {min(share, 0.999):.1%} of tokens"
        yield f"`max_length` {max_length:,} {kept}"
    trained = sum(data.kept.tokens)
    if lengths.method != "reward" and trained:
        yield f"{sum(data.kept.loss_tokens) / trained:.0%} of the tokens are completions, which bear the loss"
    if lengths.desirable:
        desirable = sum(lengths.desirable)
        yield f"{desirable / len(lengths.desirable):.0%} of the rows are desirable"


def _warnings(
    lengths: Lengths, data: Sequences, max_length: int | None, position_limit: int | None
) -> Iterator[Problem]:
    kept = data.kept
    if kept.dropped_rows and max_length is not None:
        rows = max(1, round(kept.dropped_rows * weight_of(lengths)))
        of = f"{rows:,} of {lengths.rows:,} {'rows' if lengths.method == 'kto' else 'pairs'}"
        why = (
            f"have a sequence longer than `max_length` {max_length:,}"
            if lengths.method == "reward"
            else f"have a prompt that fills `max_length` {max_length:,}"
        )
        yield Problem(
            what=f"{of} {why}, and TRL drops them{'' if kept.tokens else ': none is left to train on'}",
            hint=f"`max_length: {_length_that_drops_none(lengths)}` would drop none",
        )
    longest = max((max(each) for each in data.sequences), default=0)
    if position_limit is not None and longest > position_limit:
        yield Problem(
            what=f"sequences of {longest:,} tokens are longer than the {position_limit:,} positions the model was "
            "made for",
            hint=f"set `max_length: {position_limit}` or less",
        )


def _length_that_drops_none(lengths: Lengths) -> int:
    if lengths.method == "reward":
        return max(itertools.chain(lengths.chosen_tokens, lengths.rejected_tokens))
    return max(lengths.prompt_tokens) + 1
