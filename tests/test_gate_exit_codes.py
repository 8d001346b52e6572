"""A verdict that a program sees: through the exit code, through a pipe, and in the files of a run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.commands import write_report
from pipeline.measured import StageFailure
from pipeline.results import Report, VariantReport
from tests import result_builders as build

ROOT = Path(__file__).parent.parent
RULES = [
    {"kind": "max_quality_drop", "points": 10.0, "tasks": ["piqa"]},
    {"kind": "min_speedup", "factor": 1.5},
]


def arm(name: str, **fields: Any) -> VariantReport:
    quality = build.quality(build.task(values=[1.0] * 300 + [0.0] * 100))
    verdict = fields.pop("verdict", "ship")
    return build.variant_report(build.variant(name, **{"quality": quality, **fields}), verdict=verdict)


def report(*arms: VariantReport, rules: Any = None) -> Report:
    recipe = {"model": {"id": "tiny/model"}, "gate": RULES if rules is None else rules}
    return build.report(*(arms or (arm("fp16"), arm("int8"))), resolved_recipe=recipe)


def gated(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code of `gate` on a report's text, and all that was said."""
    path = folder / "report.json"
    path.write_text(text, "utf-8")
    code = main(["gate", str(path)])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-Infinity", "null", '"0.7"', "true"])
def test_a_score_that_is_no_number_never_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], score: str
) -> None:
    data = json.loads(report().to_json())
    assert gated(tmp_path, json.dumps(data), capsys)[0] == 0
    data["variants"][1]["quality"]["tasks"]["piqa"]["metrics"]["acc"]["score"] = "SCORE"
    code, said = gated(tmp_path, json.dumps(data).replace('"SCORE"', score), capsys)
    assert code == (4 if score == "null" else 2)
    assert "piqa" in said
    assert "verdict: ship" not in said


def nothing_measured(name: str, **fields: Any) -> VariantReport:
    failed = StageFailure(stage="quantize", reason="failed", message="no kernel for this device")
    absent = dict.fromkeys(("checkpoint", "speed", "memory", "capacity", "quality"))
    return arm(name, **absent, failures=(failed,), **fields)


@pytest.mark.parametrize(
    "arms",
    [
        (arm("fp16"), nothing_measured("int8"), nothing_measured("int4")),
        (arm("fp16"), nothing_measured("int8", required=False), nothing_measured("int4", required=False)),
        (nothing_measured("fp16"), nothing_measured("int8")),
        (nothing_measured("fp16"), arm("int8")),
        (arm("fp16"),),
    ],
    ids=["all candidates failed", "all are optional", "every variant failed", "the baseline failed", "none"],
)
def test_without_a_baseline_and_a_candidate_that_were_measured_nothing_ships(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arms: tuple[VariantReport, ...]
) -> None:
    code, said = gated(tmp_path, report(*arms).to_json(), capsys)
    assert (code, "verdict: error" in said.splitlines()) == (4, True), said


def test_what_the_gate_lists_and_the_results_lack_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tasks and a decode rate are listed; each is taken away in turn."""
    rules = [{"kind": "max_quality_drop", "points": 10.0, "tasks": ["arc_easy", "hellaswag"]}, RULES[1]]
    answers = [1.0] * 300 + [0.0] * 100

    def candidate(*tasks: str, name: str = "int8", decode: float | None = 40.0) -> VariantReport:
        quality = build.quality(*(build.task(name, answers) for name in tasks))
        rows = [build.speed_row(1, decode), build.speed_row(8, 160.0)]
        return arm(name, quality=quality, speed=build.speed(name, rows))

    baseline = candidate("arc_easy", "hellaswag", name="fp16", decode=20.0)

    def judged(one: VariantReport) -> tuple[int, str]:
        return gated(tmp_path, report(baseline, one, rules=rules).to_json(), capsys)

    assert judged(candidate("arc_easy", "hellaswag"))[0] == 0
    for kept, lost in (("arc_easy", "hellaswag"), ("hellaswag", "arc_easy")):
        code, said = judged(candidate(kept))
        assert (code, f"{lost}: no result of the candidate; it has {kept}" in said) == (4, True), said
    code, said = judged(candidate("arc_easy", "hellaswag", decode=None))
    assert (code, "decode rate at batch size 1 was not measured" in said) == (4, True), said


@pytest.mark.parametrize(
    ("rules", "code", "verdict"),
    [
        (RULES, 0, "ship"),
        ([{"kind": "min_speedup", "factor": 9.0}], 1, "no-ship"),
        ([{"kind": "min_speedup", "factor": 1.5, "batch_size": 4}], 4, "error"),
    ],
)
def test_a_pipe_keeps_the_verdict_and_a_shell_that_asks_gets_the_code(
    tmp_path: Path, rules: Any, code: int, verdict: str
) -> None:
    (tmp_path / "report.json").write_text(report(rules=rules).to_json(), "utf-8")
    command = f"{shlex.quote(sys.executable)} -m pipeline gate {shlex.quote(str(tmp_path))} --json"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | tee {shlex.quote(str(tmp_path / 'kept.json'))}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert json.loads((tmp_path / "kept.json").read_text("utf-8"))["verdict"] == verdict


@pytest.mark.parametrize("verdict", ["ship", "no-ship", "inconclusive", "error"])
def test_the_files_of_a_run_hold_the_verdict(tmp_path: Path, verdict: Any) -> None:
    ended = report(arm("fp16"), arm("int8", verdict=verdict)).model_copy(update={"verdict": verdict})
    write_report(ended, folder=tmp_path, recipe_text="model: tiny/model\n")
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["verdict"] == verdict
    assert (tmp_path / "report.md").read_text("utf-8").startswith(f"# {verdict}: tiny/model")
