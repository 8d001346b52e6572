"""What a task calls right, over all its documents: is there such an answer, how often is it the same one. Pure.

lm-eval (0.4.13) counts a document whose right answer isn't among its choices as wrong for every model, which halves
every drop where half of the documents are so; and a document that stands twice as evidence twice.

>>> is_answer(3, ["yes", "no"])
False
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

Logged = Sequence[Mapping[str, Any]]


def without_right_answer(task: Any, once: Logged) -> int:
    """How many documents (one logged sample each) have no right answer that could be given.

    None are counted where the task's own function judges answers, or where a text is scored as it is.
    """
    if task.get_config("process_results") is not None or task.OUTPUT_TYPE == "loglikelihood_rolling":
        return 0
    if task.OUTPUT_TYPE == "multiple_choice":
        return sum(
            not is_answer(_right(task, example["doc"]), task.doc_to_choice(example["doc"]))
            for example in once
        )
    return sum(is_nothing(task.doc_to_target(example["doc"]), example["doc"]) for example in once)


def is_answer(right: object, choices: Sequence[str]) -> bool:
    """Whether what a task calls right is one of the choices: its index, its text, or a list of those."""
    if isinstance(right, list | tuple):
        return bool(right) and all(is_answer(one, choices) for one in right)
    if isinstance(right, str):
        return right in choices
    return isinstance(right, Real) and right in range(len(choices))


def is_nothing(target: object, document: Mapping[str, Any]) -> bool:
    """Whether a target is absent or blank; a template writes `None` for a field that is null."""
    if isinstance(target, list | tuple):
        return all(is_nothing(one, document) for one in target)
    return target is None or not str(target).strip() or (target == "None" and None in document.values())


def same_answer_share(task: Any, once: Logged) -> float | None:
    """What always giving one answer gets: the share of the most frequent right one.

    None unless several documents have the same choices, since only then an answer can be the same.
    """
    own = task.get_config("process_results") is not None
    if task.OUTPUT_TYPE != "multiple_choice" or own or len(once) < 2:
        return None
    choices = {tuple(task.doc_to_choice(example["doc"])) for example in once}
    if len(choices) > 1:
        return None
    (listed,) = choices
    right: Counter[int] = Counter()
    for example in once:
        right.update(set(_indices(_right(task, example["doc"]), listed)))
    return max(right.values(), default=0) / len(once)


def repeated(once: Logged) -> int:
    """How many documents say what an earlier one said, or are asked in the same words: they get the same answer."""
    seen: set[str] = set()
    count = 0
    for example in sorted(once, key=lambda example: int(example["doc_id"])):
        asked = hashlib.sha256(repr(example["arguments"]).encode("utf-8", "replace")).hexdigest()
        keys = {str(example["doc_hash"]), asked}
        count += not keys.isdisjoint(seen)
        seen |= keys
    return count


def _right(task: Any, document: Any) -> Any:
    """What lm-eval holds the chosen index against; where each choice has its own prompt, the text says which."""
    return task.doc_to_text(document) if getattr(task, "multiple_input", 0) else task.doc_to_target(document)


def _indices(right: Any, choices: Sequence[str]) -> Iterator[int]:
    if isinstance(right, list | tuple):
        for one in right:
            yield from _indices(one, choices)
    elif is_answer(right, choices):
        yield choices.index(right) if isinstance(right, str) else int(right)
