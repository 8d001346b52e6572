"""The baseline's distribution of a text on disk, written once and read in blocks of positions.

A folder of three files: `codes.bin` (uint16 [positions, vocabulary], see `distribution`), `positions.npy` (a row for
each position: floor and step of its codes, the text token's log-probability, the likeliest tokens, a checksum) and
`reference.json`, which says what it all is. Whoever writes it gives a folder that isn't in its place yet; nothing that
doesn't match its description or a checksum is used.

    writer = ReferenceWriter(folder, reference)
    writer.add(encode(block)); writer.close()
    for rows in blocks: open_reference(folder, key=key).rows(start, stop)
"""

from __future__ import annotations

import zlib
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.distribution import TOP, CodedBlock
from pipeline.errors import StageError
from pipeline.store import file_sha256
from pipeline.values import Value

if TYPE_CHECKING:
    import numpy as np

_CODES, _POSITIONS, _DESCRIPTION = "codes.bin", "positions.npy", "reference.json"


class Reference(Value):
    """What a reference folder holds. `key` stands for checkpoint, text and settings together."""

    format_version: int = 1
    key: str
    positions: int
    vocabulary_tokens: int
    positions_sha256: str = ""


def reference_bytes(*, positions: int, vocabulary_tokens: int) -> int:
    """Bytes on disk, but for a few hundred."""
    return positions * (2 * vocabulary_tokens + _row_type(vocabulary_tokens).itemsize)


def _row_type(vocabulary_tokens: int) -> np.dtype[Any]:
    import numpy as np

    top = min(TOP, vocabulary_tokens)
    fields = [
        ("floor", "<f4"),
        ("step", "<f4"),
        ("target_log_prob", "<f4"),
        ("top", "<i8", (top,)),
        ("crc32", "<u4"),
    ]
    return np.dtype(fields)


class ReferenceWriter:
    """Appends blocks of positions in order; `close` writes what makes the folder valid."""

    def __init__(self, folder: Path, reference: Reference) -> None:
        self._folder, self._reference = folder, reference
        self._codes = (folder / _CODES).open("wb")
        self._rows: list[Any] = []

    def __enter__(self) -> ReferenceWriter:
        """The writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file of codes; without `close` the folder stays invalid."""
        self._codes.close()

    def add(self, block: CodedBlock) -> None:
        """The next positions."""
        import numpy as np

        codes = np.ascontiguousarray(block.codes, dtype="<u2")
        rows = np.zeros(len(codes), dtype=_row_type(codes.shape[1]))
        for name in ("floor", "step", "target_log_prob", "top"):
            rows[name] = getattr(block, name)
        rows["crc32"] = [zlib.crc32(row.data) for row in codes]
        self._codes.write(codes.data)
        self._rows.append(rows)

    def close(self) -> None:
        """Finish the folder; all positions must have come."""
        import os

        import numpy as np

        rows = np.concatenate(self._rows)
        assert len(rows) == self._reference.positions, "not all positions were added"
        self._codes.flush()
        os.fsync(self._codes.fileno())
        np.save(self._folder / _POSITIONS, rows, allow_pickle=False)
        described = self._reference.model_copy(
            update={"positions_sha256": file_sha256(self._folder / _POSITIONS)}
        )
        (self._folder / _DESCRIPTION).write_text(described.to_json(), "utf-8")


class ReferenceReader:
    """A reference folder that has passed its checks; `rows` hands out blocks, each checked again."""

    def __init__(self, folder: Path, *, key: str) -> None:
        """Raises StageError for a folder that isn't there, isn't whole or belongs to something else."""
        import numpy as np

        try:
            self.reference = Reference.model_validate_json((folder / _DESCRIPTION).read_bytes())
            size = (folder / _CODES).stat().st_size
            positions_sha256 = file_sha256(folder / _POSITIONS)
        except (OSError, ValidationError) as error:
            raise _unusable(folder, f"{type(error).__name__}") from None
        about = self.reference
        if about.key != key or about.format_version != 1:
            raise _unusable(folder, "it was made of something else")
        if (
            positions_sha256 != about.positions_sha256
            or size != 2 * about.positions * about.vocabulary_tokens
        ):
            raise _unusable(folder, "it isn't whole")
        self._folder = folder
        self._rows = np.load(folder / _POSITIONS, allow_pickle=False)
        shape = (about.positions, about.vocabulary_tokens)
        self._codes = np.memmap(folder / _CODES, dtype="<u2", mode="r", shape=shape)

    def rows(self, start: int, stop: int) -> CodedBlock:
        """Positions from `start` to before `stop`. Raises StageError when a checksum doesn't hold."""
        import numpy as np

        rows, codes = self._rows[start:stop], np.asarray(self._codes[start:stop])
        if any(zlib.crc32(row.data) != crc for row, crc in zip(codes, rows["crc32"].tolist(), strict=True)):
            raise _unusable(self._folder, f"a checksum of positions {start} to {stop} doesn't hold")
        return CodedBlock(
            codes=codes,
            floor=rows["floor"],
            step=rows["step"],
            target_log_prob=rows["target_log_prob"],
            top=rows["top"],
        )


def is_intact(folder: Path, *, key: str) -> bool:
    """Whether the folder holds what `key` stands for, every byte of it."""
    try:
        reader = ReferenceReader(folder, key=key)
        for start in range(reader.reference.positions):
            reader.rows(start, start + 1)
    except StageError:
        return False
    return True


def _unusable(folder: Path, reason: str) -> StageError:
    return StageError(
        f"the baseline's distribution in {folder} can't be used ({reason}); remove the folder and run again, it is "
        "then made again"
    )
