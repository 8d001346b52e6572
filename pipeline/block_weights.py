"""Which weights of a model are the linear weights of its blocks: what a quantizer is for.

These are the matrices of `nn.Linear`, those of GPT-2's `Conv1D` (stored transposed), and the experts of a
mixture, which lie in one three-dimensional parameter or in one module each. Embedding and head are not
among them. Planning and coverage must mean the same weights, so both ask here.

    for block in block_weights(model):
        print(block.name, block.out_features, block.in_features, block.matrices)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

MatrixKind = Literal["linear", "conv1d", "experts"]
"""How a matrix lies in its module; quantizers differ in which of these they find."""


class BlockWeight(NamedTuple):
    """One parameter of a block: `matrices` matrices of `out_features` × `in_features`.

    `name` is the parameter's, `tensor` the parameter itself. `experts` is how many experts it stands among, of
    which a token uses a few; None for a weight that every token uses (shared experts too).
    """

    name: str
    tensor: Any
    kind: MatrixKind
    out_features: int
    in_features: int
    matrices: int
    experts: int | None


def block_weights(model: Any) -> Iterator[BlockWeight]:
    """The linear weights of a transformers model's blocks, each parameter once, embedding and head left out."""
    head = model.get_output_embeddings()
    seen = {id(model.get_input_embeddings().weight), id(getattr(head, "weight", None))}
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            if id(tensor) not in seen and (kind := _kind(path, module, tensor)):
                seen.add(id(tensor))
                rows, columns = _features(module, tensor, kind)
                yield BlockWeight(
                    name=f"{path}.{name}",
                    tensor=tensor,
                    kind=kind,
                    out_features=rows,
                    in_features=columns,
                    matrices=tensor.shape[0] if kind == "experts" else 1,
                    experts=_experts(path, tensor, model),
                )


def _kind(path: str, module: Any, tensor: Any) -> MatrixKind | None:
    import torch
    from transformers.pytorch_utils import Conv1D

    if tensor.dim() == 2 and isinstance(module, torch.nn.Linear):
        return "linear"
    if tensor.dim() == 2 and isinstance(module, Conv1D):
        return "conv1d"
    in_experts = "experts" in path.split(".") or type(module).__name__.endswith("Experts")
    return "experts" if tensor.dim() == 3 and in_experts else None


def _features(module: Any, tensor: Any, kind: MatrixKind) -> tuple[int, int]:
    rows, columns = tensor.shape[-2:]
    transposed = kind == "conv1d" or (kind == "experts" and getattr(module, "is_transposed", False))
    return (columns, rows) if transposed else (rows, columns)


def _experts(path: str, tensor: Any, model: Any) -> int | None:
    import torch

    if tensor.dim() == 3:
        return None if "shared" in path else int(tensor.shape[0])
    group = re.match(r"(.*\.experts)(\.|$)", path)
    listed = model.get_submodule(group[1]) if group else None
    return len(listed) if isinstance(listed, torch.nn.ModuleList) else None
