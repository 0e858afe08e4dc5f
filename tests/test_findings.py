"""What the lengths mean, in words: each sentence and each warning on data that calls for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autotune.plan.findings import Findings, kept_share, length_that_keeps
from autotune.plan.histogram import Bin, histogram
from autotune.plan.lengths_report import lengths_report
from autotune.probe.lengths import Lengths


def lengths_of(tokens: Sequence[int], *, prompt: int = 0) -> Lengths:
    """Rows whose first `prompt` tokens bear no loss."""
    return Lengths(
        rows=len(tokens),
        tokens=tuple(tokens),
        first_loss=tuple(prompt if prompt < one else -1 for one in tokens),
        last_loss=tuple(one - 1 if prompt < one else -1 for one in tokens),
        loss_tokens=tuple(max(0, one - prompt) for one in tokens),
        format="text",
        columns=("text",),
        seconds=0.0,
    )


def found(
    tokens: Sequence[int], max_length: int | None, *, prompt: int = 0, position_limit: int | None = None
) -> Findings:
    return lengths_report(
        lengths_of(tokens, prompt=prompt), max_length=max_length, micro_batch=8, position_limit=position_limit
    ).findings


def warned(findings: Findings) -> list[str]:
    return [one.what for one in findings.warnings]


def test_padding_packing_and_what_max_length_keeps_are_told() -> None:
    findings = found([100] * 70 + [10] * 10, 400)
    assert findings.sentences == (
        "11% of computed positions are padding at batch 8",
        "`bfd` packs 4.4 documents per row and fills 98.6% of it",
        "`max_length` 400 cuts nothing",  # the longest row has 100, which is no news
    )
    assert findings.warnings == ()


def test_the_max_length_that_would_keep_nearly_all_is_named() -> None:
    findings = found([100] * 1000 + [2000], 64)
    assert "`max_length` 64 keeps 62.8% of tokens; 1,024 would keep 99.0%" in findings.sentences
    findings = found([100] * 1000 + [2000], 4000)
    assert "`max_length` 4,000 cuts nothing, and 1,024 would still keep 99% of tokens" in findings.sentences
    findings = found([100] * 100 + [70], 64)
    assert "`max_length` 64 keeps 64.2% of tokens; 100 would keep all" in findings.sentences
    findings = found([100] * 2000 + [1100], 64)
    assert "`max_length` 64 keeps 63.7% of tokens; 128 would keep 99.5%" in findings.sentences


def test_a_share_that_is_not_all_never_reads_as_all() -> None:
    findings = found([100] * 100_000 + [101], 100)
    assert findings.sentences[-1] == "`max_length` 100 keeps 99.9% of tokens; 101 would still keep all"


def test_the_share_that_bears_loss_is_told() -> None:
    assert found([100] * 10, 200, prompt=75).sentences[-1] == "25% of the tokens bear loss"


def test_what_padding_keeps_is_told_beside_what_max_length_cuts_where_rows_are_dropped_whole() -> None:
    findings = found([300] * 40 + [100] * 60, 200, prompt=80)
    assert not [one for one in findings.sentences if one.startswith("of padded rows")]
    findings = found([300] * 40 + [100] * 60, 90, prompt=95)
    assert "`max_length` 90 keeps 50.0% of tokens; 300 would keep all" in findings.sentences
    assert "of padded rows 0.0% of tokens are left, since those without a loss token are dropped whole" in (
        findings.sentences
    )


def test_packing_that_packs_nothing_is_warned_of() -> None:
    findings = found([60] * 100, 64)
    assert warned(findings) == ["packing would pack nothing: 100 documents fill 100 rows of 64"]


def test_one_row_is_no_reason_to_warn_of_packing() -> None:
    assert warned(found([60], 64)) == []


def test_most_tokens_dropped_is_warned_of_with_the_length_that_would_keep_them() -> None:
    findings = found([1000] * 50, 100)
    assert warned(findings)[-1] == "most tokens are dropped: `max_length` 100 keeps 10%"
    assert findings.warnings[-1].hint == "`max_length: 1000` would keep all"


def test_rows_that_lose_all_their_loss_tokens_are_counted() -> None:
    findings = found([300] * 40 + [100] * 60, 200, prompt=250)
    assert "100 of 100 rows lose all their loss tokens at `max_length` 200, and TRL drops them" in warned(findings)


def test_rows_beyond_the_models_positions_are_warned_of() -> None:
    findings = found([3000] * 10 + [10] * 90, None, position_limit=2048)
    assert warned(findings) == ["rows of 3,000 tokens are longer than the 2,048 positions the model was made for"]
    assert warned(found([3000] * 10 + [10] * 90, 2048, position_limit=2048)) == []


@pytest.mark.parametrize("tokens", [[], [0], [0, 0, 5], [1]])
def test_empty_and_tiny_data_have_findings_too(tokens: list[int]) -> None:
    assert found(tokens, 16).sentences[0].endswith("of computed positions are padding at batch 8")


def test_the_histogram_doubles_its_bins_and_leaves_none_out() -> None:
    assert histogram([0, 1, 2, 3, 9]) == (Bin(0, 0, 1), Bin(1, 1, 1), Bin(2, 3, 2), Bin(4, 7, 0), Bin(8, 15, 1))
    assert histogram([]) == ()


def test_what_a_max_length_keeps_is_the_truth() -> None:
    lengths = lengths_of([10, 20, 30])
    assert kept_share(lengths, 20) == 50 / 60
    assert kept_share(lengths, 30) == 1.0
    assert length_that_keeps(lengths) == 30
