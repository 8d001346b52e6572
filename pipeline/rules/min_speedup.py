"""The candidate must be a factor faster than the baseline.

>>> MinSpeedup(factor=1.5).batch_size
1
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, speed_of, usable_row
from pipeline.readings import (
    RateMetric,
    Reading,
    drift_share,
    rate,
    refuse_other_bandwidth,
    refuse_other_conditions,
)
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule


class MinSpeedup(ThresholdRule):
    """Tokens per second of the candidate ÷ those of the baseline, at one batch size of the same run."""

    kind: Literal["min_speedup"] = "min_speedup"
    factor: float = Field(gt=0)
    batch_size: int = Field(default=1, ge=1)
    metric: RateMetric = "decode"
    across_engines: bool = False
    """Allow baseline and candidate on different engines: part of the speed-up is then the engine's."""

    needs = frozenset({"speed"})
    unit: ClassVar[str] = "x"
    bound = "at least"

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """Noisy when either row is; the interval is the ratio of the quartiles of the times behind the rates.

        It's wider by the machine's drift, and noisy, where the two were timed one after the other.
        """
        refuse_other_conditions(baseline, candidate, across_engines=self.across_engines)
        before, after = (usable_row(variant, self.batch_size) for variant in (baseline, candidate))
        if (before.prompt_tokens, before.new_tokens) != (after.prompt_tokens, after.new_tokens):
            raise UnmeasuredError(
                f"different workloads: {before.prompt_tokens}+{before.new_tokens} tokens with the baseline, "
                f"{after.prompt_tokens}+{after.new_tokens} with the candidate"
            )
        refuse_other_bandwidth(baseline, candidate)
        slow, fast = (
            rate(variant, batch_size=self.batch_size, metric=self.metric) for variant in (baseline, candidate)
        )
        assert slow.interval is not None, "rates have quartiles"
        assert fast.interval is not None, "rates have quartiles"
        observed = fast.value / slow.value
        drift = drift_share(baseline, candidate)
        reading = Reading(
            value=observed,
            what=f"{fast.what}, {observed:.3g} × the baseline's {slow.value:.4g}{_drifted(drift)}",
            interval=(
                fast.interval[0] / slow.interval[1] / (1 + drift),
                fast.interval[1] / slow.interval[0] * (1 + drift),
            ),
            noisy=slow.noisy or fast.noisy or drift > 0,
        )
        return self.held_against(
            reading, self.factor, limit_text=f"{self.factor:g} ×", note=_engines(baseline, candidate)
        )


def _drifted(share: float) -> str:
    return f", give or take {100 * share:.1f} % by which the machine drifted between the two" if share else ""


def _engines(baseline: VariantResults, candidate: VariantResults) -> str:
    before, after = speed_of(baseline).engine, speed_of(candidate).engine
    return "" if before == after else f" (engine {after} against {before})"
