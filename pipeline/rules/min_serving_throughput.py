"""Served requests must give a number of output tokens a second.

>>> MinServingThroughput(tokens_per_s=200.0, concurrency=8).mode
'continuous'
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, usable_number
from pipeline.readings import Reading
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule
from pipeline.serving_results import ServingMode, ServingRow


class MinServingThroughput(ThresholdRule):
    """Output tokens per second of the candidate's served requests, with so many under way at once (closed loop).

    Requests of unequal length, waiting and prefill included: a server's rate, where `min_throughput` judges a batch's.
    """

    kind: Literal["min_serving_throughput"] = "min_serving_throughput"
    tokens_per_s: float = Field(gt=0)
    concurrency: int = Field(default=1, ge=1)
    mode: ServingMode = "continuous"

    needs = frozenset({"serving"})
    unit: ClassVar[str] = "tok/s"
    bound = "at least"

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:  # noqa: ARG002
        """Reads the candidate only."""
        row = self._row(candidate)
        where = f"{candidate.name}, {row.name}"
        if row.output_tokens_per_s is None:
            raise UnmeasuredError(f"{where}: output tokens a second were not measured")
        rates = row.output_tokens_per_s
        value = usable_number(rates.median, f"{where}: output rate")
        _refuse_other_rate(row, value, where)
        reading = Reading(
            value=value,
            what=f"{row.name}: {value:.4g} output tok/s",
            interval=(rates.lower_quartile, rates.upper_quartile),
            noisy=row.noisy,
        )
        return self.held_against(reading, self.tokens_per_s)

    def _row(self, variant: VariantResults) -> ServingRow:
        if variant.serving is None:
            raise UnmeasuredError(f"{variant.name}: the serving stage gave no result")
        row = variant.serving.row(self.mode, "closed", self.concurrency)
        if row is None:
            closed = (one for one in variant.serving.rows if (one.mode, one.load) == (self.mode, "closed"))
            sizes = ", ".join(str(one.concurrency) for one in closed) or "none"
            raise UnmeasuredError(
                f"{variant.name}, {self.mode}, {self.concurrency} at once: not among the measured ones ({sizes})"
            )
        if row.outcome != "measured":
            because = f": {row.because}" if row.because else ""
            raise UnmeasuredError(f"{variant.name}, {row.name}: {row.outcome.replace('_', ' ')}{because}")
        return row


def _refuse_other_rate(row: ServingRow, rate: float, where: str) -> None:
    """UnmeasuredError unless some repeat's own tokens and times come to such a rate."""
    told = [
        sum(one.new_tokens for one in repeat) / span
        for repeat in row.repeats
        if repeat and (span := max(one.end_s for one in repeat) - min(one.arrival_s for one in repeat)) > 0
    ]
    low, high = min(told, default=math.inf), max(told, default=-math.inf)
    if not 0.9 * low <= rate <= 1.1 * high:
        raise UnmeasuredError(
            f"{where}: implausible, {rate:.4g} output tok/s; the requests' own times say "
            + (f"{low:.4g} to {high:.4g}" if told else "nothing")
        )
