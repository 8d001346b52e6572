"""Plans of what is computed: every request answered once, every token where it belongs, stock's tokens counted."""

from __future__ import annotations

import itertools
import random

import pytest

from pipeline.token_trie import Plan, Query, Row, forwarded_by_harness, plan


def documents(
    count: int, *, header: int = 0, context: int = 20, choices: int = 4, seed: int = 0
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(context, continuation) of `count` questions with choices of 1 to 6 tokens, behind one header."""
    draw = random.Random(seed)
    start = tuple(draw.choices(range(50), k=header))
    pairs = []
    for _ in range(count):
        question = start + tuple(draw.choices(range(50), k=context + draw.randrange(10)))
        pairs += [(question, tuple(draw.choices(range(50), k=draw.randint(1, 6)))) for _ in range(choices)]
    return pairs


def queries_of(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]], *, max_length: int = 512) -> list[Query]:
    return [Query.of(*pair, max_length=max_length) for pair in pairs]


def path_to(row: Row, node: int) -> list[int]:
    """The nodes that `node` sees, itself included."""
    return [other for other in range(node + 1) if row.ends[other] > node]


def sequences_of(made: Plan) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By query: the tokens seen by its last scored node, and the tokens at the nodes that are scored."""
    found = {}
    for batch in made.batches:
        for row in batch.rows:
            for leaf in row.leaves:
                path = path_to(row, leaf.nodes[-1])
                assert [row.depths[node] for node in path] == list(range(len(path)))
                tokens = batch.trunk + tuple(row.tokens[node] for node in path)
                assert leaf.query not in found
                found[leaf.query] = tokens, tuple(row.tokens[node] for node in leaf.nodes)
    return found


@pytest.mark.parametrize("header", [0, 60])
@pytest.mark.parametrize("choices", [1, 2, 4])
@pytest.mark.parametrize("rows_per_batch", [1, 5])
def test_every_request_is_scored_once_behind_exactly_its_own_tokens(
    header: int, choices: int, rows_per_batch: int
) -> None:
    queries = queries_of(documents(12, header=header, choices=choices))
    found = sequences_of(plan(queries, rows_per_batch=rows_per_batch))
    assert sorted(found) == list(range(len(queries)))
    for number, query in enumerate(queries):
        tokens, scored = found[number]
        assert tokens == query.tokens
        assert scored == query.tokens[query.first_scored :]


def test_the_choices_of_a_question_compute_its_context_once() -> None:
    context = tuple(range(100, 130))
    queries = queries_of([(context, (1, 2, 3)), (context, (4, 5)), (context, (1, 2, 9)), (context, (7,))])
    made = plan(queries, rows_per_batch=4)
    assert [len(batch.rows) for batch in made.batches] == [1]
    assert made.computed_tokens == 30 + 2 + 1  # "1, 2" is shared, and no last token goes through the model
    assert made.padded_tokens == made.computed_tokens


def test_a_header_of_many_questions_is_computed_once_and_no_target_is_seen_from_it() -> None:
    pairs = documents(20, header=200, choices=1)
    made = plan(queries_of(pairs), rows_per_batch=4)
    assert {batch.trunk[:200] for batch in made.batches} == {pairs[0][0][:200]}
    assert made.computed_tokens <= 200 + sum(
        len(context) - 200 + len(answer) - 1 for context, answer in pairs
    )
    assert all(row.leaves for batch in made.batches for row in batch.rows)


def test_questions_behind_a_header_stand_side_by_side_in_few_rows() -> None:
    made = plan(queries_of(documents(30, header=300, context=30)), rows_per_batch=4)
    rows = [row for batch in made.batches for row in batch.rows]
    assert all(batch.trunk for batch in made.batches)
    assert 128 < max(len(row.tokens) for row in rows) <= 256
    assert len(rows) < 10
    assert made.padded_tokens < 1.2 * made.computed_tokens


def test_several_headers_have_a_trunk_each_and_its_batches_follow_each_other() -> None:
    pairs = [pair for seed in (1, 2, 3) for pair in documents(10, header=100, choices=4, seed=seed)]
    made = plan(queries_of(pairs), rows_per_batch=3)
    trunks = [batch.trunk for batch in made.batches]
    changes = sum(one != other for one, other in itertools.pairwise(trunks))
    assert (len(set(trunks)), changes) == (3, 2)


def test_questions_with_little_in_common_stay_in_rows_of_their_own() -> None:
    made = plan(queries_of(documents(30, header=3, context=60)), rows_per_batch=8)
    assert {batch.trunk for batch in made.batches} == {()}
    assert sum(len(batch.rows) for batch in made.batches) == 30


def test_the_largest_batch_comes_first_and_none_is_larger_than_asked() -> None:
    made = plan(queries_of(documents(40, context=10) + documents(5, context=90, seed=1)), rows_per_batch=3)
    sizes = [batch.width * len(batch.rows) for batch in made.batches]
    widest = max(batch.width for batch in made.batches)
    assert max(sizes) <= 3 * widest
    assert made.batches[0].width == widest
    assert len(sequences_of(made)) == 4 * 45


def test_the_logits_of_a_batch_are_bounded() -> None:
    queries = queries_of(documents(20, choices=4))
    made = plan(queries, rows_per_batch=20, max_scored_per_batch=25)
    scored = [sum(len(row.scored_nodes) for row in batch.rows) for batch in made.batches]
    assert max(scored) <= 25
    assert len(sequences_of(made)) == len(queries)


def test_equal_requests_share_everything_and_are_both_answered() -> None:
    queries = queries_of([((1, 2, 3), (4, 5))] * 2)
    made = plan(queries, rows_per_batch=1)
    assert made.computed_tokens == 4
    assert len(sequences_of(made)) == 2


def test_a_long_request_loses_its_beginning_as_in_the_harness() -> None:
    query = Query.of(tuple(range(20)), (90, 91), max_length=8)
    assert query.tokens == (13, 14, 15, 16, 17, 18, 19, 90)
    assert query.first_scored == 6


def test_stock_tokens_count_each_choice_but_the_last_token_and_padding_to_the_longest_of_a_batch() -> None:
    context = tuple(range(10))
    pairs = [(context, (1, 2, 3)), (context, (4,)), (context, (5,)), ((1, 2), (3,))]
    stock = forwarded_by_harness(pairs, batch_size=2, max_length=100)
    # 10 + 2 for the first, 10 for both choices of one token together, 2 for the last
    assert stock.tokens == 12 + 10 + 2
    assert stock.padded_tokens == 2 * 12 + 2
    assert forwarded_by_harness(pairs, batch_size=2, max_length=6).tokens == 6 + 6 + 2


def test_nothing_asked_is_nothing_planned() -> None:
    assert plan([], rows_per_batch=4).computed_tokens == 0
