"""When a task may stop before all its documents are answered: planned looks, each with its share of the error. Pure.

Looking several times at growing data and stopping at the first decision errs more often than each look says. So the
error α = 1 − confidence is spent over the looks: after an eighth, a quarter, a half and all of the documents, in a
random order fixed beforehand, 10, 10, 10 and 70 % of it. (Spending: Lan and DeMets, Biometrika 70, 1983, 659-663;
little early and most at the end, after O'Brien and Fleming, Biometrics 35, 1979, 549-556, rather than the same at
each look, Pocock, Biometrika 64, 1977, 191-199.) The shares add up to α and are taken as they are, Bonferroni's way:
an error at any look then has a probability of at most α, whatever the looks have in common. Each look's decision is
exact for few flips (`paired_margin`). So both hold for the whole procedure: a pass at a true drop of the margin or
more, and a fail at a true drop of the margin or less, each come with a probability of at most α.

>>> [(look.documents, round(look.confidence, 4)) for look in looks(400)]
[(50, 0.995), (100, 0.995), (200, 0.995), (400, 0.965)]
>>> decide(looks(4000)[0], lost=0, gained=0, margin=0.02)
'pass'
"""

from __future__ import annotations

import math

from pipeline.paired_margin import margin_decision
from pipeline.statistics import Decision
from pipeline.values import Value

SPENDING = ((1 / 8, 0.1), (1 / 4, 0.1), (1 / 2, 0.1), (1.0, 0.7))
"""Share of the documents at each look, and the share of α that is spent there."""


class Look(Value):
    """A planned look: the first `documents` of the order, each bound at `confidence`."""

    documents: int
    confidence: float


def looks(documents: int, *, confidence: float = 0.95) -> tuple[Look, ...]:
    """The looks at a task of so many documents; `confidence` is that of the whole procedure, the rule's.

    The last is at all documents. Looks that would fall on the same number are one, with their shares together.
    Raises ValueError without documents.
    """
    if documents < 1:
        raise ValueError(f"{documents} documents can't be looked at")
    shares: dict[int, float] = {}
    for of_documents, of_error in SPENDING:
        count = math.ceil(of_documents * documents)
        shares[count] = shares.get(count, 0.0) + of_error
    return tuple(
        Look(documents=count, confidence=1 - share * (1 - confidence)) for count, share in shares.items()
    )


def last_confidence(confidence: float) -> float:
    """What the look at all documents keeps of the procedure's confidence; plans of documents are made for it."""
    return 1 - SPENDING[-1][1] * (1 - confidence)


def decide(look: Look, *, lost: int, gained: int, margin: float, tests: int = 1) -> Decision:
    """What the answers of the look's documents decide; `inconclusive` means go on, at the last look undecided.

    `lost` are right with the baseline and wrong with the candidate, `gained` the reverse; `margin` is a share.
    `tests` is the number of tasks (or pooled groups) that the rule judges, among which it corrects claims of failure.
    """
    return margin_decision(
        lost=lost,
        gained=gained,
        documents=look.documents,
        margin=margin,
        confidence=look.confidence,
        tests=tests,
    )


def planned_look(
    documents: int, *, available_documents: int, look_confidence: float, confidence: float
) -> Look | None:
    """The look that a stopped task stands at, None where its plan wasn't made for this confidence."""
    for look in looks(available_documents, confidence=confidence):
        if look.documents == documents and math.isclose(look.confidence, look_confidence, abs_tol=1e-9):
            return look
    return None
