"""The first documents of a task's local data, asked as lm-eval would ask them, before anything is loaded.

A template that names a field which isn't there, or a right answer that is none of the choices, shows in the first
documents; lm-eval would tell only after the model was made and timed, or not at all. What can't be known without it
(data of the hub, documents that a function makes) is left to it.

    for problem in document_faults(leaves(request)["quiz"]):
        print(problem.what, "→", problem.fix)
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.results import Problem
from pipeline.schema_faults import nearest
from pipeline.task_answers import is_answer, is_nothing
from pipeline.task_yaml import FunctionName
from pipeline.tasks import TaskFile, data_files, files_of

LOOKED_AT = 3
_TEMPLATE_SIGNS = ("{{", "{%", "{#")
_WHOLE_FILE_BYTES = 64 << 20
"""JSON that isn't lines is read as a whole up to here."""


class DocumentError(Exception):
    """A document can't be asked; the message says why."""


@dataclass(frozen=True)
class Asked:
    """One document as the task asks it; None for what only a function knows."""

    text: Any
    target: Any
    choices: Any


def document_faults(file: TaskFile) -> Iterator[Problem]:
    """The first thing that is wrong with a task's data or its first documents."""
    config = file.config
    if config.get("process_docs") is not None or config.get("custom_dataset") is not None:
        return
    if "class" in config or config.get("use_prompt") is not None:
        return
    try:
        documents = first_documents(file)
        if documents is None:
            return
        for number, document in enumerate(documents):
            try:
                _refuse_unaskable(config, document)
            except DocumentError as error:
                raise DocumentError(f"document {number}: {error}") from None
    except DocumentError as error:
        yield Problem(what=f"task {file.name}: {error}", fix=f"correct {file.path}, or the data")


def first_documents(file: TaskFile) -> list[dict[str, Any]] | None:
    """Up to `LOOKED_AT` documents of the split that is judged; None where they can't be known here.

    Raises DocumentError for a file without documents, or one that can't be read.
    """
    config = file.config
    kwargs = config.get("dataset_kwargs") or {}
    split = config.get("test_split") or config.get("validation_split")
    listed = kwargs.get("data_files")
    if not isinstance(listed, Mapping) or set(kwargs) - {"data_files", "cache_dir", "data_dir"}:
        return None
    only = {**kwargs, "data_files": {split: listed.get(split) or []}}
    names = data_files(
        TaskFile(file.name, file.path, file.official, {**config, "dataset_kwargs": only}, file.read)
    )
    for path in (path for name in names or () for path in (files_of(name) if "://" not in name else ())):
        found = _rows(path)
        if found is None:
            return None
        if not found:
            raise DocumentError(f"{path} holds no document")
        return found
    return None


def _rows(path: Path) -> list[dict[str, Any]] | None:
    try:
        if path.suffix in (".json", ".jsonl"):
            return _json_rows(path)
        if path.suffix == ".arrow":
            from pyarrow import ipc, memory_map

            with memory_map(str(path)) as source:
                batches = ipc.open_stream(source)
                return next(
                    (batch.slice(0, LOOKED_AT).to_pylist() for batch in batches if batch.num_rows), []
                )
        if path.suffix == ".parquet":
            from pyarrow import parquet

            batches = parquet.ParquetFile(path).iter_batches(batch_size=LOOKED_AT)
            return next((batch.to_pylist() for batch in batches if batch.num_rows), [])
    except ImportError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # Arrow's errors are ValueErrors
        raise DocumentError(f"{path} can't be read: {' '.join(str(error).split())[:200]}") from None
    return None


def _json_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        first = [line for line in itertools.islice(lines, LOOKED_AT) if line.strip()]
    if path.stat().st_size <= _WHOLE_FILE_BYTES and first and first[0].lstrip().startswith("["):
        rows = json.loads(path.read_text("utf-8"))[:LOOKED_AT]
    else:
        rows = [json.loads(line) for line in first]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("documents are JSON objects, one a line or in one list")
    return list(rows)


# --- one document ------------------------------------------------------------------------------------------


def _refuse_unaskable(config: Mapping[str, Any], document: Mapping[str, Any]) -> None:
    kind = config.get("output_type", "generate_until")
    asked = Asked(
        text=_value(config, "doc_to_text", document),
        target=_value(config, "doc_to_target", document),
        choices=_choices(config, document),
    )
    needed = kind == "generate_until" and not _blank_is_filled(config)
    if isinstance(asked.text, str) and (needed or asked.text):  # "" is a task of choices that has no prompt
        _refuse_blank("doc_to_text", asked.text)
    if kind == "loglikelihood_rolling" and isinstance(asked.target, str):
        _refuse_blank("doc_to_target", asked.target)
    if config.get("process_results") is not None or kind == "loglikelihood_rolling":
        return
    if kind == "multiple_choice":
        _refuse_no_choice(asked)
    elif asked.target is not None and is_nothing(asked.target, document):
        raise DocumentError(f"doc_to_target gives {asked.target!r}, so that no answer is right")


def _blank_is_filled(config: Mapping[str, Any]) -> bool:
    return bool(config.get("description") or config.get("num_fewshot") or config.get("fewshot_config"))


def _refuse_blank(key: str, text: str) -> None:
    if not text.strip():
        raise DocumentError(f"{key} gives {text!r}, so that nothing is asked")


def _refuse_no_choice(asked: Asked) -> None:
    choices = asked.choices
    if choices is None:
        return
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(one, str) and one for one in choices)
    ):
        raise DocumentError(f"doc_to_choice gives {choices!r}, not a list of answers")
    right = (
        asked.text if isinstance(asked.text, int) else asked.target
    )  # an index as text: each choice has a prompt
    if right is not None and not is_answer(right, choices):
        raise DocumentError(f"doc_to_target gives {right!r}, which is none of its {len(choices)} choices")


def _choices(config: Mapping[str, Any], document: Mapping[str, Any]) -> Any:
    wanted = config.get("doc_to_choice")
    if isinstance(wanted, Mapping):
        return list(wanted.values())
    if not isinstance(wanted, str) or isinstance(wanted, FunctionName):
        return wanted if isinstance(wanted, list) else None
    if wanted in document:
        return document[wanted]
    text = _rendered("doc_to_choice", wanted, document)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise DocumentError(f"doc_to_choice gives {text[:80]!r}, not a list of answers") from None


def _value(config: Mapping[str, Any], key: str, document: Mapping[str, Any]) -> Any:
    """A field, or a rendered template, as lm-eval (0.4.13, `ConfigurableTask`) takes it; None for a function's."""
    wanted = config.get(key)
    if not isinstance(wanted, str) or isinstance(wanted, FunctionName):
        return None if isinstance(wanted, str) else wanted
    if wanted in document:
        return document[wanted]
    if key == "doc_to_text" or config.get("process_results") is None:
        refuse_literal_field(key, wanted, document)
    text = _rendered(key, wanted, document)
    if text.isdigit() and config.get("doc_to_choice") is not None:
        return int(text)
    if key == "doc_to_target" and len(text) > 1 and text[0] == "[" and text[-1] == "]":
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
    return text


def refuse_literal_field(key: str, wanted: str, fields: Mapping[str, Any] | list[str]) -> None:
    """DocumentError for a plain name that is no field: lm-eval would take the word itself for every document."""
    if re.fullmatch(r"[A-Za-z_]\w*", wanted) and wanted not in fields:
        raise DocumentError(
            f"{key}: {wanted} is no field of the documents{nearest(wanted, list(fields))}; lm-eval would take the "
            "word itself for every document"
        )


def _rendered(key: str, template: str, document: Mapping[str, Any]) -> str:
    if not any(sign in template for sign in _TEMPLATE_SIGNS):
        return template
    from jinja2.exceptions import UndefinedError

    try:
        return str(_compiled(template).render(**document))
    except UndefinedError as error:
        raise DocumentError(f"{key}: {error}; its fields are {', '.join(document)}") from None
    except Exception as error:  # noqa: BLE001  (a template may do anything that Python does)
        raise DocumentError(f"{key} can't be rendered: {type(error).__name__}: {error}") from None


@cache
def _compiled(template: str) -> Any:
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    # The settings and the filter of lm-eval's own environment (0.4.13, `utils.env`).
    environment = SandboxedEnvironment(
        loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["regex_replace"] = _regex_replace
    return environment.from_string(template)


def _regex_replace(text: str, pattern: str, into: str, count: int = 0) -> str:
    return re.sub(pattern, into, text, count=count)
