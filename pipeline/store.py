"""Content-addressed results on disk: written whole or not at all, found again by what went into them.

Layout under the root (`PIPELINE_STORE`, default `.pipeline/`):

    results/STAGE/KEY.json     one stage's result, sealed; KEY is the digest of everything it depends on
    checkpoints/KEY/           a quantized checkpoint, `manifest.json` written last; `.partial-KEY` while it is made
    shapes/KEY.json            what an architecture's weights and cache look like
    runs/NAME/                 one run's report, recipe and logs
    durations.json             how long stages took, for the time left

    store = Store(Path(".pipeline"))
    store.put("capacity", key, result)
    store.get("capacity", key, CapacityResult)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import PrerequisiteError, StageError
from pipeline.values import AnyValue, Value

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What only a write is answered."""
REFUSED = (*FULL, errno.EACCES, errno.EPERM, errno.EIO)
"""What a disk, its quota or its owner answers to a write: the user's to mend, not a bug."""

JOURNAL_NAME = ".journal.json"
"""A file that says how far the making of a folder has come; with it a stopped one can be gone on with."""
_UNFINISHED_KEPT_S = 7 * 24 * 3600.0
_WRITING_S = 3600.0
"""`gate` and `compare` write a page into a run's folder without the lock, and take seconds."""


@dataclass(frozen=True)
class Store:
    """A folder of results; building it touches nothing."""

    root: Path

    def prepare(self) -> None:
        """Make the folders. Raises PrerequisiteError when the root can't be written."""
        try:
            for name in ("results", "checkpoints", "runs"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise PrerequisiteError(
                f"the store {self.root} can't be written ({error.strerror}); "
                "free it, or name another folder in PIPELINE_STORE"
            ) from None

    def place(self) -> Path:
        """The root, or what there is of the path to it: where its bytes will go."""
        return next(place for place in (self.root, *self.root.parents) if place.exists())

    def result_path(self, stage: str, key: str) -> Path:
        """Where the result of `stage` with this key stands or will stand."""
        return self.root / "results" / stage / f"{key}.json"

    def get(self, stage: str, key: str, kind: type[AnyValue]) -> AnyValue | None:
        """The stored result, or None when there is none or it can't be read any more (it is then removed)."""
        path = self.result_path(stage, key)
        try:
            return read_sealed(path, kind)
        except OSError:
            return None
        except ValueError:
            with contextlib.suppress(OSError):  # of a store that can be read only
                path.unlink()
            return None

    def put(self, stage: str, key: str, value: Value) -> None:
        """Keep a result; readers see the whole of it or nothing."""
        write_sealed(self.result_path(stage, key), value)

    def answers_path(self, key: str) -> Path:
        """Where an evaluation under way keeps its answers."""
        return self.root / "answers" / f"{key}.jsonl"

    def distribution_folder(self, key: str) -> Path:
        """Folder of a baseline's distribution of a text."""
        return self.root / "distributions" / key

    def checkpoint_folder(self, key: str) -> Path:
        """Folder of a finished checkpoint."""
        return self.root / "checkpoints" / key

    @contextlib.contextmanager
    def new_folder(self, final: Path) -> Iterator[Path]:
        """A folder that becomes `final` when the block ends well.

        When it doesn't, the folder vanishes, unless a journal lies in it: then it is what the next call for
        `final` yields. Without one the folder is empty.
        """
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.parent / f".partial-{final.name}"
        _remove_without_journal(partial)
        partial.mkdir(exist_ok=(partial / JOURNAL_NAME).is_file())
        try:
            yield partial
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        except OSError as error:
            if error.errno in REFUSED:
                raise _not_written(final, error) from error
            raise
        finally:
            _remove_without_journal(partial)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the store for one run; the kernel lets go of it when the process dies, however it dies.

        Two runs at once would also spoil each other's timings. Raises PrerequisiteError naming the holder.
        """
        path = self.root / "lock"
        with path.open("a+", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise PrerequisiteError(
                    f"another run (process {file.read().strip() or 'unknown'}) uses the store {self.root}; "
                    "wait for it, or name another folder in PIPELINE_STORE"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            self._remove_unfinished()
            yield

    def _remove_unfinished(self) -> None:
        """Folders that a killed run left half written: tens of gigabytes that nothing may ever take up.

        One with a journal is kept for the run that goes on with it, for a week.
        """
        for partial in (self.root / "results").glob("*/.partial-*"):
            with contextlib.suppress(OSError):
                partial.unlink()
        for partial in (self.root / "runs").glob("*/.partial-*"):
            with contextlib.suppress(OSError):
                if time.time() - partial.stat().st_mtime >= _WRITING_S:
                    partial.unlink()
        for partial in (self.root / "checkpoints").glob(".partial-*"):
            with contextlib.suppress(OSError):
                if time.time() - (partial / JOURNAL_NAME).stat().st_mtime < _UNFINISHED_KEPT_S:
                    continue
            shutil.rmtree(partial, ignore_errors=True)
        for partial in (self.root / "distributions").glob(".partial-*"):
            shutil.rmtree(partial, ignore_errors=True)
        for answers in (self.root / "answers").glob("*.jsonl"):
            with contextlib.suppress(OSError):
                if time.time() - answers.stat().st_mtime >= _UNFINISHED_KEPT_S:
                    answers.unlink()

    def file_digest(self, path: Path) -> str:
        """SHA-256 of a file, remembered by path, size, inode and times.

        The time of the last change of state is among them because tools that copy or edit set the
        modification time back.
        """
        stat = path.stat()
        times = f"{stat.st_mtime_ns}|{stat.st_ctime_ns}"
        identity = f"{path.resolve()}|{stat.st_size}|{times}|{stat.st_ino}"
        name = hashlib.sha256(identity.encode()).hexdigest()
        remembered = self.root / "results" / "file-digests" / name
        with contextlib.suppress(OSError, ValueError):
            return read_sealed(remembered, _Digest).sha256
        found = file_sha256(path)
        with contextlib.suppress(StageError):  # a full disk costs the memory of it, not the digest
            write_sealed(remembered, _Digest(sha256=found))
        return found

    # --- durations, for the time left --------------------------------------------------------------------

    def durations_s(self) -> dict[str, float]:
        """Last duration of each kind of stage."""
        try:
            found = json.loads((self.root / "durations.json").read_text("utf-8"))
            return {str(name): float(seconds) for name, seconds in found.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def remember_duration(self, name: str, seconds: float) -> None:
        """Keep how long a stage took."""
        write_atomically(self.root / "durations.json", json.dumps({**self.durations_s(), name: seconds}))


class _Digest(Value):
    sha256: str


def _remove_without_journal(folder: Path) -> None:
    if not (folder / JOURNAL_NAME).is_file():
        shutil.rmtree(folder, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_SEALED = b'{"sha256": "%b", "value": %b}\n'


def write_sealed(path: Path, value: Value) -> None:
    """A value, whole or not at all, with the SHA-256 of its JSON and its file's name: no changed digit is believed.

    Raises StageError as `write_atomically` does.
    """
    body = value.to_json().encode()
    write_atomically(path, (_SEALED % (_seal(path, body), body)).decode())


def read_sealed(path: Path, kind: type[AnyValue]) -> AnyValue:
    """What `write_sealed` wrote there. Raises OSError, or ValueError for a file that it didn't write as it is now."""
    content = path.read_bytes()
    empty = len(_SEALED % (bytes(64), b""))
    body = content[empty - 2 : -2]
    if content != _SEALED % (_seal(path, body), body):
        raise ValueError(f"{path}: changed since it was written")
    return kind.model_validate_json(body)


def _seal(path: Path, body: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\n" + body).hexdigest().encode()


def write_atomically(path: Path, text: str) -> None:
    """Temporary file in the same folder, flush to disk, rename: a crash leaves the old file or the new one.

    Raises StageError naming the path when the disk is full or doesn't let it be written.
    """
    partial = path.parent / f".partial-{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno in REFUSED:
            raise _not_written(path, error) from error
        raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def telling_of_full_disk(folder: Path) -> Iterator[None]:
    """A StageError with the fix for what a full disk answers to libraries that write into the folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise _not_written(Path(error.filename or folder), error) from error


def _not_written(path: Path, error: OSError) -> StageError:
    full = "the disk is full: " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return StageError(
        f"{full}{path} could not be written ({error.strerror}); "
        "free space, or name another folder in PIPELINE_STORE"
    )
