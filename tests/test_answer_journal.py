"""Answers on disk: found again, in the batches they were planned in, whatever a kill left of the last line."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.answer_journal import AnswerJournal, PathChecked, Planned, request_key
from tests.small_disks import mounted_disk

ROOT = Path(__file__).parent.parent
PLAN = Planned(task="piqa", kind="shared prefixes", requests=("a", "b", "c"), computed_tokens=40)
CHECKED = PathChecked(task="piqa", up_to_tokens=60, computed_tokens=25, noise_nats=1e-6)


def test_what_was_added_is_found_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "results" / "journal.jsonl"
    first = AnswerJournal(path)
    first.begin(PLAN)
    first.note_checked(CHECKED)
    first.add({"a": [-1.25, True], "b": [-0.1234567890123456, False]})

    second = AnswerJournal(path)
    assert second["b"] == [-0.1234567890123456, False]
    assert "c" not in second
    assert len(second) == 2
    assert second.unfinished("piqa", "shared prefixes", ["a", "b", "c", "d"]) == [PLAN]
    assert second.computed_tokens("piqa") == 40 + 25
    assert second.checked("piqa") == [CHECKED]
    assert second.checked("sciq") == []


def test_a_torn_last_line_is_dropped_and_what_follows_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = AnswerJournal(path)
    journal.add({"a": [-1.0, True]})
    journal.add({"b": [-2.0, True]})
    path.write_bytes(path.read_bytes()[:-9])

    torn = AnswerJournal(path)
    assert "a" in torn
    assert "b" not in torn
    torn.add({"c": [-3.0, False]})
    again = AnswerJournal(path)
    assert ("a" in again, "b" in again, "c" in again) == (True, False, True)


def test_a_line_that_is_no_journal_s_ends_what_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    AnswerJournal(path).add({"a": [-1.0, True]})
    with path.open("a") as file:
        file.write('{"answers": 3}\n{"answers": {"b": [-2.0, true]}}\n')
    journal = AnswerJournal(path)
    assert "a" in journal
    assert "b" not in journal


def test_a_number_that_was_changed_on_disk_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = AnswerJournal(path)
    journal.add({"a": [-1.0, True]})
    journal.add({"b": [-2.0, True]})
    path.write_text(path.read_text("utf-8").replace("-2.0", "-0.2"), "utf-8")
    changed = AnswerJournal(path)
    assert ("a" in changed, "b" in changed) == (True, False)


def test_a_plan_is_open_until_all_of_it_is_answered_and_only_for_who_asks_for_all_of_it() -> None:
    journal = AnswerJournal()
    journal.begin(PLAN)
    assert journal.unfinished("piqa", "shared prefixes", ["a", "b"]) == []
    assert journal.unfinished("sciq", "shared prefixes", ["a", "b", "c"]) == []
    assert journal.unfinished("piqa", "lm-eval", ["a", "b", "c"]) == []
    journal.add({"a": [0.0, True], "b": [0.0, True]})
    assert journal.unfinished("piqa", "shared prefixes", ["a", "b", "c"]) == [PLAN]
    journal.add({"c": [0.0, True]})
    assert journal.unfinished("piqa", "shared prefixes", ["a", "b", "c"]) == []


def test_not_a_number_comes_back_as_such(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    AnswerJournal(path).add({"a": [math.nan, False], "b": [-math.inf, False]})
    journal = AnswerJournal(path)
    assert math.isnan(journal["a"][0])
    assert journal["b"][0] == -math.inf


def test_keys_tell_ways_and_contents_apart() -> None:
    keys = {
        request_key("lm-eval", (1, 2), (3,)),
        request_key("shared prefixes", (1, 2), (3,)),
        request_key("lm-eval", (1,), (2, 3)),
    }
    assert len(keys) == 3
    assert request_key("lm-eval", (1, 2), (3,)) in keys


def test_a_full_disk_is_told_once_and_answers_go_on_in_memory(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", kibibytes=16) as disk:
        path, said = disk / "journal.jsonl", list[str]()
        journal = AnswerJournal(path, tell=said.append)
        for number in range(200):
            journal.add({f"{number}": ["some text " * 20, 3, False]})
        assert all(f"{number}" in journal for number in range(200))
        assert len(said) == 1
        assert "in memory only" in said[0]
        assert "No space left" in said[0]
        whole = AnswerJournal(path)
        assert 0 < len(whole) < 200


KEEP_UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
from pipeline.answer_journal import AnswerJournal
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
journal = AnswerJournal(Path(sys.argv[1]), tell=print)
for number in range(20):
    journal.add({f"{number}": ["some text " * 20, 3, False]})
print(len(journal))
"""


def test_a_limit_on_file_size_ends_the_file_and_not_the_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    program = [sys.executable, "-c", KEEP_UNDER_A_LIMIT, str(path)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        f"answers are kept in memory only from here on: {path}: File too large",
        "20",
    ]
    assert 0 < len(AnswerJournal(path)) < 20


def test_a_folder_that_cannot_be_made_is_no_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        AnswerJournal(tmp_path / "file" / "journal.jsonl").add({"a": [0.0, True]})
