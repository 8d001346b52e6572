"""What the distance of a variant's output distribution from the baseline's is, on held text, as values.

Everything is teacher-forced: the model reads the text as it stands and says at each scored position how likely
each token of the vocabulary is. Figures keep their windows, because tokens of one window aren't independent:
standard errors and the gate's bounds come from how windows differ.

>>> DistributionWindow(tokens=255, nats=700.0, words=190, utf8_bytes=1020).nats
700.0
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipeline.values import Value


class DistributionRequest(Value):
    """Which text in which windows. `text` is absolute; its content is `text_sha256`.

    `reference` is the folder with the baseline's distribution of the same text, `reference_key` what it must hold;
    both are empty where the baseline has none to compare with.
    """

    text: str
    text_sha256: str
    context_tokens: Annotated[int, Field(ge=8)]
    max_tokens: Annotated[int, Field(ge=16)]
    reference: str = ""
    reference_key: str = ""


class DistributionWindow(Value):
    """One window's scored tokens: `nats` is −Σ ln p of them, `words` and `utf8_bytes` are those of their text.

    Against the baseline, where there is one: KL divergence at each token (rounded to six digits), their exact sum,
    how many tokens have the same most likely token, and −Σ ln p by the baseline.
    """

    tokens: int
    nats: float
    words: int | None
    utf8_bytes: int | None
    kl_nats: tuple[float, ...] = ()
    kl_sum_nats: float | None = None
    same_top1: int | None = None
    baseline_nats: float | None = None


class BaselineDistance(Value):
    """How far a variant's distribution p̂ is from the baseline's p, at the scored tokens; `…_stderr` over windows.

    KL is Σ p ln(p ÷ p̂) over the whole vocabulary, in nats a token; percentiles are over tokens, interpolated.
    `top5_agreement_share` is the mean share of the baseline's five most likely tokens that are among the variant's
    five. Probability differences are those of the text's own token, variant − baseline, from −1 to 1.
    `log_perplexity_ratio` is ln(perplexity ÷ baseline's perplexity), paired by window.
    """

    kl_mean_nats: float
    kl_mean_nats_stderr: float | None
    kl_median_nats: float
    kl_p99_nats: float
    kl_p999_nats: float
    kl_max_nats: float
    top1_agreement_share: float
    top1_agreement_share_stderr: float | None
    top5_agreement_share: float
    top5_agreement_share_stderr: float | None
    probability_difference_rms: float
    probability_difference_mean: float
    probability_difference_mean_stderr: float | None
    log_perplexity_ratio: float
    log_perplexity_ratio_stderr: float | None
    baseline_token_perplexity: float | None


class DistributionResult(Value):
    """A variant on held text. Windows of `context_tokens` stand one after the other; their second halves are scored.

    With `bos_first` each window's first token is replaced by the beginning-of-sequence token. A perplexity is None
    when a logit wasn't finite or it is beyond e^700; those by words and bytes also where the tokenizer doesn't tell
    which text a token stands for.
    """

    text_sha256: str
    context_tokens: int
    bos_first: bool
    vocabulary_tokens: int
    scored_tokens: int
    windows: tuple[DistributionWindow, ...]
    finite: bool
    token_perplexity: float | None = None
    token_perplexity_stderr: float | None = None
    word_perplexity: float | None = None
    word_perplexity_stderr: float | None = None
    byte_perplexity: float | None = None
    byte_perplexity_stderr: float | None = None
    bits_per_byte: float | None = None
    bits_per_byte_stderr: float | None = None
    distance: BaselineDistance | None = None
    reference_key: str = ""
    notes: tuple[str, ...] = ()
