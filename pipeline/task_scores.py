"""lm-eval's output of one task → values: numbers that are numbers, samples that can be joined.

The harness mixes text ("N/A"), tuples and NaN into its numbers. Here a score that isn't finite is None, and
a sample holds only what can be compared with the same document's sample of another precision.

>>> perplexity(-15 * math.log(256), 10)
4096.0
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import StageError
from pipeline.results import MetricScore, Sample
from pipeline.score_checks import SHARES_OF_RIGHT_ANSWERS
from pipeline.statistics import ratio_standard_error
from pipeline.values import digest

# Metrics of rolling tasks and the unit each is per, by the unit's name in a sample.
UNITS = {
    "word_perplexity": "words",
    "byte_perplexity": "utf8_bytes",
    "bits_per_byte": "utf8_bytes",
    "token_perplexity": "tokens",
}
_ANSWER_HASH_LETTERS = 16
# By nature: a task file that calls one of these the other way round would turn the gate around.
_LOWER_IS_BETTER = {*UNITS, "perplexity", "brier_score", "ter", "wer", "cer"}
_HIGHER_IS_BETTER = {
    *SHARES_OF_RIGHT_ANSWERS,
    *("acc_mutual_info", "acc_all", "f1", "mcc", "bleu", "chrf", "chrf++"),
}


def direction(task: str, metric: str, higher: object) -> bool:
    """Whether a higher `metric` is better; raises StageError when nobody says so, or it can't be."""
    if not isinstance(higher, bool):
        raise StageError(
            f"task {task}: it isn't known whether a higher {metric} is better; "
            "add higher_is_better to its metric_list entry"
        )
    if higher and metric in _LOWER_IS_BETTER:
        raise StageError(f"task {task}: {metric} is an error, but its file says higher_is_better: true")
    if not higher and metric in _HIGHER_IS_BETTER:
        raise StageError(
            f"task {task}: {metric} counts what is right, but its file says higher_is_better: false"
        )
    return higher


def perplexity(log_likelihood_nats: float, units: float) -> float:
    """exp(−Σ log-likelihood ÷ Σ units): of the mean, not the mean of exps; inf beyond a float's range, NaN of none."""
    if not units:
        return math.nan
    try:
        return math.exp(-log_likelihood_nats / units)
    except OverflowError:
        return math.inf


def number(value: object) -> float | None:
    """A finite number as float (NumPy's, too); None for text, lists, NaN, infinity and the like."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    found = float(value)
    return found if math.isfinite(found) else None


def samples_of(logged: Sequence[Mapping[str, Any]], tokens: Mapping[int, int] | None) -> tuple[Sample, ...]:
    """One sample a document, in the data's order, from lm-eval's logged samples (one a filter and document).

    `tokens` (by document number) is given for rolling tasks. A document whose log-likelihood isn't finite
    has no metrics: its right or wrong would be an accident of how NaN sorts. Equal documents are told apart
    by their turn: the second one's hash ends with `#2`.
    """
    several = len({example["filter"] for example in logged}) > 1
    answers: dict[int, str | None] = {}
    documents: dict[int, dict[str, float]] = {}
    hashes: dict[int, str] = {}
    for example in sorted(logged, key=lambda example: int(example["doc_id"])):
        number_of = int(example["doc_id"])
        hashes[number_of] = example["doc_hash"]
        answers[number_of] = _answer_hash(example["resps"])
        values = documents.setdefault(number_of, {})
        if all(map(math.isfinite, _floats(example["resps"]))):
            values |= (
                _rolling(example, tokens[number_of]) if tokens is not None else _scalars(example, several)
            )
    seen: Counter[str] = Counter()
    samples = []
    for number_of, values in documents.items():
        seen[hashes[number_of]] += 1
        turn = seen[hashes[number_of]]
        doc_hash = hashes[number_of] + (f"#{turn}" if turn > 1 else "")
        samples.append(Sample(doc_hash=doc_hash, metrics=values, answer_hash=answers[number_of]))
    return tuple(samples)


def all_finite(logged: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no log-likelihood of any request is NaN or infinite."""
    return all(math.isfinite(value) for example in logged for value in _floats(example["resps"]))


def metrics_of(
    task: str,
    results: Mapping[str, Any],
    directions: Mapping[str, object],
    samples: Sequence[Sample],
    *,
    finite: bool,
) -> dict[str, MetricScore]:
    """Scores by metric name, in lm-eval's order; `exact_match.strict` where a task has several filters.

    Keys of `results` look like `acc,none` and `acc_stderr,none`. With `finite` false every score is None.
    """
    keys = [key for key in results if "," in key and "_stderr," not in key]
    several = len({key.rpartition(",")[2] for key in keys}) > 1
    scores = {}
    for key in keys:
        metric, _, chosen = key.rpartition(",")
        score = number(results[key]) if finite else None
        stderr = number(results.get(f"{metric}_stderr,{chosen}"))
        if stderr is None and metric in UNITS:
            stderr = _ratio_stderr(metric, samples)
        scores[_name(metric, chosen, several)] = MetricScore(
            score=score,
            stderr=None if score is None else stderr,
            higher_is_better=direction(task, metric, directions.get(metric)),
        )
    return scores


def token_perplexity(samples: Sequence[Sample], *, finite: bool) -> MetricScore:
    """Perplexity per token of a rolling task: comparable between models of one tokenizer only."""
    nats, tokens = _sums("tokens", samples)
    score = number(perplexity(nats, tokens)) if finite and tokens else None
    stderr = None if score is None else _ratio_stderr("token_perplexity", samples)
    return MetricScore(score=score, stderr=stderr, higher_is_better=False)


def primary_metric(listed: Sequence[str], metrics: Mapping[str, MetricScore]) -> str:
    """The first metric of the task's metric_list; with filters, of its first filter."""
    for metric in listed:
        for name in metrics:
            if name == metric or name.startswith(f"{metric}."):
                return name
    return next(iter(metrics))  # a task whose own function names its metrics as it goes


def _name(metric: str, chosen: str, several: bool) -> str:
    return f"{metric}.{chosen}" if several else metric


def _scalars(example: Mapping[str, Any], several: bool) -> dict[str, float]:
    """Metrics with one number a document; corpus metrics (F1, BLEU) hold pairs and stay out."""
    values = {
        _name(metric, example["filter"], several): number(example[metric]) for metric in example["metrics"]
    }
    return {name: value for name, value in values.items() if value is not None}


def _rolling(example: Mapping[str, Any], tokens: int) -> dict[str, float]:
    # The task's own counts win: it may count words of the text before its clean-up, as wikitext does.
    text = str(example["arguments"][0][0])
    words = example.get("word_perplexity", (0.0, len(re.split(r"\s+", text))))[1]
    per_byte = example.get("byte_perplexity", example.get("bits_per_byte"))
    return {
        # An empty text has no windows, whose sum lm-eval makes the integer 0.
        "log_likelihood_nats": math.fsum(_floats(example["resps"])[:1]),
        "words": float(words),
        "utf8_bytes": float(per_byte[1] if per_byte else len(text.encode())),
        "tokens": float(tokens),
    }


def _floats(value: Any) -> list[float]:
    """Every float in lm-eval's nested answers; booleans and generated text aren't."""
    if isinstance(value, list | tuple):
        return [found for item in value for found in _floats(item)]
    return [value] if isinstance(value, float) else []


def _answer_hash(answers: Any) -> str | None:
    """Digest of every log-likelihood to its last bit; None for generated text, where equal answers prove nothing."""
    exact = [value.hex() for value in _floats(answers)]
    return digest(exact)[:_ANSWER_HASH_LETTERS] if exact else None


def _sums(unit: str, samples: Sequence[Sample]) -> tuple[float, float]:
    whole = [sample.metrics for sample in samples if unit in sample.metrics]
    return math.fsum(one["log_likelihood_nats"] for one in whole), math.fsum(one[unit] for one in whole)


def _ratio_stderr(metric: str, samples: Sequence[Sample]) -> float | None:
    """Standard error of a perplexity or of bits per byte, documents being the units that were drawn: that of nats a
    unit, times the derivative of exp or of ÷ ln 2."""
    unit, count = UNITS[metric], len(samples)
    nats, units = _sums(unit, samples)
    if count < 2 or not units or any(unit not in sample.metrics for sample in samples):
        return None
    error = ratio_standard_error(
        [sample.metrics["log_likelihood_nats"] for sample in samples],
        [sample.metrics[unit] for sample in samples],
    )
    return number(error / math.log(2) if metric == "bits_per_byte" else error * perplexity(nats, units))
