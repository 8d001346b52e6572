"""A loaded lm-eval task, asked for some of its documents at a time, with the prompts of a full run.

The harness builds the requests of the documents that it is asked for, and draws few-shot examples as it goes: asked
for half of the documents, it would ask them in other words. Here every document's requests are built once, in the
data's order, and each round takes copies of those it needs.

    available = build_once(task, limit=request.limit)
    evaluate(lm, {"tasks": {name: task}}, samples={name: [0, 7, 9]})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def build_once(task: Any, *, limit: int | None) -> int:
    """From now on the task builds all requests of its first `limit` documents once; the number of those documents.

    `task.build_all_requests(samples=…)` then takes the sorted numbers of documents, and counts the requests' documents
    from 0 in that order, as lm-eval (0.4.13, `Task.doc_iterator`) counts the documents themselves.
    """
    available = min(len(task.eval_docs), limit or len(task.eval_docs))
    build = task.build_all_requests
    whole: list[Any] = []

    def some(*, samples: Sequence[int], **settings: Any) -> None:
        if not whole:
            build(**{**settings, "limit": available, "samples": None})
            whole.extend(task.instances)
        place = {document: index for index, document in enumerate(samples)}
        task._instances = [
            _unanswered(instance, place[instance.doc_id]) for instance in whole if instance.doc_id in place
        ]

    task.build_all_requests = some
    return available


def _unanswered(instance: Any, doc_id: int) -> Any:
    name, _, repeats = instance.metadata
    return dataclasses.replace(instance, metadata=(name, doc_id, repeats), resps=[], filtered_resps={})
