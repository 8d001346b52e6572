"""When a candidate has answered enough: the baseline's answers, the gate's margins, and the looks between. Pure.

The baseline answers every document. A candidate answers them in a seeded order, and after each planned look a task
whose every margin is decided at that look's confidence (`sequential`) is finished.

    stopping = plan_stopping(quality, asked={"piqa": [(Margin(metric="acc", drop=0.01, confidence=0.95, tests=1),)]})
    result = answer_until_decided(stopping.tasks["piqa"], order=order, answer=answer)
    result.documents, result.available_documents
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from pipeline.results import QualityResult, Sample, TaskResult
from pipeline.sequential import Look, decide, looks
from pipeline.values import Value


class Margin(Value):
    """The largest drop of one task's metric, as a share of documents, that a rule allows, and how surely.

    `tests` is the number of tasks that the rule judges.
    """

    metric: str
    drop: float
    confidence: float
    tests: int


class TaskStopping(Value):
    """One task's documents as the baseline answered them, and what has to be decided of them.

    `documents` are hashes in the data's order, `baseline_right` whether the baseline answered them rightly; the margins
    share one metric and one confidence.
    """

    higher_is_better: bool
    documents: tuple[str, ...]
    baseline_right: tuple[bool, ...]
    margins: tuple[Margin, ...]

    def looks(self) -> tuple[Look, ...]:
        """The planned looks at the baseline's documents."""
        return looks(len(self.documents), confidence=self.margins[0].confidence)

    def decides(self, samples: Sequence[Sample], *, look: Look) -> bool:
        """Whether every margin is decided, or an answer that isn't a number leaves nothing to decide."""
        answers = [sample.metrics.get(self.margins[0].metric) for sample in samples]
        if any(answer is None for answer in answers):
            return True
        right = [(answer == 1) == self.higher_is_better for answer in answers]
        known = dict(zip(self.documents, self.baseline_right, strict=True))
        before = [known.get(sample.doc_hash) for sample in samples]
        lost = sum(one is True and not other for one, other in zip(before, right, strict=True))
        gained = sum(one is False and other for one, other in zip(before, right, strict=True))
        decisions = (
            decide(look, lost=lost, gained=gained, margin=margin.drop, tests=margin.tests)
            for margin in self.margins
        )
        return "inconclusive" not in decisions


class Stopping(Value):
    """The tasks that may end early; every other one is answered in full."""

    tasks: dict[str, TaskStopping]


def plan_stopping(
    baseline: QualityResult, *, asked: Mapping[str, Sequence[tuple[Margin, ...] | None]]
) -> Stopping | None:
    """What the gate lets end early; None for nothing. `asked` are each rule's margins by task, None for all documents.

    A task qualifies when it has margins, all are for one right/wrong metric with one confidence, no rule needs all of
    its documents, and the baseline answered every one with a number and none twice.
    """
    found = {
        name: _task_stopping(baseline.tasks[name], [margin for some in rules for margin in some or ()])
        for name, rules in asked.items()
        if None not in rules
    }
    tasks = {name: stopping for name, stopping in found.items() if stopping is not None}
    return Stopping(tasks=tasks) if tasks else None


def _task_stopping(result: TaskResult, margins: Sequence[Margin]) -> TaskStopping | None:
    if len({(margin.metric, margin.confidence) for margin in margins}) != 1:
        return None
    metric = margins[0].metric
    answers = {sample.doc_hash: sample.metrics.get(metric) for sample in result.samples}
    if metric not in result.metrics or len(answers) != result.documents or result.repeated_documents:
        return None
    if not all(answer in (0, 1) for answer in answers.values()):
        return None
    higher = result.metrics[metric].higher_is_better
    return TaskStopping(
        higher_is_better=higher,
        documents=tuple(answers),
        baseline_right=tuple((answer == 1) == higher for answer in answers.values()),
        margins=tuple(margins),
    )


def seeded_order(documents: int, *, task: str, seed: int) -> tuple[int, ...]:
    """Numbers of documents, shuffled; the same for every candidate, so that all answer the same ones first."""
    return tuple(random.Random(f"{task} {seed}").sample(range(documents), documents))


def answer_until_decided(
    stopping: TaskStopping, *, order: Sequence[int], answer: Callable[[tuple[int, ...]], TaskResult]
) -> TaskResult:
    """The result at the look that decides, or of all documents.

    `answer` gets the sorted numbers of all documents up to a look, those of earlier looks included.
    """
    for look in stopping.looks():
        documents = tuple(sorted(order[: look.documents]))
        result = answer(documents)
        samples = tuple(
            _as_in_full(sample, stopping.documents[number])
            for number, sample in zip(documents, result.samples, strict=True)
        )
        result = result.model_copy(
            update={
                "samples": samples,
                "available_documents": len(order),
                "look_confidence": look.confidence,
            }
        )
        if stopping.decides(samples, look=look):
            break
    return result


def _as_in_full(sample: Sample, name: str) -> Sample:
    """Equal documents are told apart by their turn among all documents, not among those answered so far."""
    same = sample.doc_hash.partition("#")[0] == name.partition("#")[0]
    return sample.model_copy(update={"doc_hash": name}) if same else sample
