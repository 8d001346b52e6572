"""Engine `transformers`: an explicit prefill and decode loop over a cache, logits of the last position only.

with Transformers().open(folder, quantizer=quantizer, device="cpu") as session:
    first = session.prefill([[1, 2, 3]], new_tokens=8)
    second = session.decode_step()
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.checkpoint import tokenizer_tokens
from pipeline.engines.base import Engine, Session, SessionMemory
from pipeline.errors import StageError
from pipeline.live_tensors import cache_bytes, device_types, resident_bytes
from pipeline.process_memory import peak_resident_bytes, reset_peak_resident_bytes
from pipeline.quantizers.base import Quantizer
from pipeline.results import Problem
from pipeline.weights import missing_packages

if TYPE_CHECKING:
    import torch


_NOT_FINITE = "the model's logits are not finite: it can't be used at this precision"


class Transformers(Engine):
    """Runs a checkpoint through transformers, eagerly, greedy, with a dynamic or a static KV cache."""

    kind: Literal["transformers"] = "transformers"
    cache: Literal["dynamic", "static"] = "dynamic"
    compute_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"

    def check(self, *, device: str) -> tuple[Problem, ...]:
        """transformers and torch must be installed."""
        del device
        return missing_packages("torch", "transformers")

    def open(self, checkpoint: Path, *, quantizer: Quantizer, device: str) -> TransformersSession:
        """Load the checkpoint. Raises StageError when layers land on another device than asked for."""
        compute_dtype = stored_dtype(checkpoint) if self.compute_dtype == "auto" else self.compute_dtype
        model = quantizer.load(checkpoint, device=device, compute_dtype=compute_dtype)
        elsewhere = device_types(model) - {device}
        if elsewhere:
            raise StageError(
                f"parts of the model were placed on {', '.join(sorted(elsewhere))} instead of {device}: "
                "offloaded layers make every timing meaningless; use a device with more memory or fewer bits"
            )
        return TransformersSession(
            model,
            cache=self.cache,
            compute_dtype=compute_dtype,
            vocabulary_tokens=_vocabulary(checkpoint, model),
        )


class TransformersSession(Session):
    """One loaded model and, between `prefill` and `release`, one batch with its cache."""

    def __init__(self, model: Any, *, cache: str, compute_dtype: str, vocabulary_tokens: int) -> None:
        self.model = model
        self.device_type: str = model.device.type
        self.compute_dtype = compute_dtype
        self.vocabulary_tokens = vocabulary_tokens
        self.execution = f"eager, {cache} cache, {model.config._attn_implementation} attention"
        self._static = cache == "static"
        # The argument is being renamed upstream, model by model; the old name warns at every step.
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._cache: Any = None
        self._last: torch.Tensor | None = None

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, chunk_tokens: int | None = None
    ) -> list[int]:
        """Prompts [batch][tokens] → first tokens [batch]. Raises StageError when a logit isn't finite."""
        del chunk_tokens
        import torch
        from transformers.cache_utils import DynamicCache, StaticCache

        self.release()
        input_ids = torch.tensor(prompts, dtype=torch.long, device=self.model.device)
        if self._static:
            length = input_ids.shape[1] + new_tokens
            self._cache = StaticCache(config=self.model.config, max_cache_len=length)
        else:
            self._cache = DynamicCache(config=self.model.config)
        logits = self._forward(input_ids)
        if not bool(torch.isfinite(logits).all()):
            raise StageError(_NOT_FINITE)
        return self._take(logits)

    def decode_step(self) -> list[int]:
        """One more greedy token for every sequence; an end-of-sequence token doesn't stop anything.

        Raises StageError when a sequence's best logit isn't finite.
        """
        assert self._last is not None, "prefill comes first"
        return self._take(self._forward(self._last[:, None]))

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        import torch

        # Not inference_mode: quanto's packed INT4 tensors make views that it forbids.
        with torch.no_grad():
            output = self.model(
                input_ids, use_cache=True, logits_to_keep=1, **{self._cache_argument: self._cache}
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _take(self, logits: torch.Tensor) -> list[int]:
        best, self._last = logits.max(dim=-1)
        # A NaN is the maximum of its row: looking at the maxima finds it, at no cost worth timing.
        if not all(map(math.isfinite, best.tolist())):
            raise StageError(_NOT_FINITE)
        tokens: list[int] = self._last.tolist()
        return tokens

    def synchronize(self) -> None:
        """Wait for the device; on a CPU work is done when the call returns."""
        if self.device_type == "cuda":
            import torch

            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            event.synchronize()

    def memory(self) -> SessionMemory:
        """CUDA: the allocator's peak and reserve. CPU: the process's peak resident set."""
        import torch

        on_cuda = self.device_type == "cuda"
        return SessionMemory(
            weight_bytes_resident=resident_bytes(self.model),
            kv_cache_bytes=cache_bytes(self._cache) if self._cache is not None else None,
            peak_bytes=torch.cuda.max_memory_allocated() if on_cuda else peak_resident_bytes(),
            reserved_bytes=torch.cuda.max_memory_reserved() if on_cuda else None,
        )

    def reset_peak(self) -> None:
        """Start the peak anew from what is held now."""
        if self.device_type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
        else:
            reset_peak_resident_bytes()

    def release(self) -> None:
        """Drop cache and batch; on CUDA hand cached blocks back, so that the next shape starts clean."""
        self._cache = None
        self._last = None
        if self.device_type == "cuda":
            import torch

            torch.cuda.empty_cache()


def stored_dtype(checkpoint: Path) -> str:
    """The floating type a checkpoint declares ("float16", …), that of everything left unquantized."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    declared = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(declared).removeprefix("torch.")


def _vocabulary(checkpoint: Path, model: Any) -> int:
    """Ids that are safe in prompts: no more than the tokenizer's, no more than the embedding's rows."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    return min(rows, tokenizer_tokens(checkpoint) or rows)
