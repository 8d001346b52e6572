"""Weight-only INT8, INT4 and FP8 of optimum-quanto; the head stays in 16 bits.

INT8 and FP8 (e4m3) keep one scale a row; INT4 keeps scale and shift for each group of a row, of a size quanto
picks from the row's length (see `effective_group_size`). Scales have the type of the unquantized weights.
Only `nn.Linear` is quantized: a GPT-2 (Conv1D) or a mixture of experts comes out as it went in, which the
checkpoint's coverage then shows.

>>> effective_group_size(288), effective_group_size(64)
(96, None)
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline.block_weights import MatrixKind
from pipeline.checkpoint import check_source
from pipeline.errors import CheckpointError, StageError
from pipeline.quantizers.base import Quantizer, StoredBytes, StoredWeight, group_wise
from pipeline.random_weights import SEED_NAME
from pipeline.results import Problem
from pipeline.tensorfile import read_json
from pipeline.weights import (
    copy_config,
    copy_side_files,
    load_pretrained,
    missing_packages,
    quiet_transformers,
    read_tensors,
    ready,
    saving_to,
    scan_source,
    sixteen_bit_type,
    write_json,
)

if TYPE_CHECKING:
    import torch

MAP_NAME = "quanto_qmap.json"
"""quanto's own file: which modules are quantized, and to what."""
LARGEST_GROUP_WEIGHTS = 128
GROUP_STEP_WEIGHTS = 32
TINYGEMM_ROWS = 16
_QUANTO_TYPES = {"int8": "qint8", "int4": "qint4", "fp8": "qfloat8_e4m3fn"}
_SCALE_BYTES = 2


def effective_group_size(in_features: int) -> int | None:
    """Weights that share a scale in quanto's INT4, or None where the whole row does.

    From 128 down in steps of 32, the first that divides a row longer than 128 (optimum/quanto/nn/qmodule.py).
    """
    if in_features <= LARGEST_GROUP_WEIGHTS:
        return None
    sizes = range(LARGEST_GROUP_WEIGHTS, 0, -GROUP_STEP_WEIGHTS)
    return next((size for size in sizes if in_features % size == 0), None)


class Quanto(Quantizer):
    """Linear weights stored as `weights`; everything else in 16 bits."""

    quantizable: ClassVar[frozenset[MatrixKind]] = frozenset(("linear",))

    kind: Literal["quanto"] = "quanto"
    weights: Literal["int8", "int4", "fp8"]

    @property
    def precision(self) -> str:
        """The weights' type."""
        return self.weights

    @classmethod
    def default_for(cls, precision: str, *, device: str) -> Quanto | None:
        """INT8 where bitsandbytes has no kernels for it (weight-only, so FP32 arithmetic keeps it exact); FP8."""
        if precision == "int8" and device != "cuda":
            return cls(weights="int8")
        return cls(weights="fp8") if precision == "fp8" else None

    def check(self, *, device: str) -> tuple[Problem, ...]:
        """Packages, and a device that is tried here."""
        problems = missing_packages("torch", "transformers", "accelerate", "optimum-quanto")
        if device.split(":")[0] not in ("cpu", "cuda"):
            problems += (
                Problem(
                    what=f"quanto isn't used on {device!r} here",
                    fix="run on cpu or cuda, or take another quantizer",
                ),
            )
        return problems

    def quantize(self, source_folder: Path, out: Path, *, device: str) -> tuple[str, ...]:
        """Load at 16 bits, replace one linear weight after the other, save frozen; see the base class."""
        import torch
        from huggingface_hub import save_torch_state_dict

        scan = scan_source(source_folder)
        dtype = sixteen_bit_type(check_source(source_folder).dtype, scan)
        model: Any = load_pretrained(source_folder, dtype=getattr(torch, dtype), device_map={"": device})
        notes = _quantize_modules(model, _QUANTO_TYPES[self.weights])
        with saving_to(out):
            save_torch_state_dict(_state_to_save(model), out)
        write_json(out / MAP_NAME, _quantization_map(model))
        copy_config(source_folder, out, dtype=dtype)
        return notes + copy_side_files(source_folder, out)

    def load_stored(self, folder: Path, *, device: str, compute_dtype: str) -> torch.nn.Module:
        """The stored integers with their scales in `compute_dtype` (exact for float32)."""
        import torch
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM

        wanted = self._saved_map(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with quiet_transformers(), init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, compute_dtype))
        _replace_modules(model, wanted, _QUANTO_TYPES[self.weights])
        _fill(model, folder, device=device, compute_dtype=compute_dtype)
        return ready(model.to(device), folder=folder, device=device)

    def outline(self, model: Any, *, compute_dtype: str) -> None:
        """Linear layers but the head become quanto's; every stored float takes the type of the arithmetic."""
        import torch

        wanted = getattr(torch, compute_dtype)
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(wanted)
        _replace_modules(model, _replaceable(model), _QUANTO_TYPES[self.weights])

    def pack(self, plain: Any, into: Any, *, name: str) -> None:
        """Frozen, taken apart as for a file, and put together as from one, scales in the type of the arithmetic."""
        import torch

        wanted = into.input_scale.dtype
        frozen, _ = _frozen(plain.weight.detach(), module=into, name=name)
        parts: dict[str, Any] = {}
        frozen.save_to_state_dict(parts, f"{name}.weight.", keep_vars=False)
        state = {
            part: tensor.to(wanted) if part.endswith(("._scale", "._shift")) else tensor
            for part, tensor in parts.items()
        }
        into.weight = torch.nn.Parameter(
            _read_weight(into, state, name=name, folder=Path(SEED_NAME)), requires_grad=False
        )
        for scale in ("input_scale", "output_scale"):
            setattr(into, scale, torch.ones((), dtype=wanted, device=plain.weight.device))

    def group_weights(self, in_features: int) -> int | None:
        """Of INT4 what quanto picks, at most the row; one scale a row otherwise."""
        return (effective_group_size(in_features) or in_features) if self.weights == "int4" else None

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        """One byte or half a byte a weight, and 16-bit scales (with shifts for INT4).

        Two 16-bit scales for activations, which aren't quantized here, lie beside each in the file; they are the
        layer's, not the weight's, and left out.
        """
        return self._parts(out_features, in_features, scale_bytes=_SCALE_BYTES)

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:
        """As in the file, with scales in the type of the arithmetic; the layer's two own are the metadata."""
        parts = self._parts(out_features, in_features, scale_bytes=float_bytes)
        return parts.model_copy(update={"metadata": 2 * float_bytes})

    def _parts(self, out_features: int, in_features: int, *, scale_bytes: int) -> StoredBytes:
        if self.weights != "int4":
            return group_wise(out_features, in_features, bits=8, group_size=None, scale_bytes=scale_bytes)
        group = effective_group_size(in_features)
        parts = group_wise(
            out_features,
            in_features,
            bits=4,
            group_size=group,
            scale_bytes=scale_bytes,
            zero_point_bytes=scale_bytes,
        )
        # Groups are packed in pairs, whole: an odd number of them leaves half the last row of bytes empty.
        width = group or in_features
        pairs = -(-out_features * in_features // (2 * width))
        return parts.model_copy(update={"packed": pairs * width})

    @property
    def other_bytes_per_weight(self) -> float:
        """16 bits."""
        return 2.0

    def stored_weights(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[StoredWeight, ...]:
        """A quantized weight lies as `NAME._data` (INT4: `NAME._data._data`), `._scale` and `._shift`."""
        found = []
        for name, (dtype, shape) in tensors.items():
            plain = StoredWeight.plain(name, dtype, shape)
            owner = name.removesuffix("._data").removesuffix("._data")
            if name.endswith("._data"):
                found.append(_from_parts(owner, name, plain, tensors))
            elif not name.endswith(("._scale", "._shift")):
                found.append(plain)
        return tuple(found)

    def _saved_map(self, folder: Path) -> dict[str, Any]:
        if not (folder / MAP_NAME).is_file():
            raise CheckpointError(f"{folder}: no {MAP_NAME}; it wasn't saved by quanto")
        saved = read_json(folder / MAP_NAME)
        types = {str(entry.get("weights")) for entry in saved.values()}
        if saved and types != {_QUANTO_TYPES[self.weights]}:
            raise CheckpointError(
                f"{folder}: saved as {', '.join(sorted(types))}, the recipe says {self.weights}. "
                "Quantize again."
            )
        return saved


def _from_parts(
    owner: str, name: str, data: StoredWeight, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> StoredWeight:
    parts = [
        StoredWeight.plain(part, *tensors[part])
        for part in (f"{owner}._scale", f"{owner}._shift")
        if part in tensors
    ]
    packed = name.endswith("._data._data")
    elements = data.elements * (2 if packed else 1)
    scales = parts[0].elements if parts else 0
    return StoredWeight(
        name=owner,
        elements=elements,
        stored_bytes=data.stored_bytes + sum(part.stored_bytes for part in parts),
        quantized=True,
        group_size=elements // scales if packed and scales else None,
    )


def _quantize_modules(model: Any, quanto_type: str) -> tuple[str, ...]:
    """Replace the weights in place; a layer at a time, so that the peak is one layer above the model."""
    from optimum.quanto.nn import QModuleMixin

    names = _replaceable(model)
    _replace_modules(model, names, quanto_type)
    tiny_rows = 0
    for name, module in model.named_modules():
        if isinstance(module, QModuleMixin):
            tiny_rows += _freeze(module, name=name)
    return (f"{tiny_rows:,} scales below the smallest 16-bit number were raised to it",) * bool(tiny_rows)


def _replaceable(model: Any) -> tuple[str, ...]:
    """The names of the linear layers, head excluded (quanto would quantize and so untie it)."""
    import torch

    head = model.get_output_embeddings()
    return tuple(
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and module is not head
    )


def _replace_modules(model: Any, names: Mapping[str, Any] | tuple[str, ...], quanto_type: str) -> None:
    from optimum.quanto import qtypes
    from optimum.quanto.nn import QLinear

    _use_plain_unpack()
    for name in names:
        module = QLinear.from_module(model.get_submodule(name), weights=qtypes[quanto_type])
        model.set_submodule(name, module)


def _freeze(module: Any, *, name: str) -> int:
    """Put the quantized weight in; returns how many scales had to be raised. Raises StageError."""
    import torch

    quantized, raised = _frozen(module.weight.detach(), module=module, name=name)
    module.weight = torch.nn.Parameter(quantized, requires_grad=False)
    return raised


def _frozen(weight: torch.Tensor, *, module: Any, name: str) -> tuple[Any, int]:
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
    if not bool(quantized.dequantize().isfinite().all()):
        raise StageError(f"{name}.weight: holds NaN or infinity once quantized to {qtype.name}")
    spread = weight.reshape(scale.numel(), -1).abs().amax(dim=1).reshape(scale.shape)
    return quantized, int((flat & (spread > 0)).sum())


def _state_to_save(model: Any) -> dict[str, Any]:
    """Every tensor once: of two names of one storage (a tied head) the first, which is the embedding."""
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.numel() and tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        state[name] = tensor.cpu()
    return state


def _quantization_map(model: Any) -> dict[str, Any]:
    from optimum.quanto import quantization_map

    return dict(quantization_map(model))


def _fill(model: Any, folder: Path, *, device: str, compute_dtype: str) -> None:
    """Give the empty model its tensors. Raises CheckpointError when one is missing or unknown."""
    import torch
    from optimum.quanto.nn import QModuleMixin

    wanted = getattr(torch, compute_dtype)
    floats = (torch.float16, torch.bfloat16, torch.float32)
    state = {
        name: tensor.to(device=device, dtype=wanted if tensor.dtype in floats else tensor.dtype)
        for name, tensor in read_tensors(folder)
    }
    for name, module in model.named_modules():
        if isinstance(module, QModuleMixin):
            module.weight = torch.nn.Parameter(
                _read_weight(module, state, name=name, folder=folder), requires_grad=False
            )
    result = model.load_state_dict(state, strict=False, assign=True)
    if result.unexpected_keys:
        raise CheckpointError(f"{folder}: the model has no place for {result.unexpected_keys[0]}")
    model.tie_weights()
    empty = [name for name, tensor in model.named_parameters() if tensor.device.type == "meta"]
    if empty:
        raise CheckpointError(
            f"{folder}: {len(empty)} tensors of the model are in no file, such as {empty[0]}"
        )


def _read_weight(module: Any, state: dict[str, Any], *, name: str, folder: Path) -> Any:
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
