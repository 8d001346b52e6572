"""The candidate must need at most a fraction of the baseline's memory, or a number of bytes.

>>> MaxMemory(fraction=0.6).of
'resident'
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.comparison import UnmeasuredError, memory_of, refuse_other_versions, speed_of, usable_number
from pipeline.readings import Reading
from pipeline.results import Finding, VariantResults
from pipeline.rules.base import ThresholdRule, exactly_one

WIDENED = 1.5
"""Resident ÷ on-disk bytes from which a baseline is no 16-bit one in memory."""


class MaxMemory(ThresholdRule):
    """Bytes of the weights in memory, of the weights on disk, or at the peak of the run."""

    kind: Literal["max_memory"] = "max_memory"
    fraction: float | None = Field(default=None, gt=0, le=10)
    """Of the baseline's bytes: 0.6, not 60."""
    bytes: int | None = Field(default=None, gt=0)
    of: Literal["resident", "on_disk", "peak"] = "resident"

    needs = frozenset({"speed"})
    unit: ClassVar[str] = "bytes"
    bound = "at most"

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        exactly_one(self.kind, fraction=self.fraction, bytes=self.bytes)
        return self

    def compare(self, *, baseline: VariantResults, candidate: VariantResults) -> Finding:
        """`observed` and `limit` are fractions of the baseline's bytes, or bytes."""
        used = self._bytes(candidate)
        what = f"{self.of.replace('_', ' ')} {used / 1e9:.4g} GB"
        if self.bytes is not None:
            limit_text = f"{self.bytes / 1e9:.4g} GB"
            return self.held_against(Reading(value=used, what=what), self.bytes, limit_text=limit_text)
        assert self.fraction is not None
        before = self._bytes(baseline)
        if self.of == "resident":
            _refuse_widened(baseline)
        if self.of == "peak":
            _refuse_other_engine(baseline, candidate)
        refuse_other_versions(baseline, candidate)
        observed = used / before
        what += f" is {observed:.3g} of the baseline's {before / 1e9:.4g} GB"
        reading = Reading(value=observed, what=what)
        return self.held_against(reading, self.fraction, unit="fraction", limit_text=f"{self.fraction:g}")

    def _bytes(self, variant: VariantResults) -> float:
        if self.of == "on_disk" and variant.checkpoint is not None:
            value = variant.checkpoint.weight_bytes_on_disk
        else:
            memory = memory_of(variant)
            value = {
                "resident": memory.weight_bytes_resident,
                "on_disk": memory.weight_bytes_on_disk,
                "peak": memory.peak_bytes,
            }[self.of]
        return usable_number(value, f"{variant.name}: {self.of.replace('_', ' ')} memory in bytes")


def _refuse_widened(baseline: VariantResults) -> None:
    """UnmeasuredError when the engine holds a 16-bit baseline in FP32, beside which everything looks small."""
    memory = memory_of(baseline)
    widened = memory.weight_bytes_resident > WIDENED * memory.weight_bytes_on_disk
    if widened and baseline.speed is not None and baseline.speed.compute_dtype == "float32":
        raise UnmeasuredError(
            f"{baseline.name} is held in float32, {memory.weight_bytes_resident:,} bytes for "
            f"{memory.weight_bytes_on_disk:,} on disk; choose a 16-bit compute_dtype, or compare of: on_disk"
        )


def _refuse_other_engine(baseline: VariantResults, candidate: VariantResults) -> None:
    """UnmeasuredError when peaks hold different libraries: on a CPU a peak is the whole process's, torch and all."""
    before, after = speed_of(baseline).engine, speed_of(candidate).engine
    if before != after:
        raise UnmeasuredError(
            f"peak memory holds the engine's own libraries, and {baseline.name} ran on {before}, {candidate.name} "
            f"on {after}; compare of: resident or of: on_disk, or run both on one engine"
        )
