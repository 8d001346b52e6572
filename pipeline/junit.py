"""A report as JUnit XML, which every CI system shows as tests: a suite for each variant, a case for each finding.

`fail` is a failure, `missing` an error, `inconclusive` a skipped test. Findings of optional variants that don't pass
are skipped tests, too, for they don't count. What ends a verdict without a finding (a stage that failed, a baseline
that isn't complete) is a case of its own, so that a run which doesn't ship never looks green. No two cases of a suite
share a name: of those GitLab shows the first only (docs.gitlab.com/ci/testing/unit_test_reports).

    write_atomically(folder / "junit.xml", junit_xml(report))

The elements are those of Jenkins' schema junit-10.xsd (github.com/jenkinsci/xunit-plugin), which pytest and Surefire
write, too.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.results import Finding, Report, VariantReport, Verdict, told_apart

Mark = Literal["failure", "error", "skipped"]

_MARKS: dict[str, Mark | None] = {
    "pass": None,
    "fail": "failure",
    "missing": "error",
    "inconclusive": "skipped",
}
_VERDICT_MARKS: dict[Verdict, Mark | None] = {
    "ship": None,
    "no-ship": "failure",
    "error": "error",
    "inconclusive": "skipped",
}
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML 1.0 document may hold, not even escaped (https://www.w3.org/TR/xml/#charsets)."""


@dataclass(frozen=True)
class _Case:
    name: str
    mark: Mark | None
    kind: str
    message: str


def junit_xml(report: Report) -> str:
    """The whole document. Suites count their own cases; `time` is the run's, which the first suite carries."""
    suites = [(variant.name, _cases(variant)) for variant in report.variants]
    unsaid = _unsaid(report, [case for _, cases in suites for case in cases])
    if unsaid is not None:
        suites.insert(0, ("run", [unsaid]))
    everything = [case for _, cases in suites for case in cases]
    root = ElementTree.Element(
        "testsuites",
        name=_clean(f"pipeline {report.model_id or ''}".strip()),
        tests=str(len(everything)),
        failures=str(_count(everything, "failure")),
        errors=str(_count(everything, "error")),
        time=f"{report.seconds:.3f}",
    )
    for index, (name, cases) in enumerate(suites):
        root.append(_suite(report, name, cases, seconds=report.seconds if index == 0 else 0.0))
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _cases(variant: VariantReport) -> list[_Case]:
    """Findings, failed stages, and the verdict where neither of them says why it is what it is."""
    cases = [_finding(finding, required=variant.required) for finding in variant.findings]
    cases += [
        _case(f"stage {failure.stage}", "error", failure.reason, failure.message, required=variant.required)
        for failure in variant.failures
    ]
    wanted = _VERDICT_MARKS[variant.verdict]
    told = {case.mark for case in cases}
    if wanted is not None and wanted not in told and (variant.required or "skipped" not in told):
        because = (
            f"{variant.name}: {variant.verdict}, and no finding of its own says why; see the run's reasons"
        )
        cases.append(_case("verdict", wanted, variant.verdict, because, required=variant.required))
    return cases


def _finding(finding: Finding, *, required: bool) -> _Case:
    mark = _MARKS[finding.outcome]
    return _case(finding.name, mark, finding.outcome, finding.because, required=required)


def _case(name: str, mark: Mark | None, kind: str, message: str, *, required: bool) -> _Case:
    if required or mark is None:
        return _Case(name, mark, kind, message)
    return _Case(name, "skipped", f"optional, {kind}", f"optional variant, not counted: {kind}: {message}")


def _unsaid(report: Report, cases: Sequence[_Case]) -> _Case | None:
    """The run's verdict, where no case would turn a build that must not ship."""
    wanted = _VERDICT_MARKS[report.verdict]
    if wanted is None or any(case.mark == wanted for case in cases):
        return None
    return _Case("verdict", wanted, report.verdict, "; ".join(report.because) or report.verdict)


def _suite(report: Report, name: str, cases: Sequence[_Case], *, seconds: float) -> ElementTree.Element:
    suite = ElementTree.Element(
        "testsuite",
        name=_clean(name),
        tests=str(len(cases)),
        failures=str(_count(cases, "failure")),
        errors=str(_count(cases, "error")),
        skipped=str(_count(cases, "skipped")),
        time=f"{seconds:.3f}",
        timestamp=report.started_at.removesuffix("+00:00"),
    )
    for called, case in zip(told_apart([_clean(case.name) for case in cases]), cases, strict=True):
        element = ElementTree.SubElement(
            suite, "testcase", name=called, classname=_clean(f"pipeline.{name}"), time="0.000"
        )
        if case.mark is not None:
            message = _clean(case.message)
            marked = ElementTree.SubElement(element, case.mark, type=_clean(case.kind), message=message)
            marked.text = message
    return suite


def _count(cases: Sequence[_Case], mark: Mark) -> int:
    return sum(case.mark == mark for case in cases)


def _clean(text: str) -> str:
    """`text` with a question mark for every character that XML forbids."""
    return _FORBIDDEN.sub("?", text)
