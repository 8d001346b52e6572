"""The contract of a quantizer: a frozen value that turns a folder of safetensors into another one.

It also quantizes one module of a model in memory, for random weights that are made where they run.

A new quantizer is one file `KIND.py` in this package with one subclass; nothing else has to be edited.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.block_weights import MatrixKind
from pipeline.progress import Tell, silent
from pipeline.random_weights import is_random, load_random
from pipeline.results import Problem
from pipeline.tensorfile import BITS, TensorInfo, tensors
from pipeline.values import Value
from pipeline.weights import SourceScan, sixteen_bit_type

if TYPE_CHECKING:
    import torch


TRANSFORMERS_LOADING = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its repository on the Hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
```"""
"""`Quantizer.loading` of files that transformers reads by itself."""


class StoredBytes(Value):
    """Bytes of one quantized weight matrix by what they hold.

    `packed` is the weights themselves, `metadata` whatever else lies with them (shapes, offsets).
    """

    packed: int
    scales: int = 0
    zero_points: int = 0
    codebooks: int = 0
    metadata: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.packed + self.scales + self.zero_points + self.codebooks + self.metadata


def group_wise(
    out_features: int,
    in_features: int,
    *,
    bits: int,
    group_size: int | None,
    scale_bytes: int,
    zero_point_bytes: int = 0,
) -> StoredBytes:
    """Storage of a matrix whose rows are split into groups that share a scale and perhaps a zero-point.

    `group_size` None is one group a row; a row that it doesn't divide ends in a shorter group with a scale of
    its own. Sub-byte weights are packed without gaps. 4096 × 4096 at 4 bits, groups of 128, 2-byte scales:
    8,388,608 + 262,144 bytes.
    """
    groups = out_features * -(-in_features // (group_size or in_features))
    return StoredBytes(
        packed=-(-out_features * in_features * bits // 8),
        scales=groups * scale_bytes,
        zero_points=groups * zero_point_bytes,
    )


class StoredWeight(Value):
    """How one weight matrix lies in a checkpoint file, read from tensor names, dtypes and shapes only."""

    name: str
    elements: int
    stored_bytes: int
    quantized: bool
    group_size: int | None = None

    @classmethod
    def plain(cls, name: str, dtype: str, shape: tuple[int, ...]) -> StoredWeight:
        """A tensor that is a weight as it is, not quantized."""
        elements = math.prod(shape)
        return cls(name=name, elements=elements, stored_bytes=elements * BITS[dtype] // 8, quantized=False)


class Quantizer(Value, ABC):
    """A way to store a model's weights; also knows how to load and to recognise what it wrote."""

    kind: str
    quantizable: ClassVar[frozenset[MatrixKind]] = frozenset(("linear", "conv1d", "experts"))
    """Which matrices of a model it finds; the others stay as they are, and coverage then refuses the label."""
    small_tensors_in_fp32: ClassVar[bool] = False
    """Whether norms, biases and the like are FP32 in its files even where the label is a 16-bit type."""

    @property
    def minimum_coverage(self) -> float:
        """Share of block weights that must be quantized for the label to be earned; 0 where it only sets the type."""
        return 0.95

    @property
    def compilable(self) -> bool:
        """Whether `torch.compile` makes one graph of a decode step over its weights; tried where it may pay."""
        return False

    @property
    def integer_arithmetic(self) -> bool:
        """Whether products are computed in INT8, activations quantized too; else in the engine's float type."""
        return False

    @property
    @abstractmethod
    def precision(self) -> str:
        """Label of the result: fp32, fp16, bf16, int8, int4, fp8, fp4."""

    @property
    def loading(self) -> str:
        """Markdown for a model card: code that loads a folder written by `quantize` as `model`, by this package here.

        A kind whose files another library reads says how that one does.
        """
        name = type(self).__name__
        fields = ", ".join(f"{field}={value!r}" for field, value in self if field != "kind")
        return (
            "```python\n"
            "from pathlib import Path\n\n"
            f"from {type(self).__module__} import {name}\n\n"
            'folder = "."  # this folder\n'
            f'model = {name}({fields}).load(Path(folder), device="cpu", compute_dtype="bfloat16")\n'
            "```"
        )

    @classmethod
    @abstractmethod
    def default_for(cls, precision: str, *, device: str) -> Quantizer | None:
        """The value that a recipe's short form `precision` means on `device`, or None.

        `device` is "cpu", "cuda", or "mps", which is only planned for. At most one kind answers for each pair.
        """

    @abstractmethod
    def check(self, *, device: str) -> tuple[Problem, ...]:
        """What is missing to quantize and load on `device`. Imports nothing heavy, takes milliseconds."""

    def model_problems(
        self, config: Mapping[str, Any], *, weights: str, folder: Path | None = None
    ) -> tuple[Problem, ...]:
        """What keeps it from quantizing the model of a `config.json`; `weights` are "trained" or "random" ones.

        `folder` is where its tokenizer lies, as far as it is on this machine. Asked before a run like `check`.
        """
        del config, weights, folder
        return ()

    @abstractmethod
    def quantize(
        self, source_folder: Path, out: Path, *, device: str, progress: Tell = silent
    ) -> tuple[str, ...]:
        """Write the quantized checkpoint (config, tokenizer, safetensors) into the folder `out`.

        `out` is empty, or holds what the same call left behind when it was stopped and a journal beside it
        (see `tensor_stream`); only what streams ever finds one. `progress` is told what is going on, in a few
        words and as often as wanted. Returns notes worth keeping. Raises StageError when a weight can't be
        represented (non-finite values, overflow, unsupported shapes), naming the layer.
        """

    def load(self, folder: Path, *, device: str, compute_dtype: str) -> torch.nn.Module:
        """The model of a folder, in eval mode on `device`: read back, or made there where it holds a seed.

        `compute_dtype` ("float32", "float16", "bfloat16") is the type of activations and of whatever the
        quantizer left unquantized.
        """
        if is_random(folder):
            return load_random(folder, quantizer=self, device=device, compute_dtype=compute_dtype)
        return self.load_stored(folder, device=device, compute_dtype=compute_dtype)

    @abstractmethod
    def load_stored(self, folder: Path, *, device: str, compute_dtype: str) -> torch.nn.Module:
        """The model of a folder written by `quantize`; see `load`."""

    def float_type(self, source_dtype: str) -> str:
        """torch's name of the type that whatever stays unquantized is stored in: 16 bits, the source's own."""
        return sixteen_bit_type(source_dtype, SourceScan(overflows={}))

    @abstractmethod
    def outline(self, model: Any, *, compute_dtype: str) -> None:
        """Give a model on the meta device the modules and types that `load_stored` gives one, without weights.

        A module whose weight is quantized is replaced; the others stay the same objects.
        """

    def pack(self, plain: Any, into: Any, *, name: str) -> None:
        """Quantize the weight of `plain`, stored as `float_type` says, into the empty module of `outline`.

        It stays on its device, and `into` ends as `load_stored` would leave it, but for its bias. `name` is the
        module's. Called for the modules that `outline` has replaced, so not at all where it replaces none.
        """
        raise NotImplementedError(
            f"{self.kind} replaces {name} ({type(plain)} by {type(into)}) and can't pack it"
        )

    def group_weights(self, in_features: int) -> int | None:
        """Weights that share a scale where rows are split into groups; None where they aren't."""
        del in_features
        return None

    @abstractmethod
    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        """Bytes of one quantized linear weight in a checkpoint file."""

    def predicted_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of one quantized linear weight in a file, with scales, zero-points and codebooks."""
        return self.predicted_parts(out_features, in_features).total

    @abstractmethod
    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:
        """Bytes of one quantized linear weight once `load` has put it into memory.

        `float_bytes` is the size of the type it was loaded to compute in (2 or 4), which some scales take.
        """

    @property
    @abstractmethod
    def other_bytes_per_weight(self) -> float:
        """Bytes of each weight that stays unquantized (embedding, norms, an unquantized head)."""

    def table_bytes_per_weight(self, columns: int, *, is_head: bool) -> float | None:
        """Bytes of each weight of a table with rows of `columns` where it is quantized too, in a file and in memory.

        The table is the embedding's or the head's; `is_head` holds for the embedding where that is the head too.
        None where it stays unquantized.
        """
        del columns, is_head
        return None

    def input_files(self) -> tuple[Path, ...]:
        """Files, beside the source, whose content decides what is written."""
        return ()

    def stored_tensors(self, folder: Path) -> dict[str, TensorInfo]:
        """Every tensor of a folder written by `quantize`, by the model's own names as far as it has them.

        Raises CheckpointError when files are damaged or missing.
        """
        return tensors(folder)

    @abstractmethod
    def stored_weights(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[StoredWeight, ...]:
        """Interpret a file's tensors (name → safetensors dtype and shape); one entry per logical weight."""

    def manifest_block(self) -> dict[str, Any]:
        """The quantizer as the manifest keeps it."""
        return self.model_dump(mode="json")
