"""What a recipe's `quality.distribution` asks for on this machine, and what is missing for it.

request, problems = distribution_request(loaded, spec, data_folder=folder, longest_tokens=2048)
reference_size(request, vocabulary_tokens=49152)
"""

from __future__ import annotations

import codecs
from pathlib import Path

from pipeline.distribution_reference import reference_bytes
from pipeline.distribution_results import DistributionRequest
from pipeline.distribution_text import LEAST_WINDOWS, scored_tokens
from pipeline.recipe import LoadedRecipe
from pipeline.recipe_sections import EVAL_DATA, DistributionSpec
from pipeline.results import Problem
from pipeline.store import file_sha256

_KEY = "quality.distribution"


def distribution_request(
    loaded: LoadedRecipe, spec: DistributionSpec, *, data_folder: Path, longest_tokens: int | None
) -> tuple[DistributionRequest | None, tuple[Problem, ...]]:
    """The request without a reference; None where the text can't be used. `longest_tokens` is the model's limit."""
    path = (
        data_folder / spec.text.removeprefix(EVAL_DATA).lstrip("/")
        if spec.text.startswith(EVAL_DATA)
        else loaded.resolve(spec.text)
    )
    problems = []
    if longest_tokens is not None and spec.context_tokens > longest_tokens:
        problems.append(
            Problem(
                what=f"{_KEY}.context_tokens is {spec.context_tokens}, the model reads at most {longest_tokens}",
                fix=f"set it to {longest_tokens} or less",
            )
        )
    wrong = _wrong_text(path, least_bytes=LEAST_WINDOWS * spec.context_tokens)
    if wrong:
        return None, (*problems, wrong)
    request = DistributionRequest(
        text=str(path),
        text_sha256=file_sha256(path),
        context_tokens=spec.context_tokens,
        max_tokens=spec.max_tokens,
    )
    return request, tuple(problems)


def _wrong_text(path: Path, *, least_bytes: int) -> Problem | None:
    """No token is less than a byte, so that a short file surely holds too few."""
    try:
        size = path.stat().st_size
        decoder = codecs.getincrementaldecoder("utf-8")()
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                decoder.decode(piece)
        decoder.decode(b"", final=True)
    except OSError as error:
        return Problem(
            what=f"{_KEY}.text: {path} can't be read ({error.strerror})",
            fix=f"name a text file, relative to the recipe or under {EVAL_DATA}",
        )
    except UnicodeDecodeError as error:
        return Problem(
            what=f"{_KEY}.text: {path} isn't UTF-8 text ({error.reason})",
            fix="convert it, or name another one",
        )
    if size < least_bytes:
        return Problem(
            what=f"{_KEY}.text: {path} has {size:,} bytes, too few for {LEAST_WINDOWS} windows of tokens",
            fix=f"take a longer text, or a smaller {_KEY}.context_tokens",
        )
    return None


def reference_size(request: DistributionRequest, *, vocabulary_tokens: int) -> int:
    """Bytes that the baseline's distribution takes at most: a short text holds fewer tokens."""
    tokens = min(request.max_tokens, Path(request.text).stat().st_size + 1)
    positions = tokens // request.context_tokens * scored_tokens(request.context_tokens)
    return reference_bytes(positions=positions, vocabulary_tokens=vocabulary_tokens)
