"""What the gate's accuracy limits can decide with the recipe's documents, before the run. Pure.

rows = quality_plan(recipe, sizes=task_sizes(request), flip_rates={"piqa_local": 0.031})
rows[0].power.documents_needed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.paired_drop import power
from pipeline.plan_values import QualityPlan, TaskSizes
from pipeline.recipe import ExpandedRecipe
from pipeline.results import Report
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.sample_sizes import documents_to_detect
from pipeline.sequential import last_confidence

ASSUMED_FLIP_RATE = 0.05
"""Share of answers that quantizing is taken to flip before anything is measured."""
ASSUMED_SCORE = 0.5
"""The baseline's, of which a limit in percent is taken; a better one leaves a larger limit."""


def quality_plan(
    recipe: ExpandedRecipe, *, sizes: TaskSizes, flip_rates: Mapping[str, float]
) -> tuple[QualityPlan, ...]:
    """A row for each task or pooled group that a rule of the gate judges.

    `flip_rates` are those of the last run, by task or group; without one 5 % of answers are taken to flip.
    """
    return tuple(
        _row(
            recipe,
            rule,
            name,
            documents=documents,
            flip_rate=flip_rates.get(name),
            pooled=rule.pool_groups and name in sizes.groups,
        )
        for rule in recipe.gate
        if isinstance(rule, MaxQualityDrop) and recipe.quality is not None
        for name, documents in _subjects(rule, sizes)
    )


def _subjects(rule: MaxQualityDrop, sizes: TaskSizes) -> Iterator[tuple[str, int | None]]:
    """What the rule judges, each with its documents, as far as that can be told before anything is measured."""
    for name in dict.fromkeys(rule.tasks or sizes.tasks):
        members = sizes.groups.get(name, (name,))
        kept = [task for task in members if task not in sizes.rolling]
        if rule.pool_groups and kept:
            yield name, _total(kept, sizes)
        elif not rule.pool_groups:
            yield from ((task, sizes.documents.get(task)) for task in kept)


def _total(tasks: list[str], sizes: TaskSizes) -> int | None:
    known = [sizes.documents[task] for task in tasks if task in sizes.documents]
    return sum(known) if len(known) == len(tasks) else None


def _row(
    recipe: ExpandedRecipe,
    rule: MaxQualityDrop,
    name: str,
    *,
    documents: int | None,
    flip_rate: float | None,
    pooled: bool,
) -> QualityPlan:
    margin, rate = rule.margin(ASSUMED_SCORE), ASSUMED_FLIP_RATE if flip_rate is None else flip_rate
    # A pooled group answers every document, so that its confidence isn't shared among looks.
    sequential = recipe.quality is not None and recipe.quality.sequential and not pooled
    confidence = last_confidence(rule.confidence) if sequential else rule.confidence
    return QualityPlan(
        task=name,
        rule=rule.kind,
        points=100 * margin if rule.points is None else rule.points,
        confidence=rule.confidence,
        flips="assumed" if flip_rate is None else "measured",
        power=power(documents=documents, flip_rate=rate, margin=margin, confidence=confidence),
        # A drop of the limit's size takes as many flips at least.
        documents_to_find=documents_to_detect(
            margin, flip_rate=max(rate, margin), confidence=rule.confidence
        ),
    )


def observed_flip_rates(report: Report) -> dict[str, float]:
    """The largest share of flipped answers of any required candidate, by task or group, from a run's findings."""
    rates: dict[str, float] = {}
    for variant in report.variants:
        for finding in variant.findings:
            if finding.power is not None and variant.required:
                rates[finding.subject] = max(rates.get(finding.subject, 0.0), finding.power.flip_rate)
    return rates


def quality_notes(rows: tuple[QualityPlan, ...]) -> tuple[str, ...]:
    """Which limits will likely stay undecided, one line each."""
    return tuple(
        f"{row.rule} {row.points:g} points on {row.task}: likely inconclusive, {row.power.documents} documents decide "
        f"a margin of {row.power.detectable_points:.1f} points; raise quality.limit or the margin"
        for row in rows
        if row.power.decides is False
    )
