"""What stands in the way of a quality run, told within a second and before any model is loaded.

for problem in check(request, offline=True, tokenizer_folder=folder):
    print(problem.what, "→", problem.fix)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.results import Problem
from pipeline.task_documents import document_faults
from pipeline.task_faults import file_faults
from pipeline.task_yaml import LENGTH_NAMES, TaskFileError
from pipeline.tasks import QualityRequest, TaskFile, data_files, files_of, leaves
from pipeline.tensorfile import read_json

_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
_DEFAULT_NEW_TOKENS = 256  # what the harness generates when a task doesn't say


def check(
    request: QualityRequest, *, offline: bool, tokenizer_folder: Path | None = None
) -> tuple[Problem, ...]:
    """Everything found missing or refused, by task; an empty tuple when the stage can start.

    `offline` says that no hub can be reached; with `tokenizer_folder` the chat template is looked for.
    """
    found = list(_template_problems(request, tokenizer_folder))
    files: dict[str, TaskFile] = {}
    for name in request.tasks:
        try:
            files |= leaves(request.model_copy(update={"tasks": (name,)}))
        except TaskFileError as error:
            found.append(error.problem)
    for file in files.values():
        found.extend(task_problems(file, request))
        wrong = list(file_faults(file))
        try:
            missing = list(_data_problems(file, request, offline))
            found.extend((*wrong, *missing) or document_faults(file))
        except TaskFileError as error:
            found.extend((*wrong, error.problem))
    return tuple(found)


def task_problems(file: TaskFile, request: QualityRequest) -> Iterator[Problem]:
    """What a task's own settings make impossible: unsafe code, leaking examples, too long answers."""
    config = file.config
    if config.get("unsafe_code") and not request.confirm_unsafe_code:
        yield Problem(
            what=f"task {file.name} runs code that the model writes (unsafe_code in {file.path})",
            fix="set quality.confirm_unsafe_code: true where that does no harm, or drop the task",
        )
    if _shots(file, request) and not _has_examples(file):
        yield Problem(
            what=f"task {file.name} has no training split: its few-shot examples would be judged documents",
            fix="set quality.num_fewshot: 0, or give the task a training_split or fewshot_split",
        )
    longest = request.max_length_tokens
    if longest is not None and config.get("output_type") == "generate_until":
        settings = config.get("generation_kwargs") or {}
        named = (settings[name] for name in LENGTH_NAMES if settings.get(name) is not None)
        new_tokens = next(named, _DEFAULT_NEW_TOKENS)
        if new_tokens >= longest:
            yield Problem(
                what=f"task {file.name} generates {new_tokens} tokens, the longest sequence is {longest}: "
                "nothing of the prompt would be left",
                fix=f"set quality.max_length_tokens well above {new_tokens}, or lower max_gen_toks "
                f"in {file.path}",
            )


def _shots(file: TaskFile, request: QualityRequest) -> int:
    own = file.config.get("num_fewshot")
    # A task that fixes 0 keeps 0, as in the harness.
    return int(own or 0) if own == 0 or request.num_fewshot is None else request.num_fewshot


def _has_examples(file: TaskFile) -> bool:
    settings = file.config.get("fewshot_config") or {}
    return bool(
        file.config.get("training_split")
        or file.config.get("fewshot_split")
        or "class" in file.config
        or (isinstance(settings, dict) and (settings.get("split") or settings.get("samples")))
    )


def _data_problems(file: TaskFile, request: QualityRequest, offline: bool) -> Iterator[Problem]:
    listed = data_files(file)
    if listed is None:
        if offline and not _is_local(file):
            source = file.config.get("dataset_path")
            part = f" ({file.config['dataset_name']})" if file.config.get("dataset_name") else ""
            yield Problem(
                what=f"task {file.name}: data set {source}{part} isn't on this machine, the hub is offline",
                fix="run once with a network, or take a task with local data (evals/README.md)",
            )
        return
    for name in listed:
        if "://" in name:
            yield Problem(
                what=f"task {file.name}: {name} is on a network, so that its change would go unseen",
                fix="use a local file",
            )
        elif not files_of(name):
            under = Path(name).is_relative_to(request.data_folder)
            yield Problem(
                what=f"task {file.name}: data file {name} isn't there",
                fix="python -m evals.fetch_data" if under else f"correct data_files in {file.path}",
            )


def _is_local(file: TaskFile) -> bool:
    """Whether a data set can be had without a network; unknown ones (a task in Python) are left to it."""
    source = file.config.get("dataset_path")
    if not isinstance(source, str) or "class" in file.config or Path(source).exists():
        return True
    owner, _, name = source.rpartition("/")
    # The cache's own spelling: owner___snake_case_name/config/version/fingerprint.
    snake = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)).lower()
    folder = _dataset_cache() / (f"{owner}___{snake}" if owner else snake)
    return any(folder.glob(f"{file.config.get('dataset_name') or ''}*/*/*"))


def _dataset_cache() -> Path:
    if set_to := os.environ.get("HF_DATASETS_CACHE"):
        return Path(set_to).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "datasets"


def _template_problems(request: QualityRequest, folder: Path | None) -> Iterator[Problem]:
    if folder is None or not folder.is_dir():
        return
    if not any(True for pattern in _TOKENIZER_FILES for _ in folder.glob(pattern)):
        yield Problem(
            what=f"quality: the model folder {folder} has no tokenizer",
            fix="put the model's tokenizer.json (or tokenizer.model, vocab.json) beside its weights",
        )
        return
    try:
        without = request.apply_chat_template and not has_chat_template(folder)
    except CheckpointError as error:
        yield Problem(what=str(error), fix="fetch the file again")
        return
    if without:
        yield Problem(
            what=f"quality.apply_chat_template: the tokenizer in {folder} has no chat template",
            fix="set it to false for a base model, or add chat_template.jinja to the model's folder",
        )


def has_chat_template(folder: Path) -> bool:
    """Whether a tokenizer folder holds a chat template, from its files alone. Raises CheckpointError."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))
