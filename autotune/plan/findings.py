"""What follows from the lengths of the data, in sentences, and what is likely to be a mistake."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from autotune.plan.figures import Arrangement, Figures
from autotune.plan.padding import Kept
from autotune.probe.facts import Problem
from autotune.probe.lengths import Lengths

KEEP = 0.99  # of the tokens: the `max_length` that is named keeps this much
LENGTHS = tuple(2**power for power in range(6, 18))  # 64 to 131,072, what people set `max_length` to
PACKS_NOTHING = 1.1  # documents per row, below which packing is not worth its name
MOST_DROPPED = 0.5  # of the tokens
FEW_BEAR_LOSS = 0.1  # of the rows lose all their loss tokens


class Findings(msgspec.Struct, frozen=True):
    """Sentences without a full stop, and likely mistakes."""

    sentences: tuple[str, ...]
    warnings: tuple[Problem, ...]


def kept_share(lengths: Lengths, max_length: int) -> float:
    """The share of the data's tokens that a `max_length` keeps."""
    total = sum(lengths.tokens)
    return sum(map(min, lengths.tokens, itertools.repeat(max_length))) / total if total else 1.0


def length_that_keeps(lengths: Lengths, share: float = KEEP) -> int:
    """The shortest `max_length` of those people set that keeps this share of the tokens; the longest row's length
    where none does."""
    longest = max(lengths.tokens, default=0)
    enough = (one for one in LENGTHS if one < longest and kept_share(lengths, one) >= share)
    return next(enough, longest)


def find(
    lengths: Lengths,
    figures: dict[Arrangement, Figures],
    kept: Kept,
    *,
    max_length: int | None,
    micro_batch: int,
    position_limit: int | None,
) -> Findings:
    """Say what the lengths mean for a job.

    `figures` are those of its arrangements by name, `position_limit` the model's `max_position_embeddings`.
    """
    return Findings(
        sentences=tuple(_sentences(lengths, figures, kept, max_length, micro_batch)),
        warnings=tuple(
            warnings(lengths, kept, figures.get("bfd"), max_length=max_length, position_limit=position_limit)
        ),
    )


def _sentences(
    lengths: Lengths, figures: dict[Arrangement, Figures], kept: Kept, max_length: int | None, micro_batch: int
) -> Iterator[str]:
    padded = figures["padded"]
    yield f"{1 - padded.fill:.0%} of computed positions are padding at batch {micro_batch}"
    balanced = figures.get("rebalanced")
    if balanced is not None and balanced.fill > padded.fill + 0.01:
        yield f"`batch_rebalance` brings that down to {1 - balanced.fill:.0%}"
    bfd = figures.get("bfd")
    if bfd is not None and bfd.rows and padded.rows:
        yield f"`bfd` packs {lengths.rows / bfd.rows:.1f} documents per row and fills {_percent(bfd.fill)} of it"
    if max_length is not None and lengths.tokens:
        yield _kept_sentence(lengths, max_length)
    if max_length is not None and kept.dropped_rows and sum(lengths.tokens):
        share = sum(kept.tokens) / sum(lengths.tokens)
        yield f"of padded rows {_percent(share)} of tokens are left, since those without a loss token are dropped whole"
    if padded.useful_tokens and padded.loss_tokens < padded.useful_tokens:
        which = "that are left in padded rows " if kept.dropped_tokens else ""
        yield f"{padded.loss_tokens / padded.useful_tokens:.0%} of the tokens {which}bear loss"


def _kept_sentence(lengths: Lengths, max_length: int) -> str:
    share = kept_share(lengths, max_length)
    enough = length_that_keeps(lengths)
    if share == 1.0:
        below = enough < min(max_length, max(lengths.tokens))  # the longest row's own length would keep all
        shorter = f", and {enough:,} would still keep {KEEP:.0%} of tokens" if below else ""
        return f"`max_length` {max_length:,} cuts nothing{shorter}"
    if enough == max_length:
        return f"`max_length` {max_length:,} keeps {_percent(share)} of tokens"
    other = f"{enough:,} {'would keep' if share < KEEP else 'would still keep'} {_percent(kept_share(lengths, enough))}"
    return f"`max_length` {max_length:,} keeps {_percent(share)} of tokens; {other}"


def _percent(share: float) -> str:
    """A share that is not all of it never reads as 100 %."""
    return "all" if share == 1.0 else f"{min(share, 0.999):.1%}"


def warnings(
    lengths: Lengths, kept: Kept, bfd: Figures | None, *, max_length: int | None, position_limit: int | None
) -> Iterator[Problem]:
    """What is likely to be a mistake. `bfd` are the figures of packing to `max_length`, None where there is none."""
    enough = length_that_keeps(lengths)
    total = sum(lengths.tokens)
    if bfd is not None and bfd.rows and lengths.rows > 1 and lengths.rows / bfd.rows < PACKS_NOTHING:
        yield Problem(
            what=f"packing would pack nothing: {lengths.rows:,} documents fill {bfd.rows:,} rows of {max_length:,}",
            hint="most documents fill a row of their own; leave `packing` off, or set a longer `max_length`",
        )
    if max_length is not None and total and 1 - kept_share(lengths, max_length) > MOST_DROPPED:
        yield Problem(
            what=f"most tokens are dropped: `max_length` {max_length:,} keeps {kept_share(lengths, max_length):.0%}",
            hint=f"`max_length: {enough}` would keep {_percent(kept_share(lengths, enough))}",
        )
    if kept.dropped_rows > FEW_BEAR_LOSS * max(1, lengths.rows_measured):
        rows = round(kept.dropped_rows * kept.weight)
        yield Problem(
            what=f"{rows:,} of {lengths.rows:,} rows lose all their loss tokens at `max_length` {max_length:,}, "
            "and TRL drops them",
            hint="their prompts alone fill a row; set a longer `max_length`, or shorten the prompts",
        )
    longest = min(max(lengths.tokens, default=0), max_length or max(lengths.tokens, default=0))
    if position_limit is not None and longest > position_limit:
        yield Problem(
            what=f"rows of {longest:,} tokens are longer than the {position_limit:,} positions the model was made for",
            hint=f"set `max_length: {position_limit}` or less",
        )
