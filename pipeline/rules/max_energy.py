"""An output token may take a number of joules.

>>> MaxEnergy(joules_per_output_token=0.5).batch_size
1
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, usable_row
from pipeline.readings import Reading, refuse_other_bandwidth
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule


class MaxEnergy(ThresholdRule):
    """Joules of the candidate's whole requests ÷ output tokens, by the device's own counter, prefill included."""

    kind: Literal["max_energy"] = "max_energy"
    joules_per_output_token: float = Field(gt=0)
    batch_size: int = Field(default=1, ge=1)

    needs = frozenset({"speed"})
    unit: ClassVar[str] = "J/token"
    bound = "at most"

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """The baseline only vouches for the machine."""
        refuse_other_bandwidth(baseline, candidate)
        where = f"{candidate.name} at batch size {self.batch_size}"
        joules = usable_row(candidate, self.batch_size).joules_per_output_token
        if joules is None:
            raise UnmeasuredError(
                f"{where}: energy was not measured; the device keeps no counter that can be read"
            )
        if not 0 < min(joules.samples, default=0) <= joules.median <= max(joules.samples):
            raise UnmeasuredError(f"{where}: implausible, {joules.median} J a token")
        reading = Reading(
            value=joules.median,
            what=f"{joules.median:.4g} J an output token (median) at batch size {self.batch_size}",
            interval=(joules.lower_quartile, joules.upper_quartile),
            noisy=usable_row(candidate, self.batch_size).noisy,
        )
        return self.held_against(reading, self.joules_per_output_token)
