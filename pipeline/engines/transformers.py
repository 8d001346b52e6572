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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.checkpoint import tokenizer_tokens
from pipeline.device_runtime import DeviceRuntime, device_runtime
from pipeline.engines.base import Engine, Session, SessionMemory
from pipeline.errors import StageError
from pipeline.live_tensors import cache_bytes, device_types, resident_bytes
from pipeline.paged_session import PagedSession
from pipeline.quantizers.base import Quantizer
from pipeline.results import Problem
from pipeline.scheduler import Serving
from pipeline.weights import missing_packages

if TYPE_CHECKING:
    import torch


PROVEN_STATE = ("qwen3_5_text", "qwen3_next")
"""Model types whose recurrent state is known to bear padding and chunks: tokens were compared with whole prompts'."""
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

    def __init__(
        self,
        model: Any,
        *,
        cache: str,
        compute_dtype: str,
        vocabulary_tokens: int,
        runtime: DeviceRuntime | None = None,
    ) -> None:
        self.model = model
        self.compute_dtype = compute_dtype
        self.vocabulary_tokens = vocabulary_tokens
        self.execution = f"eager, {cache} cache, {model.config._attn_implementation} attention"
        self._runtime = runtime or device_runtime(model.device.type)
        self._static = cache == "static"
        # The argument is being renamed upstream, model by model; the old name warns at every step.
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._cache: Any = None
        self._padding: _Padding | None = None
        self._held_tokens = 0
        self._last: torch.Tensor | None = None

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, chunk_tokens: int | None = None
    ) -> list[int]:
        """Prompts [batch][tokens] → first tokens [batch]. Raises StageError when a logit isn't finite.

        Prompts of one length go through without any mask; shorter ones get one, see `_Padding`. In chunks, the
        activations are those of `chunk_tokens` tokens a sequence instead of the whole prompt's. Raises StageError
        for both where a model's state doesn't bear it, see `_check_state`.
        """
        import torch
        from transformers.cache_utils import DynamicCache, StaticCache

        self._drop()
        config = self.model.config
        width = max(map(len, prompts))
        if self._static:
            self._cache = StaticCache(config=config, max_cache_len=width + new_tokens)
        else:
            self._cache = DynamicCache(config=config)
        unequal = any(len(prompt) < width for prompt in prompts)
        if unequal or (chunk_tokens or width) < width:
            _check_state(config.model_type, self._cache, padded_singly=unequal and chunk_tokens == 1)
        if unequal:
            self._padding = _Padding.of(prompts, room=width + new_tokens, device=self.model.device)
        input_ids = torch.tensor(
            [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts],
            dtype=torch.long,
            device=self.model.device,
        )
        step = chunk_tokens or width
        for start in range(0, width, step):
            logits = self._forward(input_ids[:, start : start + step])
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

        start, self._held_tokens = self._held_tokens, self._held_tokens + input_ids.shape[1]
        masked = self._padding.arguments(start, self._held_tokens) if self._padding else {}
        # Not inference_mode: quanto's packed INT4 tensors make views that it forbids.
        with torch.no_grad():
            output = self.model(
                input_ids, use_cache=True, logits_to_keep=1, **{self._cache_argument: self._cache}, **masked
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
        """Wait for the device."""
        self._runtime.synchronize()

    def memory(self) -> SessionMemory:
        """CUDA: the allocator's peak and reserve. CPU: the process's peak resident set."""
        return SessionMemory(
            weight_bytes_resident=resident_bytes(self.model),
            kv_cache_bytes=cache_bytes(self._cache) if self._cache is not None else None,
            peak_bytes=self._runtime.peak_bytes(),
            reserved_bytes=self._runtime.reserved_bytes(),
        )

    def reset_peak(self) -> None:
        """Start the peak anew from what is held now."""
        self._runtime.reset_peak()

    def release(self) -> None:
        """Drop cache and batch; on CUDA hand cached blocks back, so that the next shape starts clean."""
        self._drop()
        self._runtime.empty_cached_blocks()

    def _drop(self) -> None:
        """What the batch held stays with the allocator: asking the device again takes time, which a clock would see."""
        self._cache = self._padding = self._last = None
        self._held_tokens = 0

    def serving(self, limits: Serving, *, share_prefixes: bool) -> PagedSession:
        """Continuous batching on the same weights; the static batch and its cache are dropped first."""
        self.release()
        return PagedSession(self.model, limits=limits, share_prefixes=share_prefixes, runtime=self._runtime)


@dataclass(frozen=True)
class _Padding:
    """Where the tokens of left-padded prompts are, so that padding changes no sequence.

    `real` [batch, room] is 1 where a sequence has a token and 0 on its left; `padded` [batch, 1] counts the zeros.
    """

    real: torch.Tensor
    padded: torch.Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], *, room: int, device: Any) -> _Padding:
        import torch

        width = max(map(len, prompts))
        padded = torch.tensor([[width - len(prompt)] for prompt in prompts], device=device)
        places = torch.arange(room, device=device)
        return cls(real=(places >= padded).long(), padded=padded)

    def arguments(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Mask [batch, end] and positions [batch, end − start] of the tokens from `start` to `end`."""
        import torch

        assert end <= self.real.shape[1], "more tokens than there is room for"
        positions = torch.arange(start, end, device=self.real.device) - self.padded
        return {"attention_mask": self.real[:, :end], "position_ids": positions.clamp(min=0)}


def _check_state(model_type: str, cache: Any, *, padded_singly: bool) -> None:
    """Keys and values can always be masked, and taken up again in the middle of a prompt; recurrent state can't.

    With transformers 5.24 Bamba and Jamba give other tokens for a prompt in chunks, Bamba for a padded one, too.
    Those of `PROVEN_STATE` are right, but for padding that comes through alone, which they take for a token.
    """
    if not any(hasattr(layer, "recurrent_states") for layer in cache.layers):
        return
    if model_type not in PROVEN_STATE or padded_singly:
        raise StageError(
            f"{model_type!r} keeps recurrent state, for which transformers doesn't pad prompts or cut them into "
            "chunks reliably: use prompts of one length, whole"
        )


def stored_dtype(checkpoint: Path) -> str:
    """The floating type a checkpoint declares ("float16", …), that of everything left unquantized."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    declared = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(declared).removeprefix("torch.")


def _vocabulary(checkpoint: Path, model: Any) -> int:
    """Ids that are safe in prompts: no more than the tokenizer's, no more than the embedding's rows."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    return min(rows, tokenizer_tokens(checkpoint) or rows)
