"""GGUF headers: read as the reference writes them, and refused whatever is damaged in them."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CheckpointError
from pipeline.gguf_file import BLOCK_TYPES, FILE_TYPES, TYPE_NUMBERS, GgufHeader, read_gguf, stored_bytes


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def strings(*values: str) -> bytes:
    return struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))


def tensor(name: str, shape: tuple[int, ...], *, number: int, offset: int) -> bytes:
    """As in a file: the shape's last dimension first."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + sizes + struct.pack("<IQ", number, offset)


PAIRS = (
    pair("general.architecture", 8, text("llama")),
    pair("llama.block_count", 4, struct.pack("<I", 1)),
    pair("tokenizer.ggml.tokens", 9, strings("<s>", "a", "é")),
    pair("tokenizer.ggml.scores", 9, struct.pack("<IQ3f", 6, 3, 0.0, -1.0, -2.0)),
    pair("llama.causal", 7, b"\1"),
)
TENSORS = (
    tensor("token_embd.weight", (3, 32), number=TYPE_NUMBERS["Q8_0"], offset=0),
    tensor("output_norm.weight", (32,), number=TYPE_NUMBERS["F32"], offset=128),
)


def gguf(
    pairs: tuple[bytes, ...] = PAIRS,
    tensors: tuple[bytes, ...] = TENSORS,
    *,
    start: bytes = b"GGUF" + struct.pack("<I", 3),
    data_bytes: int = 128 + 128,
) -> bytes:
    counts = struct.pack("<QQ", len(tensors), len(pairs))
    header = start + counts + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data_bytes)


def read(folder: Path, content: bytes) -> GgufHeader:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    header = read(tmp_path, gguf())
    assert header.version == 3
    assert header.architecture == "llama"
    assert header.metadata["llama.block_count"] == 1
    assert header.metadata["llama.causal"] is True
    assert header.tokens == ("<s>", "a", "é")
    assert header.metadata["tokenizer.ggml.scores"] == (0.0, -1.0, -2.0)
    embedding, norm = header.tensors.values()
    assert (embedding.dtype, embedding.shape, embedding.size_bytes) == ("Q8_0", (3, 32), 3 * 34)
    assert (norm.dtype, norm.shape, norm.size_bytes) == ("F32", (32,), 128)


def test_a_file_of_the_reference_writer_is_read_as_its_reader_reads_it(tmp_path: Path) -> None:
    import gguf as reference
    import numpy

    path = tmp_path / "model.gguf"
    writer = reference.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_token_list(["x", "y"])
    writer.add_tensor("token_embd.weight", numpy.arange(12, dtype=numpy.float16).reshape(2, 6))
    quantized = reference.quants.quantize(
        numpy.ones((3, 64), dtype=numpy.float32), reference.GGMLQuantizationType.Q4_1
    )
    writer.add_tensor("blk.0.attn_q.weight", quantized, raw_dtype=reference.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf(path)
    for entry in reference.GGUFReader(path).tensors:
        found = header.tensors[entry.name]
        assert found.shape == tuple(int(size) for size in reversed(entry.shape))
        assert found.dtype == entry.tensor_type.name
        assert found.size_bytes == entry.n_bytes


def test_block_sizes_and_numbers_are_the_references() -> None:
    import gguf as reference

    for name, block in BLOCK_TYPES.items():
        number = reference.GGMLQuantizationType[name]
        assert TYPE_NUMBERS[name] == number
        assert (block.weights, block.size_bytes) == reference.GGML_QUANT_SIZES[number], name
    for name, number in FILE_TYPES.items():
        prefix = "ALL" if name == "F32" else "MOSTLY"
        assert reference.LlamaFileType[f"{prefix}_{name}"] == number


def test_a_row_of_4096_in_q4_0() -> None:
    assert stored_bytes("Q4_0", 4096) == 4096 // 2 + 4096 // 32 * 2


def test_every_truncated_file_is_refused(tmp_path: Path) -> None:
    whole = gguf()
    for length in range(len(whole)):
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            read(tmp_path, whole[:length])


def test_any_changed_byte_is_refused_or_changes_a_value_only(tmp_path: Path) -> None:
    whole = gguf()
    chooser = random.Random(0)
    refused = 0
    for position in range(len(whole) - 256):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << chooser.randrange(8)
        try:
            header = read(tmp_path, bytes(damaged))
        except CheckpointError:
            refused += 1
        else:
            assert sum(info.size_bytes for info in header.tensors.values()) <= len(whole)
    assert refused > 150


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf(start=b"GGML" + struct.pack("<I", 3)), "not a GGUF file"),
        (gguf(start=b"GGUF" + struct.pack(">I", 3)), "big-endian"),
        (gguf(start=b"GGUF" + struct.pack("<I", 1)), "version 1"),
        (gguf() + b"\0", "longer than its header says"),
        (gguf(pairs=(*PAIRS, PAIRS[0])), "occurs twice"),
        (gguf(pairs=(pair("a", 77, b""),)), "unknown type 77"),
        (gguf(pairs=(pair("a", 9, struct.pack("<IQ", 9, 1)),)), "array of the unknown type 9"),
        (gguf(pairs=(pair("a", 9, struct.pack("<IQ", 8, 2**60)),)), "1,152,921,504,606,846,976 strings"),
        (gguf(pairs=(pair("a", 9, struct.pack("<IQ", 4, 2**60)),)), "more bytes are announced"),
        (gguf(pairs=(pair("a", 8, struct.pack("<Q", 2**63)),)), "more bytes are announced"),
        (gguf(pairs=(pair("general.alignment", 4, struct.pack("<I", 0)),)), "general.alignment is 0"),
        (gguf(pairs=(pair("general.alignment", 4, struct.pack("<I", 24)),)), "general.alignment is 24"),
        (gguf(tensors=(TENSORS[0], TENSORS[0])), "occurs twice"),
        (gguf(tensors=(tensor("w", (4,), number=5, offset=0),)), "ggml type 5, which isn't read here"),
        (gguf(tensors=(tensor("w", (4,), number=0, offset=32),)), "doesn't begin at byte"),
        (gguf(tensors=(tensor("w", (3, 31), number=8, offset=0),)), r"can't have the shape \(3, 31\)"),
        (gguf(tensors=(tensor("w", (0, 32), number=8, offset=0),)), r"can't have the shape \(0, 32\)"),
        (gguf(tensors=(tensor("w", (1, 1, 1, 1, 32), number=8, offset=0),)), "5 dimensions"),
        (gguf(tensors=(tensor("w", (2**40, 2**40), number=0, offset=0),)), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0) + bytes(64), "tensors and 0 metadata entries can't be"),
    ],
)
def test_what_is_damaged_is_refused_with_the_reason(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, content)


def test_tokens_that_are_pieces_of_characters_are_kept(tmp_path: Path) -> None:
    raw = struct.pack("<IQ", 8, 1) + struct.pack("<Q", 2) + b"\xe2\x96"
    header: Any = read(tmp_path, gguf(pairs=(pair("tokenizer.ggml.tokens", 9, raw),)))
    assert header.tokens[0].encode("utf-8", "surrogateescape") == b"\xe2\x96"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_gguf(tmp_path / "model.gguf")
