"""The paired drop of one metric on the same documents, and what can be claimed of it against a margin. Pure.

>>> drop = paired_drop("acc", [(1.0, 1.0)] * 390 + [(1.0, 0.0)] * 5 + [(0.0, 1.0)] * 5, confidence=0.95)
>>> drop.drop, surely_under(drop, margin=0.02)
(0.0, True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.paired_margin import MarginP, margin_p
from pipeline.results import Power
from pipeline.sample_sizes import detectable_drop, documents_for_distance, documents_to_decide
from pipeline.statistics import Flips, bounded_mean_interval, mcnemar_exact_p, paired_flips, tango_interval
from pipeline.values import Value

Pairs = Sequence[tuple[float, float]]
"""Baseline's and candidate's score of each document, from 0 to 1, more being better."""


class PairedDrop(Value):
    """The paired drop of one task or group, as shares of documents; bounds are one-sided at `confidence`.

    `flips` and McNemar's `p` are there for right/wrong metrics only; without bounds there is one graded document.
    `variance` is that of one document's difference, with half a flip more than was seen.
    """

    metric: str
    documents: int
    baseline_score: float
    candidate_score: float
    drop: float
    lower: float | None
    upper: float | None
    confidence: float
    variance: float
    flips: Flips | None
    p: float | None


def paired_drop(metric: str, pairs: Pairs, *, confidence: float) -> PairedDrop:
    """Right/wrong answers get Tango's interval and McNemar's exact p, graded scores Gaffke's bounds."""
    if all(score in (0, 1) for pair in pairs for score in pair):
        return _right_or_wrong(metric, pairs, confidence=confidence)
    return _graded(metric, pairs, confidence=confidence)


def surely_under(drop: PairedDrop, *, margin: float) -> bool:
    """Whether the true drop is under the margin, with the drop's confidence."""
    p = p_values(drop, margin=margin)
    if p is None:
        return drop.upper is not None and drop.upper < margin
    return p.inside <= 1 - drop.confidence


def surely_above(drop: PairedDrop, pairs: Pairs, *, margin: float, tests: int) -> bool:
    """Whether the true drop is above the margin, at a confidence that holds for so many claims together."""
    p = p_values(drop, margin=margin)
    if p is not None:
        return p.outside <= (1 - drop.confidence) / tests
    if drop.lower is None or drop.lower < margin:
        return False
    lower = paired_drop(drop.metric, pairs, confidence=1 - (1 - drop.confidence) / tests).lower
    return lower is not None and lower >= margin


def p_values(drop: PairedDrop, *, margin: float) -> MarginP | None:
    """Exact p values against the margin; None for graded scores."""
    if drop.flips is None:
        return None
    return margin_p(
        lost=drop.flips.lost, gained=drop.flips.gained, documents=drop.flips.documents, margin=margin
    )


def documents_needed(drop: PairedDrop, *, margin: float, confidence: float) -> int | None:
    """Documents that would decide with 80 % power if it goes on like this, more than there are; None for no number."""
    if drop.flips is None:
        count = documents_for_distance(margin - drop.drop, variance=drop.variance, confidence=confidence)
    else:
        count = documents_to_decide(
            margin, flip_rate=drop.variance, true_drop=drop.drop, confidence=confidence
        )
    return None if count is None else max(count, drop.documents + 1)


def power(*, documents: int | None, flip_rate: float, margin: float, confidence: float) -> Power:
    """What `documents` decide of a margin, a share above 0, and how many it needs, when nothing is lost in truth."""
    needed = documents_to_decide(margin, flip_rate=flip_rate, confidence=confidence)
    assert needed is not None
    detectable = None
    if documents is not None:
        detectable = detectable_drop(documents, flip_rate=flip_rate, confidence=confidence)
    return Power(
        documents=documents,
        flip_rate=flip_rate,
        detectable_points=None if detectable is None else 100 * detectable,
        documents_needed=needed,
    )


def _right_or_wrong(metric: str, pairs: Pairs, *, confidence: float) -> PairedDrop:
    flips = paired_flips([(before == 1, after == 1) for before, after in pairs])
    interval = tango_interval(
        lost=flips.lost, gained=flips.gained, documents=flips.documents, confidence=confidence
    )
    return PairedDrop(
        metric=metric,
        documents=flips.documents,
        baseline_score=(flips.both_right + flips.lost) / flips.documents,
        candidate_score=(flips.both_right + flips.gained) / flips.documents,
        drop=(flips.lost - flips.gained) / flips.documents,
        lower=interval.lower,
        upper=interval.upper,
        confidence=confidence,
        variance=flips.smoothed_flip_rate,
        flips=flips,
        p=mcnemar_exact_p(lost=flips.lost, gained=flips.gained),
    )


def _graded(metric: str, pairs: Pairs, *, confidence: float) -> PairedDrop:
    drops = [before - after for before, after in pairs]
    count = len(drops)
    mean = math.fsum(drops) / count
    interval = bounded_mean_interval(drops, lowest=-1.0, highest=1.0, confidence=confidence)
    return PairedDrop(
        metric=metric,
        documents=count,
        baseline_score=math.fsum(before for before, _ in pairs) / count,
        candidate_score=math.fsum(after for _, after in pairs) / count,
        drop=mean,
        lower=interval.lower if count > 1 else None,
        upper=interval.upper if count > 1 else None,
        confidence=confidence,
        # Half a flip more than was seen, as `Flips.smoothed_flip_rate` has it.
        variance=(math.fsum((drop - mean) ** 2 for drop in drops) + 0.5) / (count + 1),
        flips=None,
        p=None,
    )
