"""Whether a checkpoint's tensors are the model's own parameters, name by name, so that each can be taken alone.

transformers renames, fuses and transposes what it loads for some architectures and for files of older versions.
Its own rules are asked here; where they would change anything, only loading the whole model gives its weights.

    match = match_names(folder, empty_model(parsed, source="config.json"))
    if match.because is None: ...  # quantize tensor by tensor, but for match.left_out
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.tensorfile import TensorInfo, tensors
from pipeline.values import Value
from pipeline.weights import read_file


class NameMatch(Value):
    """`because` says why tensors can't be taken one by one, or is None; `left_out` are second copies of tied ones."""

    because: str | None
    left_out: frozenset[str] = frozenset()


def match_names(folder: Path, model: Any) -> NameMatch:
    """Compare the folder's tensors with those of `model`, which may be on the meta device."""
    found = tensors(folder)
    if because := _renamed(found, model):
        return NameMatch(because=because)
    first_names: dict[int, str] = {}
    wanted: dict[str, Any] = {}
    copies: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            wanted[name] = tensor
        elif name in found:
            copies[name] = first
    for name in [*wanted, *found]:
        if name not in found:
            return NameMatch(because=f"{name} of the model is in no file")
        if name not in wanted and name not in copies:
            return NameMatch(because=f"the model has no {name}")
        if name in wanted and tuple(wanted[name].shape) != found[name].shape:
            return NameMatch(because=f"{name} has another shape in the file than in the model")
    for copy, first in copies.items():
        if not _equal(folder, found[copy], found[first], names=(copy, first)):
            return NameMatch(because=f"{copy} should be {first} (tied), but holds something else")
    return NameMatch(because=None, left_out=frozenset(copies))


def _renamed(names: Iterable[str], model: Any) -> str | None:
    """The first name that transformers wouldn't load as it is."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if pattern is not None:
            return f"transformers converts {name} into {renamed}"
        if renamed != name:
            return f"transformers loads {name} as {renamed}"
    return None


def _equal(folder: Path, one: TensorInfo, other: TensorInfo, *, names: tuple[str, str]) -> bool:
    import torch

    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pair = [
        dict(read_file(folder / info.file, {name: info}))[name]
        for name, info in zip(names, (one, other), strict=True)
    ]
    return torch.equal(*pair)
