"""Engine `llama_cpp`: GGUF files through llama.cpp in this process, step by step, greedy, logits of last tokens only.

with LlamaCpp().open(folder, quantizer=quantizer, device="cpu") as session:
    first = session.prefill([[1, 2, 3]], new_tokens=8)
    second = session.decode_step()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pipeline.capacity_results import PeakPrediction
from pipeline.checkpoint import tokenizer_tokens
from pipeline.device_runtime import CpuRuntime
from pipeline.engines.base import Engine, Session, SessionMemory
from pipeline.errors import CheckpointError, StageError
from pipeline.gguf_file import GGUF_NAME
from pipeline.hardware import usable_threads
from pipeline.llama_library import (
    CACHE_GRAIN_TOKENS,
    KV_ELEMENT_BYTES,
    MOST_SEQUENCES,
    library_problems,
    load_library,
)
from pipeline.llama_model import (
    UBATCH_TOKENS,
    ContextShape,
    LlamaContext,
    LlamaModel,
    TokenBatch,
    last_places,
)
from pipeline.quantizers.base import Quantizer
from pipeline.results import Problem

if TYPE_CHECKING:
    import numpy

_NOT_FINITE = "the model's logits are not finite: it can't be used at this precision"


class LlamaCpp(Engine):
    """Runs a GGUF file through llama.cpp; `threads` None means all that this process may use."""

    kind: Literal["llama_cpp"] = "llama_cpp"
    threads: Annotated[int, Field(ge=1)] | None = None

    def check(self, *, device: str) -> tuple[Problem, ...]:
        """The known version of xllamacpp, on a processor it is built for; for a GPU, a wheel that can use one."""
        problems = library_problems(device=device)
        if self.threads is not None and self.threads > usable_threads():
            what = f"engine.threads is {self.threads}, and this process may use {usable_threads()} threads"
            problems += (Problem(what=what, fix="leave engine.threads out, or set it lower"),)
        return problems

    def refuses(self, quantizer: Quantizer) -> str | None:
        """It reads GGUF files and nothing else."""
        return None if quantizer.kind == "gguf" else "llama.cpp reads GGUF files only; use quantizer gguf"

    def import_libraries(self) -> None:
        """Load the shared library."""
        load_library()

    @property
    def most_sequences(self) -> int:
        """llama.cpp's own limit."""
        return MOST_SEQUENCES

    def loaded_bytes(self, stored_bytes: int) -> float:
        """Read where they stay; a tied head may lie there twice, up to a third of a small model."""
        return 1.35 * stored_bytes

    def kv_element_bytes(self, quantizer: Quantizer) -> int:
        """F16, whatever the weights are."""
        del quantizer
        return KV_ELEMENT_BYTES

    def cache_tokens(self, tokens: int) -> int:
        """In whole pieces of 256."""
        return CACHE_GRAIN_TOKENS * -(-tokens // CACHE_GRAIN_TOKENS)

    def predicted_peak(self, checkpoint: Path, *, prompt_tokens: int, new_tokens: int) -> PeakPrediction:
        """From llama.cpp's own plan of a context on a model without memory: caches, work buffers, logits.

        Work buffers grow with the prompts until these fill a piece of `UBATCH_TOKENS`.
        """
        model = LlamaModel(load_library(), _file(checkpoint), on_gpu=False, allocate=False)

        def line(sequences: int) -> PeakPrediction:
            few, more = (
                _planned_bytes(model, count, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
                for count in (sequences, sequences + 1)
            )
            return PeakPrediction.through(sequences, few, more)

        full = -(-UBATCH_TOKENS // prompt_tokens)
        if full <= 2:
            return line(2)
        return line(2).model_copy(update={"beyond": line(full).model_copy(update={"from_sequences": full})})

    def open(self, checkpoint: Path, *, quantizer: Quantizer, device: str) -> LlamaCppSession:
        """Load the file. Raises CheckpointError when llama.cpp can't read it, MemoryError when it doesn't fit."""
        if reason := self.refuses(quantizer):
            raise StageError(reason)
        model = LlamaModel(load_library(), _file(checkpoint), on_gpu=device == "cuda")
        rows = model.vocabulary_tokens
        return LlamaCppSession(
            model,
            threads=self.threads or usable_threads(),
            vocabulary_tokens=min(rows, tokenizer_tokens(checkpoint) or rows),
        )


class LlamaCppSession(Session):
    """One loaded model and, from `prefill` on, one batch in a context of its shape.

    The context outlives the batch: a following one of the same shape reuses it, so that only the first, the warm-up,
    pays for making it.
    """

    compute_dtype = "float32"

    def __init__(self, model: LlamaModel, *, threads: int, vocabulary_tokens: int) -> None:
        self.model = model
        self.vocabulary_tokens = vocabulary_tokens
        self._threads = threads
        self._runtime = CpuRuntime()
        self._context: LlamaContext | None = None
        self._step: TokenBatch | None = None
        self._peak_bytes = 0
        self.execution = self._described(model.context(ContextShape(1, 1, 1), threads=threads))

    def _described(self, context: LlamaContext) -> str:
        library = self.model.library
        attention = {True: "flash attention", False: "no flash attention", None: "attention not told"}
        places = self.model.weight_buffers.by_place
        described = (
            library.version(),
            f"{self._threads} thread(s)",
            library.features(),
            "weights in " + " and ".join(sorted(places)) if places else "",
            "F16 KV cache",
            attention[context.flash_attention],
            f"prompts in pieces of {UBATCH_TOKENS} tokens",
            "FP32 activations, rounded to 8 bits for products with quantized weights",
        )
        context.close()
        return ", ".join(part for part in described if part)

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, chunk_tokens: int | None = None
    ) -> list[int]:
        """Prompts [batch][tokens] → first tokens [batch]. Raises StageError when a logit isn't finite.

        Every sequence has positions of its own, so that unequal prompts need no padding. Whatever `chunk_tokens`
        says, no more than `UBATCH_TOKENS` tokens of all sequences go through the model at once.
        """
        width = max(map(len, prompts))
        step = min(chunk_tokens or width, width)
        largest = max(len(prompts), sum(min(step, len(prompt)) for prompt in prompts))
        context = self._context_of(ContextShape(len(prompts), width + new_tokens, largest))
        first = [0] * len(prompts)
        for start in range(0, width, step):
            pieces = [prompt[start : start + step] for prompt in prompts]
            ends = [start < len(prompt) <= start + step for prompt in prompts]
            context.decode(TokenBatch.of(pieces, starts=[start] * len(prompts), ends=ends))
            places = last_places([len(piece) for piece in pieces])
            for sequence, place in enumerate(places):
                if ends[sequence]:
                    first[sequence] = _best(context.logits(place), all_finite=True)
        everyone = range(len(prompts))
        self._step = TokenBatch(first, [len(prompt) for prompt in prompts], everyone, [1] * len(prompts))
        return first

    def decode_step(self) -> list[int]:
        """One more greedy token for every sequence; an end-of-sequence token doesn't stop anything.

        Raises StageError when a sequence's best logit isn't finite.
        """
        context, batch = self._context, self._step
        assert context is not None, "prefill comes first"
        assert batch is not None, "prefill comes first"
        context.decode(batch)
        tokens = [_best(context.logits(place)) for place in range(len(batch.tokens))]
        batch.advance(tokens)
        return tokens

    def _context_of(self, shape: ContextShape) -> LlamaContext:
        """The one that there is, emptied, when it is of this shape; else a new one."""
        self._step = None
        if self._context is not None:
            if self._context.shape._replace(tokens_each=0) == shape._replace(tokens_each=0) and (
                self._context.shape.cells_each == shape.cells_each
            ):
                self._context.clear()
                return self._context
            self._close()
        self._context = self.model.context(shape, threads=self._threads)
        self._peak_bytes = max(self._peak_bytes, self._held_bytes())
        return self._context

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._context is not None:
            self._context.synchronize()

    def memory(self) -> SessionMemory:
        """CPU: the process's peak resident set. CUDA: llama.cpp's own buffers, which it makes beforehand."""
        active = self._context if self._step is not None else None
        lengths = [] if self._step is None else self._step.positions.tolist()
        return SessionMemory(
            weight_bytes_resident=self.model.weight_bytes,
            weight_bytes_copied=self.model.copied_bytes,
            kv_cache_bytes=active.cache_bytes if active else None,
            kv_bytes_filled=active.filled_bytes(lengths) if active else None,
            peak_bytes=self._peak_bytes if self.model.on_gpu else self._runtime.peak_bytes(),
            reserved_bytes=None,
        )

    def _held_bytes(self) -> int:
        context = self._context
        in_context = context.cache_bytes + context.work_buffers.total_bytes if context else 0
        return self.model.weight_bytes + in_context

    def reset_peak(self) -> None:
        """Start the peak anew from what is held now."""
        self._runtime.reset_peak()
        self._peak_bytes = self._held_bytes()

    def release(self) -> None:
        """Free the context: cache and work buffers."""
        self._step = None
        self._close()

    def _close(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None

    def logits(self, tokens: Sequence[int]) -> numpy.ndarray:
        """FP32 logits [tokens, vocabulary], in a context of its own."""
        import numpy

        self.release()
        shape = ContextShape(1, len(tokens), len(tokens), outputs=len(tokens))
        context = self.model.context(shape, threads=self._threads)
        everyone = range(len(tokens))
        context.decode(TokenBatch(list(tokens), everyone, [0] * len(tokens), [1] * len(tokens)))
        found = numpy.stack([context.logits(place) for place in everyone])
        context.close()
        return found


def _best(row: numpy.ndarray, *, all_finite: bool = False) -> int:
    """The token with the largest logit. A NaN counts as the largest, so that a look at one value finds it."""
    best = int(row.argmax())
    if not math.isfinite(row[best]) or (all_finite and not math.isfinite(float(abs(row).max()))):
        raise StageError(_NOT_FINITE)
    return best


def _file(checkpoint: Path) -> Path:
    path = checkpoint / GGUF_NAME
    if not path.is_file():
        raise CheckpointError(f"{checkpoint}: no {GGUF_NAME}; llama.cpp reads GGUF files only")
    return path


def _planned_bytes(model: LlamaModel, sequences: int, *, prompt_tokens: int, new_tokens: int) -> int:
    """What a context of so many sequences would take."""
    shape = ContextShape(sequences, prompt_tokens + new_tokens, sequences * prompt_tokens)
    context = model.context(shape, threads=1)
    logits = 4 * sequences * model.vocabulary_tokens
    planned = context.cache_bytes + context.work_buffers.total_bytes + logits
    context.close()
    return planned
