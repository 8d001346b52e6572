"""Every quantizer setting the tests run, and what they ask of a loaded model."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.processor import processor_flags
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.dynamic_int8 import DynamicInt8, cpu_problems
from pipeline.quantizers.gguf import Gguf
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.quantizers.torchao import Torchao

PACKAGE = "pipeline.quantizers"
GATE = "model.layers.0.mlp.gate_proj.weight"
SINGLE = "model.safetensors"

NO_FBGEMM = "; ".join(problem.what for problem in cpu_problems(platform.machine(), processor_flags()))
"""Why this CPU can't run dynamic_int8, whose own tests are then skipped with these words."""
EVERY: tuple[Quantizer, ...] = (
    Native(dtype="fp32"),
    Native(dtype="bf16"),
    Native(dtype="fp16"),
    Quanto(weights="int8"),
    Quanto(weights="int4"),
    Quanto(weights="fp8"),
    Bitsandbytes(type="int8"),
    Bitsandbytes(type="nf4"),
    Bitsandbytes(type="nf4", double_quant=True),
    Bitsandbytes(type="fp4"),
    *(() if NO_FBGEMM else (DynamicInt8(),)),
    Torchao(weights="int8"),
    Torchao(weights="int8_dynamic"),
    Torchao(weights="fp8"),
)
QUANTIZING = EVERY[3:]
OF_OTHER_FILES = (Gguf(type="q8_0"),)
"""Those that write no safetensors, with tests of their own."""
WITH_CONV1D = tuple(quantizer for quantizer in QUANTIZING if "conv1d" in quantizer.quantizable)


def name_of(quantizer: Quantizer) -> str:
    settings = quantizer.model_dump(exclude={"kind"})
    return "-".join([quantizer.kind, *(str(value) for value in settings.values())])


every_quantizer = pytest.mark.parametrize("quantizer", EVERY, ids=name_of)
quantizing = pytest.mark.parametrize("quantizer", QUANTIZING, ids=name_of)


def edited(source: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of `source` whose weights went through `edit`."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(source, target)
    weights = load_file(folder / SINGLE)
    edit(weights)
    save_file(weights, folder / SINGLE)
    return folder


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.tensor([[3, 17, 40, 5, 99, 120]])).logits


def dense(model: Any, name: str) -> Any:
    """The weight a loaded model computes with, dequantized, in FP32."""
    from bitsandbytes import functional, nn

    module = model.get_submodule(name.removesuffix(".weight"))
    if isinstance(module, nn.Linear4bit):
        return functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
    if isinstance(module, nn.Linear8bitLt):
        return functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).float()
    if hasattr(module, "unpacked"):
        return module.unpacked()
    weight = module.weight
    return (weight.dequantize() if hasattr(weight, "__tensor_flatten__") else weight).float()


class Written:
    """The checkpoints of one source folder under several quantizers, each made when first asked for."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source = source
        self._folder = folder

    def __call__(self, quantizer: Quantizer) -> Path:
        out = self._folder / name_of(quantizer)
        if not out.exists():
            out.mkdir()
            quantizer.quantize(self.source, out, device="cpu")
        return out
