"""The first token must come within a number of seconds.

>>> MaxTtft(seconds=0.5).batch_size
1
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, usable_row
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule


class MaxTtft(ThresholdRule):
    """Median time to first token of the candidate at one batch size."""

    kind: Literal["max_ttft"] = "max_ttft"
    seconds: float = Field(gt=0)
    batch_size: int = Field(default=1, ge=1)

    needs = frozenset({"speed"})
    unit: ClassVar[str] = "s"

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:  # noqa: ARG002
        """Reads the candidate only."""
        row = usable_row(candidate, self.batch_size)
        if row.ttft_s is None:
            raise UnmeasuredError(
                f"{candidate.name} at batch size {self.batch_size}: time to first token was not measured"
            )
        times = row.ttft_s
        across = row.noisy and times.lower_quartile <= self.seconds < times.upper_quartile
        return self.finding(
            "inconclusive" if across else "pass" if times.median <= self.seconds else "fail",
            f"first token after {times.median:.4g} s (median) for {row.prompt_tokens} prompt tokens at batch "
            f"size {self.batch_size}, at most {self.seconds:g} s is allowed"
            + ("; a noisy measurement whose quartiles reach across the limit" if across else ""),
            unit=self.unit,
            observed=times.median,
            limit=self.seconds,
            interval=(times.lower_quartile, times.upper_quartile),
        )
