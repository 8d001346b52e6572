"""Bytes of a model's weights and of its KV cache, from its configuration alone.

Whether a variant fits, and how fast it could decode at best, follows from shapes: no weight is loaded.
`architecture` measures them on the model class itself; here they are kept as JSON, so that a second `plan`
imports no torch, and turned into bytes.

>>> config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
>>> facts = shape_facts(config)
>>> facts.parameters, kv_bytes(facts, 1000)
(124439808, 36864000)
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from pipeline.architecture import LinearShape, ShapeFacts, shape_facts
from pipeline.errors import RecipeError, StageError
from pipeline.store import write_atomically
from pipeline.values import Value, digest

__all__ = [
    "ShapeFacts",
    "StoresWeights",
    "WeightBytes",
    "bytes_read_per_step",
    "cached_shape_facts",
    "kv_bytes",
    "kv_bytes_per_token",
    "shape_facts",
    "weight_bytes",
]

FORMAT_VERSION = 1
"""Part of the cache key; raise it when `ShapeFacts` changes its meaning."""


class WeightBytes(Value):
    """Bytes of a model's weights under one quantizer.

    `read_per_token` is one decode step of one sequence: an untied embedding is resident but not read.
    `bits_per_weight` counts everything stored over all parameters.
    """

    on_disk: int
    resident: int
    read_per_token: int
    bits_per_weight: float


class StoresWeights(Protocol):
    """What is asked of a quantizer here."""

    def predicted_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of one quantized matrix with its scales, zero-points and codebooks."""

    @property
    def other_bytes_per_weight(self) -> float:
        """Bytes of each weight that stays unquantized."""


def weight_bytes(facts: ShapeFacts, *, quantizer: StoresWeights) -> WeightBytes:
    """Bytes of the model's weights as `quantizer` stores them; head and embedding stay unquantized.

    Packed weights are taken to stay packed in memory, so that resident equals on disk.
    """
    linear = sum(shape.count * _matrix_bytes(shape, quantizer) for shape in facts.linears)
    kept = facts.parameters - facts.linear_weights
    on_disk = linear + round(kept * quantizer.other_bytes_per_weight)
    return WeightBytes(
        on_disk=on_disk,
        resident=on_disk,
        read_per_token=bytes_read_per_step(facts, quantizer=quantizer, batch_size=1),
        bits_per_weight=8 * on_disk / facts.parameters,
    )


def bytes_read_per_step(facts: ShapeFacts, *, quantizer: StoresWeights, batch_size: int) -> int:
    """Weight bytes that one decode step of `batch_size` sequences reads (KV cache not included).

    A batch reads dense weights once. Of n experts with k routed per token, b tokens touch
    n·(1 − (1 − k/n)^b) different ones on average when the router spreads them evenly.
    """
    read = facts.unquantized_weights_read_per_token * quantizer.other_bytes_per_weight
    for shape in facts.linears:
        untouched = (1 - shape.read_per_token / shape.count) ** batch_size
        matrices = shape.read_per_token if batch_size == 1 else shape.count * (1 - untouched)
        read += matrices * _matrix_bytes(shape, quantizer)
    return round(read)


def kv_bytes(facts: ShapeFacts, context_tokens: int, *, element_bytes: int = 2) -> int | None:
    """KV cache of one sequence of `context_tokens` tokens; None where the cache's shape is unknown.

    Windowed layers are taken to keep min(context, window) tokens, as transformers' dynamic cache does
    between decode steps; an engine that reserves whole pages or the full context needs more.
    """
    cache = facts.cache
    if cache is None:
        return None
    windowed = sum(min(context_tokens, window.tokens) * window.values_per_token for window in cache.windows)
    growing = context_tokens * cache.growing_values_per_token
    return (growing + windowed + cache.state_values) * element_bytes + cache.state_bytes


def kv_bytes_per_token(facts: ShapeFacts, *, element_bytes: int = 2) -> int | None:
    """What one more token adds to a long sequence's cache: growing layers only, all windows being full."""
    return None if facts.cache is None else facts.cache.growing_values_per_token * element_bytes


def cached_shape_facts(
    config: Mapping[str, Any], *, cache_folder: Path, source: str = "config.json"
) -> ShapeFacts:
    """`shape_facts`, kept as JSON in `cache_folder` under the config's digest and transformers' version.

    A hit imports neither torch nor transformers. An unreadable entry is measured again and replaced; a folder
    that can't be written costs only the time to measure again.
    """
    version = importlib.metadata.version("transformers")
    try:
        key = digest({"config": dict(config), "format": FORMAT_VERSION, "transformers": version})
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{source}: not plain JSON ({error}); numbers must be finite") from error
    entry = cache_folder / f"{key}.json"
    try:
        return ShapeFacts.model_validate_json(entry.read_bytes())
    except (OSError, ValidationError):
        facts = shape_facts(config, source=source)
    with suppress(OSError, StageError):
        write_atomically(entry, facts.to_json())
    return facts


def _matrix_bytes(shape: LinearShape, quantizer: StoresWeights) -> int:
    return quantizer.predicted_bytes(shape.out_features, shape.in_features)
