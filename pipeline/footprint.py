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
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from pydantic import ValidationError

from pipeline.architecture import LinearShape, ShapeFacts, shape_facts
from pipeline.block_weights import MatrixKind
from pipeline.errors import RecipeError, StageError
from pipeline.store import write_atomically
from pipeline.values import Value, digest

__all__ = [
    "ExpertReads",
    "FindsWeights",
    "ShapeFacts",
    "StoresWeights",
    "WeightBytes",
    "WeightParts",
    "WeightReads",
    "cached_shape_facts",
    "kv_bytes",
    "kv_bytes_per_token",
    "shape_facts",
    "unreached_weights",
    "weight_bytes",
    "weight_reads",
]

FORMAT_VERSION = 2
"""Part of the cache key; raise it when `ShapeFacts` changes its meaning."""
SIXTEEN_BIT_BYTES = 2


class WeightParts(Value):
    """Bytes of a checkpoint's weights by what they hold; `unquantized` is embedding, head, norms and the like."""

    packed: int
    scales: int
    zero_points: int
    codebooks: int
    metadata: int
    unquantized: int

    @property
    def total(self) -> int:
        """All of them: the bytes on disk."""
        return sum(self.model_dump().values())


class WeightBytes(Value):
    """Bytes of a model's weights under one quantizer.

    `parts` adds up to `on_disk`. `resident` is what loading puts into memory, which differs where weights or
    scales take the type of the arithmetic. `read_per_token` is one decode step of one sequence: an untied
    embedding is resident but not read. `bits_per_weight` counts everything stored over all parameters.
    """

    on_disk: int
    resident: int
    read_per_token: int
    bits_per_weight: float
    parts: WeightParts


class ExpertReads(Value):
    """Equal expert matrices: `count` of `bytes_each` in all layers, of which a token uses `routed`."""

    bytes_each: int
    count: int
    routed: int


class WeightReads(Value):
    """What a step reads of the weights in memory: the dense ones once, of the experts those it needs."""

    dense_bytes: float
    experts: tuple[ExpertReads, ...]

    def bytes(self, tokens: int) -> float:
        """Weight bytes that a step over `tokens` tokens (sequences decoding, or a prompt's) reads.

        Of n experts with k routed per token, b tokens touch n·(1 − (1 − k/n)^b) different ones on average when
        the router spreads them evenly. Raises ValueError when `tokens` isn't positive.
        """
        if tokens < 1:
            raise ValueError(f"tokens must be at least 1, is {tokens}")
        touched = self.dense_bytes
        for expert in self.experts:
            share = expert.routed / expert.count
            matrices = expert.routed if tokens == 1 else expert.count * (1 - (1 - share) ** tokens)
            touched += matrices * expert.bytes_each
        return touched


class HoldsBytes(Protocol):
    """What is asked of a matrix's stored bytes here."""

    @property
    def packed(self) -> int: ...
    @property
    def scales(self) -> int: ...
    @property
    def zero_points(self) -> int: ...
    @property
    def codebooks(self) -> int: ...
    @property
    def metadata(self) -> int: ...
    @property
    def total(self) -> int: ...


class StoresWeights(Protocol):
    """What is asked of a quantizer's storage here."""

    def predicted_parts(self, out_features: int, in_features: int) -> HoldsBytes:
        """Bytes of one quantized matrix in a checkpoint file."""

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> HoldsBytes:
        """Bytes of one quantized matrix in memory, computed with floats of `float_bytes`."""

    @property
    def other_bytes_per_weight(self) -> float:
        """Bytes of each weight that stays unquantized."""

    def table_bytes_per_weight(self, columns: int, *, is_head: bool) -> float | None:
        """Bytes of each weight of the embedding or the head where they are quantized too, else None."""


class FindsWeights(Protocol):
    """What is asked of a quantizer's reach here."""

    quantizable: ClassVar[frozenset[MatrixKind]]


def weight_bytes(
    facts: ShapeFacts, *, quantizer: StoresWeights, compute_bytes: int | None = None
) -> WeightBytes:
    """Bytes of the model's weights as `quantizer` stores them; head and embedding at its width for what is left.

    `compute_bytes` is the size of the floats that an engine computes with (4 for FP32), None for those that
    are stored. Every linear weight is counted as quantized, also where `unreached_weights` says that this
    quantizer would leave some as they are.
    """
    stored = [
        (shape.count, quantizer.predicted_parts(shape.out_features, shape.in_features))
        for shape in facts.linears
    ]
    parts = WeightParts(
        packed=sum(count * each.packed for count, each in stored),
        scales=sum(count * each.scales for count, each in stored),
        zero_points=sum(count * each.zero_points for count, each in stored),
        codebooks=sum(count * each.codebooks for count, each in stored),
        metadata=sum(count * each.metadata for count, each in stored),
        unquantized=round(_outside(facts, quantizer, quantizer.other_bytes_per_weight).total),
    )
    float_bytes = _float_bytes(quantizer, compute_bytes)
    resident = sum(shape.count * _resident(shape, quantizer, float_bytes).total for shape in facts.linears)
    return WeightBytes(
        on_disk=parts.total,
        resident=resident + round(_outside(facts, quantizer, float_bytes).total),
        read_per_token=round(weight_reads(facts, quantizer=quantizer, compute_bytes=compute_bytes).bytes(1)),
        bits_per_weight=8 * parts.total / facts.parameters,
        parts=parts,
    )


def weight_reads(
    facts: ShapeFacts, *, quantizer: StoresWeights, compute_bytes: int | None = None
) -> WeightReads:
    """What decoding reads of the weights that lie in memory; metadata isn't read. See `weight_bytes`."""
    float_bytes = _float_bytes(quantizer, compute_bytes)
    dense = _outside(facts, quantizer, float_bytes).read_per_token
    experts = []
    for shape in facts.linears:
        held = _resident(shape, quantizer, float_bytes)
        each = held.total - held.metadata
        if shape.read_per_token < shape.count and shape.read_per_token:
            experts.append(ExpertReads(bytes_each=each, count=shape.count, routed=shape.read_per_token))
        else:
            dense += shape.read_per_token * each
    return WeightReads(dense_bytes=dense, experts=tuple(experts))


def unreached_weights(facts: ShapeFacts, *, quantizer: FindsWeights) -> int:
    """Linear weights that `quantizer` would leave as they are, because it doesn't look where they lie.

    Experts kept as one three-dimensional parameter are passed over by libraries that replace `nn.Linear`. A
    checkpoint with too many of these is refused its label; their size under it is what the format would take.
    """
    return sum(shape.elements for shape in facts.linears if shape.kind not in quantizer.quantizable)


def kv_bytes(facts: ShapeFacts, context_tokens: int, *, element_bytes: int = 2) -> int | None:
    """KV cache of one sequence of `context_tokens` tokens; None where the cache's shape is unknown.

    `element_bytes` is the size of a cached value: 1 asks what an FP8 cache would take, scales left out.
    Constant states aren't quantized with it: what follows the compute type keeps at least 16 bits, recurrent
    states stay FP32. Windowed layers are taken to keep min(context, window) tokens, as transformers' dynamic
    cache does between decode steps; an engine that reserves whole pages or the full context needs more.
    """
    cache = facts.cache
    if cache is None:
        return None
    windowed = sum(min(context_tokens, window.tokens) * window.values_per_token for window in cache.windows)
    growing = context_tokens * cache.growing_values_per_token
    states = cache.state_values * max(element_bytes, SIXTEEN_BIT_BYTES) + cache.state_bytes
    return (growing + windowed) * element_bytes + states


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


class _Outside(NamedTuple):
    """Bytes of what isn't a block's linear weight, and of it what decoding one token reads."""

    total: float
    read_per_token: float


def _outside(facts: ShapeFacts, quantizer: StoresWeights, each: float) -> _Outside:
    """Embedding, head and the rest, the rest at `each` bytes a weight, and the tables too but where they differ."""
    columns = facts.embedding_weights // facts.vocabulary_tokens
    embedding_each, head_each = (
        each if (own := quantizer.table_bytes_per_weight(columns, is_head=is_head)) is None else own
        for is_head in (facts.tied, True)
    )
    embedding, head = facts.embedding_weights * embedding_each, facts.head_weights * head_each
    return _Outside(
        total=embedding + head + facts.other_weights * each,
        read_per_token=(embedding if facts.tied else head)
        + (facts.other_weights - facts.unread_weights) * each,
    )


def _resident(shape: LinearShape, quantizer: StoresWeights, float_bytes: int) -> HoldsBytes:
    return quantizer.resident_parts(shape.out_features, shape.in_features, float_bytes=float_bytes)


def _float_bytes(quantizer: StoresWeights, compute_bytes: int | None) -> int:
    return compute_bytes or math.ceil(quantizer.other_bytes_per_weight)
