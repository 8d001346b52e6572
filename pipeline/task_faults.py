"""What a task file of the recipe's own says that lm-eval can't run, or would run the wrong way round.

Told from the file alone, in milliseconds; lm-eval is not imported. The harness's own task files are left to it.

    for problem in file_faults(leaves(request)["quiz"]):
        print(problem.what, "→", problem.fix)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import StageError
from pipeline.results import Problem
from pipeline.schema_faults import nearest
from pipeline.task_scores import direction
from pipeline.task_yaml import LENGTH_NAMES, FunctionName
from pipeline.tasks import TaskFile, harness_tasks

OUTPUT_TYPES = ("loglikelihood", "loglikelihood_rolling", "multiple_choice", "generate_until")
DEFAULT_METRICS = {
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}
"""Of a task without a metric_list (lm-eval 0.4.13, `DEFAULT_METRIC_REGISTRY`)."""
_SET_BY_THE_HARNESS = {"max_length", "pad_token_id", "use_cache"}
"""What it passes to `generate` by itself (lm-eval 0.4.13, `HFLM._model_generate`)."""
TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice", "description", "gen_prefix")


def file_faults(file: TaskFile) -> Iterator[Problem]:
    """Each with the file and the key to mend."""
    config = file.config
    if file.official or "class" in config:
        return
    found = [
        *_output_type_faults(config),
        *_missing_faults(config),
        *_metric_faults(file),
        *_filter_faults(config),
        *_split_faults(config),
        *_template_faults(config),
        *_generation_faults(config),
        *_function_faults(config),
    ]
    for key, what, fix in found:
        yield Problem(what=f"task {file.name}: {key} in {file.path}: {what}", fix=fix)


Fault = tuple[str, str, str]
"""Key, what is wrong, how to mend it."""


def metrics_of_file(file: TaskFile) -> tuple[str, ...] | None:
    """Names of the metrics that a task gives, a filter's name behind the dot; None where only its own code knows."""
    config = file.config
    listed, kind = config.get("metric_list"), str(config.get("output_type"))
    names = [str(one.get("metric")) for one in listed] if listed else list(DEFAULT_METRICS.get(kind, ()))
    if "class" in config or not names or config.get("process_results") is not None:
        return None
    filters = config.get("filter_list") or ()
    if len(filters) > 1:
        names = [f"{name}.{one['name']}" for name in names for one in filters]
    return (*names, "token_perplexity") if kind == "loglikelihood_rolling" else tuple(names)


# --- keys --------------------------------------------------------------------------------------------------


def _output_type_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    kind = config.get("output_type", "generate_until")  # as the harness has it
    if kind not in OUTPUT_TYPES:
        yield "output_type", f"{kind!r} is unknown{nearest(str(kind), OUTPUT_TYPES)}", "name one of them"


def _missing_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    if config.get("use_prompt") is not None:
        return
    kind = config.get("output_type")
    needed = ["doc_to_text", "doc_to_target", *(["doc_to_choice"] if kind == "multiple_choice" else [])]
    for key in needed:
        if config.get(key) is None:
            yield key, f"is missing; a task of output_type {kind} needs it", f"add {key}"
    if not config.get("test_split") and not config.get("validation_split"):
        yield (
            "test_split",
            "is missing, and validation_split, too, so that no documents are judged",
            "add one",
        )


def _metric_faults(file: TaskFile) -> Iterator[Fault]:
    listed = file.config.get("metric_list")
    if listed is None:
        return
    if not listed:
        yield "metric_list", "is empty, so that nothing is scored", "add a metric, or leave the key out"
    known = registered("metric")
    own = file.config.get("process_results") is not None
    for entry in listed:
        name = entry["metric"]
        if isinstance(name, FunctionName):
            continue
        if not own and name not in known and entry.get("hf_evaluate") is not True:
            yield "metric_list", f"metric {name!r} is unknown{nearest(name, known)}", "name one of them"
        if (higher := entry.get("higher_is_better")) is not None:
            try:
                direction(file.name, name, higher)
            except StageError as error:
                yield "metric_list", str(error), "correct higher_is_better"


def _filter_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    known = registered("filter")
    for ensemble in config.get("filter_list") or ():
        for step in ensemble["filter"]:
            name = step["function"]
            if not isinstance(name, FunctionName) and name not in known:
                yield "filter_list", f"filter {name!r} is unknown{nearest(name, known)}", "name one of them"
            if isinstance(pattern := step.get("regex_pattern"), str):
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield "filter_list", f"regex_pattern {pattern!r}: {error}", "correct it"


def _split_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """A split that is named beside data files that are given by split, and isn't one of them."""
    files = (config.get("dataset_kwargs") or {}).get("data_files")
    if not isinstance(files, Mapping) or config.get("custom_dataset") is not None:
        return
    for key in ("test_split", "validation_split", "training_split", "fewshot_split"):
        if (name := config.get(key)) and name not in files:
            yield key, f"{name!r} is not among data_files{nearest(name, list(files))}", "name one of them"


def _template_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    from jinja2 import Environment, TemplateSyntaxError

    for key in TEMPLATES:
        text = config.get(key)
        if isinstance(text, str) and not isinstance(text, FunctionName):
            try:
                Environment(autoescape=False).parse(text)
            except TemplateSyntaxError as error:
                yield key, f"the template can't be read: {error.message}", "correct it"


def _generation_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Settings that `generate` would refuse with the first answer, after every task before it."""
    known = {"until", *LENGTH_NAMES, *_generation_names()} - _SET_BY_THE_HARNESS
    for name in config.get("generation_kwargs") or ():
        if name in _SET_BY_THE_HARNESS:
            yield "generation_kwargs", f"{name} is set by lm-eval", "leave it out"
        elif name not in known:
            yield (
                "generation_kwargs",
                f"{name!r} is unknown{nearest(str(name), sorted(known))}",
                "name one of them",
            )


# --- functions ---------------------------------------------------------------------------------------------


def _function_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    for key, name in _functions(config, ""):
        module, _, function = name.rpartition(".")
        if not name.module.is_file():
            if not _installed(module):
                yield (
                    key,
                    f"!function {name}: there is no {name.module}",
                    "put the file beside the task's, or correct the name",
                )
            continue
        try:
            defined = _defined(name.module)
        except (SyntaxError, ValueError) as error:
            yield key, f"{name.module} can't be read: {error}", "correct it"
            continue
        if defined is not None and function not in defined:
            told = f"!function {name}: {name.module} has no {function}{nearest(function, sorted(defined))}"
            yield key, told, "correct the name"


def _functions(value: Any, key: str) -> Iterator[tuple[str, FunctionName]]:
    if isinstance(value, FunctionName):
        yield key, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _functions(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for one in value:
            yield from _functions(one, key)


def _installed(module: str) -> bool:
    try:
        return bool(module) and find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _defined(path: Path) -> set[str] | None:
    """Names at a module's top level; None where a star import hides some."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((one.asname or one.name).partition(".")[0] for one in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if "*" in names else names


@cache
def _generation_names() -> frozenset[str]:
    """Fields of transformers' `GenerationConfig`, from the text of its file: to import it takes seconds."""
    spec = find_spec("transformers")
    assert spec is not None, "lm-eval needs it"
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "generation" / "configuration_utils.py").read_text("utf-8")
    return frozenset(re.findall(r"self\.(\w+) = kwargs\.pop\(", text))


@cache
def registered(what: str) -> tuple[str, ...]:
    """Names of lm-eval's metrics or filters, from the text of its own files."""
    package = harness_tasks().parent
    if what == "metric":
        text = (package / "api" / "metrics.py").read_text("utf-8")
        return tuple(sorted(re.findall(r"@register_metric\(\s*metric=\"([^\"]+)\"", text)))
    texts = (path.read_text("utf-8") for path in sorted((package / "filters").glob("*.py")))
    return tuple(
        sorted(name for text in texts for name in re.findall(r"@register_filter\(\"([^\"]+)\"", text))
    )
