"""Weight-only INT8, INT4 and FP8 of optimum-quanto; the head stays in 16 bits.

INT8 and FP8 (e4m3) keep one scale a row; INT4 keeps scale and shift for each group of a row, of a size quanto
picks from the row's length (see `effective_group_size`). Scales have the type of the unquantized weights.
Only `nn.Linear` is quantized: a GPT-2 (Conv1D) or a mixture of experts comes out as it went in, which the
checkpoint's coverage then shows.

>>> effective_group_size(288), effective_group_size(64)
(96, None)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline.block_weights import MatrixKind
from pipeline.checkpoint import check_source
from pipeline.errors import CheckpointError
from pipeline.linear_layers import empty_on_host, linear_layers, outlined, quantize_layers, stored_types
from pipeline.progress import Tell, silent
from pipeline.quantizers.base import Quantizer, StoredBytes, StoredWeight, group_wise
from pipeline.quanto_weights import (
    fill_layers,
    quanto_layers,
    read_weight,
    replace_modules,
    stored_parts,
)
from pipeline.random_weights import SEED_NAME
from pipeline.results import Problem
from pipeline.shard_writer import whole
from pipeline.tensor_stream import Converted
from pipeline.tensorfile import read_json
from pipeline.weights import (
    cast,
    copy_config,
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

MAP_NAME = "quanto_qmap.json"
"""quanto's own file: which modules are quantized, and to what."""
LARGEST_GROUP_WEIGHTS = 128
GROUP_STEP_WEIGHTS = 32
_QUANTO_TYPES = {"int8": "qint8", "int4": "qint4", "fp8": "qfloat8_e4m3fn"}
_SCALE_BYTES = 2
_PARTS = 5
"""Tensors of one weight at most: data, scale, shift and two scales of activations."""
_RAISED = "scales below the smallest 16-bit number were raised to it"


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
    def loading(self) -> str:
        """optimum-quanto's own class reads the files."""
        return """\
`pip install optimum-quanto`, then:

```python
from optimum.quanto import QuantizedModelForCausalLM
from transformers import AutoTokenizer

folder = "."  # this folder, or its repository on the Hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = QuantizedModelForCausalLM.from_pretrained(folder)
```"""

    @property
    def precision(self) -> str:
        """The weights' type."""
        return self.weights

    @property
    def _quanto_type(self) -> str:
        return _QUANTO_TYPES[self.weights]

    @property
    def compilable(self) -> bool:
        """INT8 is one graph; compiling INT4 didn't end in minutes (torch 2.13, optimum-quanto 0.2.7)."""
        return self.weights != "int4"

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

    def quantize(
        self, source_folder: Path, out: Path, *, device: str, progress: Tell = silent
    ) -> tuple[str, ...]:
        """Each linear weight alone, as long as the file's tensors are the model's; else the whole model in memory."""
        dtype = unquantized_type(check_source(source_folder).dtype, source_folder)
        model = outlined(source_folder, dtype=dtype)
        notes = quantize_layers(
            source_folder,
            out,
            model=model,
            convert=_Conversion(model, quanto_type=self._quanto_type, device=device),
            parts=_PARTS,
            settings={**self.manifest_block(), "dtype": dtype},
            device=device,
            progress=progress,
        )
        replace_modules(model, linear_layers(model), self._quanto_type)
        with saving_to(out):
            write_json(out / MAP_NAME, _quantization_map(model))
            copy_config(source_folder, out, dtype=dtype)
            return notes + copy_side_files(source_folder, out)

    def load_stored(self, folder: Path, *, device: str, compute_dtype: str) -> torch.nn.Module:
        """The stored integers with their scales in `compute_dtype` (exact for float32)."""
        wanted = self._saved_map(folder)
        model = empty_on_host(folder, compute_dtype=compute_dtype)
        layers = replace_modules(model, wanted, self._quanto_type)
        fill_layers(model, layers, folder, device=device)
        return ready(model, folder=folder, device=device)

    def outline(self, model: Any, *, compute_dtype: str) -> None:
        """Linear layers but the head become quanto's."""
        keep_types(model, compute_dtype)
        replace_modules(model, linear_layers(model), self._quanto_type)

    def pack(self, plain: Any, into: Any, *, name: str) -> None:
        """Frozen, taken apart as for a file, and put together as from one, scales in the type of the arithmetic."""
        import torch

        wanted = into.input_scale.dtype
        parts, _ = stored_parts(plain.weight.detach(), module=into, name=name)
        state = {
            part: tensor.to(wanted) if part.endswith(("._scale", "._shift")) else tensor
            for part, tensor in parts.items()
        }
        into.weight = torch.nn.Parameter(
            read_weight(into, state, name=name, folder=Path(SEED_NAME)), requires_grad=False
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
        if saved and types != {self._quanto_type}:
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


class _Conversion:
    """From a source tensor to what quanto stores of it; `model` is on the meta device."""

    def __init__(self, model: Any, *, quanto_type: str, device: str) -> None:
        self._device = device
        self._types = stored_types(model)
        layers = quanto_layers(model, linear_layers(model), quanto_type)
        self._modules = {f"{name}.weight": layer for name, layer in layers.items()}

    def __call__(self, name: str, tensor: torch.Tensor) -> Converted:
        import torch

        module = self._modules.get(name)
        if module is None:
            return Converted({name: cast(name, tensor, self._types[name])})
        weight = whole(cast(name, tensor, module.weight.dtype)).to(self._device)
        path = name.removesuffix(".weight")
        made, raised = stored_parts(weight, module=module, name=path)
        for scale in ("input_scale", "output_scale"):  # of activations, which stay floats
            made[f"{path}.{scale}"] = torch.ones((), dtype=getattr(module, scale).dtype)
        return Converted(made, counts={_RAISED: raised})


def _quantization_map(model: Any) -> dict[str, Any]:
    from optimum.quanto import quantization_map

    return dict(quantization_map(model))
