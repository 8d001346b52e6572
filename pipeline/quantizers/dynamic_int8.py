"""INT8 weights and INT8 arithmetic on x86 CPUs with AVX2, through torch's `quantized::linear_dynamic` (FBGEMM).

Linear layers and GPT-2's Conv1D are quantized, one symmetric FP32 scale a row, and stored as they are: `weight_int8`
and `weight_scale`. They are packed for FBGEMM on loading. Embedding and head stay in 16 bits.

Activations are quantized when they come, and not as the kernel would by itself. AVX2 adds pairs of products in 16
bits, which overflow unless one factor has 7 bits, and a language model's first token is far larger than the others,
so that one scale for all tokens of a step leaves little of them: SmolLM2's perplexity goes from 21.1 to 52. So each
token is scaled by itself and split into two 7-bit pieces, the second being what the first leaves, which costs
nothing measurable. Both are rows of one product, which reads the weights once, and a last row pins the range, so
that the kernel's scale is 1 and a token's result doesn't depend on what it is batched with.
Figures: docs/decisions/0016-int8-activations-in-two-pieces.md.

>>> DynamicInt8().predicted_bytes(4096, 4096)
16793600
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline.block_weights import MatrixKind
from pipeline.checkpoint import check_source
from pipeline.errors import CheckpointError, StageError
from pipeline.linear_layers import (
    empty_on_host,
    fill,
    linear_layers,
    outlined,
    quantize_layers,
    row_blocks,
    stored_types,
)
from pipeline.processor import processor_flags
from pipeline.progress import Tell, silent
from pipeline.quantizers.base import Quantizer, StoredBytes, StoredWeight, group_wise
from pipeline.results import Problem
from pipeline.tensor_stream import Converted
from pipeline.weights import (
    cast,
    copy_config,
    copy_side_files,
    keep_types,
    missing_packages,
    ready,
    saving_to,
    unquantized_type,
)

if TYPE_CHECKING:
    import torch

LEVELS = 127
RANGE = 63.5
"""With the range of activations pinned to ± this, their 7 bits are steps of exactly 1."""
STEPS = 63
"""The largest magnitude of a piece, in steps."""
FINER = 126
"""Steps of the second piece in one of the first."""
_DATA, _SCALE = ".weight_int8", ".weight_scale"
_INSTEAD = "take another quantizer: quanto int8, or torchao int8"
_SMALLEST = 1e-30
_PACKED_ROW_BYTES = 12
"""FBGEMM's scale, zero point and sum of each row (aten/src/ATen/native/quantized/cpu/fbgemm_utils.h)."""


class DynamicInt8(Quantizer):
    """INT8 weights with a scale a row; activations quantized token by token when they come."""

    quantizable: ClassVar[frozenset[MatrixKind]] = frozenset(("linear", "conv1d"))

    kind: Literal["dynamic_int8"] = "dynamic_int8"

    @property
    def precision(self) -> str:
        """int8."""
        return "int8"

    @property
    def integer_arithmetic(self) -> bool:
        """Products are computed in INT8."""
        return True

    @classmethod
    def default_for(cls, precision: str, *, device: str) -> DynamicInt8 | None:
        """Of none."""
        del precision, device
        return None

    def check(self, *, device: str) -> tuple[Problem, ...]:
        """Packages, a CPU as the device, and its instructions."""
        problems = missing_packages("torch", "transformers", "accelerate")
        if device != "cpu":
            return (
                *problems,
                Problem(what=f"dynamic_int8 runs on x86 CPUs only, not on {device!r}", fix=_INSTEAD),
            )
        return problems + cpu_problems(platform.machine(), processor_flags())

    def quantize(
        self, source_folder: Path, out: Path, *, device: str, progress: Tell = silent
    ) -> tuple[str, ...]:
        """Each weight alone; see the base class."""
        dtype = unquantized_type(check_source(source_folder).dtype, source_folder)
        model = outlined(source_folder, dtype=dtype)
        notes = quantize_layers(
            source_folder,
            out,
            model=model,
            convert=_Conversion(model),
            parts=2,
            settings={**self.manifest_block(), "dtype": dtype},
            device=device,
            progress=progress,
        )
        with saving_to(out):
            copy_config(source_folder, out, dtype=dtype)
            return notes + copy_side_files(source_folder, out)

    def load_stored(self, folder: Path, *, device: str, compute_dtype: str) -> torch.nn.Module:
        """Weights packed as they are read; activations outside of the linear layers in `compute_dtype`."""
        model = empty_on_host(folder, compute_dtype=compute_dtype)
        layers = _replaced(model)
        parts: dict[str, dict[str, torch.Tensor]] = {}

        def take(name: str, tensor: torch.Tensor) -> bool:
            suffix = next((suffix for suffix in (_DATA, _SCALE) if name.endswith(suffix)), "")
            owner = name.removesuffix(suffix)
            if not suffix or owner not in layers:
                return False
            held = parts.setdefault(owner, {})
            held[suffix] = tensor
            if len(held) == 2:
                layers[owner].fill(parts.pop(owner)[_DATA], held[_SCALE])
            return True

        fill(model, folder, device=device, take=take)
        empty = [f"{name}{_DATA}" for name, layer in layers.items() if not layer.opaque_bytes]
        if empty:
            raise CheckpointError(
                f"{folder}: {len(empty)} quantized weights are in no file, such as {empty[0]}"
            )
        return ready(model, folder=folder, device=device)

    def outline(self, model: Any, *, compute_dtype: str) -> None:
        """Linear layers but the head become empty packed ones."""
        keep_types(model, compute_dtype)
        _replaced(model)

    def pack(self, plain: Any, into: Any, *, name: str) -> None:
        """Quantized as for a file, then packed."""
        into.fill(*_quantized(_rows(plain, plain.weight.detach()), name=name))

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        """A byte a weight and an FP32 scale a row."""
        return group_wise(out_features, in_features, bits=8, group_size=None, scale_bytes=4)

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:
        """As FBGEMM holds it; the metadata, which no step reads, is what fills its last blocks."""
        del float_bytes
        packed = out_features * in_features
        filling = packed_bytes(out_features, in_features) - packed - _PACKED_ROW_BYTES * out_features
        return StoredBytes(packed=packed, scales=_PACKED_ROW_BYTES * out_features, metadata=filling)

    @property
    def other_bytes_per_weight(self) -> float:
        """16 bits."""
        return 2.0

    def stored_weights(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[StoredWeight, ...]:
        """A quantized weight lies as `MODULE.weight_int8` with its `MODULE.weight_scale`."""
        found = []
        for name, (dtype, shape) in tensors.items():
            plain = StoredWeight.plain(name, dtype, shape)
            owner = name.removesuffix(_DATA)
            if name.endswith(_DATA):
                scale = StoredWeight.plain(owner, *tensors[f"{owner}{_SCALE}"])
                stored_bytes = plain.stored_bytes + scale.stored_bytes
                found.append(
                    plain.model_copy(
                        update={
                            "name": f"{owner}.weight",
                            "stored_bytes": stored_bytes,
                            "quantized": True,
                        }
                    )
                )
            elif not name.endswith(_SCALE):
                found.append(plain)
        return tuple(found)


# --- the CPU ---------------------------------------------------------------------------------------------


def cpu_problems(machine: str, flags: frozenset[str]) -> tuple[Problem, ...]:
    """What is missing of a CPU: `machine` as `platform.machine()` has it, `flags` empty where they can't be read."""
    if machine.lower() not in ("x86_64", "amd64"):
        return (Problem(what=f"dynamic_int8 needs an x86 CPU; this one is {machine}", fix=_INSTEAD),)
    if flags and "avx2" not in flags:
        return (Problem(what="dynamic_int8 needs a CPU with AVX2; this one has none", fix=_INSTEAD),)
    return ()


def packed_bytes(out_features: int, in_features: int, *, flags: frozenset[str] | None = None) -> int:
    """Bytes that FBGEMM holds for one weight: whole blocks of the CPU's size, and what it keeps of each row.

    `flags` are the CPU's instructions, by default this one's. Block sizes: FBGEMM, PackingTraits-inl.h (KCB, NCB).
    """
    flags = processor_flags() if flags is None else flags
    block_in, block_out = (512, 8)
    if "avx512_vnni" in flags:
        block_in, block_out = (512, 48)
    elif "avx512bw" in flags:
        block_in, block_out = (256, 32)
    blocks = -(-in_features // block_in) * -(-out_features // block_out)
    return blocks * block_in * block_out + _PACKED_ROW_BYTES * out_features


# --- weights ---------------------------------------------------------------------------------------------


class _Conversion:
    """From a source tensor to what is stored of it; `model` is on the meta device."""

    def __init__(self, model: Any) -> None:
        self._types = stored_types(model)
        self._layers = {f"{name}.weight": layer for name, layer in linear_layers(model, conv1d=True).items()}

    def __call__(self, name: str, tensor: torch.Tensor) -> Converted:
        layer = self._layers.get(name)
        if layer is None:
            return Converted({name: cast(name, tensor, self._types[name])})
        data, scale = _quantized(_rows(layer, tensor), name=name)
        owner = name.removesuffix(".weight")
        return Converted({f"{owner}{_DATA}": data, f"{owner}{_SCALE}": scale})


def _rows(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """[out, in]; a Conv1D holds it transposed."""
    import torch

    return weight if isinstance(layer, torch.nn.Linear) else weight.T


def _quantized(weight: torch.Tensor, *, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 [out, in] and FP32 scales [out]. Raises StageError on NaN and infinity."""
    import torch

    data = torch.empty(weight.shape, dtype=torch.int8)
    scale = (torch.linalg.vector_norm(weight, ord=torch.inf, dim=1).to(torch.float32) / LEVELS).clamp_min(
        _SMALLEST
    )
    if not bool(scale.isfinite().all()):
        raise StageError(f"{name}: holds NaN or infinity")
    start = 0
    for block in row_blocks(weight):
        end = start + len(block)
        data[start:end] = (block.to(torch.float32) / scale[start:end, None]).round_()
        start = end
    return data, scale


def _replaced(model: Any) -> dict[str, Any]:
    """Put an empty packed layer in the place of every linear one; returns them by name."""
    made = {}
    for name, layer in linear_layers(model, conv1d=True).items():
        rows, columns = _rows(layer, layer.weight).shape
        made[name] = _packed_class()(columns, rows, bias=layer.bias)
        model.set_submodule(name, made[name])
    return made


@cache
def _packed_class() -> type[Any]:
    """Made when first needed, because a module can't be declared without torch."""
    import torch

    class PackedLinear(torch.nn.Module):
        """A linear layer whose weight only FBGEMM can read; `opaque_bytes` is how much memory it takes."""

        def __init__(self, in_features: int, out_features: int, *, bias: torch.nn.Parameter | None) -> None:
            super().__init__()
            self.in_features = in_features
            self.out_features = out_features
            self.register_parameter("bias", bias)
            self.opaque_bytes = 0
            self._packed: Any = None

        def fill(self, data: torch.Tensor, scale: torch.Tensor) -> None:
            """Pack INT8 [out, in] with FP32 scales [out]."""
            self._packed = _packed(data, scale)
            self.opaque_bytes = packed_bytes(self.out_features, self.in_features)

        def unpacked(self) -> torch.Tensor:
            """The weight as it is computed with, in FP32 [out, in]."""
            weight, _ = torch.ops.quantized.linear_unpack(self._packed)
            dense: torch.Tensor = weight.dequantize()
            return dense

        def forward(self, activations: torch.Tensor) -> torch.Tensor:
            """[..., in] → [..., out], in the type that came in."""
            rows = activations.reshape(-1, self.in_features).to(torch.float32)
            found = _product(rows, self._packed).to(activations.dtype)
            if isinstance(self.bias, torch.Tensor):
                found = found + self.bias
            return found.reshape(*activations.shape[:-1], self.out_features)

    return PackedLinear


def _packed(data: torch.Tensor, scale: torch.Tensor) -> Any:
    """FBGEMM's own object, which owns a copy in its order."""
    import torch

    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise StageError(f"dynamic_int8: torch has no FBGEMM for this CPU; {_INSTEAD}")
    zero = torch.zeros(len(scale), dtype=torch.int64)
    with (
        warnings.catch_warnings()
    ):  # the tensors that it takes are to go: github.com/pytorch/pytorch/issues/184982
        warnings.simplefilter("ignore", UserWarning)
        typed = torch._make_per_channel_quantized_tensor(data, scale.to(torch.float64), zero, 0)
    return torch.ops.quantized.linear_prepack(typed, None)


def _product(rows: torch.Tensor, packed: Any) -> torch.Tensor:
    """FP32 [tokens, in] times the packed weight, from two 7-bit pieces of each token.

    Few operations: at one token each costs as much as the arithmetic in it.
    """
    import torch

    count = len(rows)
    largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1, keepdim=True)
    size = largest.div_(STEPS).clamp_min_(_SMALLEST)
    steps = rows / size
    coarse = steps.round()
    fine = steps.sub_(coarse).mul_(FINER).round_()
    pieces = torch.cat((coarse, fine, _range_row(rows.shape[1])))
    found = torch.ops.quantized.linear_dynamic(pieces, packed, reduce_range=True)
    return torch.add(found[:count], found[count:-1], alpha=1 / FINER).mul_(size)


@cache
def _range_row(in_features: int) -> torch.Tensor:
    """FP32 [1, in] from whose ends the kernel takes a scale of 1: 127 steps of 1 from end to end."""
    import torch

    row = torch.zeros((1, in_features))
    row[0, 0], row[0, -1] = RANGE, -RANGE
    return row
