"""One task file's YAML, as plain data: what can't be read is told with the file and what to mend.

>>> load_yaml("task: quiz", Path("quiz.yaml")).config
{'task': 'quiz'}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import PrerequisiteError
from pipeline.results import Problem
from pipeline.yaml_document import shortened

LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What lm-eval (0.4.13, `normalize_gen_kwargs`) calls the length of an answer, the first that is there winning."""


class TaskFileError(PrerequisiteError):
    """A task file is missing, ambiguous or can't be read."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.problem = Problem(what=what, fix=fix)


class FunctionName(str):
    """`module.function` of a `!function` tag; `module` is the Python file beside the task file, there or not."""

    __slots__ = ("module",)
    module: Path


@dataclass(frozen=True)
class TaskYaml:
    """A file's own keys, the files it includes, and the Python files beside it that it names."""

    config: dict[str, Any]
    includes: tuple[str, ...]
    modules: tuple[Path, ...]


def read_text(path: Path) -> str:
    """The file's text; TaskFileError where there is none."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise TaskFileError(f"{path}: {error.strerror or error}", "correct the include") from error
    except UnicodeDecodeError as error:
        raise TaskFileError(
            f"{path} isn't UTF-8 text (byte {error.start + 1}: {error.reason})", "save it as UTF-8"
        ) from None


def load_yaml(text: str, path: Path) -> TaskYaml:
    """What the text of `path` says; TaskFileError for what isn't a task file."""
    modules: dict[Path, None] = {}

    class Loader(yaml.SafeLoader):
        """SafeLoader that keeps `!function module.name` as text and remembers the module's file."""

    def function(loader: yaml.SafeLoader, node: yaml.Node) -> FunctionName:
        if not isinstance(node, yaml.ScalarNode):
            raise TaskFileError(f"{path}: !function takes text (module.name)", "correct it")
        name = FunctionName(loader.construct_scalar(node))
        name.module = path.parent / f"{name.rpartition('.')[0].replace('.', '/')}.py"
        if name.module.is_file():
            modules[name.module] = None
        return name

    Loader.add_constructor("!function", function)
    try:
        config = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TaskFileError(f"{path} isn't valid YAML: {error}", "correct it") from error
    if not isinstance(config, dict):
        raise TaskFileError(f"{path} holds no mapping", "see evals/README.md")
    return TaskYaml(
        config={key: value for key, value in config.items() if key != "include"},
        includes=_includes(config.get("include"), path),
        modules=tuple(modules),
    )


# --- shapes ------------------------------------------------------------------------------------------------


def refuse_wrong_shapes(config: Mapping[str, Any], path: Path) -> None:
    """TaskFileError for the first key whose value has a shape that neither lm-eval nor we can read.

    Absent and null keys have lm-eval's defaults, functions are left to it.
    """
    for key, (fits, wanted) in _SHAPES.items():
        value = config.get(key)
        if value is not None and not isinstance(value, FunctionName) and not fits(value):
            raise TaskFileError(f"{path}: {key} is {shortened(repr(value))}, not {wanted}", f"give {wanted}")
    for key, (fits, wanted) in _GENERATION_SHAPES.items():
        value = (config.get("generation_kwargs") or {}).get(key)
        if value is not None and not fits(value):
            raise TaskFileError(
                f"{path}: generation_kwargs.{key} is {shortened(repr(value))}, not {wanted}", f"give {wanted}"
            )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_data(value: object) -> bool:
    """`data_files` as `datasets` takes it: a path, some paths, or either for each split."""
    if not isinstance(value, Mapping):
        return False
    listed = value.get("data_files")
    splits = list(listed.values()) if isinstance(listed, Mapping) else [listed]
    return listed is None or all(
        isinstance(split, str) or (isinstance(split, list) and all(isinstance(one, str) for one in split))
        for split in splits
    )


def _is_list_of_metrics(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, Mapping) and isinstance(one.get("metric"), str) and one["metric"] for one in value
    )


def _is_list_of_filters(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, Mapping)
        and isinstance(one.get("name"), str)
        and isinstance(one.get("filter"), list)
        and all(isinstance(step, Mapping) and isinstance(step.get("function"), str) for step in one["filter"])
        for one in value
    )


def _is_choices(value: object) -> bool:
    return isinstance(value, str | Mapping) or (isinstance(value, list) and bool(value))


Shape = tuple[Callable[[object], bool], str]
_TEXT: Shape = (_is_text, "text")
_SHAPES: dict[str, Shape] = {
    "dataset_path": _TEXT,
    "dataset_kwargs": (_is_data, "a mapping whose data_files are paths, or paths by split"),
    **{f"{name}_split": _TEXT for name in ("training", "validation", "test", "fewshot")},
    "num_fewshot": (lambda value: _is_count(value, least=0), "a whole number from 0"),
    "fewshot_config": (_is_mapping, "a mapping"),
    "generation_kwargs": (_is_mapping, 'a mapping, such as {until: ["\\n"], max_gen_toks: 256}'),
    "metric_list": (_is_list_of_metrics, "a list of mappings with the key metric"),
    "filter_list": (_is_list_of_filters, "a list of mappings with name and filter: [{function: ...}]"),
    "doc_to_choice": (_is_choices, "text, or a list of at least one choice"),
    "doc_to_text": (lambda value: isinstance(value, str | int), "text"),
    "doc_to_target": (lambda value: isinstance(value, str | int | list), "text, an index or a list"),
}
_LENGTH: Shape = (lambda value: _is_count(value, least=1), "a whole number from 1")
_GENERATION_SHAPES: dict[str, Shape] = {
    "until": (
        lambda value: isinstance(value, str) or (isinstance(value, list) and all(map(_is_text, value))),
        "text or a list of texts",
    ),
    **dict.fromkeys(LENGTH_NAMES, _LENGTH),
}


def _includes(listed: object, path: Path) -> tuple[str, ...]:
    names = [] if listed is None else listed if isinstance(listed, list) else [listed]
    for name in names:
        if not isinstance(name, str) or not name:
            raise TaskFileError(
                f"{path}: include is {name!r}, not a path", "name another task file (text), or a list of them"
            )
    return tuple(names)
