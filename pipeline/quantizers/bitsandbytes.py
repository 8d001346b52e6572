"""LLM.int8 and the 4-bit types NF4 and FP4 of bitsandbytes, through transformers.

Linear layers and GPT-2's Conv1D are quantized; embedding and head stay in 16 bits. INT8 keeps one FP32 scale
a row and, when it runs, quantizes activations to 8 bits as well (outlier features apart), on whatever device:
its quality figures contain that, as its use would. The 4-bit types keep one scale for each block of 64
weights, in FP32 or, with `double_quant`, in 8 bits with a scale of its own for each 256 of them.
Sources: arXiv 2208.07339 (LLM.int8), arXiv 2305.14314 (NF4, double quantization).

>>> Bitsandbytes(type="int8").predicted_bytes(4096, 4096)
16793600
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from pipeline.block_weights import MatrixKind
from pipeline.checkpoint import check_source
from pipeline.errors import CheckpointError, StageError
from pipeline.progress import Tell, silent
from pipeline.quantizers.base import TRANSFORMERS_LOADING, Quantizer, StoredBytes, StoredWeight, group_wise
from pipeline.results import Problem
from pipeline.tensorfile import BITS, read_json
from pipeline.weights import (
    cast_unquantized,
    copy_side_files,
    keep_types,
    load_pretrained,
    missing_packages,
    quiet_transformers,
    ready,
    refuse_overflow,
    saving_to,
    scan_source,
    sixteen_bit_type,
)

if TYPE_CHECKING:
    import torch

BLOCK_WEIGHTS = 64
"""Weights that share a scale; transformers' BitsAndBytesConfig offers no other size."""
SCALES_PER_NESTED_SCALE = 256
_CODEBOOK_BYTES = 16 * 4
_NESTED_CODEBOOK_BYTES = 256 * 4
_STATE_BYTES = 86
_NESTED_STATE_BYTES = 168
"""The small JSON of block size, type and shape that bitsandbytes stores beside each weight."""
_OFFSET_BYTES = 4
_PARTS = (".SCB", ".weight_format", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


class Bitsandbytes(Quantizer):
    """INT8, NF4 or FP4 weights; `double_quant` (4-bit only) stores the scales in 8 bits."""

    quantizable: ClassVar[frozenset[MatrixKind]] = frozenset(("linear", "conv1d"))

    kind: Literal["bitsandbytes"] = "bitsandbytes"
    type: Literal["int8", "nf4", "fp4"]
    double_quant: bool = False

    @model_validator(mode="after")
    def _only_scales_of_blocks_nest(self) -> Bitsandbytes:
        if self.type == "int8" and self.double_quant:
            raise ValueError("double_quant is for nf4 and fp4; int8 has one scale a row and nothing to nest")
        return self

    @property
    def loading(self) -> str:
        """Transformers reads the files."""
        return f"`pip install bitsandbytes accelerate`, then:\n\n{TRANSFORMERS_LOADING}"

    @property
    def precision(self) -> str:
        """int8, int4 (NF4) or fp4."""
        return {"int8": "int8", "nf4": "int4", "fp4": "fp4"}[self.type]

    @property
    def integer_arithmetic(self) -> bool:
        """LLM.int8 multiplies INT8 by INT8; the 4-bit types are turned into floats first."""
        return self.type == "int8"

    @classmethod
    def default_for(cls, precision: str, *, device: str) -> Bitsandbytes | None:
        """INT8 where the device has its kernels, INT4 as NF4 with double quantization, and FP4."""
        if precision == "int8" and device == "cuda":
            return cls(type="int8")
        if precision == "int4":
            return cls(type="nf4", double_quant=True)
        return cls(type="fp4") if precision == "fp4" else None

    def check(self, *, device: str) -> tuple[Problem, ...]:
        """Packages, and a device that bitsandbytes has kernels for."""
        problems = missing_packages("torch", "transformers", "accelerate", "bitsandbytes")
        if device.split(":")[0] not in ("cpu", "cuda"):
            problems += (
                Problem(
                    what=f"bitsandbytes isn't used on {device!r} here",
                    fix="run on cpu or cuda, or take another quantizer",
                ),
            )
        return problems

    def quantize(
        self, source_folder: Path, out: Path, *, device: str, progress: Tell = silent
    ) -> tuple[str, ...]:
        """Load through transformers, which quantizes layer by layer, and save; see the base class."""
        import torch
        from transformers import GenerationConfig

        progress("looking for NaN, infinity and overflow")
        scan = scan_source(source_folder)
        if self.type == "int8":
            refuse_overflow(scan, label="bitsandbytes int8, which casts to FP16 first,")
        dtype = sixteen_bit_type(check_source(source_folder).dtype, scan)
        progress("loading and quantizing layer by layer")
        model: Any = load_pretrained(
            source_folder,
            quantization_config=self._settings(),
            dtype=getattr(torch, dtype),
            device_map={"": device},
        )
        _check_finite(model)
        model.generation_config = GenerationConfig()  # the shipped one may not save; it is copied, repaired
        progress("writing")
        with quiet_transformers(), saving_to(out):
            model.save_pretrained(out)
        (out / "generation_config.json").unlink(missing_ok=True)
        return copy_side_files(source_folder, out)

    def load_stored(self, folder: Path, *, device: str, compute_dtype: str) -> torch.nn.Module:
        """The stored weights under the folder's own quantization config; activations in `compute_dtype`."""
        import torch
        from transformers import AutoConfig

        self._check_same(folder)
        _quiet_casts()
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        config.quantization_config["bnb_4bit_compute_dtype"] = compute_dtype
        model = load_pretrained(
            folder, config=config, dtype=getattr(torch, compute_dtype), device_map={"": device}
        )
        cast_unquantized(model, compute_dtype)
        return ready(model, folder=folder, device=device)

    def outline(self, model: Any, *, compute_dtype: str) -> None:
        """Replaced by transformers' own rules, as it replaces them for a saved checkpoint."""
        from transformers.quantizers.auto import AutoHfQuantizer

        _quiet_casts()
        keep_types(model, compute_dtype)
        settings = self._settings(bnb_4bit_compute_dtype=compute_dtype)
        upstream: Any = AutoHfQuantizer.from_config(settings, pre_quantized=True)
        upstream.preprocess_model(model=model, device_map=None)
        model.hf_quantizer = upstream
        upstream.postprocess_model(model)

    def pack(self, plain: Any, into: Any, *, name: str) -> None:  # noqa: ARG002
        """With the library's own kernels, on the weight's device; Conv1D is transposed as transformers does."""
        import torch
        from bitsandbytes import functional, nn

        weight = plain.weight.detach()
        weight = weight if isinstance(plain, torch.nn.Linear) else weight.T.contiguous()
        if self.type == "int8":
            rows, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
            into.weight = nn.Int8Params(
                rows, requires_grad=False, has_fp16_weights=False, CB=rows, SCB=scales
            )
        else:
            settings = {**vars(into.weight), "module": into}
            into.weight = nn.Params4bit(weight, requires_grad=False, **settings).to(weight.device)

    def group_weights(self, in_features: int) -> int | None:  # noqa: ARG002
        """Blocks of 64 for the 4-bit types."""
        return None if self.type == "int8" else BLOCK_WEIGHTS

    def _settings(self, **more: Any) -> Any:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_8bit=self.type == "int8",
            load_in_4bit=self.type != "int8",
            bnb_4bit_quant_type="fp4" if self.type == "int8" else self.type,
            bnb_4bit_use_double_quant=self.double_quant,
            **more,
        )

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        """Packed weights, scales, codebooks and, for the 4-bit types, a small JSON; 4 bytes a row for INT8."""
        parts = self._parts(out_features, in_features)
        if self.type == "int8":
            return parts
        state_bytes = _NESTED_STATE_BYTES if self.double_quant else _STATE_BYTES
        return parts.model_copy(update={"metadata": state_bytes})

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:  # noqa: ARG002
        """As in the file, scales in FP32 whatever the arithmetic; of the JSON only the scales' offset is a tensor."""
        parts = self._parts(out_features, in_features)
        return parts.model_copy(update={"metadata": _OFFSET_BYTES}) if self.double_quant else parts

    def _parts(self, out_features: int, in_features: int) -> StoredBytes:
        if self.type == "int8":
            return group_wise(out_features, in_features, bits=8, group_size=None, scale_bytes=4)
        blocks = -(-out_features * in_features // BLOCK_WEIGHTS)
        nested = 4 * -(-blocks // SCALES_PER_NESTED_SCALE)
        return StoredBytes(
            packed=-(-out_features * in_features // 2),
            scales=blocks + nested if self.double_quant else 4 * blocks,
            codebooks=_CODEBOOK_BYTES + (_NESTED_CODEBOOK_BYTES if self.double_quant else 0),
        )

    @property
    def other_bytes_per_weight(self) -> float:
        """16 bits."""
        return 2.0

    def stored_weights(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[StoredWeight, ...]:
        """A weight is quantized when its scales lie beside it: `.SCB` (INT8) or `.weight.absmax` (4-bit)."""
        parts: dict[str, int] = {}
        weights = {}
        for name, (dtype, shape) in tensors.items():
            plain = StoredWeight.plain(name, dtype, shape)
            if owner := _owner(name):
                parts[owner] = parts.get(owner, 0) + plain.stored_bytes
            else:
                weights[name] = plain
        return tuple(
            _with_parts(weight, parts[name], tensors) if name in parts else weight
            for name, weight in weights.items()
        )

    def _check_same(self, folder: Path) -> None:
        saved = read_json(folder / "config.json").get("quantization_config") or {}
        kind = "int8" if saved.get("load_in_8bit") else saved.get("bnb_4bit_quant_type")
        nested = bool(saved.get("bnb_4bit_use_double_quant"))
        if (kind, nested) != (self.type, self.double_quant):
            raise CheckpointError(
                f"{folder}: saved as {kind}, double_quant {nested}; the recipe says {self.type}, "
                f"double_quant {self.double_quant}. Quantize again."
            )


def _quiet_casts() -> None:
    """One warning per layer and forward pass: INT8 casts its input to FP16 to quantize it."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def _owner(name: str) -> str:
    """The weight that an auxiliary tensor belongs to; empty for a tensor that is a weight itself."""
    if ".quant_state.bitsandbytes__" in name:
        return name.split(".quant_state.")[0]
    for part in _PARTS:
        if name.endswith(part):
            stem = name.removesuffix(part)
            return stem if stem.endswith("weight") else f"{stem}.weight"
    return ""


def _with_parts(
    weight: StoredWeight, part_bytes: int, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> StoredWeight:
    packed = BITS[tensors[weight.name][0]] == 8 and f"{weight.name}.absmax" in tensors
    return StoredWeight(
        name=weight.name,
        elements=weight.elements * (2 if packed else 1),
        stored_bytes=weight.stored_bytes + part_bytes,
        quantized=True,
        group_size=BLOCK_WEIGHTS if packed else None,
    )


def _check_finite(model: Any) -> None:
    """Raise StageError naming the first layer whose dequantized weight isn't finite."""
    from bitsandbytes import functional, nn

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear4bit):
            weight = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        elif isinstance(module, nn.Linear8bitLt):
            weight = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        else:
            continue
        if not bool(weight.isfinite().all()):
            raise StageError(
                f"{name}: the quantized weight holds NaN or infinity; bitsandbytes can't store it"
            )
