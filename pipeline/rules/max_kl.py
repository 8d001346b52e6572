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
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import Rule
from pipeline.statistics import Decision, documents_for_distance, non_inferiority, ratio_standard_error

BEYOND_P99 = 0.01
"""Share of tokens above the 99th percentile."""


class _Judged(NamedTuple):
    """A figure against its limit: its bounds in nats, without an upper one where the text is too short."""

    outcome: Decision
    low: float
    high: float | None
    told: str


class MaxKl(Rule):
    """KL divergence from the baseline's distribution, in nats a token, with bounds over the text's windows.

    p99 is within its limit when fewer than 1 % of tokens are above it, so that share is what is judged. Bounds are
    one-sided at `confidence` and count windows, whose tokens go together.
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
        judged = (self._mean if subject == "mean" else self._p99)(limit, windows)
        outcome, told = judged.outcome, judged.told
        if outcome == "pass" and limit <= noise:
            outcome = "inconclusive"
            told = f"but the baseline is as far as {noise:.2g} from itself, so the limit can't be shown to be kept"
        observed = _figure(subject, distance)
        tokens = sum(window.tokens for window in windows)
        bounds = f"{100 * self.confidence:g} % bounds over {len(windows)} windows"
        return self.finding(
            outcome,
            f"KL from the baseline {observed:.3g} nats ({subject} of {tokens:,} tokens); "
            f"{_reach(judged)} ({bounds}), {told}",
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
        needed = (
            "no length of text decides a figure that equals the limit"
            if count is None
            else f"about {max(count, len(sums) + 1) * windows[0].tokens:,} scored tokens would decide"
        )
        outcome = non_inferiority(low, high, limit)
        if outcome == "pass" and len(sums) < FEWEST_WINDOWS:
            outcome, needed = "inconclusive", f"the bounds of fewer than {FEWEST_WINDOWS} windows don't hold"
        return _Judged(outcome, low, high, _told(outcome, limit, needed))

    def _p99(self, limit: float, windows: tuple[DistributionWindow, ...]) -> _Judged:
        shares = share_above(windows, limit, confidence=self.confidence)
        low, high = quantile_bounds(windows, 0.99, limit_nats=limit, confidence=self.confidence)
        outcome = non_inferiority(*shares, BEYOND_P99)
        told = _told(outcome, limit, "more text would decide")
        above = f"{100 * shares[0]:.2g} … {100 * shares[1]:.2g} % of tokens are above it, 1 % may be"
        return _Judged(outcome, low, high, f"{told}: {above}")


def _told(outcome: Decision, limit: float, needed: str) -> str:
    return {
        "pass": f"surely under the limit of {limit:g}",
        "fail": f"surely above the limit of {limit:g}",
        "inconclusive": f"undecided against the limit of {limit:g}; {needed}",
    }[outcome]


def _reach(judged: _Judged) -> str:
    if judged.high is None:
        return f"it is {judged.low:.3g} or more, the text is too short for an upper bound"
    return f"it lies in {judged.low:.3g} … {judged.high:.3g}"


def _figure(subject: str, distance: BaselineDistance) -> float:
    return distance.kl_mean_nats if subject == "mean" else distance.kl_p99_nats


def _noise(subject: str, own: tuple[BaselineDistance, ...]) -> float:
    """The largest figure of the baseline against itself."""
    return max((_figure(subject, distance) for distance in own), default=0.0)
