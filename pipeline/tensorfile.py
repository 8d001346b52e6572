"""What lies in a folder's safetensors files, read from their headers alone.

The header says name, type, shape and place of every tensor, so sizes and completeness are known without
reading a weight. Everything in it is checked against the file's real size before it is believed: a length
field of 2^56 or an offset past the end is a refusal, not an allocation.
Format: 8 bytes little-endian header length, a JSON object, tensor data (github.com/huggingface/safetensors).

    for name, tensor in tensors(Path("checkpoint")).items():
        print(name, tensor.dtype, tensor.shape, tensor.size_bytes)
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, PrerequisiteError
from pipeline.values import Value

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The bound of the reference implementation."""

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""The types an unquantized float weight may have."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class TensorInfo(Value):
    """One tensor of a file: its safetensors type, shape and bytes of data."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


def tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder's safetensors files by name, in file order.

    Raises PrerequisiteError when there is no such folder or no safetensors file in it, CheckpointError when
    a shard is missing, a file is corrupt or truncated, or the index and the files disagree.
    """
    names = weight_files(folder)
    found: dict[str, TensorInfo] = {}
    for name in names:
        for tensor, info in read_header(folder / name).items():
            if tensor in found:
                raise CheckpointError(f"{folder}: {tensor} is stored in both {found[tensor].file} and {name}")
            found[tensor] = info
    if INDEX_NAME in {path.name for path in folder.iterdir()}:
        _check_index(folder, found)
    return found


def weight_files(folder: Path) -> tuple[str, ...]:
    """Names of the safetensors files that hold the model: the index's shards, or the single file.

    Raises as `tensors` does; opens the index only.
    """
    if not folder.is_dir():
        raise PrerequisiteError(f"{folder}: no such folder")
    present = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
    if not present and not (folder / INDEX_NAME).exists():
        raise PrerequisiteError(_nothing_usable(folder))
    if (folder / INDEX_NAME).exists():
        return _indexed_files(folder, present)
    if SINGLE_NAME not in present:
        raise CheckpointError(
            f"{folder}: has {', '.join(present)} but neither {SINGLE_NAME} nor {INDEX_NAME}; which of these "
            "make the model can't be told. Add the index that belongs to them."
        )
    return (SINGLE_NAME,)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises CheckpointError when anything in the header is wrong."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(MAX_HEADER_BYTES, size_bytes - 8):
            raise CheckpointError(
                f"{path}: not a safetensors file, or truncated: it has {size_bytes:,} bytes and claims a "
                f"header of {header_bytes:,} (at most {MAX_HEADER_BYTES:,}). Fetch the file again."
            )
        header = _parse(path, file.read(header_bytes))
    header.pop("__metadata__", None)
    found = {name: _tensor(path, name, entry) for name, entry in header.items()}
    _check_layout(path, header, data_bytes=size_bytes - 8 - header_bytes)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file when it isn't one."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, found {type(content).__name__}")
    return content


def _nothing_usable(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        return (
            f"{folder}: only pickled weights ({', '.join(pickles)}); opening those can run code, so they are "
            "never read. Convert the model to safetensors."
        )
    return f"{folder}: no safetensors file"


def _indexed_files(folder: Path, present: list[str]) -> tuple[str, ...]:
    wanted = sorted({str(name) for name in _weight_map(folder).values()})
    if not wanted:
        raise CheckpointError(f"{folder / INDEX_NAME}: names no file")
    missing = [name for name in wanted if name not in present]
    if missing:
        others = [name for name in present if name not in wanted]
        hint = (
            f" The folder holds {', '.join(others)} instead: index and files are of different savings."
            if others
            else " Fetch the missing files."
        )
        raise CheckpointError(
            f"{folder}: {len(wanted) - len(missing)} of {len(wanted)} shards present; {INDEX_NAME} also "
            f"names {', '.join(missing)}.{hint}"
        )
    if SINGLE_NAME in present and SINGLE_NAME not in wanted:
        raise CheckpointError(
            f"{folder}: {INDEX_NAME} names {', '.join(wanted)}, yet there is a {SINGLE_NAME} too; which of "
            "them is the model can't be told. Remove the stale one."
        )
    return tuple(wanted)


def _weight_map(folder: Path) -> dict[str, Any]:
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / INDEX_NAME}: has no 'weight_map' object")
    return weight_map


def _check_index(folder: Path, found: dict[str, TensorInfo]) -> None:
    wrong = [
        name for name, file in _weight_map(folder).items() if name not in found or found[name].file != file
    ]
    if wrong:
        raise CheckpointError(
            f"{folder}: {INDEX_NAME} disagrees with the files: {len(wrong)} of its tensors, such as "
            f"{wrong[0]}, are not in the file it names"
        )


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt safetensors header ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: corrupt safetensors header (not a JSON object)")
    return header


def _tensor(path: Path, name: str, entry: Any) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        sound = all(type(number) is int and number >= 0 for number in numbers) and dtype in BITS
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path}: corrupt safetensors header at tensor {name!r}: {str(entry)[:200]}")
    if (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {shape} and type {dtype} can't have {end - begin:,} bytes"
        )
    return TensorInfo(file=path.name, dtype=dtype, shape=tuple(shape), size_bytes=end - begin)


def _check_layout(path: Path, header: dict[str, Any], *, data_bytes: int) -> None:
    """Tensors follow each other without hole or overlap and fill the file exactly, as the format demands."""
    position = 0
    for begin, end in sorted(tuple(entry["data_offsets"]) for entry in header.values()):
        if begin != position:
            raise CheckpointError(f"{path}: corrupt safetensors header: hole or overlap at byte {position:,}")
        position = end
    if position != data_bytes:
        state = "truncated" if data_bytes < position else "longer than its header says"
        raise CheckpointError(
            f"{path}: {state}: {data_bytes:,} bytes of tensor data, the header describes {position:,}. "
            "Fetch the file again."
        )
