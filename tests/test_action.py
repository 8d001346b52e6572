"""action.yml: its inputs are used, and its script keeps the run's exit code whatever becomes of the outputs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "action.yml").read_text("utf-8")
ACTION: dict[str, Any] = yaml.safe_load(TEXT)
STEPS = {step.get("name", step.get("uses")): step for step in ACTION["runs"]["steps"]}


def test_every_input_is_used_and_every_used_one_declared() -> None:
    used = set(re.findall(r"\$\{\{ inputs\.([\w-]+) \}\}", TEXT))
    assert used == set(ACTION["inputs"])


def test_no_expression_stands_inside_a_script() -> None:
    scripts = [step["run"] for step in STEPS.values() if "run" in step]
    assert scripts
    assert not [script for script in scripts if "${{" in script]


def test_the_pinned_torch_is_the_one_of_the_makefile() -> None:
    pins = {re.search(r"torch==([\d.]+)", text)[1] for text in (TEXT, (ROOT / "Makefile").read_text("utf-8"))}  # type: ignore[index]
    assert len(pins) == 1


def test_the_report_is_kept_whatever_the_verdict() -> None:
    assert STEPS["Keep the report"]["if"].startswith("${{ always() &&")


class Ran:
    """What the action's script left: exit code, outputs, the arguments that the program got."""

    def __init__(self, folder: Path, *, code: int, line: dict[str, Any] | None, **inputs: str) -> None:
        recorded, output = folder / "arguments", folder / "output"
        said = "" if line is None else json.dumps(line)
        python = folder / "python"
        python.write_text(
            f'#!/bin/bash\nif [ "$1" = - ]; then exec {shlex.quote(sys.executable)} "$@"; fi\n'
            f'printf "%s\\n" "$@" > {shlex.quote(str(recorded))}\nprintf %s {shlex.quote(said)}\nexit {code}\n',
            encoding="utf-8",
        )
        python.chmod(0o755)
        output.touch()
        environment = {
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "RUNNER_TEMP": str(folder),
            "GITHUB_OUTPUT": str(output),
            "RECIPE": "my recipe.yaml",
            "BASELINE_RUN": "",
            "INCONCLUSIVE": "fail",
            **inputs,
        }
        script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS["Run"]["run"]]
        self.done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
        self.arguments = recorded.read_text("utf-8").splitlines() if recorded.exists() else []
        self.outputs = dict(one.split("=", 1) for one in output.read_text("utf-8").splitlines())


LINE = {"verdict": "no-ship", "pick": None, "report": "/store/runs/a b/report.json"}


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 130])
def test_the_step_ends_with_the_run_s_exit_code(tmp_path: Path, code: int) -> None:
    ran = Ran(tmp_path, code=code, line=LINE)
    assert ran.done.returncode == code, ran.done.stderr
    assert ran.outputs == {"verdict": "no-ship", "pick": "", "folder": "/store/runs/a b"}
    assert ran.arguments == ["-m", "pipeline", "run", "my recipe.yaml"]


@pytest.mark.parametrize(("code", "ending"), [(5, 0), (1, 1), (4, 4)])
def test_only_inconclusive_may_pass(tmp_path: Path, code: int, ending: int) -> None:
    assert Ran(tmp_path, code=code, line=LINE, INCONCLUSIVE="pass").done.returncode == ending


def test_a_run_that_never_began_leaves_no_outputs_and_its_code(tmp_path: Path) -> None:
    ran = Ran(tmp_path, code=2, line=None)
    assert (ran.done.returncode, ran.outputs) == (2, {})


def test_the_baseline_run_is_passed_on_as_one_word(tmp_path: Path) -> None:
    ran = Ran(
        tmp_path, code=0, line={**LINE, "pick": "int8", "report": None}, BASELINE_RUN="main run; rm -r /"
    )
    assert ran.arguments[-2:] == ["--baseline-run", "main run; rm -r /"]
    assert ran.outputs == {"verdict": "no-ship", "pick": "int8", "folder": ""}


def test_a_word_that_is_neither_fail_nor_pass_is_refused(tmp_path: Path) -> None:
    ran = Ran(tmp_path, code=0, line=LINE, INCONCLUSIVE="yes")
    assert (ran.done.returncode, ran.arguments) == (2, [])
