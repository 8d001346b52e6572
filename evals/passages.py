"""Text for perplexity tasks: a data set's passages, each once.

BoolQ asks several questions about one passage; scoring its text several times would count it several times
over and make the standard error too small.
"""

from __future__ import annotations

from typing import Any


def distinct_passages(dataset: Any) -> Any:
    """The rows (a `datasets.Dataset`) whose `passage` did not stand in an earlier row, in order."""
    first: dict[str, int] = {}
    for index, passage in enumerate(dataset["passage"]):
        first.setdefault(passage, index)
    return dataset.select(list(first.values()))
