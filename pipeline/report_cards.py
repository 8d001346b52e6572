"""One variant of a report as a card: speed, memory and quality beside the baseline, each with its limits.

for card in variant_cards(report):
    print(card.name, card.verdict, [part.heading for part in card.parts])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.quality_tables import documents_cell
from pipeline.readings import decode_rate, engines_apart, row_is_noisy
from pipeline.report_findings import (
    CONCERNS,
    MARKS,
    MISSING,
    OUTCOMES,
    Concern,
    figure_name,
    figure_text,
    findings_about,
    interval_text,
    judged,
    limit_text,
    why,
)
from pipeline.results import Finding, Report, VariantReport, Verdict
from pipeline.scores import VOID, paired_scores, score_of, shown_metric

_STAGES: dict[Concern, tuple[str, ...]] = {"speed": ("speed", "serving"), "memory": ("speed", "capacity")}
_OUTCOME = {"out_of_memory": "out of memory"}


@dataclass(frozen=True)
class Line:
    """One figure of the variant beside the baseline's; `change` compares them."""

    label: str
    unit: str
    value: str
    baseline: str
    change: str


@dataclass(frozen=True)
class Limit:
    """A finding in words."""

    outcome: str
    mark: str
    word: str
    rule: str
    figure: str
    observed: str
    limit: str
    interval: str
    because: str

    @property
    def text(self) -> str:
        """Figure and limit."""
        if self.observed == MISSING:
            return self.figure if self.limit == "–" else f"{self.figure}, {self.limit}"
        return f"{self.figure} {self.observed}, {self.limit}"


@dataclass(frozen=True)
class Part:
    """A third of the triple: figures, limits, and why something is missing."""

    heading: str
    lines: tuple[Line, ...]
    limits: tuple[Limit, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Card:
    """Everything that decides of one variant."""

    name: str
    verdict: Verdict
    required: bool
    why: str
    parts: tuple[Part, ...]


def variant_cards(report: Report) -> tuple[Card, ...]:
    """One for each variant that is judged, in the report's order."""
    baseline = report.variant(report.baseline)
    return tuple(
        Card(one.name, one.verdict, one.required, why(one), tuple(_parts(report, one, baseline)))
        for one in judged(report)
    )


def limit_of(finding: Finding) -> Limit:
    """The finding as a page shows it."""
    return Limit(
        outcome=finding.outcome,
        mark=MARKS[finding.outcome],
        word=OUTCOMES[finding.outcome],
        rule=finding.name,
        figure=figure_name(finding),
        observed=figure_text(finding.observed, finding.unit),
        limit=limit_text(finding),
        interval=interval_text(finding),
        because=finding.because,
    )


def _parts(report: Report, variant: VariantReport, baseline: VariantReport | None) -> Iterator[Part]:
    lines = {
        "speed": tuple(_speed_lines(variant, baseline)),
        "memory": tuple(_memory_lines(variant, baseline)),
        "quality": tuple(_quality_lines(variant, baseline)),
        "other": (),
    }
    unmade = tuple(_failed(variant, ("quantize",)))
    if unmade:  # the cause of all that is missing below
        yield Part(heading="Checkpoint", lines=(), limits=(), missing=unmade)
    for about, heading in CONCERNS.items():
        limits = tuple(limit_of(finding) for finding in findings_about(variant, about))
        if about == "other" and not limits:
            continue
        missing = () if about == "other" else tuple(_missing(report, variant, about))
        yield Part(heading=heading, lines=lines[about], limits=limits, missing=missing)


def _missing(report: Report, variant: VariantReport, about: Concern) -> Iterator[str]:
    """Why figures of this kind aren't there."""
    stages = _STAGES.get(about, (about,))
    failed = {one.stage for one in variant.failures}
    yield from _failed(variant, stages)
    if about == "speed" and variant.speed:
        for row in variant.speed.rows:
            if row.outcome != "measured":
                yield f"{row.name}, batch {row.batch_size}, {_plain(row.outcome)}: {row.because or 'no reason told'}"
    for stage in stages:
        if getattr(variant, stage, None) is None and stage not in failed and stage != "serving":
            asked = report.resolved_recipe.get(stage) is not None
            yield f"{stage}: " + ("no result" if asked else f"the recipe has no {stage} section")


def _failed(variant: VariantReport, stages: Sequence[str]) -> Iterator[str]:
    for failure in variant.failures:
        if failure.stage in stages:
            yield f"{failure.stage} {_plain(failure.reason)}: {failure.message}"


def _plain(word: str) -> str:
    return _OUTCOME.get(word, word)


# --- figures -----------------------------------------------------------------------------------------------


def _line(
    label: str, value: float | None, before: float | None, form: str, unit: str, *, ratio: bool = True
) -> Line:
    """With a ratio to the baseline, or with the difference where the figure is a share of 1."""
    change = "–"
    if value is not None and before is not None:
        change = f"{value - before:+.3f}" if not ratio else f"{value / before:,.2f} ×" if before else "–"
    return Line(label, unit, _shown(value, form), _shown(before, form), change)


def _shown(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def _speed_lines(variant: VariantReport, baseline: VariantReport | None) -> Iterator[Line]:
    sizes = sorted(
        {row.batch_size for one in (variant, baseline) if one and one.speed for row in one.speed.of("batch")}
    )
    apart = engines_apart(baseline, variant)
    engines = f" ({apart})" if apart else ""
    for size in sizes:
        rates = [decode_rate(one, size) for one in (variant, baseline)]
        line = _line(f"decode, batch {size}{engines}", rates[0], rates[1], ",.1f", "tok/s")
        noisy = ["~" if row_is_noisy(one, size) else "" for one in (variant, baseline)]
        yield replace(line, value=line.value + noisy[0], baseline=line.baseline + noisy[1])
    for size in sizes[:1]:
        value, before = (_ttft_ms(one, size) for one in (variant, baseline))
        yield _line(f"TTFT, batch {size}{engines}", value, before, ",.0f", "ms")
    prices = [
        one.cost.dollars_per_million_output_tokens if one and one.cost else None
        for one in (variant, baseline)
    ]
    if any(price is not None for price in prices):
        yield _line("1M output tokens", prices[0], prices[1], ",.4g", "$")


def _ttft_ms(variant: VariantReport | None, size: int) -> float | None:
    row = variant.speed.row(size) if variant and variant.speed else None
    return 1e3 * row.ttft_s.median if row and row.outcome == "measured" and row.ttft_s else None


def _memory_lines(variant: VariantReport, baseline: VariantReport | None) -> Iterator[Line]:
    both = (variant, baseline)
    disk = [1e-6 * one.checkpoint.weight_bytes_on_disk if one and one.checkpoint else None for one in both]
    held = [one.loaded_memory if one else None for one in both]
    resident = [1e-6 * one.weight_bytes_resident if one else None for one in held]
    bits = [one.checkpoint.bits_per_weight if one and one.checkpoint else None for one in both]
    yield _line("weights in memory", resident[0], resident[1], ",.1f", "MB")
    yield _line("weights on disk", disk[0], disk[1], ",.1f", "MB")
    yield _line("stored, all weights", bits[0], bits[1], ",.2f", "bits/weight")
    if any(one and one.capacity for one in both):
        count = [one.capacity.measured_sequences if one and one.capacity else None for one in both]
        line = _line("sequences at once", count[0], count[1], ",d", "")
        more = ["+" if one and one.capacity and one.capacity.limited_by == "ceiling" else "" for one in both]
        change = "–" if any(more) else line.change  # a ratio of lower bounds is none
        yield Line(line.label, "", line.value + more[0], line.baseline + more[1], change)


def _quality_lines(variant: VariantReport, baseline: VariantReport | None) -> Iterator[Line]:
    """The baseline's score is that on the documents that both answered, where the two compare."""
    arms = [one.quality if one else None for one in (variant, baseline)]
    paired = paired_scores(variant, baseline=baseline)
    names = dict.fromkeys(name for one in arms if one for name in one.tasks)
    for name in names:
        results = [one.tasks.get(name) if one else None for one in arms]
        metric = next(shown_metric(one) for one in results if one)
        both = paired.get((name, metric))
        scores = [score_of(one, metric) for one in results]
        scores[1] = both.before if both else scores[1]
        is_share = all(score is None or 0 <= score <= 1 for score in scores)
        form = ".3f" if is_share else ",.4g"
        label = f"{name} {metric.replace('_', ' ')}{documents_cell(results[0]) if results[0] else ''}"
        line = _line(label, scores[0], scores[1], form, "", ratio=not is_share)
        void = [VOID if one is not None and one.void is not None else "" for one in results]
        yield replace(
            line,
            value=void[0] or line.value,
            baseline=void[1] or line.baseline,
            change=f"{both.change:+.3f}" if both and is_share else line.change if both else "–",
        )
    held = [one.distribution if one else None for one in arms]
    if any(held):
        texts = [one.token_perplexity if one else None for one in held]
        yield _line("held text, perplexity per token", texts[0], texts[1], ",.4g", "")
        nats = [one.distance.kl_mean_nats if one and one.distance else None for one in held]
        same = [100 * one.distance.top1_agreement_share if one and one.distance else None for one in held]
        yield Line("held text, mean KL", "nats", _shown(nats[0], ".3g"), _shown(nats[1], ".2g"), "–")
        yield Line("held text, same top-1", "%", _shown(same[0], ".2f"), _shown(same[1], ".2f"), "–")
