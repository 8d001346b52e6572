"""A checkpoint of any size in the shape of a Llama: random BF16 weights, at most 2 GB a file, written as it is made.

config = write_random_llama(Path("random"), size_bytes=20_000_000_000)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.shard_writer import ShardWriter, header_room
from pipeline.tensorfile import INDEX_NAME
from pipeline.weights import write_json

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2_000_000_000
DRAWN_WEIGHTS = 33_554_432
SPREAD = 0.02
LARGE_BYTES = 6_000_000_000
"""From here on the widths are those of Llama 3.1 8B, below those of Llama 3.2 1B."""
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}


def write_random_llama(folder: Path, *, size_bytes: int, seed: int = 0) -> dict[str, Any]:
    """Write config, index and weights of about `size_bytes` (at least one layer); returns the config.

    The weights are stretches of one sample of normal numbers, from a new place for every tensor.
    """
    import torch

    config = _config(size_bytes)
    shapes = dict(_shapes(config))
    files = _files(shapes, most_bytes=min(SHARD_BYTES, size_bytes // 4))
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    sample = (torch.randn(DRAWN_WEIGHTS, generator=draw) * SPREAD).to(torch.bfloat16)
    for file, names in files.items():
        with ShardWriter(folder / file, room_bytes=header_room(names, parts=1)) as shard:
            for name in names:
                shard.add(name, _weights(shapes[name], sample, draw))
            shard.finish()
    index = {name: file for file, names in files.items() for name in names}
    write_json(
        folder / INDEX_NAME, {"metadata": {"total_size": 2 * _weight_count(shapes)}, "weight_map": index}
    )
    write_json(folder / "config.json", config)
    return config


def _config(size_bytes: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": size_bytes < LARGE_BYTES,
        "num_hidden_layers": 1,
        **(LARGE if size_bytes >= LARGE_BYTES else SMALL),
    }
    one = 2 * _weight_count(dict(_shapes(config)))
    two = 2 * _weight_count(dict(_shapes({**config, "num_hidden_layers": 2})))
    return {**config, "num_hidden_layers": max(1, 1 + round((size_bytes - one) / (two - one)))}


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    cached = width // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (width,)
        yield f"{prefix}.self_attn.q_proj.weight", (width, width)
        yield f"{prefix}.self_attn.k_proj.weight", (cached, width)
        yield f"{prefix}.self_attn.v_proj.weight", (cached, width)
        yield f"{prefix}.self_attn.o_proj.weight", (width, width)
        yield f"{prefix}.post_attention_layernorm.weight", (width,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, width)
        yield f"{prefix}.mlp.up_proj.weight", (inner, width)
        yield f"{prefix}.mlp.down_proj.weight", (width, inner)
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width)


def _weight_count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(_elements(shape) for shape in shapes.values())


def _elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def _files(shapes: dict[str, tuple[int, ...]], *, most_bytes: int) -> dict[str, list[str]]:
    groups: list[list[str]] = [[]]
    held_bytes = 0
    for name, shape in shapes.items():
        size_bytes = 2 * _elements(shape)
        if groups[-1] and held_bytes + size_bytes > most_bytes:
            groups.append([])
            held_bytes = 0
        groups[-1].append(name)
        held_bytes += size_bytes
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _weights(shape: tuple[int, ...], sample: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=sample.dtype)
    count = shape[0] * shape[1]
    start = int(torch.randint(len(sample), (1,), generator=draw))
    return sample.roll(-start).repeat(-(-count // len(sample)))[:count].reshape(shape)
