"""Reports of earlier runs, read back from a file, a run's folder, or a store with all of its runs.

report = load_report(Path(".pipeline/runs/20260102-030405-demo"))
found, unread = find_runs((Path(".pipeline"),))
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.errors import UsageError
from pipeline.results import Report
from pipeline.values import digest

_SEAL = "content_sha256"


@dataclass(frozen=True)
class StoredRun:
    """A report and where it lies; `name` is its folder's, or the file's where it isn't a report.json.

    `named`: somebody asked for this very run; the others were found in a store.
    """

    name: str
    file: Path
    report: Report
    named: bool = True


def sealed(report: Report) -> Report:
    """The report as it goes into a file: with the digest of all else in it, so that an edited figure is noticed.

    It is of the JSON's content and not of the model's fields, for a later release may have more of those.
    """
    return report.model_copy(update={_SEAL: _content_sha256(json.loads(report.to_json()))})


def load_report(path: Path) -> Report:
    """A stored report from its file or its run's folder. Raises UsageError naming what is wrong with it.

    One whose seal doesn't fit was changed by hand; reports without a seal are taken as they are.
    """
    file = path
    if inside := _runs_in(path):
        raise UsageError(f"{path}: holds runs ({len(inside)}); name one of them, for example {inside[-1]}")
    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise UsageError(
            f"{path}: is a recipe and no report; name a report.json or a run's folder (limits of another recipe: "
            "`gate RUN --rules RECIPE`)"
        )
    try:
        file = path / "report.json" if path.is_dir() else path
        content = file.read_bytes()
        report = Report.model_validate_json(content)
        data = json.loads(content, parse_int=_countable)
    except OSError as error:
        raise UsageError(
            f"{file}: can't be read ({error.strerror}); name a report.json or a run's folder"
        ) from None
    except OverflowError as error:
        raise UsageError(f"{file}: is not a report of this version: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(
            f"{file}: is not a report of this version: {place}: {first['msg']}; name a report.json that this release "
            "wrote, or run the recipe again"
        ) from None
    if report.content_sha256 is not None and report.content_sha256 != _content_sha256(data):
        raise UsageError(
            f"{file}: was changed after it was written ({_SEAL} is of another content), so nothing can be decided "
            "by it; restore the file, or run the recipe again"
        )
    return report


def _content_sha256(data: dict[str, Any]) -> str:
    return digest({name: value for name, value in data.items() if name != _SEAL})


def stored_run(path: Path) -> StoredRun:
    """A report with the name that people know it by. Raises UsageError as `load_report`."""
    report = load_report(path)
    file = (path / "report.json" if path.is_dir() else path).resolve()
    return StoredRun(
        name=file.parent.name if file.name == "report.json" else file.stem, file=file, report=report
    )


def find_runs(paths: Sequence[Path]) -> tuple[tuple[StoredRun, ...], tuple[str, ...]]:
    """The runs that `paths` name, in the order of their starts, and what couldn't be read of a store's runs.

    A folder without a report.json of its own stands for the runs in it: a store, or its `runs`. Of those the
    unreadable ones are told; one that is named itself must be readable, else UsageError. A run named twice is refused;
    one that a store holds twice (a link to the newest), or that is named besides, is taken once.
    """
    found: list[StoredRun] = []
    unread: list[str] = []
    for path in paths:
        inside = _runs_in(path)
        if inside is None:
            found.append(stored_run(path))
            continue
        for folder in inside:
            try:
                found.append(replace(stored_run(folder), named=False))
            except UsageError as error:
                unread.append(str(error))
    once: dict[Path, StoredRun] = {}
    for run in found:
        known = once.get(run.file)
        if known is not None and known.named and run.named:
            raise UsageError(f"{run.file}: is named twice; name each run once")
        once[run.file] = known if known is not None and known.named else run
    return (
        tuple(sorted(once.values(), key=lambda run: (run.report.started_at, run.name))),
        tuple(dict.fromkeys(unread)),
    )


def _runs_in(path: Path) -> list[Path] | None:
    """The run folders of a store; None where `path` is a run, a file or nothing."""
    try:
        if not path.is_dir() or (path / "report.json").exists():
            return None
    except OSError:
        return None  # `load_report` says what is wrong with it
    for folder in (path / "runs", path):
        inside = sorted(file.parent for file in folder.glob("*/report.json"))
        if inside:
            return inside
    return None


def _countable(digits: str) -> int:
    """An integer that a count of bytes or tokens can be; larger ones fit no arithmetic further on."""
    if len(digits) > 19 or int(digits).bit_length() > 63:
        raise OverflowError(f"{digits[:10]}… is too large a number")
    return int(digits)
