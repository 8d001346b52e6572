"""Decoding must use a share of the memory's bandwidth.

>>> MinBandwidthShare(share=0.5).batch_size
1
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, usable_number, usable_row
from pipeline.readings import Reading, refuse_other_bandwidth
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule


class MinBandwidthShare(ThresholdRule):
    """Bytes that the candidate's decode steps read a second ÷ the bandwidth measured in the same stage.

    A low share says that something else than the memory limits decoding: the engine's own work, or its kernels.
    """

    kind: Literal["min_bandwidth_share"] = "min_bandwidth_share"
    share: float = Field(gt=0, le=1)
    batch_size: int = Field(default=1, ge=1)

    needs = frozenset({"speed"})
    unit: ClassVar[str] = "share"
    bound = "at least"

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """The baseline only vouches for the machine."""
        row = usable_row(candidate, self.batch_size)
        where = f"{candidate.name} at batch size {self.batch_size}"
        if row.bandwidth_share is None or row.tpot_s is None:
            raise UnmeasuredError(
                f"{where}: no share of the bandwidth was measured; the processor's cache serves a small model"
            )
        refuse_other_bandwidth(baseline, candidate)
        share = usable_number(row.bandwidth_share, f"{where}: share of the bandwidth")
        times = row.tpot_s
        reading = Reading(
            value=share,
            what=f"decoding at batch size {self.batch_size} reads {share:.3g} of the measured bandwidth",
            interval=(
                share * times.median / times.upper_quartile,
                share * times.median / times.lower_quartile,
            ),
            noisy=row.noisy,
        )
        return self.held_against(reading, self.share, limit_text=f"{self.share:g}")
