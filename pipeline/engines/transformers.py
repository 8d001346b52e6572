"""Engine `transformers`: an explicit prefill and decode loop over a cache, logits of the last position only.

On a GPU a decode step of hundreds of small kernels waits for the processor that starts them; compiled into one CUDA
graph it doesn't. Whether that pays is measured before a shape is timed, see `execution_choice`.

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

from pipeline.activations import predicted_peak
from pipeline.capacity_results import PeakPrediction
from pipeline.checkpoint import tokenizer_tokens
from pipeline.compiled_decode import CompiledDecode
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
    import numpy
    import torch


PROVEN_STATE = ("qwen3_5_text", "qwen3_next")
"""Model types whose recurrent state is known to bear padding and chunks: tokens were compared with whole prompts'."""
ROUNDING_STEPS = 4
"""Units in the last place of the largest logit, within which another order of additions may swap two best tokens."""
_NOT_FINITE = "the model's logits are not finite: it can't be used at this precision"


class Transformers(Engine):
    """Runs a checkpoint through transformers, greedy, with a dynamic or a static KV cache.

    `compile: auto` times each shape's decode eagerly and compiled (with a static cache) and keeps the faster, on a GPU
    and for quantizers that bear it; on a CPU it means never.
    """

    kind: Literal["transformers"] = "transformers"
    cache: Literal["dynamic", "static"] = "dynamic"
    compile: Literal["auto", "never", "always"] = "auto"
    compute_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"

    def check(self, *, device: str) -> tuple[Problem, ...]:
        """transformers and torch must be installed."""
        del device
        return missing_packages("torch", "transformers")

    @property
    def serves(self) -> bool:
        """Yes."""
        return True

    def refuses(self, quantizer: Quantizer) -> str | None:
        """It runs what transformers keeps as stored; a GGUF file it only dequantizes."""
        if quantizer.kind == "gguf":
            return "transformers would dequantize the GGUF file and run 16 bits; use engine llama_cpp"
        if self.compile == "always" and not quantizer.compilable:
            return f"torch.compile doesn't take what {quantizer.kind} writes; leave engine.compile at auto"
        return None

    def import_libraries(self) -> None:
        """torch, and what models are made of."""
        import torch  # noqa: F401
        import transformers.modeling_utils  # noqa: F401

    def kv_element_bytes(self, quantizer: Quantizer) -> int:
        """Of the arithmetic's type."""
        return computed_bytes(self.compute_dtype, precision=quantizer.precision)

    def float_bytes(self) -> int | None:
        """Those of a wider type than weights are stored in."""
        return cast_bytes(self.compute_dtype)

    def predicted_peak(self, checkpoint: Path, *, prompt_tokens: int, new_tokens: int) -> PeakPrediction:
        """By running the model on tensors without data."""
        return predicted_peak(
            checkpoint,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            compute_dtype=stored_dtype(checkpoint) if self.compute_dtype == "auto" else self.compute_dtype,
            static_cache=self.cache == "static",
        )

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
            compiled=self._compiled(model, quantizer=quantizer, device=device),
            only_compiled=self.compile == "always",
        )

    def _compiled(self, model: Any, *, quantizer: Quantizer, device: str) -> CompiledDecode | None:
        """What `compile` comes to on this device; on CPUs compiling made no path faster (docs/measuring.md)."""
        may_pay = device == "cuda" and quantizer.compilable
        wanted = self.compile == "always" or (self.compile == "auto" and may_pay)
        return CompiledDecode(model) if wanted else None


class TransformersSession(Session):
    """One loaded model and, between `prefill` and `release`, one batch with its cache."""

    def __init__(
        self,
        model: Any,
        *,
        cache: str,
        compute_dtype: str,
        vocabulary_tokens: int,
        compiled: CompiledDecode | None = None,
        only_compiled: bool = False,
        runtime: DeviceRuntime | None = None,
    ) -> None:
        """With `compiled` a decode step can run so; `only_compiled` leaves no other way."""
        self.model = model
        self.compute_dtype = compute_dtype
        self.vocabulary_tokens = vocabulary_tokens
        attention = f"{model.config._attn_implementation} attention"
        graphs = " into CUDA graphs" if model.device.type == "cuda" else ""
        eager, compiled_words = (
            f"eager, {cache} cache, {attention}",
            f"compiled{graphs}, static cache, {attention}",
        )
        self._executions = (*(() if only_compiled else (eager,)), *((compiled_words,) if compiled else ()))
        self.execution = self._executions[0]
        self._runtime = runtime or device_runtime(model.device.type)
        self._static = cache == "static"
        self._compiled, self._runs_compiled = compiled, only_compiled
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

        Always eager. Prompts of one length go through without any mask; shorter ones get one, see `_Padding`. In
        chunks, the activations are those of `chunk_tokens` tokens a sequence instead of the whole prompt's. Raises
        StageError for both where a model's state doesn't bear it, see `_check_state`.
        """
        logits = self._prompt_logits(prompts, new_tokens=new_tokens, chunk_tokens=chunk_tokens)
        return self._take(logits)

    def _prompt_logits(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, chunk_tokens: int | None
    ) -> torch.Tensor:
        """[batch, vocabulary], of each prompt's last token."""
        import torch

        self._drop()
        width = max(map(len, prompts))
        self._cache = self._new_cache(len(prompts), room=width + new_tokens)
        unequal = any(len(prompt) < width for prompt in prompts)
        if unequal or (chunk_tokens or width) < width:
            kind = self.model.config.model_type
            _check_state(kind, self._cache, padded_singly=unequal and chunk_tokens == 1)
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
        return logits

    def _new_cache(self, batch_size: int, *, room: int) -> Any:
        from transformers.cache_utils import DynamicCache, StaticCache

        if self._compiled is not None and self._runs_compiled:
            return self._compiled.cache(batch_size=batch_size, room=room)
        if self._static:
            return StaticCache(config=self.model.config, max_cache_len=room)
        return DynamicCache(config=self.model.config)

    def decode_step(self) -> list[int]:
        """One more greedy token for every sequence; an end-of-sequence token doesn't stop anything.

        Raises StageError when a sequence's best logit isn't finite.
        """
        return self._take(self._step_logits())

    def _step_logits(self) -> torch.Tensor:
        """[batch, vocabulary] after the last tokens; a batch with padding, whose masks grow, is never compiled."""
        assert self._last is not None, "prefill comes first"
        compiled = self._compiled if self._runs_compiled and self._padding is None else None
        return self._forward(self._last[:, None], through=compiled)

    def _forward(self, input_ids: torch.Tensor, *, through: CompiledDecode | None = None) -> torch.Tensor:
        import torch

        start, self._held_tokens = self._held_tokens, self._held_tokens + input_ids.shape[1]
        masked = self._padding.arguments(start, self._held_tokens) if self._padding else {}
        # Not inference_mode: quanto's packed INT4 tensors make views that it forbids.
        with torch.no_grad():
            output = (through or self.model)(
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
        if self._compiled is not None:
            self._compiled.forget()
        self._runtime.empty_cached_blocks()

    def _drop(self) -> None:
        """What the batch held stays with the allocator: asking the device again takes time, which a clock would see."""
        self._cache = self._padding = self._last = None
        self._held_tokens = 0

    @property
    def executions(self) -> tuple[str, ...]:
        """Eager, and compiled where that is allowed."""
        return self._executions

    def run_as(self, execution: str) -> None:
        """The graph and its cache are kept until `release`."""
        super().run_as(execution)
        self._drop()
        self.execution, self._runs_compiled = execution, execution.startswith("compiled")

    def disagreement(
        self, prompts: Sequence[Sequence[int]], *, execution: str, room_tokens: int, steps: int
    ) -> str:
        """Both ways get the plain way's tokens, so that one swap of equally good tokens doesn't change the rest."""
        seen: dict[str, list[torch.Tensor]] = {}
        for way in (self.executions[0], execution):
            self.run_as(way)
            seen[way] = []
            for step in range(steps):
                logits = (
                    self._step_logits()
                    if step
                    else self._prompt_logits(prompts, new_tokens=room_tokens, chunk_tokens=None)
                )
                seen[way].append(logits.clone())
                self._last = seen[self.executions[0]][step].argmax(dim=-1)
        self._drop()
        return _difference(seen[self.executions[0]], seen[execution])

    def logits(self, tokens: Sequence[int]) -> numpy.ndarray:
        """FP32 logits [tokens, vocabulary] of one forward pass without a cache."""
        import torch

        self.release()
        with torch.no_grad():
            output = self.model(torch.tensor([list(tokens)], device=self.model.device), use_cache=False)
        found: numpy.ndarray = output.logits[0].float().cpu().numpy()
        return found

    def serving(self, limits: Serving, *, share_prefixes: bool) -> PagedSession:
        """Continuous batching on the same weights; the static batch and its cache are dropped first."""
        self.release()
        return PagedSession(self.model, limits=limits, share_prefixes=share_prefixes, runtime=self._runtime)


def _difference(plain: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> str:
    """The first step in which two ways' best tokens differ by more than rounding, in a sentence; "" if none does.

    Logits are [batch, vocabulary] at each step, after the same tokens.
    """
    import torch

    for step, (one, two) in enumerate(zip(plain, other, strict=True), start=1):
        lost = (one.amax(dim=-1) - one.gather(-1, two.argmax(dim=-1, keepdim=True))[:, 0]).float()
        rounding = ROUNDING_STEPS * torch.finfo(one.dtype).eps * float(one.abs().max())
        worst = float(lost.max())
        if not worst <= rounding:
            return (
                f"token {step} differs: its logit is {worst:.2g} below the best one's, rounding explains "
                f"{rounding:.2g}"
            )
    return ""


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


def computed_bytes(compute_dtype: str, *, precision: str) -> int:
    """Bytes of a float that is computed with; "auto" is the checkpoint's own 32 or 16 bits."""
    is_wide = precision == "fp32" if compute_dtype == "auto" else compute_dtype == "float32"
    return 4 if is_wide else 2


def cast_bytes(compute_dtype: str) -> int | None:
    """Bytes of the floats that 16-bit weights are cast to on loading; None where they stay."""
    return 4 if compute_dtype == "float32" else None


def stored_dtype(checkpoint: Path) -> str:
    """The floating type a checkpoint declares ("float16", …), that of everything left unquantized."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    declared = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(declared).removeprefix("torch.")


def _vocabulary(checkpoint: Path, model: Any) -> int:
    """Ids that are safe in prompts: no more than the tokenizer's, no more than the embedding's rows."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    return min(rows, tokenizer_tokens(checkpoint) or rows)
