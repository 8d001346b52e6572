"""What a run was asked is named by its data, and documents that changed stand on top of a table."""

from __future__ import annotations

import json

from pipeline.results import MetricScore
from pipeline.tracked_inputs import sample_tables, variant_datasets
from tests import result_builders as build

BEFORE, AFTER = build.paired_answers(both_right=1, lost=1, gained=1, both_wrong=1)


def test_other_data_is_another_dataset_of_the_same_name() -> None:
    found = [
        variant_datasets(build.variant("int8", quality=build.quality(build.task(data_hash=data))))
        for data in ("a" * 64, "b" * 64)
    ]
    ((first,), (second,)) = found
    assert first.name == second.name == "piqa"
    assert (first.digest, second.digest) == ("a" * 36, "b" * 36)
    assert json.loads(first.source)["data_hash"] == "a" * 64
    assert variant_datasets(build.variant("int8")) == ()


def test_a_candidates_table_says_what_became_of_each_document_and_lost_ones_come_first() -> None:
    baseline, candidate = (
        build.variant(name, quality=build.quality(build.task(values=values)))
        for name, values in (("fp16", BEFORE), ("int8", AFTER))
    )
    table = sample_tables(candidate, baseline=baseline)["piqa"]
    assert table["columns"] == ["document", "change", "acc", "baseline acc"]
    assert [row[1:] for row in table["data"]] == [
        ["lost", 0.0, 1.0],
        ["gained", 1.0, 0.0],
        ["", 1.0, 1.0],
        ["", 0.0, 0.0],
    ]
    assert sample_tables(baseline, baseline=baseline)["piqa"]["columns"] == ["document", "acc"]


def test_where_less_is_better_a_document_is_lost_by_a_rise() -> None:
    scores = {"acc": MetricScore(score=0.5, stderr=None, higher_is_better=False)}
    baseline, candidate = (
        build.variant(name, quality=build.quality(build.task(values=values, metrics=scores)))
        for name, values in (("fp16", [0.0, 0.25]), ("int8", [1.0, 0.5]))
    )
    table = sample_tables(candidate, baseline=baseline)["piqa"]
    assert [row[1] for row in table["data"]] == ["lost", "other score"]


def test_answers_of_other_documents_are_not_put_beside_each_other() -> None:
    baseline = build.variant("fp16", quality=build.quality(build.task(values=(1.0, 0.0, 1.0))))
    candidate = build.variant("int8", quality=build.quality(build.task(values=(1.0, 0.0))))
    assert sample_tables(candidate, baseline=baseline)["piqa"]["columns"] == ["document", "acc"]
