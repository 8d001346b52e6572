"""GGUF files for llama.cpp: 16-bit floats, blocks of 32 weights (Q8_0 … Q4_0), K types through llama.cpp's own tool.

Block weights have one type. The head, or the embedding that is the head too, keeps more bits as llama.cpp's own
quantizer leaves it: Q6_K, or Q8_0 where rows aren't multiples of 256. Norms, biases and routers stay in FP32, and
matrices whose rows aren't whole blocks in FP16. llama.cpp multiplies quantized weights by activations that it has
rounded to 8 bits; transformers reads the same file into floats, which is how quality is measured.

>>> Gguf(type="q4_0").predicted_bytes(4096, 4096)
9437184
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from pipeline.checkpoint import check_source
from pipeline.errors import CheckpointError, StageError
from pipeline.gguf_conversion import check_vocabulary, head_type, matrix_type, write_gguf
from pipeline.gguf_converter import architecture_problem, converter_problems, tokenizer_problem
from pipeline.gguf_file import (
    BLOCK_TYPES,
    FILE_TYPES,
    GGUF_NAME,
    read_gguf,
    stored_bytes,
)
from pipeline.gguf_names import named_tensors
from pipeline.gguf_reading import load_dequantized
from pipeline.llama_library import library_problems
from pipeline.llama_quantize import program_file, quantize_file, tool_problems
from pipeline.progress import Tell, silent
from pipeline.quantizers.base import Quantizer, StoredBytes, StoredWeight
from pipeline.results import Problem
from pipeline.store import file_sha256
from pipeline.tensorfile import TensorInfo
from pipeline.weights import copy_config, copy_side_files, missing_packages, saving_to

if TYPE_CHECKING:
    import torch

_FLOAT_TYPES = {"f16": "float16", "bf16": "bfloat16"}
_MIXTURES: Mapping[str, tuple[str, ...]] = {
    "q6_k": ("Q6_K",),
    "q5_k_m": ("Q5_K", "Q6_K"),
    "q5_k_s": ("Q5_K",),
    "q4_k_m": ("Q4_K", "Q6_K"),
    "q4_k_s": ("Q4_K", "Q5_K"),
}
"""What llama.cpp's quantizer makes of the blocks: mostly the first type, in some layers the second."""
_SECOND_SHARE = {"q5_k_m": 0.145, "q4_k_m": 0.145, "q4_k_s": 0.04}
"""Share of a Llama's block weights that get the second type: values and down projections of half the layers (M),
or of an eighth (S). Other shapes differ by a hundredth or two."""
_SIXTEEN_BIT_NAME = "sixteen-bit.gguf"


class Gguf(Quantizer):
    """One file `model.gguf` whose block weights are of ggml's type, or mixture of types, `type`.

    `importance_matrix` is a file made by llama-imatrix, for K types: an absolute path, or one that begins with `~`.
    """

    small_tensors_in_fp32: ClassVar[bool] = True

    kind: Literal["gguf"] = "gguf"
    type: Literal[
        "f16",
        "bf16",
        "q8_0",
        "q6_k",
        "q5_k_m",
        "q5_k_s",
        "q5_1",
        "q5_0",
        "q4_k_m",
        "q4_k_s",
        "q4_1",
        "q4_0",
    ]
    importance_matrix: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _a_matrix_that_can_be_used(self) -> Gguf:
        if self.importance_matrix is None:
            return self
        if self.type not in _MIXTURES:
            raise ValueError(
                f"importance_matrix is for K types ({', '.join(_MIXTURES)}); {self.type} is rounded without one"
            )
        if not self.importance_matrix.startswith(("/", "~")):
            raise ValueError(
                f"importance_matrix must be an absolute path or begin with ~, is {self.importance_matrix}"
            )
        return self

    @property
    def loading(self) -> str:
        """llama.cpp and what is built on it read the file."""
        return f'With llama.cpp:\n\n```sh\nllama-cli --model {GGUF_NAME} --prompt "Once upon a time"\n```'

    @property
    def precision(self) -> str:
        """fp16, bf16, or the integers' bits: int8, int6, int5, int4."""
        return {"f16": "fp16", "bf16": "bf16"}.get(self.type, f"int{self.type[1]}")

    @property
    def minimum_coverage(self) -> float:
        """None for the float types."""
        return 0.0 if self.type in _FLOAT_TYPES else super().minimum_coverage

    @property
    def integer_arithmetic(self) -> bool:
        """Blocks are multiplied by activations in blocks of INT8 (ggml's `vec_dot` and `mmq` kernels)."""
        return self.type not in _FLOAT_TYPES

    @classmethod
    def default_for(cls, precision: str, *, device: str) -> Gguf | None:  # noqa: ARG003
        """None of the short forms."""
        return None

    def check(self, *, device: str) -> tuple[Problem, ...]:  # noqa: ARG002  (written on the CPU)
        """Packages for converting and for reading back, and ggml's library where blocks are encoded."""
        problems = missing_packages("accelerate") + converter_problems()
        if self.type in _MIXTURES:
            return problems + tool_problems(self._matrix)
        return problems if self.type in _FLOAT_TYPES else problems + library_problems(device="cpu")

    def model_problems(
        self, config: Mapping[str, Any], *, weights: str, folder: Path | None = None
    ) -> tuple[Problem, ...]:
        """An architecture or tokenizer that the converter doesn't know; random weights, which aren't made as GGUF."""
        found = (architecture_problem(config), tokenizer_problem(folder) if folder else None)
        problems = tuple(problem for problem in found if problem)
        if weights == "random":
            problems += (
                Problem(
                    what="gguf has no variant of random weights that is made on the device",
                    fix="write a random checkpoint into a folder first, and name that folder as the model",
                ),
            )
        return problems

    def quantize(
        self,
        source_folder: Path,
        out: Path,
        *,
        device: str,  # noqa: ARG002  (the CPU does it)
        progress: Tell = silent,
    ) -> tuple[str, ...]:
        """Convert and encode tensor by tensor; see the base class."""
        made_by: tuple[str, ...] = ()
        if self.type in _MIXTURES:
            made_by = (self._write_mixture(source_folder, out, progress=progress),)
            header = read_gguf(out / GGUF_NAME)
            check_vocabulary(source_folder, header, where=out / GGUF_NAME)
        else:
            header = write_gguf(source_folder, out / GGUF_NAME, type_name=self._main_type, progress=progress)
        own = check_source(source_folder).dtype
        computed = own if own in _FLOAT_TYPES.values() else "float16"
        with saving_to(out):
            # Of blocks the type that they are read into: the source's own, whose range its activations may need.
            copy_config(source_folder, out, dtype=_FLOAT_TYPES.get(self.type, computed))
            notes = copy_side_files(source_folder, out)
        matrix = (f"importance matrix of SHA-256 {file_sha256(self._matrix)}",) if self._matrix else ()
        return (_types_note(header.tensors), *made_by, *matrix, *notes)

    def _write_mixture(self, source_folder: Path, out: Path, *, progress: Tell) -> str:
        """Through a file in the source's own type, which is removed again; returns which tool did it."""
        between = out / _SIXTEEN_BIT_NAME
        stored = {"bfloat16": "BF16", "float16": "F16"}.get(check_source(source_folder).dtype, "F32")
        try:
            write_gguf(source_folder, between, type_name=stored, progress=progress)
            progress("llama.cpp quantizes")
            return quantize_file(
                between, out / GGUF_NAME, mixture=self.type.upper(), importance_matrix=self._matrix
            )
        finally:
            between.unlink(missing_ok=True)

    def load_stored(self, folder: Path, *, device: str, compute_dtype: str) -> torch.nn.Module:
        """Every weight read into `compute_dtype`; for quality, since nothing then is computed as llama.cpp does."""
        header = read_gguf(folder / GGUF_NAME)
        check_vocabulary(folder, header, where=folder / GGUF_NAME)
        said = header.metadata.get("general.file_type")
        wanted = FILE_TYPES[self.type.upper()]
        if said != wanted:
            raise CheckpointError(
                f"{folder / GGUF_NAME}: general.file_type is {said}, for {self.type} it is {wanted}. Quantize again."
            )
        return load_dequantized(folder, header, device=device, compute_dtype=compute_dtype)

    def outline(self, model: Any, *, compute_dtype: str) -> None:
        """Not there: a file can't be made of modules."""
        del model, compute_dtype
        raise StageError(
            "gguf has no variant of random weights; write a random checkpoint into a folder first"
        )

    def group_weights(self, in_features: int) -> int | None:
        """Blocks of 32, in rows that consist of them."""
        block = BLOCK_TYPES[matrix_type(self._main_type, in_features)]
        return block.group_weights if block.scale_bytes else None

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        """Blocks of packed weights with their scales and, for some types, minima; a mixture's in its usual shares."""
        second = _SECOND_SHARE.get(self.type, 0.0)
        total = scales = minima = 0.0
        for name, share in zip(self._types, (1 - second, second), strict=False):
            block = BLOCK_TYPES[matrix_type(name, in_features)]
            blocks = share * out_features * in_features / block.weights
            total += blocks * block.size_bytes
            scales += blocks * block.scale_bytes
            minima += blocks * block.minimum_bytes
        whole = [round(count) for count in (total - scales - minima, scales, minima)]
        return StoredBytes(packed=whole[0], scales=whole[1], zero_points=whole[2])

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:  # noqa: ARG002
        """As in the file: what a CPU lays out anew for its kernels takes the same bytes."""
        return self.predicted_parts(out_features, in_features)

    @property
    def other_bytes_per_weight(self) -> float:
        """Norms and biases are FP32."""
        return 4.0

    def table_bytes_per_weight(self, columns: int, *, is_head: bool) -> float:
        """Bytes of each weight of the embedding, or of the head, which has a type of its own."""
        block = BLOCK_TYPES[(head_type if is_head else matrix_type)(self._main_type, columns)]
        return block.size_bytes / block.weights

    def stored_tensors(self, folder: Path) -> dict[str, TensorInfo]:
        """The tensors of `model.gguf` under the model's names, with ggml's types."""
        return named_tensors(folder, read_gguf(folder / GGUF_NAME))

    def stored_weights(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[StoredWeight, ...]:
        """A tensor is quantized when its type has blocks with a scale."""
        return tuple(_stored_weight(name, dtype, shape) for name, (dtype, shape) in tensors.items())

    def input_files(self) -> tuple[Path, ...]:
        """The importance matrix, and the program that makes K types."""
        program = program_file() if self.type in _MIXTURES else None
        return tuple(path for path in (self._matrix, program) if path)

    @property
    def _matrix(self) -> Path | None:
        return Path(self.importance_matrix).expanduser() if self.importance_matrix else None

    @property
    def _types(self) -> tuple[str, ...]:
        return _MIXTURES.get(self.type, (self.type.upper(),))

    @property
    def _main_type(self) -> str:
        """ggml's name of the type that most block weights have."""
        return self._types[0]


def _stored_weight(name: str, dtype: str, shape: tuple[int, ...]) -> StoredWeight:
    block, elements = BLOCK_TYPES[dtype], math.prod(shape)
    return StoredWeight(
        name=name,
        elements=elements,
        stored_bytes=stored_bytes(dtype, elements),
        quantized=block.scale_bytes > 0,
        group_size=block.group_weights if block.scale_bytes else None,
    )


def _types_note(tensors: Mapping[str, TensorInfo]) -> str:
    """How many tensors, and which share of the weights, each type has: "Q4_0 78.9 % of the weights (210 tensors)…"."""
    total = sum(info.elements for info in tensors.values())
    told = []
    for name in dict.fromkeys(info.dtype for info in tensors.values()):
        sizes = [info.elements for info in tensors.values() if info.dtype == name]
        told.append((sum(sizes), f"{name} {100 * sum(sizes) / total:.2f} % ({len(sizes)} tensors)"))
    return "weights by type: " + ", ".join(text for _, text in sorted(told, reverse=True))
