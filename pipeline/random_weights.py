"""A checkpoint of the right shape with random weights, made from a config without any download.

Speed, memory and capacity don't depend on what the weights are worth. Modules are drawn one at a time by
transformers' own initialisation and written shard by shard, so that a model larger than memory can be made.

    write_random_checkpoint(config, out=Path("out"), seed=0, shard_bytes=2_000_000_000, progress=print)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.meta_model import empty_model, parse_config

if TYPE_CHECKING:
    import torch


class Written(NamedTuple):
    """Files of a new checkpoint, and how many parameters they hold (tied ones once)."""

    files: tuple[str, ...]
    parameters: int


def write_random_checkpoint(
    config: dict[str, Any], *, out: Path, seed: int, shard_bytes: int, progress: Callable[[str], None]
) -> Written:
    """Write config.json, safetensors shards and their index into `out`; 16-bit unless the config says else.

    Raises PrerequisiteError when this version of transformers doesn't know the architecture, RecipeError when
    the config is incomplete or contradicts itself.
    """
    import torch

    model = _empty_model(config, source="config")
    total = sum(parameter.numel() for parameter in model.parameters())
    torch.manual_seed(seed)
    writer = _ShardWriter(out, shard_bytes=shard_bytes)
    done = 0
    for name, tensor in _initialised(model):
        writer.add(name, tensor)
        done += tensor.numel()
        progress(f"random weights: {min(100, 100 * done // total)} %")
    files = writer.finish()
    model.config.save_pretrained(out)
    return Written(files=files, parameters=total)


def _empty_model(config: dict[str, Any], *, source: str) -> Any:
    parsed = parse_config(config, source=source).config
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    parsed.dtype = dtype
    return empty_model(parsed, source=source, dtype=dtype)


def _initialised(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every stored tensor once, tied ones under their first name; each module is freed after its turn.

    Stored buffers, such as the bias of a mixture's router, are among them.
    """
    import torch

    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own = {name: tensor for name, tensor in _stored(module) if id(tensor) not in seen}
        if not own:
            continue
        seen.update(id(tensor) for tensor in own.values())
        for name, tensor in own.items():
            drawn = torch.zeros(tensor.shape, dtype=tensor.dtype)
            parameter = isinstance(tensor, torch.nn.Parameter)
            setattr(module, name, torch.nn.Parameter(drawn, requires_grad=False) if parameter else drawn)
        with torch.no_grad():
            model._init_weights(module)
        for name, tensor in own.items():
            yield f"{prefix}.{name}", getattr(module, name).detach()
            setattr(module, name, tensor)


def _stored(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and those of its buffers that checkpoints hold."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


class _ShardWriter:
    """Collects tensors and writes a shard whenever it is full."""

    def __init__(self, out: Path, *, shard_bytes: int) -> None:
        self._out = out
        self._shard_bytes = shard_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = 0
        self._total_bytes = 0
        self._places: dict[str, int] = {}
        self._shards = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._held and self._held_bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._held[name] = tensor.contiguous()
        self._held_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._held, self._out / f"shard-{self._shards}.safetensors", metadata={"format": "pt"})
        self._places.update(dict.fromkeys(self._held, self._shards))
        self._shards += 1
        self._held, self._held_bytes = {}, 0

    def finish(self) -> tuple[str, ...]:
        """Write what is left, give the shards their usual names, write the index."""
        self._flush()
        names = [
            "model.safetensors" if self._shards == 1 else f"model-{i + 1:05}-of-{self._shards:05}.safetensors"
            for i in range(self._shards)
        ]
        for number, name in enumerate(names):
            (self._out / f"shard-{number}.safetensors").rename(self._out / name)
        if self._shards > 1:
            index = {
                "metadata": {"total_size": self._total_bytes},
                "weight_map": {name: names[shard] for name, shard in self._places.items()},
            }
            (self._out / "model.safetensors.index.json").write_text(
                json.dumps(index, indent=2), encoding="utf-8"
            )
        return tuple(names)
