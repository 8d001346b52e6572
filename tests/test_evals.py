"""The shipped task files against the harness's own, and against the real data where `make assets` put them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from evals.fetch_data import (
    DATA_FOLDER,
    arc_document,
    data_file_names,
    distinct_documents,
    gsm8k_document,
    lambada_document,
    mmlu_subjects,
)
from pipeline.quality import check
from pipeline.tasks import find_tasks, group_tasks, inputs_digest, leaves
from tests.quality_tasks import CHOICES, load, questions, request_for, run, write_task
from tests.tiny_models import write_llama

EVALS = Path(__file__).parents[1] / "evals"
OFFICIAL = {
    "hellaswag_local": "hellaswag",
    "piqa_local": "piqa",
    "arc_easy_local": "arc_easy",
    "arc_challenge_local": "arc_challenge",
    "arc_challenge_25shot_local": "arc_challenge",
    "openbookqa_local": "openbookqa",
    "winogrande_local": "winogrande",
    "boolq_local": "boolq",
    "sciq_local": "sciq",
    "copa_local": "copa",
    "commonsense_qa_local": "commonsense_qa",
    "lambada_local": "lambada_openai",
    "gsm8k_cot_local": "gsm8k_cot",
}
WHERE_DATA_LIE = {
    *("task", "tag", "dataset_path", "dataset_name", "dataset_kwargs"),
    *("training_split", "validation_split", "test_split"),
}
ALSO = {
    "boolq_local": {"doc_to_target"},  # the original data has true and false, SuperGLUE's copy 0 and 1
    "lambada_local": {"metric_list"},  # the same metrics in another order
    "arc_challenge_25shot_local": {"num_fewshot", "fewshot_split", "fewshot_config"},
}
in_place = all((DATA_FOLDER / name).is_file() for name in data_file_names())
needs_data = pytest.mark.skipif(not in_place, reason="the evaluation data are not here: run `make assets`")


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_local_task_differs_from_the_official_one_in_where_its_data_lie_alone(name: str) -> None:
    found = find_tasks(request_for(EVALS, name, OFFICIAL[name]))
    ours, official = found[name].config, found[OFFICIAL[name]].config
    different = {key for key in ours.keys() | official.keys() if ours.get(key) != official.get(key)}
    assert different <= WHERE_DATA_LIE | ALSO.get(name, set())


def test_mmlu_asks_as_the_official_tasks_do() -> None:
    from lm_eval.utils import apply_template

    ours, official = (leaves(request_for(EVALS, group)) for group in ("mmlu_local", "mmlu"))
    assert {f"mmlu_{subject}" for subject in mmlu_subjects()} == set(official)
    same = (
        "doc_to_text",
        "doc_to_choice",
        "doc_to_target",
        "metric_list",
        "fewshot_split",
        "fewshot_config",
        "test_split",
    )
    for subject in mmlu_subjects():
        local, theirs = ours[f"mmlu_local::{subject}"].config, official[f"mmlu_{subject}"].config
        assert apply_template(local["description"], {"subject": subject}) == theirs["description"]
        assert {key: local[key] for key in same} == {key: theirs[key] for key in same}


def test_a_group_that_defines_its_own_tasks_is_opened_under_the_harness_names() -> None:
    request = request_for(EVALS, "mmlu_local", "mmlu_5shot_local")
    groups = group_tasks(request)
    assert {name: len(tasks) for name, tasks in groups.items()} == {"mmlu_local": 57, "mmlu_5shot_local": 57}
    assert groups["mmlu_5shot_local"][1] == "mmlu_5shot_local::anatomy"
    assert leaves(request)["mmlu_5shot_local::anatomy"].config["num_fewshot"] == 5


def test_a_limit_for_a_group_holds_for_the_tasks_it_defines() -> None:
    request = request_for(EVALS, "mmlu_local", limit=100, limits={"mmlu_local": 5, "mmlu_local::virology": 9})
    limits = [request.limit_of(f"mmlu_local::{subject}") for subject in ("anatomy", "virology")]
    assert (*limits, request.limit_of("piqa_local")) == (5, 9, 100)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), dtype="float32", max_position_embeddings=8192)


def test_tasks_defined_in_a_group_run_with_their_own_data_and_examples(
    tmp_path: Path, checkpoint: Path
) -> None:
    for name in ("one", "two"):
        write_task(tmp_path, name, CHOICES, questions(4), training=questions(9)[4:])
        (tmp_path / f"{name}.yaml").unlink()
    members = [
        {
            "task": name,
            "dataset_kwargs": {
                "data_files": {
                    "test": f"${{EVAL_DATA}}/{name}-validation.json",
                    "dev": f"${{EVAL_DATA}}/{name}-train.json",
                },
                "cache_dir": str(tmp_path / "cache"),
            },
        }
        for name in ("one", "two")
    ]
    group = {
        "group": "both",
        **CHOICES,
        **{"dataset_path": "json", "test_split": "test", "fewshot_split": "dev"},
        **{"fewshot_config": {"sampler": "first_n"}, "task": members},
    }
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(group))
    (tmp_path / "shots.yaml").write_text("include: both.yaml\ngroup: shots\nnum_fewshot: 2\n")
    request = request_for(tmp_path, "both", "shots", limits={"both": 3, "shots": 2})
    result = run(load(checkpoint), checkpoint, request)
    assert {name: (task.documents, task.num_fewshot) for name, task in result.tasks.items()} == {
        "both::one": (3, 0),
        "both::two": (3, 0),
        "shots::one": (2, 2),
        "shots::two": (2, 2),
    }
    assert (
        result.tasks["shots::one"].fewshot_source == "2 examples from split dev, sampler first_n, seed 1234"
    )
    assert result.tasks["both::one"].task_hash != result.tasks["shots::one"].task_hash


def test_the_guides_ten_lines_are_a_task(tmp_path: Path, checkpoint: Path) -> None:
    text = (EVALS / "README.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    assert len(text.splitlines()) == 10
    (tmp_path / "capitals.yaml").write_text(text)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "capitals.jsonl").write_text('{"country": "France", "capital": "Paris"}\n' * 2)
    request = request_for(tmp_path, "capitals")
    assert check(request, offline=True) == ()
    found = run(load(checkpoint), checkpoint, request).tasks["capitals"]
    assert (found.documents, found.primary_metric) == (2, "exact_match")
    assert set(found.unextracted) == {"word"}


def test_the_packages_requests_become_documents_in_the_originals_fields() -> None:
    arc = {"id": "Q1", "query": "Question: What is wet?\nAnswer:", "choices": ["sand", "rain"], "gold": 1}
    assert arc_document(arc) == {
        "id": "Q1",
        "question": "What is wet?",
        "choices": {"text": ["sand", "rain"], "label": ["A", "B"]},
        "answerKey": "B",
    }
    assert lambada_document({"query": "Rain is", "choices": ["wet"]}) == {"text": "Rain is wet"}
    assert gsm8k_document({"question": "1 + 1?", "answer": "#### 2", "short_answer": "2"}) == {
        "question": "1 + 1?",
        "answer": "#### 2",
    }
    rows: Iterator[dict[str, Any]] = iter([{"doc": arc}, {"doc": arc}, {"doc": {**arc, "id": "Q2"}}])
    assert [doc["id"] for doc in distinct_documents(rows)] == ["Q1", "Q2"]


def lines(name: str) -> list[str]:
    """Of a file of the data folder; JSON lines may hold other line ends inside."""
    return (DATA_FOLDER / name).read_text("utf-8").rstrip("\n").split("\n")


@needs_data
def test_the_data_have_the_published_numbers_of_documents() -> None:
    counts = {
        name: len(lines(name))
        for name in ("lambada/test.jsonl", "gsm8k/test.jsonl", "arc_challenge/test.jsonl")
    }
    assert counts == {"lambada/test.jsonl": 5153, "gsm8k/test.jsonl": 1319, "arc_challenge/test.jsonl": 1172}


@needs_data
def test_documents_taken_from_requests_equal_those_of_the_original_file() -> None:
    import datasets

    original = datasets.Dataset.from_file(str(DATA_FOLDER / "arc_challenge" / "validation.arrow")).to_list()
    taken = [json.loads(line) for line in lines("arc_challenge/validation.jsonl")]
    assert len(taken) == len(original) == 299
    for ours, theirs in zip(taken, original, strict=True):
        assert ours["question"] == theirs["question"]
        assert ours["choices"]["text"] == theirs["choices"]["text"]
        assert ours["choices"]["label"].index(ours["answerKey"]) == theirs["choices"]["label"].index(
            theirs["answerKey"]
        )


@needs_data
def test_no_example_of_the_25_shot_form_is_judged() -> None:
    ids = [
        {json.loads(line)["id"] for line in lines(f"arc_challenge/{split}.jsonl")}
        for split in ("validation", "test")
    ]
    assert not ids[0] & ids[1]


@needs_data
def test_the_digest_of_real_inputs_is_stable_and_told_apart_by_task() -> None:
    digests = {
        inputs_digest(request_for(EVALS, name, data_folder=str(DATA_FOLDER)))
        for name in ("mmlu_local", "mmlu_5shot_local", "lambada_local")
        for _ in range(2)
    }
    assert len(digests) == 3
