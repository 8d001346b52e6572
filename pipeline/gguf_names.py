"""The tensors of a GGUF file under the names that transformers' model gives them.

llama.cpp has names of its own (`blk.0.attn_q.weight`) and lays a mixture's experts into one tensor. What is counted
of a checkpoint is counted against the model, so its weights are looked up under the names of the package `gguf`.
What has no counterpart keeps llama.cpp's name, and then doesn't count as a weight of the model.

    tensors = named_tensors(folder, read_gguf(folder / "model.gguf"))
    tensors["model.layers.0.self_attn.q_proj.weight"].dtype
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.coverage import model_layout
from pipeline.gguf_file import BLOCK_TYPES, GgufHeader, stored_bytes
from pipeline.tensorfile import TensorInfo

_EXPERT = re.compile(r"\.experts\.\d+\.")


def named_tensors(folder: Path, header: GgufHeader) -> dict[str, TensorInfo]:
    """The file's tensors by the model's names; a tensor of several weights as one entry for each of them.

    Raises CheckpointError when the folder's config.json can't be read by transformers.
    """
    layout = model_layout(folder)
    shapes = {
        **layout.linear,
        layout.embedding: _rows(layout.embedding_weights, header, "token_embd.weight"),
        **({layout.head: _rows(layout.head_weights, header, "output.weight")} if layout.head else {}),
    }
    owners = _owners(tuple(shapes), header)
    found: dict[str, TensorInfo] = {}
    for name, info in header.tensors.items():
        parts = {owner: shapes[owner] for owner in owners.get(name, ())}
        found.update(_parts(info, parts) or {name: info})
    return found


def _rows(weights: int, header: GgufHeader, name: str) -> tuple[int, ...]:
    """The shape of a table of so many weights, whose rows are as long as those of the file's tensor."""
    columns = header.tensors[name].shape[-1] if name in header.tensors else 1
    return (weights // columns, columns)


def _owners(names: tuple[str, ...], header: GgufHeader) -> dict[str, list[str]]:
    """The model's names of each of the file's tensors."""
    import gguf

    architecture = next(
        (found for found, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture), None
    )
    blocks = header.metadata.get(f"{header.architecture}.block_count")
    if architecture is None or not isinstance(blocks, int):
        return {}
    known = gguf.get_tensor_name_map(architecture, blocks)
    owners: dict[str, list[str]] = {}
    for name in names:
        # One tensor of the file holds all experts; text models of several parts lose that part's name.
        plain = _EXPERT.sub(".experts.", name).replace("language_model.", "")
        if called := known.get_name(plain, try_suffixes=(".weight", ".bias")):
            owners.setdefault(called, []).append(name)
    return owners


def _parts(info: TensorInfo, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """One entry for each weight that lies in the tensor; empty where they don't fill it."""
    if sum(math.prod(shape) for shape in shapes.values()) != info.elements:
        return {}
    if len(shapes) == 1:
        return dict.fromkeys(shapes, info)
    if any(math.prod(shape) % BLOCK_TYPES[info.dtype].weights for shape in shapes.values()):
        return {}
    return {
        name: info.model_copy(
            update={"shape": shape, "size_bytes": stored_bytes(info.dtype, math.prod(shape))}
        )
        for name, shape in shapes.items()
    }
