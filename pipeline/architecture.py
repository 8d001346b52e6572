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

import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from pipeline.errors import PrerequisiteError, RecipeError
from pipeline.kv_cache import CacheShape, cache_shape, one_line
from pipeline.values import Value

SIZE_KEYS = frozenset(
    {
        *("hidden_size", "intermediate_size", "head_dim", "vocab_size", "max_position_embeddings"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "sliding_window"),
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
    }
)
KEYS_WITHOUT_DEFAULT = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Where these are left out, transformers silently takes the sizes of some published model."""
ROUTED_EXPERT_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


class LinearShape(Value):
    """Like linear weights of a model: `count` matrices of `out_features` × `in_features`, read alike.

    `read_per_token` says how many of them one token reads: all of a dense layer, the routed experts of a
    mixture, none of a vision tower during text decoding.
    """

    out_features: int
    in_features: int
    count: int
    read_per_token: int


class ShapeFacts(Value):
    """What planning needs to know of a model; weights are counted in elements, tied ones once.

    `other_weights` is everything outside linears, embedding and head: norms, convolutions, biases, routers,
    and of these `unread_weights` is what a decoded token doesn't read (tables of learned positions, the norms
    of a vision tower). `cache` is None when `cache_unavailable` says why.
    """

    model_type: str
    model_class: str
    parameters: int
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
    notes: tuple[str, ...] = ()

    @property
    def linear_weights(self) -> int:
        """Elements of the blocks' linear weights, experts included, head excluded."""
        return sum(shape.count * shape.out_features * shape.in_features for shape in self.linears)

    @property
    def linear_weights_read_per_token(self) -> int:
        """Elements of linear weights that one token reads."""
        return sum(shape.read_per_token * shape.out_features * shape.in_features for shape in self.linears)

    @property
    def unquantized_weights_read_per_token(self) -> int:
        """Head (the embedding's table where tied), norms, biases: all but look-up tables."""
        head = self.embedding_weights if self.tied else self.head_weights
        return head + self.other_weights - self.unread_weights

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
    _check_sizes(config, source=source)
    parsed, cache_problem = _parse(config, source=source)
    model = _meta_model(parsed, source=source)
    text = model.config.get_text_config(decoder=True)
    linears, unread, notes = _weigh_blocks(model, text)
    cache = None
    if not cache_problem:
        cache, cache_problem = cache_shape(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    parameters = sum(weight.numel() for weight in model.parameters())
    head_weights = 0 if head is None or tied else head.weight.numel()
    linear_weights = sum(shape.count * shape.out_features * shape.in_features for shape in linears)
    return ShapeFacts(
        model_type=config["model_type"],
        model_class=type(model).__name__,
        parameters=parameters,
        embedding_weights=embedding.weight.numel(),
        head_weights=head_weights,
        tied=tied,
        linears=linears,
        other_weights=parameters - linear_weights - embedding.weight.numel() - head_weights,
        unread_weights=unread,
        layers=text.num_hidden_layers,
        context_tokens=getattr(text, "max_position_embeddings", None),
        vocabulary_tokens=text.vocab_size,
        cache=cache,
        cache_unavailable=cache_problem,
        notes=notes,
    )


def _check_sizes(config: Mapping[str, Any], *, source: str) -> None:
    """Sizes that are no positive whole numbers, and heads that can't be grouped."""
    if not isinstance(config.get("model_type"), str):
        raise RecipeError(
            f"{source}: key 'model_type' is missing; a config.json names its architecture there"
        )
    blocks = {"": config, "text_config.": config.get("text_config") or {}}
    problems = [
        f"{prefix}{key} is {value!r}, must be a whole number above 0"
        for prefix, block in blocks.items()
        for key, value in block.items()
        if key in SIZE_KEYS and value is not None and (type(value) is not int or value <= 0)
    ]
    if not problems:
        problems = [
            f"{prefix}num_attention_heads is {block['num_attention_heads']}, must be a multiple of "
            f"num_key_value_heads, {block['num_key_value_heads']}"
            for prefix, block in blocks.items()
            if block.get("num_attention_heads")
            and block.get("num_key_value_heads")
            and block["num_attention_heads"] % block["num_key_value_heads"]
        ]
    if problems:
        raise RecipeError(f"{source}: " + "; ".join(problems))


def _parse(config: Mapping[str, Any], *, source: str) -> tuple[Any, str]:
    """transformers' config, and why the KV cache can't be told (empty when it can)."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = config["model_type"]
    if name not in CONFIG_MAPPING:
        raise PrerequisiteError(f"{source}: {_unknown_model_type(config, list(CONFIG_MAPPING.keys()))}")
    config_class = CONFIG_MAPPING[name]
    _check_complete(config, config_class, source=source)
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "model_type")}
    unknown = sorted(set(plain.get("layer_types") or ()) - set(ALLOWED_LAYER_TYPES))
    if unknown and not hasattr(config_class, "layer_types"):
        # The class doesn't read the key: weights are certain, what these layers cache is not.
        del plain["layer_types"]
    try:
        parsed = config_class.from_dict(plain)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise RecipeError(
            f"{source}: transformers refuses this {name!r} config: {one_line(error)}"
        ) from error
    return parsed, f"unknown layer kind {', '.join(map(repr, unknown))}" if unknown else ""


def _unknown_model_type(config: Mapping[str, Any], known: list[str]) -> str:
    name = config["model_type"]
    near = get_close_matches(name, known, n=1)
    hint = f" (nearest: {near[0]!r})" if near else ""
    version = importlib.metadata.version("transformers")
    own_code = "; code from the model's repository (auto_map) isn't run here" if "auto_map" in config else ""
    return (
        f"model_type {name!r} is unknown to transformers {version}{hint}{own_code}; a newer one may know it"
    )


def _check_complete(config: Mapping[str, Any], config_class: Any, *, source: str) -> None:
    if "text_config" in config:  # published composite configs do leave sizes to the class
        return
    missing = []
    for key in KEYS_WITHOUT_DEFAULT:
        alias = config_class.attribute_map.get(key, key)
        has_default = getattr(config_class, alias, None) is not None
        if has_default and key not in config and alias not in config:
            missing.append(key if alias == key else f"{key} (or {alias})")
    if missing:
        raise RecipeError(f"{source}: missing {', '.join(missing)}; every size must be given")


def _meta_model(parsed: Any, *, source: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(parsed, dtype=torch.bfloat16).eval()
    except ImportError as error:
        raise PrerequisiteError(f"{source}: building the model needs a package: {one_line(error)}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise RecipeError(f"{source}: transformers can't build this model: {one_line(error)}") from error


def _weigh_blocks(model: Any, text: Any) -> tuple[tuple[LinearShape, ...], int, tuple[str, ...]]:
    """Linear weights by shape, elements of other weights that decoding never reads, and notes."""
    import torch

    head = model.get_output_embeddings()
    seen = {id(model.get_input_embeddings().weight), id(head.weight) if head is not None else 0}
    decoding = model if text is model.config else model.get_decoder()
    decoded = {id(weight) for weight in decoding.parameters()}
    counts: Counter[tuple[int, int, Fraction]] = Counter()
    unread, notes = 0, set()
    for name, weight, module in _weights(model):
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        shape = _linear_shape(name, weight, module)
        if shape is None:
            row_table = isinstance(module, torch.nn.Embedding)
            unread += weight.numel() if row_table or id(weight) not in decoded else 0
            continue
        share, note = _routed_share(name, weight, model, text)
        notes.update([note] if note else [])
        read = share if id(weight) in decoded else Fraction(0)
        counts[(*shape, read)] += weight.numel() // (shape[0] * shape[1])
    linears = tuple(
        LinearShape(out_features=rows, in_features=columns, count=count, read_per_token=int(count * read))
        for (rows, columns, read), count in sorted(counts.items())
    )
    return linears, unread, tuple(sorted(notes))


def _weights(model: Any) -> Iterator[tuple[str, Any, Any]]:
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            yield f"{path}.{name}", weight, module


def _linear_shape(name: str, weight: Any, module: Any) -> tuple[int, int] | None:
    """(out_features, in_features) of a linear weight or of each expert of a 3-D one; None for others."""
    import torch
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, torch.nn.Linear) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    if isinstance(module, Conv1D) and weight.dim() == 2:
        return weight.shape[1], weight.shape[0]
    if weight.dim() == 3 and "experts" in name.split("."):
        rows, columns = weight.shape[1], weight.shape[2]
        return (columns, rows) if getattr(module, "is_transposed", False) else (rows, columns)
    return None


def _routed_share(name: str, weight: Any, model: Any, text: Any) -> tuple[Fraction, str]:
    """Share of equal experts that one token reads; 1 for a dense weight."""
    path = re.match(r"(.*\.experts)\.", name)
    if path is None:
        return Fraction(1), ""
    experts = weight.shape[0] if weight.dim() == 3 else len(model.get_submodule(path[1]))
    routed = next((value for key in ROUTED_EXPERT_KEYS if (value := getattr(text, key, None))), None)
    if routed is None:
        return Fraction(1), "experts per token unknown: all experts counted as read"
    return Fraction(min(routed, experts), experts), ""
