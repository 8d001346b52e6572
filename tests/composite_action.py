"""A composite action run step by step as GitHub's runner would, but for what it downloads.

`uses:` steps are recorded with their inputs; `run:` steps are executed by bash in a workspace. Expressions of the few
forms that are known here are evaluated, any other is an error, and so are steps' output files that the runner refuses.
The rules: https://docs.github.com/actions/reference/workflows-and-actions (metadata syntax, workflow commands).

>>> evaluated("${{ inputs.a-b }}!", {"inputs.a-b": "$(x)"})
'$(x)!'
>>> holds("${{ always() && steps.run.outputs.folder != '' }}", {"steps.run.outputs.folder": ""}, succeeded=False)
False
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
NAME = re.compile(r"[a-z_]+(\.[\w-]+)+")
CALL_END = "end-of-call"


def evaluated(text: str, context: Mapping[str, str]) -> str:
    """`text` with each `${{ a.name }}` replaced by its value; what a step didn't put out is empty, as on GitHub."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        assert NAME.fullmatch(name), f"an expression of a form that isn't known here: {found[0]}"
        assert name.startswith("steps.") or name in context, f"{name} is declared nowhere"
        return context.get(name, "")

    return EXPRESSION.sub(value, text)


def holds(condition: str | None, context: Mapping[str, str], *, succeeded: bool) -> bool:
    """Whether a step runs: after a failure only with `always()`."""
    terms = EXPRESSION.sub(r"\1", condition or "success()").split(" && ")
    if "always()" not in terms and not succeeded:
        return False
    return all(_term(term, context) for term in terms if term not in ("always()", "success()"))


def _term(term: str, context: Mapping[str, str]) -> bool:
    found = re.fullmatch(r"([\w.-]+) != '([^']*)'", term)
    assert found, f"a condition of a form that isn't known here: {term}"
    return context.get(found[1], "") != found[2]


def outputs_of(text: str) -> dict[str, str]:
    """A step's output file: `name=value` lines, and `name<<END` … `END` for values of several lines."""
    found, lines = {}, iter(text.splitlines())
    for line in lines:
        equals, several = line.find("="), line.find("<<")
        if equals >= 0 and not 0 <= several < equals:
            found[line[:equals]] = line[equals + 1 :]
            continue
        assert several >= 0, f"Invalid format {line!r}"
        value: list[str] = []
        while (inside := next(lines)) != line[several + 2 :]:
            value.append(inside)
        found[line[:several]] = "\n".join(value)
    return found


@dataclass
class Job:
    """What is left of a job whose only step was the action; `code` is that of the first step that failed, else 0."""

    code: int = 0
    outputs: dict[str, str] = field(default_factory=dict)
    used: dict[str, dict[str, str]] = field(default_factory=dict)
    """`uses:` steps that ran, by action without its version, with their inputs."""
    called: list[list[str]] = field(default_factory=list)
    """The arguments of each call of `python`, scripts on standard input left out."""
    summary: str = ""
    said: str = ""
    """Standard output and error of all steps."""


def run_action(
    action: Mapping[str, Any],
    workspace: Path,
    *,
    inputs: Mapping[str, str],
    ends: tuple[int, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Run the action with `inputs` in `workspace`. pip installs nothing.

    `python -m pipeline` is real, or with `ends` it only says the text to standard output and ends with the code.
    """
    runner = Path(tempfile.mkdtemp(prefix="runner temp ", dir=workspace.parent))
    _write_python(runner, ends)
    context = {f"inputs.{name}": str(one.get("default", "")) for name, one in action["inputs"].items()}
    context |= {f"inputs.{name}": value for name, value in inputs.items()}
    job = Job()
    for place, step in enumerate(action["runs"]["steps"]):
        if not holds(step.get("if"), context, succeeded=job.code == 0):
            continue
        if "uses" in step:
            given = {name: evaluated(str(value), context) for name, value in step.get("with", {}).items()}
            job.used[step["uses"].partition("@")[0]] = given
            continue
        output = runner / f"output-{place}"
        output.touch()
        own = {name: evaluated(value, context) for name, value in step.get("env", {}).items()}
        done = _run_step(
            step, workspace, runner, {**(environment or {}), **own, "GITHUB_OUTPUT": str(output)}
        )
        job.code = job.code or done.returncode
        job.said += done.stdout
        for name, value in outputs_of(output.read_text("utf-8")).items():
            context[f"steps.{step.get('id', place)}.outputs.{name}"] = value
    job.outputs = {name: evaluated(one["value"], context) for name, one in action["outputs"].items()}
    job.called = [
        call.split("\0") for call in (runner / "calls").read_text("utf-8").split(f"\0{CALL_END}\0")[:-1]
    ]
    job.summary = (runner / "summary").read_text("utf-8")
    return job


def _run_step(
    step: Mapping[str, Any], workspace: Path, runner: Path, own: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    assert step["shell"] == "bash"
    script = runner / "script.sh"
    script.write_text(step["run"], encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "RUNNER_"))},
        "PATH": f"{runner}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUNNER_TEMP": str(runner),
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(runner / "summary"),
        **own,
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
        cwd=workspace,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _write_python(runner: Path, ends: tuple[int, str] | None) -> None:
    """A `python` that notes its arguments, passes over pip, and is this interpreter for all else."""
    (runner / "calls").touch()
    (runner / "summary").touch()
    lines = ["#!/bin/bash", f"real={shlex.quote(sys.executable)}", '[ "$1" != - ] || exec "$real" "$@"']
    lines += [f"printf '%s\\0' \"$@\" {CALL_END} >> {shlex.quote(str(runner / 'calls'))}"]
    lines += ['if [ "$1 $2" = "-m pip" ]; then exit 0; fi']
    if ends is not None:
        lines += [f"printf %s {shlex.quote(ends[1])}", f"exit {ends[0]}"]
    python = runner / "python"
    python.write_text("\n".join([*lines, 'exec "$real" "$@"', ""]), encoding="utf-8")
    python.chmod(0o755)
