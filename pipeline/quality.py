"""Task scores of a loaded model by lm-eval, with every sample kept for the paired comparison.

With `harness` the only module that runs lm-eval. Each task is run by itself, so that its batches, and with them its
rounding, don't depend on which other tasks a recipe lists. The harness's response cache is never used: its
key doesn't hold the model, so one precision would get another one's answers.

    result = evaluate(model, tokenizer_folder=folder, request=request, compute_dtype="float32",
                      device="cpu", progress=print)
    result.tasks["piqa_local"].metrics["acc"].score
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.answer_journal import AnswerJournal
from pipeline.early_stopping import Stopping, answer_until_decided, seeded_order
from pipeline.errors import PrerequisiteError, StageError
from pipeline.harness import SAMPLING_SETTINGS, Watch, make_harness
from pipeline.harness_setting import head_left_alone, plain_decoding, quiet
from pipeline.results import QualityResult, Sample, TaskResult
from pipeline.task_checks import check, task_problems
from pipeline.task_documents import DocumentError, refuse_literal_field
from pipeline.task_failures import failing_as_stage
from pipeline.task_rounds import build_once
from pipeline.task_scores import (
    all_finite,
    direction,
    metrics_of,
    perplexity,
    primary_metric,
    samples_of,
    token_perplexity,
)
from pipeline.task_validity import Validity, examine
from pipeline.task_yaml import FunctionName
from pipeline.tasks import (
    QualityRequest,
    TaskFile,
    find_tasks,
    group_tasks,
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

__all__ = ["QualityRequest", "check", "evaluate", "inputs_digest", "load_tasks", "prepare_tasks"]

_BOOTSTRAP_ROUNDS = 1000
_TRIED_DOCUMENTS = 2
_TOLD_BY_THE_STAGE = (MemoryError, RuntimeError, OSError)
"""What memory and devices raise: the stage tells running out of memory from other failures."""
_PROMPT_HASH_LETTERS = 16
_OTHER_BATCHES = (
    "answered in rounds, so in other batches than the baseline's: in {} that alone changes answers; "
    "quality.null_batch_size shows how many"
)


def evaluate(
    model: Any,
    *,
    tokenizer_folder: Path,
    request: QualityRequest,
    compute_dtype: str,
    device: str,
    progress: Callable[[str], None],
    journal: AnswerJournal | None = None,
    stopping: Stopping | None = None,
    tasks: Mapping[str, Any] | None = None,
) -> QualityResult:
    """Scores and samples of every task of `request`; `tasks` are those that `prepare_tasks` made of it.

    `model` is a loaded transformers model, already on its device; its weights and generation settings are
    left as they were. Seeds Python's, NumPy's and torch's global generators. `progress` gets a line about
    once a second and must not write to `sys.stdout`, which lm-eval's own prints make us redirect.
    Requests that `journal` holds answers to aren't computed again; new answers are added batch by batch. One journal
    serves one model and one length only (a stage keeps it under its own key).
    Tasks of `stopping` are answered until they are decided, in rounds that the journal spares what is answered.
    Raises PrerequisiteError for data or a template that is missing, StageError for a task that can't be
    judged (no known direction, no room for its answers).
    """
    tokenizer = load_tokenizer(tokenizer_folder, chat_template=request.apply_chat_template)
    rules_hash = tokenizer_hash(tokenizer)  # before the harness sets padding and truncation
    with quiet(), plain_decoding(model), head_left_alone(model):
        harness = make_harness(
            model,
            tokenizer,
            request,
            progress=progress,
            journal=AnswerJournal() if journal is None else journal,
        )
        tasks = load_tasks(request) if tasks is None else tasks
        files = leaves(request)
        for task in tasks.values():
            _refuse_unmeasurable(task, harness, request, files)
        results = {
            name: _answered(
                name, task, harness, request, files.get(name), stopping=stopping, dtype=compute_dtype
            )
            for name, task in tasks.items()
        }
    return QualityResult(
        engine="transformers",
        device=device,
        compute_dtype=compute_dtype,
        batch_size=request.batch_size,
        seed=request.seed,
        limit=request.limit,
        limits=dict(request.limits),
        chat_template_hash=chat_template_hash(tokenizer),
        chat_template_applied=request.apply_chat_template,
        tokenizer_hash=rules_hash,
        max_length_tokens=harness.max_length,
        adds_bos_token=adds_bos(tokenizer),
        harness_version=version("lm_eval"),
        tasks={name: result for name, (result, _) in results.items()},
        groups=group_tasks(request),
        logits_finite=all(finite for _, finite in results.values()),
    )


# --- tasks ------------------------------------------------------------------------------------------------


def prepare_tasks(request: QualityRequest) -> dict[str, Any]:
    """`load_tasks`, quietly, and the requests of each task's first documents built, before a model is loaded.

    Raises PrerequisiteError for data that can't be had, StageError for a task that can't be asked.
    """
    with quiet():
        tasks = load_tasks(request)
        files = leaves(request)
        for name, task in tasks.items():
            with failing_as_stage(task=name, path=_path(files, name), doing="building its first requests"):
                task.build_all_requests(limit=_TRIED_DOCUMENTS, rank=0, world_size=1)
            task.set_fewshot_seed(seed=request.seed)
    return tasks


def load_tasks(request: QualityRequest) -> dict[str, Any]:
    """lm-eval's task objects by name, groups opened, few-shot settings and seed set as `simple_evaluate`."""
    from lm_eval.tasks import TaskManager

    tasks: dict[str, Any] = {}
    with rendered(request) as (folder, needs_index):
        manager = TaskManager(include_path=str(folder), include_defaults=needs_index)
        for name, file in find_tasks(request).items():
            try:
                with failing_as_stage(
                    task=name, path=file.path, doing="loading its data", through=(MemoryError, OSError)
                ):
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


def _path(files: Mapping[str, TaskFile], name: str) -> Path | None:
    return files[name].path if name in files else None


def _refuse_unmeasurable(
    task: Any, harness: Any, request: QualityRequest, files: Mapping[str, TaskFile]
) -> None:
    """Before the first request of the first task: hours must not end in a refusal."""
    name = task.task_name
    if file := files.get(name):
        for problem in task_problems(file, request):
            raise StageError(f"{problem.what}; {problem.fix}")
        _refuse_literal_fields(task, file)
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


def _refuse_literal_fields(task: Any, file: TaskFile) -> None:
    """Where a function or the hub makes the documents, `check` couldn't know their fields."""
    keys = (
        ["doc_to_text"]
        if task.get_config("process_results") is not None
        else ["doc_to_text", "doc_to_target"]
    )
    for key in keys if not file.official else ():
        wanted = file.config.get(key)
        if isinstance(wanted, str) and not isinstance(wanted, FunctionName):
            try:
                refuse_literal_field(key, wanted, getattr(task, "features", [wanted]))
            except DocumentError as error:
                raise StageError(f"task {file.name} ({file.path}): {error}") from None


def _answered(
    name: str,
    task: Any,
    harness: Any,
    request: QualityRequest,
    file: TaskFile | None,
    *,
    stopping: Stopping | None,
    dtype: str,
) -> tuple[TaskResult, bool]:
    """One task's result, of all its documents or of those that decide it; and whether all was finite."""
    wanted = stopping.tasks.get(name) if stopping else None
    if wanted is None:
        return _run(name, task, harness, request, file)
    available = build_once(task, limit=request.limit_of(name))
    if available != len(wanted.documents):
        raise StageError(
            f"task {name}: {available} documents, but the baseline answered {len(wanted.documents)}"
        )
    finite = True

    def answer(documents: tuple[int, ...]) -> TaskResult:
        nonlocal finite
        result, finite = _run(name, task, harness, request, file, documents=documents)
        return result

    order = seeded_order(available, task=name, seed=request.seed)
    decided = answer_until_decided(wanted, order=order, answer=answer)
    if dtype != "float32":
        decided = decided.model_copy(update={"notes": (*decided.notes, _OTHER_BATCHES.format(dtype))})
    return decided, finite


def _run(
    name: str,
    task: Any,
    harness: Any,
    request: QualityRequest,
    file: TaskFile | None,
    *,
    documents: tuple[int, ...] | None = None,
) -> tuple[TaskResult, bool]:
    """One task's result, and whether every log-likelihood and logit seen was finite; `documents` by number."""
    from lm_eval.evaluator import evaluate as run_tasks

    _seed(request.seed)
    harness.watch = harness.cache_hook = watch = Watch(harness.watch.progress, last_told=time.monotonic())
    _survive_overflow(task)
    with failing_as_stage(
        task=name, path=file.path if file else None, doing="being asked", through=_TOLD_BY_THE_STAGE
    ):
        output = run_tasks(
            lm=harness,
            task_dict={"tasks": {name: task}},
            limit=request.limit_of(name) if documents is None else None,
            samples=None if documents is None else {name: list(documents)},
            bootstrap_iters=_BOOTSTRAP_ROUNDS,
            log_samples=True,
            apply_chat_template=request.apply_chat_template,
            # One turn per example, as the harness's own `simple_evaluate` has it.
            fewshot_as_multiturn=request.apply_chat_template,
            confirm_run_unsafe_code=request.confirm_unsafe_code,
        )
    logged = output["samples"][name]
    rolling = task.OUTPUT_TYPE == "loglikelihood_rolling"
    samples = _with_prompts(samples_of(logged, watch.tokens if rolling else None), task.instances)
    finite = watch.finite and all_finite(logged)
    metrics = metrics_of(name, output["results"][name], task.higher_is_better(), samples, finite=finite)
    if rolling:
        metrics["token_perplexity"] = token_perplexity(samples, finite=finite)
    validity = _validity(harness, task, logged, request)
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
        **_counted(harness, name, task),
        **dict(validity),
        primary_metric=primary_metric(list(task.higher_is_better()), metrics),
        metrics=metrics,
        samples=samples,
        notes=(*_document_notes(harness, logged, validity), *_notes(task, harness, finite)),
    ), finite


def _with_prompts(samples: Sequence[Sample], instances: Sequence[Any]) -> tuple[Sample, ...]:
    """Each document's sample with the digest of all that the model was asked about it; both in the data's order."""
    asked: dict[int, list[Any]] = {}
    for instance in instances:
        asked.setdefault(instance.doc_id, []).append(instance.args)
    return tuple(
        sample.model_copy(update={"prompt_hash": text_hash(to_json(asked[number]))[:_PROMPT_HASH_LETTERS]})
        for sample, number in zip(samples, sorted(asked), strict=True)
    )


def _validity(
    harness: Any, task: Any, logged: Sequence[Mapping[str, Any]], request: QualityRequest
) -> Validity:
    """Whether what was asked and answered can carry a verdict."""
    number, text = harness.tokenizer.bos_token_id, harness.tokenizer.bos_token
    return examine(
        task,
        logged,
        seed=request.seed,
        encode=harness.tok_encode,
        bos=None if number is None or text is None else (number, str(text)),
        lengths=harness.watch.lengths,
        truncated=harness.watch.truncated,
    )


def _counted(harness: Any, name: str, task: Any) -> dict[str, Any]:
    """Which way log-likelihoods were scored, and the tokens a stock run would have computed beside those computed."""
    told = harness.scorer.told.get(name)
    if told is None or task.OUTPUT_TYPE == "generate_until":
        return {}
    return {
        "scoring": told.way,
        "scored_tokens": told.scored_tokens,
        "computed_tokens": told.computed_tokens,
    }


def _document_notes(harness: Any, logged: Sequence[Mapping[str, Any]], validity: Validity) -> Iterator[str]:
    once = {example["doc_id"]: len(example["arguments"]) for example in logged}
    if cut := harness.watch.truncated:
        yield f"{cut} of {sum(once.values())} prompts were cut at {harness.max_length} tokens"
    if repeated := validity.repeated_documents:
        yield f"{repeated} of {len(once)} documents ask what an earlier one asks: judged once"


def _notes(task: Any, harness: Any, finite: bool) -> Iterator[str]:
    if not finite:
        yield "a log-likelihood or logit is NaN or infinite: no score"
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        if adds_bos(harness.tokenizer):
            yield "each document begins with two BOS tokens, the tokenizer's and the harness's, for every variant"
        yield (
            f"windows of {harness.max_length} tokens; the first of a document follows token "
            f"{harness.prefix_token_id}, the others their predecessor's last token"
        )
    told = harness.scorer.told.get(task.task_name)
    if told is not None and told.refused:
        yield f"scored request by request, as lm-eval does: {told.refused}"
    sampled = SAMPLING_SETTINGS & set(task.get_config("generation_kwargs") or {})
    if task.OUTPUT_TYPE == "generate_until" and sampled:
        yield f"decoded greedily; the task's {', '.join(sorted(sampled))} not applied"


def _seed(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _survive_overflow(task: Any) -> None:
    """Both would take a finished task with them: a broken model's perplexity overflows `exp` in lm-eval, and texts
    without a letter divide by zero."""
    aggregation = task.aggregation()
    for metric in {"word_perplexity", "byte_perplexity"} & set(aggregation):
        aggregation[metric] = _weighted_perplexity
    if "bits_per_byte" in aggregation:
        aggregation["bits_per_byte"] = _bits_per_byte


def _bits_per_byte(items: Sequence[tuple[float, float]]) -> float:
    utf8_bytes = sum(units for _, units in items)
    return -sum(nats for nats, _ in items) / utf8_bytes / math.log(2) if utf8_bytes else math.nan


def _weighted_perplexity(items: Sequence[tuple[float, float]]) -> float:
    return perplexity(sum(nats for nats, _ in items), sum(units for _, units in items))
