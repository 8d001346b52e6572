"""Tasks that can't carry a verdict are void, and say why: emptied prompts, two BOS, no answers found, chance."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from pipeline.comparison import UnmeasuredError, comparable_quality
from pipeline.results import Coverage, Sample, TaskResult, VariantResults
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.task_validity import AnswerLength, answer_length, chance_p, double_bos_prompts, empty_prompts
from tests.quality_tasks import CHOICES, GENERATION, ROLLING, load, questions, request_for, run, write_task
from tests.result_builders import manifest, paired_answers, quality, task, variant
from tests.tiny_models import write_llama

EXTRACTING = {
    **GENERATION,
    "filter_list": [
        {
            "name": "strict",
            "filter": [
                {"function": "regex", "regex_pattern": "the answer is ([0-9]+)"},
                {"function": "take_first"},
            ],
        }
    ],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), dtype="float32")


@pytest.fixture
def model(checkpoint: Path) -> Any:
    return load(checkpoint)


def judged(before: TaskResult, after: TaskResult) -> tuple[str, str]:
    """Outcome and sentence of a rule of 12 points."""
    arms = (variant("fp16", quality=quality(before)), variant("int8", quality=quality(after)))
    finding = MaxQualityDrop(points=12).judge(baseline=arms[0], candidate=arms[1])[0]
    return finding.outcome, finding.because


# --- chance ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "documents", "chance", "p"),
    [(58, 100, 0.5, 0.066605), (59, 100, 0.5, 0.044313), (5, 5, 0.25, 0.25**5), (0, 9, 0.3, 1.0)],
)
def test_guessing_gets_so_many_right_with_the_binomial_probability(
    right: int, documents: int, chance: float, p: float
) -> None:
    assert chance_p(right, documents=documents, chance=chance) == pytest.approx(p, rel=1e-4)


def test_unequal_choices_are_never_taken_for_knowledge_too_easily() -> None:
    chances = [1 / 2] * 6 + [1 / 5] * 6
    exact = [0.0] * (len(chances) + 1)
    for guess in itertools.product((0, 1), repeat=len(chances)):
        weight = 1.0
        for right, chance in zip(guess, chances, strict=True):
            weight *= chance if right else 1 - chance
        exact[sum(guess)] += weight
    mean = sum(chances) / len(chances)
    for right in range(6, len(chances) + 1):
        assert chance_p(right, documents=len(chances), chance=mean) >= sum(exact[right:])


def test_a_baseline_at_chance_is_void_and_never_passes() -> None:
    values, same = paired_answers(both_right=58, lost=0, gained=0, both_wrong=42)
    outcome, because = judged(task("copa", values, chance_score=0.5), task("copa", same, chance_score=0.5))
    assert outcome == "missing"
    assert because.startswith(
        "copa: void, the baseline is at chance: acc 58.0% on 100 documents, guessing gets 50.0%"
    )
    assert judged(task("copa", values), task("copa", same))[0] == "pass"  # a task without choices


def test_a_baseline_above_chance_is_judged_even_where_the_candidate_is_at_chance() -> None:
    values, worse = paired_answers(both_right=50, lost=30, gained=0, both_wrong=20)
    outcome, because = judged(task("copa", values, chance_score=0.5), task("copa", worse, chance_score=0.5))
    assert outcome == "fail", because


def test_chance_is_one_of_the_choices_averaged_over_documents(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    two = [{**question, "answers": question["answers"][:2], "right": 0} for question in questions(2)]
    write_task(tmp_path, "quiz", CHOICES, [*questions(4)[2:], *two])
    write_task(tmp_path, "text", ROLLING, [{"text": "some text"}])
    tasks = run(model, checkpoint, request_for(tmp_path, "quiz", "text")).tasks
    assert tasks["quiz"].chance_score == pytest.approx((2 / 3 + 2 / 2) / 4)
    assert tasks["text"].chance_score is None


# --- prompts -----------------------------------------------------------------------------------------------


def test_an_empty_prompt_makes_the_task_void(tmp_path: Path, checkpoint: Path, model: Any) -> None:
    blank = {"question": " ", "answers": ["yes"], "right": 0}
    write_task(tmp_path, "say", GENERATION, [*questions(2), blank])
    write_task(tmp_path, "whole", {**GENERATION}, questions(3))
    tasks = run(model, checkpoint, request_for(tmp_path, "say", "whole")).tasks
    assert (tasks["say"].empty_prompts, tasks["whole"].empty_prompts) == (1, 0)
    assert tasks["say"].void == "1 of 3 prompts are empty, so nothing was asked"
    assert tasks["whole"].void is None


def test_tasks_that_compare_whole_sentences_have_no_prompt_by_design() -> None:
    assert empty_prompts(["", ""], output_type="multiple_choice") == 0
    assert empty_prompts(["", "a"], output_type="multiple_choice") == 1
    assert empty_prompts(["", ""], output_type="generate_until") == 2


def with_template(checkpoint: Path, folder: Path, template: str, *, adds_bos: bool) -> Path:
    """The checkpoint with a chat template, and a tokenizer that puts BOS in front of plain text or not."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if adds_bos:
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_two_bos_tokens_in_front_make_the_task_void_and_one_does_not(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    messages = "{% for m in messages %}{{ m.content }}{% endfor %}"
    one = with_template(checkpoint, tmp_path / "one", "{{ bos_token }}" + messages, adds_bos=True)
    two = with_template(checkpoint, tmp_path / "two", "{{ bos_token * 2 }}" + messages, adds_bos=False)
    write_task(tmp_path, "quiz", CHOICES, questions(3))
    request = request_for(tmp_path, "quiz", apply_chat_template=True)
    good, doubled = (run(model, folder, request) for folder in (one, two))
    assert good.adds_bos_token
    assert (good.chat_template_applied, doubled.chat_template_applied) == (True, True)
    assert (good.tasks["quiz"].double_bos_prompts, good.tasks["quiz"].void) == (0, None)
    assert doubled.tasks["quiz"].double_bos_prompts == 9
    assert "begin with two beginning-of-sequence tokens" in str(doubled.tasks["quiz"].void)


def test_a_text_that_begins_with_two_bos_tokens_is_scored_and_says_so(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    folder = with_template(checkpoint, tmp_path / "bos", "{{ bos_token }}", adds_bos=True)
    write_task(tmp_path, "text", ROLLING, [{"text": "some text"}])
    found = run(model, folder, request_for(tmp_path, "text")).tasks["text"]
    assert (found.void, found.double_bos_prompts) == (None, 0)
    assert any("begins with two BOS tokens" in note for note in found.notes)


def test_only_the_beginning_of_a_prompt_is_looked_at() -> None:
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return [1, 1, 5] if text.startswith("<s><s>") else [1, 5]

    prompts = ["<s><s>" + "x" * 9_000, "y" * 9_000, "y" * 8_000]
    assert double_bos_prompts(prompts, encode=encode, bos=(1, "<s>")) == 1
    assert len(seen) == 2
    assert max(map(len, seen)) < 100


def test_where_examples_come_from_is_recorded_and_must_be_equal(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(5), training=questions(60)[30:])
    found = run(model, checkpoint, request_for(tmp_path, "quiz", num_fewshot=3, seed=7)).tasks["quiz"]
    assert found.fewshot_source == "3 examples from split train, sampler default, seed 7"
    outcome, because = judged(task(fewshot_source="seed 7"), task(fewshot_source="seed 8"))
    assert outcome == "missing"
    assert "fewshot_source 'seed 7' vs 'seed 8'" in because


# --- answers -----------------------------------------------------------------------------------------------


def test_a_filter_that_finds_no_answer_at_all_makes_the_task_void(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    write_task(tmp_path, "say", EXTRACTING, questions(3))
    found = run(model, checkpoint, request_for(tmp_path, "say")).tasks["say"]
    assert found.unextracted == {"strict": 3}
    assert "no filter of the task (strict) found an answer in any of 3 documents" in str(found.void)


def test_one_filter_that_finds_answers_is_enough(tmp_path: Path, checkpoint: Path, model: Any) -> None:
    anything = {
        "name": "loose",
        "filter": [{"function": "regex", "regex_pattern": "(?s)(.+)"}, {"function": "take_first"}],
    }
    write_task(tmp_path, "say", EXTRACTING, questions(3), filter_list=[*EXTRACTING["filter_list"], anything])
    found = run(model, checkpoint, request_for(tmp_path, "say")).tasks["say"]
    assert found.unextracted["strict"] == 3
    assert found.unextracted["loose"] < 3
    assert found.void is None


def test_a_void_task_of_either_arm_is_missing_with_its_reason() -> None:
    values, _ = paired_answers(both_right=9, lost=0, gained=0, both_wrong=1)
    whole, void = (
        task("say", values),
        task("say", values, void="3 of 9 prompts are empty, so nothing was asked"),
    )
    assert judged(void, whole) == (
        "missing",
        "say: void, 3 of 9 prompts are empty, so nothing was asked (baseline)",
    )
    assert judged(whole, void)[1].endswith("(candidate)")


@pytest.mark.parametrize(
    ("tokens", "stops", "expected"),
    [
        ([10, 11, 12, 13], ["zz"], AnswerLength(tokens=4, cut=True)),
        ([10, 11, 2, 2], ["zz"], AnswerLength(tokens=2, cut=False)),
        ([10, 11, 12, 13], ["l"], AnswerLength(tokens=2, cut=False)),
        ([10, 11, 12, 13], ["lm", ""], AnswerLength(tokens=3, cut=False)),
        ([10, 11, 12, 13], ["n"], AnswerLength(tokens=4, cut=False)),
        ([2, 2, 2, 2], [], AnswerLength(tokens=0, cut=False)),
    ],
)
def test_an_answer_ends_with_its_stop_string_its_end_token_or_its_limit(
    tokens: list[int], stops: list[str], expected: AnswerLength
) -> None:
    found = answer_length(
        tokens,
        ends=frozenset({2}),
        stops=stops,
        limit=4,
        decode=lambda ids: "".join(chr(ord("a") + number) for number in ids),
    )
    assert found == expected


def test_lengths_of_generated_answers_are_kept_with_those_the_limit_ended(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    # The byte tokenizer never writes this stop string, and the tied random model no EOS.
    write_task(tmp_path, "say", GENERATION, questions(5))
    write_task(tmp_path, "quiz", CHOICES, questions(3))
    tasks = run(model, checkpoint, request_for(tmp_path, "say", "quiz")).tasks
    lengths = tasks["say"].output_tokens
    assert lengths is not None
    assert len(lengths.samples) == 5
    assert max(lengths.samples) <= 8
    assert tasks["say"].truncated_outputs == sum(length == 8 for length in lengths.samples)
    assert (tasks["quiz"].output_tokens, tasks["quiz"].truncated_outputs) == (None, None)


# --- one model's answers for another ---------------------------------------------------------------------------


def arm(name: str, answers: str, *, quantized_weights: int) -> VariantResults:
    """A variant with ten answers, all with one digest."""
    samples = tuple(
        Sample(doc_hash=f"piqa-{index}", metrics={"acc": 1.0}, answer_hash=answers) for index in range(10)
    )
    coverage = Coverage(
        linear_weights=100,
        quantized_weights=quantized_weights,
        head_weights=0,
        head_quantized=False,
        embedding_weights=0,
    )
    result = task("piqa", [1.0] * 10, samples=samples)
    return variant(name, quality=quality(result), checkpoint=manifest(name, coverage=coverage))


def test_other_weights_with_log_likelihoods_equal_to_the_last_bit_are_void() -> None:
    baseline = arm("fp16", "a", quantized_weights=0)
    with pytest.raises(
        UnmeasuredError, match="every log-likelihood of 10 documents equals fp16's to the last bit"
    ):
        comparable_quality(baseline, arm("int8", "a", quantized_weights=100))
    comparable_quality(baseline, arm("int8", "b", quantized_weights=100))
    comparable_quality(baseline, arm("bf16", "a", quantized_weights=0))  # the same weights in two formats


def test_the_digest_of_answers_changes_with_their_last_bit_and_generated_text_has_none(
    tmp_path: Path, checkpoint: Path, model: Any
) -> None:
    write_task(tmp_path, "quiz", CHOICES, questions(3))
    write_task(tmp_path, "say", GENERATION, questions(3))
    request = request_for(tmp_path, "quiz", "say")
    first, again = (run(model, checkpoint, request).tasks for _ in range(2))
    assert first["quiz"].samples == again["quiz"].samples
    assert len({sample.answer_hash for sample in first["quiz"].samples}) == 3
    assert {sample.answer_hash for sample in first["say"].samples} == {None}
    model.model.norm.weight.data *= 1 + 1e-6
    moved = run(model, checkpoint, request).tasks["quiz"].samples
    assert all(a.answer_hash != b.answer_hash for a, b in zip(first["quiz"].samples, moved, strict=True))
