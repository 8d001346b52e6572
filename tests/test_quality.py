"""The evaluator on tiny models: right numbers, whatever the batch, and none where there are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.quality_tasks import CHOICES, GENERATION, ROLLING, load, questions, request_for, run, write_task
from tests.tiny_models import write_llama

EVALS = Path(__file__).parents[1] / "evals"
TEN_WORDS = "abcde fghij klmno pqrst uvwxy zabcd efghi jklmn opqrs tuvwxy"
FINGERPRINT = """import hashlib

def fingerprint(doc, results):
    return {"fingerprint": float(int(hashlib.sha256(results[0].encode()).hexdigest()[:8], 16))}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), dtype="float32")


@pytest.fixture
def model(checkpoint: Path) -> Any:
    return load(checkpoint)


def uniform(model: Any) -> Any:
    """All logits zero: the tied embedding is all zero."""
    model.get_input_embeddings().weight.data.zero_()
    return model


def write_chunk_tokenizer(folder: Path) -> None:
    """Every four characters are one token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(".{4}"), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)


def test_perplexities_of_a_uniform_model_follow_from_words_bytes_and_tokens(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model", dtype="float32", vocab_size=256)
    write_chunk_tokenizer(folder)
    assert (len(TEN_WORDS.split()), len(TEN_WORDS.encode())) == (10, 60)
    write_task(tmp_path, "text", ROLLING, [{"text": TEN_WORDS}])

    task = run(uniform(load(folder)), folder, request_for(tmp_path, "text")).tasks["text"]

    scores = {name: metric.score for name, metric in task.metrics.items()}
    assert scores == pytest.approx(
        {"word_perplexity": 4096, "byte_perplexity": 4, "bits_per_byte": 2, "token_perplexity": 256}, rel=1e-5
    )
    assert task.primary_metric == "word_perplexity"
    assert not any(metric.higher_is_better for metric in task.metrics.values())
    assert task.samples[0].metrics == pytest.approx(
        {"log_likelihood_nats": -15 * math.log(256), "words": 10, "utf8_bytes": 60, "tokens": 15}
    )


@pytest.mark.parametrize("texts", [["some words", "", "and more"], [""]])
def test_an_empty_text_makes_its_task_void_and_says_so(
    tmp_path: Path, model: Any, checkpoint: Path, texts: list[str]
) -> None:
    write_task(tmp_path, "text", ROLLING, [{"text": text} for text in texts])
    task = run(model, checkpoint, request_for(tmp_path, "text")).tasks["text"]
    assert task.void == f"1 of {len(texts)} prompts are empty, so nothing was asked"
    assert task.documents == len(texts)
    empty = task.samples[texts.index("")].metrics
    assert (empty["log_likelihood_nats"], empty["utf8_bytes"]) == (0.0, 0.0)
    assert (task.metrics["bits_per_byte"].score is None) == (texts == [""])


def test_a_uniform_model_is_as_perplexed_as_its_vocabulary_is_large(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model", dtype="float32", vocab_size=32_000, hidden_size=8)
    texts = [{"text": "one"}, {"text": "two and three and four"}, {"text": "a much longer text " * 9}]
    write_task(tmp_path, "text", ROLLING, texts)

    task = run(uniform(load(folder)), folder, request_for(tmp_path, "text")).tasks["text"]

    assert task.metrics["token_perplexity"].score == pytest.approx(32_000, rel=1e-3)
    sums = [sample.metrics for sample in task.samples]
    loss = -sum(s["log_likelihood_nats"] for s in sums) / sum(s["tokens"] for s in sums)
    assert loss == pytest.approx(10.37349, abs=1e-5)
    stderr = task.metrics["word_perplexity"].stderr
    assert stderr is not None
    assert stderr > 0


def test_bits_per_byte_is_the_logarithm_of_byte_perplexity(
    tmp_path: Path, model: Any, checkpoint: Path
) -> None:
    write_task(tmp_path, "text", ROLLING, [{"text": "some words é"}, {"text": "more words " * 30}])
    metrics = run(model, checkpoint, request_for(tmp_path, "text")).tasks["text"].metrics
    byte, bits = metrics["byte_perplexity"].score, metrics["bits_per_byte"].score
    assert byte is not None
    assert bits == pytest.approx(math.log2(byte))


def test_samples_do_not_depend_on_the_batch_size(tmp_path: Path, model: Any, checkpoint: Path) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(12))
    one, four = (
        run(model, checkpoint, request_for(tmp_path, "quiz", batch_size=size)).tasks["quiz"]
        for size in (1, 4)
    )
    # The digests of answers tell last bits, which depend on the batch.
    assert [(s.doc_hash, s.metrics) for s in one.samples] == [(s.doc_hash, s.metrics) for s in four.samples]
    assert one.metrics == four.metrics


def test_generation_is_padded_so_that_neighbours_change_nothing(tmp_path: Path) -> None:
    # An untied head and large weights, so that what is generated depends on the whole prompt.
    checkpoint = write_llama(
        tmp_path / "model", dtype="float32", tie_word_embeddings=False, initializer_range=0.3
    )
    model = load(checkpoint)
    (tmp_path / "look.py").write_text(FINGERPRINT)
    path = write_task(
        tmp_path,
        "say",
        GENERATION,
        questions(6),
        metric_list=[{"metric": "fingerprint", "aggregation": "mean", "higher_is_better": True}],
    )
    path.write_text(path.read_text() + "process_results: !function look.fingerprint\n")
    alone, together = (
        run(model, checkpoint, request_for(tmp_path, "say", batch_size=size)).tasks["say"].samples
        for size in (1, 6)
    )
    assert alone == together
    assert len({sample.metrics["fingerprint"] for sample in alone}) == len(alone)

    # A shipped generation config that samples and penalises changes nothing either, and is left in place.
    from transformers import GenerationConfig

    shipped = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=9.0, eos_token_id=2)
    model.generation_config = shipped
    assert run(model, checkpoint, request_for(tmp_path, "say", batch_size=6)).tasks["say"].samples == alone
    assert model.generation_config is shipped


def test_scores_equal_the_harness_own(tmp_path: Path, model: Any, checkpoint: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    write_task(tmp_path, "quiz", CHOICES, questions(10), training=questions(30)[20:])
    request = request_for(tmp_path, "quiz", num_fewshot=2, limit=7)
    ours = run(model, checkpoint, request).tasks["quiz"]

    plain = tmp_path / "plain"
    plain.mkdir()
    text = (tmp_path / "quiz.yaml").read_text().replace("${EVAL_DATA}", str(tmp_path / "data"))
    (plain / "quiz.yaml").write_text(text)
    theirs = simple_evaluate(
        model=HFLM(model, tokenizer=AutoTokenizer.from_pretrained(checkpoint), batch_size=4),
        tasks=["quiz"],
        task_manager=TaskManager(include_path=str(plain), include_defaults=False),
        num_fewshot=2,
        limit=7,
        **{f"{name}_seed": 1234 for name in ("numpy_random", "torch_random", "fewshot_random")},
        random_seed=1234,
    )
    for metric in ("acc", "acc_norm"):
        assert ours.metrics[metric].score == theirs["results"]["quiz"][f"{metric},none"]
        assert ours.metrics[metric].stderr == theirs["results"]["quiz"][f"{metric}_stderr,none"]
        assert [s.metrics[metric] for s in ours.samples] == [s[metric] for s in theirs["samples"]["quiz"]]
    assert [s.doc_hash for s in ours.samples] == [s["doc_hash"] for s in theirs["samples"]["quiz"]]
    assert (ours.documents, ours.num_fewshot, ours.primary_metric) == (7, 2, "acc")


@pytest.mark.parametrize("settings", [CHOICES, ROLLING, GENERATION], ids=["choices", "rolling", "generation"])
def test_not_a_number_in_the_logits_is_no_score(
    tmp_path: Path, checkpoint: Path, model: Any, settings: dict[str, Any]
) -> None:
    model.model.norm.weight.data[0] = math.nan
    write_task(tmp_path, "t", settings, [{**question, "text": "some text"} for question in questions(4)])
    result = run(model, checkpoint, request_for(tmp_path, "t"))
    assert not result.logits_finite
    assert all(metric.score is None for metric in result.tasks["t"].metrics.values())
    assert all(metric.stderr is None for metric in result.tasks["t"].metrics.values())
    if settings is not GENERATION:
        assert all(not sample.metrics for sample in result.tasks["t"].samples)


def test_a_perplexity_beyond_any_float_is_no_score(tmp_path: Path, checkpoint: Path, model: Any) -> None:
    write_task(
        tmp_path, "text", ROLLING, [{"text": "x" * 400}, {"text": "y" * 400}]
    )  # one "word" of 400 tokens
    task = run(model, checkpoint, request_for(tmp_path, "text")).tasks["text"]
    assert task.metrics["word_perplexity"].score is None
    assert task.metrics["token_perplexity"].score is not None


def test_equal_documents_keep_samples_of_their_own(tmp_path: Path, checkpoint: Path, model: Any) -> None:
    first, second = questions(2)
    write_task(tmp_path, "quiz", CHOICES, [first, second, first, first])
    hashes = [s.doc_hash for s in run(model, checkpoint, request_for(tmp_path, "quiz")).tasks["quiz"].samples]
    assert len(set(hashes)) == 4
    assert hashes[2:] == [f"{hashes[0]}#2", f"{hashes[0]}#3"]


def test_every_filter_of_a_task_has_its_own_score(tmp_path: Path, checkpoint: Path, model: Any) -> None:
    first = [{"function": "take_first"}]
    filters = [
        {"name": "strict", "filter": first},
        {"name": "loose", "filter": [{"function": "lowercase"}, *first]},
    ]
    write_task(tmp_path, "say", GENERATION, questions(3), filter_list=filters)
    task = run(model, checkpoint, request_for(tmp_path, "say")).tasks["say"]
    assert set(task.metrics) == {"exact_match.strict", "exact_match.loose"}
    assert task.primary_metric == "exact_match.strict"
    assert all(set(sample.metrics) == set(task.metrics) for sample in task.samples)
    assert task.documents == len(task.samples) == 3


SHIPPED_ROWS: dict[str, dict[str, Any]] = {
    "sciq": {
        **{"question": "What falls?", "support": "Rain falls.", "correct_answer": "rain"},
        **{"distractor1": "sun", "distractor2": "dust", "distractor3": "light"},
    },
    "piqa": {"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": "Eat the lid.", "label": 0},
    "hellaswag": {
        **{"activity_label": "Cooking", "ctx_a": "A man cooks.", "ctx_b": "he", "label": "1"},
        "endings": ["flies", "stirs the pot", "sings", "[title] sleeps"],
    },
    "winogrande_xl": {"sentence": "Ann saw Bo as _ came.", "option1": "Ann", "option2": "Bo", "answer": "2"},
    "boolq": {"question": "is rain wet", "passage": "Rain is wet.", "answer": True},
    "copa": {
        **{"premise": "It rained.", "choice1": "I got wet.", "choice2": "I slept."},
        **{"question": "effect", "label": 0},
    },
    "commonsense_qa": {
        "question": "What is wet?",
        "choices": {"text": ["sand", "rain", "ash", "salt", "wood"], "label": list("ABCDE")},
        "answerKey": "B",
    },
    **{
        name: {
            text: "What is wet?",
            "choices": {"text": ["sand", "rain"], "label": ["A", "B"]},
            "answerKey": "B",
        }
        for name, text in (
            ("arc_easy", "question"),
            ("arc_challenge", "question"),
            ("openbookqa", "question_stem"),
        )
    },
}


SHIPPED_LINES: dict[str, tuple[dict[str, Any], int]] = {
    "lambada/test.jsonl": ({"text": "Rain fell and all was wet"}, 2),
    "gsm8k/test.jsonl": ({"question": "What is 1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"}, 2),
    "arc_challenge/validation.jsonl": (SHIPPED_ROWS["arc_challenge"], 25),
    "arc_challenge/test.jsonl": (SHIPPED_ROWS["arc_challenge"], 2),
}


def test_every_shipped_task_runs_offline_on_data_of_its_shape(
    tmp_path: Path, checkpoint: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, row in SHIPPED_ROWS.items():
        datasets.Dataset.from_list([row] * 2).save_to_disk(tmp_path / "saved" / name)
        (tmp_path / name).mkdir()
        (tmp_path / "saved" / name / "data-00000-of-00001.arrow").rename(tmp_path / name / "validation.arrow")
    for name, (row, count) in SHIPPED_LINES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{json.dumps(row)}\n" * count)
    # MMLU's groups have a test of their own.
    tasks = sorted(path.stem for path in EVALS.glob("*.yaml") if not path.stem.startswith("mmlu"))
    result = run(model, checkpoint, request_for(EVALS, *tasks, data_folder=str(tmp_path)))
    assert sorted(result.tasks) == tasks
    others = {"boolq_passages": "word_perplexity", "gsm8k_cot_local": "exact_match.strict-match"}
    assert {name: task.primary_metric for name, task in result.tasks.items()} == {
        name: others.get(name, "acc") for name in tasks
    }
    # The passage stands twice in the data and is scored once.
    assert {name: task.documents for name, task in result.tasks.items() if task.documents != 2} == {
        "boolq_passages": 1
    }
