"""Where a model's parameters are: embedding, head, attention, MLP, experts, norms, vision tower.

Told from each parameter's module (its class and its path), which transformers names alike across
architectures; a parameter that fits nowhere is `other`, so that the parts always add up.

    print(parameter_parts(model).experts)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pipeline.values import Value

_ATTENTION = re.compile(r"attn|attention|deltanet|mamba|mixer|retention", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_?forward|^fc_?\d|shared_expert|moe", re.IGNORECASE)
_MLP_CLASS = re.compile(r"M[Ll][Pp]|FFN|FeedForward|M[Oo][Ee](Block|Layer|$)")
_ROUTER = re.compile(r"^(gate|router|shared_expert_gate)$")


class ParameterParts(Value):
    """Parameters (elements, tied ones once) by what they do; together all of the model's.

    `head` is 0 when it is the embedding. `attention` holds every token mixer, linear attention and state
    spaces included; `experts` the routed experts alone: shared experts, which every token reads, are `mlp`.
    `vision` is all that decoding text doesn't use, towers and projectors of other inputs. `other`: routers,
    learned positions, whatever has no name known here.
    """

    embedding: int
    head: int
    attention: int
    mlp: int
    experts: int
    norms: int
    vision: int
    other: int

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.model_dump().values())


def parameter_parts(model: Any) -> ParameterParts:
    """Count a transformers causal language model's parameters by part."""
    head = model.get_output_embeddings()
    apart = {id(getattr(head, "weight", None)): "head", id(model.get_input_embeddings().weight): "embedding"}
    decoded = {id(weight) for weight in decoder(model).parameters()}
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    for path, module in model.named_modules():
        for _, weight in module.named_parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                place = apart.get(id(weight)) or (
                    _part(path, module, model) if id(weight) in decoded or module is head else "vision"
                )
                counts[place] += weight.numel()
    return ParameterParts(**{name: counts[name] for name in ParameterParts.model_fields})


def decoder(model: Any) -> Any:
    """The part of a model that decodes text: all of it, or what a vision tower stands beside."""
    return model if model.config.get_text_config(decoder=True) is model.config else model.get_decoder()


def _part(path: str, module: Any, model: Any) -> str:
    """The norm's class decides, then the innermost module whose class or name is known."""
    if "norm" in type(module).__name__.lower() or "norm" in path.rpartition(".")[2].lower():
        return "norms"
    for name, kind in _innermost_first(path, model):
        if _ROUTER.search(name) or "Router" in kind:
            return "other"
        if name == "experts" or (kind.endswith("Experts") and "shared" not in name):
            return "experts"
        # Classes first: some architectures call the MLP of one layer and the attention of the next alike.
        if _ATTENTION.search(kind):
            return "attention"
        if _MLP_CLASS.search(kind):
            return "mlp"
        if _ATTENTION.search(name):
            return "attention"
        if _MLP.search(name):
            return "mlp"
    return "other"


def _innermost_first(path: str, model: Any) -> Iterator[tuple[str, str]]:
    """(name, class name) of the module and of those around it; classes only within a layer."""
    in_layer = True
    while path:
        path, _, name = path.rpartition(".") if "." in path else ("", "", path)
        whole = f"{path}.{name}" if path else name
        in_layer = in_layer and not name.isdigit()
        yield name, type(model.get_submodule(whole)).__name__ if in_layer else ""
