"""Bytes of the tensors that really are in memory, each storage once.

Libraries report the logical size of quantized weights; what counts is the packed data, the scales, the
zero-points and the codebooks that stand behind them, and tied weights once.

>>> import torch
>>> linear = torch.nn.Linear(4, 2, bias=False)
>>> resident_bytes(linear)
32
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def resident_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters, buffers and quantization state of `model`, storages deduplicated.

    What a module holds where no tensor shows it, it says in `opaque_bytes`.
    """
    opaque = sum(int(getattr(module, "opaque_bytes", 0)) for module in model.modules())
    return storage_bytes(_module_tensors(model)) + opaque


def parameter_bytes(model: torch.nn.Module) -> int:
    """The same of parameters and buffers alone, for modules that hold their KV cache, too."""
    held = (*model.parameters(), *model.buffers())
    return storage_bytes(plain for tensor in held for plain in _plain_tensors(tensor))


def cache_bytes(cache: Any) -> int:
    """Bytes of a transformers cache: keys and values of every layer, and constant linear-attention state.

    Counters that a layer keeps beside them (scalars and vectors) are left out.
    """
    held = _tensors_in([vars(layer) for layer in cache.layers], depth=4)
    return storage_bytes(tensor for tensor in held if tensor.dim() >= 2)


def device_types(model: torch.nn.Module) -> set[str]:
    """Types of the devices that hold the model's tensors: {"cuda"}, or more when layers are offloaded."""
    return {tensor.device.type for tensor in _module_tensors(model)}


def storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """Sum over distinct storages; views of one storage count once, meta tensors not at all."""
    seen: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta":
            seen[(str(tensor.device), storage.data_ptr())] = storage.nbytes()
    return sum(seen.values())


def _module_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        held = {name: item for name, item in vars(module).items() if name not in ("_modules", "config")}
        yield from _tensors_in(held, depth=3)


def _tensors_in(item: Any, *, depth: int) -> Iterator[torch.Tensor]:
    """Tensors reachable from `item` through containers, tensor subclasses and quantization state objects."""
    import torch

    if isinstance(item, torch.Tensor):
        yield from _plain_tensors(item)
    elif depth <= 0 or isinstance(item, torch.nn.Module):
        return
    elif isinstance(item, dict):
        for value in item.values():
            yield from _tensors_in(value, depth=depth - 1)
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _tensors_in(value, depth=depth - 1)
    elif type(item).__module__.startswith(("bitsandbytes", "optimum", "torchao")) and hasattr(
        item, "__dict__"
    ):
        yield from _tensors_in(vars(item), depth=depth - 1)


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _plain_tensors(getattr(tensor, name))
        return
    yield tensor
    # bitsandbytes hangs absmax, codebook and row scales on the parameter.
    for name in ("quant_state", "SCB", "CB"):
        state = getattr(tensor, name, None)
        if state is not None:
            yield from _tensors_in(state, depth=4)  # double quantization nests a second state in the first
