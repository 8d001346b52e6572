"""The output distribution on held text may move by so many nats from the baseline's: in the mean, at p99, or both.

>>> MaxKl(mean_nats=0.02).confidence
0.95
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.comparison import UnmeasuredError, comparable_distribution, own_distances
from pipeline.distribution import quantile_bounds
from pipeline.distribution_results import BaselineDistance, DistributionWindow
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import Rule
from pipeline.statistics import documents_for_distance, non_inferiority, paired_bootstrap


class MaxKl(Rule):
    """KL divergence from the baseline's distribution, in nats a token, with bounds over the text's windows.

    The mean's bounds come from the bootstrap over windows (never closer than Student's t), the percentile's from
    drawing whole windows; each is one-sided at `confidence`.
    """

    kind: Literal["max_kl"] = "max_kl"
    mean_nats: float | None = Field(default=None, gt=0)
    p99_nats: float | None = Field(default=None, gt=0)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)

    needs = frozenset({"quality"})
    quality_blocks = frozenset({"distribution"})
    unit: ClassVar[str] = "nats"

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.mean_nats is None and self.p99_nats is None:
            raise ValueError("max_kl needs mean_nats, p99_nats or both; neither is given")
        return self

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """One finding for each limit."""
        try:
            found, distance = comparable_distribution(baseline, candidate)
        except UnmeasuredError as reason:
            return tuple(
                self.finding("missing", str(reason), unit=self.unit, subject=subject, limit=limit)
                for subject, limit in self._limits()
            )
        return tuple(
            self._judge_figure(
                subject, limit, distance, found.windows, noise=_noise(subject, own_distances(baseline))
            )
            for subject, limit in self._limits()
        )

    def _limits(self) -> Iterator[tuple[str, float]]:
        if self.mean_nats is not None:
            yield "mean", self.mean_nats
        if self.p99_nats is not None:
            yield "p99", self.p99_nats

    def _judge_figure(
        self,
        subject: str,
        limit: float,
        distance: BaselineDistance,
        windows: tuple[DistributionWindow, ...],
        *,
        noise: float,
    ) -> Finding:
        observed = _figure(subject, distance)
        low, high, needed = self._bounds(subject, limit, windows)
        outcome = non_inferiority(low, high, limit)
        told = {
            "pass": f"surely under the limit of {limit:g}",
            "fail": f"surely above the limit of {limit:g}",
            "inconclusive": f"undecided against the limit of {limit:g}; {needed}",
        }[outcome]
        if outcome == "pass" and limit <= noise:
            outcome = "inconclusive"
            told = f"but the baseline is as far as {noise:.2g} from itself, so the limit can't be shown to be kept"
        tokens = sum(window.tokens for window in windows)
        return self.finding(
            outcome,
            f"KL from the baseline {observed:.3g} nats ({subject} of {tokens:,} tokens); it lies in {low:.3g} … "
            f"{high:.3g} ({100 * self.confidence:g} % bounds over {len(windows)} windows), {told}",
            unit=self.unit,
            subject=subject,
            observed=observed,
            limit=limit,
            interval=(low, high),
        )

    def _bounds(
        self, subject: str, limit: float, windows: tuple[DistributionWindow, ...]
    ) -> tuple[float, float, str]:
        """Lower and upper bound, and how much text would decide."""
        if subject == "p99":
            return *quantile_bounds(windows, 0.99, confidence=self.confidence), "more text would decide"
        sums = [window.kl_sum_nats for window in windows if window.kl_sum_nats is not None]
        result = paired_bootstrap(
            [0.0] * len(sums),
            sums,
            weights=[float(window.tokens) for window in windows],
            confidence=self.confidence,
        )
        assert result.interval is not None, "two windows at least"
        assert result.difference is not None
        assert result.standard_error is not None
        count = documents_for_distance(
            limit - result.difference,
            variance=len(sums) * result.standard_error**2,
            confidence=self.confidence,
        )
        needed = (
            "no length of text decides a figure that equals the limit"
            if count is None
            else f"about {max(count, len(sums) + 1) * windows[0].tokens:,} scored tokens would decide"
        )
        return result.interval.lower, result.interval.upper, needed


def _figure(subject: str, distance: BaselineDistance) -> float:
    return distance.kl_mean_nats if subject == "mean" else distance.kl_p99_nats


def _noise(subject: str, own: tuple[BaselineDistance, ...]) -> float:
    """The largest figure of the baseline against itself."""
    return max((_figure(subject, distance) for distance in own), default=0.0)
