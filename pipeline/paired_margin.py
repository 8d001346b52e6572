"""How surely a paired drop of right/wrong answers lies on one side of a margin, exact for few flips. Pure.

Tango's score test is a normal approximation. At a true drop equal to the margin it errs more often than it says where
few answers flip, most of them one way: with 100 documents, a margin of 3 points and 4.4 % flips a level of 5 % claims a
larger drop in 8.9 % of runs. So a decision needs the exact error, too: the probability, at the most harmful rate of
flips, of a score as far out or further (an unconditional exact test ordered by the score: Hsueh, Liu and Chen,
Biometrics 57, 2001, 478-483).

>>> margin_decision(lost=0, gained=0, documents=400, margin=0.02, confidence=0.95)
'pass'
>>> margin_decision(lost=1, gained=0, documents=10, margin=0.01, confidence=0.95)
'inconclusive'
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from pipeline.statistics import Decision, tango_score
from pipeline.values import Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LARGEST_EXPECTED_FLIPS = 400
"""Up to it the errors are exact; above, the score's own are within half a point (tests/test_error_rates.py)."""
_RATES = 40
"""Flip rates that are tried, closer together where flips are rare and the error changes fast."""


class MarginP(Value):
    """One-sided p values of a paired table against a margin; the smaller, the surer."""

    inside: float
    """Of "the true drop is the margin or more": small when the drop surely is under the margin."""
    outside: float
    """Of "the true drop is the margin or less": small when the drop surely is above it."""


def margin_p(*, lost: int, gained: int, documents: int, margin: float) -> MarginP:
    """p values of the paired table, `margin` a share between 0 and 1.

    Each is the larger of the score test's and the exact one, whose supremum runs over all flip rates that expect up
    to 400 flips. Raises ValueError for a table that can't be or a margin out of range. Without documents both are 1.
    """
    if min(lost, gained, documents - lost - gained) < 0:
        raise ValueError(f"no paired table has {lost} lost and {gained} gained in {documents} documents")
    if not 0 < margin < 1:
        raise ValueError(f"a margin is a share between 0 and 1, not {margin}")
    if documents == 0:
        return MarginP(inside=1.0, outside=1.0)
    score = tango_score(margin, lost=lost, gained=gained, documents=documents)
    tails = _exact_tails(documents, margin)
    below = NormalDist().cdf(score)
    return MarginP(
        inside=min(1.0, max(below, tails.at_most(score))),
        outside=min(1.0, max(1 - below, tails.at_least(score))),
    )


def margin_decision(
    *,
    lost: int,
    gained: int,
    documents: int,
    margin: float,
    confidence: float,
    tests: int = 1,
) -> Decision:
    """Whether the true drop surely is under the margin, surely above it, or neither, from one table.

    A pass errs with a probability of at most 1 − confidence, a fail with at most (1 − confidence) ÷ `tests`,
    so that the claims of so many tests hold together.
    """
    p = margin_p(lost=lost, gained=gained, documents=documents, margin=margin)
    if p.inside <= 1 - confidence:
        return "pass"
    return "fail" if p.outside <= (1 - confidence) / tests else "inconclusive"


@dataclass(frozen=True)
class _Tails:
    """Largest probabilities, over flip rates, of a score up to and from each of the possible ones."""

    scores: Floats
    up_to: Floats
    from_: Floats

    def at_most(self, score: float) -> float:
        """Largest probability of a score of `score` or less; 0 where nothing was computed."""
        place = int(self.scores.searchsorted(score + 1e-9, side="right")) - 1
        return float(self.up_to[place]) if place >= 0 else 0.0

    def at_least(self, score: float) -> float:
        """Largest probability of a score of `score` or more; 0 where nothing was computed."""
        place = int(self.scores.searchsorted(score - 1e-9, side="left"))
        return float(self.from_[place]) if place < len(self.scores) else 0.0


@lru_cache(maxsize=16)
def _exact_tails(documents: int, margin: float) -> _Tails:
    """Both tails of the score when the true drop is `margin`, each at the flip rate where it is largest."""
    import numpy as np

    gain_rates = _gain_rates(documents, margin)
    if not gain_rates:
        return _Tails(np.empty(0), np.empty(0), np.empty(0))
    lost, gained = _tables(documents, gain_rates[-1], margin=margin)
    scores = _scores(lost, gained, documents, margin)
    order = np.argsort(scores, kind="stable")
    lost, gained, scores = lost[order], gained[order], scores[order]
    factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, documents + 1)))))
    ways = (
        factorials[documents] - factorials[lost] - factorials[gained] - factorials[documents - lost - gained]
    )
    up_to, from_ = np.zeros(len(scores)), np.zeros(len(scores))
    counts = np.arange(documents + 1)
    for rate in gain_rates:
        same = math.log1p(-2 * rate - margin)
        losses = counts * (math.log(rate + margin) - same)
        # Without gains only tables without them can come.
        gains = counts * (math.log(rate) - same) if rate else np.where(counts > 0, -np.inf, 0.0)
        chances = np.exp(ways + losses[lost] + gains[gained] + documents * same)
        cumulated = np.cumsum(chances)
        np.maximum(up_to, cumulated, out=up_to)
        np.maximum(from_, cumulated[-1] - cumulated + chances, out=from_)
    return _Tails(scores, up_to, from_)


def _gain_rates(documents: int, margin: float) -> list[float]:
    """Probabilities of a gain, from 0 on; a loss is likelier by the margin. Empty where flips always are too many."""
    import numpy as np

    # Where every answer flips the logarithm of what stays is infinite.
    most = (min(1 - 1e-9, LARGEST_EXPECTED_FLIPS / documents) - margin) / 2
    if most <= 0:
        return []
    least = min(0.02 / documents, most / 2)
    return [0.0, *(float(rate) for rate in np.geomspace(least, most, _RATES))]


def _tables(
    documents: int, gain_rate: float, *, margin: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every (lost, gained) that a gain rate up to this one brings about with more than one chance in 10¹²."""
    import numpy as np

    most_lost, most_gained = (
        min(documents, math.ceil(expected + 8 * math.sqrt(expected) + 8))
        for expected in (documents * (gain_rate + margin), documents * gain_rate)
    )
    lost, gained = np.indices((most_lost + 1, most_gained + 1)).reshape(2, -1)
    kept = lost + gained <= documents
    return lost[kept], gained[kept]


def _scores(lost: NDArray[np.int64], gained: NDArray[np.int64], documents: int, margin: float) -> Floats:
    """`statistics.tango_score` of many tables at once."""
    import numpy as np

    a = 2.0 * documents
    b = -lost - gained + (2 * documents - lost + gained) * margin
    c = -gained * margin * (1 - margin)
    rate = (np.sqrt(np.maximum(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = documents * (2 * rate + margin * (1 - margin))
    scores: Floats = (lost - gained - documents * margin) / np.sqrt(variance)
    return scores
