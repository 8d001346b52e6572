"""The shape of a model's KV cache, read from transformers' own cache classes.

What a token leaves in memory differs by layer: full attention grows for ever, a sliding window stops, linear
attention keeps a constant state, latent attention stores something else than heads. A forward pass of two
lengths on the meta device (shapes only, no memory) shows it; where no such pass runs, the config's heads give
it for the three plain layer kinds. Anything else is reported as unknown, never guessed.

>>> from transformers import LlamaConfig
>>> cache_shape_from_config(LlamaConfig(num_hidden_layers=2, num_key_value_heads=8)).growing_values_per_token
4096
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.meta_model import one_line
from pipeline.values import Value

CACHE_LAYERS = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",
    }
)
"""transformers' cache layers that grow by a constant per token, stop at a window, or stay constant."""
FEW_TOKENS, MANY_TOKENS = 1, 9


class CacheWindow(Value):
    """Layers whose cache stops growing at `tokens`; together they keep `values_per_token` until then."""

    tokens: int
    layers: int
    values_per_token: int


class CacheShape(Value):
    """KV cache of one sequence, in values (elements), summed over layers.

    `state_values` is constant and follows the compute type; `state_bytes` is constant and keeps its own
    type (recurrent states stay FP32). `source` says whether a forward pass or the config gave the shape.
    """

    growing_layers: int
    growing_values_per_token: int
    windows: tuple[CacheWindow, ...] = ()
    state_layers: int = 0
    state_values: int = 0
    state_bytes: int = 0
    source: str


class _Kept(Value):
    """What one named tensor of one cache layer holds after a few and after many tokens."""

    few_values: int
    many_values: int
    value_bytes: int
    in_compute_type: bool
    window_tokens: int | None


def cache_shape(model: Any) -> tuple[CacheShape | None, str]:
    """The cache's shape of a BF16 causal language model on the meta device, or why it can't be told."""
    from transformers import DynamicCache

    try:
        kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    except (KeyError, AttributeError, TypeError) as error:
        return None, f"transformers has no cache layer for this model: {one_line(error)}"
    if kinds - CACHE_LAYERS:
        return None, f"cache layers of unknown growth: {', '.join(sorted(kinds - CACHE_LAYERS))}"
    try:
        few, many = _fill(model, FEW_TOKENS), _fill(model, MANY_TOKENS)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        derived = cache_shape_from_config(model.config)
        return derived, "" if derived else f"no forward pass without weights ({one_line(error)})"
    return _fit(few, many)


def cache_shape_from_config(config: Any) -> CacheShape | None:
    """The cache's shape from a transformers config's heads: full, sliding and linear attention only.

    None for latent attention and for layer kinds whose state the config doesn't spell out.
    """
    from transformers import DynamicCache

    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None) or not getattr(text, "num_attention_heads", None):
        return None
    growing: list[int] = []
    windows: dict[int, list[int]] = defaultdict(list)
    states: list[tuple[int, int]] = []
    for layer, layer_config in zip(DynamicCache(config=config).layers, text.per_layer_config, strict=True):
        kind = type(layer).__name__
        if kind == "DynamicLayer":
            growing.append(_head_values(layer_config))
        elif kind == "DynamicSlidingWindowLayer":
            windows[layer.sliding_window].append(_head_values(layer_config))
        elif kind == "LinearAttentionLayer" and hasattr(layer_config, "linear_num_value_heads"):
            states.append(_delta_state(layer_config))
        else:
            return None
    return _summed(growing, windows, states, source="config")


def _head_values(config: Any) -> int:
    """Elements of one token's keys and values in one layer."""
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * heads * size


def _delta_state(config: Any) -> tuple[int, int]:
    """Values and FP32 bytes of a gated DeltaNet layer: last convolution inputs; key × value matrix a head."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return (2 * keys + values) * config.linear_conv_kernel_dim, 4 * values * config.linear_key_head_dim


def _summed(
    growing: Sequence[int],
    windows: dict[int, list[int]],
    states: Sequence[tuple[int, int]],
    *,
    source: str,
) -> CacheShape:
    return CacheShape(
        growing_layers=len(growing),
        growing_values_per_token=sum(growing),
        windows=tuple(
            CacheWindow(tokens=tokens, layers=len(values), values_per_token=sum(values))
            for tokens, values in sorted(windows.items())
        ),
        state_layers=len(states),
        state_values=sum(values for values, _ in states),
        state_bytes=sum(fixed_bytes for _, fixed_bytes in states),
        source=source,
    )


def _fill(model: Any, tokens: int) -> list[Any]:
    """Cache layers after a forward pass of `tokens` tokens."""
    import torch
    from transformers import DynamicCache
    from transformers.utils import logging

    cache = DynamicCache(config=model.config)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    token_ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # hints about missing kernels don't concern a pass over shapes
    try:
        with torch.no_grad():
            model(input_ids=token_ids, use_cache=True, **{keyword: cache})
    finally:
        logging.set_verbosity(verbosity)
    return list(cache.layers)


def _tensors(layer: Any) -> Iterator[tuple[str, Any]]:
    """Named tensors of a cache layer; linear-attention states lie in dicts by state index."""
    import torch

    for name, item in vars(layer).items():
        for index, tensor in item.items() if isinstance(item, dict) else [("", item)]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
                yield f"{name}{index}", tensor


def _kept(few: Any, many: Any) -> list[_Kept]:
    import torch

    later = dict(_tensors(many))
    return [
        _Kept(
            few_values=tensor.numel(),
            many_values=later[name].numel(),
            value_bytes=tensor.element_size(),
            in_compute_type=tensor.dtype == torch.bfloat16,
            window_tokens=getattr(few, "sliding_window", None) if name in ("keys", "values") else None,
        )
        for name, tensor in _tensors(few)
    ]


def _fit(few: Sequence[Any], many: Sequence[Any]) -> tuple[CacheShape | None, str]:
    """Extrapolate layer by layer: in proportion to tokens, up to a window, or constant."""
    growing: list[int] = []
    windows: dict[int, list[int]] = defaultdict(list)
    states: list[tuple[int, int]] = []
    for layer, later in zip(few, many, strict=True):
        kept = _kept(layer, later)
        windowed = [tensor for tensor in kept if tensor.window_tokens is not None]
        constant = [t for t in kept if t.window_tokens is None and t.many_values == t.few_values]
        rising = [t for t in kept if t.window_tokens is None and t.many_values != t.few_values]
        if any(t.many_values * FEW_TOKENS != t.few_values * MANY_TOKENS for t in rising):
            return None, f"{type(layer).__name__} grows neither with every token nor not at all"
        if rising:
            growing.append(sum(t.few_values // FEW_TOKENS for t in rising))
        if windowed:
            windows[layer.sliding_window].append(sum(t.few_values // FEW_TOKENS for t in windowed))
        if constant:
            states.append(
                (
                    sum(t.few_values for t in constant if t.in_compute_type),
                    sum(t.few_values * t.value_bytes for t in constant if not t.in_compute_type),
                )
            )
    if not (growing or windows or states):
        return None, "the model's forward pass leaves transformers' cache empty"
    return _summed(growing, windows, states, source="forward pass"), ""
