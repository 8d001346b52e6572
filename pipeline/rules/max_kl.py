"""The output distribution on held text may move by so many nats from the baseline's: in the mean, at p99, or both.

>>> MaxKl(mean_nats=0.02).confidence
0.95
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from pipeline.comparison import UnmeasuredError, comparable_distribution, own_distances
from pipeline.distribution import FEWEST_WINDOWS, mean_bounds, quantile_bounds, share_above
from pipeline.distribution_results import BaselineDistance, DistributionWindow
from pipeline.null_run import above_floor
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import SureRule, would_decide
from pipeline.sample_sizes import documents_for_distance
from pipeline.statistics import Decision, non_inferiority, ratio_standard_error

BEYOND_P99 = 0.01
"""Share of tokens above the 99th percentile."""


class _Judged(NamedTuple):
    """A figure against its limit: its bounds in nats, without an upper one where the text is too short."""

    outcome: Decision
    low: float
    high: float | None
    told: str


class MaxKl(SureRule):
    """KL divergence from the baseline's distribution, in nats a token, with bounds over the text's windows.

    p99 is within its limit when fewer than 1 % of tokens are above it, so that share is what is judged. Bounds are
    one-sided at `confidence` and count windows, whose tokens go together.
    """

    kind: Literal["max_kl"] = "max_kl"
    mean_nats: float | None = Field(default=None, gt=0)
    p99_nats: float | None = Field(default=None, gt=0)

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
        limits = dict(self._limits())
        findings = {
            subject: self._judge_figure(subject, limit, distance, found.windows)
            for subject, limit in limits.items()
        }
        held = self.held_together(
            findings,
            lambda rule, subject: rule._judge_figure(subject, limits[subject], distance, found.windows),
        )
        return tuple(_above_own(finding, own_distances(baseline)) for finding in held)

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
    ) -> Finding:
        judged = (self._mean if subject == "mean" else self._p99)(limit, windows)
        observed = _figure(subject, distance)
        tokens = sum(window.tokens for window in windows)
        bounds = f"{100 * self.confidence:g} % bounds over {len(windows)} windows"
        return self.finding(
            judged.outcome,
            f"KL from the baseline {observed:.3g} nats ({subject} of {tokens:,} tokens); "
            f"{_reach(judged)} ({bounds}), {judged.told}",
            unit=self.unit,
            subject=subject,
            observed=observed,
            limit=limit,
            interval=None if judged.high is None else (judged.low, judged.high),
        )

    def _mean(self, limit: float, windows: tuple[DistributionWindow, ...]) -> _Judged:
        sums = [window.kl_sum_nats for window in windows if window.kl_sum_nats is not None]
        weights = [float(window.tokens) for window in windows]
        low, high = mean_bounds(sums, weights=weights, confidence=self.confidence)
        error = ratio_standard_error(sums, weights)
        count = documents_for_distance(
            limit - sum(sums) / sum(weights), variance=len(sums) * error**2, confidence=self.confidence
        )
        tokens = windows[0].tokens
        needed = would_decide(
            None if count is None else count * tokens, answered=len(sums) * tokens, of="scored tokens"
        )
        outcome = non_inferiority(low, high, limit)
        if outcome == "pass" and len(sums) < FEWEST_WINDOWS:
            outcome, needed = "inconclusive", f"the bounds of fewer than {FEWEST_WINDOWS} windows don't hold"
        told = self.told(outcome, f"the limit of {limit:g}", needed=needed)
        return _Judged(outcome, low, high, told)

    def _p99(self, limit: float, windows: tuple[DistributionWindow, ...]) -> _Judged:
        shares = share_above(windows, limit, confidence=self.confidence)
        low, high = quantile_bounds(windows, 0.99, limit_nats=limit, confidence=self.confidence)
        outcome = non_inferiority(*shares, BEYOND_P99)
        told = self.told(outcome, f"the limit of {limit:g}", needed="more text would decide")
        above = f"{100 * shares[0]:.2g} … {100 * shares[1]:.2g} % of tokens are above it, 1 % may be"
        return _Judged(outcome, low, high, f"{told}: {above}")


def _reach(judged: _Judged) -> str:
    if judged.high is None:
        return f"it is {judged.low:.3g} or more, the text is too short for an upper bound"
    return f"it lies in {judged.low:.3g} … {judged.high:.3g}"


def _figure(subject: str, distance: BaselineDistance) -> float:
    return distance.kl_mean_nats if subject == "mean" else distance.kl_p99_nats


def _above_own(finding: Finding, own: tuple[BaselineDistance, ...]) -> Finding:
    """The finding, as far as the baseline's largest distance from itself lets it be claimed."""
    assert finding.observed is not None
    assert finding.limit is not None
    floor = max((_figure(finding.subject, distance) for distance in own), default=0.0)
    told = f"the baseline is as far as {floor:.2g} nats from itself"
    return above_floor(finding, loss=finding.observed, allowed=finding.limit, floor=floor, told=told)
