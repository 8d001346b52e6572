"""action.yml, run step by step as GitHub's runner would: exit codes, outputs, what is uploaded, hostile inputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.composite_action import Job, run_action
from tests.quality_tasks import CHOICES, questions, write_task
from tests.tiny_models import SHORT_SPEED, TWO_VARIANTS, write_llama

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "action.yml").read_text("utf-8")
ACTION: dict[str, Any] = yaml.safe_load(TEXT)
SETUP, UPLOAD = "actions/setup-python", "actions/upload-artifact"
LINE = {"verdict": "no-ship", "pick": None, "report": "/store/runs/a b/report.json"}


def ended(folder: Path, *, code: int, line: dict[str, Any] | None, **inputs: str) -> Job:
    """The action where the program says `line` and ends with `code`."""
    workspace = folder / "workspace"
    workspace.mkdir()
    given = {"recipe": "my recipe.yaml", **{name.replace("_", "-"): value for name, value in inputs.items()}}
    return run_action(ACTION, workspace, inputs=given, ends=(code, json.dumps(line) if line else ""))


def test_every_input_is_used_and_every_used_one_declared() -> None:
    used = set(re.findall(r"\$\{\{ inputs\.([\w-]+) \}\}", TEXT))
    assert used == set(ACTION["inputs"])


def test_no_expression_stands_inside_a_script() -> None:
    scripts = [step["run"] for step in ACTION["runs"]["steps"] if "run" in step]
    assert scripts
    assert not [script for script in scripts if "${{" in script]


def test_the_pinned_torch_is_the_one_of_the_makefile() -> None:
    pins = {re.search(r"torch==([\d.]+)", text)[1] for text in (TEXT, (ROOT / "Makefile").read_text("utf-8"))}  # type: ignore[index]
    assert len(pins) == 1


# --- what becomes of a run's end ---------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 130])
def test_the_job_ends_with_the_run_s_exit_code_and_keeps_the_report(tmp_path: Path, code: int) -> None:
    job = ended(tmp_path, code=code, line=LINE)
    assert job.code == code, job.said
    assert job.outputs == {"verdict": "no-ship", "pick": "", "folder": "/store/runs/a b"}
    assert job.called[-1] == ["-m", "pipeline", "run", "--", "my recipe.yaml"]
    assert job.used[UPLOAD]["path"] == "/store/runs/a b"


@pytest.mark.parametrize(("code", "ending"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 0), (130, 130)])
def test_only_inconclusive_may_pass(tmp_path: Path, code: int, ending: int) -> None:
    assert ended(tmp_path, code=code, line=LINE, inconclusive="pass").code == ending


def test_a_run_that_never_began_leaves_no_outputs_no_artifact_and_its_code(tmp_path: Path) -> None:
    job = ended(tmp_path, code=2, line=None)
    assert (job.code, set(job.outputs.values()), set(job.used)) == (2, {""}, {SETUP})


def test_a_report_that_was_not_written_is_not_uploaded(tmp_path: Path) -> None:
    job = ended(tmp_path, code=4, line={**LINE, "pick": "int8", "report": None})
    assert job.outputs == {"verdict": "no-ship", "pick": "int8", "folder": ""}
    assert (job.code, set(job.used)) == (4, {SETUP})


def test_a_last_line_that_is_no_json_never_passes(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    job = run_action(ACTION, workspace, inputs={"recipe": "r.yaml"}, ends=(0, "usage: …\n"))
    assert job.code != 0
    assert set(job.outputs.values()) == {""}


def test_a_success_without_a_word_never_passes(tmp_path: Path) -> None:
    assert ended(tmp_path, code=0, line=None).code != 0


def test_a_value_of_several_lines_sets_no_other_output(tmp_path: Path) -> None:
    hostile = {
        "verdict": "no-ship",
        "pick": "a\nverdict=ship",
        "report": "/runs/x\nverdict=ship\nEND/report.json",
    }
    job = ended(tmp_path, code=1, line=hostile)
    assert (job.code, job.outputs["verdict"]) == (1, "no-ship")
    assert job.outputs["folder"] == "/runs/x\nverdict=ship\nEND"


# --- inputs -------------------------------------------------------------------------------------------------

HOSTILE = [
    *("$(touch owned)", "`touch owned`", "a; touch owned", "a' ; touch owned; '", 'a"; touch owned; "'),
    *(
        "a b  c",
        "a\ntouch owned\n",
        "*",
        "--help",
        "-",
        "${{ github.token }}",
        "%0A::set-output",
        "é \\n $HOME",
    ),
]


@pytest.mark.parametrize("value", HOSTILE)
def test_recipe_and_baseline_run_arrive_as_the_words_that_they_are(tmp_path: Path, value: str) -> None:
    job = ended(tmp_path, code=1, line=LINE, recipe=value, baseline_run=value)
    assert job.called[-1] == ["-m", "pipeline", "run", f"--baseline-run={value}", "--", value]
    assert (job.code, job.outputs["verdict"]) == (1, "no-ship")
    assert list((tmp_path / "workspace").iterdir()) == []


@pytest.mark.parametrize("value", HOSTILE)
def test_what_is_installed_is_one_word_for_pip(tmp_path: Path, value: str) -> None:
    job = ended(
        tmp_path, code=0, line=LINE, extras=value, torch_index=value, artifact=value, python_version=value
    )
    torch, package = job.called[:2]
    assert torch[:3] == package[:3] == ["-m", "pip", "install"]
    assert torch[-1].startswith("torch==")
    assert package[-1] == f"{ROOT}[{value}]"
    assert len(torch) == len(package)
    assert (job.used[UPLOAD]["name"], job.used[SETUP]["python-version"]) == (value, value)
    assert list((tmp_path / "workspace").iterdir()) == []


@pytest.mark.parametrize("value", ["yes", "", "PASS", "pass\n", "fail|pass", "*", "$(echo pass)"])
def test_a_word_that_is_neither_fail_nor_pass_is_refused_before_anything_runs(
    tmp_path: Path, value: str
) -> None:
    job = ended(tmp_path, code=5, line=LINE, inconclusive=value)
    assert job.code == 2
    assert not [call for call in job.called if "pipeline" in call]


def test_without_extras_and_baseline_run_no_empty_words_are_passed(tmp_path: Path) -> None:
    job = ended(tmp_path, code=0, line=LINE)
    assert all("" not in call for call in job.called)
    assert job.called[1][-1] == str(ROOT)


# --- the real program ----------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    **TWO_VARIANTS,
    "speed": SHORT_SPEED,
    "quality": {"tasks": ["choices"], "task_folders": ["tasks"], "data_folder": "tasks/data", "limit": 12},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipes that differ in their gate: what one run has measured the others find in the store."""
    folder = tmp_path_factory.mktemp("checked out") / "my project"
    folder.mkdir()
    write_llama(folder / "llama")
    write_task(folder / "tasks", "choices", CHOICES, questions(16))
    for name, rule in {
        "ship": {"kind": "max_memory", "fraction": 0.99},
        "no-ship": {"kind": "max_memory", "fraction": 0.01},
        # Twelve documents leave the score of a model that guesses wide open …
        "inconclusive": {"kind": "min_score", "tasks": ["choices"], "score": 0.33},
        # … and tell nothing about what such a model loses.
        "error": {"kind": "max_quality_drop", "points": 3},
    }.items():
        recipe = {**RECIPE, "gate": [rule]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    return folder


def real(workspace: Path, recipe: str) -> Job:
    """The action with the package itself, its store in the workspace and MLflow's server away."""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PIPELINE_STORE": ".pipeline"}
    environment["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    return run_action(ACTION, workspace, inputs={"recipe": f"{recipe}.yaml"}, environment=environment)


@pytest.mark.slow
def test_each_verdict_of_a_real_run_becomes_the_job_s_end_with_summary_and_artifact(workspace: Path) -> None:
    for verdict, code in {"ship": 0, "no-ship": 1, "inconclusive": 5, "error": 4}.items():
        job = real(workspace, verdict)
        assert (job.code, job.outputs["verdict"]) == (code, verdict), job.said
        assert job.summary.startswith(f"# {verdict}: ")
        folder = workspace / job.used[UPLOAD]["path"]
        assert {"report.html", "report.json", "junit.xml", "figures.csv"} <= {
            one.name for one in folder.iterdir()
        }
        assert job.outputs["pick"] == ("int8" if verdict == "ship" else "")
        assert ("::error title=int8" in job.said) == (verdict in ("no-ship", "error"))
