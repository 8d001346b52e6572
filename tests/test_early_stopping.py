"""Candidates that stop when they are decided: on values, and on a tiny model that is asked in a full run's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.answer_journal import AnswerJournal
from pipeline.comparison import UnmeasuredError, comparable_task
from pipeline.early_stopping import Margin, Stopping, answer_until_decided, plan_stopping, seeded_order
from pipeline.quality import evaluate
from pipeline.quality_tables import documents_cell, quality_markdown
from pipeline.results import QualityResult, Sample, TaskResult
from pipeline.tracked_values import variant_metrics
from tests import result_builders as build
from tests.quality_tasks import CHOICES, load, request_for, run, write_task
from tests.tiny_models import write_llama

POINTS_20 = Margin(metric="acc", drop=0.2, confidence=0.95, tests=1)


def asked(task: TaskResult) -> TaskResult:
    """Every document with the digest of its prompt."""
    samples = tuple(
        sample.model_copy(update={"prompt_hash": f"asked-{sample.doc_hash}"}) for sample in task.samples
    )
    return task.model_copy(update={"samples": samples})


def answering(values: list[float]) -> Callable[[tuple[int, ...]], TaskResult]:
    """A candidate whose answers to all documents are known, asked for some of them."""

    def answer(documents: tuple[int, ...]) -> TaskResult:
        every = build.task(values=values).samples
        samples = tuple(every[number] for number in documents)
        of_these = build.task(values=[values[number] for number in documents])
        return asked(
            of_these.model_copy(update={"samples": samples, "prompts_hash": "others", "data_hash": "o"})
        )

    return answer


def stopped(
    values: list[float], candidate: list[float], *margins: Margin, order: tuple[int, ...] | None = None
) -> TaskResult:
    plan = plan_stopping(
        build.quality(asked(build.task(values=values))), asked={"piqa": [margins or (POINTS_20,)]}
    )
    assert plan is not None
    order = order or seeded_order(len(values), task="piqa", seed=1)
    return answer_until_decided(plan.tasks["piqa"], order=order, answer=answering(candidate))


# --- when it stops ---------------------------------------------------------------------------------------


def test_a_clear_case_ends_early_at_the_confidence_of_its_look() -> None:
    right = [1.0] * 400
    same, broken = stopped(right, right), stopped(right, [0.0] * 400)
    for result in (same, broken):
        assert (result.documents, result.available_documents) == (50, 400)
        assert result.look_confidence == pytest.approx(0.995)
        assert len(result.samples) == 50


def test_what_is_never_clear_answers_every_document() -> None:
    candidate = [float(number % 5 != 0) for number in range(400)]
    result = stopped([1.0] * 400, candidate)
    assert (result.documents, result.available_documents) == (400, 400)
    assert result.look_confidence == pytest.approx(0.965)


def test_a_task_goes_on_until_the_strictest_of_its_margins_is_decided() -> None:
    right = [1.0] * 4000
    strict = Margin(metric="acc", drop=0.004, confidence=0.95, tests=1)
    assert stopped(right, right).documents == 500
    assert stopped(right, right, POINTS_20, strict).documents == 2000


def test_an_answer_that_is_no_number_leaves_nothing_to_wait_for() -> None:
    plan = plan_stopping(build.quality(build.task(values=[1.0] * 400)), asked={"piqa": [(POINTS_20,)]})
    assert plan is not None
    stopping = plan.tasks["piqa"]
    nothing = [Sample(doc_hash=f"piqa-{number}", metrics={}) for number in range(50)]
    assert stopping.decides(nothing, look=stopping.looks()[0])


@pytest.mark.parametrize(
    ("values", "margins"),
    [
        ([0.3, 1.0], [(POINTS_20,)]),
        ([1.0, 0.0], [()]),
        ([1.0, 0.0], [(POINTS_20,), None]),
        ([1.0, 0.0], [(POINTS_20,), (POINTS_20.model_copy(update={"confidence": 0.9}),)]),
        ([1.0, 0.0], [(POINTS_20.model_copy(update={"metric": "f1"}),)]),
    ],
    ids=["graded", "judged by nothing", "part of a pooled group", "two confidences", "another metric"],
)
def test_what_can_not_be_decided_early_is_answered_in_full(
    values: list[float], margins: list[tuple[Margin, ...] | None]
) -> None:
    assert plan_stopping(build.quality(build.task(values=values)), asked={"piqa": margins}) is None


def test_every_candidate_answers_the_same_documents_first() -> None:
    assert seeded_order(50, task="piqa", seed=3) == seeded_order(50, task="piqa", seed=3)
    assert sorted(seeded_order(50, task="piqa", seed=3)) == list(range(50))
    assert len({seeded_order(50, task=task, seed=seed) for task in ("piqa", "copa") for seed in (3, 4)}) == 4


# --- what it is compared with ----------------------------------------------------------------------------


def pair(before: TaskResult, after: TaskResult) -> int:
    _, _, pairs = comparable_task("piqa", build.quality(before), build.quality(after))
    assert all(first.doc_hash == second.doc_hash for first, second in pairs)
    return len(pairs)


def test_a_stopped_task_is_paired_with_the_same_documents_of_the_baseline() -> None:
    before = asked(build.task(values=[1.0] * 400))
    after = stopped([1.0] * 400, [1.0] * 400)
    assert pair(before, after) == 50


def test_a_part_of_the_documents_is_refused_where_nothing_planned_it() -> None:
    before = asked(build.task(values=[1.0] * 400))
    after = stopped([1.0] * 400, [1.0] * 400).model_copy(update={"look_confidence": None})
    with pytest.raises(UnmeasuredError, match="400 vs 50 documents"):
        pair(before, after)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"available_documents": 300}, "drawn from 300"),
        ({"task_hash": "another"}, "task_hash"),
        ({"num_fewshot": 5}, "num_fewshot"),
    ],
)
def test_a_stopped_task_of_other_conditions_is_refused(change: dict[str, Any], reason: str) -> None:
    before = asked(build.task(values=[1.0] * 400))
    with pytest.raises(UnmeasuredError, match=reason):
        pair(before, stopped([1.0] * 400, [1.0] * 400).model_copy(update=change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_hash": "other words"}, "1 of 50 documents were asked in other words"),
        ({"prompt_hash": None}, "1 of 50 documents were asked in other words"),
        ({"doc_hash": "a stranger"}, "1 of 50 documents aren't the baseline's"),
    ],
)
def test_a_document_that_was_asked_otherwise_is_refused(change: dict[str, Any], reason: str) -> None:
    before, after = asked(build.task(values=[1.0] * 400)), stopped([1.0] * 400, [1.0] * 400)
    first, *others = after.samples
    samples = (first.model_copy(update=change), *others)
    with pytest.raises(UnmeasuredError, match=reason):
        pair(before, after.model_copy(update={"samples": samples}))


def test_saved_documents_and_the_difference_on_the_same_ones_are_reported() -> None:
    values = [float(number < 350) for number in range(400)]
    before, after = asked(build.task(values=values)), stopped(values, values)
    base, other = (
        build.variant(name, quality=build.quality(task)) for name, task in (("fp16", before), ("int8", after))
    )
    assert documents_cell(after) == " (50 of 400)"
    text = quality_markdown(build.report(build.variant_report(base), build.variant_report(other)))
    assert "stopped after 50 of 400 documents" in text
    assert "50 of 400 documents were answered, 350 saved (88%)" in text
    metrics = {metric.name: metric.value for metric in variant_metrics(other, baseline=base)}
    assert (metrics["quality.piqa.documents"], metrics["quality.piqa.available_documents"]) == (50, 400)
    assert after.metrics["acc"].score == 47 / 50, "these fifty are easier than the four hundred"
    assert metrics["vs_baseline.quality.piqa.acc_difference"] == 0


# --- on a model ------------------------------------------------------------------------------------------


def easy(count: int) -> list[dict[str, Any]]:
    """Questions that any model answers rightly: the wrong answers are far longer, and so less likely."""
    long = "or a long and winding answer that nobody would ever give, for it goes on"
    return [
        {
            "question": f"After {number}?",
            "answers": ["it", f"{number} {long}", f"{long} {number}"],
            "right": 0,
        }
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    write_llama(folder / "model", dtype="float32")
    write_task(folder, "quiz", CHOICES, easy(80)[:60], training=easy(80)[60:])
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder / "model")


@pytest.fixture(scope="module")
def full(folder: Path, model: Any) -> QualityResult:
    return run(model, folder / "model", request_for(folder, "quiz", num_fewshot=1))


def sequentially(
    folder: Path,
    model: Any,
    stopping: Stopping | None,
    journal: AnswerJournal | None = None,
    *,
    compute_dtype: str = "float32",
) -> TaskResult:
    return evaluate(
        model,
        tokenizer_folder=folder / "model",
        request=request_for(folder, "quiz", num_fewshot=1),
        compute_dtype=compute_dtype,
        device="cpu",
        progress=lambda _: None,
        journal=journal,
        stopping=stopping,
    ).tasks["quiz"]


def stopping_of(full: QualityResult, **fields: Any) -> Stopping:
    plan = plan_stopping(full, asked={"quiz": [(POINTS_20.model_copy(update=fields),)]})
    assert plan is not None
    return plan


def test_a_task_whose_documents_stand_twice_is_answered_in_full(full: QualityResult) -> None:
    twice = full.tasks["quiz"].model_copy(update={"repeated_documents": 1})
    assert (
        plan_stopping(full.model_copy(update={"tasks": {"quiz": twice}}), asked={"quiz": [(POINTS_20,)]})
        is None
    )
    assert stopping_of(full).tasks.keys() == {"quiz"}


def by_document(task: TaskResult) -> Mapping[str, tuple[str | None, Mapping[str, float]]]:
    """What each document was asked and how it was answered; in other batches log-likelihoods are rounded otherwise."""
    return {sample.doc_hash: (sample.prompt_hash, sample.metrics) for sample in task.samples}


def test_a_stopped_task_asks_each_document_in_the_words_of_a_full_run(
    folder: Path, model: Any, full: QualityResult
) -> None:
    """Few-shot examples are drawn document by document, and equal documents are told apart by their turn."""
    every = by_document(full.tasks["quiz"])
    assert len({prompt for prompt, _ in every.values()}) > 50, "drawn anew for each document"
    result = sequentially(folder, model, stopping_of(full))
    assert (result.documents, result.available_documents) == (30, 60)
    assert all(every[name] == answer for name, answer in by_document(result).items())
    assert len(comparable_task("quiz", full, full.model_copy(update={"tasks": {"quiz": result}}))[2]) == 30
    last = sequentially(folder, model, stopping_of(full, drop=0.001))
    assert (last.documents, by_document(last)) == (60, every)
    assert last.metrics["acc"] == full.tasks["quiz"].metrics["acc"]


def test_a_stopped_task_is_compared_although_fewer_of_its_prompts_were_cut(
    folder: Path, model: Any, full: QualityResult
) -> None:
    cut = full.tasks["quiz"].model_copy(update={"truncated_prompts": 7})
    before = full.model_copy(update={"tasks": {"quiz": cut}})
    stopped = sequentially(folder, model, stopping_of(full))
    after = full.model_copy(update={"tasks": {"quiz": stopped}})
    assert len(comparable_task("quiz", before, after)[2]) == 30
    with pytest.raises(UnmeasuredError, match="truncated_prompts 7 vs 0"):
        comparable_task("quiz", before, full)


def test_rounds_in_sixteen_bits_say_that_they_are_noisier_than_a_full_run(
    folder: Path, model: Any, full: QualityResult
) -> None:
    assert not any("in rounds" in note for note in sequentially(folder, model, stopping_of(full)).notes)
    coarse = sequentially(folder, model, stopping_of(full), compute_dtype="bfloat16")
    assert any("in bfloat16 that alone changes answers" in note for note in coarse.notes)


def test_no_document_is_answered_twice(folder: Path, model: Any, full: QualityResult) -> None:
    journal = AnswerJournal()
    result = sequentially(folder, model, stopping_of(full, drop=0.001), journal)
    answered = len(journal)
    assert result.documents == 60
    assert answered == 3 * 60, "three answers a document, each once"
    sequentially(folder, model, stopping_of(full, drop=0.001), journal)
    assert len(journal) == answered


class DyingJournal(AnswerJournal):
    """The process is killed after some batches."""

    def __init__(self, path: Path, *, batches: int) -> None:
        super().__init__(path)
        self.left = batches

    def add(self, answers: Mapping[str, Any]) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        super().add(answers)


@pytest.mark.parametrize("batches", [2, 6])
def test_an_evaluation_that_is_killed_within_a_round_goes_on_and_says_the_same(
    tmp_path: Path, folder: Path, model: Any, full: QualityResult, batches: int
) -> None:
    path, stopping = tmp_path / "answers.jsonl", stopping_of(full, drop=0.001)
    with pytest.raises(KeyboardInterrupt):
        sequentially(folder, model, stopping, DyingJournal(path, batches=batches))
    kept = len(AnswerJournal(path))
    assert 0 < kept < 3 * 60
    resumed = sequentially(folder, model, stopping, AnswerJournal(path))
    assert resumed.samples == sequentially(folder, model, stopping).samples
    assert len(AnswerJournal(path)) == 3 * 60
