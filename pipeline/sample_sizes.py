"""How many documents decide a margin or find a drop, and what a number of documents can decide. Pure.

>>> documents_to_decide(0.02, flip_rate=0.04)
619
"""

from __future__ import annotations

import math

from pipeline.statistics import normal_quantile


def documents_to_detect(
    drop: float, *, flip_rate: float, power: float = 0.8, confidence: float = 0.95
) -> int:
    """Documents for a two-sided paired test to find a true drop (Connor, Biometrics 43, 1987).

    `drop` and `flip_rate` are shares, not percent. A drop needs at least as many flips:
    ValueError otherwise.
    """
    if not 0 < abs(drop) <= flip_rate <= 1:
        raise ValueError(f"a drop of {drop} needs a flip rate from {abs(drop)} to 1, not {flip_rate}")
    alpha = normal_quantile(1 - (1 - confidence) / 2) * math.sqrt(flip_rate)
    beta = normal_quantile(power) * math.sqrt(flip_rate - drop**2)
    return math.ceil((alpha + beta) ** 2 / drop**2)


def documents_to_decide(
    margin: float,
    *,
    flip_rate: float,
    true_drop: float = 0.0,
    power: float = 0.8,
    confidence: float = 0.95,
) -> int | None:
    """Documents for a one-sided bound to settle on which side of the margin the true drop lies.

    (z_confidence + z_power)² · (flip rate − drop²) ÷ (margin − drop)². None when the drop equals the margin:
    no number decides then.
    """
    variance = max(flip_rate, abs(true_drop)) - true_drop**2
    return documents_for_distance(margin - true_drop, variance=variance, power=power, confidence=confidence)


def documents_for_distance(
    distance: float, *, variance: float, power: float = 0.8, confidence: float = 0.95
) -> int | None:
    """(z_confidence + z_power)² · variance of one document ÷ distance²; None at distance 0."""
    if distance == 0:
        return None
    quantiles = normal_quantile(confidence) + normal_quantile(power)
    return max(1, math.ceil(quantiles**2 * variance / distance**2))


def detectable_drop(
    documents: int, *, flip_rate: float, power: float = 0.8, confidence: float = 0.95
) -> float | None:
    """Smallest margin that `documents` decide when nothing was lost: the inverse of `documents_to_decide`.

    A share, at most 1; None without documents.
    """
    if documents < 1:
        return None
    quantiles = normal_quantile(confidence) + normal_quantile(power)
    return min(1.0, quantiles * math.sqrt(flip_rate / documents))
