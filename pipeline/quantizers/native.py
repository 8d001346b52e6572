"""Unquantized weights in one float type: the baseline, and fp32, bf16 and fp16 as candidates.

Tensors are read, cast and written one at a time into files of the same names, so a model larger than memory
passes through. A cast that would turn a weight into infinity is refused with the count.

>>> Native(dtype="fp16").predicted_bytes(4096, 4096)
33554432
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline.errors import CheckpointError
from pipeline.quantizers.base import Quantizer, StoredBytes, StoredWeight
from pipeline.results import Problem
from pipeline.tensorfile import BITS, FLOATS, INDEX_NAME, TensorInfo, read_json, tensors
from pipeline.weights import (
    copy_config,
    copy_side_files,
    keep_types,
    load_pretrained,
    missing_packages,
    read_tensors,
    ready,
    refuse_overflow,
    saving_to,
    scan_source,
    write_json,
)

if TYPE_CHECKING:
    from typing import BinaryIO

    import torch

_TYPES = {"fp32": ("F32", "float32"), "bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16")}


class Native(Quantizer):
    """Every float weight stored as `dtype`, embedding, head and norms included."""

    minimum_coverage: ClassVar[float] = 0.0

    kind: Literal["native"] = "native"
    dtype: Literal["fp32", "bf16", "fp16"]

    @property
    def precision(self) -> str:
        """The type itself."""
        return self.dtype

    @classmethod
    def default_for(cls, precision: str, *, device: str) -> Native | None:  # noqa: ARG003  (any device)
        """Float precisions, on every device."""
        return cls.model_validate({"dtype": precision}) if precision in _TYPES else None

    def check(self, *, device: str) -> tuple[Problem, ...]:  # noqa: ARG002
        """Packages only."""
        return missing_packages("torch", "transformers", "safetensors", "accelerate")

    def quantize(self, source_folder: Path, out: Path, *, device: str) -> tuple[str, ...]:  # noqa: ARG002
        """Cast tensor by tensor; see the base class."""
        scan = scan_source(source_folder)
        if self.dtype == "fp16":
            refuse_overflow(scan, label="fp16")
        with saving_to(out):
            notes = list(copy_side_files(source_folder, out))
            copy_config(source_folder, out, dtype=_TYPES[self.dtype][1])
            flushed = self._write_tensors(source_folder, out)
        if flushed:
            notes.append(f"{flushed:,} weights too small for {self.dtype} became zero")
        return tuple(notes)

    def load_stored(self, folder: Path, *, device: str, compute_dtype: str) -> torch.nn.Module:
        """Weights upcast (or cast) to `compute_dtype`, which is what they are computed in."""
        import torch

        stored = read_json(folder / "config.json").get("dtype")
        if stored != _TYPES[self.dtype][1]:
            raise CheckpointError(f"{folder}: saved as {stored}, the recipe says {self.dtype}")
        model = load_pretrained(folder, dtype=getattr(torch, compute_dtype), device_map={"": device})
        return ready(model, folder=folder, device=device)

    def float_type(self, source_dtype: str) -> str:  # noqa: ARG002
        """The type itself."""
        return _TYPES[self.dtype][1]

    def outline(self, model: Any, *, compute_dtype: str) -> None:
        """No module is replaced."""
        keep_types(model, compute_dtype)

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        """Elements times the type's size."""
        return StoredBytes(packed=out_features * in_features * BITS[_TYPES[self.dtype][0]] // 8)

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:
        """Every weight becomes the type it is computed in."""
        return StoredBytes(packed=out_features * in_features * float_bytes)

    @property
    def other_bytes_per_weight(self) -> float:
        """The same type as everything else."""
        return BITS[_TYPES[self.dtype][0]] / 8

    def stored_weights(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[StoredWeight, ...]:
        """Nothing is quantized; each tensor is a weight."""
        return tuple(StoredWeight.plain(name, dtype, shape) for name, (dtype, shape) in tensors.items())

    def _write_tensors(self, source_folder: Path, out: Path) -> int:
        """Files of the source's names with every float tensor cast; returns how many weights became zero."""
        import torch

        wanted = getattr(torch, _TYPES[self.dtype][1])
        plan = {name: self._cast(info) for name, info in tensors(source_folder).items()}
        flushed, current, file = 0, "", None
        try:
            for name, tensor in read_tensors(source_folder):
                if plan[name].file != current:
                    if file is not None:
                        file.close()
                    current = plan[name].file
                    file = _start_file(out / current, plan)
                cast = tensor.to(wanted) if tensor.is_floating_point() else tensor
                flushed += int(tensor.count_nonzero() - cast.count_nonzero())
                assert file is not None
                file.write(cast.contiguous().view(-1).view(torch.uint8).numpy().data)
        finally:
            if file is not None:
                file.close()
        if (source_folder / INDEX_NAME).is_file():
            index = read_json(source_folder / INDEX_NAME)
            index["metadata"] = {"total_size": sum(info.size_bytes for info in plan.values())}
            write_json(out / INDEX_NAME, index)
        return flushed

    def _cast(self, info: TensorInfo) -> TensorInfo:
        if info.dtype not in FLOATS:
            return info
        dtype = _TYPES[self.dtype][0]
        return info.model_copy(update={"dtype": dtype, "size_bytes": info.elements * BITS[dtype] // 8})


def _start_file(path: Path, plan: Mapping[str, TensorInfo]) -> BinaryIO:
    """Open a safetensors file and write its header; the tensors follow in the plan's order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, info in plan.items():
        if info.file == path.name:
            end = position + info.size_bytes
            header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [position, end]}
            position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the tensors in place, which wants them aligned
    file = path.open("wb")
    file.write(len(text).to_bytes(8, "little") + text)
    return file
