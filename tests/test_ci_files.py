"""What a CI system reads of a run: JUnit XML, figures.csv, the step summary and its annotations."""

from __future__ import annotations

import csv
import io
import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from pipeline.commands import show_in_ci, write_report
from pipeline.figures import figures_csv, unit_of, variant_figures
from pipeline.gate import VERDICTS
from pipeline.junit import junit_xml
from pipeline.measured import StageFailure
from pipeline.results import Finding, Report, VariantReport
from pipeline.step_summary import LARGEST_SUMMARY_BYTES, append_step_summary, workflow_commands
from tests import result_builders as build

SCHEMA = etree.XMLSchema(etree.parse(Path(__file__).parent / "schemas" / "junit-10.xsd"))
WORST = {"pass": "ship", "fail": "no-ship", "missing": "error", "inconclusive": "inconclusive"}


def finding(outcome: str, because: str = "because of that", **fields: Any) -> Finding:
    values = {"rule": "min_speedup", "observed": 1.2, "limit": 1.5, "unit": "x", **fields}
    return Finding.model_validate({"outcome": outcome, "because": because, **values})


def candidate(*outcomes: str, required: bool = True, **fields: Any) -> VariantReport:
    findings = tuple(finding(outcome, subject=str(place)) for place, outcome in enumerate(outcomes))
    worst = max((WORST[outcome] for outcome in outcomes), key=VERDICTS.index, default="ship")
    name = "int8" if required else "int4"
    values = {"findings": findings, "verdict": worst, **fields}
    return build.variant_report(build.variant(name).model_copy(update={"required": required}), **values)


def report_of(*candidates: VariantReport, **fields: Any) -> Report:
    counted = [one.verdict for one in candidates if one.required]
    worst = max(counted, key=VERDICTS.index, default="error")
    model = {"model": {"id": "tiny/model"}}
    values = {"verdict": worst, "resolved_recipe": model, **fields}
    return build.report(build.variant_report(build.variant("fp16")), *candidates, **values)


def parsed(report: Report) -> ElementTree.Element:
    text = junit_xml(report)
    SCHEMA.assertValid(etree.fromstring(text.encode()))
    return ElementTree.fromstring(text)


# --- JUnit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "mark"),
    [("pass", None), ("fail", "failure"), ("missing", "error"), ("inconclusive", "skipped")],
)
def test_each_finding_is_a_case_marked_by_its_outcome(outcome: str, mark: str | None) -> None:
    suite = parsed(report_of(candidate("pass", outcome))).find("testsuite[@name='int8']")
    assert suite is not None
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == ["min_speedup 0", "min_speedup 1"]
    assert [child.tag for child in cases[1]] == ([mark] if mark else [])
    if mark:
        assert cases[1][0].get("message") == "because of that"


def test_suites_count_their_own_cases() -> None:
    root = parsed(report_of(candidate("pass", "fail", "fail", "missing", "inconclusive")))
    suite = root.find("testsuite[@name='int8']")
    assert suite is not None
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "5", "failures": "2", "errors": "1", "skipped": "1"}
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("5", "2", "1")


@pytest.mark.parametrize("outcome", ["fail", "missing", "inconclusive"])
def test_an_optional_variant_never_fails_a_build(outcome: str) -> None:
    root = parsed(report_of(candidate("pass"), candidate(outcome, required=False)))
    assert (root.get("failures"), root.get("errors")) == ("0", "0")
    skipped = root.find("testsuite[@name='int4']/testcase/skipped")
    assert skipped is not None
    assert "optional variant, not counted" in str(skipped.get("message"))


@pytest.mark.parametrize(
    "outcomes", [tuple(some) for count in (0, 1, 2) for some in itertools.product(WORST, repeat=count)]
)
@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_file_is_red_exactly_when_the_run_must_not_ship(outcomes: tuple[str, ...], verdict: str) -> None:
    root = parsed(report_of(candidate(*outcomes), verdict=verdict))
    red = int(root.get("failures", "0")) + int(root.get("errors", "0"))
    told = {WORST[outcome] for outcome in outcomes} | {verdict}
    assert bool(red) == bool(told & {"no-ship", "error"})
    skipped = sum(int(suite.get("skipped", "0")) for suite in root)
    assert bool(skipped) == ("inconclusive" in told)


def test_no_two_cases_of_a_suite_share_a_name_so_that_no_reader_drops_the_second() -> None:
    twice = (finding("pass"), finding("fail", limit=9.0), finding("pass", subject="piqa"))
    suite = parsed(report_of(candidate(findings=twice, verdict="no-ship"))).find("testsuite[@name='int8']")
    assert suite is not None
    cases = {str(case.get("name")): [child.tag for child in case] for case in suite.findall("testcase")}
    assert cases == {"min_speedup": [], "min_speedup (2)": ["failure"], "min_speedup piqa": []}


def test_a_failed_stage_and_an_unexplained_verdict_are_cases_of_their_own() -> None:
    failed = StageFailure(stage="speed", reason="out_of_memory", message="no room")
    broken = candidate(verdict="error", failures=(failed,))
    root = parsed(report_of(broken, candidate(verdict="error").model_copy(update={"name": "other"})))
    assert root.find("testsuite[@name='int8']/testcase[@name='stage speed']/error") is not None
    assert root.find("testsuite[@name='other']/testcase[@name='verdict']/error") is not None


def test_characters_that_xml_forbids_are_replaced_and_all_others_kept() -> None:
    nasty = "a\x00b\x1b[31m <&>\"' ]]> é 漢 😀 \ud800 \ufffe line\nbreak"
    root = parsed(report_of(candidate(findings=(finding("fail", nasty),), verdict="no-ship")))
    failure = root.find("testsuite[@name='int8']/testcase/failure")
    assert failure is not None
    assert failure.text == "a?b?[31m <&>\"' ]]> é 漢 😀 ? ? line\nbreak"


# --- figures.csv -----------------------------------------------------------------------------------------


def lines(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(figures_csv(report))))


def test_figures_csv_holds_every_section_with_units_and_spreads() -> None:
    quality = build.quality(build.task(values=[1] * 8 + [0] * 2), build.rolling_task())
    results = build.variant("int8", quality=quality)
    rows = lines(report_of(build.variant_report(results, findings=(finding("fail"),), verdict="no-ship")))
    found = {(row["variant"], row["section"], row["metric"]): row for row in rows}
    rate = found["int8", "speed", "batch_8.decode_tokens_per_s"]
    assert (rate["value"], rate["unit"], rate["spread"]) == ("160", "tokens/s", "quartiles")
    assert float(rate["low"]) < 160 < float(rate["high"])
    assert found["int8", "memory", "weight_bytes_resident"]["value"] == "500000000"
    score = found["int8", "quality", "piqa.acc"]
    assert (score["value"], score["spread"]) == ("0.8", "95 % interval")
    assert float(score["low"]) < 0.8 < float(score["high"])
    assert found["int8", "gate", "min_speedup"]["outcome"] == "fail"
    assert found["fp16", "capacity", "measured_sequences"]["value"] == "10"


def test_what_is_void_has_an_outcome_and_no_value() -> None:
    rows = (build.speed_row(1, 999.0, outcome="void"), build.speed_row(8, 80.0, noisy=True))
    variant = build.variant_report(build.variant("int8", speed=build.speed("int8", rows=rows)))
    found = {row["metric"]: row for row in lines(report_of(variant)) if row["variant"] == "int8"}
    assert (
        found["batch_1.decode_tokens_per_s"]["value"],
        found["batch_1.decode_tokens_per_s"]["outcome"],
    ) == (
        "",
        "void",
    )
    assert found["batch_8.decode_tokens_per_s"]["outcome"] == "noisy"
    assert "999" not in figures_csv(report_of(variant))


def test_what_rules_observed_has_their_bounds_and_two_rules_of_a_kind_two_names() -> None:
    twice = (finding("pass", interval=(1.0, 1.4)), finding("fail", limit=9.0))
    rows = lines(report_of(candidate(findings=twice, verdict="no-ship")))
    gate = [(row["metric"], row["low"], row["spread"]) for row in rows if row["section"] == "gate"]
    assert gate == [("min_speedup", "1", "bounds"), ("min_speedup (2)", "", "unknown")]


def test_a_cell_is_never_a_formula() -> None:
    task = build.task("=HYPERLINK(x)")
    variant = build.variant_report(build.variant("int8", quality=build.quality(task)))
    cells = [row["metric"] for row in lines(report_of(variant)) if "HYPERLINK" in row["metric"]]
    assert cells
    assert all(cell.startswith("'=") for cell in cells)


def test_every_figure_of_the_builders_has_the_unit_that_its_name_ends_with() -> None:
    figures = variant_figures(build.variant("int8"))
    without = {one.metric for one in figures if not one.unit}
    assert without == {"parameters"}
    assert all(one.unit == unit_of(one.metric) for one in figures)


# --- GitHub ----------------------------------------------------------------------------------------------


def test_the_summary_is_appended_and_cut_at_a_line_within_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    assert append_step_summary("# first", file=file) is None
    assert append_step_summary("é line\n" * 200_000, file=file) is None
    content = file.read_bytes()
    assert content.startswith(b"# first\n")
    assert len(content) <= LARGEST_SUMMARY_BYTES
    assert content.decode().rstrip().endswith("all of it is in report.md.")
    assert append_step_summary("no room is left", file=file) is None
    assert len(file.read_bytes()) <= LARGEST_SUMMARY_BYTES


def test_a_summary_that_cannot_be_written_is_told_and_no_error(tmp_path: Path) -> None:
    assert "can't be written" in str(append_step_summary("x", file=tmp_path))


def test_annotations_name_what_does_not_pass_and_no_text_begins_a_command_of_its_own() -> None:
    hostile = finding("fail", "50 %\n::set-env name=PATH::/tmp")
    optional = candidate("fail", required=False)
    report = report_of(candidate(findings=(hostile, finding("inconclusive")), verdict="no-ship"), optional)
    first, second = workflow_commands(report)
    assert first == ("::error title=int8%3A min_speedup fail::50 %25%0A::set-env name=PATH::/tmp")
    assert second.startswith("::warning title=int8%3A min_speedup inconclusive::")


def test_an_error_never_hides_behind_warnings_and_ten_of_each_are_shown() -> None:
    mixed = candidate(*["inconclusive"] * 12, *["missing"] * 11, "fail")
    found = [line.partition(" ")[0] for line in workflow_commands(report_of(mixed))]
    assert found == ["::error"] * 10 + ["::warning"] * 10


def test_a_failed_stage_is_an_error_beside_findings_that_only_warn() -> None:
    failed = StageFailure(stage="capacity", reason="failed", message="no probe ran")
    broken = candidate("inconclusive", failures=(failed,), verdict="error")
    first, second = workflow_commands(report_of(broken))
    assert first == "::error title=int8%3A stage capacity failed::no probe ran"
    assert second.startswith("::warning ")


@pytest.mark.parametrize(
    ("verdict", "level"), [("no-ship", "error"), ("error", "error"), ("inconclusive", "warning")]
)
def test_a_verdict_that_no_finding_explains_is_annotated_with_the_run_s_reasons(
    verdict: str, level: str
) -> None:
    report = report_of(candidate("pass"), verdict=verdict, because=("fp16: fp32 can't be the baseline",))
    assert workflow_commands(report) == (
        f"::{level} title=verdict {verdict}::fp16: fp32 can't be the baseline",
    )


def test_in_a_job_the_report_is_in_the_summary_and_elsewhere_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, stream, summary = report_of(candidate("fail")), io.StringIO(), tmp_path / "summary.md"
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    show_in_ci(report, stream=stream)
    assert stream.getvalue() == ""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    show_in_ci(report, stream=stream)
    assert summary.read_text("utf-8").startswith("# no-ship: tiny/model")
    assert stream.getvalue().startswith("::error title=int8%3A min_speedup 0 fail::")


def test_a_run_s_folder_holds_both_files(tmp_path: Path) -> None:
    report = report_of(candidate("pass"))
    write_report(report, folder=tmp_path, recipe_text="model: tiny/model\n")
    assert (tmp_path / "junit.xml").read_text("utf-8") == junit_xml(report)
    assert (tmp_path / "figures.csv").read_text("utf-8") == figures_csv(report)
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["verdict"] == "ship"
