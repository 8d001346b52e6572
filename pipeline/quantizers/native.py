"""Unquantized weights in one float type: the baseline, and fp32, bf16 and fp16 as candidates.

Tensors are read, cast and written one at a time into files of the same names, so a model larger than memory
passes through. A cast that would turn a weight into infinity is refused with the count.

>>> Native(dtype="fp16").predicted_bytes(4096, 4096)
33554432
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline.errors import CheckpointError, StageError
from pipeline.progress import Tell, silent
from pipeline.quantizers.base import TRANSFORMERS_LOADING, Quantizer, StoredBytes, StoredWeight
from pipeline.results import Problem
from pipeline.tensor_stream import Converted, stream
from pipeline.tensorfile import BITS, read_json
from pipeline.weights import (
    FLUSHED,
    cast,
    copy_config,
    copy_side_files,
    keep_types,
    load_pretrained,
    missing_packages,
    ready,
    refuse_overflow,
    saving_to,
    scan_source,
)

if TYPE_CHECKING:
    import torch

_TYPES = {"fp32": ("F32", "float32"), "bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16")}


class Native(Quantizer):
    """Every float weight stored as `dtype`, embedding, head and norms included."""

    minimum_coverage: ClassVar[float] = 0.0

    kind: Literal["native"] = "native"
    dtype: Literal["fp32", "bf16", "fp16"]

    @property
    def loading(self) -> str:
        """Transformers reads the files."""
        return TRANSFORMERS_LOADING

    @property
    def precision(self) -> str:
        """The type itself."""
        return self.dtype

    @property
    def compilable(self) -> bool:
        """Plain matrix products."""
        return True

    @classmethod
    def default_for(cls, precision: str, *, device: str) -> Native | None:  # noqa: ARG003  (any device)
        """Float precisions, on every device."""
        return cls.model_validate({"dtype": precision}) if precision in _TYPES else None

    def check(self, *, device: str) -> tuple[Problem, ...]:  # noqa: ARG002
        """Packages only."""
        return missing_packages("torch", "transformers", "safetensors", "accelerate")

    def quantize(
        self,
        source_folder: Path,
        out: Path,
        *,
        device: str,  # noqa: ARG002  (a cast is bound by the disk)
        progress: Tell = silent,
    ) -> tuple[str, ...]:
        """Cast tensor by tensor; see the base class."""
        streamed = stream(
            source_folder,
            out,
            convert=partial(self._cast, source_folder),
            parts=1,
            settings=self.manifest_block(),
            progress=progress,
        )
        with saving_to(out):
            copy_config(source_folder, out, dtype=_TYPES[self.dtype][1])
            notes = copy_side_files(source_folder, out)
        if flushed := streamed.counts.get(FLUSHED, 0):
            notes += (f"{flushed:,} weights too small for {self.dtype} became zero",)
        return notes + streamed.notes

    def _cast(self, source_folder: Path, name: str, tensor: torch.Tensor) -> Converted:
        """One tensor in the type, and how many of its weights became zero; integers stay."""
        import torch

        if not tensor.is_floating_point():
            return Converted({name: tensor})
        counts: Counter[str] = Counter()
        try:
            made = cast(name, tensor, getattr(torch, _TYPES[self.dtype][1]), counts=counts)
        except StageError:
            if self.dtype == "fp16":  # every such weight of the source is named then
                refuse_overflow(scan_source(source_folder), label="fp16")
            raise
        return Converted({name: made}, counts=counts)

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
