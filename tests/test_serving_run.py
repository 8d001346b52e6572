"""Serving in the whole line: from a recipe through workers and the store to report, serving.csv and MLflow."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli import main
from pipeline.results import Report
from tests.tiny_models import write_llama
from tests.tracking_support import client

RECIPE: dict[str, Any] = {
    "model": "./llama",
    "variants": [
        {"name": "fp16"},
        {"name": "fp32"},
        {"name": "lost", "quantizer": {"kind": "quanto", "weights": "int8"}, "required": False},
    ],
    "workload": {"prompt_tokens": 8, "new_tokens": 4},
    "speed": {"warmup": 1, "repeats": 3, "min_seconds": 0, "max_cv_percent": 1000},
    "serving": {"concurrency": [1, 2], "requests": 4, "prefix_tokens": 32, "max_cv_percent": 1000},
    "traffic": {
        "requests_per_s": 100,
        "prompt_tokens": {"distribution": "uniform", "low": 4, "high": 20},
        "new_tokens": {"distribution": "uniform", "low": 1, "high": 6},
        "targets": {"ttft_s": 100},
        "max_sequences": 2,
        "max_batch_tokens": 16,
    },
    "cost": {"dollars_per_hour": 1.0},
    "gate": [{"kind": "max_memory", "fraction": 3}],
}


def ran(folder: Path, capfd: pytest.CaptureFixture[str], **changes: Any) -> tuple[dict[str, Any], Report]:
    """`run` in this process: its last line and its report."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **changes}), "utf-8")
    main(["run", str(path)])
    out, told = capfd.readouterr()
    assert out, told
    line = json.loads(out.splitlines()[-1])
    return line, Report.model_validate_json(Path(line["report"]).read_bytes())


@pytest.mark.slow
def test_a_run_serves_every_variant_stores_the_result_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_llama(tmp_path / "llama")
    line, report = ran(tmp_path, capfd)
    assert [variant.failures for variant in report.variants] == [(), (), ()]
    for variant in report.variants:
        assert variant.serving is not None
        assert [(row.mode, row.load, row.concurrency) for row in variant.serving.rows] == [
            *(("static", "closed", 1), ("continuous", "closed", 1)),
            *(("static", "closed", 2), ("continuous", "closed", 2)),
            ("continuous", "open", 2),
        ]
        assert {row.outcome for row in variant.serving.rows} == {"measured"}
        assert variant.serving.prefix is not None
        assert variant.serving.prefix.outcome == "measured"
        assert variant.serving.step_times is not None
        assert variant.cost is not None
        assert len(variant.cost.serving) == 5
        opened = variant.serving.rows[-1]
        assert opened.goodput is not None
        assert opened.goodput.share == 1.0
    folder = Path(line["report"]).parent
    with (folder / "serving.csv").open(encoding="utf-8", newline="") as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == 15
    asked = sum(one["new_tokens"] for one in _requests(tmp_path))
    assert {int(row["total_output_tokens"]) for row in cells} == {asked}
    assert "## Serving" in (folder / "report.md").read_text("utf-8")
    reader = client(tmp_path / "mlflow.db")
    artifacts = {found.path for found in reader.list_artifacts(line["mlflow_run_id"])}
    assert "serving.csv" in artifacts

    again, repeated = ran(tmp_path, capfd)
    assert "serving" in again["reused_stages"]
    assert repeated.variants == report.variants
    cheaper, priced = ran(tmp_path, capfd, cost={"dollars_per_hour": 0.5})
    assert "serving" in cheaper["reused_stages"], "the price is no part of what was measured"
    first, second = report.variants[0].cost, priced.variants[0].cost
    assert first is not None
    assert second is not None
    assert second.serving[0].dollars_per_million_output_tokens == pytest.approx(
        first.serving[0].dollars_per_million_output_tokens / 2
    )


def _requests(folder: Path) -> list[dict[str, Any]]:
    """What the stage kept of the requests that it served."""
    (stored,) = (folder / "store" / "results" / "serving").glob("*.json")
    found: list[dict[str, Any]] = json.loads(stored.read_text("utf-8"))["value"]["requests"]
    return found
