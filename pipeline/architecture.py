"""What planning needs to know of a model, measured on the class transformers would build.

A config's sizes alone don't say how many weights a model has, which of them a token reads, or what its cache
keeps: every architecture answers differently, and formulas written beside it drift. So the model is built
on the meta device (no memory), its parameters are counted, and a forward pass of a few tokens fills the cache
classes it really uses: grouped heads, latent attention, sliding windows and recurrent states come out right.

>>> config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
>>> facts = shape_facts(config)
>>> facts.parameters, facts.cache.growing_values_per_token
(124439808, 18432)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pipeline.attention_span import AttentionSpan, attention_spans
from pipeline.block_weights import BlockWeight, MatrixKind, block_weights
from pipeline.kv_cache import CacheShape, cache_shape
from pipeline.meta_model import ROUTED_EXPERT_KEYS, empty_model, parse_config
from pipeline.parameter_parts import ParameterParts, decoder, parameter_parts
from pipeline.values import Value

__all__ = ["AttentionSpan", "LinearShape", "ParameterParts", "ShapeFacts", "shape_facts"]


class LinearShape(Value):
    """Like linear weights of a model: `count` matrices of `out_features` × `in_features`, read alike.

    `read_per_token` says how many of them one token reads: all of a dense layer, the routed experts of a
    mixture, none of a vision tower during text decoding. `kind` is how they lie in their modules.
    """

    kind: MatrixKind
    out_features: int
    in_features: int
    count: int
    read_per_token: int

    @property
    def elements(self) -> int:
        """Weights of all these matrices."""
        return self.count * self.out_features * self.in_features


class ShapeFacts(Value):
    """What planning needs to know of a model; weights are counted in elements, tied ones once.

    `parts` sorts the parameters by what they do, `linears` by shape. `other_weights` is everything outside
    linears, embedding and head: norms, convolutions, biases, routers that aren't `nn.Linear`, and of these
    `unread_weights` is what a decoded token doesn't read (tables of learned positions, the norms of a vision
    tower). `cache` is None when `cache_unavailable` says why, `attention` when it can't be told either.
    """

    model_type: str
    model_class: str
    parameters: int
    parts: ParameterParts
    embedding_weights: int
    head_weights: int
    tied: bool
    linears: tuple[LinearShape, ...]
    other_weights: int
    unread_weights: int
    layers: int
    context_tokens: int | None
    vocabulary_tokens: int
    cache: CacheShape | None
    cache_unavailable: str = ""
    attention: tuple[AttentionSpan, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def linear_weights(self) -> int:
        """Elements of the blocks' linear weights, experts included, head excluded."""
        return sum(shape.elements for shape in self.linears)

    @property
    def linear_weights_read_per_token(self) -> int:
        """Elements of linear weights that one token reads."""
        return sum(shape.read_per_token * shape.out_features * shape.in_features for shape in self.linears)

    @property
    def head_weights_read(self) -> int:
        """Elements that turning one state into logits reads: the head's, or the embedding's table where tied."""
        return self.embedding_weights if self.tied else self.head_weights

    @property
    def unquantized_weights_read_per_token(self) -> int:
        """Head, norms, biases: all but look-up tables."""
        return self.head_weights_read + self.other_weights - self.unread_weights

    @property
    def weights_read_per_token(self) -> int:
        """Elements that decoding one token reads; a token costs two FLOPs for each."""
        return self.linear_weights_read_per_token + self.unquantized_weights_read_per_token


def shape_facts(config: Mapping[str, Any], *, source: str = "config.json") -> ShapeFacts:
    """Measure the shapes of the model that a `config.json` describes, without allocating a weight.

    Imports torch and transformers (seconds) and builds the causal language model on the meta device in
    BF16. Raises RecipeError when the config is incomplete or contradicts itself, PrerequisiteError when
    the installed transformers doesn't know the architecture; `source` names the file in the message.
    """
    parsed, unknown_kinds = parse_config(config, source=source)
    model = empty_model(parsed, source=source)
    text = model.config.get_text_config(decoder=True)
    linears, notes = _linear_shapes(model, routed=_routed_experts(text))
    cache, problem = None, f"unknown layer kind {', '.join(map(repr, unknown_kinds))}"
    if not unknown_kinds:
        cache, problem = cache_shape(model)
    parts = parameter_parts(model)
    outside = parts.total - parts.embedding - parts.head
    return ShapeFacts(
        model_type=config["model_type"],
        model_class=type(model).__name__,
        parameters=parts.total,
        parts=parts,
        embedding_weights=parts.embedding,
        head_weights=parts.head,
        tied=parts.head == 0 and model.get_output_embeddings() is not None,
        linears=linears,
        other_weights=outside - sum(shape.elements for shape in linears),
        unread_weights=_unread_weights(model),
        layers=text.num_hidden_layers,
        context_tokens=getattr(text, "max_position_embeddings", None),
        vocabulary_tokens=text.vocab_size,
        cache=cache,
        cache_unavailable=problem,
        attention=attention_spans(model.config, cache=cache),
        notes=notes,
    )


def _linear_shapes(model: Any, *, routed: int | None) -> tuple[tuple[LinearShape, ...], tuple[str, ...]]:
    """The blocks' linear weights by shape, and notes on what isn't known of them."""
    decoded = {id(weight) for weight in decoder(model).parameters()}
    counts: Counter[tuple[MatrixKind, int, int, Fraction]] = Counter()
    notes = set()
    for block in block_weights(model):
        read = _share_read(block, routed=routed) if id(block.tensor) in decoded else Fraction(0)
        counts[(block.kind, block.out_features, block.in_features, read)] += block.matrices
        if block.experts and routed is None:
            notes.add("experts per token unknown: all experts counted as read")
    linears = tuple(
        LinearShape(
            kind=kind, out_features=rows, in_features=columns, count=count, read_per_token=int(count * read)
        )
        for (kind, rows, columns, read), count in sorted(counts.items())
    )
    return linears, tuple(sorted(notes))


def _share_read(block: BlockWeight, *, routed: int | None) -> Fraction:
    """Share of equal matrices that one token reads; 1 for a dense weight."""
    if block.experts is None or routed is None:
        return Fraction(1)
    return Fraction(min(routed, block.experts), block.experts)


def _routed_experts(text: Any) -> int | None:
    return next((value for key in ROUTED_EXPERT_KEYS if (value := getattr(text, key, None))), None)


def _unread_weights(model: Any) -> int:
    """Elements outside linears, embedding and head that decoding never reads: row tables, a vision tower's."""
    import torch

    head = model.get_output_embeddings()
    seen = {id(block.tensor) for block in block_weights(model)}
    seen |= {id(model.get_input_embeddings().weight), id(getattr(head, "weight", None))}
    decoded = {id(weight) for weight in decoder(model).parameters()} | {id(getattr(head, "bias", None))}
    unread = 0
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                is_table = isinstance(module, torch.nn.Embedding)
                unread += weight.numel() if is_table or id(weight) not in decoded else 0
    return unread
