"""INT8, INT4 and FP8 of torchao, in the files that transformers' `TorchAoConfig` writes and reads.

`int8` and `fp8` (e4m3) are weight-only, with an FP32 scale a row; `int8_dynamic` quantizes activations to INT8 as
well, one scale a token, and multiplies in INT8. `int4` is tinygemm's format: groups of a row share a BF16 scale and
zero point, and rows are filled up to a multiple of 1024 weights; it is CUDA's only. Only `nn.Linear` is quantized;
embedding and head stay in 16 bits. Each weight is quantized alone, by torchao's own `quantize_`.

With `int8` products are taken before they are scaled, up to 127 times larger than the result: compute in BF16 or
FP32, not in FP16, where large activations may overflow.

>>> Torchao(weights="int8").predicted_bytes(4096, 4096)
16797696
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from pipeline.progress import Tell, silent
from pipeline.quantizers.base import TRANSFORMERS_LOADING, Quantizer, StoredBytes, StoredWeight, group_wise
from pipeline.results import Problem
from pipeline.shard_writer import whole
from pipeline.tensor_stream import Converted
from pipeline.tensorfile import read_json, weight_files
from pipeline.weights import (
    cast,
    config_of_type,
    copy_side_files,
    keep_types,
    missing_packages,
    ready,
    saving_to,
    unquantized_type,
    write_json,
)

if TYPE_CHECKING:
    import torch

GROUP_SIZES = (128, 64, 32)
"""Weights of INT4 that share a scale: the first that divides the row."""
ROW_WEIGHTS, ROWS = 1024, 8
"""Multiples that INT4 matrices are filled up to (torchao's int4_tile_packed_to_4d_tensor.py)."""
_INT4_IN_WORD = 8
_SMALLEST_ROW = 1e-30
_CONFIGS = {
    "int8": "Int8WeightOnlyConfig",
    "int8_dynamic": "Int8DynamicActivationInt8WeightConfig",
    "int4": "Int4WeightOnlyConfig",
    "fp8": "Float8WeightOnlyConfig",
}
_MARK = "._weight_"
_DATA = f"{_MARK}qdata"
_PLAIN = '{"_type": "Tensor"}'
_METADATA_BYTES = 1_000
"""Room for what the file's metadata says of one tensor, beside its name."""


class Torchao(Quantizer):
    """Linear weights stored as `weights`; everything else in 16 bits."""

    quantizable: ClassVar[frozenset[MatrixKind]] = frozenset(("linear",))

    kind: Literal["torchao"] = "torchao"
    weights: Literal["int8", "int8_dynamic", "int4", "fp8"]

    @property
    def loading(self) -> str:
        """Transformers reads the files."""
        return f"`pip install torchao`, then:\n\n{TRANSFORMERS_LOADING}"

    @property
    def precision(self) -> str:
        """The weights' type."""
        return self.weights.removesuffix("_dynamic")

    @property
    def integer_arithmetic(self) -> bool:
        """Whether activations are quantized too."""
        return self.weights == "int8_dynamic"

    @property
    def compilable(self) -> bool:
        """Its tensor types are made to be traced."""
        return True

    @classmethod
    def default_for(cls, precision: str, *, device: str) -> Torchao | None:
        """Of none."""
        del precision, device
        return None

    def check(self, *, device: str) -> tuple[Problem, ...]:
        """Packages, and a device that the type runs on."""
        problems = missing_packages("torch", "transformers", "accelerate", "torchao")
        kind = device.split(":")[0]
        if kind not in ("cpu", "cuda"):
            problems += (
                Problem(
                    what=f"torchao isn't used on {device!r} here",
                    fix="run on cpu or cuda, or take another quantizer",
                ),
            )
        if self.weights == "int4" and kind == "cpu":
            problems += (
                Problem(
                    what="torchao int4 packs weights for CUDA and can't be made or run on a CPU",
                    fix="take quanto int4, bitsandbytes nf4 or gguf q4_0",
                ),
            )
        return problems

    def quantize(
        self, source_folder: Path, out: Path, *, device: str, progress: Tell = silent
    ) -> tuple[str, ...]:
        """Each linear weight alone, on `device`; see the base class."""
        dtype = unquantized_type(check_source(source_folder).dtype, source_folder)
        model = outlined(source_folder, dtype=dtype)
        convert = _Conversion(self, model, device=device)
        notes = quantize_layers(
            source_folder,
            out,
            model=model,
            convert=convert,
            parts=3,
            settings={**self.manifest_block(), "dtype": dtype},
            device=device,
            metadata_bytes=_METADATA_BYTES,
            shared_metadata_bytes=2 * len(convert.names),
            progress=progress,
        )
        with saving_to(out):
            config = config_of_type(read_json(source_folder / "config.json"), dtype=dtype)
            write_json(out / "config.json", {**config, "quantization_config": self._described()})
            return notes + copy_side_files(source_folder, out)

    def load_stored(self, folder: Path, *, device: str, compute_dtype: str) -> torch.nn.Module:
        """torchao's tensors put together as they are read; floats in `compute_dtype`, scales as stored."""
        import torch

        self._check_same(folder)
        described = _described_tensors(folder)
        model = empty_on_host(folder, compute_dtype=compute_dtype)
        layers = {f"{name}.weight": layer for name, layer in linear_layers(model).items()}
        parts: dict[str, dict[str, torch.Tensor]] = {}

        def take(name: str, tensor: torch.Tensor) -> bool:
            owner, mark, part = name.partition(_MARK)
            weight = f"{owner}.weight"
            if not mark or weight not in layers or weight not in described:
                return False
            held = parts.setdefault(weight, {})
            held[part] = tensor
            if len(held) == len(described[weight]["_tensor_data_names"]):
                made = _assembled(described[weight], parts.pop(weight))
                layers[weight].weight = _parameter(_retyped(made, getattr(torch, compute_dtype)))
            return True

        fill(model, folder, device=device, take=take)
        return ready(model, folder=folder, device=device)

    def outline(self, model: Any, *, compute_dtype: str) -> None:
        """Linear layers but the head become new ones, still to be filled."""
        import torch

        keep_types(model, compute_dtype)
        for name, layer in linear_layers(model).items():
            if self.group_weights(layer.in_features) or self.weights != "int4":
                bias = layer.bias is not None
                new = torch.nn.Linear(layer.in_features, layer.out_features, bias=bias, device="meta")
                new = new.to(getattr(torch, compute_dtype))
                new.bias = layer.bias
                model.set_submodule(name, new.train(layer.training))

    def pack(self, plain: Any, into: Any, *, name: str) -> None:
        """Quantized as for a file, its type that of the arithmetic."""
        made = self._quantized(plain.weight.detach(), name=name)
        into.weight = _parameter(_retyped(made, into.weight.dtype))

    def group_weights(self, in_features: int) -> int | None:
        """Of INT4 the largest size that divides the row; None for types with a scale a row."""
        if self.weights != "int4":
            return None
        return next((size for size in GROUP_SIZES if in_features % size == 0), None)

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        """One byte a weight and an FP32 scale a row, with a one-byte zero point for INT8; INT4 with its filling."""
        if self.weights == "fp8":
            return group_wise(out_features, in_features, bits=8, group_size=None, scale_bytes=4)
        if self.weights != "int4":
            return group_wise(
                out_features, in_features, bits=8, group_size=None, scale_bytes=4, zero_point_bytes=1
            )
        group = self.group_weights(in_features)
        if group is None:
            return StoredBytes(packed=2 * out_features * in_features)
        rows, width = -(-out_features // ROWS) * ROWS, -(-in_features // ROW_WEIGHTS) * ROW_WEIGHTS
        return group_wise(rows, width, bits=4, group_size=group, scale_bytes=2, zero_point_bytes=2)

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:
        """As in the file, whatever the arithmetic."""
        del float_bytes
        return self.predicted_parts(out_features, in_features)

    @property
    def other_bytes_per_weight(self) -> float:
        """16 bits."""
        return 2.0

    def stored_weights(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[StoredWeight, ...]:
        """A quantized weight lies as `MODULE._weight_qdata` and what else begins with `MODULE._weight_`.

        Elements of INT4 are those of the filled-up matrix.
        """
        plain = {name: StoredWeight.plain(name, dtype, shape) for name, (dtype, shape) in tensors.items()}
        part_bytes: dict[str, int] = {}
        for name, weight in plain.items():
            owner = name.partition(_MARK)[0]
            part_bytes[owner] = part_bytes.get(owner, 0) + weight.stored_bytes
        found = []
        for name, weight in plain.items():
            owner, mark, part = name.partition(_MARK)
            if not mark:
                found.append(weight)
            elif part == "qdata":
                elements = weight.elements * (_INT4_IN_WORD if self.weights == "int4" else 1)
                scales = plain.get(f"{owner}{_MARK}scale_and_zero")
                update = {
                    "name": f"{owner}.weight",
                    "elements": elements,
                    "stored_bytes": part_bytes[owner],
                    "quantized": True,
                    "group_size": 2 * elements // scales.elements if scales else None,
                }
                found.append(weight.model_copy(update=update))
        return tuple(found)

    def _settings(self, *, in_features: int) -> Any:
        """torchao's own config for a weight with rows of that length."""
        from torchao import quantization

        more = {}
        if self.weights == "int4":
            more = {
                "group_size": self.group_weights(in_features),
                "int4_packing_format": "tile_packed_to_4d",
            }
        return getattr(quantization, _CONFIGS[self.weights])(set_inductor_config=False, **more)

    def _described(self) -> dict[str, Any]:
        """What transformers reads from `config.json`."""
        from transformers import TorchAoConfig

        described: dict[str, Any] = TorchAoConfig(
            quant_type=self._settings(in_features=GROUP_SIZES[0])
        ).to_dict()
        return described

    def _quantized(self, weight: torch.Tensor, *, name: str) -> Any:
        """torchao's tensor of [out, in]. Raises StageError when it isn't finite."""
        if self.weights == "int4":  # packed across rows, on a GPU
            return self._quantized_at_once(weight, name=name)
        return _stacked([self._quantized_at_once(block, name=name) for block in row_blocks(weight)])

    def _quantized_at_once(self, weight: torch.Tensor, *, name: str) -> Any:
        import torch
        from torchao.quantization import quantize_

        rows, columns = weight.shape
        layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
        layer.weight = _parameter(weight.to(torch.bfloat16) if self.weights == "int4" else weight)
        try:
            quantize_(layer, self._settings(in_features=columns))
        except (ValueError, ImportError, AssertionError) as error:  # a GPU too old, a package too few
            raise StageError(f"{name}: torchao can't quantize it to {self.weights}: {error}") from error
        made: Any = layer.weight.detach()
        if self.weights == "fp8":
            _repair_flat_rows(made, weight)
        if not bool(_scales(made).isfinite().all()):
            raise StageError(f"{name}: holds NaN or infinity once quantized to {self.weights}")
        return made

    def _check_same(self, folder: Path) -> None:
        block = read_json(folder / "config.json").get("quantization_config") or {}
        saved = ((block.get("quant_type") or {}).get("default") or {}).get("_type")
        if saved != _CONFIGS[self.weights]:
            names = {config: weights for weights, config in _CONFIGS.items()}
            raise CheckpointError(
                f"{folder}: saved as {names.get(str(saved), saved)}, the recipe says {self.weights}. Quantize again."
            )


class _Conversion:
    """From a source tensor to what is stored of it; `model` is on the meta device."""

    def __init__(self, quantizer: Torchao, model: Any, *, device: str) -> None:
        self._quantizer = quantizer
        self._device = device
        self._types = stored_types(model)
        self._layers = {
            f"{name}.weight"
            for name, layer in linear_layers(model).items()
            if quantizer.weights != "int4" or quantizer.group_weights(layer.in_features)
        }
        self.names = json.dumps(list(self._types))
        """Every file says the names of all tensors: transformers keeps those of the last one that it reads."""

    def __call__(self, name: str, tensor: torch.Tensor) -> Converted:
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        stored = cast(name, tensor, self._types[name])
        if name not in self._layers:
            return Converted({name: stored}, metadata={name: _PLAIN, "tensor_names": self.names})
        made = self._quantizer._quantized(whole(stored).to(self._device), name=name)
        tensors, metadata = flatten_tensor_state_dict({name: made})
        return Converted(tensors, metadata={**metadata, "tensor_names": self.names})


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    import torch

    return torch.nn.Parameter(tensor, requires_grad=False)


def _stacked(blocks: list[Any]) -> Any:
    """One torchao tensor of blocks of rows, each row of which has scales of its own."""
    import torch

    if len(blocks) == 1:
        return blocks[0]
    names, attributes = blocks[0].__tensor_flatten__()
    data = {name: torch.cat([getattr(block, name) for block in blocks]) for name in names}
    shape = data["qdata"].shape
    return type(blocks[0]).__tensor_unflatten__(data, attributes, shape, data["qdata"].stride())


def _retyped(tensor: Any, dtype: torch.dtype) -> Any:
    """The same data under `dtype`, in which torchao's tensors take part in arithmetic; `to` leaves it as it was."""
    names, attributes = tensor.__tensor_flatten__()
    if "dtype" not in attributes:
        return tensor
    data = {name: getattr(tensor, name) for name in names}
    return type(tensor).__tensor_unflatten__(
        data, {**attributes, "dtype": dtype}, tensor.size(), tensor.stride()
    )


def _scales(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.scale_and_zero if hasattr(tensor, "scale_and_zero") else tensor.scale
    return found


def _repair_flat_rows(made: Any, weight: torch.Tensor) -> None:
    """Quantize rows anew, in FP32, whose scale rounded to 0: torchao divides by it, and FP8 keeps the NaN."""
    import torch
    from torchao.quantization import Float8Tensor, PerRow

    rows = (made.scale == 0).flatten().nonzero().flatten()
    if not len(rows):
        return
    exact = Float8Tensor.from_hp(weight[rows].float(), granularity=PerRow(), hp_value_lb=_SMALLEST_ROW)
    made.qdata.view(torch.uint8)[rows] = exact.qdata.view(torch.uint8)
    made.scale[rows] = exact.scale


def _described_tensors(folder: Path) -> dict[str, Any]:
    """What the files' metadata says of each quantized tensor, by name. Raises CheckpointError where it says nothing."""
    from safetensors import safe_open

    described: dict[str, Any] = {}
    for file in weight_files(folder):
        with safe_open(folder / file, framework="pt") as opened:
            entries = opened.metadata() or {}
        described.update(
            {name: json.loads(text) for name, text in entries.items() if name.endswith(".weight")}
        )
    if not described:
        raise CheckpointError(f"{folder}: its files don't say how torchao's tensors are put together")
    return described


def _assembled(described: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> Any:
    """torchao's tensor from its parts."""
    from torchao.prototype.safetensors.safetensors_utils import object_from_dict

    return object_from_dict({**described, "_data": {**described["_data"], **parts}})
