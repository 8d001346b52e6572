"""A text file as windows of tokens, cut and scored as llama.cpp's `llama-perplexity` does.

The text is one sequence of tokens; its windows of `context_tokens` stand one after the other and share nothing; what
is left at the end isn't read. Where the tokenizer puts a beginning-of-sequence token in front of text, it stands in
front of the whole and in place of each window's first token (tools/perplexity in ggml-org/llama.cpp). With n tokens a
window, position i ≥ n ÷ 2 says how likely token i + 1 is: n − 1 − ⌊n ÷ 2⌋ tokens are scored, 255 of 512.

    text = read_windows(request, folder=checkpoint)
    text.scored_tokens
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.distribution_results import DistributionRequest
from pipeline.errors import StageError
from pipeline.store import file_sha256
from pipeline.tokenizer_facts import adds_bos, load_tokenizer

LEAST_WINDOWS = 2
"""One says nothing about how windows differ; llama.cpp asks for two as well."""
_CHARACTERS_A_TOKEN = 16
_SLACK_TOKENS = 64
"""Beyond what is read, so that where the text is cut makes no token of it other."""


@dataclass(frozen=True)
class Windows:
    """Token ids [windows][context_tokens] and what text the scored ones stand for; None where nobody tells."""

    ids: tuple[tuple[int, ...], ...]
    words: tuple[int, ...] | None
    utf8_bytes: tuple[int, ...] | None
    bos_first: bool

    @property
    def first_scored(self) -> int:
        """The first position of a window whose distribution is looked at."""
        return len(self.ids[0]) // 2

    @property
    def scored_tokens(self) -> int:
        """Of one window."""
        return scored_tokens(len(self.ids[0]))


def scored_tokens(context_tokens: int) -> int:
    """How many tokens of a window are scored."""
    return context_tokens - 1 - context_tokens // 2


def read_windows(request: DistributionRequest, *, folder: Path) -> Windows:
    """The request's text by the tokenizer of a checkpoint folder.

    Raises StageError when the file has changed, isn't UTF-8 or holds fewer than two windows.
    """
    path = Path(request.text)
    try:
        if file_sha256(path) != request.text_sha256:
            raise StageError(f"quality.distribution.text: {path} has changed since the run began")
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StageError(f"quality.distribution.text: {path} can't be read as UTF-8 text ({error})") from None
    tokenizer = load_tokenizer(folder, chat_template=False)
    bos_first = adds_bos(tokenizer)
    ids, ends = _tokens(tokenizer, text, wanted=request.max_tokens)
    if bos_first:
        ids, ends = [tokenizer.bos_token_id, *ids], None if ends is None else [0, *ends]
    length = request.context_tokens
    count = min(len(ids), request.max_tokens) // length
    if count < LEAST_WINDOWS:
        raise StageError(
            f"quality.distribution.text: {path} holds {len(ids):,} tokens, too few for {LEAST_WINDOWS} windows of "
            f"{length}; take a longer text, or a smaller context_tokens"
        )
    windows = [ids[start : start + length] for start in range(0, count * length, length)]
    if bos_first:
        windows = [[tokenizer.bos_token_id, *window[1:]] for window in windows]
    spans = None if ends is None else _scored_spans(ends, count=count, length=length)
    return Windows(
        ids=tuple(map(tuple, windows)),
        words=None if spans is None else _words_beginning_in(spans, text),
        utf8_bytes=None if spans is None else tuple(len(text[a:b].encode("utf-8")) for a, b in spans),
        bos_first=bos_first,
    )


def _tokens(tokenizer: Any, text: str, *, wanted: int) -> tuple[list[int], list[int] | None]:
    """At least `wanted` ids where the text holds them, and the character each one ends before.

    What looks like a special token in the text is text, as it is for llama.cpp.
    """
    characters = _CHARACTERS_A_TOKEN * wanted
    while True:
        settings = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        encoded = tokenizer(text[:characters], return_offsets_mapping=tokenizer.is_fast, **settings)
        ids = list(encoded["input_ids"])
        if len(ids) >= wanted + _SLACK_TOKENS or characters >= len(text):
            break
        characters *= 2
    if not tokenizer.is_fast:
        return ids, None
    ends, reached = [], 0
    for _, end in encoded["offset_mapping"]:
        reached = max(reached, end)  # some tokenizers' spaces end before they begin
        ends.append(reached)
    return ids, ends


def _scored_spans(ends: list[int], *, count: int, length: int) -> list[tuple[int, int]]:
    """Characters [start, end) of each window's scored tokens: from the end of the last token that isn't scored.

    A character whose bytes lie in several tokens counts where its first byte is.
    """
    before = length // 2
    return [(ends[window * length + before], ends[(window + 1) * length - 1]) for window in range(count)]


def _words_beginning_in(spans: list[tuple[int, int]], text: str) -> tuple[int, ...]:
    """Whitespace-separated words whose first character lies in each span: every word counts once at most."""
    return tuple(
        sum(
            1
            for word in re.finditer(r"(?<!\S)\S", text[max(0, a - 1) : b])
            if word.start() + max(0, a - 1) >= a
        )
        for a, b in spans
    )
