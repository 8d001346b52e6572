"""Results on disk are whole or absent, whatever happens to the process, the disk or a second run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.capacity_results import CapacityResult
from pipeline.errors import PrerequisiteError, StageError
from pipeline.model_source import source_record
from pipeline.quantizers.quanto import Quanto
from pipeline.recipe import load_recipe
from pipeline.results import FileRecord, SourceRecord
from pipeline.run_state import new_run_folder
from pipeline.stage_keys import quantize_key
from pipeline.store import JOURNAL_NAME, Store, file_sha256, write_atomically
from tests import result_builders as build
from tests.small_disks import mounted_disk

ROOT = Path(__file__).parent.parent
NOBODY = 65534


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that finds this package."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=60)
    return said.strip()


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


# --- whole or absent -------------------------------------------------------------------------------------

WRITE_WITHOUT_END = """
import json, sys
from pathlib import Path
from pipeline.store import write_atomically
print("started", flush=True)
count = 0
while True:
    count += 1
    write_atomically(Path(sys.argv[1]), json.dumps({"count": count, "text": "x" * 300_000}))
"""


def test_a_killed_writer_leaves_a_whole_file_and_nothing_a_reader_would_take_for_one(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, json.dumps({"count": 0, "text": "x" * 300_000}))
    chance = random.Random(0)
    for _ in range(5):
        with start(WRITE_WITHOUT_END, path) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(chance.uniform(0.005, 0.08))
            killed(process)
        assert len(json.loads(path.read_text("utf-8"))["text"]) == 300_000
    assert [found.name for found in tmp_path.glob("*.json*") if not found.name.startswith(".")] == [
        "result.json"
    ]


def test_a_writer_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half \ud800")
    assert path.read_text("utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_comes_back_as_it_was_put(store: Store) -> None:
    assert store.get("capacity", "k" * 64, CapacityResult) is None
    store.put("capacity", "k" * 64, build.capacity(7))
    assert store.get("capacity", "k" * 64, CapacityResult) == build.capacity(7)
    assert store.get("capacity", "j" * 64, CapacityResult) is None
    assert store.get("quality", "k" * 64, CapacityResult) is None


@pytest.mark.parametrize("spoil", ["", "{", "null", '{"context_tokens": 1}', "\x00" * 100])
def test_a_spoilt_result_counts_as_none_and_makes_room_for_a_new_one(store: Store, spoil: str) -> None:
    store.put("capacity", "k" * 64, build.capacity(7))
    store.result_path("capacity", "k" * 64).write_text(spoil, encoding="utf-8")
    assert store.get("capacity", "k" * 64, CapacityResult) is None
    store.put("capacity", "k" * 64, build.capacity(8))
    assert store.get("capacity", "k" * 64, CapacityResult) == build.capacity(8)


def test_no_changed_byte_of_a_result_is_believed(store: Store) -> None:
    store.put("capacity", "k" * 64, build.capacity(7))
    path = store.result_path("capacity", "k" * 64)
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] = ord("8") if changed[place] == ord("7") else ord("7")
        path.write_bytes(changed)
        assert store.get("capacity", "k" * 64, CapacityResult) is None, bytes(changed)
        assert not path.exists()
    path.write_bytes(whole)
    assert store.get("capacity", "k" * 64, CapacityResult) == build.capacity(7)


def test_a_result_under_another_key_is_not_believed(store: Store) -> None:
    store.put("capacity", "k" * 64, build.capacity(7))
    store.result_path("capacity", "k" * 64).rename(store.result_path("capacity", "l" * 64))
    assert store.get("capacity", "l" * 64, CapacityResult) is None


def test_a_new_folder_appears_when_it_is_finished(store: Store) -> None:
    final = store.checkpoint_folder("a" * 64)
    with store.new_folder(final) as partial:
        (partial / "model.safetensors").write_bytes(b"1")
        assert not final.exists()
    assert [file.name for file in final.iterdir()] == ["model.safetensors"]
    assert list(final.parent.iterdir()) == [final]


def interrupted_folder(store: Store, final: Path) -> None:
    with store.new_folder(final) as partial:
        (partial / "new").touch()
        raise KeyboardInterrupt


def test_a_folder_whose_making_failed_vanishes_and_the_old_one_stays(store: Store) -> None:
    final = store.checkpoint_folder("a" * 64)
    with store.new_folder(final) as partial:
        (partial / "old").touch()
    with pytest.raises(KeyboardInterrupt):
        interrupted_folder(store, final)
    assert [file.name for file in final.iterdir()] == ["old"]
    assert list(final.parent.iterdir()) == [final]


def test_what_a_killed_run_left_behind_is_cleared_away(store: Store) -> None:
    final = store.checkpoint_folder("a" * 64)
    left = final.parent / f".partial-{final.name}"
    left.mkdir(parents=True)
    (left / "half.safetensors").write_bytes(b"1")
    with store.new_folder(final) as partial:
        assert not list(partial.iterdir())
    assert not list(final.iterdir())


def stopped_folder(store: Store, final: Path) -> None:
    with store.new_folder(final) as partial:
        (partial / JOURNAL_NAME).write_text("{}", encoding="utf-8")
        (partial / "half.safetensors").write_bytes(b"1")
        raise KeyboardInterrupt


def test_a_stopped_folder_with_a_journal_is_gone_on_with_under_the_same_name_only(store: Store) -> None:
    final, other = store.checkpoint_folder("a" * 64), store.checkpoint_folder("b" * 64)
    with pytest.raises(KeyboardInterrupt):
        stopped_folder(store, final)
    assert not final.exists()
    with store.new_folder(other) as partial:
        assert not list(partial.iterdir())
    with store.lock(), store.new_folder(final) as partial:
        assert (partial / "half.safetensors").read_bytes() == b"1"
    assert sorted(final.parent.iterdir()) == [final, other]


def test_what_was_stopped_and_not_gone_on_with_for_a_week_is_cleared_away(store: Store) -> None:
    final = store.checkpoint_folder("a" * 64)
    with pytest.raises(KeyboardInterrupt):
        stopped_folder(store, final)
    left = final.parent / f".partial-{final.name}"
    with store.lock():
        assert left.exists()
    week_ago = time.time() - 8 * 24 * 3600
    os.utime(left / JOURNAL_NAME, (week_ago, week_ago))
    with store.lock():
        assert not left.exists()


# --- disks -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    with mounted_disk(tmp_path / "small", kibibytes=256) as folder:
        yield folder


def test_a_full_disk_is_an_error_that_names_the_file_and_keeps_the_old_one(small_disk: Path) -> None:
    path = small_disk / "results" / "speed" / "key.json"
    write_atomically(path, "old")
    with pytest.raises(StageError, match="the disk is full") as caught:
        write_atomically(path, "x" * 1_000_000)
    assert str(path) in str(caught.value)
    assert path.read_text("utf-8") == "old"
    assert list(path.parent.iterdir()) == [path]


def test_a_disk_that_fills_up_while_a_folder_is_made_is_an_error_that_names_it(store: Store) -> None:
    final = store.checkpoint_folder("a" * 64)
    with pytest.raises(StageError, match="the disk is full") as caught, store.new_folder(final):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(final) in str(caught.value)
    assert not final.exists()


WRITE_OVER_THE_LIMIT = """
import resource, sys
from pathlib import Path
from pipeline.errors import StageError
from pipeline.store import write_atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomically(Path(sys.argv[1]), "x" * 100_000)
except StageError as error:
    print(error)
"""


def test_a_limit_on_file_size_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    said = finished(start(WRITE_OVER_THE_LIMIT, path))
    assert said.startswith(f"{path} could not be written (File too large)")
    assert list(tmp_path.iterdir()) == []


PREPARE = """
import os, sys
from pathlib import Path
from pipeline.errors import PrerequisiteError
from pipeline.store import Store
if os.getuid() == 0:
    os.setuid(int(sys.argv[2]))
try:
    Store(Path(sys.argv[1])).prepare()
except PrerequisiteError as error:
    print(error)
"""


def test_a_root_that_can_t_be_written_is_refused_by_name() -> None:
    with tempfile.TemporaryDirectory() as name:  # everyone may enter it, unlike pytest's own folders
        root = Path(name)
        root.chmod(0o555)
        said = finished(start(PREPARE, root, NOBODY))
    assert said.startswith(f"the store {root} can't be written (Permission denied)")
    assert "PIPELINE_STORE" in said


@pytest.mark.parametrize("below", [".", "deeper/down"])
def test_a_file_in_the_root_s_place_is_refused_by_name(tmp_path: Path, below: str) -> None:
    (tmp_path / "store").write_text("a file", encoding="utf-8")
    root = tmp_path / "store" / below
    with pytest.raises(PrerequisiteError, match="can't be written") as caught:
        Store(root).prepare()
    assert str(root) in str(caught.value)


# --- two runs --------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from pipeline.errors import PrerequisiteError
from pipeline.store import Store
try:
    with Store(Path(sys.argv[1])).lock():
        print("holds", flush=True)
        sys.stdin.readline()
except PrerequisiteError as error:
    print(error)
"""


def test_a_second_run_is_refused_with_the_first_one_s_process(store: Store) -> None:
    with start(HOLD, store.root) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "holds\n"
        said = finished(start(HOLD, store.root))
        assert f"process {first.pid}" in said
        assert str(store.root) in said
        assert finished(first) == ""
    with store.lock():
        assert (store.root / "lock").read_text("ascii") == str(os.getpid())


def test_a_killed_run_s_lock_is_taken_over(store: Store) -> None:
    with start(HOLD, store.root) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "holds\n"
        killed(first)
    with store.lock():
        pass


def test_half_made_checkpoints_of_any_killed_run_are_removed_by_the_next_one(store: Store) -> None:
    finished = store.checkpoint_folder("a" * 64)
    finished.mkdir()
    half = store.root / "checkpoints" / f".partial-{'b' * 64}"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"1")
    with store.lock():
        assert list((store.root / "checkpoints").iterdir()) == [finished]


def test_half_written_reports_of_a_killed_run_are_removed_by_the_next_one(store: Store) -> None:
    run = store.root / "runs" / "20261130-000000-demo"
    run.mkdir(parents=True)
    for name, age_s in ((".partial-report.json-1-ab", 7200), (".partial-page.html-2-cd", 0)):
        (run / name).write_text("{", encoding="utf-8")
        os.utime(run / name, (time.time() - age_s,) * 2)
    (run / "stages.log").write_text("=== quality\n", encoding="utf-8")
    with store.lock():
        assert {file.name for file in run.iterdir()} == {"stages.log", ".partial-page.html-2-cd"}, (
            "one is being written"
        )


def test_an_error_inside_lets_go_of_the_lock(store: Store) -> None:
    with pytest.raises(KeyError), store.lock():
        raise KeyError
    with store.lock():
        pass


# --- content ---------------------------------------------------------------------------------------------


def test_a_file_s_digest_follows_its_content(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    first = store.file_digest(path)
    assert first == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert store.file_digest(path) == first
    path.write_bytes(b"abcd")
    assert store.file_digest(path) != first
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"abd")
    other.replace(path)
    assert store.file_digest(path) == "a52d159f262b2c6ddb724a61840befc36eb30c88877a4030b65cbe86298449c9"


def test_an_edit_that_sets_the_modification_time_back_is_seen(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    before = path.stat()
    first = store.file_digest(path)
    time.sleep(0.05)  # clocks of file systems tick every few milliseconds
    with path.open("r+b") as file:
        file.write(b"abd")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert store.file_digest(path) != first


def test_a_spoilt_memory_of_a_digest_is_made_anew(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    first = store.file_digest(path)
    (remembered,) = (store.root / "results" / "file-digests").iterdir()
    told = remembered.read_bytes()
    for spoilt in (b"half", b"", told.replace(first.encode(), first[::-1].encode())):
        remembered.write_bytes(spoilt)
        assert store.file_digest(path) == first


def test_a_digest_on_a_full_disk_is_told_and_not_remembered(small_disk: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    (small_disk / "results" / "file-digests").mkdir(parents=True)
    with (small_disk / "rest").open("wb", buffering=0) as rest, contextlib.suppress(OSError):
        while rest.write(bytes(4096)):
            pass
    assert Store(small_disk).file_digest(path) == file_sha256(path)


def source(model: str, content: str) -> SourceRecord:
    record = FileRecord(name="model.safetensors", size_bytes=3, sha256=content * 64)
    return SourceRecord(model=model, revision=None, files=(record,))


def test_models_are_told_apart_by_content_not_by_the_name_of_their_folder() -> None:
    quantizer = Quanto(weights="int8")
    one = quantize_key(source=source("/a/tiny", "1"), quantizer=quantizer)
    assert one != quantize_key(source=source("/b/tiny", "2"), quantizer=quantizer)
    assert one == quantize_key(source=source("/c/elsewhere", "1"), quantizer=quantizer)
    assert one != quantize_key(source=source("/a/tiny", "1"), quantizer=Quanto(weights="int4"))
    assert one.isalnum(), "it names a folder"


@pytest.mark.parametrize(
    "name", ["merges.txt", "vocab.bpe", "qwen.tiktoken", "tokenizer.model", "config.json"]
)
def test_every_file_that_a_checkpoint_carries_is_part_of_the_source(
    store: Store, tmp_path: Path, name: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: ./model\nprecisions: [fp16, int8]\nspeed: {}\ngate: [{kind: max_memory, fraction: 0.6}]\n"
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_text("a b")
    loaded = load_recipe(recipe)
    before = source_record(loaded, folder, store=store)
    (folder / name).write_text("a b\na c")
    assert source_record(loaded, folder, store=store) != before


def test_durations_are_remembered_and_a_spoilt_file_forgotten(store: Store) -> None:
    store.remember_duration("speed", 12.5)
    store.remember_duration("quantize int8", 3.0)
    assert store.durations_s() == {"speed": 12.5, "quantize int8": 3.0}
    for text in ("[]", "{", '{"speed": "fast"}', '{"speed": null}'):
        (store.root / "durations.json").write_text(text, encoding="utf-8")
        assert store.durations_s() == {}


# --- a run's folder --------------------------------------------------------------------------------------


def test_a_runs_folder_holds_nothing_of_a_recipes_name_that_a_path_pattern_would_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = new_run_folder(store, Path("recipes/a b\n*[?]-ü.v2.yaml"))
    assert folder.is_dir()
    assert re.fullmatch(r"\d{8}-\d{6}-a_b_____-ü\.v2", folder.name)
    again = new_run_folder(store, Path("other/a b\n*[?]-ü.v2.yaml"))
    assert again != folder
