"""The GitLab job of docs/ci.md: keys that GitLab knows, and a script that bash runs to the run's own exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(
    r"```yaml\n(.*?)```", (ROOT / "docs" / "ci.md").read_text("utf-8").partition("## GitLab")[2], re.DOTALL
)
JOB: dict[str, Any] = yaml.safe_load(BLOCKS[0])["gate"]
MERGE_REQUEST: dict[str, Any] = yaml.safe_load(BLOCKS[1])
KEYWORDS = {"image", "script", "before_script", "allow_failure", "artifacts", "cache", "rules"}
"""Of a job, those that are used here: https://docs.gitlab.com/ci/yaml/."""


def test_the_job_has_gitlab_s_keywords_and_commands_that_are_words() -> None:
    assert set(JOB) | set(MERGE_REQUEST) <= KEYWORDS
    assert {"script", "artifacts", "allow_failure"} <= set(JOB)
    for command in (*JOB["script"], *MERGE_REQUEST["before_script"]):
        assert isinstance(command, str), f"a colon made {command} a mapping"
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0


def test_only_inconclusive_is_a_warning_and_the_report_is_kept_always() -> None:
    assert JOB["allow_failure"] == {"exit_codes": [5]}
    assert JOB["artifacts"]["when"] == "always"
    assert set(JOB["artifacts"]["reports"]) == {"junit"}


def run_job(
    project: Path, commands: list[str], *, code: int, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The commands as GitLab's runner joins them, stopping at the first that fails.

    pip and curl note what they are asked; `pipeline run` leaves a run's folder and ends with `code`.
    """
    tools = project.parent / "tools"
    tools.mkdir(exist_ok=True)
    calls = project.parent / "calls"
    said = f"printf '%s\\n' \"${{0##*/}} $*\" >> '{calls}'"
    run = (
        "mkdir -p .pipeline/runs/new; : > .pipeline/runs/new/junit.xml; : > .pipeline/runs/new/report.json; "
        f"exit {code}"
    )
    scripts = {
        "pip": f"{said}; echo \"index ${{PIP_INDEX_URL-none}}\" >> '{calls}'",
        "python": f'[ "$2" != zipfile ] || exec {sys.executable} "$@"; {said}; {run}',
        "curl": f"{said}; cp '{project.parent}/stored.zip' main.zip",
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{script}\n", "utf-8")
        (tools / name).chmod(0o755)
    environment = {**os.environ, **variables, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", "\n".join(commands)],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checked-out project whose cache brought the store of an earlier job."""
    folder = tmp_path / "project"
    (folder / ".pipeline" / "runs" / "old").mkdir(parents=True)
    (folder / ".pipeline" / "runs" / "old" / "junit.xml").touch()
    (folder / ".pipeline" / "results").mkdir()
    return folder


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5])
def test_the_job_ends_with_the_run_s_code_and_only_its_own_report(project: Path, code: int) -> None:
    done = run_job(project, JOB["script"], code=code)
    assert done.returncode == code, done.stderr
    (glob,) = (JOB["artifacts"]["reports"]["junit"],)
    assert [str(one.relative_to(project)) for one in project.glob(glob)] == [".pipeline/runs/new/junit.xml"]
    assert all((project / path).is_dir() for path in JOB["artifacts"]["paths"])
    assert (project / ".pipeline" / "results").is_dir(), "what stages found is kept"


@pytest.mark.parametrize("index", ["", "https://example.org/whl/cpu", "a b; touch owned"])
def test_torch_comes_from_the_index_that_is_named(project: Path, index: str) -> None:
    run_job(project, JOB["script"], code=0, TORCH_INDEX=index)
    calls = (project.parent / "calls").read_text("utf-8").splitlines()
    assert calls[0].startswith("pip install -c constraints.txt torch==")
    assert calls[1] == f"index {index or 'none'}"
    assert calls[2:4] == ["pip install -c constraints.txt .[llama-cpp]", "index none"]
    assert not (project / "owned").exists()


def test_a_merge_request_finds_the_one_run_of_main(project: Path) -> None:
    with zipfile.ZipFile(project.parent / "stored.zip", "w") as stored:
        stored.writestr(".pipeline/runs/20260101-000000-mine/report.json", "{}")
    script = [
        f"{line} --baseline-run main-run/.pipeline/runs/*" if "pipeline run" in line else line
        for line in JOB["script"]
    ]
    variables = {"CI_JOB_TOKEN": "t0ken", "CI_API_V4_URL": "https://host/api/v4", "CI_PROJECT_ID": "7"}
    done = run_job(project, [*MERGE_REQUEST["before_script"], *script], code=0, **variables)
    assert done.returncode == 0, done.stderr
    calls = (project.parent / "calls").read_text("utf-8").splitlines()
    assert calls[0].startswith("curl --fail --location --header JOB-TOKEN: t0ken --output main.zip")
    assert calls[0].endswith("https://host/api/v4/projects/7/jobs/artifacts/main/download?job=gate")
    assert calls[-1].endswith("--baseline-run main-run/.pipeline/runs/20260101-000000-mine")
