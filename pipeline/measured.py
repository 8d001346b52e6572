"""What every measured value shares: how it came out, repeated samples, and why there is none.

>>> Distribution.of([0.2, 0.1, 0.4]).median
0.2
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from pipeline.values import Value

Outcome = Literal["measured", "out_of_memory", "void", "failed"]
Bound = Literal["memory", "compute"]
"""What sets a roof."""


class Distribution(Value):
    """Repeated samples of one quantity: raw samples, median, quartiles, coefficient of variation.

    The unit stands in the name of the field that holds the distribution.
    """

    median: float
    lower_quartile: float
    upper_quartile: float
    cv_percent: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution:
        """Raises ValueError when there is no sample. One sample has quartiles equal to itself and CV 0."""
        if not samples:
            raise ValueError("a distribution needs at least one sample")
        ordered = sorted(samples)
        mean = statistics.fmean(ordered)
        if len(ordered) == 1:
            lower = upper = ordered[0]
        else:
            lower, _, upper = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(
            median=statistics.median(ordered),
            lower_quartile=lower,
            upper_quartile=upper,
            cv_percent=100 * statistics.pstdev(ordered) / mean if mean else 0.0,
            samples=tuple(samples),
        )


class StageFailure(Value):
    """A stage that gave no result for a variant."""

    stage: Literal["quantize", "speed", "serving", "capacity", "quality"]
    reason: Literal["failed", "interrupted", "out_of_memory", "skipped"]
    message: str
