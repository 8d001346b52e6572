"""The candidate must reach a number of tokens a second at a batch size.

>>> MinThroughput(tokens_per_s=100.0, batch_size=8).metric
'decode'
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.readings import RateMetric, rate, refuse_other_bandwidth
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule


class MinThroughput(ThresholdRule):
    """Tokens per second of the candidate's whole batch: produced after the first (decode), or read (prefill)."""

    kind: Literal["min_throughput"] = "min_throughput"
    tokens_per_s: float = Field(gt=0)
    batch_size: int = Field(default=1, ge=1)
    metric: RateMetric = "decode"

    needs = frozenset({"speed"})
    unit: ClassVar[str] = "tok/s"
    bound = "at least"

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """The baseline only vouches for the machine."""
        refuse_other_bandwidth(baseline, candidate)
        reading = rate(candidate, batch_size=self.batch_size, metric=self.metric)
        return self.held_against(reading, self.tokens_per_s)
