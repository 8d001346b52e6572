"""The first token must come within a number of seconds.

>>> MaxTtft(seconds=0.5).batch_size
1
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.readings import first_token, refuse_other_bandwidth
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule


class MaxTtft(ThresholdRule):
    """Median time to first token of the candidate at one batch size."""

    kind: Literal["max_ttft"] = "max_ttft"
    seconds: float = Field(gt=0)
    batch_size: int = Field(default=1, ge=1)

    needs = frozenset({"speed"})
    unit: ClassVar[str] = "s"
    bound = "at most"

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """The baseline only vouches for the machine."""
        refuse_other_bandwidth(baseline, candidate)
        return self.held_against(first_token(candidate, batch_size=self.batch_size), self.seconds)
