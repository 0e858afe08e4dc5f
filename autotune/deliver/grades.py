"""What a grade means to the reader, wherever a setting of that grade is shown."""

from __future__ import annotations

from autotune.plan.space import Candidate, Grade, Space

# What the checks are told under, and what a result of that grade is called
HEADINGS: dict[Grade, str] = {"rounded": "The same training, in lower precision", "changed": "Not the same training"}
RESULTS = {"rounded": "in lower precision", "changed": "and another training"}


def heading(grade: Grade) -> str:
    """Over the checks of a winner."""
    return HEADINGS.get(grade, "Still the same training")


def label(grade: Grade) -> str:
    """Before a choice's reason, where `changed` alone would read as "this line was changed"."""
    return "changes what is learnt" if grade == "changed" else grade


def differences(space: Space, candidate: Candidate) -> list[str]:
    """What is not as in the user's own training, one sentence for each choice; none for the grades offered unasked."""
    said = []
    for axis in space.axes:
        choice = axis.choice(getattr(candidate, axis.name))
        if choice.grade in HEADINGS and choice is not axis.choices[0]:
            said.append(f"{label(choice.grade)}: {choice.reason}")
    if space.grade(candidate) == "changed" and not any(one.startswith(label("changed")) for one in said):
        said.append(f"{label('changed')}: {candidate.attention} lets the documents of a packed row see each other")
    return said
