"""A million output tokens may cost a number of dollars.

>>> MaxCost(dollars_per_million_output_tokens=2.0).batch_size is None
True
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, usable_number
from pipeline.readings import Reading, rate, refuse_other_bandwidth
from pipeline.results import CostResult, Finding, VariantResults
from pipeline.roofline import dollars_per_million_tokens
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
        cost = _cost_of(candidate)
        if baseline.cost is not None and baseline.cost.dollars_per_hour != cost.dollars_per_hour:
            raise UnmeasuredError(
                f"different prices: {baseline.cost.dollars_per_hour:g} $/h for {baseline.name}, "
                f"{cost.dollars_per_hour:g} $/h for {candidate.name}"
            )
        size = self.batch_size or cost.batch_size
        if size is None:
            raise UnmeasuredError(f"{candidate.name}: no decode rate was measured, so no token has a price")
        decode = rate(candidate, batch_size=size, metric="decode")
        price, low, high = (
            dollars_per_million_tokens(tokens_per_s, dollars_per_hour=cost.dollars_per_hour)
            for tokens_per_s in (decode.value, *reversed(decode.interval or (decode.value, decode.value)))
        )
        _refuse_other_price(cost, size, price, candidate.name)
        reading = Reading(
            value=price,
            what=f"${price:.4g} for a million output tokens at batch size {size} ({decode.value:.4g} tok/s, "
            f"${cost.dollars_per_hour:g} an hour)",
            interval=(low, high),
            noisy=decode.noisy,
        )
        limit = self.dollars_per_million_output_tokens
        return self.held_against(reading, limit, limit_text=f"${limit:g}")


def _cost_of(variant: VariantResults) -> CostResult:
    if variant.cost is None:
        raise UnmeasuredError(f"{variant.name}: no price was worked out; give cost.dollars_per_hour")
    usable_number(variant.cost.dollars_per_hour, f"{variant.name}: price of the machine in $/h")
    return variant.cost


def _refuse_other_price(cost: CostResult, batch_size: int, price: float, name: str) -> None:
    """UnmeasuredError when the stored price of that batch size isn't the one that rate and hour come to."""
    told = cost.dollars_per_million_output_tokens
    if batch_size == cost.batch_size and (told is None or not math.isclose(told, price, rel_tol=1e-6)):
        raise UnmeasuredError(
            f"{name}: implausible, ${told} is stored for a million output tokens at batch size {batch_size}, "
            f"its rate and the price of an hour come to ${price:.6g}"
        )
