"""The harness beside lm-eval's own: the same answers to every request, one by one, and kept when it is killed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.answer_journal import AnswerJournal
from pipeline.results import QualityResult, TaskResult
from tests.quality_tasks import CHOICES, GENERATION, ROLLING, load, questions, request_for, run, write_task
from tests.tiny_models import write_gpt2, write_llama

Writer = Callable[..., Path]


def write_sliding(folder: Path, *, window: int) -> Path:
    """A Mistral of one layer that sees `window` tokens back, with the tokenizer of the tiny Llama."""
    from transformers import AutoModelForCausalLM, MistralConfig

    write_llama(folder, dtype="float32")
    config = MistralConfig(
        **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": window},
        **{"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3, "max_position_embeddings": 512},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def checkpoint_of(kind: str, folder: Path) -> Path:
    if kind == "gpt2":
        return write_gpt2(folder, dtype="float32", initializer_range=0.3, n_positions=512)
    if kind == "llama":
        return write_llama(folder, dtype="float32", initializer_range=0.3)
    return write_sliding(folder, window=60 if kind == "short window" else 400)


def stock_answers(folder: Path, requests: list[Any]) -> list[tuple[float, bool]]:
    """lm-eval's HFLM, untouched, on the same requests."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    harness = HFLM(load(folder), tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=3)
    return list(harness.loglikelihood(requests, disable_tqdm=True))


def answers_of(journal: AnswerJournal, folder: Path, request: Any) -> tuple[TaskResult, list[Any]]:
    """The task's result, and lm-eval's requests."""
    from pipeline.quality import load_tasks

    model = load(folder)
    result = run(model, folder, request, journal=journal)
    (task,) = load_tasks(request).values()
    task.build_all_requests(limit=request.limit, rank=0, world_size=1)
    return result.tasks["quiz"], task.instances


def own_answers(folder: Path, requests: list[Any], request: Any) -> tuple[list[Any], Any]:
    from pipeline.harness import make_harness
    from pipeline.tokenizer_facts import load_tokenizer

    harness = make_harness(
        load(folder),
        load_tokenizer(folder, chat_template=False),
        request,
        progress=lambda _: None,
        journal=AnswerJournal(),
    )
    return harness.loglikelihood(requests), harness.scorer.told["quiz"]


@pytest.mark.parametrize(
    ("kind", "shots", "way"),
    [
        ("llama", 0, "shared prefixes"),
        ("llama", 4, "shared prefixes"),
        ("gpt2", 4, "shared prefixes"),
        ("wide window", 4, "shared prefixes"),
        ("short window", 4, "lm-eval"),
    ],
)
def test_every_answer_is_stock_s(tmp_path: Path, kind: str, shots: int, way: str) -> None:
    folder = checkpoint_of(kind, tmp_path / "model")
    fixed = {"fewshot_config": {"sampler": "first_n"}, "num_fewshot": shots}
    write_task(tmp_path, "quiz", {**CHOICES, **fixed}, questions(12), training=questions(30)[20:])
    request = request_for(tmp_path, "quiz")
    result, requests = answers_of(AnswerJournal(), folder, request)
    ours, told = own_answers(folder, requests, request)
    stock = stock_answers(folder, requests)

    assert [nats for nats, _ in ours] == pytest.approx([nats for nats, _ in stock], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in stock]
    assert told.way == result.scoring == way
    assert result.scored_tokens is not None
    assert result.computed_tokens is not None
    if way == "shared prefixes":
        assert result.computed_tokens < result.scored_tokens
        assert not any("request by request" in note for note in result.notes)
    else:
        assert result.computed_tokens == result.scored_tokens
        assert any("sliding window of 60" in note for note in result.notes)


def test_texts_in_windows_are_scored_as_stock_does(tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    folder = checkpoint_of("llama", tmp_path / "model")
    texts = ["some words and more " * count for count in (1, 9, 30)]
    write_task(tmp_path, "text", ROLLING, [{"text": text} for text in texts])
    task = run(load(folder), folder, request_for(tmp_path, "text", max_length_tokens=96)).tasks["text"]

    from lm_eval.api.instance import Instance

    stock = HFLM(load(folder), tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=2, max_length=96)
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0) for text in texts
    ]
    expected = stock.loglikelihood_rolling(requests, disable_tqdm=True)
    found = [sample.metrics["log_likelihood_nats"] for sample in task.samples]
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-4)
    assert task.scoring == "shared prefixes"
    assert task.scored_tokens is not None


class StoppedError(BaseException):
    """Like a signal: no failure of the task."""


@pytest.mark.parametrize("settings", [CHOICES, ROLLING, GENERATION], ids=["choices", "rolling", "generation"])
def test_a_killed_evaluation_goes_on_and_ends_with_the_same_result(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = checkpoint_of("llama", tmp_path / "model")
    documents = [{**question, "text": question["question"] * 2} for question in questions(14)]
    write_task(tmp_path, "quiz", settings, documents)
    request = request_for(tmp_path, "quiz", batch_size=2)
    path = tmp_path / "answers.jsonl"
    model = load(folder)
    passes: list[int] = []

    def once(limit: float) -> QualityResult:
        """Stops the worker, so to say, at a forward pass."""
        passes.clear()

        def look(*_: Any) -> None:
            passes.append(1)
            if len(passes) > limit:
                raise StoppedError

        hook = model.register_forward_pre_hook(look)
        try:
            return run(model, folder, request, journal=AnswerJournal(path))
        finally:
            hook.remove()

    whole = once(math.inf)
    needed = len(passes)
    path.unlink()
    with pytest.raises(StoppedError):
        once(needed // 2)
    with path.open("ab") as file:
        file.write(b'{"answers": {"torn')
    assert once(math.inf) == whole
    assert len(passes) < needed
    assert once(math.inf) == whole
    assert not passes
