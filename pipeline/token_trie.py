"""Which tokens of a task's requests have to be computed, each once, and in which batches. Pure.

A log-likelihood request is a context and a continuation. The choices of one question share its context, the
questions of one task a few-shot header; computing every request by itself forwards those tokens again and again.
Here requests become *rows*: a question with all of its choices as one tree of tokens, written depth first, so that
one forward pass with a tree-shaped attention mask scores them all. A header that many questions share is their *trunk*:
its keys and values are computed once, and their trees stand side by side behind it. Rows of similar length are batched,
the longest first, so that what memory is needed is known at the start.

>>> question = [(7, 7, 7, 7, 1, 2), (7, 7, 7, 7, 3)]  # one context, two choices
>>> queries = [Query(tokens=tokens, targets=(9,)) for tokens in question]
>>> plan(queries, rows_per_batch=4).batches[0].rows[0].tokens
(7, 7, 7, 7, 1, 2, 3)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MIN_TRUNK_TOKENS = 32
MIN_TRUNK_CONTEXTS = 4
MIN_TRUNK_SAVING_TOKENS = 256
"""Below these a shared beginning is computed again in each row: a pass and batches of its own cost more."""
_PAIRS_PER_TOKEN = 512
"""Attention between two requests in one row that is masked away, in pairs of tokens that cost as much as one token.

A token costs a layer about 24 d² operations, a masked pair about 4 d for its scores and sums, both ways 8 d: 3 d
pairs a token, 1,700 for d = 576; a third of it, because attention runs less well than a matrix product.
"""

_FOREST_TOKENS = 256
"""Trees behind a trunk stand side by side in rows of up to so many tokens, and of no more than the trunk's.

Each row needs a copy of the trunk's keys and values in every layer, which costs about as much as masked attention
to as many tokens as the trunk has.
"""
_LEAST_FILLED, _ENOUGH_TOKENS = 0.85, 256
"""A row that would be padded by more than a sixth begins a new batch, once a batch has tokens enough to work well."""


@dataclass(frozen=True)
class Query:
    """One request: the tokens that go through the model, and what its last logits are asked for.

    `targets` are scored by the last `len(targets)` positions: as many tokens, each seen from the one before it.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, context: Sequence[int], continuation: Sequence[int], *, max_length: int) -> Query:
        """As lm-eval's HFLM cuts it: the last `max_length` + 1 tokens, the last one only as a target."""
        whole = (*context, *continuation)[-(max_length + 1) :]
        return cls(tokens=whole[:-1], targets=tuple(continuation))

    @property
    def first_scored(self) -> int:
        """Position of the token whose logits give the first target."""
        return len(self.tokens) - len(self.targets)

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens up to there."""
        return self.tokens[: self.first_scored + 1]


@dataclass(frozen=True)
class Leaf:
    """Where one request is scored: its number, and the nodes of its row that see its targets."""

    query: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """Requests with a common beginning as one tree of tokens, depth first.

    `depths[i]` is a node's position behind the trunk. Node i comes from node j exactly if j ≤ i < ends[j]: that is
    the attention mask.
    """

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    ends: tuple[int, ...]
    leaves: tuple[Leaf, ...]

    @property
    def branches(self) -> bool:
        """Whether it is more than one path, so that plain causal attention isn't enough."""
        return any(end != len(self.tokens) for end in self.ends)

    @property
    def scored_nodes(self) -> tuple[int, ...]:
        """The nodes whose logits are needed, each once, in order."""
        return tuple(sorted({node for leaf in self.leaves for node in leaf.nodes}))


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model together, behind the same trunk (empty where there is none)."""

    trunk: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def width(self) -> int:
        """Tokens of its longest row."""
        return max(len(row.tokens) for row in self.rows)

    @property
    def queries(self) -> tuple[int, ...]:
        """Numbers of the requests that it answers."""
        return tuple(leaf.query for row in self.rows for leaf in row.leaves)


@dataclass(frozen=True)
class Plan:
    """All batches; those behind one trunk follow each other. `computed_tokens` counts each trunk once, no padding."""

    batches: tuple[Batch, ...]

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model, padding left out."""
        return self._trunk_tokens + sum(len(row.tokens) for batch in self.batches for row in batch.rows)

    @property
    def padded_tokens(self) -> int:
        """The same with the padding of short rows."""
        return self._trunk_tokens + sum(batch.width * len(batch.rows) for batch in self.batches)

    @property
    def _trunk_tokens(self) -> int:
        trunks = [batch.trunk for batch in self.batches]
        return sum(
            len(trunk) for before, trunk in zip([None, *trunks], trunks, strict=False) if trunk != before
        )


@dataclass(frozen=True)
class Forwarded:
    """Tokens through the model: those of the texts, and with the padding of short sequences."""

    tokens: int
    padded_tokens: int


def plan(
    queries: Sequence[Query],
    *,
    rows_per_batch: int,
    max_scored_per_batch: int | None = None,
    every_trunk: bool = False,
) -> Plan:
    """Every query in exactly one row; with `every_trunk` there are trunks also where they save nothing.

    A batch has as many tokens, padding and the trunk's copies included, as `rows_per_batch` of the longest row
    behind its trunk. `max_scored_per_batch` bounds how many positions' logits it needs (one row may need more).
    """
    order = sorted(range(len(queries)), key=lambda number: queries[number].tokens)
    groups = [
        (
            trunk,
            list(
                _forests(
                    [_row(queries, row, len(trunk)) for row in _rows(queries, members, len(trunk))], trunk
                )
            ),
        )
        for trunk, members in _trunks(queries, order, every_trunk)
    ]
    widest = max((len(trunk) + len(row.tokens) for trunk, rows in groups for row in rows), default=0)
    batches = [
        tuple(_batches(trunk, rows, budget=rows_per_batch * widest, max_scored=max_scored_per_batch))
        for trunk, rows in groups
    ]
    largest_first = sorted(batches, key=lambda group: -_cost(group[0]))
    return Plan(batches=tuple(batch for group in largest_first for batch in group))


def forwarded_by_harness(
    requests: Sequence[tuple[Sequence[int], Sequence[int]]], *, batch_size: int, max_length: int
) -> Forwarded:
    """What lm-eval's HFLM forwards for these (context, continuation) pairs.

    It computes requests that differ in the last token only once, sorts by length, and pads each batch to its
    longest (`_loglikelihood_tokens` and `Collator` of lm-eval 0.4.13).
    """
    longest: dict[tuple[int, ...], int] = defaultdict(int)
    for context, continuation in requests:
        inputs = (*context, *continuation[:-1])
        longest[inputs] = len(inputs)
    lengths = sorted((min(length, max_length) for length in longest.values()), reverse=True)
    padded = sum(
        lengths[start] * len(lengths[start : start + batch_size])
        for start in range(0, len(lengths), batch_size)
    )
    return Forwarded(tokens=sum(lengths), padded_tokens=padded)


# --- rows -------------------------------------------------------------------------------------------------


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    low, high = 0, shorter  # comparing slices is quicker than comparing tokens one by one
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle)
    return low


def _rows(queries: Sequence[Query], order: Sequence[int], trunk_tokens: int) -> Iterator[list[int]]:
    """Neighbours in sorted order whose common beginning is worth more than the attention it costs."""
    row: list[int] = []
    nodes = 0
    for number in order:
        length = len(queries[number].tokens) - trunk_tokens
        shared = _shared(queries[row[-1]].tokens, queries[number].tokens) - trunk_tokens if row else 0
        if row and shared * _PAIRS_PER_TOKEN <= nodes * (length - shared):
            yield row
            row, nodes, shared = [], 0, 0
        row.append(number)
        nodes += length - shared
    if row:
        yield row


def _row(queries: Sequence[Query], members: Sequence[int], trunk_tokens: int) -> Row:
    """The members' tokens behind the trunk as one tree; members are sorted, so that each is a branch of the last."""
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    path: list[int] = []
    leaves: list[Leaf] = []
    before: tuple[int, ...] = ()
    for number in members:
        query = queries[number]
        sequence = query.tokens[trunk_tokens:]
        shared = _shared(before, sequence)
        for node in path[shared:]:
            ends[node] = len(tokens)
        path = path[:shared] + list(range(len(tokens), len(tokens) + len(sequence) - shared))
        tokens.extend(sequence[shared:])
        depths.extend(range(shared, len(sequence)))
        ends.extend([0] * (len(sequence) - shared))
        leaves.append(Leaf(query=number, nodes=tuple(path[-len(query.targets) :])))
        before = sequence
    for node in path:
        ends[node] = len(tokens)
    return Row(tokens=tuple(tokens), depths=tuple(depths), ends=tuple(ends), leaves=tuple(leaves))


def _forests(rows: Sequence[Row], trunk: Sequence[int]) -> Iterator[Row]:
    """Rows joined while they are short beside the trunk; without one, as they are."""
    held: list[Row] = []
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        if held and sum(len(one.tokens) for one in (*held, row)) > min(len(trunk), _FOREST_TOKENS):
            yield _side_by_side(held)
            held = []
        held.append(row)
    if held:
        yield _side_by_side(held)


def _side_by_side(rows: Sequence[Row]) -> Row:
    """Trees that see nothing of each other."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.tokens))
    placed = list(zip(rows, starts, strict=False))
    return Row(
        tokens=tuple(token for row in rows for token in row.tokens),
        depths=tuple(depth for row in rows for depth in row.depths),
        ends=tuple(start + end for row, start in placed for end in row.ends),
        leaves=tuple(
            Leaf(query=leaf.query, nodes=tuple(start + node for node in leaf.nodes))
            for row, start in placed
            for leaf in row.leaves
        ),
    )


# --- trunks and batches -----------------------------------------------------------------------------------


def _trunks(
    queries: Sequence[Query], order: Sequence[int], every_trunk: bool
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Neighbours grouped by a common beginning of their contexts; where that isn't worth it, all in one group."""
    alone: list[int] = []
    for trunk, contexts, members in _beginnings(queries, order):
        saves = contexts >= MIN_TRUNK_CONTEXTS and trunk * (contexts - 1) >= MIN_TRUNK_SAVING_TOKENS
        if saves or (every_trunk and trunk):
            yield queries[members[0]].tokens[:trunk], members
        else:
            alone.extend(members)
    if alone:
        yield (), alone


def _beginnings(queries: Sequence[Query], order: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Groups of neighbours that grow as long as each further context saves tokens: trunk, contexts, members."""
    group: list[int] = []
    trunk = contexts = 0
    for number in order:
        query = queries[number]
        joint = _joint(queries[group[-1]], query, at_most=trunk) if group else 0
        if group and query.context == queries[group[-1]].context:
            group.append(number)
        elif joint >= MIN_TRUNK_TOKENS and joint * contexts >= trunk * (contexts - 1):
            group.append(number)
            trunk, contexts = joint, contexts + 1
        else:
            if group:
                yield trunk, contexts, group
            group, trunk, contexts = [number], query.first_scored, 1
    if group:
        yield trunk, contexts, group


def _joint(one: Query, other: Query, *, at_most: int) -> int:
    """How long a trunk both can have: every target is seen from a row's own tokens."""
    return min(at_most, other.first_scored, _shared(one.tokens, other.tokens))


def _batches(
    trunk: tuple[int, ...], rows: Sequence[Row], *, budget: int, max_scored: int | None
) -> Iterator[Batch]:
    """Rows from the longest to the shortest, as many at once as the budget holds and as padding is worth it."""
    taken: list[Row] = []
    scored = 0
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        needed = len(row.scored_nodes)
        if taken:
            width = len(taken[0].tokens)
            full = (len(taken) + 1) * (len(trunk) + width) > budget
            too_short = len(row.tokens) < _LEAST_FILLED * width and len(taken) * width >= _ENOUGH_TOKENS
            too_many = max_scored is not None and scored + needed > max_scored
            if full or too_short or too_many:
                yield Batch(trunk=trunk, rows=tuple(taken))
                taken, scored = [], 0
        taken.append(row)
        scored += needed
    if taken:
        yield Batch(trunk=trunk, rows=tuple(taken))


def _cost(batch: Batch) -> int:
    return len(batch.rows) * (len(batch.trunk) + batch.width)
