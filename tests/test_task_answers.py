"""Right answers that can't be given, documents that stand twice, and what always saying the same gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.comparison import comparable_task
from pipeline.results import TaskResult
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.task_answers import is_answer, is_nothing
from tests.quality_tasks import CHOICES, GENERATION, load, questions, request_for, run, write_task
from tests.result_builders import quality, task, variant
from tests.tiny_models import write_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), dtype="float32")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return load(checkpoint)


def quiz(
    folder: Path, model: Any, checkpoint: Path, documents: list[dict[str, Any]], **settings: Any
) -> TaskResult:
    write_task(folder, "quiz", {**CHOICES, **settings}, documents)
    return run(model, checkpoint, request_for(folder, "quiz")).tasks["quiz"]


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        *((right, True) for right in (0, 1, 1.0, True, "no", [0, 1], ["yes"])),
        *((right, False) for right in (2, -1, 0.5, None, "maybe", [], [0, 7], float("nan"), "0")),
    ],
)
def test_an_answer_is_an_index_or_a_text_of_the_choices(right: object, expected: bool) -> None:
    assert is_answer(right, ["yes", "no"]) is expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (None, True),
        ("", True),
        (" ", True),
        ([], True),
        (["", None], True),
        ("None", True),
        ("a", False),
        (0, False),
    ],
)
def test_a_target_is_nothing_when_no_text_could_equal_it(target: object, expected: bool) -> None:
    assert is_nothing(target, {"answer": None}) is expected
    assert not is_nothing("None", {"answer": "None"})


@pytest.mark.parametrize("wrong", [7, -1, "zebra", None])
def test_documents_without_a_right_answer_make_the_task_void_with_their_number(
    tmp_path: Path, model: Any, checkpoint: Path, wrong: object
) -> None:
    documents = [
        {**one, "right": str(wrong if index % 4 == 3 else one["right"])}
        for index, one in enumerate(questions(12))
    ]
    found = quiz(tmp_path, model, checkpoint, documents)
    assert found.unanswerable_documents == 3
    assert str(found.void).startswith("3 of 12 documents have no right answer that could be given")
    whole = task("quiz", values=[1.0] * 12)
    arms = (variant("fp16", quality=quality(found)), variant("int8", quality=quality(whole)))
    assert (
        MaxQualityDrop(points=4, tasks=("quiz",)).judge(baseline=arms[0], candidate=arms[1])[0].outcome
        == "missing"
    )


def test_null_answers_of_a_generative_task_make_it_void(tmp_path: Path, model: Any, checkpoint: Path) -> None:
    documents = [{**one, "said": None if index == 3 else "a"} for index, one in enumerate(questions(5))]
    write_task(tmp_path, "say", {**GENERATION, "doc_to_target": "{{said}}"}, documents)
    found = run(model, checkpoint, request_for(tmp_path, "say")).tasks["say"]
    assert (found.unanswerable_documents, found.void is None) == (1, False)


def test_documents_that_stand_several_times_are_counted_and_noted(
    tmp_path: Path, model: Any, checkpoint: Path
) -> None:
    numbered = [{**one, "id": index} for index, one in enumerate(questions(4) * 3)]
    for documents in (questions(4) * 3, numbered):
        found = quiz(tmp_path, model, checkpoint, documents)
        assert (found.documents, found.repeated_documents) == (12, 8)
        assert found.void is None
        assert "8 of 12 documents ask what an earlier one asks: judged once" in found.notes
        _, _, pairs = comparable_task("quiz", quality(found), quality(found))
        assert len(pairs) == 4


def test_always_the_same_answer_is_what_guessing_gets_where_choices_are_fixed(
    tmp_path: Path, model: Any, checkpoint: Path
) -> None:
    letters = [
        {**one, "answers": ["A", "B"], "right": int(index % 4 == 0)}
        for index, one in enumerate(questions(12))
    ]
    assert quiz(tmp_path, model, checkpoint, letters).chance_score == pytest.approx(9 / 12)
    mixed = [*letters[1:], {**letters[0], "answers": ["B", "A"]}]
    assert quiz(tmp_path, model, checkpoint, mixed).chance_score == pytest.approx(1 / 2)


def test_a_baseline_that_always_says_the_majority_is_void() -> None:
    says_yes = [1.0] * 62 + [0.0] * 38
    arms = [
        variant(name, quality=quality(task("boolq", values=says_yes, chance_score=0.62)))
        for name in ("fp16", "int8")
    ]
    finding = MaxQualityDrop(points=30).judge(baseline=arms[0], candidate=arms[1])[0]
    assert finding.outcome == "missing"
    assert "guessing gets 62.0%" in finding.because


def test_cut_prompts_are_noted_and_a_task_of_nothing_else_is_void(
    tmp_path: Path, model: Any, checkpoint: Path
) -> None:
    long = [{**one, "question": "x" * 400} for one in questions(3)]
    write_task(tmp_path, "some", CHOICES, [*questions(3), *long])
    write_task(tmp_path, "every", CHOICES, long)
    tasks = run(model, checkpoint, request_for(tmp_path, "some", "every", max_length_tokens=128)).tasks
    assert tasks["some"].void is None
    assert "9 of 18 prompts were cut at 128 tokens" in tasks["some"].notes
    assert str(tasks["every"].void).startswith("every one of 9 prompts was cut at the longest sequence")
