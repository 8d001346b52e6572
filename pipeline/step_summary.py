"""The report where GitHub shows it: appended to the job's summary, with the reasons as annotations of the run.

https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands

    append_step_summary(markdown(report), file=Path(os.environ["GITHUB_STEP_SUMMARY"]))
    print("\\n".join(workflow_commands(report)), file=sys.stderr)
"""

from __future__ import annotations

from pathlib import Path

from pipeline.results import Finding, Report

LARGEST_SUMMARY_BYTES = 2**20
"""Of one step; GitHub drops a larger one whole."""
MOST_ANNOTATIONS = 10
"""That a step shows of each kind."""
_CUT = "\n\n… cut at GitHub's limit of 1 MiB; all of it is in report.md.\n"
_LEVELS = {"fail": "error", "missing": "error", "inconclusive": "warning"}


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
    """Workflow commands for what doesn't pass of the required variants: errors, and warnings for what is undecided."""
    lines = [
        f"::{_LEVELS[finding.outcome]} title={_property(f'{variant.name}: {_what(finding)}')}"
        f"::{_data(finding.because)}"
        for variant in report.variants
        if variant.required
        for finding in variant.findings
        if finding.outcome in _LEVELS
    ]
    if not lines and report.verdict != "ship":
        lines = [f"::error title=verdict {report.verdict}::{_data(reason)}" for reason in report.because]
    return tuple(lines[:MOST_ANNOTATIONS])


def _what(finding: Finding) -> str:
    return f"{finding.rule} {finding.subject}".strip() + f" {finding.outcome}"


def _data(text: str) -> str:
    """A line break would begin another command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
