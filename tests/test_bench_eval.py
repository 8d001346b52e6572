"""The benchmark of evaluations passes only what is both as fast as wanted and the same, but for ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.answer_journal import AnswerJournal
from pipeline.harness import make_harness
from pipeline.measured import Distribution
from pipeline.prefix_scoring import closest_call
from pipeline.quality import load_tasks
from pipeline.token_trie import Query
from pipeline.tokenizer_facts import load_tokenizer
from scripts.bench_eval import Bench, Timed, page
from scripts.compared_answers import Difference, differing_documents, differing_flags
from tests.quality_tasks import CHOICES, load, questions, request_for, write_task
from tests.tiny_models import write_llama


def timed(*, speedup: float, token_ratio: float = 3.0, **changed: Any) -> Timed:
    one = Distribution.of([1.0])
    settings: dict[str, Any] = {
        "suite": "sciq",
        "what": "0-shot",
        "tasks": ("sciq_local",),
        "documents": 100,
        "requests": 400,
        "scoring": ("shared prefixes",),
        "stock_batch_size": 4,
        "our_batch_size": 4,
        "stock_tokens": round(1000 * token_ratio),
        "our_tokens": 1000,
        "stock_padded_tokens": 4000,
        "our_padded_tokens": 1100,
        "stock_s": one,
        "ours_s": one,
        "speedup": Distribution.of([speedup]),
        "wanted_speedup": 2.5,
        "largest_difference_nats": 2e-5,
        "greedy_differences": (),
        "differing_documents": (),
    }
    return Timed(**settings | changed)


def test_a_speed_up_below_the_wanted_one_is_missed_although_it_follows_the_tokens() -> None:
    assert timed(speedup=2.6).holds
    slow = timed(speedup=2.57, token_ratio=3.0, wanted_speedup=2.6)
    assert slow.share >= 0.85
    assert not slow.holds


def test_a_speed_up_that_the_tokens_do_not_allow_is_not_asked_for() -> None:
    few = timed(speedup=2.2, token_ratio=2.4)
    assert few.fast_enough is None
    assert few.holds
    assert not timed(speedup=1.9, token_ratio=2.4).holds


@pytest.mark.parametrize("field", ["greedy_differences", "differing_documents"])
def test_an_answer_that_differs_fails_a_suite_unless_it_is_a_tie(field: str) -> None:
    def with_one(*, tie: bool) -> Timed:
        found = (Difference(text="sciq_local document 7", tie=tie),)
        return timed(speedup=2.9).model_copy(update={field: found})

    assert with_one(tie=True).holds
    assert not with_one(tie=False).holds


def test_the_page_shows_what_is_wanted_and_what_is_missed() -> None:
    suites = (timed(speedup=2.4), timed(speedup=2.2, token_ratio=2.4), timed(speedup=1, wanted_speedup=None))
    versions = {"torch": "2.13.0"}
    text = page(Bench(model="m", device="d", threads=1, versions=versions, suites=suites, missing={}))
    assert "2.5 (missed)" in text
    assert "2.5 (tokens allow 2.40)" in text
    assert "| – |" in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), dtype="float32", initializer_range=0.3)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


def asked_of(folder: Path) -> dict[str, list[list[Any]]]:
    write_task(folder, "quiz", CHOICES, questions(2))
    (task,) = load_tasks(request_for(folder, "quiz")).values()
    task.build_all_requests(rank=0, world_size=1)
    for instance in task.instances:
        instance.task_object = task
    return {"quiz": [task.instances[:3], task.instances[3:]]}


def test_a_document_is_a_tie_only_where_rounding_decides_its_metrics(tmp_path: Path) -> None:
    asked = asked_of(tmp_path)
    stock = {
        "quiz": [(-5.0, False), (-5.00005, False), (-30.0, False), (-6.0, False), (-5, False), (-9, False)]
    }
    near = {"quiz": [(-5.00004, False), (-5.0, False), (-30.0, False), *stock["quiz"][3:]]}
    far = {"quiz": [*stock["quiz"][:3], (-5.0, False), (-6.0, False), (-9.0, False)]}
    assert list(differing_documents(asked, stock, stock)) == []
    (tie,) = differing_documents(asked, stock, near)
    (lost,) = differing_documents(asked, stock, far)
    assert (tie.tie, lost.tie) == (True, False)
    assert "quiz document 0" in tie.text


def test_a_greedy_flag_that_differs_is_a_tie_only_where_the_model_has_one(
    tmp_path: Path, folder: Path, model: Any
) -> None:
    tokenizer = load_tokenizer(folder, chat_template=False)
    request = request_for(tmp_path, "quiz")
    harness = make_harness(model, tokenizer, request, progress=lambda _: None, journal=AnswerJournal())
    asked = asked_of(tmp_path)
    stock = {"quiz": [(-5.0, False)] * 6}
    ours = {"quiz": [(-5.0, True), *stock["quiz"][1:]]}
    (found,) = differing_flags(asked, stock, ours, harness=harness)
    assert not found.tie
    assert "quiz document 0 request 0" in found.text


def test_the_closest_call_is_the_smallest_distance_of_a_target_from_its_best_rival(model: Any) -> None:
    import torch

    tokens = (5, 6, 7, 8)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    best, second = logits[-1].topk(2)[0].tolist()
    right = int(logits[-1].argmax())
    assert closest_call(model, Query(tokens=tokens, targets=(right,))) == pytest.approx(
        best - second, abs=1e-5
    )
    worst = int(logits[-2].argmin())
    both = Query(tokens=tokens, targets=(worst, right))
    assert closest_call(model, both) == pytest.approx(best - second, abs=1e-5)
