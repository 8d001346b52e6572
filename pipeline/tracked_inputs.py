"""What a variant was asked and what it answered: datasets and tables of documents for an experiment tracker. Pure.

A dataset is named after its task and has the digest of its documents, so that runs on other data are seen to be.
A table has one row a document; a candidate's holds the baseline's answer beside its own, lost documents first.

    table = samples_table(candidate.quality.tasks["piqa"], before=baseline.quality.tasks["piqa"])
    table["columns"]  # ['document', 'change', 'acc', 'baseline acc']
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.comparison import UnmeasuredError, comparable_quality, comparable_task
from pipeline.results import Sample, TaskResult, VariantResults
from pipeline.tracked_values import legal_name

LONGEST_DIGEST = 36
"""Characters of a dataset's digest that MLflow stores."""

_ORDER = {"lost": 0, "gained": 1, "other score": 2, "": 3}


@dataclass(frozen=True)
class TrackedDataset:
    """What one task, or the held text, was measured on; `source` and `profile` are JSON."""

    name: str
    digest: str
    source: str
    profile: str


def variant_datasets(variant: VariantResults) -> tuple[TrackedDataset, ...]:
    """One dataset for each task, and one for the text whose distribution was measured."""
    if variant.quality is None:
        return ()
    found = [_task_dataset(name, task) for name, task in variant.quality.tasks.items()]
    held = variant.quality.distribution
    if held is not None:
        profile = {"scored_tokens": held.scored_tokens, "context_tokens": held.context_tokens}
        found.append(
            TrackedDataset(
                name="held text",
                digest=held.text_sha256[:LONGEST_DIGEST],
                source=json.dumps({"text_sha256": held.text_sha256}),
                profile=json.dumps(profile),
            )
        )
    return tuple(found)


def _task_dataset(name: str, task: TaskResult) -> TrackedDataset:
    source = {
        "task": name,
        "task_version": task.task_version,
        "task_hash": task.task_hash,
        "data_hash": task.data_hash,
        "prompts_hash": task.prompts_hash,
    }
    return TrackedDataset(
        name=legal_name(name),
        digest=task.data_hash[:LONGEST_DIGEST],
        source=json.dumps(source),
        profile=json.dumps({"num_rows": task.documents, "num_fewshot": task.num_fewshot}),
    )


def sample_tables(
    variant: VariantResults, *, baseline: VariantResults | None
) -> Mapping[str, dict[str, Any]]:
    """`samples_table` of each task; without the baseline's answers where the two can't be compared."""
    if variant.quality is None:
        return {}
    return {
        task: samples_table(result, pairs=_pairs(task, variant, baseline))
        for task, result in variant.quality.tasks.items()
    }


def _pairs(
    task: str, variant: VariantResults, baseline: VariantResults | None
) -> Sequence[tuple[Sample, Sample]]:
    if baseline is None or baseline.name == variant.name:
        return ()
    try:
        return comparable_task(task, *comparable_quality(baseline, variant))[2]
    except UnmeasuredError:
        return ()


def samples_table(result: TaskResult, *, pairs: Sequence[tuple[Sample, Sample]] = ()) -> dict[str, Any]:
    """A task's documents as `columns` and `data`, the form that MLflow shows as a table.

    `pairs` holds the baseline's sample before each of the variant's; `change` says what became of the document by
    the task's primary metric. Documents that changed come first.
    """
    metrics = tuple(dict.fromkeys(name for sample in result.samples for name in sample.metrics))
    if not pairs:
        rows = [
            [sample.doc_hash, *(sample.metrics.get(name) for name in metrics)] for sample in result.samples
        ]
        return {"columns": ["document", *metrics], "data": rows}
    better = result.metrics.get(result.primary_metric)
    higher_is_better = better is None or better.higher_is_better
    changed = [
        (
            _change(before, after, metric=result.primary_metric, higher_is_better=higher_is_better),
            before,
            after,
        )
        for before, after in pairs
    ]
    rows = [
        [
            after.doc_hash,
            change,
            *(after.metrics.get(name) for name in metrics),
            *(before.metrics.get(name) for name in metrics),
        ]
        for change, before, after in sorted(changed, key=lambda one: _ORDER[one[0]])
    ]
    return {
        "columns": ["document", "change", *metrics, *(f"baseline {name}" for name in metrics)],
        "data": rows,
    }


def _change(before: Sample, after: Sample, *, metric: str, higher_is_better: bool) -> str:
    old, new = before.metrics.get(metric), after.metrics.get(metric)
    if old is None or new is None or old == new:
        return ""
    if {old, new} != {0.0, 1.0}:
        return "other score"
    return "gained" if (new > old) == higher_is_better else "lost"
