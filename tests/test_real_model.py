"""The line on a real language model: SmolLM2-135M-Instruct and real evaluation data, fetched by `make assets`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.results import Report

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".assets" / "models" / "smollm2-135m-instruct"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="the demo's model is not here: run `make assets`"),
]

RECIPE = f"""
model: {MODEL}
variants:
  - {{name: fp16}}
  - {{name: int8, quantizer: {{kind: quanto, weights: int8}}}}
workload: {{prompt_tokens: 16, new_tokens: 8}}
speed: {{engine: {{kind: transformers, compute_dtype: bfloat16}}, warmup: 1, repeats: 3, min_seconds: 0}}
quality:
  tasks: [piqa_local, boolq_passages]
  task_folders: [{ROOT / "evals"}]
  data_folder: {ROOT / ".assets" / "evals"}
  limit: 50
  limits: {{boolq_passages: 8}}
  batch_size: 4
gate:
  - {{kind: max_memory, fraction: 0.7}}
  - {{kind: max_perplexity_increase, percent: 5}}
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("real")
    (folder / "real.yaml").write_text(RECIPE)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PIPELINE_STORE": str(folder / "store"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
    }
    del environment["OMP_NUM_THREADS"]  # unlike the tiny models, this one is worth all cores
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "run", "real.yaml"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["verdict"] == "ship"
    return Report.model_validate_json(Path(line["report"]).read_bytes())


def test_the_baseline_scores_what_the_harness_gives_for_this_model(report: Report) -> None:
    baseline = report.variant("fp16")
    assert baseline is not None
    assert baseline.quality is not None
    # First 50 documents of PIQA's validation split, 0-shot, measured with stock lm-eval 0.4.13.
    assert baseline.quality.tasks["piqa_local"].metrics["acc"].score == pytest.approx(0.68)


def test_int8_holds_what_its_label_says(report: Report) -> None:
    baseline, int8 = report.variant("fp16"), report.variant("int8")
    assert baseline is not None
    assert int8 is not None
    assert baseline.checkpoint is not None
    assert int8.checkpoint is not None
    # 28.3 M embedding weights (tied to the head) and the norms stay in 16 bits, 106.2 M are 8-bit with a
    # 16-bit scale for each output row.
    assert baseline.checkpoint.parameters == 134_515_008
    assert int8.checkpoint.coverage.share == 1.0
    assert int8.checkpoint.weight_bytes_on_disk == pytest.approx(0.6065 * 269_030_016, rel=1e-3)


def test_decoding_stays_under_the_roof(report: Report) -> None:
    for variant in report.variants:
        assert variant.speed is not None
        row = variant.speed.row(1)
        assert row is not None
        assert row.outcome == "measured"
        assert row.bandwidth_share is not None
        assert 0 < row.bandwidth_share <= 1.05
