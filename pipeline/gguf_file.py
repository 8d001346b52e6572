"""What lies in a GGUF file, read from its header alone and without the `gguf` package.

One file holds a model for llama.cpp: metadata (architecture, sizes, the tokenizer), the tensors' names, types and
shapes, and their data. As with safetensors nothing is believed before it was held against the file's real size: a
count of 2^60 strings or an offset past the end is a refusal, not an allocation.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md; block sizes: ggml-common.h of the same project.

    header = read_gguf(Path("model.gguf"))
    print(header.metadata["general.architecture"], header.tensors["token_embd.weight"].dtype)

>>> stored_bytes("Q4_0", 4096)
2304
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pipeline.errors import CheckpointError
from pipeline.tensorfile import TensorInfo

GGUF_NAME = "model.gguf"
"""The file in a checkpoint's folder."""
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 1 << 28
"""The largest vocabularies with their merges take some tens of megabytes."""
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT_BYTES = 32
MAX_ALIGNMENT_BYTES = 1 << 20


class BlockType(NamedTuple):
    """A ggml type: `weights` lie together in `size_bytes`, scales and minima of them all included.

    `group_weights` share the smallest scale, which in the K types are fewer than a block's.
    """

    weights: int
    size_bytes: int
    scale_bytes: int = 0
    minimum_bytes: int = 0
    group_weights: int = 32


BLOCK_TYPES = {
    "F32": BlockType(1, 4),
    "F16": BlockType(1, 2),
    "BF16": BlockType(1, 2),
    "F64": BlockType(1, 8),
    "I8": BlockType(1, 1),
    "I16": BlockType(1, 2),
    "I32": BlockType(1, 4),
    "I64": BlockType(1, 8),
    "Q4_0": BlockType(32, 18, 2),
    "Q4_1": BlockType(32, 20, 2, 2),
    "Q5_0": BlockType(32, 22, 2),
    "Q5_1": BlockType(32, 24, 2, 2),
    "Q8_0": BlockType(32, 34, 2),
    "Q2_K": BlockType(256, 84, 10, 10, 16),
    "Q3_K": BlockType(256, 110, 14, 0, 16),
    "Q4_K": BlockType(256, 144, 8, 8),
    "Q5_K": BlockType(256, 176, 8, 8),
    "Q6_K": BlockType(256, 210, 18, 0, 16),
    "IQ4_NL": BlockType(32, 18, 2),
    "IQ4_XS": BlockType(256, 136, 8),
}
"""The types that are written or met here, by ggml's name. A K type's scales are its small ones and the large one."""
_TYPE_NAMES = {
    **{0: "F32", 1: "F16", 30: "BF16", 28: "F64", 24: "I8", 25: "I16", 26: "I32", 27: "I64"},
    **{2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS"},
}
TYPE_NUMBERS = {name: number for number, name in _TYPE_NAMES.items()}
"""ggml's own numbers (`enum ggml_type`)."""
FILE_TYPES = {
    **{"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q5_1": 9, "Q5_0": 8, "Q4_1": 3, "Q4_0": 2},
    **{"Q6_K": 18, "Q5_K_M": 17, "Q5_K_S": 16, "Q4_K_M": 15, "Q4_K_S": 14},
}
"""`general.file_type` by what most of a file's weights are (`enum llama_ftype` of llama.h)."""

_STRING, _ARRAY = 8, 9
_NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters of the metadata types."""


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file without its data; shapes are in the order of the model's own matrices, rows first.

    That is the reverse of the file's.
    """

    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture; empty where the file says none."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def tokens(self) -> tuple[str, ...] | None:
        """The tokenizer's tokens by id; None where the file holds no tokenizer."""
        found = self.metadata.get("tokenizer.ggml.tokens")
        return found if isinstance(found, tuple) else None


def stored_bytes(type_name: str, elements: int) -> int:
    """Bytes of `elements` weights of whole blocks of a ggml type."""
    block = BLOCK_TYPES[type_name]
    return elements // block.weights * block.size_bytes


def read_gguf(path: Path) -> GgufHeader:
    """The header of a GGUF file. Raises CheckpointError when it isn't one, is damaged, or is truncated."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        cursor = _Cursor(path=path, file=file, size_bytes=size_bytes)
        version, tensor_count, pair_count = _start(cursor)
        metadata = _metadata(cursor, pair_count)
        entries = [_entry(cursor) for _ in range(tensor_count)]
        end_of_header = file.tell()
    alignment = _alignment(path, metadata)
    return _with_layout(
        path,
        version=version,
        metadata=metadata,
        entries=entries,
        data_start=_padded(end_of_header, alignment),
        alignment=alignment,
        size_bytes=size_bytes,
    )


@dataclass
class _Cursor:
    """Reads forward through a header and never past the file's end."""

    path: Path
    file: BinaryIO
    size_bytes: int

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: damaged GGUF header at byte {self.file.tell():,}: {what}. Fetch or write the file again."
        )

    def take(self, count: int) -> bytes:
        left = min(self.size_bytes, MAX_HEADER_BYTES) - self.file.tell()
        if count > left:
            raise self.damaged(f"{count:,} more bytes are announced, the file has {max(0, left):,}")
        found = self.file.read(count)
        if len(found) < count:
            raise self.damaged("the file ends here")
        return found

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}")))

    def whole(self, code: str) -> int:
        return int(self.numbers(code)[0])

    def string(self) -> str:
        text = self.take(self.whole("Q"))
        # Some vocabularies hold tokens that are pieces of characters.
        return text.decode("utf-8", errors="surrogateescape")

    def value(self) -> Any:
        kind = self.whole("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _NUMBER_CODES:
            raise self.damaged(f"metadata of the unknown type {kind}")
        return self.numbers(_NUMBER_CODES[kind])[0]

    def array(self) -> tuple[Any, ...]:
        kind, count = self.whole("I"), self.whole("Q")
        if kind == _STRING:
            if count * 8 > self.size_bytes:
                raise self.damaged(f"an array of {count:,} strings in a file of {self.size_bytes:,} bytes")
            return tuple(self.string() for _ in range(count))
        if kind not in _NUMBER_CODES:
            raise self.damaged(f"an array of the unknown type {kind}")
        return self.numbers(_NUMBER_CODES[kind], count)


class _Entry(NamedTuple):
    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int


def _start(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata pairs."""
    magic = cursor.file.read(len(MAGIC))
    if magic != MAGIC:
        raise CheckpointError(f"{cursor.path}: not a GGUF file (it begins with {magic!r}, not {MAGIC!r})")
    version = cursor.whole("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
        reason = "it is big-endian" if swapped in VERSIONS else f"version {version}"
        raise CheckpointError(
            f"{cursor.path}: a GGUF file that isn't read here: {reason} (little-endian of version "
            f"{' or '.join(map(str, VERSIONS))} is). Convert the original model again."
        )
    tensors, pairs = cursor.whole("Q"), cursor.whole("Q")
    # An entry takes more than 8 bytes whatever is in it.
    if (tensors + pairs) * 8 > cursor.size_bytes:
        raise cursor.damaged(f"{tensors:,} tensors and {pairs:,} metadata entries can't be in this file")
    return version, tensors, pairs


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in found:
            raise cursor.damaged(f"the metadata key {key!r} occurs twice")
        found[key] = cursor.value()
    return found


def _entry(cursor: _Cursor) -> _Entry:
    name, dimensions = cursor.string(), cursor.whole("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.damaged(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reversed(cursor.numbers("Q", dimensions)))
    number, offset = cursor.whole("I"), cursor.whole("Q")
    type_name = _TYPE_NAMES.get(number)
    if type_name is None:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} is of ggml type {number}, which isn't read here "
            f"(allowed: {', '.join(BLOCK_TYPES)})"
        )
    if min(shape) < 1 or shape[-1] % BLOCK_TYPES[type_name].weights:
        raise cursor.damaged(f"tensor {name!r} of type {type_name} can't have the shape {shape}")
    return _Entry(name, type_name, shape, offset)


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    found = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    sound = type(found) is int and 0 < found <= MAX_ALIGNMENT_BYTES and found & (found - 1) == 0
    if not sound:
        raise CheckpointError(
            f"{path}: damaged GGUF header: general.alignment is {found!r}, not a power of 2"
        )
    return int(found)


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _with_layout(
    path: Path,
    *,
    version: int,
    metadata: dict[str, Any],
    entries: list[_Entry],
    data_start: int,
    alignment: int,
    size_bytes: int,
) -> GgufHeader:
    """Tensors follow each other, padded to the alignment, and fill the file, as llama.cpp demands."""
    tensors: dict[str, TensorInfo] = {}
    end = data_start
    for entry in entries:
        begin = _padded(end, alignment)
        if entry.name in tensors or data_start + entry.offset != begin:
            fault = "occurs twice" if entry.name in tensors else f"doesn't begin at byte {begin:,}"
            raise CheckpointError(f"{path}: damaged GGUF header: tensor {entry.name!r} {fault}")
        tensor_bytes = stored_bytes(entry.type_name, math.prod(entry.shape))
        tensors[entry.name] = TensorInfo(
            file=path.name, dtype=entry.type_name, shape=entry.shape, size_bytes=tensor_bytes
        )
        end = begin + tensor_bytes
    if not end <= size_bytes <= _padded(end, alignment):
        state = "truncated" if size_bytes < end else "longer than its header says"
        raise CheckpointError(
            f"{path}: {state}: {size_bytes:,} bytes, the header describes {end:,}. Fetch or write the file again."
        )
    return GgufHeader(version=version, metadata=metadata, tensors=tensors)
