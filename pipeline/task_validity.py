"""Whether a task's answers can carry a verdict: what was asked, what came back, and whether that beats guessing.

A score is a number even where the prompt was cut to nothing, began with two BOS tokens, or no answer matched the
task's filter. Such a task is void: its result says why, and `comparison` refuses it, so that a gate finds the
measurement missing instead of passing it.

>>> round(chance_p(58, documents=100, chance=0.5), 4)
0.0666
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.measured import Distribution
from pipeline.task_answers import repeated, same_answer_share, without_right_answer
from pipeline.values import Value

CHANCE_SIGNIFICANCE = 0.05
_BOS_ROOM_CHARACTERS = 16

Encode = Callable[[str], Sequence[int]]
Logged = Sequence[Mapping[str, Any]]


class AnswerLength(Value):
    """How long one generated answer was; `cut` when the limit ended it, not a stop string or an EOS token."""

    tokens: int
    cut: bool


class Validity(Value):
    """What `results.TaskResult` keeps under the same names; see there."""

    void: str | None
    chance_score: float | None
    empty_prompts: int
    double_bos_prompts: int
    unanswerable_documents: int
    repeated_documents: int
    output_tokens: Distribution | None
    truncated_outputs: int | None
    unextracted: dict[str, int]
    fewshot_source: str | None


def examine(
    task: Any,
    logged: Logged,
    *,
    seed: int,
    encode: Encode,
    bos: tuple[int, str] | None,
    lengths: Sequence[AnswerLength],
    truncated: int,
) -> Validity:
    """From lm-eval's task and its logged samples (one a filter and document).

    `encode` is the harness's own way from text to ids, `bos` the tokenizer's token as id and text, `lengths` those of
    generated answers, `truncated` the requests whose prompt was cut.
    """
    once = list({example["doc_id"]: example for example in logged}.values())
    prompts = [str(arguments[0]) for example in once for arguments in example["arguments"]]
    empty = empty_prompts(prompts, output_type=str(task.OUTPUT_TYPE))
    # A text's own windows: the harness puts BOS before every document, which is no prompt that could be wrong.
    rolling = task.OUTPUT_TYPE == "loglikelihood_rolling"
    double = 0 if bos is None or rolling else double_bos_prompts(prompts, encode=encode, bos=bos)
    lost = unextracted(logged, fallbacks(task))
    unanswerable = without_right_answer(task, once)
    void = (
        _void_prompts(prompts, empty=empty, double=double)
        or _void_truncation(truncated, prompts=len(prompts) // _askings(once))
        or _void_answers(lost=lost, unanswerable=unanswerable, documents=len(once))
    )
    return Validity(
        void=void,
        chance_score=_chance_score(task, once),
        empty_prompts=empty,
        double_bos_prompts=double,
        unanswerable_documents=unanswerable,
        repeated_documents=repeated(once),
        output_tokens=Distribution.of([float(length.tokens) for length in lengths]) if lengths else None,
        truncated_outputs=sum(length.cut for length in lengths) if lengths else None,
        unextracted=lost,
        fewshot_source=_fewshot_source(task, seed),
    )


def _void_prompts(prompts: Sequence[str], *, empty: int, double: int) -> str | None:
    if empty:
        return f"{empty} of {len(prompts)} prompts are empty, so nothing was asked"
    if double:
        return (
            f"{double} of {len(prompts)} prompts begin with two beginning-of-sequence tokens; drop the one in the chat "
            "template or the one that the tokenizer adds"
        )
    return None


def _void_truncation(truncated: int, *, prompts: int) -> str | None:
    if truncated and truncated >= prompts:
        return (
            f"every one of {prompts} prompts was cut at the longest sequence, so no question was asked whole; raise "
            "quality.max_length_tokens or take fewer examples"
        )
    return None


def _void_answers(*, lost: Mapping[str, int], unanswerable: int, documents: int) -> str | None:
    if unanswerable:
        return (
            f"{unanswerable} of {documents} documents have no right answer that could be given (doc_to_target gives "
            "none of the choices, or nothing), so that every model gets them wrong and any drop looks smaller"
        )
    if lost and all(count == documents for count in lost.values()):
        return (
            f"no filter of the task ({', '.join(lost)}) found an answer in any of {documents} documents; look at what "
            "the model writes and at the task's filter_list"
        )
    return None


# --- prompts -----------------------------------------------------------------------------------------------


def empty_prompts(prompts: Sequence[str], *, output_type: str) -> int:
    """How many prompts hold no letter.

    Tasks that compare whole sentences have no prompt by design; then all are empty, and none counts.
    """
    empty = sum(not prompt.strip() for prompt in prompts)
    by_design = output_type in ("multiple_choice", "loglikelihood") and empty == len(prompts)
    return 0 if by_design else empty


def double_bos_prompts(prompts: Sequence[str], *, encode: Encode, bos: tuple[int, str]) -> int:
    """How many prompts begin with two BOS tokens; only each prompt's beginning is encoded."""
    number, text = bos
    head = 4 * len(text) + _BOS_ROOM_CHARACTERS
    doubled = {
        beginning: tuple(encode(beginning)[:2]) == (number, number)
        for beginning in {prompt[:head] for prompt in prompts}
    }
    return sum(doubled[prompt[:head]] for prompt in prompts)


def _fewshot_source(task: Any, seed: int) -> str | None:
    shots = task.get_config("num_fewshot") or 0
    settings = getattr(task, "fewshot_cfg", None)
    if not shots or settings is None:
        return None
    split = settings.split or (None if settings.samples is not None else task.get_config("training_split"))
    where = f"split {split}" if split else "the task file"
    sampler = settings.sampler if isinstance(settings.sampler, str) else type(settings.sampler).__name__
    return f"{shots} examples from {where}, sampler {sampler}, seed {seed}"


# --- answers -----------------------------------------------------------------------------------------------


def answer_length(
    tokens: Sequence[int],
    *,
    ends: frozenset[int],
    stops: Sequence[str],
    limit: int,
    decode: Callable[[Sequence[int]], str],
) -> AnswerLength:
    """Of one row that `generate` gave back, prompt taken off: tokens before the first end or stop string.

    `ends` are EOS and padding. A stop string counts as found with the token that completes it.
    """
    alive = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    used = [stop for stop in stops if stop]

    def stopped(count: int) -> bool:
        text = decode(tokens[:count])
        return any(stop in text for stop in used)

    if not stopped(alive):
        return AnswerLength(tokens=alive, cut=alive >= limit)
    low, high = 0, alive  # fewer tokens never hold more stop strings
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle, high)
    return AnswerLength(tokens=high, cut=False)


def fallbacks(task: Any) -> dict[str, str]:
    """What each filter of a task that extracts says where it found nothing, by the filter's name."""
    found = {}
    for ensemble in getattr(task, "_filters", ()):
        for build in ensemble.filters:
            fallback = getattr(build(), "fallback", None)
            if isinstance(fallback, str):
                found[str(ensemble.name)] = fallback
    return found


def unextracted(logged: Logged, fallback: Mapping[str, str]) -> dict[str, int]:
    """For each extracting filter the documents in which it found nothing."""
    counts = dict.fromkeys(fallback, 0)
    for example in logged:
        name = example["filter"]
        if name in counts:
            answers = example["filtered_resps"]
            nothing = all(answer == fallback[name] for answer in _flat(answers))
            counts[name] += nothing
    return counts


def _flat(answers: Any) -> list[Any]:
    if isinstance(answers, list | tuple):
        return [found for answer in answers for found in _flat(answer)]
    return [answers]


# --- chance ------------------------------------------------------------------------------------------------


def _chance_score(task: Any, once: Logged) -> float | None:
    """What knowing nothing gets: 1 ÷ the number of choices, averaged over the documents, or always the same answer."""
    if task.OUTPUT_TYPE != "multiple_choice" or not once:
        return None
    choices = [len(example["arguments"]) // _askings(once) for example in once]
    if not all(choices):
        return None
    return max(sum(1 / count for count in choices) / len(choices), same_answer_share(task, once) or 0.0)


def _askings(once: Logged) -> int:
    """How often each choice is asked for: `acc_mutual_info` asks a second time, without the question."""
    return 2 if once and "acc_mutual_info" in once[0]["metrics"] else 1


def chance_p(right: int, *, documents: int, chance: float) -> float:
    """One-sided exact p-value of at least `right` right answers by guessing.

    With unequal numbers of choices the count of right guesses isn't binomial; the binomial of the mean chance has the
    heavier tail above its mean (Hoeffding, Annals of Mathematical Statistics 27, 1956), so that nothing is taken for
    knowledge that could be chance.
    """
    from scipy.stats import binom

    return float(binom.sf(right - 1, documents, chance))
