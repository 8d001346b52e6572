"""What a browser shows of the dashboard: the pages that it is opened at, and the charts that people see there first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline.tracking_server import dashboard
from tests.browser import Page, browser_program, opened_browser
from tests.mlflow_process import free_port
from tests.tracking_support import full_report, log, runs

PATIENCE_S = 60


def text_of(page: Page, *wanted: str) -> str:
    """The page's text once it holds all words of `wanted`: MLflow draws its pages bit by bit."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        text = str(page.evaluate("document.body.innerText"))
        if all(word in text for word in wanted):
            return text
        assert time.monotonic() < deadline, f"not all of {wanted} in: {text}"
        time.sleep(0.3)


@pytest.mark.slow
def test_comparison_runs_and_charts_show_the_variants_and_figures_by_batch_size(tmp_path: Path) -> None:
    browser_program()
    database = tmp_path / "mlflow.db"
    assert log(full_report(), database, run_folder=tmp_path / "none", note="# error: tiny").tracked
    (int8,) = (run for run in runs(database) if run.info.run_name == "int8")
    with (
        dashboard(tracking_uri=f"sqlite:///{database}", port=free_port()) as served,
        opened_browser() as browser,
    ):
        assert served.comparison is not None
        assert served.runs is not None
        compared = text_of(
            browser.open(served.comparison, width=1400), "Comparing 3 Runs", "fp16", "int8", "int4"
        )
        assert "checkpoint.bits_per_weight" in compared
        table = text_of(browser.open(served.runs, width=1400), "matching run", "tiny")
        assert "Model registry" in table, "the pages for runs with metrics, not those for traces"
        page, _, query = served.runs.partition("?")
        charts = browser.open(f"{page}/{int8.info.run_id}/model-metrics?{query}", width=1400, height=2500)
        text_of(charts, "Auto-refresh", "checkpoint.bits_per_weight")
        charts.evaluate("document.querySelector('input[placeholder=\"Search metric charts\"]').focus()")
        charts.ask("Input.insertText", {"text": "decode_tokens_per_s"})
        text_of(charts, "speed.batch_8.decode_tokens_per_s", "speed.decode_tokens_per_s", "Step")
        parent = browser.open(f"{page}/{served.run_id}?{query}", width=1400)
        text_of(parent, "error: tiny", "Child runs", "int8", "int4")
