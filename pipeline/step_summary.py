"""The report where GitHub shows it: appended to the job's summary, with the reasons as annotations of the run.

https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands

    append_step_summary(markdown(report), file=Path(os.environ["GITHUB_STEP_SUMMARY"]))
    print("\\n".join(workflow_commands(report)), file=sys.stderr)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.results import FindingOutcome, Report, VariantReport, Verdict

Level = Literal["error", "warning"]

LARGEST_SUMMARY_BYTES = 2**20
"""Of one step; GitHub drops a larger one whole."""
MOST_ANNOTATIONS = 10
"""That a step shows of each kind."""
_CUT = "\n\n… cut at GitHub's limit of 1 MiB; all of it is in report.md.\n"
_LEVELS: dict[FindingOutcome, Level] = {"fail": "error", "missing": "error", "inconclusive": "warning"}
_VERDICT_LEVELS: dict[Verdict, Level] = {"no-ship": "error", "error": "error", "inconclusive": "warning"}


def append_step_summary(text: str, *, file: Path) -> str | None:
    """Append `text`, cut at a line's end where the step's limit is reached. None, or why it couldn't be written."""
    try:
        taken = file.stat().st_size if file.exists() else 0
        with file.open("ab") as summary:
            summary.write(_fitting(text, LARGEST_SUMMARY_BYTES - taken))
    except OSError as error:
        return f"the step summary {file} can't be written: {error.strerror}"
    return None


def _fitting(text: str, room_bytes: int) -> bytes:
    whole = f"{text.rstrip()}\n\n".encode()
    if len(whole) <= room_bytes:
        return whole
    cut = _CUT.encode()
    kept = whole[: max(0, room_bytes - len(cut))]
    kept = kept[: kept.rfind(b"\n") + 1]
    return kept + cut if kept else b""


def workflow_commands(report: Report) -> tuple[str, ...]:
    """Workflow commands for what doesn't pass of the required variants: errors, then warnings for what is undecided.

    A step shows ten of each, and the first ones: an error never hides behind warnings. Where none of them says why the
    run doesn't ship, its reasons do.
    """
    told = [one for variant in report.variants if variant.required for one in _annotations(variant)]
    wanted = _VERDICT_LEVELS.get(report.verdict)
    if wanted is not None and all(one.level != wanted for one in told):
        told += [_Annotation(wanted, f"verdict {report.verdict}", reason) for reason in report.because]
    errors, warnings = ([one for one in told if one.level == level] for level in ("error", "warning"))
    shown = (*errors[:MOST_ANNOTATIONS], *warnings[:MOST_ANNOTATIONS])
    return tuple(f"::{one.level} title={_property(one.title)}::{_data(one.text)}" for one in shown)


@dataclass(frozen=True)
class _Annotation:
    level: Level
    title: str
    text: str


def _annotations(variant: VariantReport) -> Iterator[_Annotation]:
    """A variant's findings that don't pass, and its failed stages."""
    for one in variant.findings:
        if one.outcome in _LEVELS:
            title = f"{variant.name}: {one.name} {one.outcome}"
            yield _Annotation(_LEVELS[one.outcome], title, one.because)
    for failure in variant.failures:
        title = f"{variant.name}: stage {failure.stage} {failure.reason}"
        yield _Annotation("error", title, failure.message)


def _data(text: str) -> str:
    """A line break would begin another command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
