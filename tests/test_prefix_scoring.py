"""Shared prefixes give the log-likelihoods of each request by itself, or say why they can't."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.answer_journal import AnswerJournal, Planned
from pipeline.log_likelihoods import Pair, Scorer
from pipeline.prefix_scoring import Answer, max_scored_positions, obstacle, probe, score
from pipeline.token_trie import Query, plan
from tests.quality_tasks import load
from tests.test_token_trie import documents, queries_of
from tests.tiny_models import write_gpt2, write_llama, write_moe

WRITERS = {"llama": write_llama, "gpt2": write_gpt2, "moe": write_moe}


def alone(model: Any, query: Query) -> Answer:
    """One request by itself through the whole model, in FP32."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([query.tokens])).logits[0, query.first_scored :]
    scores = torch.log_softmax(logits.double(), dim=-1)
    targets = torch.tensor(query.targets)
    nats = float(scores[torch.arange(len(targets)), targets].sum())
    return Answer(nats=nats, greedy=bool((logits.argmax(-1) == targets).all()))


def scored(model: Any, queries: list[Query], **settings: Any) -> list[Answer]:
    made = plan(queries, **{"rows_per_batch": 3, **settings})
    answers = {number: answer for batch in score(model, made, queries) for number, answer in batch.items()}
    return [answers[number] for number in range(len(queries))]


@pytest.fixture(scope="module", params=sorted(WRITERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    writer = WRITERS[request.param]
    return load(
        writer(tmp_path_factory.mktemp(request.param), dtype="float32", initializer_range=0.3, seed=1)
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(write_llama(tmp_path_factory.mktemp("one"), dtype="float32", initializer_range=0.3))


@pytest.mark.parametrize("header", [0, 40])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_log_likelihoods_are_those_of_each_request_alone(model: Any, header: int, attention: str) -> None:
    queries = queries_of(documents(10, header=header, context=12, choices=3))
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        found = scored(model, queries)
        expected = [alone(model, query) for query in queries]
    finally:
        model.set_attn_implementation(before)
    assert [a.nats for a in found] == pytest.approx([a.nats for a in expected], abs=1e-4)
    assert [a.greedy for a in found] == [a.greedy for a in expected]
    # Requests differ by far more than that, so that a mixed-up order would show.
    assert len({round(a.nats, 2) for a in found}) > 0.8 * len(found)


def test_greedy_is_told_of_a_continuation_that_the_model_would_give(llama: Any) -> None:
    import torch

    context = (5, 6, 7, 8)
    with torch.no_grad():
        whole = list(context)
        for _ in range(3):
            whole.append(int(llama(torch.tensor([whole])).logits[0, -1].argmax()))
    right = tuple(whole[4:])
    wrong = (*right[:2], (right[2] + 1) % 300)
    queries = queries_of([(context, right), (context, wrong)])
    assert [a.greedy for a in scored(llama, queries)] == [True, False]


def test_batches_and_bounds_on_logits_change_nothing(llama: Any) -> None:
    queries = queries_of(documents(9, header=40, choices=4))
    one = scored(llama, queries, rows_per_batch=1)
    for other in (scored(llama, queries, rows_per_batch=9), scored(llama, queries, max_scored_per_batch=3)):
        assert [a.nats for a in other] == pytest.approx([a.nats for a in one], abs=1e-4)


def test_what_a_model_does_to_its_logits_is_kept() -> None:
    from transformers import AutoModelForCausalLM, Gemma2Config

    config = Gemma2Config(
        **{"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 64},
        **{"final_logit_softcapping": 2.0, "attn_logit_softcapping": None, "initializer_range": 0.5},
    )
    model = AutoModelForCausalLM.from_config(config)
    queries = queries_of(documents(9, header=34, context=10, choices=2))
    assert obstacle(model, longest_tokens=64) is None
    expected = [alone(model, query).nats for query in queries]
    assert [a.nats for a in scored(model, queries)] == pytest.approx(expected, abs=1e-4)


def test_a_sliding_window_is_an_obstacle_exactly_when_a_text_is_longer() -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    queries = queries_of(documents(9, header=33, context=6, choices=2))
    longest = max(len(query.tokens) for query in queries)
    config = MistralConfig(
        **{"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": longest},
    )
    model = AutoModelForCausalLM.from_config(config)
    assert obstacle(model, longest_tokens=longest) is None
    assert f"sliding window of {longest}" in (obstacle(model, longest_tokens=longest + 1) or "")
    expected = [alone(model, query).nats for query in queries]
    assert [a.nats for a in scored(model, queries)] == pytest.approx(expected, abs=1e-4)


def test_states_that_cannot_be_shared_are_an_obstacle() -> None:
    from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig

    mamba = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    bloom = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=60, hidden_size=16, n_layer=1, n_head=2))
    for model in (mamba, bloom):
        assert obstacle(model, longest_tokens=20)


def test_positions_that_depend_on_the_length_of_a_text_are_an_obstacle(llama: Any) -> None:
    llama.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    try:
        assert "dynamic" in (obstacle(llama, longest_tokens=20) or "")
    finally:
        llama.config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    assert obstacle(llama, longest_tokens=20) is None


def test_the_logits_of_a_batch_stay_within_half_a_gibibyte() -> None:
    assert max_scored_positions(262_144) * 262_144 * 4 <= 1 << 29
    assert max_scored_positions(1 << 40) == 1


# --- which way --------------------------------------------------------------------------------------------


def scorer(model: Any, journal: AnswerJournal, *, skew_nats: float = 0.0) -> Scorer:
    """`skew_nats` is how far the other way of scoring is off, by the token."""

    def by_harness(pairs: Any, _: int) -> list[Answer]:
        answers = [alone(model, Query.of(*pair, max_length=512)) for pair in pairs]
        return [
            Answer(nats=answer.nats + skew_nats * len(pair[1]), greedy=answer.greedy)
            for answer, pair in zip(answers, pairs, strict=True)
        ]

    return Scorer(model=model, journal=journal, batch_size=3, max_length=512, by_harness=by_harness)


def answered(one: Scorer, pairs: list[Pair], task: str = "quiz") -> list[Answer]:
    return one.answers(pairs, task=task, advance=lambda _: None)


def partly_off(model: Any, journal: AnswerJournal, *, off: Callable[[Pair], bool]) -> Scorer:
    """The other way of scoring is off for some requests."""
    one = scorer(model, journal)
    right = one.by_harness

    def by_harness(pairs: Any, size: int) -> list[Answer]:
        return [
            answer._replace(nats=answer.nats - 0.1 * off(pair))
            for answer, pair in zip(right(pairs, size), pairs, strict=True)
        ]

    one.by_harness = by_harness
    return one


def test_the_probe_walks_every_part_of_the_way() -> None:
    few = probe(queries_of(documents(20, choices=4)))
    made = plan(few, rows_per_batch=len(few), every_trunk=True)
    assert all(batch.trunk for batch in made.batches)
    assert any(row.branches for batch in made.batches for row in batch.rows)
    assert sum(len(batch.rows) for batch in made.batches) > 1
    assert max(len(query.tokens) for query in few) < 100


def test_two_ways_that_disagree_end_in_the_harness_s_and_say_so(llama: Any) -> None:
    pairs: list[Pair] = list(documents(8, choices=2))
    skewed = scorer(llama, AnswerJournal(), skew_nats=0.01)
    answers = answered(skewed, pairs)
    assert skewed.told["quiz"].way == "lm-eval"
    assert "differ by" in (skewed.told["quiz"].refused or "")
    expected = [alone(llama, Query.of(*pair, max_length=512)).nats + 0.01 * len(pair[1]) for pair in pairs]
    assert [a.nats for a in answers] == pytest.approx(expected, abs=1e-9)

    agreeing = scorer(llama, AnswerJournal(), skew_nats=1e-7)
    answered(agreeing, pairs)
    assert (agreeing.told["quiz"].way, agreeing.told["quiz"].refused) == ("shared prefixes", None)


def test_a_greedy_flag_that_differs_by_more_than_a_tie_ends_in_the_harness_s_way(llama: Any) -> None:
    one = scorer(llama, AnswerJournal())
    right = one.by_harness
    one.by_harness = lambda pairs, size: [
        answer._replace(greedy=not answer.greedy) for answer in right(pairs, size)
    ]
    answered(one, list(documents(8, choices=2)))
    assert one.told["quiz"].way == "lm-eval"
    assert "greedy flag differs" in (one.told["quiz"].refused or "")


def test_a_recipe_can_put_every_task_on_the_harness_s_way(llama: Any) -> None:
    pairs: list[Pair] = list(documents(8, choices=2))
    one = scorer(llama, AnswerJournal())
    one.shares = False
    assert answered(one, pairs) == [alone(llama, Query.of(*pair, max_length=512)) for pair in pairs]
    assert (one.told["quiz"].way, one.told["quiz"].refused) == ("lm-eval", "quality.scoring is lm_eval")
    assert one.told["quiz"].computed_tokens == one.told["quiz"].scored_tokens


MARKED = 297


def marked(pair: Pair) -> bool:
    return MARKED in pair[0]


def marked_documents() -> list[Pair]:
    return [((MARKED, *context), answer) for context, answer in documents(8, context=150, choices=2)]


def test_what_is_found_of_one_task_decides_nothing_of_another(llama: Any) -> None:
    tasks: dict[str, list[Pair]] = {"plain": list(documents(8, choices=2)), "marked": marked_documents()}
    found = []
    for order in (("plain", "marked"), ("marked", "plain")):
        one = partly_off(llama, AnswerJournal(), off=marked)
        answers = {task: answered(one, tasks[task], task) for task in order}
        found.append((answers, one.told))
    assert found[0] == found[1]
    assert {task: told.way for task, told in found[0][1].items()} == {
        "plain": "shared prefixes",
        "marked": "lm-eval",
    }


def test_a_task_that_is_done_stays_so_when_a_later_one_was_refused(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    plain: list[Pair] = list(documents(8, choices=2))
    first = partly_off(llama, AnswerJournal(path), off=marked)
    before = answered(first, plain, "plain")
    answered(first, marked_documents(), "marked")

    again = partly_off(llama, AnswerJournal(path), off=marked)
    assert answered(again, plain, "plain") == before
    assert again.told["plain"] == first.told["plain"]
    assert answered(again, marked_documents(), "marked")
    assert again.told == first.told


def test_a_round_of_short_texts_stays_shared_when_longer_ones_were_refused(
    llama: Any, tmp_path: Path
) -> None:
    def is_long(pair: Pair) -> bool:
        return len(pair[0]) > 150

    path = tmp_path / "journal.jsonl"
    short: list[Pair] = list(documents(6, context=10, choices=2))
    both = [*short, *documents(6, context=200, choices=2)]
    first = partly_off(llama, AnswerJournal(path), off=is_long)
    rounds = [answered(first, pairs) for pairs in (short, both)]
    assert first.told["quiz"].way == "lm-eval"

    again = partly_off(llama, AnswerJournal(path), off=is_long)
    assert answered(again, short) == rounds[0]
    assert again.told["quiz"].way == "shared prefixes"
    assert answered(again, both) == rounds[1]
    assert again.told == first.told


def test_both_ways_not_a_number_agree(tmp_path: Path) -> None:
    broken = load(write_llama(tmp_path / "broken", dtype="float32"))
    broken.model.norm.weight.data[0] = math.nan
    one = scorer(broken, AnswerJournal())
    assert all(math.isnan(answer.nats) for answer in answered(one, list(documents(3))))
    assert one.told["quiz"].way == "shared prefixes"


def test_tokens_are_counted_the_comparison_s_too(llama: Any) -> None:
    pairs: list[Pair] = list(documents(40, choices=4))
    one = scorer(llama, AnswerJournal())
    answered(one, pairs)
    told = one.told["quiz"]
    least = plan(queries_of(list(documents(40, choices=4))), rows_per_batch=3).computed_tokens
    assert least < told.computed_tokens < least + 400
    assert told.scored_tokens > 2 * least


class KilledError(Exception):
    pass


def test_a_killed_scoring_goes_on_in_the_same_batches_and_gives_the_same_bits(
    llama: Any, tmp_path: Path
) -> None:
    pairs: list[Pair] = list(documents(14, header=40, choices=3))
    whole = answered(scorer(llama, AnswerJournal()), pairs)

    def stop_after(limit: int) -> Any:
        told = [0]

        def advance(count: int) -> None:
            told[0] += count
            if told[0] >= limit:
                raise KilledError

        return advance

    path = tmp_path / "journal.jsonl"
    for limit in (5, 20):
        with pytest.raises(KilledError):
            scorer(llama, AnswerJournal(path)).answers(pairs, task="quiz", advance=stop_after(limit))
    before = len(AnswerJournal(path))
    assert 20 <= before < len(pairs)
    last, told = scorer(llama, AnswerJournal(path)), list[int]()
    assert last.answers(pairs, task="quiz", advance=told.append) == whole
    assert sum(told) == len(pairs), "each request is told of once"
    once = scorer(llama, AnswerJournal())
    answered(once, pairs)
    assert last.told == once.told


def test_documents_of_an_earlier_round_are_not_computed_again(llama: Any) -> None:
    pairs: list[Pair] = list(documents(20, choices=3))
    journal = AnswerJournal()
    first = answered(scorer(llama, journal), pairs[:30])
    tokens = journal.computed_tokens("quiz")
    both = answered(scorer(llama, journal), pairs)
    assert both[:30] == first
    assert tokens < journal.computed_tokens("quiz") < 2.2 * tokens
    plans: list[Planned] = journal.unfinished("quiz", "shared prefixes", [])
    assert plans == []
    alone_twice = [alone(llama, Query.of(*pair, max_length=512)).nats for pair in pairs]
    assert [a.nats for a in both] == pytest.approx(alone_twice, abs=1e-4)
