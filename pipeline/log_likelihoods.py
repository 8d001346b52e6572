"""Log-likelihood requests answered: from the journal, through shared prefixes, or by the harness's own code.

Which way is taken is decided before a task's first request, for each task by itself: what the recipe and the model's
settings allow, and a comparison of both ways on a few requests. Both arms of a comparison must come the same way,
because in 16 bits the shape of a batch changes the rounding.

    scorer = Scorer(model=model, journal=AnswerJournal(), batch_size=8, max_length=2048, by_harness=harness_scores)
    answers = scorer.answers(pairs, task="piqa", advance=lambda count: None)
    scorer.told["piqa"].computed_tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline import prefix_scoring
from pipeline.answer_journal import AnswerJournal, PathChecked, Planned, request_key
from pipeline.prefix_scoring import Answer
from pipeline.token_trie import Query, forwarded_by_harness, plan

Way = Literal["shared prefixes", "lm-eval"]
Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context and of its continuation."""
_COMPARED_AGAIN_RATIO = 1.25
"""Texts longer than this times what was compared are compared again."""


@dataclass
class Told:
    """What became of one task's log-likelihood requests; `refused` says why prefixes weren't shared.

    `scored_tokens` are what the harness alone would have forwarded for the last requests, `computed_tokens` what was
    forwarded for all of the task's requests so far.
    """

    way: Way = "shared prefixes"
    refused: str | None = None
    scored_tokens: int = 0
    computed_tokens: int = 0


@dataclass
class Scorer:
    """`by_harness(pairs, batch_size)` are the harness's own answers, in the order of the pairs.

    Without `shares` no prefixes are shared, whatever the model allows.
    """

    model: Any
    journal: AnswerJournal
    batch_size: int
    max_length: int
    by_harness: Callable[[Sequence[Pair], int], list[Answer]]
    shares: bool = True
    told: dict[str, Told] = field(default_factory=dict)

    def answers(self, pairs: Sequence[Pair], *, task: str, advance: Callable[[int], None]) -> list[Answer]:
        """One answer a pair, in order; `advance` is told how many more are answered."""
        queries = [Query.of(*pair, max_length=self.max_length) for pair in pairs]
        told = self.told.setdefault(task, Told())
        if queries and told.way == "shared prefixes":
            told.refused = self._refused(queries, task)
            told.way = "lm-eval" if told.refused else "shared prefixes"
        keys = [request_key(told.way, task, query.tokens, query.targets) for query in queries]
        asked = _Asked.of(keys, pairs, queries)
        advance(sum(key in self.journal for key in keys))
        for planned in self.journal.unfinished(task, told.way, asked.first):
            self._run(planned.requests, asked, told.way, advance)
        fresh = tuple(key for key in asked.first if key not in self.journal)
        if fresh:
            self._run(fresh, asked, told.way, advance, task=task)
        told.scored_tokens = self._forwarded(pairs)
        told.computed_tokens = self.journal.computed_tokens(task)
        return [Answer(*self.journal[key]) for key in keys]

    # --- one plan -----------------------------------------------------------------------------------------

    def _run(
        self,
        keys: Sequence[str],
        asked: _Asked,
        way: Way,
        advance: Callable[[int], None],
        *,
        task: str | None = None,
    ) -> None:
        """Answer what isn't of a plan's requests; with `task`, the plan is a new one and noted before."""
        batches = (
            self._shared(keys, asked, task) if way == "shared prefixes" else self._own(keys, asked, task)
        )
        for answered in batches:
            fresh = [key for key in answered if key not in self.journal]
            self.journal.add(answered)
            advance(sum(asked.count[key] for key in fresh))

    def _shared(self, keys: Sequence[str], asked: _Asked, task: str | None) -> Iterator[dict[str, Answer]]:
        queries = [asked.queries[asked.first[key]] for key in keys]
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        made = plan(
            queries,
            rows_per_batch=self.batch_size,
            max_scored_per_batch=prefix_scoring.max_scored_positions(vocabulary),
        )
        self._note(task, "shared prefixes", keys, made.computed_tokens)
        for answers in prefix_scoring.score(
            self.model,
            made,
            queries,
            wanted=lambda batch: any(keys[number] not in self.journal for number in batch.queries),
        ):
            yield {keys[number]: answer for number, answer in answers.items()}

    def _own(self, keys: Sequence[str], asked: _Asked, task: str | None) -> Iterator[dict[str, Answer]]:
        """In the harness's own batches: by length, requests that differ in the last token together."""
        pairs = {key: asked.pairs[asked.first[key]] for key in keys}
        self._note(task, "lm-eval", keys, self._forwarded(list(pairs.values())))
        groups: dict[tuple[int, ...], list[str]] = {}
        for key in sorted(keys, key=lambda key: _harness_order(pairs[key])):
            context, continuation = pairs[key]
            groups.setdefault((*context, *continuation[:-1]), []).append(key)
        together = list(groups.values())
        for start in range(0, len(together), self.batch_size):
            batch = [key for group in together[start : start + self.batch_size] for key in group]
            if any(key not in self.journal for key in batch):
                answers = self.by_harness([pairs[key] for key in batch], self.batch_size)
                yield dict(zip(batch, answers, strict=True))

    def _forwarded(self, pairs: Sequence[Pair]) -> int:
        return forwarded_by_harness(pairs, batch_size=self.batch_size, max_length=self.max_length).tokens

    def _note(self, task: str | None, kind: str, keys: Sequence[str], tokens: int) -> None:
        if task is not None:
            self.journal.begin(Planned(task=task, kind=kind, requests=tuple(keys), computed_tokens=tokens))

    # --- which way ----------------------------------------------------------------------------------------

    def _refused(self, queries: Sequence[Query], task: str) -> str | None:
        """Why these requests can't share prefixes; compares both ways where the journal doesn't know yet.

        What it knows of a task is taken up in its order, so that a stage that goes on decides as before the kill,
        whatever was found of other tasks or of longer texts since.
        """
        if not self.shares:
            return "quality.scoring is lm_eval"
        few = prefix_scoring.probe(queries)
        longest = max(queries, key=lambda query: len(query.tokens))
        reach = max(len(query.tokens) for query in (*few, longest))
        if reason := prefix_scoring.obstacle(self.model, longest_tokens=reach):
            return reason
        if reach > self.max_length:
            return f"sequences of at most {self.max_length} tokens leave nothing to share"
        known = iter(self.journal.checked(task))
        checked = next(known, None) or self._compare(few, noise_nats=0.0, task=task)
        while not checked.refused and len(longest.tokens) > _COMPARED_AGAIN_RATIO * checked.up_to_tokens:
            checked = next(known, None) or self._compare([longest], noise_nats=checked.noise_nats, task=task)
        return checked.refused

    def _compare(self, queries: Sequence[Query], *, noise_nats: float, task: str) -> PathChecked:
        """Both ways on the same requests; the outcome, and the tokens that it took, go into the journal.

        Where they differ by more than rounding, the harness is asked once more in batches of one: a quantizer that
        scales activations by their batch makes its answers differ, too, and ours may differ as much.
        """
        pairs = [(query.context, query.targets) for query in queries]
        made = plan(queries, rows_per_batch=len(queries), every_trunk=True)
        expected = self.by_harness(pairs, len(queries))
        tokens = made.computed_tokens + sum(len(query.tokens) for query in queries)
        try:
            found = _in_order(prefix_scoring.score(self.model, made, queries))
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            if "memory" in str(error).lower():
                raise
            refused: str | None = (
                f"the model doesn't run with a mask and positions of our own ({type(error).__name__})"
            )
        else:
            flips = self._flips(queries, expected, found)
            tokens += sum(len(query.tokens) for query, _ in flips)
            refused = self._verdict(queries, expected, found, flips, noise_nats)
            if refused and len(queries) > 1:
                tokens += sum(len(query.tokens) for query in queries)
                noise_nats = prefix_scoring.largest_difference(expected, self.by_harness(pairs, 1))
                refused = self._verdict(queries, expected, found, flips, noise_nats)
        longest = max(len(query.tokens) for query in queries)
        checked = PathChecked(
            task=task, up_to_tokens=longest, computed_tokens=tokens, noise_nats=noise_nats, refused=refused
        )
        self.journal.note_checked(checked)
        return checked

    def _flips(
        self, queries: Sequence[Query], expected: Sequence[Answer], found: Sequence[Answer]
    ) -> list[tuple[Query, float]]:
        """Requests that one way alone calls greedy, with the nats between a target and its best rival."""
        return [
            (query, prefix_scoring.closest_call(self.model, query))
            for query, one, other in zip(queries, expected, found, strict=True)
            if one.greedy != other.greedy and math.isfinite(one.nats)
        ]

    def _verdict(
        self,
        queries: Sequence[Query],
        expected: Sequence[Answer],
        found: Sequence[Answer],
        flips: Sequence[tuple[Query, float]],
        noise_nats: float,
    ) -> str | None:
        difference = prefix_scoring.largest_difference(found, expected)
        targets = max(len(query.targets) for query in queries)
        allowed = prefix_scoring.tolerance_nats(self.model, targets=targets, noise_nats=noise_nats)
        if difference > allowed:
            return f"log-likelihoods differ by {difference:.2g} nats from the harness's, {allowed:.2g} is rounding"
        apart = max((nats for _, nats in flips), default=0.0)
        if apart > allowed:
            return (
                f"a greedy flag differs from the harness's, though the best tokens are {apart:.2g} nats apart"
            )
        return None


@dataclass(frozen=True)
class _Asked:
    """Requests by key: equal ones are answered once."""

    pairs: Sequence[Pair]
    queries: Sequence[Query]
    first: dict[str, int]
    count: dict[str, int]

    @classmethod
    def of(cls, keys: Sequence[str], pairs: Sequence[Pair], queries: Sequence[Query]) -> _Asked:
        first: dict[str, int] = {}
        count: dict[str, int] = {}
        for number, key in enumerate(keys):
            first.setdefault(key, number)
            count[key] = count.get(key, 0) + 1
        return cls(pairs=pairs, queries=queries, first=first, count=count)


def _in_order(batches: Iterable[Mapping[int, Answer]]) -> list[Answer]:
    answers = {number: answer for batch in batches for number, answer in batch.items()}
    return [answers[number] for number in range(len(answers))]


def _harness_order(pair: Pair) -> tuple[int, tuple[int, ...]]:
    whole = (*pair[0], *pair[1])
    return -len(whole), whole
