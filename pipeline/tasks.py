"""lm-eval task files, read as plain text: found, rendered, checked and hashed without importing lm-eval.

A preflight must answer in a second, so this module reads the YAML of the requested tasks itself (with their
`include:` chain), and leaves everything that needs the harness or a model to `quality`. Task files of a
recipe may hold two placeholders: `${LM_EVAL_TASKS}` (the harness's own task folder, for `include:`) and
`${EVAL_DATA}` (where the data lie).

>>> render('include: "${LM_EVAL_TASKS}/sciq/sciq.yaml"', {"LM_EVAL_TASKS": "/x"})
'include: "/x/sciq/sciq.yaml"'
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pipeline.store import file_sha256
from pipeline.task_yaml import TaskFileError, load_yaml, read_text, refuse_wrong_shapes
from pipeline.values import Value, digest

_PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME_LINE = re.compile(r"^[\"']?(task|group)[\"']?:[ \t]*[\"']?([^\s\"'#\[{]+)", re.MULTILINE)
_INCLUDE_LINE = re.compile(r"^[\"']?include[\"']?:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)
_TAG_BLOCK = re.compile(r"^[\"']?tag[\"']?:[ \t]*(\S.*|(?:\n[ \t]*-[^\n]*)+)", re.MULTILINE)
_SKIPPED_FOLDERS = {"__pycache__", ".ipynb_checkpoints"}
# Keys of a group that say nothing of its members (lm-eval 0.4.13, `GroupConfig`).
_GROUP_KEYS = {"group", "group_alias", "task", "aggregate_metric_list", "version", "metadata", "tag"}
INLINE_SEPARATOR = "::"
"""Stands between a group and a task that only the group's file defines, as in the harness."""
# Builders of the `datasets` package that read files instead of a repository of the hub.
_FILE_BUILDERS = {"arrow", "csv", "json", "pandas", "parquet", "text", "xml"}

Positive = Annotated[int, Field(ge=1)]
Scoring = Literal["shared_prefixes", "lm_eval"]


class QualityRequest(Value):
    """What the quality stage measures, with every folder absolute.

    `data_folder` is what `${EVAL_DATA}` becomes; `limit` is the first N documents of each task,
    `limits` the same for tasks by name, or for every task that a group's file defines by the group's name;
    `max_length_tokens` is the longest sequence (prompt and answer), by default the model's own limit;
    `scoring` is how log-likelihoods are computed: beginnings that requests share once, or as lm-eval does.
    """

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    task_folders: tuple[str, ...]
    data_folder: str
    limit: Positive | None
    limits: dict[str, Positive] = Field(default_factory=dict)
    seed: int
    batch_size: Positive
    num_fewshot: Annotated[int, Field(ge=0)] | None
    apply_chat_template: bool
    max_length_tokens: Positive | None
    confirm_unsafe_code: bool
    scoring: Scoring = "shared_prefixes"

    @field_validator("tasks")
    @classmethod
    def _each_once(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(tasks)) != len(tasks):
            raise ValueError("a task stands twice")
        return tasks

    def limit_of(self, task: str) -> int | None:
        """How many documents of a task are judged, None for all."""
        group = task.partition(INLINE_SEPARATOR)[0]
        return self.limits.get(task, self.limits.get(group, self.limit))


@dataclass(frozen=True)
class TaskFile:
    """One task (or group) with its merged YAML; `read` lists every file it was made from, itself first."""

    name: str
    path: Path
    official: bool
    config: Mapping[str, Any]
    read: tuple[Path, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """Names a group lists; empty for a plain task."""
        names = [
            item.get("task") or item.get("group") if isinstance(item, Mapping) else item
            for item in self._listed()
        ]
        return tuple(name for name in names if isinstance(name, str))

    def inline(self, name: str) -> TaskFile | None:
        """The member `name` where the group itself defines it, under the harness's name for it.

        What the group sets beside its own keys holds for every such member; the member's keys win.
        """
        if self.official:  # the harness's own groups name tasks that have files
            return None
        for item in self._listed():
            config = {**self._shared(), **item} if isinstance(item, Mapping) else {}
            if config.get("task") == name and "dataset_path" in config:
                refuse_wrong_shapes(config, self.path)
                return replace(self, name=f"{self.name}{INLINE_SEPARATOR}{name}", config=config)
        return None

    def _listed(self) -> list[Any]:
        listed = self.config.get("task")
        return listed if isinstance(listed, list) else []

    def _shared(self) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key not in _GROUP_KEYS}


@dataclass
class _Reading:
    placeholders: Mapping[str, str]
    own_folders: tuple[Path, ...]
    files: list[Path] = field(default_factory=list)


def harness_tasks() -> Path:
    """The folder of lm-eval's own task files; lm-eval is found, not imported."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise TaskFileError("lm-eval isn't installed", "install with: python -m pip install 'lm-eval[hf]'")
    return Path(spec.origin).parent / "tasks"


def render(text: str, placeholders: Mapping[str, str], *, path: str = "task file") -> str:
    """`text` with its placeholders filled in; raises TaskFileError for one that isn't known."""

    def fill(found: re.Match[str]) -> str:
        if found[1] not in placeholders:
            raise TaskFileError(
                f"{path}: unknown placeholder ${{{found[1]}}}",
                f"known are: {', '.join(f'${{{name}}}' for name in sorted(placeholders))}",
            )
        # Escaped as for the inside of a double-quoted YAML scalar.
        return json.dumps(placeholders[found[1]], ensure_ascii=False)[1:-1]

    return _PLACEHOLDER.sub(fill, text)


def find_tasks(request: QualityRequest) -> dict[str, TaskFile]:
    """Every requested name's file; a tag of lm-eval's stands for the tasks that carry it.

    Raises TaskFileError naming the first one that can't be found or read.
    """
    own = _own_names(request)
    return {file.name: file for name in request.tasks for file in _named(name, request, own)}


def leaves(request: QualityRequest) -> dict[str, TaskFile]:
    """Every plain task that the request runs, groups opened."""
    return {name: file for name, file in _with_members(request).items() if not file.members}


def group_tasks(request: QualityRequest) -> dict[str, tuple[str, ...]]:
    """Each requested group's plain tasks under the names of their results, groups inside it opened."""
    groups = {name: file for name, file in find_tasks(request).items() if file.members}
    return {name: tuple(leaves(request.model_copy(update={"tasks": (name,)}))) for name in groups}


def text_digest(file: TaskFile) -> str:
    """Digest of a task's YAML, its includes and the Python files they name, wherever they lie."""
    return digest([hashlib.sha256(path.read_bytes()).hexdigest() for path in file.read])


def inputs_digest(request: QualityRequest) -> str:
    """Digest of all that a score depends on beside the model and the request.

    Task files with their includes and functions, the bytes of local data (a hub data set's name and
    revision), and lm-eval's version. Where the files lie doesn't matter. Raises TaskFileError for data on a network.
    """
    return digest(
        {
            "lm_eval": version("lm_eval"),
            "tasks": {
                name: {"text": text_digest(file), "data": _data_facts(file)}
                for name, file in leaves(request).items()
            },
        }
    )


@contextmanager
def rendered(request: QualityRequest) -> Iterator[tuple[Path, bool]]:
    """A temporary folder lm-eval can scan for the requested tasks, and whether it must scan its own, too.

    Plain official tasks stand in it as one-line includes, which spares the harness the half minute it
    takes to index its 14,000 files; official groups need that index.
    """
    files = _with_members(request)
    needs_index = any(file.official and file.members for file in files.values())
    placeholders = _placeholders(request)
    with tempfile.TemporaryDirectory(prefix="lm-eval-tasks-") as temporary:
        folder = Path(temporary)
        for path in dict.fromkeys(path for file in files.values() if not file.official for path in file.read):
            _place(path, folder, request, placeholders)
        for name, file in files.items():
            if file.official and not needs_index:
                (folder / f"{name}.yaml").write_text(f"include: {json.dumps(str(file.path))}\n", "utf-8")
        yield folder, needs_index


def data_files(file: TaskFile) -> tuple[str, ...] | None:
    """Files, folders or patterns a task reads, in the order of its splits; None for a data set of the hub."""
    kwargs, source = file.config.get("dataset_kwargs") or {}, file.config.get("dataset_path")
    if source not in _FILE_BUILDERS:
        return (source,) if isinstance(source, str) and Path(source).exists() else None
    folder = str(kwargs.get("data_dir") or "")
    if not kwargs.get("data_files"):
        return (folder,) if folder else ()
    listed = kwargs["data_files"]
    splits = listed.values() if isinstance(listed, Mapping) else [listed]
    names = (
        str(name) for split in splits for name in (split if isinstance(split, list | tuple) else [split])
    )
    return tuple(name if "://" in name else os.path.join(folder, name) for name in names)  # noqa: PTH118


def files_of(pattern: str) -> list[Path]:
    """Every file that a name, a folder or a pattern of a task stands for, in a fixed order.

    Hidden files aren't data. Raises TaskFileError for a folder behind a link, which isn't looked into.
    """
    found: list[Path] = []
    for path in sorted(map(Path, glob.glob(pattern, recursive=True))):  # noqa: PTH207  (it may be absolute)
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        shown = [one for one in inside if not _hidden(one.relative_to(path))]
        for linked in (one for one in shown if one.is_symlink() and one.is_dir()):
            raise TaskFileError(
                f"{linked} is a link to a folder, its data can't be hashed", "put the folder there"
            )
        found += [one for one in shown if one.is_file()]
    return list(dict.fromkeys(found))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in path.parts)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, remembered while its size and time of change stay the same."""
    stat = path.stat()
    return _sha256(str(path), stat.st_size, stat.st_mtime_ns)


def _with_members(request: QualityRequest) -> dict[str, TaskFile]:
    """The requested files and, below each group, its groups and tasks."""
    own = _own_names(request)
    pending = list(find_tasks(request).values())
    files: dict[str, TaskFile] = {}
    while pending:
        file = pending.pop(0)
        files[file.name] = file
        for name in file.members:
            if defined := file.inline(name) if name not in own else None:
                files[defined.name] = defined
            else:
                pending += _named(name, request, own) if name not in files else []
    return files


def _named(name: str, request: QualityRequest, own: Mapping[str, list[Path]]) -> list[TaskFile]:
    if name not in own:
        return _official(name, request, own)
    if len(own[name]) > 1:
        files = " and ".join(str(path) for path in own[name])
        raise TaskFileError(f"task {name} stands in {files}", "rename one of them")
    return [_read_task(name, own[name][0], request, official=False)]


def _placeholders(request: QualityRequest) -> dict[str, str]:
    return {"LM_EVAL_TASKS": str(harness_tasks()), "EVAL_DATA": request.data_folder}


def _yaml_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise TaskFileError(f"task folder {folder} isn't there", "correct quality.task_folders")
    return sorted(path for path in folder.rglob("*.yaml") if not _SKIPPED_FOLDERS & set(path.parts))


def _own_names(request: QualityRequest) -> dict[str, list[Path]]:
    """Task or group name → files of the request's folders that define it (by their own text)."""
    names: dict[str, list[Path]] = {}
    for folder in request.task_folders:
        for path in _yaml_files(Path(folder)):
            for name in {found[2] for found in _NAME_LINE.finditer(_plain_text(path))}:
                names.setdefault(name, []).append(path)
    return names


@cache
def _official_names(folder: Path) -> tuple[dict[str, Path], dict[str, tuple[str, ...]]]:
    """Task and group names of lm-eval → file, and its tags → task names; a scan of text, no YAML parsed."""
    names: dict[str, Path] = {}
    tags: dict[str, list[str]] = {}
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        for file in sorted(files):
            if file.endswith(".yaml"):
                path = Path(root, file)
                for kind, name in _NAME_LINE.findall(_text(path)):
                    names.setdefault(name, path)
                    for tag in _tags(path) if kind == "task" else ():
                        tags.setdefault(tag, []).append(name)
    return names, {tag: tuple(sorted(set(tasks))) for tag, tasks in tags.items()}


def _plain_text(path: Path) -> str:
    """To look for names in: a file that isn't UTF-8 matters only to the recipe that asks for its task."""
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


_text = cache(_plain_text)  # bases of lm-eval's own tasks are looked into for each task that includes them


def _tags(path: Path) -> list[str]:
    """Tags a file gives its task, its own or else those of the file it includes."""
    if own := _TAG_BLOCK.search(_text(path)):
        return re.findall(r"[^\s\-,\[\]\"'][^\s,\[\]\"']*", own[1])
    include = _INCLUDE_LINE.search(_text(path))
    return _tags(path.parent / include[1]) if include else []


def _official(name: str, request: QualityRequest, own: Mapping[str, list[Path]]) -> list[TaskFile]:
    names, tags = _official_names(harness_tasks())
    if name in names:
        return [_read_task(name, names[name], request, official=True)]
    if name in tags:
        return [_read_task(task, names[task], request, official=True) for task in tags[name]]
    near = difflib.get_close_matches(name, own, n=3) or difflib.get_close_matches(name, [*names, *tags], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "correct quality.tasks"
    where = f" (folders: {', '.join(request.task_folders)})" if request.task_folders else ""
    raise TaskFileError(f"unknown task {name!r}{where}", hint)


def _read_task(name: str, path: Path, request: QualityRequest, *, official: bool) -> TaskFile:
    reading = _Reading(_placeholders(request), tuple(Path(folder) for folder in request.task_folders))
    config = _read(path, reading)
    if not official:
        refuse_wrong_shapes(config, path)
    return TaskFile(name=name, path=path, official=official, config=config, read=tuple(reading.files))


def _read(path: Path, reading: _Reading) -> dict[str, Any]:
    """The YAML of `path` merged over its includes, as lm-eval merges them: later wins, own keys last."""
    if path in reading.files:
        raise TaskFileError(f"{path} includes itself", "break the circle")
    reading.files.append(path)
    text = read_text(path)
    if any(path.is_relative_to(folder) for folder in reading.own_folders):
        text = render(text, reading.placeholders, path=str(path))
    own = load_yaml(text, path)
    reading.files.extend(module for module in own.modules if module not in reading.files)
    merged: dict[str, Any] = {}
    for include in own.includes:
        merged |= _read(path.parent / include, reading)
    return merged | own.config


def _place(path: Path, out: Path, request: QualityRequest, placeholders: Mapping[str, str]) -> None:
    """One file a task of the request's folders was read from, at its relative place below `out`."""
    if path.is_relative_to(harness_tasks()):
        return
    for index, folder in enumerate(request.task_folders):
        if path.is_relative_to(folder):
            target = out / str(index) / path.relative_to(folder)
            break
    else:
        raise TaskFileError(f"{path} lies outside the task folders", "add its folder to quality.task_folders")
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".py":
        # lm-eval resolves the link, so a module keeps its real `__file__`.
        target.unlink(missing_ok=True)
        target.symlink_to(path)
    else:
        target.write_text(render(path.read_text("utf-8"), placeholders, path=str(path)), "utf-8")


def _data_facts(file: TaskFile) -> Any:
    """What a task's data are: digests of local files by split, a hub data set's name and revision.

    Raises TaskFileError for data that can't be hashed: their change would go unseen.
    """
    listed = data_files(file)
    if listed is not None:
        return [[sha256_of(path) for path in _hashable(file, name)] for name in listed]
    kwargs = file.config.get("dataset_kwargs") or {}
    return [file.config.get("dataset_path"), file.config.get("dataset_name"), kwargs.get("revision")]


def _hashable(file: TaskFile, name: str) -> list[Path]:
    if "://" in name:
        raise TaskFileError(
            f"task {file.name}: {name} is on a network, so that its change would go unseen",
            "use a local file",
        )
    if not (found := files_of(name)):
        raise TaskFileError(f"task {file.name}: data file {name} isn't there", f"correct it in {file.path}")
    return found


@cache
def _sha256(path: str, _size_bytes: int, _mtime_ns: int) -> str:
    return file_sha256(Path(path))
