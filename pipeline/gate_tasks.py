"""Rules of the gate that the recipe's tasks can never feed: told before anything runs.

A rule about perplexity beside tasks of right and wrong answers is `missing` for every variant, after hours. Which kind
of task, and which metrics, only the task files know, so that the recipe alone can't tell (`gate_faults`).

    for problem in rule_problems(recipe.gate, request, sequential=False):
        print(problem.what, "→", problem.fix)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.results import Problem
from pipeline.rules.base import Rule
from pipeline.schema_faults import nearest
from pipeline.task_faults import metrics_of_file
from pipeline.task_yaml import TaskFileError
from pipeline.tasks import QualityRequest, TaskFile, find_tasks, group_tasks, leaves


def rule_problems(gate: Sequence[Rule], request: QualityRequest, *, sequential: bool) -> Iterator[Problem]:
    """By rule: tasks that aren't the recipe's, tasks of another kind, metrics that no task gives."""
    try:
        files, groups = leaves(request), group_tasks(request)
        known = tuple(dict.fromkeys((*find_tasks(request), *files)))
    except TaskFileError:
        return  # told already
    for index, rule in enumerate(gate):
        strangers = [task for task in getattr(rule, "tasks", None) or () if task not in known]
        for task in strangers:
            yield Problem(
                what=f"gate[{index}].tasks: {task!r} is not among quality.tasks and their groups'"
                f"{nearest(task, known)}",
                fix="correct the name, or add the task to quality.tasks",
            )
        if not strangers:
            yield from _unjudgeable(index, rule, _judged(rule, files, groups))
    if sequential and not _stopping(gate, files, groups):
        yield Problem(
            what="quality.sequential: no task can stop early: texts, pooled groups and whatever another rule than "
            "max_quality_drop judges need all their documents",
            fix="leave quality.sequential out, or add a task or a rule that can",
        )


def _judged(
    rule: Rule, files: Mapping[str, TaskFile], groups: Mapping[str, tuple[str, ...]]
) -> dict[str, TaskFile]:
    """The tasks that a rule names, groups opened; all of them where it names none."""
    named = getattr(rule, "tasks", None)
    if named is None:
        return dict(files)
    return {task: files[task] for name in named for task in groups.get(name, (name,))}


def _unjudgeable(index: int, rule: Rule, judged: Mapping[str, TaskFile]) -> Iterator[Problem]:
    kinds = type(rule).output_types
    if not kinds:
        return
    fitting = {name: file for name, file in judged.items() if _output_type(file) in (None, *kinds)}
    named = getattr(rule, "tasks", None) is not None
    wrong = [name for name in judged if name not in fitting] if named or not fitting else []
    if wrong:
        told = ", ".join(f"{name} is {_output_type(judged[name])}" for name in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        yield Problem(
            what=f"gate[{index}]: {rule.kind} judges tasks of output_type {' or '.join(sorted(kinds))}; {told}{more}",
            fix="add such a task to quality.tasks, name others in the rule's tasks, or drop the rule",
        )
        return
    metric: str | None = getattr(rule, "metric", None)
    if metric is None:
        return
    for name, file in fitting.items():
        has = metrics_of_file(file)
        if has is not None and metric not in has:
            yield Problem(
                what=f"gate[{index}].metric: task {name} has no metric {metric!r}{nearest(metric, has)}",
                fix="correct it, add the metric to the task's metric_list, or name the tasks that have it",
            )


def _output_type(file: TaskFile) -> str | None:
    """As lm-eval has it where the file says nothing; None for a task in Python."""
    return None if "class" in file.config else str(file.config.get("output_type", "generate_until"))


def _stopping(
    gate: Sequence[Rule], files: Mapping[str, TaskFile], groups: Mapping[str, tuple[str, ...]]
) -> set[str]:
    """Tasks that some rule can end early, and none needs in full."""
    found: set[str] = set()
    whole: set[str] = set()
    for rule in gate:
        judged = {
            name
            for name, file in _judged(rule, files, groups).items()
            if _output_type(file) in (None, *rule.output_types)
        }
        if rule.stops_early:
            found |= judged
            named: Any = getattr(rule, "tasks", None)
            whole |= set(_members(named, groups)) if getattr(rule, "pool_groups", False) else set()
        elif type(rule).early_margins is not Rule.early_margins:
            whole |= judged
    return found - whole


def _members(named: Sequence[str] | None, groups: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Tasks that a rule pools: those of the groups it judges."""
    for name, tasks in groups.items():
        if named is None or name in named:
            yield from tasks
