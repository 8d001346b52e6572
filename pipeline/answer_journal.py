"""The answers of a long evaluation, kept batch by batch, so that a killed one goes on with its next batch.

One JSON object a line, after its CRC-32: a plan (which requests are computed together, in which order) before its first
batch, then the answers of each batch. Batches are made from the plan, not from what is unanswered, so that what comes
after a kill is computed in the same batches as without one and gives the same bits. A line torn by the kill, or
changed since, is dropped with all behind it, and computed again.

    journal = AnswerJournal(Path("answers.jsonl"))      # AnswerJournal() keeps them in memory only
    journal.begin(Planned(task="piqa", kind="loglikelihood", requests=keys, computed_tokens=812))
    journal.add({keys[0]: [-3.25, False]})
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.store import REFUSED
from pipeline.values import Value, digest

_KEY_LETTERS = 32  # 128 bits
_CHECKSUM_LETTERS = 9  # eight hexadecimal ones and a space


class Planned(Value):
    """Requests of one task that are computed together, by key; `computed_tokens` is what their plan computes."""

    task: str
    kind: str
    requests: tuple[str, ...]
    computed_tokens: int


class PathChecked(Value):
    """That one task's way of scoring was compared with the harness's own up to a length, or why it isn't taken.

    `computed_tokens` is what the comparison took.
    """

    task: str
    up_to_tokens: int
    computed_tokens: int
    noise_nats: float
    refused: str | None = None


def request_key(kind: str, *content: Any) -> str:
    """What a request's answer depends on, as a short digest; `content` is plain data."""
    return digest([kind, *content])[:_KEY_LETTERS]


def _with_checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x} {text}"


class AnswerJournal:
    """Answers by request key, in memory and, where a path is given, on disk after every batch.

    A disk that is full or can't be written to ends the file, not the evaluation: `tell` is told once.
    """

    def __init__(self, path: Path | None = None, *, tell: Callable[[str], None] = lambda _: None) -> None:
        self.path = path
        self._tell = tell
        self._answers: dict[str, Any] = {}
        self._plans: list[Planned] = []
        self._checked: list[PathChecked] = []
        if path is not None and path.exists():
            self._read(path)

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Any:
        return self._answers[key]

    def checked(self, task: str) -> list[PathChecked]:
        """What comparisons found for a task, in their order; a stage that goes on takes the ways it began with."""
        return [checked for checked in self._checked if checked.task == task]

    def note_checked(self, checked: PathChecked) -> None:
        """Keep the outcome of a comparison."""
        self._checked.append(checked)
        self._append({"checked": checked.model_dump()})

    def begin(self, planned: Planned) -> None:
        """Before the first batch of a plan."""
        self._plans.append(planned)
        self._append({"plan": planned.model_dump()})

    def unfinished(self, task: str, kind: str, keys: Iterable[str]) -> list[Planned]:
        """Plans of this task that were begun, aren't answered, and ask for nothing but `keys`."""
        asked = set(keys)
        return [
            plan
            for plan in self._plans
            if (plan.task, plan.kind) == (task, kind)
            and asked.issuperset(plan.requests)
            and not all(key in self._answers for key in plan.requests)
        ]

    def computed_tokens(self, task: str) -> int:
        """Tokens that all plans and comparisons of a task compute together."""
        noted: list[Planned | PathChecked] = [*self._plans, *self._checked]
        return sum(each.computed_tokens for each in noted if each.task == task)

    def add(self, answers: Mapping[str, Any]) -> None:
        """One batch's answers, plain data by key; on disk when this returns."""
        self._answers.update(answers)
        self._append({"answers": dict(answers)})

    # --- the file -----------------------------------------------------------------------------------------

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_with_checksum(json.dumps(line)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Go on in memory where the disk takes no more. What a torn last line leaves is dropped when it is read."""
        if error.errno not in REFUSED:
            raise error
        self._tell(f"answers are kept in memory only from here on: {self.path}: {error.strerror}")
        self.path = None

    def _read(self, path: Path) -> None:
        """Take up every whole line; cut the file off behind the last one, so that new lines follow it."""
        content = path.read_bytes()
        good = 0
        for line in content.splitlines(keepends=True):
            if not (line.endswith(b"\n") and self._take(line)):
                break
            good += len(line)
        if good < len(content):
            try:
                with path.open("r+b") as file:
                    file.truncate(good)
            except OSError as error:
                self._give_up(error)

    def _take(self, line: bytes) -> bool:
        """Whether a line is what was written."""
        text = line.decode("ascii", errors="replace").rstrip("\n")[_CHECKSUM_LETTERS:]
        if line != (_with_checksum(text) + "\n").encode("ascii", errors="replace"):
            return False
        try:
            match json.loads(text):
                case {"answers": dict(answers)}:
                    self._answers.update(answers)
                case {"plan": plan}:
                    self._plans.append(Planned.model_validate_json(json.dumps(plan)))
                case {"checked": checked}:
                    self._checked.append(PathChecked.model_validate_json(json.dumps(checked)))
                case _:
                    return False
        except (ValueError, ValidationError):
            return False
        return True
