"""The whole line, from a recipe to an exit code, on tiny models: real workers, a real store, real MLflow."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pipeline.cli import main
from pipeline.results import Report
from tests.quality_tasks import CHOICES, ROLLING, questions, write_task
from tests.tiny_models import TWO_VARIANTS, write_gpt2, write_llama
from tests.tracking_support import client

ROOT = Path(__file__).parent.parent
SPEED = {
    "batch_sizes": [1, 2],
    "prompt_tokens": [16, 32],
    "context_tokens": [24],
    "warmup": 1,
    "repeats": 3,
    "min_seconds": 0,
    "max_cv_percent": 1000,
}
TESTS = ["pp8+tg4", "pp8+tg4", "pp16", "pp32", "tg4 @ d24"]
ALL_STAGES = [
    *("quantize fp16", "quantize int8", "speed", "capacity fp16", "capacity int8"),
    *("quality fp16", "quality int8"),
]

RECIPE: dict[str, Any] = {
    **TWO_VARIANTS,
    "speed": SPEED,
    "capacity": {"context_tokens": 16, "memory_budget_bytes": 50_000_000, "max_sequences": 2},
    "quality": {
        "tasks": ["choices", "text"],
        "task_folders": ["tasks"],
        "data_folder": "tasks/data",
        "batch_size": 4,
        "limit": 12,
    },
    "gate": [
        {"kind": "max_memory", "fraction": 0.9},
        {"kind": "max_perplexity_increase", "percent": 20},
    ],
}


@dataclass(frozen=True)
class Ended:
    """A run that has ended: exit code, the JSON line, the report."""

    code: int
    line: dict[str, Any]
    report: Report
    told: str

    @property
    def reused(self) -> list[str]:
        return list(self.line["reused_stages"])


@dataclass(frozen=True)
class Workplace:
    """A folder with a model, tasks, a store and an MLflow database."""

    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PIPELINE_STORE": str(self.store),
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.folder}/mlflow.db",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hub"),
            "OMP_NUM_THREADS": "1",
        }

    def recipe(self, name: str = "tiny", **changes: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        content = {key: value for key, value in {**RECIPE, **changes}.items() if value is not None}
        path.write_text(yaml.safe_dump(content), "utf-8")
        return path

    def mlflow_status(self, run_id: str) -> str:
        reader = client(self.folder / "mlflow.db")
        return str(reader.get_run(run_id).info.status)

    def start(self, recipe: Path) -> subprocess.Popen[str]:
        """`python -m pipeline run` in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", "run", str(recipe)],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Jobs that a shell puts into the background are started with SIGINT ignored, and so are their children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("run")
    write_llama(folder / "llama")
    write_task(folder / "tasks", "choices", CHOICES, questions(16))
    texts = [{"text": f"Once upon a time there were {n} bears, and they liked honey."} for n in range(16)]
    write_task(folder / "tasks", "text", ROLLING, texts)
    return Workplace(folder)


@pytest.fixture
def run(place: Workplace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in this process."""
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)

    def ended(recipe: Path, *more: str) -> Ended:
        code = main(["run", str(recipe), *more])
        out, told = capfd.readouterr()
        return read(code, out, told)

    return ended


def read(code: int, out: str, told: str) -> Ended:
    lines = out.splitlines()
    assert lines, told
    line = json.loads(lines[-1])
    report = Report.model_validate_json(Path(line["report"]).read_bytes())
    return Ended(code, line, report, told)


@pytest.fixture
def finished(place: Workplace, run: Run) -> Ended:
    """The recipe has been run in this store; the first test that asks pays for it."""
    kept = place.folder / "first.json"
    if not kept.is_file():
        ended = run(place.recipe())
        kept.write_text(json.dumps({"code": ended.code, "line": ended.line, "told": ended.told}), "utf-8")
    told = json.loads(kept.read_text("utf-8"))
    report = Report.model_validate_json(Path(told["line"]["report"]).read_bytes())
    return Ended(told["code"], told["line"], report, told["told"])


def others(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_for_worker(process: subprocess.Popen[str], step: str) -> psutil.Process:
    """The worker of a step that has been announced on standard error."""
    assert process.stderr is not None
    for line in process.stderr:
        if step in line and "done" not in line and "reused" not in line:
            break
    else:
        pytest.fail(f"the run ended before {step}")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if workers := others(process.pid):
            return workers[0]
        time.sleep(0.02)
    pytest.fail("no worker was started")


def gone(process: psutil.Process) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


# --- a run and its repetition ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_ends_with_a_verdict_an_exit_code_and_a_complete_report(
    place: Workplace, finished: Ended
) -> None:
    assert finished.code == 0, finished.told
    assert finished.line["verdict"] == "ship"
    assert finished.line["verdicts"] == {"int8": "ship"}
    assert finished.line["reused_stages"] == []
    report = finished.report
    assert report.recipe_digest == finished.line["recipe_digest"]
    assert report.device is not None
    assert [variant.name for variant in report.variants] == ["fp16", "int8"]
    for variant in report.variants:
        assert variant.failures == ()
        assert variant.checkpoint is not None
        assert variant.speed is not None
        assert [row.name for row in variant.speed.rows] == TESTS
        assert {row.outcome for row in variant.speed.rows} == {"measured"}
        assert variant.memory is not None
        assert variant.memory.kv_cache_bytes == 11 * 128
        batch, _, prefill, _, depth = variant.speed.rows
        assert prefill.tpot_s is None
        assert prefill.bytes_read_per_step is None
        assert prefill.prefill_flops_share is not None
        assert 0 < prefill.prefill_flops_share < 1
        assert depth.bytes_read_per_step is not None
        assert batch.bytes_read_per_step is not None
        assert depth.bytes_read_per_step - batch.bytes_read_per_step == 16 * 128, "the deeper cache"
        assert variant.capacity is not None
        assert variant.capacity.measured_sequences == 2
        assert variant.quality is not None
        assert {name: task.documents for name, task in variant.quality.tasks.items()} == {
            "choices": 12,
            "text": 12,
        }
    assert place.mlflow_status(finished.line["mlflow_run_id"]) == "FINISHED"
    files = {path.name for path in Path(finished.line["report"]).parent.iterdir()}
    text = (Path(finished.line["report"]).parent / "report.md").read_text("utf-8")
    assert "| int8 | tg4 @ d24 | measured" in text
    assert files >= {"report.json", "report.md", "recipe.yaml", "resolved-recipe.json", "stages.log"}
    assert files >= {"report.html", "speed.csv", "figures.csv", "junit.xml"}
    assert (finished.line["pick"], finished.line["front"]) == ("int8", ["int8"])


def test_the_same_run_again_measures_nothing_and_says_the_same(
    place: Workplace, finished: Ended, run: Run
) -> None:
    again = run(place.recipe())
    assert again.reused == ALL_STAGES
    assert (again.code, again.line["verdicts"]) == (finished.code, finished.line["verdicts"])
    assert again.report.variants == finished.report.variants
    assert again.line["report"] != finished.line["report"]


def test_variants_that_fit_together_took_turns_and_the_baseline_tells_of_drift(finished: Ended) -> None:
    speeds = [one.speed for one in finished.report.variants]
    assert [one and one.timed_in_turn for one in speeds] == [True, True]
    assert [bool(one and one.drift_percent is not None) for one in speeds] == [True, False]


def test_another_threshold_judges_anew_without_measuring(place: Workplace, finished: Ended, run: Run) -> None:
    del finished
    strict = run(place.recipe(gate=[{"kind": "max_memory", "fraction": 0.1}]))
    assert strict.reused == ALL_STAGES
    assert (strict.code, strict.line["verdict"]) == (1, "no-ship")


def test_a_run_beside_an_earlier_one_judges_each_variant_by_its_namesake(
    place: Workplace, finished: Ended, run: Run
) -> None:
    earlier = str(Path(finished.line["report"]).parent)
    same = [{"kind": "max_memory", "fraction": 1.0}, {"kind": "max_perplexity_increase", "percent": 1}]
    beside = run(place.recipe(gate=same, prefer="smallest"), "--baseline-run", earlier)
    assert beside.reused == ALL_STAGES
    assert (beside.code, beside.line["verdicts"]) == (0, {"fp16": "ship", "int8": "ship"})
    assert beside.line["pick"] == "int8"
    assert beside.report.baseline_run is not None
    assert beside.report.baseline_run.name == Path(earlier).name


def test_another_limit_repeats_quality_only(place: Workplace, finished: Ended, run: Run) -> None:
    del finished
    shorter = run(place.recipe(quality={**RECIPE["quality"], "limit": 6}))
    assert shorter.reused == ALL_STAGES[:-2]
    for variant in shorter.report.variants:
        assert variant.quality is not None
        assert variant.quality.tasks["choices"].documents == 6


def test_damaged_results_and_checkpoints_are_made_again(place: Workplace, finished: Ended, run: Run) -> None:
    manifest = finished.report.variants[1].checkpoint_folder
    assert manifest is not None
    weights = Path(manifest) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0xFF
    weights.write_bytes(content)
    (stored, *_) = (
        path
        for path in (place.store / "results" / "capacity").glob("*.json")
        if json.loads(path.read_text("utf-8"))["value"]["weight_bytes_resident"] > 100_000
    )
    stored.write_text(stored.read_text("utf-8")[:-30], "utf-8")
    again = run(place.recipe())
    missing = {"quantize int8", "capacity fp16"}
    assert set(again.reused) == set(ALL_STAGES) - missing
    assert again.code == finished.code
    assert weights.read_bytes() != bytes(content)


def test_no_changed_figure_of_a_stored_stage_is_believed(place: Workplace, finished: Ended, run: Run) -> None:
    """Digits that leave the files readable: of a score, and of a checkpoint's stored bytes."""
    baseline = finished.report.variants[0]
    assert baseline.checkpoint_folder is not None
    assert baseline.checkpoint is not None
    manifest = Path(baseline.checkpoint_folder) / "manifest.json"
    claimed = f'"weight_bytes_on_disk": {baseline.checkpoint.weight_bytes_on_disk}'
    assert claimed in manifest.read_text("utf-8")
    manifest.write_text(manifest.read_text("utf-8").replace(claimed, claimed + "0"), "utf-8")
    for stored in (place.store / "results" / "quality").glob("*.json"):
        text = stored.read_text("utf-8")
        assert '"batch_size": 4' in text
        stored.write_text(text.replace('"batch_size": 4', '"batch_size": 5'), "utf-8")
    again = run(place.recipe())
    assert again.code == finished.code, again.told
    assert {"quantize fp16", "quality fp16", "quality int8"}.isdisjoint(again.reused)
    assert "quantize int8" in again.reused
    assert claimed in manifest.read_text("utf-8")
    assert [variant.quality for variant in again.report.variants] == [
        variant.quality for variant in finished.report.variants
    ]


def test_a_report_that_can_t_be_written_is_told_with_everything_that_was_measured(
    place: Workplace, finished: Ended
) -> None:
    limited = f"ulimit -f 8; exec {shlex.quote(sys.executable)} -m pipeline run {place.recipe()}"
    done = subprocess.run(
        ["sh", "-c", limited],
        cwd=ROOT,
        env={**os.environ, **place.environment, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    line = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, line["verdict"], line["report"]) == (4, finished.line["verdict"], None)
    assert "NO REPORT" in done.stderr
    assert "could not be written" in done.stderr
    assert "verdict: ship" in done.stderr


# --- stopped from outside --------------------------------------------------------------------------------


def test_a_killed_run_goes_on_where_it_was(place: Workplace, finished: Ended, run: Run) -> None:
    del finished
    recipe = place.recipe("killed", quality={**RECIPE["quality"], "limit": 5})
    with place.start(recipe) as process:
        worker = wait_for_worker(process, "quality fp16")
        process.kill()
        process.communicate()
    assert gone(worker)
    again = run(recipe)
    assert again.reused == ALL_STAGES[:-2]
    assert again.code == 0


@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)], ids=["INT", "TERM"])
def test_a_stopped_run_reports_what_it_has_and_leaves_nothing_running(
    place: Workplace, finished: Ended, signals: tuple[signal.Signals, ...], capfd: Any, monkeypatch: Any
) -> None:
    del finished
    limit = 2 + len(signals)
    recipe = place.recipe(f"stopped-{limit}", quality={**RECIPE["quality"], "limit": limit})
    with place.start(recipe) as process:
        worker = wait_for_worker(process, "quality fp16")
        monkeypatch.setenv("PIPELINE_STORE", str(place.store))
        assert main(["run", str(recipe)]) == 3
        assert f"another run (process {process.pid})" in capfd.readouterr().err
        for number in signals:  # the second comes while the report is written or logged
            process.send_signal(number)
            time.sleep(0.1)
        out, told = process.communicate(timeout=60)
    stopped = read(process.returncode, out, told)
    assert gone(worker)
    assert stopped.code == 130, told
    assert stopped.report.interrupted
    assert stopped.line["verdict"] == "error"
    assert stopped.reused == ALL_STAGES[:-2]
    for variant in stopped.report.variants:
        assert variant.speed is not None
        assert [(failure.stage, failure.reason) for failure in variant.failures] == [
            ("quality", "interrupted")
        ]
    if len(signals) == 1:
        assert place.mlflow_status(stopped.line["mlflow_run_id"]) == "KILLED"
    else:  # the second Ctrl-C was for MLflow
        assert stopped.line.get("tracked") is False or stopped.line["mlflow_run_id"]
    assert "Traceback" not in told


# --- variants that fail ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_random_weights_where_one_variant_fails_and_another_is_added(place: Workplace, run: Run) -> None:
    """GPT-2's blocks are no linear modules: quanto leaves them as they are, and INT8 isn't earned."""
    folder = write_gpt2(place.folder / "gpt2")
    model = {"id": "example/gpt2", "weights": "random", "config": str(folder / "config.json"), "seed": 3}
    int8 = {"name": "int8", "quantizer": {"kind": "quanto", "weights": "int8"}}
    settings: dict[str, Any] = {
        "model": model,
        "gate": [{"kind": "max_memory", "fraction": 1.5}],
        "capacity": None,
        "quality": None,
    }
    failed = run(place.recipe("gpt2", **settings, variants=[{"name": "fp16"}, int8]))
    assert (failed.code, failed.line["verdict"]) == (4, "error")
    broken = failed.report.variant("int8")
    assert broken is not None
    assert [(failure.stage, failure.reason) for failure in broken.failures] == [
        ("quantize", "failed"),
        ("speed", "skipped"),
    ]
    assert "block weights" in broken.failures[0].message
    assert any("int8: quantize failed" in reason for reason in failed.report.because)
    optional = [{"name": "fp16"}, {"name": "bf16"}, {**int8, "required": False}]
    added = run(place.recipe("gpt2", **settings, variants=optional))
    assert (added.code, added.line["verdict"]) == (0, "ship"), added.told
    assert added.line["verdicts"] == {"bf16": "ship", "int8": "error"}
    assert added.reused == ["quantize fp16"]  # the set is measured together, so speed is measured anew
    for name in ("fp16", "bf16"):
        variant = added.report.variant(name)
        assert variant is not None
        assert variant.speed is not None
        assert [row.name for row in variant.speed.rows] == TESTS
        assert {row.outcome for row in variant.speed.rows} == {"measured"}
        assert variant.quality is None
        assert variant.checkpoint is not None
        assert variant.checkpoint.weight_bytes_on_disk == 2 * 172_288
        assert variant.checkpoint.random_seed == 3
        assert variant.checkpoint_folder is not None
        stored = {path.name for path in Path(variant.checkpoint_folder).iterdir()}
        assert stored == {"config.json", "random_weights.json", "manifest.json"}
    told = (Path(added.line["report"]).parent / "report.md").read_text("utf-8")
    assert "random weights, made on the device from seed 3" in told
