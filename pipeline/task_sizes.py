"""The recipe's tasks as a request, and how many documents each has, from its data files alone.

sizes = task_sizes(quality_request(loaded, recipe))
sizes.documents["piqa_local"], sizes.groups["mmlu_local"]
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import PrerequisiteError
from pipeline.plan_values import TaskSizes
from pipeline.recipe import ExpandedRecipe, LoadedRecipe
from pipeline.tasks import QualityRequest, TaskFile, data_files, find_tasks, group_tasks, leaves

DEFAULT_DATA_FOLDER = ".assets/evals"


def quality_request(loaded: LoadedRecipe, recipe: ExpandedRecipe) -> QualityRequest | None:
    """The recipe's quality section with absolute folders."""
    spec = recipe.quality
    if spec is None:
        return None
    data = loaded.resolve(spec.data_folder) if spec.data_folder else Path(DEFAULT_DATA_FOLDER).resolve()
    return QualityRequest(
        tasks=spec.tasks,
        task_folders=tuple(str(loaded.resolve(folder)) for folder in spec.task_folders),
        data_folder=str(data),
        limit=spec.limit,
        limits=spec.limits,
        seed=spec.seed,
        batch_size=spec.batch_size,
        num_fewshot=spec.num_fewshot,
        apply_chat_template=spec.apply_chat_template,
        max_length_tokens=spec.max_length_tokens,
        confirm_unsafe_code=spec.confirm_unsafe_code,
        scoring=spec.scoring,
    )


def task_sizes(request: QualityRequest) -> TaskSizes:
    """Documents that are judged of each task, `limit` applied; what can't be known here is left out.

    Where a task's files aren't here, or its documents are made from others, the limit is taken, if there is one.
    """
    try:
        files, groups = leaves(request), group_tasks(request)
        named = tuple(find_tasks(request))
    except PrerequisiteError:
        return TaskSizes(tasks=request.tasks)
    found = {name: _judged(name, file, request) for name, file in files.items()}
    rolling = (
        name for name, file in files.items() if file.config.get("output_type") == "loglikelihood_rolling"
    )
    return TaskSizes(
        tasks=named,
        documents={name: count for name, count in found.items() if count is not None},
        groups=groups,
        rolling=tuple(rolling),
    )


def _judged(name: str, file: TaskFile, request: QualityRequest) -> int | None:
    limit, held = request.limit_of(name), _held(file)
    known = [count for count in (limit, held) if count is not None]
    return min(known, default=None)


def _held(file: TaskFile) -> int | None:
    """Rows of the split that is judged: as lm-eval takes it, the test split, or else the validation split."""
    split = file.config.get("test_split") or file.config.get("validation_split")
    listed = (file.config.get("dataset_kwargs") or {}).get("data_files")
    if (
        file.config.get("process_docs") is not None
        or data_files(file) is None
        or not isinstance(listed, dict)
    ):
        return None
    paths = listed.get(split) or ()
    counts = [_rows(Path(path)) for path in ([paths] if isinstance(paths, str) else paths)]
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _rows(path: Path) -> int | None:
    """Rows of an Arrow, Parquet or JSON-lines file; None for other kinds and for what can't be read."""
    try:
        if path.suffix == ".arrow":
            from pyarrow import ipc, memory_map

            with memory_map(str(path)) as source:
                return sum(int(batch.num_rows) for batch in ipc.open_stream(source))
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return int(parquet.read_metadata(path).num_rows)
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
    except (OSError, ValueError, ImportError):
        return None
    return None
