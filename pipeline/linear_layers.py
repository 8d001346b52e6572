"""A model's linear layers: found on the meta device, quantized one by one from a checkpoint, filled from one.

For quantizers that treat each weight by itself and store everything else in 16 bits. The head is never among the
layers: quantizing it would cut it loose from an embedding that it is tied to.

    model = outlined(source, dtype="bfloat16")
    layers = linear_layers(model)
    notes = quantize_layers(source, out, model=model, convert=convert, parts=2, settings={}, device="cpu")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import CheckpointError
from pipeline.meta_model import empty_model, parse_config
from pipeline.progress import Tell, silent
from pipeline.shard_writer import ShardWriter, header_room
from pipeline.stored_names import match_names
from pipeline.tensor_stream import Convert, stream
from pipeline.tensorfile import SINGLE_NAME, read_json
from pipeline.weights import (
    keep_types,
    load_pretrained,
    quiet_transformers,
    read_tensors,
    saving_to,
    scan_source,
)

if TYPE_CHECKING:
    import torch

_BLOCK_WEIGHTS = 1_048_576
Take = Callable[[str, "torch.Tensor"], bool]
"""Keeps a tensor of a file if it is part of a quantized weight, and says whether it is."""


def outlined(folder: Path, *, dtype: str) -> Any:
    """The folder's model on the meta device, its tensors of the types that transformers' loader would give them.

    `dtype` is torch's name of the model's type. Raises as `parse_config` and `empty_model` do.
    """
    name = str(folder / "config.json")
    model = empty_model(
        parse_config(read_json(folder / "config.json"), source=name).config, source=name, dtype=dtype
    )
    keep_types(model, dtype)
    return model


def linear_layers(model: Any, *, conv1d: bool = False) -> dict[str, Any]:
    """Its `nn.Linear` modules by name, with `conv1d` GPT-2's transposed ones too; never the head."""
    import torch
    from transformers.pytorch_utils import Conv1D

    wanted = (torch.nn.Linear, Conv1D) if conv1d else (torch.nn.Linear,)
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in wanted and module is not head
    }


def stored_types(model: Any) -> dict[str, torch.dtype]:
    """The type of every tensor that a checkpoint of `model` holds, by name; tied ones once, under the first name."""
    first: dict[int, str] = {}
    types = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) == name:
            types[name] = tensor.dtype
    return types


def row_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[out, in] in blocks of whole rows; what is computed on the way to a quantized row is several times its size."""
    import torch

    return torch.tensor_split(weight, -(-weight.numel() // _BLOCK_WEIGHTS))


def quantize_layers(
    source: Path,
    out: Path,
    *,
    model: Any,
    convert: Convert,
    parts: int,
    settings: Mapping[str, Any],
    device: str,
    metadata_bytes: int = 0,
    shared_metadata_bytes: int = 0,
    progress: Tell = silent,
) -> tuple[str, ...]:
    """Write what `convert` makes of each tensor of `source`'s `model`; see `tensor_stream.stream` for the arguments.

    Tensor by tensor where the files' tensors are the model's, else from the whole model in memory. Every file's
    metadata holds `metadata_bytes` for each tensor and `shared_metadata_bytes` once. Returns notes, what `convert`
    counted among them as "12 KEY".
    """
    match = match_names(source, model)
    if match.because is not None:
        progress("loading the whole model")
        counts = _quantize_whole(
            source,
            out,
            model=model,
            convert=convert,
            device=device,
            room_bytes=header_room(
                stored_types(model),
                parts=parts,
                metadata_bytes=metadata_bytes,
                file_metadata_bytes=shared_metadata_bytes,
            ),
        )
        because = f"quantized in memory as a whole, not tensor by tensor: {match.because}"
        return (*_counted(counts), because)
    streamed = stream(
        source,
        out,
        convert=convert,
        parts=parts,
        settings=settings,
        progress=progress,
        metadata_bytes=metadata_bytes,
        file_metadata_bytes=shared_metadata_bytes,
        left_out=match.left_out,
    )
    return (*_counted(streamed.counts), *streamed.notes)


def _counted(counts: Mapping[str, int]) -> Iterator[str]:
    return (f"{count:,} {what}" for what, count in counts.items() if count)


def _quantize_whole(
    source: Path, out: Path, *, model: Any, convert: Convert, device: str, room_bytes: int
) -> Counter[str]:
    """What `convert` counted. `model` is on the meta device and says which tensors there are, in which types."""
    import torch

    scan_source(source)
    wanted = stored_types(model)
    loaded = load_pretrained(source, dtype=_main_type(model), device_map={"": device})
    state = loaded.state_dict()
    metadata: dict[str, str] = {}
    counts: Counter[str] = Counter()
    with torch.no_grad(), saving_to(out), ShardWriter(out / SINGLE_NAME, room_bytes=room_bytes) as shard:
        for name in wanted:
            made = convert(name, state[name])
            for part, tensor in made.tensors.items():
                shard.add(part, tensor)
            metadata.update(made.metadata)
            counts.update(made.counts)
        shard.finish(metadata)
    return counts


def _main_type(model: Any) -> torch.dtype:
    found: torch.dtype = model.get_input_embeddings().weight.dtype
    return found


def empty_on_host(folder: Path, *, compute_dtype: str) -> Any:
    """The folder's model with parameters on the meta device and buffers, which no file holds, computed."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    name = str(folder / "config.json")
    config = parse_config(read_json(folder / "config.json"), source=name).config
    with quiet_transformers(), init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, compute_dtype))
    keep_types(model, compute_dtype)
    return model


def fill(model: Any, folder: Path, *, device: str, take: Take) -> None:
    """Give the empty `model` the folder's tensors on `device`, one after the other, in the types it has for them.

    Raises CheckpointError when a tensor is missing or the model has no place for one.
    """
    types = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}
    state = {}
    for name, tensor in read_tensors(folder):
        if not take(name, tensor.to(device)):
            state[name] = tensor.to(device=device, dtype=types.get(name, tensor.dtype))
    result = model.load_state_dict(state, strict=False, assign=True)
    if result.unexpected_keys:
        raise CheckpointError(f"{folder}: the model has no place for {result.unexpected_keys[0]}")
    model.tie_weights()
    empty = [name for name, tensor in model.named_parameters() if tensor.device.type == "meta"]
    if empty:
        raise CheckpointError(
            f"{folder}: {len(empty)} tensors of the model are in no file, such as {empty[0]}"
        )
    model.to(device)
