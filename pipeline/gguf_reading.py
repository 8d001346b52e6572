"""A GGUF file read into a transformers model of plain floats, so that its very weights can be scored.

transformers dequantizes the file; the architecture comes from the folder's own config.json, because a GGUF's
metadata don't hold all of it. What came out is checked: every parameter filled from the file, nothing in the file
left over.

    model = load_dequantized(folder, read_gguf(folder / "model.gguf"), device="cpu", compute_dtype="float32")
"""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import CheckpointError, StageError
from pipeline.gguf_file import GGUF_NAME, GgufHeader
from pipeline.meta_model import one_line
from pipeline.weights import quiet_transformers, ready

if TYPE_CHECKING:
    import torch

_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tables that transformers computes from its config."""
_INSTEAD = (
    "so its quality can't be measured here; take a quantizer that transformers loads (quanto, bitsandbytes), or leave "
    "the quality section out"
)


def load_dequantized(folder: Path, header: GgufHeader, *, device: str, compute_dtype: str) -> torch.nn.Module:
    """The model in eval mode on `device`, every weight in `compute_dtype`.

    Raises StageError when transformers doesn't read GGUF files of this architecture, CheckpointError when file and
    model don't hold the same tensors.
    """
    _check_readable(header, folder)
    model, missing = _load(folder, device=device, compute_dtype=compute_dtype)
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors of the model are not in {GGUF_NAME}, such as {missing[0]}"
        )
    _check_all_taken(folder, header, model)
    # Plain floats now: with these marks transformers would take the model for a quantized one.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.is_quantized = False
    return ready(model, folder=folder, device=device)


def _check_readable(header: GgufHeader, folder: Path) -> None:
    from transformers.integrations.gguf.utils import is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    name = header.architecture
    # Its two readers spell some names with an underscore.
    spellings = {name, name.replace("-", "_"), name.replace("moe", "_moe")}
    if not is_gguf_arch_supported(name) and not spellings & set(GGUF_SUPPORTED_ARCHITECTURES):
        raise StageError(
            f"{folder / GGUF_NAME}: transformers can't read GGUF files of the architecture {name!r}; {_INSTEAD}"
        )


def _load(folder: Path, *, device: str, compute_dtype: str) -> tuple[Any, list[str]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    # Its bar over the tensors goes to standard error whatever the verbosity.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                gguf_file=GGUF_NAME,
                quantization_config=GgufConfig(dequantize=True),
                dtype=getattr(torch, compute_dtype),
                device_map={"": device},
                local_files_only=True,
                output_loading_info=True,
            )
        except (NotImplementedError, ValueError, LookupError, AttributeError) as error:
            raise StageError(
                f"{folder / GGUF_NAME}: transformers can't read this GGUF file ({one_line(error)}); {_INSTEAD}"
            ) from error
    mismatched = sorted(str(entry) for entry in report["mismatched_keys"])
    return model, sorted(report["missing_keys"]) + mismatched


def _check_all_taken(folder: Path, header: GgufHeader, model: Any) -> None:
    """transformers passes over tensors that it has no name for; then the counts of weights differ."""
    held = sum(info.elements for name, info in header.tensors.items() if name not in _COMPUTED)
    taken = sum(math.prod(weight.shape) for weight in model.parameters())
    if held != taken:
        raise CheckpointError(
            f"{folder / GGUF_NAME}: holds {held:,} weights, the model that transformers made of it {taken:,}; a "
            "part of the file isn't read, or read twice"
        )
