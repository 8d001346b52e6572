"""Which weights of a checkpoint are really quantized, counted from its files against the model's shape.

A quantizer that looks for `nn.Linear` finds nothing in a GPT-2 (its blocks are Conv1D) and little in a
mixture of experts (the experts are three-dimensional parameters), and publishes the result as INT4 all the
same. So the model that the config describes is built on the meta device, its block weights are listed, and
each is looked up in the file.

    layout = model_layout(Path("checkpoint"))
    print(coverage(tensors(folder), layout=layout, quantizer=quantizer).share)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pipeline.block_weights import block_weights
from pipeline.errors import CheckpointError, PipelineError
from pipeline.meta_model import empty_model, one_line
from pipeline.results import Coverage
from pipeline.tensorfile import TensorInfo
from pipeline.values import Value


class StoredLike(Protocol):
    """What is asked of one entry of `stored_weights`."""

    @property
    def name(self) -> str: ...
    @property
    def elements(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def quantized(self) -> bool: ...
    @property
    def group_size(self) -> int | None: ...


class Labels(Protocol):
    """What is asked of a quantizer here."""

    small_tensors_in_fp32: ClassVar[bool]
    """Whether norms, biases and the like are FP32 whatever the label."""

    @property
    def minimum_coverage(self) -> float:
        """Share of block weights, 0 to 1; 0 for a quantizer that only sets the type."""

    @property
    def precision(self) -> str: ...
    def stored_tensors(self, folder: Path) -> dict[str, TensorInfo]: ...
    def stored_weights(
        self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> tuple[StoredLike, ...]: ...
    def manifest_block(self) -> dict[str, Any]: ...


class ModelLayout(Value):
    """The weights of the model that a config describes; tied ones counted once.

    `linear` maps each block weight's name (as transformers writes it to a file) to its shape there: experts
    may lie apart in a file and be one parameter in memory, which `module_linear` names. `head` is None when
    the head is the embedding.
    """

    parameters: int
    embedding: str
    embedding_weights: int
    head: str | None
    head_weights: int
    tied: bool
    prefix: str
    linear: dict[str, tuple[int, ...]]
    module_linear: dict[str, tuple[int, ...]]


class StoredSizes(Value):
    """Bytes of a checkpoint's tensor data, and its parts."""

    total: int
    blocks: int
    read_per_token: int


def model_layout(folder: Path) -> ModelLayout:
    """The weights that the folder's config describes, from the meta device: nothing is allocated.

    Imports torch and transformers (seconds). Raises CheckpointError when transformers can't build the model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = empty_model(config, source=str(folder / "config.json"))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers can't read this model's config ({one_line(error)})"
        ) from error
    except PipelineError as error:
        raise CheckpointError(str(error)) from error
    return layout_of(model)


def layout_of(model: Any) -> ModelLayout:
    """The same of a model that is built already, on the meta device or not."""
    from transformers.core_model_loading import revert_weight_conversion

    linear = {block.name: block.tensor for block in block_weights(model)}
    on_disk = revert_weight_conversion(model, dict(linear))
    names = {id(weight): name for name, weight in reversed(list(model.named_parameters()))}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is None or head.weight is embedding.weight
    return ModelLayout(
        parameters=sum(weight.numel() for weight in model.parameters()),
        embedding=names[id(embedding.weight)],
        embedding_weights=embedding.weight.numel(),
        head=None if tied else names[id(head.weight)],
        head_weights=0 if tied else head.weight.numel(),
        tied=tied,
        prefix=f"{model.base_model_prefix}.",
        linear={name: tuple(weight.shape) for name, weight in on_disk.items()},
        module_linear={name: tuple(weight.shape) for name, weight in linear.items()},
    )


def coverage(found: Mapping[str, TensorInfo], *, layout: ModelLayout, quantizer: Labels) -> Coverage:
    """Count what is quantized in a file whose tensors are `found`, as `quantizer` interprets them.

    `groups` of the result says how many weights share one scale, for each quantized weight that has groups.
    """
    stored = _stored(found, quantizer)
    linear, named = _matched(stored, layout)
    quantized = {name: stored[source] for name, source in named.items() if stored[source].quantized}
    proves_nothing = quantizer.minimum_coverage <= 0
    head = next((entry for name, entry in stored.items() if _same(name, layout.head)), None)
    return Coverage(
        linear_weights=sum(math.prod(shape) for shape in linear.values()),
        quantized_weights=sum(math.prod(linear[name]) for name in quantized),
        head_weights=layout.head_weights,
        head_quantized=head is not None and head.quantized,
        embedding_weights=layout.embedding_weights,
        unquantized_names=()
        if proves_nothing
        else tuple(sorted(name for name in linear if name not in quantized)),
        groups={name: entry.group_size for name, entry in quantized.items() if entry.group_size is not None},
    )


def stored_sizes(found: Mapping[str, TensorInfo], *, layout: ModelLayout, quantizer: Labels) -> StoredSizes:
    """Bytes on disk, of the block weights with their scales, and read for each decoded token.

    An untied embedding is not read (one row of it is); a tied head that was saved twice is read once.
    """
    stored = _stored(found, quantizer)
    _, named = _matched(stored, layout)
    total = sum(info.size_bytes for info in found.values())
    embedding = sum(entry.stored_bytes for name, entry in stored.items() if _same(name, layout.embedding))
    saved_twice = any(_same(name, "lm_head.weight") for name in stored)
    unread = embedding if not layout.tied or saved_twice else 0
    blocks = sum(stored[source].stored_bytes for source in named.values())
    return StoredSizes(total=total, blocks=blocks, read_per_token=total - unread)


def _stored(found: Mapping[str, TensorInfo], quantizer: Labels) -> dict[str, StoredLike]:
    shapes = {name: (info.dtype, info.shape) for name, info in found.items()}
    return {entry.name: entry for entry in quantizer.stored_weights(shapes)}


def _matched(
    stored: Mapping[str, StoredLike], layout: ModelLayout
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The block weights under the naming this file uses, and the stored name of each that is there.

    Files name weights as transformers writes them or as the modules are called, with or without the name of
    the inner model in front (the published GPT-2 leaves it out).
    """
    best: tuple[dict[str, tuple[int, ...]], dict[str, str]] = (layout.linear, {})
    for linear in (layout.linear, layout.module_linear):
        for named in _namings(stored, layout.prefix):
            present = {name: named[name] for name in linear if name in named}
            if len(present) > len(best[1]):
                best = (linear, present)
    return best


def _namings(stored: Iterable[str], prefix: str) -> tuple[dict[str, str], ...]:
    return (
        {name: name for name in stored},
        {f"{prefix}{name}": name for name in stored},
        {name.removeprefix(prefix): name for name in stored},
    )


def _same(stored: str, name: str | None) -> bool:
    return name is not None and (stored == name or name.endswith(f".{stored}") or stored.endswith(f".{name}"))
