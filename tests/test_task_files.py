"""Task files: found, rendered, checked and hashed, with neither lm-eval nor torch imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import StageError
from pipeline.quality import check, inputs_digest
from pipeline.results import MetricScore
from pipeline.task_scores import all_finite, metrics_of, perplexity, samples_of
from pipeline.task_yaml import TaskFileError
from pipeline.tasks import find_tasks, leaves, rendered
from tests.quality_tasks import CHOICES, GENERATION, ROLLING, questions, request_for, write_task

REPOSITORY = Path(__file__).parents[1]
EVALS = REPOSITORY / "evals"
SHIPPED = sorted(path.stem for path in EVALS.glob("*.yaml"))


def whats(*problems: Any) -> str:
    return "\n".join(f"{problem.what} → {problem.fix}" for problem in problems)


def test_an_unknown_task_is_named_with_its_nearest_name(tmp_path: Path) -> None:
    write_task(tmp_path, "quiz_easy", CHOICES, questions(2))
    told = whats(*check(request_for(tmp_path, "quiz_esy", "quiz_easy"), offline=True))
    assert "unknown task 'quiz_esy'" in told
    assert "did you mean quiz_easy?" in told


def test_a_model_without_a_tokenizer_is_told_before_any_work(tmp_path: Path) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(2))
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer_config.json").write_text("{}")
    told = whats(*check(request_for(tmp_path, "quiz"), offline=True, tokenizer_folder=model))
    assert f"the model folder {model} has no tokenizer" in told


def test_a_tokenizer_config_that_is_no_object_is_told_by_name(tmp_path: Path) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(2))
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text("[1]")
    request = request_for(tmp_path, "quiz", apply_chat_template=True)
    told = whats(*check(request, offline=True, tokenizer_folder=model))
    assert f"{model / 'tokenizer_config.json'}: a JSON object is expected, found list" in told


def test_a_missing_data_file_is_told_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(2))
    (tmp_path / "data" / "quiz-validation.json").unlink()
    told = whats(*check(request_for(tmp_path, "quiz"), offline=True))
    assert "quiz-validation.json isn't there → python -m evals.fetch_data" in told


def test_an_unknown_placeholder_is_refused_with_file_and_known_names(tmp_path: Path) -> None:
    path = write_task(tmp_path, "quiz", CHOICES, questions(2), description="${HOME} alone")
    told = whats(*check(request_for(tmp_path, "quiz"), offline=True))
    assert f"{path}: unknown placeholder ${{HOME}} → known are: ${{EVAL_DATA}}, ${{LM_EVAL_TASKS}}" in told


def test_paths_with_quotes_and_spaces_survive_rendering(tmp_path: Path) -> None:
    folder = tmp_path / 'my "own" tasks: here'
    path = write_task(folder, "quiz", CHOICES, questions(2))
    path.write_text(
        path.read_text().replace("${EVAL_DATA}/quiz-validation.json", '"${EVAL_DATA}/quiz-validation.json"')
    )
    request = request_for(folder, "quiz")
    assert check(request, offline=True) == ()
    with rendered(request) as (out, needs_index):
        config = yaml.safe_load((out / "0" / "quiz.yaml").read_text())
    assert config["dataset_kwargs"]["data_files"]["validation"] == str(
        folder / "data" / "quiz-validation.json"
    )
    assert not needs_index


def test_a_task_in_two_files_is_refused(tmp_path: Path) -> None:
    path = write_task(tmp_path, "quiz", CHOICES, questions(2))
    (tmp_path / "copy.yaml").write_text(path.read_text())
    assert "task quiz stands in" in whats(*check(request_for(tmp_path, "quiz"), offline=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [("task: quiz\na: [", "isn't valid YAML"), ("include: quiz.yaml\ntask: quiz\n", "includes itself")],
)
def test_a_task_file_that_cannot_be_read_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "quiz.yaml").write_text(text)
    assert message in whats(*check(request_for(tmp_path, "quiz"), offline=True))


def test_a_missing_task_folder_is_told(tmp_path: Path) -> None:
    assert "isn't there" in whats(*check(request_for(tmp_path / "no", "quiz"), offline=True))


def test_code_of_the_model_is_run_only_when_the_recipe_says_so(tmp_path: Path) -> None:
    write_task(tmp_path, "code", GENERATION, questions(2), unsafe_code=True)
    assert "confirm_unsafe_code" in whats(*check(request_for(tmp_path, "code"), offline=True))
    assert check(request_for(tmp_path, "code", confirm_unsafe_code=True), offline=True) == ()


def test_few_shot_examples_are_never_taken_from_the_judged_documents(tmp_path: Path) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(2))
    write_task(tmp_path, "trained", CHOICES, questions(2), training=questions(9))
    told = whats(*check(request_for(tmp_path, "quiz", "trained", num_fewshot=2), offline=True))
    assert "task quiz has no training split" in told
    assert "trained" not in told


def test_a_prompt_that_would_be_cut_to_nothing_is_refused_before_loading(tmp_path: Path) -> None:
    write_task(tmp_path, "say", GENERATION, questions(2), generation_kwargs={"max_gen_toks": 256})
    told = whats(*check(request_for(tmp_path, "say", max_length_tokens=128), offline=True))
    assert "generates 256 tokens, the longest sequence is 128" in told


def test_a_chat_template_is_looked_for_in_the_tokenizers_files(tmp_path: Path) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(2))
    request = request_for(tmp_path, "quiz", apply_chat_template=True)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer_config.json").write_text("{}")
    (tokenizer / "tokenizer.json").write_text("{}")
    assert "has no chat template" in whats(*check(request, offline=True, tokenizer_folder=tokenizer))
    (tokenizer / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert check(request, offline=True, tokenizer_folder=tokenizer) == ()


def test_an_official_task_without_its_data_is_refused_offline_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    start = time.monotonic()
    told = whats(*check(request_for(EVALS, "hellaswag", "mmlu_anatomy"), offline=True))
    assert time.monotonic() - start < 10
    assert "task hellaswag: data set Rowan/hellaswag isn't on this machine" in told
    assert "task mmlu_anatomy: data set cais/mmlu (anatomy)" in told
    assert check(request_for(EVALS, "hellaswag"), offline=False) == ()
    (tmp_path / "Rowan___hellaswag" / "default" / "0.0.0" / "abc").mkdir(parents=True)
    assert check(request_for(EVALS, "hellaswag"), offline=True) == ()


def test_groups_and_tags_are_opened() -> None:
    assert len(leaves(request_for(EVALS, "mmlu"))) == 57
    assert set(find_tasks(request_for(EVALS, "ai2_arc"))) == {"arc_easy", "arc_challenge"}
    with rendered(request_for(EVALS, "ai2_arc")) as (folder, needs_index):
        assert sorted(path.name for path in folder.iterdir()) == ["arc_challenge.yaml", "arc_easy.yaml"]
        assert not needs_index
    with rendered(request_for(EVALS, "mmlu")) as (_, needs_index):
        assert needs_index


def test_every_shipped_task_is_found_and_keeps_the_official_prompt(tmp_path: Path) -> None:
    request = request_for(EVALS, *SHIPPED, data_folder=str(tmp_path))
    found = find_tasks(request)
    assert {name: file.path for name, file in found.items()} == {
        name: EVALS / f"{name}.yaml" for name in SHIPPED
    }
    problems = check(request, offline=True)
    assert {problem.what.split()[1].strip(":") for problem in problems} >= set(leaves(request))
    assert all(problem.fix == "python -m evals.fetch_data" for problem in problems)


def test_the_digest_of_the_inputs_follows_their_content_not_their_place(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    base = write_task(here, "base", CHOICES, questions(4))
    write_task(here, "quiz", {"include": "base.yaml", "process_docs": "PLACE"}, questions(4))
    quiz = here / "quiz.yaml"
    quiz.write_text(quiz.read_text().replace("PLACE", "!function look.same"))
    (here / "look.py").write_text("def same(docs):\n    return docs\n")
    shutil.copytree(here, there)
    seen = [inputs_digest(request_for(here, "quiz"))]
    assert inputs_digest(request_for(there, "quiz", seed=7)) == seen[0]
    for changed in (here / "data" / "quiz-validation.json", base, here / "look.py", quiz):
        changed.write_text(changed.read_text() + "\n")
        seen.append(inputs_digest(request_for(here, "quiz")))
    assert len(set(seen)) == 5


def judged_file(folder: Path, **changes: Any) -> Path:
    """A task whose data are what `changes` of its YAML say."""
    path = write_task(folder, "quiz", CHOICES, questions(4))
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset_kwargs": {"data_files": {"validation": "${EVAL_DATA}/part-*.json"}}},
        {"dataset_kwargs": {"data_files": {"validation": "${EVAL_DATA}/**/*.json"}}},
        {"dataset_kwargs": {"data_dir": "${EVAL_DATA}"}},
        {"dataset_kwargs": {"data_dir": "${EVAL_DATA}", "data_files": {"validation": "part-*.json"}}},
        {"dataset_path": "${EVAL_DATA}", "dataset_kwargs": {}},
    ],
    ids=["pattern", "deep pattern", "data_dir", "pattern in data_dir", "folder"],
)
def test_the_digest_follows_data_behind_patterns_and_folders(tmp_path: Path, changes: dict[str, Any]) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    judged_file(here, **changes)
    part = here / "data" / "part-1.json"
    first, other = (json.dumps(row) + "\n" for row in questions(2))
    part.write_text(first)
    shutil.copytree(here, there)
    request = request_for(here, "quiz")
    assert check(request, offline=True) == ()
    seen = [inputs_digest(request)]
    assert inputs_digest(request_for(there, "quiz")) == seen[0]
    part.write_text(other)
    seen.append(inputs_digest(request))
    (here / "data" / "part-2.json").write_text(first)
    seen.append(inputs_digest(request))
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ("https://example.com/data.json", "is on a network"),
        ("${EVAL_DATA}/none-*.json", "isn't there"),
        ("${EVAL_DATA}/linked", "is a link to a folder"),
    ],
)
def test_data_that_cannot_be_hashed_are_refused_beforehand(tmp_path: Path, files: str, told: str) -> None:
    judged_file(tmp_path, dataset_kwargs={"data_files": {"validation": files}})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data" / "linked").mkdir()
    (tmp_path / "data" / "linked" / "more").symlink_to(tmp_path / "elsewhere")
    request = request_for(tmp_path, "quiz")
    assert told in whats(*check(request, offline=False))
    with pytest.raises(TaskFileError, match=told):
        inputs_digest(request)


def test_the_preflight_imports_neither_the_harness_nor_torch(tmp_path: Path) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(2))
    program = (
        "import sys; from pathlib import Path; from pipeline.quality import check, inputs_digest\n"
        "from tests.quality_tasks import request_for\n"
        f"check(request_for(Path({str(EVALS)!r}), *{SHIPPED!r}), offline=True)\n"
        f"inputs_digest(request_for(Path({str(tmp_path)!r}), 'quiz'))\n"
        "print({'torch', 'lm_eval', 'datasets', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("missing", ["N/A", [], None, float("nan")])
def test_a_standard_error_that_is_no_number_is_missing_and_the_score_stays(missing: Any) -> None:
    results = {"alias": "quiz", "acc,none": 0.25, "acc_stderr,none": missing}
    assert metrics_of("quiz", results, {"acc": True}, (), finite=True) == {
        "acc": MetricScore(score=0.25, stderr=None, higher_is_better=True)
    }


def test_a_metric_without_direction_gets_no_score() -> None:
    with pytest.raises(StageError, match="whether a higher odd is better"):
        metrics_of("quiz", {"odd,none": 1.0}, {"odd": None}, (), finite=True)


def test_perplexity_is_of_the_mean_and_never_overflows() -> None:
    assert perplexity(-2 * 10.37349118, 2) == pytest.approx(32_000, rel=1e-6)
    assert perplexity(-1e6, 1) == float("inf")


def test_a_corpus_metric_leaves_the_sample_without_a_number() -> None:
    logged = [
        {"doc_id": 0, "doc_hash": "a", "filter": "none", "resps": [[(-1.0, True)]], "metrics": ["f1", "acc"]}
        | {"f1": (1, 0), "acc": 1.0}
    ]
    assert samples_of(logged, None)[0].metrics == {"acc": 1.0}
    assert all_finite(logged)
    assert not all_finite([{"resps": [[(float("-inf"), False)]]}])


def test_an_include_that_is_not_there_is_told(tmp_path: Path) -> None:
    write_task(tmp_path, "text", {**ROLLING, "include": "no.yaml"}, [{"text": "a"}])
    with pytest.raises(TaskFileError, match=r"no\.yaml"):
        find_tasks(request_for(tmp_path, "text"))
