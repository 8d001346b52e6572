"""Peak memory of a batch beside the weights, from shapes alone: the model runs on tensors without data.

What a forward pass holds at once depends on every line of a model's code: which intermediate of an MLP is still
alive, whether attention makes its scores, in which type a norm computes. So the real code is run on fake tensors
(no memory, no arithmetic) and the storages that are alive are counted after every operation.

    predicted_peak(folder, prompt_tokens=496, new_tokens=16, compute_dtype="float16", static_cache=False)
    PeakPrediction(fixed_bytes=…, bytes_per_sequence=18284416)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.capacity_results import PeakPrediction

if TYPE_CHECKING:
    import torch

_FEW = 2
"""The peaks of this batch and of one more give the line; one sequence can take other paths than several."""


def predicted_peak(
    checkpoint: Path, *, prompt_tokens: int, new_tokens: int, compute_dtype: str, static_cache: bool
) -> PeakPrediction:
    """The peak of prefill and decode over the number of sequences, KV cache included, weights excluded.

    For unquantized weights: what a kernel dequantizes on the side is the same for any batch and isn't in it. Raises
    whatever a model raises that can't run on tensors without data (its shapes depend on values).
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, compute_dtype)).eval()
        few, more = (
            _peak(
                model,
                sequences=sequences,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                static_cache=static_cache,
            )
            for sequences in (_FEW, _FEW + 1)
        )
    return PeakPrediction.through(_FEW, few, more)


def _peak(model: Any, *, sequences: int, prompt_tokens: int, new_tokens: int, static_cache: bool) -> int:
    """Most bytes alive beside the weights in the prefill or in the last decode step, whichever holds more."""
    import torch

    forward = _forward(model, tokens=prompt_tokens + new_tokens, static_cache=static_cache)
    live = _live_storages(model)
    with live, torch.no_grad():
        last = forward(torch.zeros(sequences, prompt_tokens, dtype=torch.long))
        in_prefill = live.peak_bytes
        if (
            new_tokens > 2
        ):  # all decode steps but the last at once: only the cache that they leave is asked for
            last = forward(torch.zeros(sequences, new_tokens - 2, dtype=torch.long))
        live.peak_bytes = 0
        forward(last[:, None])
    return int(max(in_prefill, live.peak_bytes))


def _forward(model: Any, *, tokens: int, static_cache: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """One pass as the engine makes it: logits of the last position, a look at whether they are finite, the best."""
    import torch
    from transformers.cache_utils import DynamicCache, StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=tokens) if static_cache else DynamicCache(config=config)
    accepted = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in accepted else "past_key_values"

    def run(input_ids: torch.Tensor) -> torch.Tensor:
        output = model(input_ids, use_cache=True, logits_to_keep=1, **{argument: cache})
        logits = output.logits[:, -1]
        torch.isfinite(logits).all()
        chosen: torch.Tensor = logits.max(dim=-1)[1]
        return chosen

    return run


def _live_storages(model: Any) -> Any:
    """A dispatch mode that counts bytes of storages made while it is on and still alive; views count once."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    held = (*model.parameters(), *model.buffers())
    weights = {tensor.untyped_storage()._cdata for tensor in held}

    class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.peak_bytes = 0
            self._alive: dict[int, tuple[Any, int]] = {}

        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in weights:
                        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                        self._alive[storage._cdata] = (reference, storage.nbytes())
            self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
            self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
            return result

    return LiveStorages()
