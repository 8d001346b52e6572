"""A GGUF file loaded by llama.cpp, contexts on it, and batches of tokens for them: native memory with an owner.

model = LlamaModel(load_library(), Path("model.gguf"), on_gpu=False)
context = model.context(ContextShape(sequences=1, tokens_each=64, batch_tokens=8), threads=2)
context.decode(TokenBatch.of([[1, 2, 3]], starts=[0], ends=[True]))
context.logits(2).argmax()
"""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.errors import CheckpointError, StageError
from pipeline.llama_buffers import Buffers, Cache, buffers, cache_width, caches, flash_attention
from pipeline.llama_library import (
    ALL_LAYERS,
    CACHE_GRAIN_TOKENS,
    LOAD_WITHOUT_MMAP,
    MOST_SEQUENCES,
    ONE_DEVICE,
    Batch,
    LlamaLibrary,
)

if TYPE_CHECKING:
    import numpy

UBATCH_TOKENS = 512
"""llama.cpp's own `n_ubatch`: prompts go through a model in pieces of at most so many tokens, whatever is asked for."""
_NO_ROOM, _NO_MEMORY = 1, -2
"""What `llama_decode` returns when the cache is full, and when work buffers can't be allocated (llama.h)."""
_MEMORY_WORDS = ("failed to allocate", "out of memory", "bad_alloc", "cannot allocate", "unable to allocate")


class ContextShape(NamedTuple):
    """What a context has room for: sequences, tokens of each, tokens of the largest call, and logits of a call."""

    sequences: int
    tokens_each: int
    batch_tokens: int
    outputs: int = 0

    @property
    def cells_each(self) -> int:
        """Tokens of each in whole pieces, which is what llama.cpp makes of it."""
        return CACHE_GRAIN_TOKENS * -(-self.tokens_each // CACHE_GRAIN_TOKENS)


class LlamaModel:
    """Weights in memory. Freed with the last context on it."""

    def __init__(self, library: LlamaLibrary, path: Path, *, on_gpu: bool, allocate: bool = True) -> None:
        """All layers on the first GPU or all on the CPU; without `allocate` only the header is read.

        Raises MemoryError, or CheckpointError when llama.cpp can't read the file.
        """
        self.library, self.on_gpu = library, on_gpu
        parameters = library.functions.llama_model_default_params()
        parameters.load_mode = LOAD_WITHOUT_MMAP  # mapped pages are resident or not as the system likes
        parameters.split_mode = ONE_DEVICE
        parameters.no_alloc = not allocate
        if not on_gpu:
            parameters.n_gpu_layers = 0
            self._no_devices = (ctypes.c_void_p * 1)(None)
            parameters.devices = ctypes.addressof(self._no_devices)
        else:
            parameters.n_gpu_layers = ALL_LAYERS
        library.log.clear()
        self.handle = library.functions.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self.handle:
            raise _failure(library, f"{path}: llama.cpp can't load it", CheckpointError)
        weakref.finalize(self, library.functions.llama_model_free, self.handle)
        self._lines = tuple(library.log.lines)
        if library.functions.llama_model_has_encoder(self.handle):
            raise CheckpointError(f"{path}: a model with an encoder; only decoders can be timed")

    @cached_property
    def vocabulary_tokens(self) -> int:
        """Rows of the embedding."""
        functions = self.library.functions
        return int(functions.llama_vocab_n_tokens(functions.llama_model_get_vocab(self.handle)))

    @cached_property
    def weight_buffers(self) -> Buffers:
        """Where the weights are."""
        return buffers(self._lines, "model")

    @cached_property
    def weight_bytes(self) -> int:
        """Of all weights in memory, copies included."""
        return self._stored_bytes + self.copied_bytes

    @cached_property
    def copied_bytes(self) -> int:
        """Weights that lie in memory a second time: a head that is tied to the embedding and rearranged for products.

        Known from the log's rounded sizes, so that the least copies of tiny models are overlooked.
        """
        more = self.weight_buffers.total_bytes - self._stored_bytes
        rounding = 2**20 // 64 * max(1, len(self.weight_buffers.by_place))
        return more if more > max(rounding, self._stored_bytes // 1000) else 0

    @cached_property
    def _stored_bytes(self) -> int:
        return int(self.library.functions.llama_model_size(self.handle))

    @cached_property
    def values_per_cell(self) -> int | None:
        """Keys and values of one token in one layer."""
        return cache_width(self._lines)

    def context(self, shape: ContextShape, *, threads: int) -> LlamaContext:
        """Room for sequences. Raises MemoryError when there is none, StageError beyond llama.cpp's limits."""
        return LlamaContext(self, shape, threads=threads, on_gpu=self.on_gpu)


class LlamaContext:
    """Cache and work buffers for one shape; its batches are static, each sequence with a cache of its own."""

    def __init__(self, model: LlamaModel, shape: ContextShape, *, threads: int, on_gpu: bool) -> None:
        if shape.sequences > MOST_SEQUENCES:
            raise StageError(
                f"llama.cpp holds at most {MOST_SEQUENCES} sequences at once, {shape.sequences} were asked for"
            )
        self.shape, self._library = shape, model.library
        self._vocabulary = model.vocabulary_tokens
        # Making a view takes longer than anything else beside the step.
        self._views: dict[int, numpy.ndarray] = {}
        functions = model.library.functions
        model.library.log.clear()
        self.handle = functions.llama_init_from_model(
            model.handle, _context_parameters(model.library, shape, threads=threads, on_gpu=on_gpu)
        )
        if not self.handle:
            raise _failure(model.library, f"no context for {shape.sequences} sequences", StageError)
        # The model stays as long as this is in use.
        self._free = weakref.finalize(self, _free, functions, self.handle, model)
        self._check(threads)
        lines = tuple(model.library.log.lines)
        self.caches: list[Cache] = caches(lines, values_per_cell=model.values_per_cell)
        self.work_buffers = buffers(lines, "compute")
        self.flash_attention = flash_attention(lines)
        if not self.caches:
            raise StageError(f"{model.library.version()} doesn't log the size of its cache any more")

    def _check(self, threads: int) -> None:
        """What was asked for must come back: the last proof that the structs lie as they are assumed to."""
        functions, shape = self._library.functions, self.shape
        expected = {
            "llama_n_ctx_seq": shape.cells_each,
            "llama_n_batch": shape.batch_tokens,
            "llama_n_ubatch": min(shape.batch_tokens, UBATCH_TOKENS),
            "llama_n_seq_max": shape.sequences,
            "llama_n_threads": threads,
            "llama_n_threads_batch": threads,
        }
        for name, value in expected.items():
            if (found := getattr(functions, name)(self.handle)) != value:
                raise StageError(f"{self._library.version()}: {name} is {found} where {value} was set")

    @property
    def cache_bytes(self) -> int:
        """Allocated for keys, values and recurrent state."""
        return sum(cache.allocated_bytes for cache in self.caches)

    def filled_bytes(self, lengths: Sequence[int]) -> int:
        """Of them those that hold something when sequences are so long."""
        return sum(cache.filled_bytes(lengths) for cache in self.caches)

    def clear(self) -> None:
        """Forget all sequences; the memory stays."""
        functions = self._library.functions
        functions.llama_memory_clear(functions.llama_get_memory(self.handle), False)

    def decode(self, batch: TokenBatch) -> None:
        """Run tokens through the model. Raises MemoryError, or StageError with what llama.cpp says."""
        code = self._library.functions.llama_decode(self.handle, batch.native)
        if code == 0:
            return
        reason = f"llama_decode returned {code}: {self._library.log.reason()}"
        if code == _NO_ROOM:
            reason = f"more tokens than there is room for ({self.shape.cells_each} a sequence)"
        raise MemoryError(reason) if code == _NO_MEMORY else StageError(reason)

    def logits(self, place: int) -> numpy.ndarray:
        """FP32 logits [vocabulary] of the token at `place` of the last batch; valid until the next one."""
        address = self._library.functions.llama_get_logits_ith(self.handle, place)
        if not address:
            raise StageError(f"llama.cpp has no logits of token {place}")
        view = self._views.get(address)
        if view is None:
            view = self._views[address] = _floats_at(address, self._vocabulary)
        return view

    def synchronize(self) -> None:
        """Return when all queued work is done."""
        self._library.functions.llama_synchronize(self.handle)

    def close(self) -> None:
        """Free cache and work buffers now."""
        self._free()


class TokenBatch:
    """Tokens with position, sequence and a mark on those whose logits are wanted; keeps what the struct points to."""

    def __init__(self, tokens: Any, positions: Any, sequences: Any, outputs: Any) -> None:
        """Arrays of one length; sequences are numbered from 0."""
        import numpy

        self.tokens = numpy.ascontiguousarray(tokens, dtype=numpy.int32)
        self.positions = numpy.ascontiguousarray(positions, dtype=numpy.int32)
        self.outputs = numpy.ascontiguousarray(outputs, dtype=numpy.int8)
        self._counts = numpy.ones(len(self.tokens), dtype=numpy.int32)
        self._ids = numpy.arange(MOST_SEQUENCES, dtype=numpy.int32)
        places = self._ids.ctypes.data + self._ids.itemsize * numpy.asarray(sequences, dtype=numpy.uint64)
        self._places = numpy.ascontiguousarray(places, dtype=numpy.uint64)
        self.native = Batch(
            n_tokens=len(self.tokens),
            token=_pointer(self.tokens, ctypes.c_int32),
            embd=None,
            pos=_pointer(self.positions, ctypes.c_int32),
            n_seq_id=_pointer(self._counts, ctypes.c_int32),
            seq_id=_pointer(self._places, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self.outputs, ctypes.c_int8),
        )

    def advance(self, tokens: Sequence[int]) -> None:
        """The next token of each sequence, one position further; by C pointers, which are quicker than arrays here."""
        token, position = self.native.token, self.native.pos
        for place, one in enumerate(tokens):
            token[place] = one
            position[place] += 1

    @classmethod
    def of(
        cls, pieces: Sequence[Sequence[int]], *, starts: Sequence[int], ends: Sequence[bool]
    ) -> TokenBatch:
        """A piece of each sequence (perhaps an empty one) from `starts` on; logits of the last token where it ends."""
        import numpy

        sizes = [len(piece) for piece in pieces]
        outputs = numpy.zeros(sum(sizes), dtype=numpy.int8)
        for last, (size, end) in zip(last_places(sizes), zip(sizes, ends, strict=True), strict=True):
            if size and end:
                outputs[last] = 1
        return cls(
            numpy.concatenate([numpy.asarray(piece, dtype=numpy.int32) for piece in pieces]),
            numpy.concatenate(
                [numpy.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
            ),
            numpy.repeat(numpy.arange(len(sizes)), sizes),
            outputs,
        )


def last_places(sizes: Sequence[int]) -> list[int]:
    """Where the last token of each piece is when pieces of these sizes follow each other.

    >>> last_places([3, 2])
    [2, 4]
    """
    return [end - 1 for end in itertools.accumulate(sizes)]


def _context_parameters(library: LlamaLibrary, shape: ContextShape, *, threads: int, on_gpu: bool) -> Any:
    parameters = library.functions.llama_context_default_params()
    parameters.n_ctx = shape.sequences * shape.cells_each
    parameters.n_batch = shape.batch_tokens
    parameters.n_ubatch = min(shape.batch_tokens, UBATCH_TOKENS)
    parameters.n_seq_max = shape.sequences
    # By default work buffers hold logits of every token.
    parameters.n_outputs_max = shape.outputs or shape.sequences
    parameters.n_outputs_max_per_seq = max(1, shape.outputs)
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.swa_full = False  # a sliding window's cache holds the window, as llama-server has it
    parameters.offload_kqv = parameters.op_offload = on_gpu
    return parameters


def _pointer(array: Any, kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))


def _floats_at(address: int, count: int) -> numpy.ndarray:
    import numpy

    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    return numpy.ctypeslib.as_array(pointer, (count,))


def _free(functions: Any, context: Any, _model: LlamaModel) -> None:
    functions.llama_free(context)


def _failure(library: LlamaLibrary, what: str, kind: type[StageError]) -> Exception:
    reason = library.log.reason()
    if any(word in reason.lower() for word in _MEMORY_WORDS):
        return MemoryError(f"{what}: {reason}")
    return kind(f"{what}: {reason}")
