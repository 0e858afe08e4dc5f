"""Is the winner still the same training? Each check gives a figure, and a winner that fails one is dropped."""

from __future__ import annotations

import msgspec

from autotune.children import ChildError
from autotune.kernel_revision import LOCAL
from autotune.plan.space import Candidate
from autotune.search.setting import Setting
from autotune.trial.result import TrialResult

# Losses of the same documents in the same optimizer step, before any update could drift: in float32 another split
# of the batch moves them by some 1e-6, under half-precision autocast by some 1e-5 on a tiny model.
SAME_LOSS = {"float32": 1e-5, "half": 5e-3}
# float32 logits of a document whose neighbour was exchanged; a mask that leaks moves them by 1e-1 and more
LEAKAGE = {"float32": 1e-5, "half": 1e-1}
PARITY = {"float32": 1e-5, "half": 1e-2}
DEADLINE_SECONDS = 600.0


class Gate(msgspec.Struct, frozen=True):
    """One check. `value` is its figure where it has one."""

    name: str
    passed: bool
    detail: str
    value: float | None = None


def stays_finite(result: TrialResult) -> Gate:
    """Every loss the trial reported is a finite number."""
    finite = 0 < result.steps == result.finite_steps
    return Gate("finite loss", finite, f"in {result.finite_steps} of {result.steps} steps")


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


def losses_agree(setting: Setting, candidate: Candidate, result: TrialResult, reference: TrialResult) -> Gate | None:
    """Loss of the first optimizer step against the baseline's on the same documents.

    None where the arrangement puts other documents into a step; there `documents_stay_apart` is the check.
    """
    space = setting.space
    choice = space.axis("arrangement").choice(candidate.arrangement)
    if choice.grade != "exact" or not result.losses or not reference.losses:
        return None
    mine, theirs = result.losses[0], reference.losses[0]
    if mine is None or theirs is None:
        return Gate("parity", False, "a loss is not a number")
    apart = abs(mine - theirs)
    limit = SAME_LOSS["half" if _computes_rounded(setting, candidate) else _arithmetic(setting)]
    return Gate("parity", apart <= limit, f"first-step losses {apart:.1e} apart, at most {limit:.0e}", apart)


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


def _computes_rounded(setting: Setting, candidate: Candidate) -> bool:
    """Whether the user allowed less precision than the job's, and the candidate computes with it."""
    return any(
        axis.choice(getattr(candidate, axis.name)).grade == "rounded"
        for axis in setting.space.axes
        if axis.name in ("dtype", "tf32")
    )


def _arithmetic(setting: Setting) -> str:
    resolved = setting.job.resolved
    return "half" if resolved.get("bf16") or resolved.get("fp16") else "float32"
