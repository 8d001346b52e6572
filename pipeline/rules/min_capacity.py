"""The candidate must hold a number of sequences at once, or a factor more than the baseline.

>>> MinCapacity(sequences=32).factor is None
True
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.capacity_results import CapacityResult
from pipeline.comparison import UnmeasuredError
from pipeline.results import Finding, FindingOutcome, VariantResults
from pipeline.rules.base import ThresholdRule, exactly_one


class MinCapacity(ThresholdRule):
    """Sequences of full context length that really ran at once in the memory budget."""

    kind: Literal["min_capacity"] = "min_capacity"
    factor: float | None = Field(default=None, gt=0)
    """Times the baseline's measured sequences."""
    sequences: int | None = Field(default=None, gt=0)

    needs = frozenset({"capacity"})
    unit: ClassVar[str] = "sequences"

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        exactly_one(self.kind, factor=self.factor, sequences=self.sequences)
        return self

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """`observed` and `limit` are sequences, or multiples of the baseline's sequences."""
        after = _usable(candidate)
        if self.sequences is not None:
            return self._against_number(after, self.sequences)
        before = _usable(baseline)
        for field in ("context_tokens", "budget_bytes"):
            if getattr(before, field) != getattr(after, field):
                raise UnmeasuredError(
                    f"different {field}: {getattr(before, field)} with the baseline, "
                    f"{getattr(after, field)} with the candidate"
                )
        return self._against_baseline(before, after)

    def _against_number(self, after: CapacityResult, sequences: int) -> Finding:
        held = _sequences(after)
        outcome: FindingOutcome = "pass" if held >= sequences else "fail"
        if outcome == "fail" and after.limited_by == "ceiling":
            outcome = "inconclusive"
        return self.finding(
            outcome,
            f"{held}{_ended(after)} sequences of {after.context_tokens} tokens ran at once; "
            f"at least {sequences} are asked for",
            unit=self.unit,
            observed=held,
            limit=sequences,
        )

    def _against_baseline(self, before: CapacityResult, after: CapacityResult) -> Finding:
        assert self.factor is not None
        base, held = _sequences(before), _sequences(after)
        if base == 0:
            raise UnmeasuredError("the baseline holds no sequence, so no factor can be told")
        observed = held / base
        outcome: FindingOutcome = "pass" if observed >= self.factor else "fail"
        # A search that ended at its own ceiling gives a lower bound of that side only.
        if (outcome == "pass" and before.limited_by == "ceiling") or (
            outcome == "fail" and after.limited_by == "ceiling"
        ):
            outcome = "inconclusive"
        return self.finding(
            outcome,
            f"{held}{_ended(after)} sequences of {after.context_tokens} tokens ran at once, {observed:.3g} × "
            f"the baseline's {base}{_ended(before)}; at least {self.factor:g} × is asked for",
            unit="x",
            observed=observed,
            limit=self.factor,
        )


def _usable(variant: VariantResults) -> CapacityResult:
    capacity = variant.capacity
    if capacity is None:
        raise UnmeasuredError(f"{variant.name}: the capacity stage gave no result")
    if capacity.measured_sequences is None or capacity.limited_by == "failure":
        reason = f": {capacity.because}" if capacity.because else ""
        raise UnmeasuredError(f"{variant.name}: capacity was not measured{reason}")
    if capacity.measured_sequences < 0 or capacity.weight_bytes_resident <= 0:
        raise UnmeasuredError(
            f"{variant.name}: implausible, {capacity.measured_sequences} sequences beside "
            f"{capacity.weight_bytes_resident} bytes of weights"
        )
    return capacity


def _sequences(capacity: CapacityResult) -> int:
    assert capacity.measured_sequences is not None
    return capacity.measured_sequences


def _ended(capacity: CapacityResult) -> str:
    return " or more (the search's ceiling)" if capacity.limited_by == "ceiling" else ""
