"""A loaded model's distribution on held text: written as the baseline's reference, or compared with it.

The trunk runs once a window and gives hidden states; the head is then applied to a few positions at a time, by the
model's own code (its scaling or capping of logits included), so that no more than 4 million logits are in memory at
once, whatever the vocabulary. Logarithms are FP32, their sums FP64.

    write_reference(model, windows, folder=partial, key=key, batch_size=8, progress=print)
    result = measure_distribution(model, windows, request=request, batch_size=8, progress=print)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.distribution import (
    TOP,
    Block,
    Estimate,
    TokenDistances,
    compare,
    encode,
    joined,
    perplexity_figures,
    ratio,
    summarise,
    target_log_probs,
)
from pipeline.distribution_reference import Reference, ReferenceReader, ReferenceWriter
from pipeline.distribution_results import DistributionRequest, DistributionResult, DistributionWindow
from pipeline.distribution_text import Windows
from pipeline.errors import StageError
from pipeline.split_model import SplitModel

if TYPE_CHECKING:
    import torch

LOGITS_AT_ONCE = 4_000_000
"""16 MB in FP32; a comparison holds about six arrays of as many."""
TOKENS_AT_ONCE = 4096
"""Of a forward pass through the trunk, unless one window is longer."""
_NOT_FINITE = "a logit is NaN or infinite: no distribution"
_BITS_PER_NAT = 1.4426950408889634

Progress = Callable[[str], None]


def write_reference(
    model: Any, windows: Windows, *, folder: Path, key: str, batch_size: int, progress: Progress
) -> Reference:
    """The model's distribution of the text into an empty folder. Raises StageError when a logit isn't finite."""
    positions = len(windows.ids) * windows.scored_tokens
    parts = SplitModel(model)
    reference = Reference(key=key, positions=positions, vocabulary_tokens=_vocabulary(parts, windows))
    with ReferenceWriter(folder, reference) as writer:
        for block in _blocks(parts, windows, batch_size=batch_size, progress=progress):
            if not _is_finite(block):
                raise StageError(_NOT_FINITE)
            writer.add(encode(block))
        writer.close()
    return reference


def measure_distribution(
    model: Any,
    windows: Windows,
    *,
    request: DistributionRequest,
    batch_size: int,
    progress: Progress,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> DistributionResult:
    """Perplexities of the text, and the distance from the baseline's distribution where the request names one.

    A logit that isn't finite gives a result without figures. Raises StageError for a reference that can't be used.
    """
    reader = (
        ReferenceReader(Path(request.reference), key=request.reference_key) if request.reference else None
    )
    parts = SplitModel(model)
    vocabulary = _vocabulary(parts, windows)
    if reader is not None:
        _check_shape(reader.reference, windows, vocabulary_tokens=vocabulary)
    nats: list[float] = []
    compared: list[TokenDistances] = []
    blocks = _blocks(parts, windows, batch_size=batch_size, progress=progress, logits_at_once=logits_at_once)
    for block in blocks:
        if not _is_finite(block):
            return _result(request, windows, vocabulary_tokens=vocabulary, nats=None, distances=None)
        start = len(nats)
        nats += (-target_log_probs(block).astype("float64")).tolist()
        if reader is not None:
            compared.append(compare(block, reader.rows(start, len(nats))))
    distances = joined(compared) if compared else None
    return _result(request, windows, vocabulary_tokens=vocabulary, nats=nats, distances=distances)


def _check_shape(reference: Reference, windows: Windows, *, vocabulary_tokens: int) -> None:
    expected = (len(windows.ids) * windows.scored_tokens, vocabulary_tokens)
    found = (reference.positions, reference.vocabulary_tokens)
    if found != expected:
        raise StageError(
            f"the baseline's distribution has {found[0]} positions of {found[1]} tokens, this variant's has "
            f"{expected[0]} of {expected[1]}: they can't be compared"
        )


# --- positions -------------------------------------------------------------------------------------------


def _vocabulary(parts: SplitModel, windows: Windows) -> int:
    """Width of the logits. Raises StageError for a text with tokens that the model has no row for."""
    largest = max(max(window) for window in windows.ids)
    if largest >= parts.embedding_rows:
        raise StageError(
            f"the text has token {largest}; the model's embedding has {parts.embedding_rows} rows"
        )
    return parts.vocabulary_tokens


def _blocks(
    parts: SplitModel,
    windows: Windows,
    *,
    batch_size: int,
    progress: Progress,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Iterator[Block]:
    """Scored positions in order, in blocks; none reaches over two windows."""
    import torch

    first, last = windows.first_scored, windows.first_scored + windows.scored_tokens
    together = max(1, min(batch_size, TOKENS_AT_ONCE // len(windows.ids[0])))
    rows = max(1, logits_at_once // parts.vocabulary_tokens)
    with torch.no_grad():
        for start in range(0, len(windows.ids), together):
            progress(f"distribution of the text: {start} of {len(windows.ids)} windows")
            ids = torch.tensor(windows.ids[start : start + together], device=parts.device)
            made = parts.run(ids)
            for window, tokens in enumerate(ids):
                for place in range(first, last, rows):
                    end = min(place + rows, last)
                    logits = made.logits(window, start=place, stop=end)
                    yield as_block(logits, tokens[place + 1 : end + 1])


def as_block(logits: torch.Tensor, targets: torch.Tensor) -> Block:
    """Log-softmax of logits [positions, vocabulary], summed in FP64: in FP32 it is off by 2e-5 for 49,152 tokens.

    Of equally likely tokens the smaller id comes first.
    """
    import numpy
    import torch

    shifted = logits.float() - logits.float().amax(dim=-1, keepdim=True)
    normal = shifted.exp().sum(dim=-1, keepdim=True, dtype=torch.float64).log()
    log_probs = shifted - normal.float()
    values, ids = (one.cpu().numpy() for one in log_probs.topk(min(TOP, log_probs.shape[-1]), dim=-1))
    order = numpy.lexsort((ids, -values), axis=-1)
    return Block(
        log_probs=log_probs.cpu().numpy(),
        targets=targets.cpu().numpy(),
        top=numpy.take_along_axis(ids, order, axis=1),
    )


def _is_finite(block: Block) -> bool:
    import numpy

    return bool(numpy.isfinite(block.log_probs).all())


# --- the result ------------------------------------------------------------------------------------------


def _result(
    request: DistributionRequest,
    windows: Windows,
    *,
    vocabulary_tokens: int,
    nats: list[float] | None,
    distances: TokenDistances | None,
) -> DistributionResult:
    """`nats` and `distances` by position; without `nats` a result that has no figures."""
    known = DistributionResult(
        text_sha256=request.text_sha256,
        context_tokens=request.context_tokens,
        bos_first=windows.bos_first,
        vocabulary_tokens=vocabulary_tokens,
        scored_tokens=len(windows.ids) * windows.scored_tokens,
        windows=(),
        finite=nats is not None,
        reference_key=request.reference_key,
        notes=() if nats is not None else (_NOT_FINITE,),
    )
    if nats is None:
        return known
    found = tuple(_windows(windows, nats, distances))
    totals = [window.nats for window in found]
    missing = Estimate(None, None)
    token = perplexity_figures(totals, units=[float(window.tokens) for window in found])
    word = perplexity_figures(totals, units=windows.words) if windows.words else missing
    byte = perplexity_figures(totals, units=windows.utf8_bytes) if windows.utf8_bytes else missing
    bits = ratio([_BITS_PER_NAT * total for total in totals], weights=windows.utf8_bytes or ())
    figures = {
        "token_perplexity": token,
        "word_perplexity": word,
        "byte_perplexity": byte,
        "bits_per_byte": bits,
    }
    return known.model_copy(
        update={
            "windows": found,
            **{name: figure.value for name, figure in figures.items()},
            **{f"{name}_stderr": figure.stderr for name, figure in figures.items()},
            "distance": summarise(distances, window_tokens=windows.scored_tokens) if distances else None,
        }
    )


def _windows(
    windows: Windows, nats: list[float], distances: TokenDistances | None
) -> Iterator[DistributionWindow]:
    size = windows.scored_tokens
    for index in range(len(windows.ids)):
        span = slice(index * size, (index + 1) * size)
        window = DistributionWindow(
            tokens=size,
            nats=math.fsum(nats[span]),
            words=windows.words[index] if windows.words else None,
            utf8_bytes=windows.utf8_bytes[index] if windows.utf8_bytes else None,
        )
        if distances is not None:
            window = window.model_copy(
                update={
                    "kl_nats": tuple(float(f"{value:.6g}") for value in distances.kl_nats[span]),
                    "kl_sum_nats": math.fsum(distances.kl_nats[span]),
                    "same_top1": int(distances.same_top1[span].sum()),
                    "baseline_nats": math.fsum(distances.baseline_nats[span]),
                }
            )
        yield window
