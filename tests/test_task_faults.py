"""Task files and data that can't be run are told by `check`: file, key, value and fix, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StageError
from pipeline.quality import check, prepare_tasks
from pipeline.task_faults import registered
from tests.quality_tasks import CHOICES, GENERATION, ROLLING, load, questions, request_for, run, write_task
from tests.tiny_models import write_llama

ACC = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}


def told(folder: Path, name: str = "quiz") -> str:
    """What `check` finds; a finding names its task's file or data."""
    problems = check(request_for(folder, name), offline=True)
    assert all(str(folder) in problem.what + problem.fix for problem in problems)
    return "\n".join(f"{problem.what} → {problem.fix}" for problem in problems)


def without(settings: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != key}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_fewshot": "abc"}, "num_fewshot is 'abc', not a whole number from 0"),
        ({"num_fewshot": True}, "num_fewshot is True"),
        ({"dataset_kwargs": [1]}, "dataset_kwargs is [1], not a mapping"),
        ({"metric_list": "acc"}, "metric_list is 'acc', not a list of mappings"),
        ({"metric_list": []}, "metric_list in"),
        ({"metric_list": [{"metric": "ac"}]}, "metric 'ac' is unknown; did you mean 'acc'?"),
        (
            {"metric_list": [{**ACC, "higher_is_better": False}]},
            "acc counts what is right, but its file says",
        ),
        ({"metric_list": [{**ACC, "metric": "acc_norm", "higher_is_better": False}]}, "acc_norm counts what"),
        (
            {"metric_list": [{**ACC, "metric": "exact_match", "higher_is_better": False}]},
            "exact_match counts",
        ),
        ({"metric_list": [{**ACC, "metric": "brier_score"}]}, "brier_score is an error, but its file says"),
        ({"output_type": "multiple"}, "'multiple' is unknown; did you mean 'multiple_choice'?"),
        ({"doc_to_choice": []}, "doc_to_choice is [], not text, or a list of at least one choice"),
        ({"doc_to_text": "{{question"}, "doc_to_text in"),
        ({"doc_to_text": "{{question"}, "the template can't be read: unexpected end of template"),
        ({"doc_to_text": "{{qestion}}"}, "'qestion' is undefined; its fields are question, answers, right"),
        ({"doc_to_text": "{{ 1 / 0 }}"}, "doc_to_text can't be rendered: ZeroDivisionError"),
        (
            {"doc_to_text": "qestion"},
            "doc_to_text: qestion is no field of the documents; did you mean 'question'?",
        ),
        ({"doc_to_text": "  "}, "document 0: doc_to_text gives '  ', so that nothing is asked"),
        ({"doc_to_choice": "{{question}}"}, "not a list of answers"),
        (
            {"doc_to_target": "{{right + 3}}"},
            "document 0: doc_to_target gives 3, which is none of its 3 choices",
        ),
        ({"doc_to_target": "{{right - 3}}"}, "doc_to_target gives '-3', which is none"),
        ({"doc_to_target": "{{question}}"}, "which is none of its 3 choices"),
        ({"doc_to_target": "rihgt"}, "rihgt is no field of the documents; did you mean 'right'?"),
        ({"validation_split": "nosuch"}, "'nosuch' is not among data_files"),
        (
            {"filter_list": [{"name": "x", "filter": [{"function": "regx"}]}]},
            "filter 'regx' is unknown; did you",
        ),
        ({"filter_list": [{"name": "x"}]}, "filter_list is [{'name': 'x'}]"),
    ],
)
def test_a_key_that_can_not_be_run_is_told_with_its_file(
    tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    write_task(tmp_path, "quiz", {**CHOICES, **settings}, questions(5))
    assert expected in told(tmp_path)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ("x", "generation_kwargs is 'x', not a mapping"),
        ({"max_gen_toks": "many"}, "generation_kwargs.max_gen_toks is 'many', not a whole number from 1"),
        ({"max_gen_toks": 0}, "generation_kwargs.max_gen_toks is 0"),
        ({"max_new_tokens": -3}, "generation_kwargs.max_new_tokens is -3"),
        ({"until": [5]}, "generation_kwargs.until is [5], not text or a list of texts"),
        ({"max_gen_tok": 9}, "'max_gen_tok' is unknown; did you mean 'max_gen_toks'?"),
        ({"top_kk": 3}, "'top_kk' is unknown; did you mean 'top_k'?"),
        ({"max_length": 20}, "max_length is set by lm-eval"),
    ],
)
def test_generation_settings_that_can_not_be_used_are_told(
    tmp_path: Path, generation: Any, expected: str
) -> None:
    write_task(tmp_path, "quiz", GENERATION, questions(2), generation_kwargs=generation)
    assert expected in told(tmp_path)


@pytest.mark.parametrize("key", ["doc_to_text", "doc_to_target", "doc_to_choice"])
def test_what_a_task_of_choices_needs_is_told_when_it_is_missing(tmp_path: Path, key: str) -> None:
    write_task(tmp_path, "quiz", without(CHOICES, key), questions(2))
    assert f"{key} in {tmp_path / 'quiz.yaml'}: is missing" in told(tmp_path)


def test_a_text_whose_field_is_missing_is_refused_and_not_scored_as_the_word(tmp_path: Path) -> None:
    write_task(tmp_path, "text", ROLLING, [{"txt": "some text"}])
    assert "doc_to_target: text is no field of the documents; did you mean 'txt'?" in told(tmp_path, "text")


@pytest.mark.parametrize("target", [None, "", "{{nothing}}"])
def test_a_generated_answer_that_nothing_could_equal_is_told(tmp_path: Path, target: str | None) -> None:
    documents = [{**one, "nothing": None} for one in questions(2)]
    write_task(tmp_path, "say", {**GENERATION, "doc_to_target": target or ""}, documents)
    assert "so that no answer is right" in told(tmp_path, "say")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "holds no document"),
        (b"[]", "holds no document"),
        (b"\x00\xff{not json\n", "can't be read: 'utf-8' codec"),
        (b"{not json\n", "can't be read: Expecting property name"),
        (b"[1, 2]", "documents are JSON objects"),
    ],
)
def test_data_that_hold_no_documents_are_told(tmp_path: Path, data: bytes, expected: str) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(2))
    (tmp_path / "data" / "quiz-validation.json").write_bytes(data)
    assert expected in told(tmp_path)


def test_a_list_of_documents_in_one_json_file_is_read(tmp_path: Path) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(2))
    path = tmp_path / "data" / "quiz-validation.json"
    path.write_text(json.dumps(questions(4), indent=1))
    assert told(tmp_path) == ""
    path.write_text(json.dumps([{**one, "right": 9} for one in questions(4)], indent=1))
    assert "doc_to_target gives 9" in told(tmp_path)


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", ["5", "[5]", "{a: b}", "''"])
def test_an_include_that_is_no_path_is_told(tmp_path: Path, include: str) -> None:
    path = write_task(tmp_path, "quiz", CHOICES, questions(2))
    path.write_text(f"{path.read_text()}\ninclude: {include}\n")
    assert f"{path}: include is" in told(tmp_path)


def test_a_task_file_in_another_encoding_is_told_to_the_recipe_that_uses_it(tmp_path: Path) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(2))
    (tmp_path / "other.yaml").write_bytes(b"task: other\ndescription: caf\xe9\n")
    assert told(tmp_path) == ""
    assert f"{tmp_path / 'other.yaml'} isn't UTF-8 text (byte 29" in told(tmp_path, "other")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (None, "!function own.chosen: there is no"),
        ("def f(:\n", "own.py can't be read: "),
        ("def chosem(documents):\n    return documents\n", "has no chosen; did you mean 'chosem'?"),
    ],
)
def test_a_function_that_is_not_there_is_told(tmp_path: Path, module: str | None, expected: str) -> None:
    path = write_task(tmp_path, "quiz", CHOICES, questions(2))
    path.write_text(f"{path.read_text()}\nprocess_docs: !function own.chosen\n")
    if module is not None:
        (tmp_path / "own.py").write_text(module)
    assert expected in told(tmp_path)


def test_names_of_metrics_and_filters_are_the_harness_s() -> None:
    import lm_eval.api.metrics  # which fills the registry
    from lm_eval.api.registry import METRIC_REGISTRY

    assert lm_eval.api.metrics.mean([1, 3]) == 2
    assert {"acc", "acc_norm", "exact_match", "word_perplexity"} <= set(registered("metric"))
    assert all(name in METRIC_REGISTRY for name in registered("metric"))
    assert {"regex", "take_first", "multi_choice_regex"} <= set(registered("filter"))


def test_every_setting_of_a_generation_is_known(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    settings = dict.fromkeys(set(GenerationConfig().to_dict()) - {"max_length", "pad_token_id", "use_cache"})
    assert {"repetition_penalty", "num_beams", "stop_strings"} <= set(settings)
    settings |= {"max_tokens": 9, "until": ["."]}
    write_task(tmp_path, "quiz", GENERATION, questions(2), generation_kwargs=settings)
    assert not told(tmp_path)


# --- what only lm-eval can tell ----------------------------------------------------------------------------


@pytest.mark.parametrize("body", ["raise RuntimeError('boom')", "import sys; sys.exit(0)", "return 1 / 0"])
def test_a_task_s_own_code_that_fails_is_named_before_a_model_is_loaded(tmp_path: Path, body: str) -> None:
    path = write_task(tmp_path, "quiz", CHOICES, questions(2))
    path.write_text(f"{path.read_text()}\nprocess_docs: !function own.chosen\n")
    (tmp_path / "own.py").write_text(f"def chosen(documents):\n    {body}\n")
    request = request_for(tmp_path, "quiz")
    assert check(request, offline=True) == ()
    with pytest.raises(
        StageError, match=rf"task quiz \({path}\) failed while loading its data: .* at own.py:2"
    ):
        prepare_tasks(request)


def test_a_document_that_can_not_be_judged_is_told_with_its_task(tmp_path: Path) -> None:
    documents = [
        {**one, "answers": [] if index == 5 else one["answers"]} for index, one in enumerate(questions(8))
    ]
    path = write_task(tmp_path, "quiz", CHOICES, documents)
    folder = write_llama(tmp_path / "llama", dtype="float32")
    with pytest.raises(StageError, match=rf"task quiz \({path}\) failed while being asked: "):
        run(load(folder), folder, request_for(tmp_path, "quiz"))


def test_a_field_that_a_function_forgets_is_refused_by_the_stage(tmp_path: Path) -> None:
    path = write_task(tmp_path, "text", ROLLING, [{"text": "some text"}])
    path.write_text(f"{path.read_text()}\nprocess_docs: !function own.renamed\n")
    (tmp_path / "own.py").write_text(
        "def renamed(documents):\n    return documents.rename_column('text', 'txt')\n"
    )
    folder = write_llama(tmp_path / "llama", dtype="float32")
    with pytest.raises(StageError, match="doc_to_target: text is no field of the documents"):
        run(load(folder), folder, request_for(tmp_path, "text"))
