"""How many sequences fit, predicted beside measured, and what filled the memory: tables for the report.

print(capacity_markdown(report))
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.capacity_results import CapacityResult
from pipeline.reconciliation import capacity_reason
from pipeline.results import Report, VariantReport
from pipeline.text_table import markdown_table

_FITS = (
    *("variant", "layout", "sequences", "predicted", "KV MB each", "predicted KV"),
    *("peak MB each", "predicted peak", "because"),
)
_SPLIT = (
    *("variant", "layout", "sequences", "peak MB", "weights", "predicted weights", "KV cache", "activations"),
    *("reserve", "process"),
)
_LEGEND = (
    "All in MB (1e6 bytes). Peak = weights + KV cache + activations, at the largest batch that ran; the allocator's "
    "reserve and the process come on top of it and count against no budget."
)


def capacity_markdown(report: Report) -> str:
    """Both tables; "" when nothing was measured."""
    measured = [(variant, layout) for variant in report.variants for layout in _layouts(variant.capacity)]
    if not measured:
        return ""
    first = measured[0][1]
    head = (
        f"Sequences of {first.context_tokens} tokens that ran at once in {first.budget_bytes / 1e6:.0f} MB "
        f"({first.budget_source})."
    )
    fits = markdown_table(
        _FITS, [_fits_row(variant.name, one) for variant, one in measured], text_columns=("layout", "because")
    )
    rows = [_split_row(variant, one) for variant, one in measured if one.memory]
    split = markdown_table(_SPLIT, rows, text_columns=("layout",)) if rows else ""
    return "\n\n".join(part for part in (head, fits, split, _LEGEND if rows else "") if part)


def capacity_notes(capacity: CapacityResult) -> list[str]:
    """What ended each search, and what must be known of it."""
    notes = []
    for one in _layouts(capacity):
        kind = "capacity" if one.layout == "contiguous" else "capacity, paged"
        held = "not measured" if one.measured_sequences is None else f"{one.measured_sequences} sequences"
        notes.append(f"{kind}: {held}: {one.because}" if one.because else f"{kind}: {held}")
    return [*notes, *(f"capacity: {note}" for note in capacity.notes)]


def _layouts(capacity: CapacityResult | None) -> Iterator[CapacityResult]:
    if capacity:
        yield capacity
        if capacity.paged:
            yield capacity.paged


def _fits_row(name: str, one: CapacityResult) -> tuple[str, ...]:
    more = "+" if one.limited_by == "ceiling" else ""
    held = "failed" if one.measured_sequences is None else f"{one.measured_sequences}{more}"
    return (
        name,
        one.layout,
        held,
        _predicted(one),
        _mb(one.kv_bytes_per_sequence),
        _mb(one.kv_bytes_per_sequence_predicted),
        _mb(one.peak_bytes_per_sequence),
        _mb(one.peak_bytes_per_sequence_predicted),
        one.because if one.limited_by == "failure" else capacity_reason(one),
    )


def _predicted(one: CapacityResult) -> str:
    """Without predicted activations the number is what weights and KV cache leave room for, which is too many."""
    if one.predicted_sequences is None:
        return "–"
    return str(one.predicted_sequences) if one.predicted_peak else f"under {one.predicted_sequences}"


def _split_row(variant: VariantReport, one: CapacityResult) -> tuple[str, ...]:
    split = one.memory
    assert split is not None
    planned = next((item.predicted for item in variant.planned if item.figure == "weights resident"), None)
    return (
        variant.name,
        one.layout,
        str(split.sequences),
        _mb(split.peak_bytes, digits=1),
        _mb(split.weight_bytes, digits=1),
        _mb(planned and planned * 1e6, digits=1),
        _mb(split.kv_cache_bytes, digits=1),
        _mb(split.activation_bytes, digits=1),
        _mb(split.reserve_bytes, digits=1),
        _mb(split.process_bytes, digits=1),
    )


def _mb(size_bytes: float | None, *, digits: int = 2) -> str:
    return "–" if size_bytes is None else f"{size_bytes / 1e6:.{digits}f}"
