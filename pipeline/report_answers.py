"""The questions that a reader of a report has, answered in sentences: what ships, why, its cost, its limits, how sure.

for answer in answers(report):
    print(answer.question, *answer.lines)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.pick_tables import pick_text
from pipeline.readings import decode_rate, engines_apart, row_is_noisy, smallest_batch
from pipeline.recipe_sections import SpeedSpec
from pipeline.report_findings import (
    candidates,
    concern,
    figure_name,
    figure_text,
    judged,
    limit_text,
    side_of,
    what_ships,
    why,
)
from pipeline.results import Finding, Report, VariantReport

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
        Answer("How sure is it?", tuple(_sureness(report))),
    )


def _told(report: Report) -> tuple[VariantReport, ...]:
    """Those that ship; where nothing does, the candidates that count, or all of them where none does."""
    ships = tuple(one for one in candidates(report) if one.verdict == "ship")
    return ships or tuple(one for one in candidates(report) if one.required) or candidates(report)


def _why(report: Report) -> Iterator[str]:
    found = [why(variant) for variant in judged(report)]
    told = {variant.name for variant in judged(report)}
    whole = [reason for reason in report.because if not any(reason.startswith(f"{name}: ") for name in told)]
    named = f"{report.baseline}: "  # a variant's name keeps its letters
    yield from (
        f"{reason}." if reason.startswith(named) else f"{reason[:1].upper()}{reason[1:]}." for reason in whole
    )
    yield from found
    yield from (line for variant in _told(report) if (line := _gains(report, variant)))


def _gains(report: Report, variant: VariantReport) -> str:
    """What a variant is for: its speed and memory beside the baseline's."""
    baseline, size = report.variant(report.baseline), smallest_batch(report.variants)
    if baseline is None or baseline is variant:
        return ""
    parts = []
    rates = [decode_rate(one, size) for one in (variant, baseline)]
    if rates[0] and rates[1]:
        engines = engines_apart(baseline, variant)
        noisy = ["noisy"] if any(row_is_noisy(one, size) for one in (variant, baseline)) else []
        asides = [*([f"{engines}: the engines differ"] if engines else []), *noisy]
        beside = f" ({'; '.join(asides)})" if asides else ""
        parts.append(f"decodes {rates[0] / rates[1]:.2f} × as fast at batch {size}{beside}")
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
    hours = dict.fromkeys(_dollars(one.cost.dollars_per_hour) for one in priced if one.cost)
    if hours:
        yield f"On a machine of {' or '.join(hours)} an hour, kept busy:"
    for variant in priced:
        cost = variant.cost
        assert cost is not None
        entry = cost.dollars_per_million_input_tokens
        yield (
            f"{variant.name}: {_dollars(cost.dollars_per_million_output_tokens)} a million output tokens at batch "
            f"{cost.batch_size}" + ("." if entry is None else f", {_dollars(entry)} a million input tokens.")
        )
    if not priced:
        yield "In money: unknown, because the recipe names no price (cost: dollars_per_hour)."
    for variant in _told(report):
        yield f"In quality, {variant.name}: {_given_up(variant)}."


def _dollars(amount: float | None) -> str:
    """With cents; more digits where cents say nothing."""
    assert amount is not None
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:,.3g}"


def _given_up(variant: VariantReport) -> str:
    """The quality findings that use up most of what they are allowed, or why there is none."""
    asked = [one for one in variant.findings if concern(one) == "quality"]
    if not asked:
        return "not measured" if variant.quality is None else "measured, but no limit of the gate is about it"
    if all(one.observed is None for one in asked):
        return "unknown, because its figures are missing"
    found = [(used, one) for one in asked if (used := _used_up(one)) is not None]
    if not found:
        return "nothing that a limit is about got worse"
    nearest = sorted(found, key=lambda pair: -pair[0])[:GIVES_UP]
    told = "; ".join(
        f"{figure_name(one)} {figure_text(one.observed, one.unit)} ({limit_text(one)})" for _, one in nearest
    )
    return f"{told}{f', the nearest to their limits of {len(found)}' if len(found) > GIVES_UP else ''}"


def _used_up(finding: Finding) -> float | None:
    """The share of what the limit allows that was used, 1 at the limit; None where nothing was."""
    if finding.observed is None or not finding.limit:
        return None
    side = side_of(finding)
    observed = abs(finding.observed) if side == "within ±" else finding.observed
    if observed <= 0:
        return None
    return finding.limit / observed if side == "at least" else observed / finding.limit


def _limits(report: Report) -> Iterator[str]:
    size = smallest_batch(report.variants)
    variants = [one for one in report.variants if one.name == report.baseline] + list(_told(report))
    for variant in variants:
        lines = (_bandwidth(report, variant, size), _batching(variant), _held(variant))
        told = [line for line in lines if line]
        yield (
            f"{variant.name}: {'; '.join(told)}."
            if told
            else f"{variant.name}: nothing was measured that tells."
        )


def _sureness(report: Report) -> Iterator[str]:
    """What decided most narrowly, what stayed open, on how many documents, and how steady the machine was."""
    for variant in _told(report):
        yield from _closest(variant)
        yield from _open(variant)
        if documents := _documents(variant):
            yield f"{variant.name}: its scores are of {documents}; the differences are of the same ones."
        if variant.quality and variant.quality.agreement:
            yield f"{variant.name}: timed and scored by two engines, {variant.quality.agreement.text}."
    yield from _drift(report)


def _closest(variant: VariantReport) -> Iterator[str]:
    found = [(used, one) for one in variant.findings if (used := _used_up(one)) is not None]
    if not found:
        return
    _, one = max(found, key=lambda pair: pair[0])
    span = ""
    if one.interval is not None:
        low, high = (figure_text(end, one.unit) for end in one.interval)
        span = f", interval {low} to {high}"
    yield (
        f"{variant.name}: the limit that decides most is that on {figure_name(one)}, "
        f"{figure_text(one.observed, one.unit)} ({limit_text(one)}){span}."
    )


def _open(variant: VariantReport) -> Iterator[str]:
    """Findings that decided nothing, in their own words."""
    for one in variant.findings:
        if one.outcome in ("inconclusive", "missing"):
            yield f"{variant.name}: {one.outcome}, {one.because}."


def _documents(variant: VariantReport) -> str:
    counts = sorted(task.documents for task in variant.quality.tasks.values()) if variant.quality else []
    if not counts:
        return ""
    span = f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"
    return f"{span} documents a task"


def _drift(report: Report) -> Iterator[str]:
    """Said where the machine changed by more than the spread that the recipe allows to a single figure."""
    section = report.resolved_recipe.get("speed")
    asked = section.get("max_cv_percent") if isinstance(section, dict) else None
    allowed = asked if isinstance(asked, int | float) else SpeedSpec.model_fields["max_cv_percent"].default
    baseline = report.variant(report.baseline)
    speed = baseline.speed if baseline else None
    if speed is None or speed.drift_percent is None or abs(speed.drift_percent) <= allowed:
        return
    told = (
        "the variants took turns, so it fell on all alike, but absolute speeds and prices may be off by as much"
        if speed.timed_in_turn
        else "differences of speed of that size tell little"
    )
    yield (
        f"The machine: {report.baseline}, timed again at the end, took {abs(speed.drift_percent):.1f} % "
        f"{'more' if speed.drift_percent > 0 else 'less'} time a token; {told}."
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
        f"a budget of {capacity.budget_bytes / 1e6:,.0f} MB holds {capacity.measured_sequences:,}{more} sequences of "
        f"{capacity.context_tokens:,} tokens"
    )
