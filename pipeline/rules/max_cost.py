"""A million output tokens may cost a number of dollars.

>>> MaxCost(dollars_per_million_output_tokens=2.0).batch_size is None
True
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError
from pipeline.readings import price, refuse_other_bandwidth
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule


class MaxCost(ThresholdRule):
    """Price of a million output tokens of the candidate at its measured decode rate, on a machine kept busy."""

    kind: Literal["max_cost"] = "max_cost"
    dollars_per_million_output_tokens: float = Field(gt=0)
    batch_size: int | None = Field(default=None, ge=1)
    """None: the batch size with the best decode rate."""

    needs = frozenset({"speed", "cost"})
    unit: ClassVar[str] = "$/1M output tokens"
    bound = "at most"

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """The baseline only vouches for the machine and its price."""
        refuse_other_bandwidth(baseline, candidate)
        hours = [one.cost.dollars_per_hour for one in (baseline, candidate) if one.cost is not None]
        if len(set(hours)) > 1:
            raise UnmeasuredError(
                f"different prices: {hours[0]:g} $/h for {baseline.name}, {hours[1]:g} $/h for {candidate.name}"
            )
        reading = price(candidate, batch_size=self.batch_size)
        limit = self.dollars_per_million_output_tokens
        return self.held_against(reading, limit, limit_text=f"${limit:g}")
