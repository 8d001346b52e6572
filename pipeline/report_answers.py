"""The four questions that a reader of a report has, answered in sentences: what ships, why, its cost, its limits.

for answer in answers(report):
    print(answer.question, *answer.lines)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.pick_tables import pick_text
from pipeline.report_findings import candidates, concern, figure_text, limit_text, rule_name, what_ships, why
from pipeline.results import Report, VariantReport
from pipeline.trade_plot import decode_rate, smallest_batch

GIVES_UP = 3
"""Of many quality findings the so many that come nearest to their limits are told."""


@dataclass(frozen=True)
class Answer:
    """A question with its answer, one sentence a line."""

    question: str
    lines: tuple[str, ...]


def answers(report: Report) -> tuple[Answer, ...]:
    """In the order in which they are asked."""
    return (
        Answer(
            "What ships?",
            (*what_ships(report), *(f"{line[:1].upper()}{line[1:]}." for line in pick_text(report))),
        ),
        Answer("Why?", tuple(_why(report))),
        Answer("What does it cost?", tuple(_cost(report))),
        Answer("What limits it?", tuple(_limits(report))),
    )


def _told(report: Report) -> tuple[VariantReport, ...]:
    """Those that ship; where nothing does, all candidates."""
    ships = tuple(one for one in candidates(report) if one.verdict == "ship")
    return ships or candidates(report)


def _why(report: Report) -> Iterator[str]:
    found = [why(variant) for variant in candidates(report)]
    named = {variant.name for variant in candidates(report)}
    whole = [reason for reason in report.because if not any(reason.startswith(f"{name}: ") for name in named)]
    yield from (f"{reason[:1].upper()}{reason[1:]}." for reason in whole)
    yield from found
    yield from (line for variant in _told(report) if (line := _gains(report, variant)))


def _gains(report: Report, variant: VariantReport) -> str:
    """What a variant is for: its speed and memory beside the baseline's."""
    baseline, size = report.variant(report.baseline), smallest_batch(report)
    if baseline is None or baseline is variant:
        return ""
    parts = []
    rates = [decode_rate(one, size) if size is not None else None for one in (variant, baseline)]
    if rates[0] and rates[1]:
        parts.append(f"decodes {rates[0] / rates[1]:.2f} × as fast at batch {size}")
    held = [
        one.loaded_memory.weight_bytes_resident if one.loaded_memory else 0 for one in (variant, baseline)
    ]
    if all(held):
        parts.append(f"takes {held[0] / held[1]:.2f} × the memory for its weights")
    return f"Beside {baseline.name}, {variant.name} {' and '.join(parts)}." if parts else ""


def _cost(report: Report) -> Iterator[str]:
    priced = [
        one for one in report.variants if one.cost and one.cost.dollars_per_million_output_tokens is not None
    ]
    for variant in priced:
        cost = variant.cost
        assert cost is not None
        entry = cost.dollars_per_million_input_tokens
        yield (
            f"{variant.name}: ${cost.dollars_per_million_output_tokens:,.4g} a million output tokens at batch "
            f"{cost.batch_size}"
            + ("" if entry is None else f", ${entry:,.4g} a million input tokens")
            + f", on a machine of ${cost.dollars_per_hour:,.4g} an hour kept busy."
        )
    if not priced:
        yield "In money: unknown, because the recipe names no price (cost: dollars_per_hour)."
    for variant in _told(report):
        given = _given_up(variant)
        if given:
            yield f"In quality, {variant.name}: {given}."


def _given_up(variant: VariantReport) -> str:
    """The quality findings that use up most of what they are allowed."""
    found = [
        (one.observed / one.limit if one.rule.startswith("max_") else one.limit / one.observed, one)
        for one in variant.findings
        if concern(one.rule) == "quality" and one.observed is not None and one.observed > 0 and one.limit
    ]
    if not found:
        return ""
    nearest = sorted(found, key=lambda pair: -pair[0])[:GIVES_UP]
    told = "; ".join(
        f"{rule_name(one)} {figure_text(one.observed, one.unit)} ({limit_text(one)})" for _, one in nearest
    )
    return f"{told}{f', the nearest to their limits of {len(found)}' if len(found) > GIVES_UP else ''}"


def _limits(report: Report) -> Iterator[str]:
    size = smallest_batch(report)
    variants = [one for one in report.variants if one.name == report.baseline] + list(_told(report))
    for variant in variants:
        lines = (_bandwidth(report, variant, size), _batching(variant), _held(variant))
        told = [line for line in lines if line]
        yield (
            f"{variant.name}: {'; '.join(told)}."
            if told
            else f"{variant.name}: nothing was measured that tells."
        )


def _bandwidth(report: Report, variant: VariantReport, size: int | None) -> str:
    row = variant.speed.row(size) if variant.speed and size is not None else None
    if row is None or row.outcome != "measured" or not row.bandwidth_share or not row.decode_tokens_per_s:
        return ""
    limit = f" of {report.device.read_bandwidth_bytes_per_s / 1e9:,.1f} GB/s" if report.device else ""
    ceiling = row.decode_tokens_per_s / row.bandwidth_share
    return (
        f"batch {size} decodes {row.decode_tokens_per_s:,.1f} tok/s, {100 * row.bandwidth_share:.0f} % of the "
        f"{ceiling:,.0f} that reading its bytes at the measured bandwidth{limit} allows"
    )


def _batching(variant: VariantReport) -> str:
    best = variant.speed.measured_break_even_batch if variant.speed else None
    return "" if best is None else f"larger batches gain up to {best:.1f} × one stream"


def _held(variant: VariantReport) -> str:
    capacity = variant.capacity
    if capacity is None or capacity.measured_sequences is None:
        return ""
    more = " or more (where the search ended)" if capacity.limited_by == "ceiling" else ""
    return (
        f"{capacity.budget_bytes / 1e6:,.0f} MB hold {capacity.measured_sequences:,}{more} sequences of "
        f"{capacity.context_tokens:,} tokens"
    )
