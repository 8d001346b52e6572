"""Where one harness's answers to lm-eval's requests differ from another's, and whether rounding explains it.

Both are given as (nats, greedy) by task, one a request. A difference is a tie when a change of 1e-4 nats decides it.

    for one in differing_documents(asked, stock, ours):
        print(one.text, one.tie)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.prefix_scoring import closest_call
from pipeline.token_trie import Query
from pipeline.values import Value

NATS_ALLOWED = 1e-4
Asked = Mapping[str, Sequence[Sequence[Any]]]
"""lm-eval's requests by task and document."""
Answers = Mapping[str, Sequence[Any]]
"""(nats, greedy) by task, one a request."""


class Difference(Value):
    """An answer or a document's metrics that differ."""

    text: str
    tie: bool


def differing_flags(asked: Asked, stock: Answers, ours: Answers, *, harness: Any) -> Iterator[Difference]:
    """Requests that only one way calls greedy: a tie where a target and its best rival are as good as equal."""
    for task, of_document in asked.items():
        requests = [request for one in of_document for request in one]
        for request, one, other in zip(requests, stock[task], ours[task], strict=True):
            if one[1] != other[1]:
                context, answer = harness._encode_pair(*request.args)
                query = Query.of(context or [harness.prefix_token_id], answer, max_length=harness.max_length)
                nats = closest_call(harness.model, query)
                where = f"{task} document {request.doc_id} request {request.idx}"
                yield Difference(
                    text=f"{where} (target and rival {nats:.1e} nats apart)", tie=nats <= NATS_ALLOWED
                )


def differing_documents(asked: Asked, stock: Answers, ours: Answers) -> Iterator[Difference]:
    """Documents whose metrics differ: a tie where one answer moved by what is allowed gives the other's metrics."""
    for task, of_document in asked.items():
        start = 0
        for requests in of_document:
            end = start + len(requests)
            one, other = (answers[task][start:end] for answers in (stock, ours))
            wanted = task_metrics(requests, other)
            if task_metrics(requests, one) != wanted:
                best = sorted((nats for nats, _ in one), reverse=True)
                near = f" (best two {best[0] - best[1]:.1e} nats apart)" if len(best) > 1 else ""
                yield Difference(
                    text=f"{task} document {requests[0].doc_id}{near}",
                    tie=any(task_metrics(requests, moved) == wanted for moved in _moved(one, other)),
                )
            start = end


def task_metrics(requests: Sequence[Any], answers: Sequence[Any]) -> Any:
    """What lm-eval makes of one document's answers."""
    return requests[0].task_object.process_results(requests[0].doc, list(answers))


def _moved(stock: Sequence[Any], ours: Sequence[Any]) -> Iterator[list[Any]]:
    """Stock's log-likelihoods with our greedy flags (judged by themselves), one of them moved by what is allowed."""
    plain = [(nats, greedy) for (nats, _), (_, greedy) in zip(stock, ours, strict=True)]
    yield plain
    for number, (nats, greedy) in enumerate(plain):
        for step in (-NATS_ALLOWED, NATS_ALLOWED):
            yield [*plain[:number], (nats + step, greedy), *plain[number + 1 :]]
