"""The candidate must hold a number of sequences at once, or a factor more than the baseline.

>>> MinCapacity(sequences=32).factor is None
True
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.capacity_results import CapacityResult
from pipeline.comparison import UnmeasuredError, refuse_other_versions
from pipeline.readings import Reading
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule, exactly_one

ROUNDED = 1.05
"""Times the budget that weights and caches may seem to need: a cache's bytes are taken from a slope."""


class MinCapacity(ThresholdRule):
    """Sequences of full context length that really ran at once in the memory budget."""

    kind: Literal["min_capacity"] = "min_capacity"
    factor: float | None = Field(default=None, gt=0)
    """Times the baseline's measured sequences."""
    sequences: int | None = Field(default=None, gt=0)
    across_engines: bool = False
    """Allow baseline and candidate on different engines for `factor`: part of it is then the engine's memory."""

    needs = frozenset({"capacity"})
    unit: ClassVar[str] = "sequences"
    bound = "at least"

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        exactly_one(self.kind, factor=self.factor, sequences=self.sequences)
        return self

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """`observed` and `limit` are sequences, or multiples of the baseline's sequences."""
        after = _usable(candidate)
        if self.sequences is not None:
            return self._against_number(after, self.sequences)
        refuse_other_versions(baseline, candidate)
        before = _usable(baseline)
        for field in ("context_tokens", "budget_bytes"):
            if getattr(before, field) != getattr(after, field):
                raise UnmeasuredError(
                    f"different {field}: {getattr(before, field)} with the baseline, "
                    f"{getattr(after, field)} with the candidate"
                )
        return self._against_baseline(before, after, engines=self._engines(baseline, candidate))

    def _engines(self, baseline: VariantResults, candidate: VariantResults) -> str:
        """Both engines where they differ, for the sentence; UnmeasuredError where that isn't allowed."""
        before, after = _engine(baseline), _engine(candidate)
        if before is not None and before == after:
            return ""
        if not self.across_engines:
            raise UnmeasuredError(
                f"different engines, {before or 'an unknown one'} for the baseline and {after or 'an unknown one'} for "
                "the candidate, whose caches and work buffers differ, too; set across_engines: true in the rule to "
                "compare them all the same"
            )
        return f" (engine {after} against {before})"

    def _against_number(self, after: CapacityResult, sequences: int) -> Finding:
        reading = Reading(value=_sequences(after), what=_ran(after))
        finding = self.held_against(reading, sequences)
        return _lower_bound(finding) if finding.outcome == "fail" and _at_ceiling(after) else finding

    def _against_baseline(self, before: CapacityResult, after: CapacityResult, *, engines: str) -> Finding:
        assert self.factor is not None
        base, held = _sequences(before), _sequences(after)
        if base == 0:
            raise UnmeasuredError("the baseline holds no sequence, so no factor can be told")
        what = f"{_ran(after)}, {held / base:.3g} × the baseline's {base}{_ended(before)}"
        reading = Reading(value=held / base, what=what)
        finding = self.held_against(
            reading, self.factor, unit="x", limit_text=f"{self.factor:g} ×", note=engines
        )
        open_end = before if finding.outcome == "pass" else after
        return _lower_bound(finding) if _at_ceiling(open_end) else finding


def _lower_bound(finding: Finding) -> Finding:
    """Undecided: a search that ended at its own ceiling gives a lower bound of that side only."""
    because = f"{finding.because}; undecided, since a search ended at capacity.max_sequences"
    return finding.model_copy(update={"outcome": "inconclusive", "because": because})


def _engine(variant: VariantResults) -> str | None:
    """What held the sequences; results from before it was kept are of the engine that was timed."""
    assert variant.capacity is not None, "_usable has looked"
    return variant.capacity.engine or (variant.speed.engine if variant.speed else None)


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
    _refuse_more_than_ran(variant, capacity)
    return capacity


def _refuse_more_than_ran(variant: VariantResults, capacity: CapacityResult) -> None:
    """UnmeasuredError when more sequences are told than any try held, or than the budget has room for."""
    held = _sequences(capacity)
    ran = [probe.sequences for probe in capacity.probes if probe.outcome == "measured"]
    needed = capacity.weight_bytes_resident + held * (capacity.kv_bytes_per_sequence or 0)
    if (ran and held > max(ran)) or (held and needed > ROUNDED * capacity.budget_bytes):
        raise UnmeasuredError(
            f"{variant.name}: implausible, {held} sequences where the largest that ran had {max(ran, default=0)}, "
            f"needing {needed:,} bytes of a budget of {capacity.budget_bytes:,}"
        )


def _sequences(capacity: CapacityResult) -> int:
    assert capacity.measured_sequences is not None
    return capacity.measured_sequences


def _ran(capacity: CapacityResult) -> str:
    return (
        f"{_sequences(capacity)}{_ended(capacity)} sequences of {capacity.context_tokens} tokens ran at once"
    )


def _at_ceiling(capacity: CapacityResult) -> bool:
    return capacity.limited_by == "ceiling"


def _ended(capacity: CapacityResult) -> str:
    return " or more (the search's ceiling)" if _at_ceiling(capacity) else ""
