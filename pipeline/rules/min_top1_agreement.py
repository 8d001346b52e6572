"""On held text the most likely next token must be the baseline's at a share of positions.

>>> MinTop1Agreement(percent=95).confidence
0.95
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, comparable_distribution, own_distances
from pipeline.distribution import clustered_share_bounds
from pipeline.distribution_results import DistributionWindow
from pipeline.null_run import above_floor
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import SureRule
from pipeline.statistics import Decision, non_inferiority


class MinTop1Agreement(SureRule):
    """Share of scored tokens at which both have the same most likely token, in percent.

    Bounds are one-sided at `confidence`, over windows, and never closer than Clopper and Pearson's for a share: equal
    tokens everywhere in a short text are no proof of equality.
    """

    kind: Literal["min_top1_agreement"] = "min_top1_agreement"
    percent: float = Field(gt=0, lt=100)

    needs = frozenset({"quality"})
    quality_blocks = frozenset({"distribution"})
    unit: ClassVar[str] = "percent"
    sides = ("over", "under")

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """One finding."""
        try:
            found, distance = comparable_distribution(baseline, candidate)
        except UnmeasuredError as reason:
            return (self.finding("missing", str(reason), unit=self.unit, limit=self.percent),)
        low, high = self._bounds(found.windows)
        outcome: Decision = non_inferiority(100 - high, 100 - low, 100 - self.percent)
        told = self.told(outcome, f"the limit of {self.percent:g} %", needed="more text would decide")
        observed = 100 * distance.top1_agreement_share
        finding = self.finding(
            outcome,
            f"the same most likely token at {observed:.2f} % of {found.scored_tokens:,}; it lies in {low:.2f} … "
            f"{high:.2f} ({100 * self.confidence:g} % bounds), {told}",
            unit=self.unit,
            observed=observed,
            limit=self.percent,
            interval=(low, high),
        )
        own = 100 * min((one.top1_agreement_share for one in own_distances(baseline)), default=1.0)
        own_text = f"the baseline agrees with itself at {own:.2f} % only"
        return (
            above_floor(
                finding, loss=100 - observed, allowed=100 - self.percent, floor=100 - own, told=own_text
            ),
        )

    def _bounds(self, windows: tuple[DistributionWindow, ...]) -> tuple[float, float]:
        same = [window.same_top1 for window in windows if window.same_top1 is not None]
        tokens = [window.tokens for window in windows]
        low, high = clustered_share_bounds(same, trials=tokens, confidence=self.confidence)
        return 100 * low, 100 * high
