"""The model as lm-eval sees it: every request counted, kept in a journal, and never sampled.

`make_harness` hands out lm-eval's HFLM with three seams taken over: log-likelihoods go through `log_likelihoods`
(shared prefixes), generation goes batch by batch through the journal, and what HFLM would silently cut to nothing is
refused.

    harness = make_harness(model, tokenizer, request, progress=print, journal=AnswerJournal())
    harness.watch = Watch(print)            # a fresh one for each task
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.answer_journal import AnswerJournal, Planned, request_key
from pipeline.errors import StageError
from pipeline.log_likelihoods import Pair, Scorer
from pipeline.prefix_scoring import Answer
from pipeline.task_validity import AnswerLength, answer_length
from pipeline.tasks import QualityRequest
from pipeline.tokenizer_facts import to_json

__all__ = ["SAMPLING_SETTINGS", "Watch", "make_harness"]

SAMPLING_SETTINGS = {"do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p"}


@dataclass
class Watch:
    """What happens to the requests of one task; takes the place of lm-eval's cache hook and bars."""

    progress: Callable[[str], None]
    task: str = ""
    total: int = 0
    done: int = 0
    truncated: int = 0
    finite: bool = True
    tokens: dict[int, int] = field(default_factory=dict)
    lengths: list[AnswerLength] = field(default_factory=list)
    last_told: float = -math.inf

    def begin(self, task: str, total: int) -> None:
        """A task's requests of one kind are next."""
        self.task, self.total, self.done = task, total, 0

    def advance(self, requests: int) -> None:
        """So many more are answered."""
        self.done += requests
        now = time.monotonic()
        if now - self.last_told >= 1 or self.done == self.total:
            self.last_told = now
            self.progress(f"{self.task}: {self.done} of {self.total} requests")

    def add_partial(self, _kind: str, _request: Any, _answer: Any) -> None:
        """lm-eval's call for each answer, meant for its response cache, which isn't used."""

    def look_at(self, _token_ids: Any, scores: Any) -> Any:
        """As a logits processor of `generate`: notes NaN and +inf, changes nothing."""
        import torch

        self.finite = self.finite and not bool((torch.isnan(scores) | (scores == math.inf)).any())
        return scores


@functools.cache
def _harness_class() -> type[Any]:
    from lm_eval.models.huggingface import HFLM

    class Harness(HFLM):  # type: ignore[misc]
        """HFLM that counts, never samples, and refuses what it would silently cut to nothing."""

        watch: Watch
        row_lengths: list[AnswerLength]
        journal: AnswerJournal
        scorer: Scorer

        def loglikelihood(self, requests: Any, **_: Any) -> Any:
            self.watch.begin(requests[0].task_name, len(requests))
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> Any:
            tokens = [len(self.tok_encode(request.args[0])) for request in requests]
            self.watch.tokens = dict(zip((r.doc_id for r in requests), tokens, strict=True))
            windows = sum(math.ceil(count / self.max_length) for count in tokens)
            self.watch.begin(requests[0].task_name, windows)
            with self._batches_of(max(1, windows)):  # all windows at once: the scorer batches them by length
                return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            for _text, context, answer in requests:
                if not 0 < len(answer) <= self.max_length:
                    raise StageError(
                        f"task {self.watch.task}: an answer of {len(answer)} tokens can't be scored; the "
                        f"longest sequence is {self.max_length} (quality.max_length_tokens)"
                    )
                self.watch.truncated += len(context) + len(answer) > self.max_length + 1
            pairs = [(context, answer) for _text, context, answer in requests]
            return self.scorer.answers(pairs, task=self.watch.task, advance=self.watch.advance)

        def by_harness(self, pairs: Sequence[Pair], batch_size: int) -> list[Answer]:
            """HFLM's own answers."""
            requests = [(None, list(context), list(answer)) for context, answer in pairs]
            with self._batches_of(batch_size):
                found = super()._loglikelihood_tokens(requests, disable_tqdm=True)
            return [Answer(*answer) for answer in found]

        def generate_until(self, requests: Any, **_: Any) -> Any:
            self.watch.begin(requests[0].task_name, len(requests))
            for request in requests:
                room = self.max_length - self.new_tokens(request.args[1])
                self.watch.truncated += len(self.tok_encode(request.args[0])) > room
            return _generated(self, requests, generate=super().generate_until)

        def new_tokens(self, settings: Mapping[str, Any]) -> int:
            """How many tokens a task's generation settings ask for, under any of their names."""
            from lm_eval.models.utils import normalize_gen_kwargs

            return int(normalize_gen_kwargs(dict(settings), self.max_gen_toks)["max_gen_toks"])

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **settings: Any) -> Any:
            plain = _greedy(settings, self.watch)
            rows = super()._model_generate(context, max_length, stop, **plain)
            self.row_lengths = _row_lengths(self, rows, context.shape[1], max_length, stop)
            return rows

        @contextlib.contextmanager
        def _batches_of(self, size: int) -> Iterator[None]:
            before: int = self.batch_size_per_gpu
            self.batch_size_per_gpu: int = size
            try:
                yield
            finally:
                self.batch_size_per_gpu = before

    return Harness


def make_harness(
    model: Any,
    tokenizer: Any,
    request: QualityRequest,
    *,
    progress: Callable[[str], None],
    journal: AnswerJournal,
) -> Any:
    """The harness around a loaded model. Raises StageError where the recipe asks for what the model hasn't."""
    from lm_eval.models.utils import resolve_max_length

    longest = resolve_max_length(model.config, tokenizer, default=sys.maxsize)
    if request.max_length_tokens is not None and request.max_length_tokens > longest:
        raise StageError(
            f"quality.max_length_tokens is {request.max_length_tokens}, the model reads at most {longest}"
        )
    harness = _harness_class()(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=request.batch_size,
        max_length=request.max_length_tokens,
        # Log-softmax of 16-bit logits in 16 bits is off by up to 1 % of a nat per token.
        softmax_dtype="float32",
    )
    embedded = model.get_input_embeddings().weight.shape[0]
    if not 0 <= tokenizer.pad_token_id < embedded:
        raise StageError(f"padding token {tokenizer.pad_token_id} is beyond the embedding's {embedded} rows")
    harness.watch = harness.cache_hook = Watch(progress)
    harness.journal = journal
    harness.scorer = Scorer(
        model=model,
        journal=journal,
        batch_size=request.batch_size,
        max_length=harness.max_length,
        by_harness=harness.by_harness,
        shares=request.scoring == "shared_prefixes",
    )
    return harness


def _greedy(settings: Mapping[str, Any], watch: Watch) -> dict[str, Any]:
    """Settings of `generate` without sampling, with the watch looking at every logit."""
    from transformers import LogitsProcessorList

    class Look:
        __call__ = staticmethod(watch.look_at)

    plain = {name: value for name, value in settings.items() if name not in SAMPLING_SETTINGS}
    return plain | {"do_sample": False, "logits_processor": LogitsProcessorList([Look()])}


def _row_lengths(
    harness: Any, rows: Any, prompt_tokens: int, max_length: int, stops: Sequence[str]
) -> list[AnswerLength]:
    """How long the answer in each row of tokens (sequence × position) is, up to what ended it."""
    eos = getattr(harness.model.generation_config, "eos_token_id", None)
    ends = (*(eos if isinstance(eos, list) else [eos]), harness.eot_token_id, harness.tokenizer.pad_token_id)
    known = frozenset(token for token in ends if token is not None)
    return [
        answer_length(
            row, ends=known, stops=stops, limit=max_length - prompt_tokens, decode=harness.tok_decode
        )
        for row in rows[:, prompt_tokens:].tolist()
    ]


def _generated(harness: Any, requests: Sequence[Any], *, generate: Callable[..., list[str]]) -> list[str]:
    """Texts in the requests' order: HFLM's own batches (one kind of settings, by length), each kept when it is done."""
    journal, watch = harness.journal, harness.watch
    settings = [to_json(request.args[1]) for request in requests]
    keys = [
        request_key("generate", watch.task, harness.max_length, request.args[0], setting)
        for request, setting in zip(requests, settings, strict=True)
    ]
    of_key = dict(zip(reversed(keys), reversed(requests), strict=True))
    kind_of = dict(zip(keys, settings, strict=True))
    answered: dict[str, Any] = {key: journal[key] for key in keys if key in journal}
    watch.advance(sum(key in answered for key in keys))
    plans = [plan.requests for plan in journal.unfinished(watch.task, "generate", keys)]
    begun = {key for plan in plans for key in plan}
    fresh = tuple(dict.fromkeys(key for key in keys if key not in answered and key not in begun))
    if fresh:
        journal.begin(Planned(task=watch.task, kind="generate", requests=fresh, computed_tokens=0))
    for plan in (*plans, fresh):
        for batch in _generation_batches(harness, plan, of_key, kind_of):
            if all(key in answered for key in batch):
                continue
            texts = generate([of_key[key] for key in batch], disable_tqdm=True)
            # A batch is one call of the model; HFLM sorts it as `_generation_batches` did.
            rows = zip(batch, texts, harness.row_lengths, strict=True)
            answers = {key: [text, length.tokens, length.cut] for key, text, length in rows}
            fresh_keys = {key for key in batch if key not in answered}
            answered |= answers
            if watch.finite:  # what a broken model says is said again, so that it is seen again
                journal.add(answers)
            watch.advance(sum(key in fresh_keys for key in keys))
    watch.lengths = [
        AnswerLength(tokens=tokens, cut=cut) for _, tokens, cut in (answered[key] for key in keys)
    ]
    return [answered[key][0] for key in keys]


def _generation_batches(
    harness: Any, keys: Sequence[str], of_key: Mapping[str, Any], kind_of: Mapping[str, str]
) -> Iterator[list[str]]:
    by_kind: dict[str, list[str]] = {}
    for key in keys:
        by_kind.setdefault(kind_of[key], []).append(key)
    for members in by_kind.values():
        texts = {key: of_key[key].args[0] for key in members}
        ordered = sorted(members, key=lambda key: (-len(harness.tok_encode(texts[key])), texts[key]))
        for start in range(0, len(ordered), harness.batch_size):
            yield ordered[start : start + harness.batch_size]
