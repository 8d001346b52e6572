"""Whether two engines compute the same model from one checkpoint: greedy tokens and divergence on a short text.

Quality is scored by one engine, speed is timed on another. Only if both make nearly the same distribution of the
same file does the triple of speed, memory and quality belong to one thing that can ship. Engines differ a little
on purpose (llama.cpp quantizes activations to 8 bits); a wrong rope, norm or tensor differs by whole nats. Both get
the same token ids, made by the checkpoint's own tokenizer: a wrong tokenizer doesn't show here.

    tokens = text_tokens(folder, vocabulary_tokens=reference.vocabulary_tokens)
    compare(observe(reference, tokens=tokens), observe(other, tokens=tokens), engine="llama_cpp")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.engines.base import Session
from pipeline.errors import StageError
from pipeline.results import EngineAgreement
from pipeline.tokenizer_facts import load_tokenizer

if TYPE_CHECKING:
    import numpy

GREEDY_PROMPT_TOKENS = 32
GREEDY_TOKENS = 32
_LEAST_TOKENS = GREEDY_PROMPT_TOKENS + 1
_MOST_TOKENS = 192

_TEXT = (
    "A bridge across the river was finished in the spring of 1893, after two floods had carried away the first "
    "and the second one. The engineer who drew the third had never built anything larger than a barn, but she had "
    "measured the current every week for nine years, and she knew how deep the stones had to lie. On the day it "
    "opened, a band played, the mayor spoke for an hour, and forty carts waited on the northern bank to bring "
    "apples, wool and letters to the market. Nobody asked her to say a word. When the water rose again in October, "
    "she walked to the middle of the bridge, put her ear to the railing and listened. It hummed like a string that "
    "has been tuned by someone patient. She went home, wrote the date in her notebook, and under it the depth of "
    "the river in feet, as she had done four hundred times before."
)


class Observed(NamedTuple):
    """What an engine makes of the text: FP32 logits [tokens, vocabulary], and greedy tokens after its beginning."""

    logits: numpy.ndarray
    greedy: tuple[int, ...]


def text_tokens(folder: Path, *, vocabulary_tokens: int) -> tuple[int, ...]:
    """The text in the checkpoint's own tokens. Raises StageError when the tokenizer makes too little of it."""
    ids = load_tokenizer(folder, chat_template=False)(_TEXT).input_ids[:_MOST_TOKENS]
    if len(ids) < _LEAST_TOKENS or not all(0 <= token < vocabulary_tokens for token in ids):
        raise StageError(
            f"{folder}: its tokenizer makes {len(ids)} tokens of the text that engines are compared on, up to id "
            f"{max(ids, default=0)}; at least {_LEAST_TOKENS} below {vocabulary_tokens} are needed"
        )
    return tuple(ids)


def observe(session: Session, *, tokens: Sequence[int]) -> Observed:
    """Run the text through a loaded session."""
    logits = session.logits(tokens)
    prompts = [list(tokens[:GREEDY_PROMPT_TOKENS])]
    greedy = session.prefill(prompts, new_tokens=GREEDY_TOKENS)
    for _ in range(GREEDY_TOKENS - 1):
        greedy += session.decode_step()
    session.release()
    return Observed(logits=logits, greedy=tuple(greedy))


def compare(reference: Observed, other: Observed, *, reference_engine: str, engine: str) -> EngineAgreement:
    """KL divergence of `other` from `reference` in nats a position, equal best tokens, equal greedy beginnings.

    Vocabularies may differ by padding rows: the smaller one is compared. Raises StageError for logits that aren't
    finite.
    """
    import numpy

    width = min(reference.logits.shape[1], other.logits.shape[1])
    first, second = (_log_softmax(one.logits[:, :width]) for one in (reference, other))
    if not (numpy.isfinite(first).all() and numpy.isfinite(second).all()):
        raise StageError(f"the logits of {reference_engine} or {engine} are not finite")
    divergence = (numpy.exp(first) * (first - second)).sum(axis=1)
    same_top = first.argmax(axis=1) == second.argmax(axis=1)
    pairs = zip(reference.greedy, other.greedy, strict=True)
    same = next((place for place, (one, two) in enumerate(pairs) if one != two), len(reference.greedy))
    return EngineAgreement(
        engine=engine,
        reference_engine=reference_engine,
        text_tokens=len(divergence),
        kl_mean_nats=float(divergence.mean()),
        kl_p99_nats=float(numpy.quantile(divergence, 0.99)),
        same_top1_share=float(same_top.mean()),
        greedy_tokens=len(reference.greedy),
        same_greedy_tokens=same,
    )


def _log_softmax(logits: numpy.ndarray) -> numpy.ndarray:
    import numpy

    shifted = logits.astype(numpy.float64) - logits.max(axis=1, keepdims=True)
    normal: numpy.ndarray = shifted - numpy.log(numpy.exp(shifted).sum(axis=1, keepdims=True))
    return normal
