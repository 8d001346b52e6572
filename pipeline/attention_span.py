"""How much arithmetic attention itself costs: FLOPs for each pair of a query and a key it looks at.

Weights cost two FLOPs each for every token whatever the context is; attention's scores and its weighted sum
grow with it. A full layer looks at all keys so far, a sliding window at its last few, linear attention at
none. The config's heads give the cost; they are trusted only where they also give the cache that a forward
pass of the model really left.

    spans = attention_spans(model.config, cache=cache)
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from pipeline.kv_cache import CacheShape
from pipeline.values import Value

_FULL = ("DynamicLayer", "LinearAttentionAndFullAttentionLayer")
_WINDOWED = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")


class AttentionSpan(Value):
    """The attention layers that look `window_tokens` back (None: at everything), taken together.

    `flops_per_pair` is 2 · heads · (query-key size + value size) summed over these layers: a multiply and an
    add for each element of the score's dot product and of the weighted sum. Latent attention (MLA) counts at
    its expanded sizes, as in prefill; decoding in the latent space costs more arithmetic and reads less.
    """

    window_tokens: int | None
    flops_per_pair: int


class _Layer(NamedTuple):
    window_tokens: int | None
    flops_per_pair: int
    cached_values: int


def attention_spans(config: Any, *, cache: CacheShape | None) -> tuple[AttentionSpan, ...] | None:
    """Spans of a transformers config by window, widest last; () for linear attention alone.

    None when a layer's kind isn't plain full, sliding or linear attention, and when the config's heads don't
    explain `cache`, which means that the model computes something else.
    """
    layers = None if cache is None else _layers(config)
    if layers is None or cache is None:
        return None
    cached = cache.growing_values_per_token + sum(window.values_per_token for window in cache.windows)
    if sum(layer.cached_values for layer in layers) != cached:
        return None
    flops: Counter[int | None] = Counter()
    for layer in layers:
        flops[layer.window_tokens] += layer.flops_per_pair
    windows = sorted(flops, key=lambda tokens: (tokens is None, tokens or 0))
    return tuple(AttentionSpan(window_tokens=tokens, flops_per_pair=flops[tokens]) for tokens in windows)


def _layers(config: Any) -> list[_Layer] | None:
    from transformers import DynamicCache

    text = config.get_text_config(decoder=True)
    held = DynamicCache(config=config).layers
    kinds = getattr(text, "layer_types", None) or [""] * len(held)
    found = []
    for layer, layer_config, kind in zip(held, text.per_layer_config, kinds, strict=True):
        name = type(layer).__name__
        if kind == "chunked_attention":  # looks back to its chunk's start: neither all nor a window
            return None
        if name in _FULL or name in _WINDOWED:
            found.append(
                _layer(layer_config, window_tokens=layer.sliding_window if name in _WINDOWED else None)
            )
        elif name != "LinearAttentionLayer" and kind not in ("moe", "mlp"):
            return None
    return found


def _layer(config: Any, *, window_tokens: int | None) -> _Layer:
    heads: int = config.num_attention_heads
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    latent: int | None = getattr(config, "kv_lora_rank", None)
    if latent:
        scores, values = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        cached = latent + config.qk_rope_head_dim
    else:
        scores, values = size, getattr(config, "v_head_dim", None) or size
        cached = (getattr(config, "num_key_value_heads", None) or heads) * (scores + values)
    return _Layer(window_tokens, 2 * heads * (scores + values), cached)
