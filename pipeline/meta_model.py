"""The model that a config describes, built on the meta device: every shape, no memory, no weight.

What a model has in it can only be told by the class that would run it. So the config is checked, read by
transformers and built here, for planning, for coverage and for random weights alike. transformers fills sizes
that are missing with those of some published model and takes hours over absurd ones; both are refused first.

>>> config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
>>> model = empty_model(parse_config(config, source="config.json").config, source="config.json")
>>> sum(weight.numel() for weight in model.parameters())
124439808
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from pipeline.errors import PrerequisiteError, RecipeError
from pipeline.values import canonical_json

MOST = 2**31 - 1
SIZE_KEYS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim", "vocab_size"), MOST),
    **dict.fromkeys(("n_embd", "n_inner", "n_positions", "max_position_embeddings"), MOST),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "sliding_window"), MOST),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 100_000),
    **dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size"), MOST),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), MOST),
    **dict.fromkeys(("v_head_dim", "linear_num_key_heads", "linear_num_value_heads"), MOST),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"), MOST),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000),
}
"""Keys that hold a whole number from 1 to this; each layer is built, so that millions of them would hang."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
KEYS_WITHOUT_DEFAULT = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    *EXPERT_KEYS,
    "num_experts_per_tok",
    "moe_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
"""Where these are left out, transformers silently takes the sizes of some published model."""
ROUTED_EXPERT_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


_REFUSALS = (
    *(ValueError, TypeError, LookupError, AttributeError),
    *(RuntimeError, ArithmeticError, AssertionError),
)
"""What transformers' classes raise, without a word of their own, on sizes they can't work with."""


class ParsedConfig(NamedTuple):
    """transformers' config, and the layer kinds in the file that it doesn't know and doesn't read."""

    config: Any
    unknown_layer_kinds: tuple[str, ...]


def parse_config(config: Mapping[str, Any], *, source: str) -> ParsedConfig:
    """transformers' reading of a `config.json`; `source` names the file in messages.

    Raises RecipeError when it is incomplete or contradicts itself, PrerequisiteError when the installed
    transformers doesn't know the architecture. How the weights were quantized is left out.
    """
    _check_sizes(config, source=source)
    from huggingface_hub.errors import StrictDataclassError
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = config["model_type"]
    if name not in CONFIG_MAPPING:
        raise PrerequisiteError(f"{source}: {_unknown_model_type(config, list(CONFIG_MAPPING.keys()))}")
    config_class = CONFIG_MAPPING[name]
    _check_complete(config, config_class, source=source)
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "model_type")}
    unknown = tuple(sorted(set(plain.get("layer_types") or ()) - set(ALLOWED_LAYER_TYPES)))
    if unknown and not hasattr(config_class, "layer_types"):
        # The class doesn't read the key: weights are certain, what these layers cache is not.
        del plain["layer_types"]
    try:
        parsed = config_class.from_dict(plain)
    except (StrictDataclassError, *_REFUSALS) as error:
        raise RecipeError(
            f"{source}: transformers refuses this {name!r} config: {one_line(error)}"
        ) from error
    if getattr(parsed, "is_decoder", None) is False:
        raise RecipeError(
            f"{source}: {name!r} is an encoder here (is_decoder is false): it generates nothing; name a model that "
            "continues text"
        )
    return ParsedConfig(parsed, unknown)


def empty_model(parsed: Any, *, source: str, dtype: str = "bfloat16") -> Any:
    """The causal language model of transformers' config `parsed` on the meta device, in eval mode.

    `dtype` is torch's name of the type. Raises RecipeError when no model can be built with these sizes,
    PrerequisiteError when a package is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(parsed, dtype=getattr(torch, dtype)).eval()
    except ImportError as error:
        raise PrerequisiteError(f"{source}: building the model needs a package: {one_line(error)}") from error
    except _REFUSALS as error:
        raise RecipeError(f"{source}: transformers can't build this model: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The start of an exception's message, without line breaks."""
    return " ".join(str(error).split())[:300]


def _check_sizes(config: Mapping[str, Any], *, source: str) -> None:
    """Sizes that are no positive whole numbers, and those that contradict each other."""
    if not isinstance(config.get("model_type"), str):
        raise RecipeError(
            f"{source}: key 'model_type' is missing; a config.json names its architecture there"
        )
    try:
        canonical_json(dict(config))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{source}: not plain JSON ({error}); numbers must be finite") from error
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise RecipeError(f"{source}: text_config is {text!r}, must be an object with the sizes")
    blocks = {"": config, "text_config.": text}
    problems = [problem for prefix, block in blocks.items() for problem in _bad_values(block, prefix)]
    if not problems:
        problems = [problem for prefix, block in blocks.items() for problem in _contradictions(block, prefix)]
    if problems:
        raise RecipeError(f"{source}: " + "; ".join(problems))


def _bad_values(block: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in block.items():
        most = SIZE_KEYS.get(key)
        if most is not None and value is not None and not (type(value) is int and 0 < value <= most):
            limit = "above 0" if most == MOST else f"from 1 to {most:,}"
            too_large = f", at most {MOST:,}" if type(value) is int and value > MOST else ""
            yield f"{prefix}{key} is {value!r}, must be a whole number {limit}{too_large}"
    kinds = block.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        yield f"{prefix}layer_types is {kinds!r}, must be a list with the kind of each layer"


def _contradictions(block: Mapping[str, Any], prefix: str) -> Iterator[str]:
    heads, groups = block.get("num_attention_heads"), block.get("num_key_value_heads")
    if heads and groups and heads % groups:
        yield f"{prefix}num_attention_heads is {heads}, must be a multiple of num_key_value_heads, {groups}"
    for of in EXPERT_KEYS:
        for key in ROUTED_EXPERT_KEYS:
            experts, routed = block.get(of), block.get(key)
            if experts and type(routed) is int and routed > experts:
                yield f"{prefix}{key} is {routed}, must be at most {of}, {experts}"


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
    missing: dict[str, str] = {}
    for key in KEYS_WITHOUT_DEFAULT:
        alias = config_class.attribute_map.get(key, key)
        has_default = getattr(config_class, alias, None) is not None
        if has_default and key not in config and alias not in config:
            missing.setdefault(alias, key if alias == key else f"{key} (or {alias})")
    if missing:
        raise RecipeError(f"{source}: missing {', '.join(missing.values())}; every size must be given")
