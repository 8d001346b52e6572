"""Weights through optimum-quanto's own functions: modules replaced, weights quantized, taken apart, put together.

What knows quanto's classes from inside is here; what a checkpoint is, in `quantizers.quanto`.

    replace_modules(model, linear_layers(model), "qint8")
    parts, raised = stored_parts(weight, module=model.get_submodule(name), name=name)
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pipeline.errors import CheckpointError, StageError
from pipeline.linear_layers import fill
from pipeline.weights import largest_magnitude

if TYPE_CHECKING:
    import torch

TINYGEMM_ROWS = 16
_MARK = ".weight._"
"""Between a layer's name and that of a part of its quantized weight."""
_BLOCK_WEIGHTS = 2_097_152
"""Quantized at once: few enough that what is computed on the way stays in a CPU's cache."""


def quanto_layers(model: Any, names: Iterable[str], quanto_type: str) -> dict[str, Any]:
    """quanto's layers for the named ones, on the same device, their weights not quantized yet."""
    from optimum.quanto import qtypes
    from optimum.quanto.nn import QLinear

    _use_plain_unpack()
    qtype = qtypes[quanto_type]
    return {name: QLinear.from_module(model.get_submodule(name), weights=qtype) for name in names}


def replace_modules(model: Any, names: Iterable[str], quanto_type: str) -> dict[str, Any]:
    """Put `quanto_layers` in the named ones' places; returns them."""
    made = quanto_layers(model, names, quanto_type)
    for name, module in made.items():
        model.set_submodule(name, module)
    return made


def frozen_weight(weight: torch.Tensor, *, module: Any, name: str) -> tuple[Any, int]:
    """`weight` quantized as `module` says, and how many scales had to be raised. Raises StageError.

    A scale that rounds to 0 divides by zero, and FP8 keeps the NaN. It becomes the smallest number of its
    type: zeros stay zero, and a row so small that its scale underflowed consists of multiples of it.
    """
    import torch
    from optimum.quanto.tensor import quantize_weight

    qtype = module.weight_qtype
    if qtype.bits == 8:
        scale, shift = module.optimizer(weight, qtype=qtype, axis=0), None
    else:
        scale, shift = module.optimizer(weight, qtype=qtype, axis=0, group_size=module.weight_group_size)
    tiny = torch.finfo(scale.dtype).smallest_normal * torch.finfo(scale.dtype).eps
    flat = scale == 0
    safe = torch.where(flat, tiny, scale).to(scale.dtype)
    quantized = quantize_weight(
        weight,
        qtype=qtype,
        axis=0,
        scale=safe,
        shift=shift,
        group_size=module.weight_group_size,
        optimized=False,
    )
    if not math.isfinite(largest_magnitude(quantized.dequantize())):
        raise StageError(f"{name}.weight: holds NaN or infinity once quantized to {qtype.name}")
    if not bool(flat.any()):
        return quantized, 0
    spread = weight.reshape(scale.numel(), -1).abs().amax(dim=1).reshape(scale.shape)
    return quantized, int((flat & (spread > 0)).sum())


def stored_parts(weight: torch.Tensor, *, module: Any, name: str) -> tuple[dict[str, torch.Tensor], int]:
    """What quanto stores of `weight`, quantized, by tensor name; and as `frozen_weight`.

    A few rows at a time: each row has scales of its own, and what quanto computes on the way is several times
    the weight. A lone row would get one scale for all of it, in another shape, so there are two at least.
    """
    import torch
    from optimum.quanto.tensor.packed import PackedTensor

    blocks = min(-(-weight.numel() // _BLOCK_WEIGHTS), max(1, weight.shape[0] // 2))
    found = [frozen_weight(block, module=module, name=name) for block in weight.tensor_split(blocks)]
    raised = sum(one for _, one in found)
    parts: dict[str, torch.Tensor] = {}
    found[0][0].save_to_state_dict(parts, f"{name}.weight.", keep_vars=False)
    if blocks == 1:
        return parts, raised
    for part in set(parts) & {f"{name}.weight._scale", f"{name}.weight._shift"}:
        parts[part] = torch.cat([getattr(frozen, part.rpartition(".")[2]) for frozen, _ in found])
    data = [frozen._data for frozen, _ in found]
    if module.weight_qtype.bits == 8:
        parts[f"{name}.weight._data"] = torch.cat(data)
    else:  # the first half of all rows is packed with the second, so only the whole can be
        rows = torch.cat([block.unpack() for block in data])
        parts[f"{name}.weight._data._data"] = PackedTensor.pack(rows, bits=module.weight_qtype.bits)._data
    return parts, raised


def fill_layers(model: Any, layers: Mapping[str, Any], folder: Path, *, device: str) -> None:
    """Give the empty `model` its tensors, those of quanto's `layers` put together; raises as `linear_layers.fill`."""
    import torch

    held: dict[str, dict[str, torch.Tensor]] = {}

    def take(name: str, tensor: torch.Tensor) -> bool:
        owner, mark, _ = name.partition(_MARK)
        layer = layers.get(owner)
        if not mark or layer is None:
            return False
        parts = held.setdefault(owner, {})
        is_float = name.endswith(("._scale", "._shift"))
        parts[name] = tensor.to(layer.input_scale.dtype) if is_float else tensor
        if len(parts) == (2 if layer.weight_qtype.bits == 8 else 3):
            weight = read_weight(layer, held.pop(owner), name=owner, folder=folder)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        return True

    fill(model, folder, device=device, take=take)


def read_weight(module: Any, state: dict[str, Any], *, name: str, folder: Path) -> Any:
    """Take a module's quantized weight out of `state`, in the form its device computes with."""
    from optimum.quanto.tensor import WeightQBitsTensor, WeightQBytesTensor

    missing: list[str] = []
    shape = {"size": module.weight.size(), "stride": module.weight.stride(), "missing_keys": missing}
    qtype, prefix = module.weight_qtype, f"{name}.weight."
    if qtype.bits == 8:
        weight = WeightQBytesTensor.load_from_state_dict(
            state, prefix, qtype=qtype, axis=0, activation_qtype=None, **shape
        )
    else:
        weight = WeightQBitsTensor.load_from_state_dict(
            state, prefix, qtype=qtype, axis=0, group_size=module.weight_group_size, **shape
        )
    if missing:
        raise CheckpointError(f"{folder}: {missing[0]} is in no file")
    return weight.optimize() if _has_kernel(weight) else weight


def _has_kernel(weight: Any) -> bool:
    """Whether quanto's packed kernels work: CUDA's are compiled first, the CPU's need 16 rows."""
    if weight.device.type == "cuda":
        return _can_compile_cuda()
    return bool(weight.shape[0] % TINYGEMM_ROWS == 0)


def _can_compile_cuda() -> bool:
    return shutil.which("nvcc") is not None and shutil.which("ninja") is not None


def _use_plain_unpack() -> None:
    """Unpack INT4 with two torch operations instead of quanto's extension, which does just that.

    Quanto compiles that extension on first use, into its own package folder: close to a minute, a C++
    compiler, and a lock file that a killed process leaves for the next one to wait on.
    """
    from optimum.quanto.library.extensions import extension

    for name in ("quanto_cpp",) if _can_compile_cuda() else ("quanto_cpp", "quanto_cuda"):
        found: Any = extension._extensions.get(name)
        if found is not None and found._lib is None:
            found._lib = SimpleNamespace(unpack=_unpack)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The low halves of all bytes, then the high ones, along the first dimension."""
    import torch

    assert bits == 4, bits
    return torch.cat((packed & 0x0F, packed >> 4))
