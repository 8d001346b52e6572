"""`plan` at the command line: where its page may go, whose price it takes, streams that know fewer letters."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.data_sheet import DATA_SHEET
from pipeline.plan_values import Plan
from tests.tiny_models import write_llama

ROOT = Path(__file__).parent.parent
RECIPE = """\
model: ./tiny
precisions: [fp16, int8]
hardware: l4
workload: {prompt_tokens: 40, new_tokens: 10}
capacity: {context_tokens: 64}
cost: {dollars_per_hour: 2.5}
speed: {batch_sizes: [1]}
gate: [{kind: max_memory, fraction: 0.9}]
"""

Planned = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def recipe(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPELINE_STORE", str(model.parent / "store"))
    (tmp_path / "tiny").symlink_to(model)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Planned:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["plan", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


# --- the page --------------------------------------------------------------------------------------------


def test_the_page_is_written_where_it_is_asked_for(recipe: Path, planned: Planned, tmp_path: Path) -> None:
    page = tmp_path / "new" / "plan.html"
    code, out, err = planned(recipe, "--html", page)
    assert code == 0
    assert f"page: {page}" in err
    assert page.read_text("utf-8").lstrip().startswith("<!DOCTYPE html>")
    assert "tiny on l4" in out


def test_a_link_is_followed_not_replaced(recipe: Path, planned: Planned, tmp_path: Path) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    assert planned(recipe, "--html", link)[0] == 0
    assert link.is_symlink()
    assert "l4" in target.read_text("utf-8")


@pytest.mark.parametrize("place", ["folder", "fifo", "below a file", "", "a" * 300])
def test_a_page_is_written_over_nothing_but_a_file(
    place: str, recipe: Path, planned: Planned, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("a file", encoding="utf-8")
    page = tmp_path / "file" / "plan.html" if place == "below a file" else tmp_path / place
    code, out, err = planned(recipe, "--html", page if place else "")
    assert (code, out) == (2, "")
    assert err.startswith("pipeline: --html ")
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert (tmp_path / "folder").is_dir()


def test_a_plotting_backend_of_a_notebook_does_not_matter(recipe: Path, tmp_path: Path) -> None:
    done = run(recipe, "--html", tmp_path / "plan.html", MPLBACKEND="module://no_such_backend")
    assert done.returncode == 0, done.stderr


# --- hardware and price ----------------------------------------------------------------------------------


def hardware(planned: Planned, *arguments: object) -> Any:
    code, out, _ = planned(*arguments, "--json")
    assert code == 0
    return Plan.model_validate_json(out).hardware


def test_the_recipe_s_price_is_that_of_its_own_hardware(recipe: Path, planned: Planned) -> None:
    assert hardware(planned, recipe).dollars_per_hour == 2.5
    assert hardware(planned, recipe, "--hardware", "l4").dollars_per_hour == 2.5
    other = hardware(planned, recipe, "--hardware", "h200-sxm")
    assert other.dollars_per_hour == DATA_SHEET["h200-sxm"].dollars_per_hour
    assert other.price_source == DATA_SHEET["h200-sxm"].price_source
    assert hardware(planned, recipe, "--hardware", "m2-ultra-192gb").dollars_per_hour is None


def test_an_empty_hardware_flag_is_no_device(recipe: Path, planned: Planned) -> None:
    code, out, err = planned(recipe, "--hardware", "")
    assert (code, out) == (2, "")
    assert "hardware '' is unknown" in err


def test_a_budget_is_never_more_than_the_device_has(recipe: Path, planned: Planned) -> None:
    text = RECIPE.replace("context_tokens: 64", "context_tokens: 64, memory_budget_bytes: 72_000_000_000")
    recipe.write_text(text, encoding="utf-8")
    code, out, _ = planned(recipe, "--json")
    assert code == 0
    found = Plan.model_validate_json(out)
    assert found.budget_bytes == 24_000_000_000
    assert any("more than the device has" in note for note in found.notes)


def test_a_mac_keeps_a_quarter_of_its_memory(recipe: Path, planned: Planned) -> None:
    _, out, _ = planned(recipe, "--json", "--hardware", "m2-ultra-192gb")
    assert Plan.model_validate_json(out).budget_bytes == int(0.75 * 192e9)


def test_a_workload_longer_than_the_counted_context_is_noted(recipe: Path, planned: Planned) -> None:
    recipe.write_text(RECIPE.replace("prompt_tokens: 40", "prompt_tokens: 60"), encoding="utf-8")
    code, out, _ = planned(recipe)
    assert code == 0
    assert "sequences of 70 tokens are longer than capacity.context_tokens (64)" in out


# --- streams ---------------------------------------------------------------------------------------------


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-m", "pipeline", "plan", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_terminal_that_knows_ascii_only_gets_question_marks(recipe: Path) -> None:
    done = run(recipe, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "TPOT ?" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_said(recipe: Path) -> None:
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "plan", str(recipe)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 4
    assert "pipeline: <stdout> can't be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
