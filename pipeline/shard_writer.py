"""One safetensors file written tensor by tensor, so that no more than one tensor is ever held.

The format wants its header first, and the header says where every tensor ends. So room is reserved for it, the
tensors are written behind, and the header goes into the room at the end, padded with spaces (which JSON and the
format allow). The file has a hidden name until it is whole and on the disk.
Format: github.com/huggingface/safetensors, "Format".

    with ShardWriter(Path("out/model.safetensors"), room_bytes=header_room(["a.weight"], parts=1)) as shard:
        shard.add("a.weight", torch.zeros(2, 3))
        record = shard.finish()
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pipeline.values import Value

if TYPE_CHECKING:
    import torch

HIDDEN_PREFIX = ".partial-"
_CHUNK_BYTES = 1_048_576
"""Summed and then written while it is still in the cache."""
_ENTRY_BYTES = 256
"""Room for one tensor's type, shape, offsets and what its name gains; its name comes on top."""
_TYPE_NAMES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
    **{"uint16": "U16", "uint32": "U32", "uint64": "U64"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"},
}


class Blocks(NamedTuple):
    """A tensor that is never whole in memory: its flattened pieces, in order, all of `dtype`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[torch.Tensor]


def whole(tensor: torch.Tensor | Blocks) -> torch.Tensor:
    """The tensor in one piece, in memory."""
    import torch

    return torch.cat(list(tensor.pieces)).reshape(tensor.shape) if isinstance(tensor, Blocks) else tensor


class ShardRecord(Value):
    """A finished file: its size, and the CRC-32 of its tensor data followed by everything before it.

    The header comes last because it is written last. This finds what a crash or a disk did to a file, at a fifth
    of the time that SHA-256 takes; who would pass off another file can write another journal.
    """

    size_bytes: int
    crc32: int


def header_room(
    names: Iterable[str], *, parts: int, metadata_bytes: int = 0, file_metadata_bytes: int = 0
) -> int:
    """Bytes that a header needs at most when each of `names` becomes `parts` tensors.

    `metadata_bytes` is what each name adds to the file's metadata, `file_metadata_bytes` what is there once.
    """
    each = [parts * (len(json.dumps(name)) + _ENTRY_BYTES) + metadata_bytes for name in names]
    return 8 * (1 + (_ENTRY_BYTES + file_metadata_bytes + sum(each)) // 8)


class ShardWriter:
    """Writes `path`. Leaving the block without `finish` removes what was written; a killed process can't."""

    def __init__(self, path: Path, *, room_bytes: int) -> None:
        self._path = path
        self._hidden = path.parent / f"{HIDDEN_PREFIX}{path.name}"
        self._room_bytes = room_bytes
        self._entries: dict[str, Any] = {}
        self._position = 0
        self._crc32 = 0
        self._file = self._hidden.open("wb", buffering=0)
        self._file.seek(8 + room_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._hidden.unlink(missing_ok=True)

    def add(self, name: str, tensor: torch.Tensor | Blocks) -> None:
        """Append one tensor, from whatever device it is on."""
        import torch

        assert name not in self._entries, name
        pieces = tensor.pieces if isinstance(tensor, Blocks) else (tensor,)
        begin = self._position
        for piece in pieces:
            plain = piece.detach().cpu().contiguous().view(-1).view(torch.uint8)
            self._position += plain.numel()
            self._write(plain.numpy().data)
        self._entries[name] = {
            "dtype": _TYPE_NAMES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [begin, self._position],
        }

    def finish(self, metadata: Mapping[str, str] | None = None) -> ShardRecord:
        """Write the header, bring everything to the disk and give the file its name.

        Raises ValueError when the header doesn't fit into its room.
        """
        header = {"__metadata__": {"format": "pt", **(metadata or {})}, **self._entries}
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > self._room_bytes:
            raise ValueError(f"{self._path}: a header of {len(text):,} bytes, room for {self._room_bytes:,}")
        text = self._room_bytes.to_bytes(8, "little") + text.ljust(self._room_bytes)
        self._file.seek(0)
        self._write(memoryview(text))
        os.fsync(self._file.fileno())
        self._file.close()
        self._hidden.replace(self._path)
        return ShardRecord(size_bytes=len(text) + self._position, crc32=self._crc32)

    def _write(self, data: memoryview) -> None:
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            self._crc32 = zlib.crc32(chunk, self._crc32)
            while chunk:
                chunk = chunk[self._file.write(chunk) :]


def is_whole(path: Path, record: ShardRecord) -> bool:
    """Whether the file still holds what was written, to the last bit."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != record.size_bytes:
            return False
        before = 8 + int.from_bytes(file.read(8), "little")
        crc32 = 0
        file.seek(before)
        while chunk := file.read(_CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
        file.seek(0)
        return zlib.crc32(file.read(min(before, record.size_bytes)), crc32) == record.crc32
    return False
