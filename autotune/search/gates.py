"""Is the winner still the same training? Each check gives a figure, and a winner that fails one is dropped."""

from __future__ import annotations

import msgspec

from autotune.children import ChildError
from autotune.kernel_revision import LOCAL
from autotune.plan.space import Candidate
from autotune.search.checking import Checking
from autotune.search.failures import describe_failure
from autotune.search.setting import Setting
from autotune.trial.result import TrialResult

# float32 logits of a document whose neighbour was exchanged; a mask that leaks moves them by 1e-1 and more
LEAKAGE = {"float32": 1e-5, "half": 1e-1}
PARITY = {"float32": 1e-5, "half": 1e-2}
DEADLINE_SECONDS = 600.0
FINITE_STEPS = 20
HEADROOM = 0.02  # of the free memory: beyond it, what else a training does (an evaluation, a checkpoint) finds no room


class Gate(msgspec.Struct, frozen=True):
    """One check. `value` is its figure where it has one."""

    name: str
    passed: bool
    detail: str
    value: float | None = None


def stays_finite(result: TrialResult, checking: Checking, *, scaled: bool) -> Gate:
    """Loss and gradient norm of `FINITE_STEPS` optimizer steps in a row, the last ones, are finite numbers; where the
    trial had fewer, another goes on for as many while there is time.

    With `scaled` gradients (fp16) the first steps may overflow: the scaler skips them and takes a smaller scale.
    """
    if _finite_so_far(result, scaled=scaled) and result.steps < FINITE_STEPS:
        reason = f"{FINITE_STEPS} steps: do loss and gradients stay finite"
        longer = checking.run(result.candidate, FINITE_STEPS, reason=reason)
        if longer is None:
            detail = f"loss and gradient norm, in all of {result.steps} steps: no time was left for {FINITE_STEPS}"
            return Gate("finite", True, detail, result.finite_in_a_row)
        if longer.outcome != "ok":
            return Gate("finite", False, f"it did not run for {FINITE_STEPS} steps: {describe_failure(longer)}")
        result = longer
    enough = _finite_so_far(result, scaled=scaled) and result.finite_in_a_row >= min(FINITE_STEPS, result.steps)
    if result.finite_in_a_row == result.steps:
        detail = f"loss and gradient norm, in all of {result.steps} steps"
    elif result.finite_steps < result.steps:
        detail = f"the loss in {result.finite_steps} of {result.steps} steps only"
    else:
        detail = f"loss and gradient norm, in the last {result.finite_in_a_row} of {result.steps} steps"
    return Gate("finite", enough, detail, result.finite_in_a_row)


def _finite_so_far(result: TrialResult, *, scaled: bool) -> bool:
    losses = 0 < result.steps == result.finite_steps
    return losses and (scaled or result.finite_in_a_row == result.steps)


def ran_as_asked(result: TrialResult, reference: TrialResult | None, baseline: Candidate) -> Gate:
    """The attention implementation that ran is the one that was asked for: no fall-back is credited.

    Where the job's own name for it stands for another, as `flash_attention_2` does without its package, the baseline
    ran that other one, and so must the candidate.
    """
    actual, asked = result.actual_attention, result.candidate.attention
    at = _revision(result)
    if actual == asked:
        return Gate("kernel", True, f"{asked} ran as asked{at}")
    as_yours = reference is not None and asked == baseline.attention and actual == reference.actual_attention
    if as_yours:
        return Gate("kernel", True, f"{asked} ran as {actual}, as yours does{at}")
    return Gate("kernel", False, f"asked for {asked}, and {actual} ran{at}")


def _revision(result: TrialResult) -> str:
    """In words, which revision of a hub kernel ran; empty where none did."""
    if result.kernel_revision is None:
        return ""
    return ", from a folder here" if result.kernel_revision == LOCAL else f", revision {result.kernel_revision[:12]}"


def documents_stay_apart(setting: Setting, candidate: Candidate) -> list[Gate]:
    """For packed rows: leakage between documents and parity of their loss, with this model and attention."""
    resolved = setting.job.resolved
    try:
        found = setting.children.call(
            "autotune.trial.document_check:check",
            {
                "model": resolved["model_name_or_path"],
                "revision": resolved.get("model_revision"),
                "trust_remote_code": bool(resolved.get("trust_remote_code")),
                "attention": candidate.attention,
            },
            deadline_seconds=DEADLINE_SECONDS,
            working_folder=setting.job_folder,
        )
    except ChildError as error:
        return [Gate("leakage", False, f"could not be checked: {error.what}")]
    kind = "float32" if found["dtype"] == "float32" else "half"
    leakage, parity = found["leakage"], found["parity"]
    return [
        Gate(
            "leakage",
            leakage <= LEAKAGE[kind],
            f"exchanging a document moves its neighbour's logits by {leakage:.1e}, at most {LEAKAGE[kind]:.0e}",
            leakage,
        ),
        Gate(
            "parity",
            parity <= PARITY[kind],
            f"the loss of packed documents is {parity:.1e} from theirs alone, at most {PARITY[kind]:.0e}",
            parity,
        ),
    ]


def holds_longest_rows(worst: TrialResult, free_bytes: int | None) -> Gate:
    """Three steps on the longest rows ran, and left some of the memory that is free. The figure is the share left."""
    if worst.outcome != "ok":
        return Gate("longest rows", False, describe_failure(worst))
    held = f"{(worst.peak_bytes or 0) / 1e9:.1f} GB at most"
    if worst.peak_bytes is None or not free_bytes:
        return Gate("longest rows", True, held)
    headroom = 1 - worst.peak_bytes / free_bytes
    told = f"{held} of {free_bytes / 1e9:.1f} GB that are free: {max(0.0, headroom):.0%} left"
    return Gate("longest rows", headroom >= HEADROOM, told, headroom)
