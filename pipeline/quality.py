"""Task scores of a loaded model by lm-eval, with every sample kept for the paired comparison.

The only module that imports lm-eval. Each task is run by itself, so that its batches, and with them its
rounding, don't depend on which other tasks a recipe lists. The harness's response cache is never used: its
key doesn't hold the model, so one precision would get another one's answers.

    result = evaluate(model, tokenizer_folder=folder, request=request, compute_dtype="float32",
                      device="cpu", progress=print)
    result.tasks["piqa_local"].metrics["acc"].score
"""

from __future__ import annotations

import functools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.errors import PrerequisiteError, StageError
from pipeline.harness_setting import head_left_alone, plain_decoding, quiet
from pipeline.results import QualityResult, TaskResult
from pipeline.task_checks import check, task_problems
from pipeline.task_scores import (
    all_finite,
    direction,
    metrics_of,
    perplexity,
    primary_metric,
    samples_of,
    token_perplexity,
)
from pipeline.tasks import (
    QualityRequest,
    TaskFile,
    find_tasks,
    inputs_digest,
    leaves,
    rendered,
    text_digest,
)
from pipeline.tokenizer_facts import (
    adds_bos,
    chat_template_hash,
    load_tokenizer,
    text_hash,
    to_json,
    tokenizer_hash,
)
from pipeline.values import digest

__all__ = ["QualityRequest", "check", "evaluate", "inputs_digest"]

_BOOTSTRAP_ROUNDS = 1000
_SAMPLING_SETTINGS = {"do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p"}


def evaluate(
    model: Any,
    *,
    tokenizer_folder: Path,
    request: QualityRequest,
    compute_dtype: str,
    device: str,
    progress: Callable[[str], None],
) -> QualityResult:
    """Scores and samples of every task of `request`.

    `model` is a loaded transformers model, already on its device; its weights and generation settings are
    left as they were. Seeds Python's, NumPy's and torch's global generators. `progress` gets a line about
    once a second and must not write to `sys.stdout`, which lm-eval's own prints make us redirect.
    Raises PrerequisiteError for data or a template that is missing, StageError for a task that can't be
    judged (no known direction, no room for its answers).
    """
    tokenizer = load_tokenizer(tokenizer_folder, chat_template=request.apply_chat_template)
    rules_hash = tokenizer_hash(tokenizer)  # before the harness sets padding and truncation
    with quiet(), plain_decoding(model), head_left_alone(model):
        harness = _harness(model, tokenizer, request, progress)
        tasks = _load_tasks(request)
        files = leaves(request)
        for task in tasks.values():
            _refuse_unmeasurable(task, harness, request, files)
        results = {name: _run(name, task, harness, request, files.get(name)) for name, task in tasks.items()}
    return QualityResult(
        engine="transformers",
        device=device,
        compute_dtype=compute_dtype,
        batch_size=request.batch_size,
        seed=request.seed,
        limit=request.limit,
        limits=dict(request.limits),
        chat_template_hash=chat_template_hash(tokenizer),
        tokenizer_hash=rules_hash,
        adds_bos_token=adds_bos(tokenizer),
        harness_version=version("lm_eval"),
        tasks={name: result for name, (result, _) in results.items()},
        logits_finite=all(finite for _, finite in results.values()),
        notes=tuple(f"group {name}: each task is judged, no pooled score" for name in _groups(request)),
    )


# --- the model as lm-eval sees it ------------------------------------------------------------------------


@dataclass
class _Watch:
    """What happens to the requests of one task; takes the place of lm-eval's cache hook and bars."""

    progress: Callable[[str], None]
    task: str = ""
    total: int = 0
    done: int = 0
    truncated: int = 0
    finite: bool = True
    tokens: dict[int, int] = field(default_factory=dict)
    last_told: float = -math.inf

    def begin(self, task: str, total: int) -> None:
        self.task, self.total, self.done = task, total, 0

    def advance(self, requests: int) -> None:
        self.done += requests
        now = time.monotonic()
        if now - self.last_told >= 1 or self.done == self.total:
            self.last_told = now
            self.progress(f"{self.task}: {self.done} of {self.total} requests")

    def add_partial(self, kind: str, _request: Any, _answer: Any) -> None:
        """lm-eval's call for each answer, meant for its response cache."""
        if kind != "loglikelihood_rolling":  # told only when all windows of all documents are done
            self.advance(1)

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

        watch: _Watch

        def loglikelihood(self, requests: Any, **_: Any) -> Any:
            self.watch.begin(requests[0].task_name, len(requests))
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> Any:
            tokens = [len(self.tok_encode(request.args[0])) for request in requests]
            self.watch.tokens = dict(zip((r.doc_id for r in requests), tokens, strict=True))
            windows = sum(math.ceil(count / self.max_length) for count in tokens)
            self.watch.begin(requests[0].task_name, windows)
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **settings: Any) -> Any:
            for _, context, answer in requests:
                if not 0 < len(answer) <= self.max_length:
                    raise StageError(
                        f"task {self.watch.task}: an answer of {len(answer)} tokens can't be scored; the "
                        f"longest sequence is {self.max_length} (quality.max_length_tokens)"
                    )
                self.watch.truncated += len(context) + len(answer) > self.max_length + 1
            answers = super()._loglikelihood_tokens(requests, **settings | {"disable_tqdm": True})
            if requests and requests[0][0] is None:  # windows of rolling documents carry no text
                self.watch.advance(len(requests))
            return answers

        def generate_until(self, requests: Any, **_: Any) -> Any:
            self.watch.begin(requests[0].task_name, len(requests))
            for request in requests:
                room = self.max_length - self.new_tokens(request.args[1])
                self.watch.truncated += len(self.tok_encode(request.args[0])) > room
            return super().generate_until(requests, disable_tqdm=True)

        def new_tokens(self, settings: Mapping[str, Any]) -> int:
            """How many tokens a task's generation settings ask for, under any of their names."""
            from lm_eval.models.utils import normalize_gen_kwargs

            return int(normalize_gen_kwargs(dict(settings), self.max_gen_toks)["max_gen_toks"])

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **settings: Any) -> Any:
            from transformers import LogitsProcessorList

            class Look:
                __call__ = staticmethod(self.watch.look_at)

            plain = {name: value for name, value in settings.items() if name not in _SAMPLING_SETTINGS}
            plain |= {"do_sample": False, "logits_processor": LogitsProcessorList([Look()])}
            return super()._model_generate(context, max_length, stop, **plain)

    return Harness


def _harness(model: Any, tokenizer: Any, request: QualityRequest, progress: Callable[[str], None]) -> Any:
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
    harness.watch = harness.cache_hook = _Watch(progress)
    return harness


# --- tasks ------------------------------------------------------------------------------------------------


def _groups(request: QualityRequest) -> list[str]:
    return [name for name, file in find_tasks(request).items() if file.members]


def _load_tasks(request: QualityRequest) -> dict[str, Any]:
    """lm-eval's task objects by name, groups opened, few-shot settings and seed set as `simple_evaluate`."""
    from lm_eval.tasks import TaskManager

    tasks: dict[str, Any] = {}
    with rendered(request) as (folder, needs_index):
        manager = TaskManager(include_path=str(folder), include_defaults=needs_index)
        for name in find_tasks(request):
            try:
                tasks |= manager.load([name])["tasks"]
            except OSError as error:  # what `datasets` raises for data it can't find or reach
                raise PrerequisiteError(f"the data of task {name} can't be loaded: {error}") from error
    for task in tasks.values():
        if task.get_config("num_fewshot") is None or (
            request.num_fewshot is not None and task.get_config("num_fewshot") != 0
        ):
            task.set_config(key="num_fewshot", value=request.num_fewshot or 0)
        task.set_fewshot_seed(seed=request.seed)
    return tasks


def _refuse_unmeasurable(
    task: Any, harness: Any, request: QualityRequest, files: Mapping[str, TaskFile]
) -> None:
    """Before the first request of the first task: hours must not end in a refusal."""
    name = task.task_name
    if file := files.get(name):
        for problem in task_problems(file, request):
            raise StageError(f"{problem.what}; {problem.fix}")
    for metric, higher in task.higher_is_better().items():
        direction(name, metric, higher)
    if task.OUTPUT_TYPE == "generate_until":
        asked = harness.new_tokens(task.get_config("generation_kwargs") or {})
        if asked >= harness.max_length:
            raise StageError(
                f"task {name} generates {asked} tokens and the longest sequence is {harness.max_length}: "
                "nothing of the prompt would be left; raise quality.max_length_tokens or lower the task's "
                "max_gen_toks"
            )


def _run(
    name: str, task: Any, harness: Any, request: QualityRequest, file: TaskFile | None
) -> tuple[TaskResult, bool]:
    """One task's result, and whether every log-likelihood and logit seen was finite."""
    from lm_eval.evaluator import evaluate as run_tasks

    _seed(request.seed)
    harness.watch = harness.cache_hook = watch = _Watch(harness.watch.progress, last_told=time.monotonic())
    _survive_overflow(task)
    output = run_tasks(
        lm=harness,
        task_dict={"tasks": {name: task}},
        limit=request.limits.get(name, request.limit),
        bootstrap_iters=_BOOTSTRAP_ROUNDS,
        log_samples=True,
        apply_chat_template=request.apply_chat_template,
        # One turn per example, as the harness's own `simple_evaluate` has it.
        fewshot_as_multiturn=request.apply_chat_template,
        confirm_run_unsafe_code=request.confirm_unsafe_code,
    )
    logged = output["samples"][name]
    rolling = task.OUTPUT_TYPE == "loglikelihood_rolling"
    samples = samples_of(logged, watch.tokens if rolling else None)
    finite = watch.finite and all_finite(logged)
    metrics = metrics_of(name, output["results"][name], task.higher_is_better(), samples, finite=finite)
    if rolling:
        metrics["token_perplexity"] = token_perplexity(samples, finite=finite)
    return TaskResult(
        task=name,
        output_type=str(task.OUTPUT_TYPE),
        task_version=str(task.VERSION),
        task_hash=text_digest(file) if file else digest(json.loads(to_json(task.dump_config()))),
        prompts_hash=text_hash(to_json([instance.args for instance in task.instances])),
        data_hash=digest([sample.doc_hash for sample in samples]),
        num_fewshot=task.get_config("num_fewshot") or 0,
        documents=len(samples),
        truncated_prompts=watch.truncated,
        primary_metric=primary_metric(list(task.higher_is_better()), metrics),
        metrics=metrics,
        samples=samples,
        notes=tuple(_notes(task, harness, finite)),
    ), finite


def _notes(task: Any, harness: Any, finite: bool) -> Iterator[str]:
    if not finite:
        yield "a log-likelihood or logit is NaN or infinite: no score"
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        yield (
            f"windows of {harness.max_length} tokens; the first of a document follows token "
            f"{harness.prefix_token_id}, the others their predecessor's last token"
        )
    sampled = _SAMPLING_SETTINGS & set(task.get_config("generation_kwargs") or {})
    if task.OUTPUT_TYPE == "generate_until" and sampled:
        yield f"decoded greedily; the task's {', '.join(sorted(sampled))} not applied"


def _seed(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _survive_overflow(task: Any) -> None:
    """A broken model's perplexity overflows `exp` in lm-eval and would take the finished task with it."""
    aggregation = task.aggregation()
    for metric in {"word_perplexity", "byte_perplexity"} & set(aggregation):
        aggregation[metric] = _weighted_perplexity


def _weighted_perplexity(items: Sequence[tuple[float, float]]) -> float:
    return perplexity(sum(nats for nats, _ in items), sum(units for _, units in items))
