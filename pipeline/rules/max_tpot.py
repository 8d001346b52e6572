"""Each further token must come within a number of seconds.

>>> MaxTpot(seconds=0.05, percentile="p99").batch_size
1
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.readings import Percentile, latency, refuse_other_bandwidth
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule


class MaxTpot(ThresholdRule):
    """Median time per output token of the candidate at one batch size, or a percentile of the gaps between tokens."""

    kind: Literal["max_tpot"] = "max_tpot"
    seconds: float = Field(gt=0)
    batch_size: int = Field(default=1, ge=1)
    percentile: Percentile = "median"
    """`median` is that of the repeats' TPOT, `p90` and `p99` are of all gaps (ITL)."""

    needs = frozenset({"speed"})
    unit: ClassVar[str] = "s"
    bound = "at most"

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """The baseline only vouches for the machine."""
        refuse_other_bandwidth(baseline, candidate)
        reading = latency(candidate, batch_size=self.batch_size, percentile=self.percentile)
        return self.held_against(reading, self.seconds)
