"""From a recipe to a promoted version to the next run that is held against it: real workers, a real registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli import main
from pipeline.results import Report
from tests.tiny_models import SHORT_SPEED, TWO_VARIANTS, write_llama

MEMORY = {"kind": "max_memory", "fraction": 0.9}
NO_REGRESSION = {"kind": "no_regression", "slower_percent": 95}
RECIPE: dict[str, Any] = {**TWO_VARIANTS, "speed": SHORT_SPEED}


def write(folder: Path, *rules: dict[str, Any]) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "gate": list(rules)}), encoding="utf-8")
    return path


@pytest.mark.slow
def test_what_ships_is_promoted_and_the_next_run_is_held_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    write_llama(tmp_path / "llama")

    def run(*rules: dict[str, Any]) -> tuple[int, dict[str, Any], Report]:
        code = main(["run", str(write(tmp_path, *rules))])
        line = json.loads(capfd.readouterr().out.splitlines()[-1])
        return code, line, Report.model_validate_json(Path(line["report"]).read_bytes())

    code, line, _ = run(MEMORY, NO_REGRESSION)
    assert (code, line["verdict"]) == (4, "error"), "nothing was promoted before"
    code, line, _ = run(MEMORY, {**NO_REGRESSION, "first": "pass"})
    assert code == 0
    first = Path(line["report"]).parent
    assert main(["promote", str(first), "int8", "--json"]) == 0
    done = json.loads(capfd.readouterr().out)
    assert (done["name"], done["version"]) == ("tiny.llama", "1")

    code, line, report = run(MEMORY, NO_REGRESSION)
    assert (code, line["verdict"]) == (0, "ship")
    assert "quantize int8" in line["reused_stages"], "a card is no change of the checkpoint"
    int8 = report.variant("int8")
    assert int8 is not None
    found = {finding.subject: finding for finding in int8.findings if finding.rule == "no_regression"}
    assert {name: one.outcome for name, one in found.items()} == {"speed": "pass", "memory": "pass"}
    assert found["memory"].observed == 1.0
    assert "int8 promoted as version 1" in found["speed"].because

    assert main(["gate", line["report"]]) == 0
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "empty"))
    assert main(["gate", line["report"]]) == 0, "another machine asks the registry"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/another.db")
    assert main(["gate", line["report"]]) == 4, (
        "without what was promoted nothing is compared, so nothing ships"
    )
