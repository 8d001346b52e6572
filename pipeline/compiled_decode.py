"""The decode step as one compiled graph over a static cache whose tensors stay where they are.

A CUDA graph replays kernels on fixed addresses. So the cache outlives a batch and is emptied for the next one of the
same shape; a new shape forgets the old graph, because torch would otherwise make its sizes symbolic, which costs speed.

    decode = CompiledDecode(model)
    decode.cache(batch_size=1, room=96)   # the prompt then goes through the model itself, eagerly
    decode(input_ids, use_cache=True, past_key_values=cache)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Forward = Callable[..., Any]


def with_cuda_graphs(forward: Forward) -> Forward:
    """torch.compile, with CUDA graphs where the device has them.

    Sizes are fixed, but for what changes from step to step: sliding layers of a static cache count in plain integers
    (transformers 5.24), for each of which a strictly static graph would be made anew.
    """
    import torch

    # Without this, torch goes on eagerly after too many graphs, and a timing would be labelled with what didn't run.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    compiled: Forward = torch.compile(forward, mode="reduce-overhead")
    return compiled


class CompiledDecode:
    """The compiled forward pass of one model, and the cache that it was compiled for."""

    def __init__(self, model: Any, *, compiler: Callable[[Forward], Forward] = with_cuda_graphs) -> None:
        """Nothing is compiled before the first step."""
        self._model, self._compiler = model, compiler
        self._forward: Forward | None = None
        self._cache: Any = None
        self._shape = (0, 0)

    def cache(self, *, batch_size: int, room: int) -> Any:
        """An empty static cache for `room` tokens a sequence: the one that there is when its shape is the same."""
        from transformers.cache_utils import StaticCache

        if self._cache is not None and self._shape == (batch_size, room):
            self._cache.reset()
            return self._cache
        self.forget()
        self._cache, self._shape = (
            StaticCache(config=self._model.config, max_cache_len=room),
            (batch_size, room),
        )
        return self._cache

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """One forward pass; compiles in the first step of a shape. Raises what the compiler raises."""
        import torch

        if self._forward is None:
            self._forward = self._compiler(self._model.__call__)
        # What the step before returned lies in the graph's own memory, and nobody looks at it any more.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self._forward(*arguments, **named)

    def forget(self) -> None:
        """Drop cache and graph; a second time does nothing."""
        if self._forward is not None:
            import torch

            torch.compiler.reset()
        self._forward = self._cache = None
        self._shape = (0, 0)
