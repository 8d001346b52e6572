"""Answers by task, and what the null run shows of noise: tables for the report.

print(quality_markdown(report))
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.comparison import UnmeasuredError
from pipeline.null_run import TaskNoise, null_noise
from pipeline.power_tables import groups_markdown, power_markdown
from pipeline.results import Report, TaskResult, VariantReport
from pipeline.text_table import figure_cell, markdown_table

_TASKS = (
    *("variant", "task", "metric", "score", "± stderr", "documents", "of"),
    *("tokens computed, checks included", "by lm-eval alone"),
    "note",
)
_NOISE = (
    *("task", "metric", "documents", "score", "null run", "difference", "noise floor", "right → wrong"),
    *("wrong → right", "largest nats"),
)


def quality_markdown(report: Report) -> str:
    """Tasks, then the null run; "" when nothing was evaluated."""
    rows = [_task_row(variant, task) for variant, task in _tasks(report)]
    if not rows:
        return ""
    parts = [
        markdown_table(_TASKS, rows, text_columns=("task", "metric", "note")),
        _saved(report),
        groups_markdown(report),
        power_markdown(report),
        _null_run(report),
    ]
    return "\n\n".join(part for part in parts if part)


def documents_cell(task: TaskResult) -> str:
    """` (50 of 400)` for a task that was stopped early, else nothing."""
    return f" ({task.documents} of {task.available_documents})" if _stopped(task) else ""


def _tasks(report: Report) -> Iterator[tuple[VariantReport, TaskResult]]:
    for variant in report.variants:
        if variant.quality:
            yield from ((variant, task) for task in variant.quality.tasks.values())


def _stopped(task: TaskResult) -> bool:
    return task.available_documents is not None and task.documents < task.available_documents


def _task_row(variant: VariantReport, task: TaskResult) -> tuple[str, ...]:
    metric = task.metrics.get(task.primary_metric)
    return (
        variant.name,
        task.task,
        task.primary_metric,
        figure_cell(metric.score if metric else None, ".4g"),
        figure_cell(metric.stderr if metric else None, ".3f"),
        str(task.documents),
        str(task.available_documents or task.documents),
        figure_cell(task.computed_tokens, ",d"),
        figure_cell(task.scored_tokens, ",d"),
        "; ".join(_remarks(task)),
    )


def _remarks(task: TaskResult) -> Iterator[str]:
    if _stopped(task):
        yield f"stopped after {task.documents} of {task.available_documents} documents"
    if task.truncated_prompts:
        yield f"{task.truncated_prompts} prompts cut"
    if task.repeated_documents:
        yield f"{task.repeated_documents} documents repeat others, judged once"
    if task.void is not None:
        yield f"void: {task.void}"


def _saved(report: Report) -> str:
    """Over all sequential tasks, those included that needed every document."""
    looked = [task for _, task in _tasks(report) if task.available_documents is not None]
    if not looked:
        return ""
    available = sum(task.available_documents or 0 for task in looked)
    answered = sum(task.documents for task in looked)
    return (
        f"Evaluated sequentially: {answered:,} of {available:,} documents were answered, "
        f"{available - answered:,} saved ({(available - answered) / available:.0%}). A score of some documents is "
        "compared with the baseline's on the same ones."
    )


def _null_run(report: Report) -> str:
    baseline = report.variant(report.baseline)
    if baseline is None or baseline.quality is None or baseline.null_quality is None:
        return ""
    head = (
        f"### Null run\n\n{baseline.name} again at batch size {baseline.null_quality.batch_size} instead of "
        f"{baseline.quality.batch_size}: what differs is noise. A drop no larger than the noise floor is no "
        "regression, and a limit no larger can't be shown to be kept."
    )
    try:
        noise = null_noise(baseline)
    except UnmeasuredError as reason:
        return f"{head}\n\nNot comparable: {reason}."
    return f"{head}\n\n{markdown_table(_NOISE, [_noise_row(one) for one in noise], text_columns=('task', 'metric'))}"


def _noise_row(noise: TaskNoise) -> tuple[str, ...]:
    percent = noise.perplexity_percent
    if percent is None:
        shown = [f"{noise.score:.4f}", f"{noise.null_score:.4f}", f"{100 * noise.difference:+.2f} points"]
        shown.append(f"{100 * noise.floor:.2f} points")
    else:
        shown = [f"{noise.score:.6g}", f"{noise.null_score:.6g}", f"{percent:+.2g} %"]
        shown.append(f"{noise.floor_percent:.2g} %")
    return (
        *(noise.task, noise.metric, str(noise.documents), *shown),
        *(
            figure_cell(noise.lost, "d"),
            figure_cell(noise.gained, "d"),
            figure_cell(noise.largest_nats, ".2g"),
        ),
    )
