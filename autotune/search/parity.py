"""Does the winner compute what the user's own settings compute?

Judged by the loss of the first optimizer step, over the same documents and before any update could drift. An
arrangement of the same maths is judged in float32, where no rounding hides a mistake. Kernels and precision are judged
against what rounding does to the user's own settings: how far the same step moves when only its batch is split
otherwise, and when it is computed in float32. The first alone would be too little: on a tiny model in bf16 it was 2e-6,
and eager attention in place of sdpa, which rounds inside the softmax too, moved the loss by 2e-5.
"""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.plan.space import Arrangement, Candidate
from autotune.search.checking import Checking
from autotune.search.gates import Gate
from autotune.search.setting import Setting
from autotune.trial.result import TrialResult

# In float32 another split of the batch moves a loss by some 1e-6; under bf16 autocast by some 4e-5 on a tiny model.
SAME = 1e-5
# Of the spread that was measured: few runs show it, and another kernel may round in more places than they do
SPREADS = 10
ROUNDED = 5e-3  # where less precision was allowed, or the spread could not be measured
KERNELS = ("attention", "layer_kernels", "torch_compile", "dtype", "tf32")
RUN_IN_FLOAT32 = ("sdpa", "eager", "flex_attention")  # kernels of the flash kind take half precision only


def seconds_reserved(setting: Setting, result: TrialResult) -> float:
    """What the search leaves of its budget for these trials: in half precision two in float32 and two for the spread,
    of one step each; in float32 the confirmation's own losses are enough nearly always."""
    if not _in_half(setting) or not result.passes:
        return 0.0
    a_step = result.passes[0].seconds / result.passes[0].steps
    return 4 * ((result.startup_seconds or 1.0) + a_step)


def parity(winner: Candidate, result: TrialResult, reference: TrialResult, checking: Checking) -> list[Gate]:
    """Gates of the winner's arithmetic against the baseline's `reference`; those of packed documents among themselves
    are not here (`gates.documents_stay_apart`)."""
    setting = checking.setting
    base = setting.space.baseline
    kernels = {name: getattr(winner, name) for name in KERNELS if getattr(winner, name) != getattr(base, name)}
    theirs = _first(reference)
    if setting.space.axis("arrangement").choice(winner.arrangement).grade != "exact":
        if not kernels or theirs is None:
            return []
        alone = msgspec.structs.replace(base, **kernels)
        mine = checking.first_loss(alone, reason="the winner's kernels on your own batch")
        if mine is None:  # the checks of packed documents have used these kernels
            detail = "not judged on your own batch: no time was left, or the kernels do not run on it"
            return [Gate("rounding", True, detail)]
        return [_rounding(winner, mine, theirs, checking)]
    mine = _first(result)
    if mine is None or theirs is None:
        return [Gate("parity", False, "a loss is not a number")]
    apart = abs(mine - theirs)
    same = Gate("parity", apart <= SAME, f"first-step losses {apart:.1e} apart, at most {SAME:.0e}", apart)
    if same.passed or not (kernels or _in_half(setting)):
        return [same]
    return [*_in_float32(winner, checking), _rounding(winner, mine, theirs, checking)]


def _in_float32(winner: Candidate, checking: Checking) -> list[Gate]:
    """The arrangement alone, both sides in float32; none where it is the baseline's. Where it cannot be judged so, that
    is said."""
    base = checking.setting.space.baseline
    if winner.arrangement == base.arrangement:
        return []
    theirs = _float32_loss(base, checking, reason="yours in float32")
    rearranged = msgspec.structs.replace(base, arrangement=winner.arrangement)
    mine = _float32_loss(rearranged, checking, reason="the winner's arrangement in float32")
    if mine is None or theirs is None:
        return [Gate("parity", True, "not judged in float32: no time was left, or it does not run so here")]
    apart = abs(mine - theirs)
    return [Gate("parity", apart <= SAME, f"in float32 first-step losses {apart:.1e} apart, at most {SAME:.0e}", apart)]


def _float32_loss(candidate: Candidate, checking: Checking, *, reason: str) -> float | None:
    options: dict[str, Any] = {"bf16": False, "fp16": False, "tf32": None, "torch_compile": False, "dtype": "float32"}
    if candidate.attention not in RUN_IN_FLOAT32:
        options["attn_implementation"] = "sdpa"
    return checking.first_loss(candidate, reason=reason, options=options)


def _rounding(winner: Candidate, mine: float, theirs: float, checking: Checking) -> Gate:
    """Whether the difference of two losses is one of rounding."""
    apart = abs(mine - theirs)
    space = checking.setting.space
    told = f"first-step losses {apart:.1e} apart"
    if any(
        axis.choice(getattr(winner, axis.name)).grade == "rounded"
        for axis in space.axes
        if axis.name in ("dtype", "tf32")
    ):
        return Gate("rounding", apart <= ROUNDED, f"{told}, at most {ROUNDED:.0e} in the precision you allowed", apart)
    if apart <= SAME:
        return Gate("rounding", True, f"{told}, at most {SAME:.0e}", apart)
    spread = _spread(theirs, checking)
    if spread is None:
        known = "how far yours moves by rounding could not be measured"
        return Gate("rounding", apart <= ROUNDED, f"{told}, at most {ROUNDED:.0e}: {known}", apart)
    limit = max(SAME, SPREADS * spread)
    return Gate(
        "rounding",
        apart <= limit,
        f"{told}, at most {limit:.0e}: {SPREADS} times what rounding moves your own, {spread:.1e}",
        apart,
    )


def _spread(own: float, checking: Checking) -> float | None:
    """How far the loss of the baseline's first step moves from its `own` under other splits of its batch in its own
    precision, and in float32; None where none of these ran."""
    setting = checking.setting
    base = setting.space.baseline
    losses = []
    for micro_batch, accumulation in _other_splits(base.arrangement):
        options = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
        reason = f"how far rounding moves yours: split {micro_batch} x {accumulation}"
        losses.append(checking.first_loss(base, reason=reason, options=options))
    if _in_half(setting):
        losses.append(_float32_loss(base, checking, reason="how far rounding moves yours: in float32"))
    return max((abs(loss - own) for loss in losses if loss is not None), default=None)


def _other_splits(arrangement: Arrangement) -> list[tuple[int, int]]:
    """The nearest two splits that put as many rows into a step: rows per micro-batch, micro-batches."""
    rows = arrangement.micro_batch * arrangement.accumulation
    others = [count for count in range(1, rows + 1) if rows % count == 0 and count != arrangement.micro_batch]
    others.sort(key=lambda count: (abs(count - arrangement.micro_batch), count))
    return [(count, rows // count) for count in others[:2]]


def _first(result: TrialResult) -> float | None:
    return result.losses[0] if result.losses else None


def _in_half(setting: Setting) -> bool:
    resolved = setting.job.resolved
    return bool(resolved.get("bf16") or resolved.get("fp16"))
