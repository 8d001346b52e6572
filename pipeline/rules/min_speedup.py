"""The candidate must be a factor faster than the baseline.

>>> MinSpeedup(factor=1.5).batch_size
1
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, speed_of, usable_rate, usable_row
from pipeline.results import Finding, FindingOutcome, VariantResults
from pipeline.rules.base import ThresholdRule
from pipeline.speed_results import SpeedRow


class MinSpeedup(ThresholdRule):
    """Tokens per second of the candidate ÷ those of the baseline, at one batch size of the same run."""

    kind: Literal["min_speedup"] = "min_speedup"
    factor: float = Field(gt=0)
    batch_size: int = Field(default=1, ge=1)
    metric: Literal["decode", "prefill"] = "decode"
    across_engines: bool = False
    """Allow baseline and candidate on different engines: part of the speed-up is then the engine's."""

    needs = frozenset({"speed"})
    unit: ClassVar[str] = "x"

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """Inconclusive when either row is noisy and the quartiles reach across the limit."""
        self._refuse_other_conditions(baseline, candidate)
        before, after = (usable_row(variant, self.batch_size) for variant in (baseline, candidate))
        if (before.prompt_tokens, before.new_tokens) != (after.prompt_tokens, after.new_tokens):
            raise UnmeasuredError(
                f"different workloads: {before.prompt_tokens}+{before.new_tokens} tokens with the baseline, "
                f"{after.prompt_tokens}+{after.new_tokens} with the candidate"
            )
        slow, fast = self._rate(before, baseline), self._rate(after, candidate)
        observed = fast / slow
        interval = self._interval(before, after)
        outcome: FindingOutcome = "pass" if observed >= self.factor else "fail"
        noise = ""
        if before.noisy or after.noisy:
            noise = "; a noisy measurement"
            if interval is None or interval[0] < self.factor <= interval[1]:
                outcome = "inconclusive"
                noise += " whose spread reaches across the limit"
        return self.finding(
            outcome,
            f"{self.metric} at batch size {self.batch_size}: {fast:.4g} tok/s, {observed:.3g} × the baseline's "
            f"{slow:.4g}; at least {self.factor:g} × is asked for"
            f"{self._engines(baseline, candidate)}{noise}",
            unit=self.unit,
            observed=observed,
            limit=self.factor,
            interval=interval,
        )

    def _refuse_other_conditions(self, baseline: VariantResults, candidate: VariantResults) -> None:
        before, after = speed_of(baseline), speed_of(candidate)
        if before.device != after.device:
            raise UnmeasuredError(f"different devices: {before.device} and {after.device}")
        if before.engine != after.engine and not self.across_engines:
            raise UnmeasuredError(
                f"different engines, {before.engine} for the baseline and {after.engine} for the candidate; "
                "set across_engines: true in the rule to compare them all the same"
            )

    def _rate(self, row: SpeedRow, variant: VariantResults) -> float:
        what = f"{variant.name}: {self.metric} rate at batch size {self.batch_size}"
        if self.metric == "decode":
            rate, times, tokens = row.decode_tokens_per_s, row.tpot_s, row.batch_size
        else:
            rate, times, tokens = row.prefill_tokens_per_s, row.ttft_s, row.batch_size * row.prompt_tokens
        return usable_rate(row, rate, times=times, tokens=tokens, what=what)

    def _interval(self, before: SpeedRow, after: SpeedRow) -> tuple[float, float] | None:
        """Ratio of the quartiles of the times behind the rates."""
        slow, fast = (row.tpot_s if self.metric == "decode" else row.ttft_s for row in (before, after))
        if slow is None or fast is None or min(slow.lower_quartile, fast.lower_quartile) <= 0:
            return None
        return slow.lower_quartile / fast.upper_quartile, slow.upper_quartile / fast.lower_quartile

    @staticmethod
    def _engines(baseline: VariantResults, candidate: VariantResults) -> str:
        before, after = speed_of(baseline).engine, speed_of(candidate).engine
        return "" if before == after else f" (engine {after} against {before})"
