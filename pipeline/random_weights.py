"""Models of random weights, made on the device from a config and a seed; no tensor is ever stored.

Speed, memory and capacity don't depend on what the weights are worth. A variant's folder holds its config and
its seed. Loading builds the model on the meta device, then draws one module after the other on the device that
runs it, by transformers' own initialisation, quantizes it and frees the 16-bit weights before the next. So
neither disk nor host memory ever holds the model, and the device little more than the variant itself.

    write_random_variant(config, out=folder, seed=0, quantizer=quantizer)
    manifest = random_manifest(folder, quantizer=quantizer, source=source)
    model = load_random(folder, quantizer=quantizer, device="cuda", compute_dtype="bfloat16")
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from pydantic import ValidationError

from pipeline.block_weights import block_weights
from pipeline.checkpoint import MODEL_PACKAGES, hash_files
from pipeline.coverage import Labels, ModelLayout, layout_of
from pipeline.errors import CheckpointError, RecipeError
from pipeline.meta_model import empty_model, parse_config
from pipeline.packages import installed_versions
from pipeline.process_memory import return_freed_memory
from pipeline.results import CheckpointManifest, Coverage, SourceRecord
from pipeline.tensorfile import read_json
from pipeline.values import Value
from pipeline.weights import config_of_type, ready, write_json

if TYPE_CHECKING:
    import torch

SEED_NAME = "random_weights.json"
"""The file that makes a folder one of random weights."""
FloatType = Literal["float32", "bfloat16", "float16"]
_FLOAT_TYPES = ("float32", "bfloat16", "float16")


class RandomVariant(Value):
    """`random_weights.json`: what a variant's weights follow from, beside its config.

    `drawn_as` is the type that every variant of one source draws its weights in, so that all start from the
    same ones. `quantizer` is the manifest's block.
    """

    seed: int
    drawn_as: FloatType
    quantizer: dict[str, Any]


class Packs(Labels, Protocol):
    """What is asked of a quantizer here."""

    def float_type(self, source_dtype: str) -> str:
        """torch's name of the type that whatever stays unquantized is stored in."""

    def outline(self, model: Any, *, compute_dtype: str) -> None:
        """Give a model on the meta device the modules and types that a loaded checkpoint has."""

    def pack(self, plain: Any, into: Any, *, name: str) -> None:
        """Quantize the weight of `plain` into the empty module that `outline` put in its place."""

    def predicted_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of one quantized matrix in a file."""

    def group_weights(self, in_features: int) -> int | None:
        """Weights that share a scale where rows are split into groups."""

    @property
    def other_bytes_per_weight(self) -> float:
        """Bytes of each weight that stays unquantized."""


def is_random(folder: Path) -> bool:
    """Whether the folder holds a seed in place of weights."""
    return (folder / SEED_NAME).is_file()


def write_random_variant(config: Mapping[str, Any], *, out: Path, seed: int, quantizer: Packs) -> None:
    """Write config.json and the seed into the empty folder `out`.

    The config says the type in which a checkpoint would store what stays unquantized. Raises RecipeError when
    the config is incomplete, contradicts itself or names a type that can't be drawn, PrerequisiteError when
    this version of transformers doesn't know the architecture.
    """
    parse_config(config, source="config")
    drawn_as = _drawn_type(config)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    write_json(out / "config.json", config_of_type(plain, dtype=quantizer.float_type(drawn_as)))
    variant = RandomVariant(seed=seed, drawn_as=drawn_as, quantizer=quantizer.manifest_block())
    write_json(out / SEED_NAME, variant.model_dump(mode="json"))


def _drawn_type(config: Mapping[str, Any]) -> FloatType:
    """The type that the config gives its weights; BF16 where it says none."""
    text = config.get("text_config") or {}
    said = [part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype")]
    dtype = str(next((one for one in said if one), "bfloat16")).removeprefix("torch.")
    if dtype not in _FLOAT_TYPES:
        raise RecipeError(
            f"config: dtype is {dtype!r}; random weights are drawn in one of {', '.join(_FLOAT_TYPES)}"
        )
    return cast(FloatType, dtype)


# --- the manifest ----------------------------------------------------------------------------------------


def random_manifest(folder: Path, *, quantizer: Packs, source: SourceRecord) -> CheckpointManifest:
    """What a checkpoint of this variant would hold, counted on the model's modules; nothing is drawn.

    `weight_bytes_on_disk` and its like are sizes of the format, not of files, which a note says. `seconds` and
    `peak_memory_bytes` are 0: there was nothing to quantize yet.
    """
    variant = _read_variant(folder, quantizer)
    config = read_json(folder / "config.json")
    model = _empty(config, folder=folder, dtype=str(config["dtype"]))
    layout = layout_of(model)
    blocks = tuple(block_weights(model))
    plain = dict(model.named_modules())
    quantizer.outline(model, compute_dtype=str(config["dtype"]))
    packed = {path for path, module in plain.items() if model.get_submodule(path) is not module}
    packed_blocks = [block for block in blocks if block.name.rpartition(".")[0] in packed]
    each = quantizer.other_bytes_per_weight
    saved = sum(
        block.tensor.numel() * each
        - block.matrices * quantizer.predicted_bytes(block.out_features, block.in_features)
        for block in packed_blocks
    )
    linear = sum(block.tensor.numel() for block in blocks)
    on_disk = round(layout.parameters * each - saved)
    unread = 0 if layout.tied else round(layout.embedding_weights * each)
    return CheckpointManifest(
        precision=quantizer.precision,
        quantizer=quantizer.manifest_block(),
        source=source,
        files=hash_files(folder),
        parameters=layout.parameters,
        coverage=_coverage(blocks, packed_blocks, layout=layout, packed=packed, quantizer=quantizer),
        weight_bytes_on_disk=on_disk,
        weight_bytes_read_per_token=on_disk - unread,
        bits_per_weight=8 * on_disk / layout.parameters,
        bits_per_block_weight=8 * (linear * each - saved) / linear if linear else 0.0,
        seconds=0.0,
        peak_memory_bytes=0,
        versions=installed_versions(MODEL_PACKAGES),
        random_seed=variant.seed,
        notes=(
            f"random weights, made on the device from seed {variant.seed}; nothing but config and seed is on "
            "disk, and sizes on disk are those that a checkpoint would have",
        ),
    )


def _coverage(
    blocks: tuple[Any, ...],
    packed_blocks: list[Any],
    *,
    layout: ModelLayout,
    packed: set[str],
    quantizer: Packs,
) -> Coverage:
    """Which block weights `load_random` quantizes, by the names of the model's parameters."""
    names = {block.name for block in packed_blocks}
    proves_nothing = quantizer.minimum_coverage <= 0
    groups = {block.name: quantizer.group_weights(block.in_features) for block in packed_blocks}
    return Coverage(
        linear_weights=sum(block.tensor.numel() for block in blocks),
        quantized_weights=sum(block.tensor.numel() for block in packed_blocks),
        head_weights=layout.head_weights,
        head_quantized=layout.head is not None and layout.head.rpartition(".")[0] in packed,
        embedding_weights=layout.embedding_weights,
        unquantized_names=()
        if proves_nothing
        else tuple(sorted(block.name for block in blocks if block.name not in names)),
        groups={name: group for name, group in groups.items() if group is not None},
    )


# --- the model -------------------------------------------------------------------------------------------


def load_random(folder: Path, *, quantizer: Packs, device: str, compute_dtype: str) -> torch.nn.Module:
    """The variant's model on `device`, in eval mode, as if quantized, saved and loaded; the host holds none of it.

    The same folder gives the same weights in every process on devices of the same kind, and before they are
    quantized all variants of a config and seed have the same. Raises CheckpointError when another quantizer
    wrote the folder.
    """
    import torch

    variant = _read_variant(folder, quantizer)
    config = read_json(folder / "config.json")
    model = _empty(config, folder=folder, dtype=compute_dtype)
    plain = list(model.named_modules())
    quantizer.outline(model, compute_dtype=compute_dtype)
    drawing = _Drawing(
        drawn_as=getattr(torch, variant.drawn_as),
        stored_as=getattr(torch, str(config["dtype"])),
        computed_as=getattr(torch, compute_dtype),
        device=device,
    )
    used = [torch.cuda.current_device()] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=used), torch.no_grad():
        for position, (name, module) in enumerate(plain):
            plain[position] = ("", None)  # what the model doesn't hold itself is freed after its turn
            torch.manual_seed(_module_seed(variant.seed, name))
            owner = _initialiser(model, name)
            into = model.get_submodule(name)
            if into is module:
                drawing.fill(module, owner)
            else:
                drawing.fill_packed(module, owner, into=into, quantizer=quantizer, name=name)
                # Else a CPU's heap keeps what is freed in pieces, which came to more than the weights themselves.
                return_freed_memory()
    return ready(model, folder=folder, device=device)


def _read_variant(folder: Path, quantizer: Packs) -> RandomVariant:
    path = folder / SEED_NAME
    try:
        variant = RandomVariant.model_validate(read_json(path))
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: {error.errors()[0]['msg']}. Remove the folder and run again."
        ) from error
    if variant.quantizer != quantizer.manifest_block():
        raise CheckpointError(
            f"{folder}: made for {variant.quantizer}, the recipe says {quantizer.manifest_block()}. Quantize again."
        )
    return variant


def _empty(config: Mapping[str, Any], *, folder: Path, dtype: str) -> Any:
    source = str(folder / "config.json")
    return empty_model(parse_config(config, source=source).config, source=source, dtype=dtype)


def _module_seed(seed: int, name: str) -> int:
    """A seed of the module's own, so that its weights don't depend on what was drawn before."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


def _initialiser(model: Any, name: str) -> Any:
    """The innermost transformers model around the module `name`, which knows how to initialise it."""
    from transformers import PreTrainedModel

    found, inner = model, model
    for part in name.split(".") if name else ():
        inner = getattr(inner, part)
        found = inner if isinstance(inner, PreTrainedModel) else found
    return found


class _Drawing:
    """Fills the modules of a model on the meta device, parents before children, tied tensors once."""

    def __init__(
        self, *, drawn_as: torch.dtype, stored_as: torch.dtype, computed_as: torch.dtype, device: str
    ) -> None:
        self._drawn_as = drawn_as
        self._stored_as = stored_as
        self._computed_as = computed_as
        self._device = device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors by the identity of the empty ones, which are held too: an identity may not come again."""

    def fill(self, module: Any, owner: Any) -> None:
        """Draw a module that stays as it is, in the types that it has on the meta device."""
        own = self._draw(module, owner)
        for name, empty in own.items():
            finished = self._finished(module, name, wanted=empty.dtype)
            _put(module, name, finished)
            self._made[id(empty)] = (empty, getattr(module, name))

    def fill_packed(self, module: Any, owner: Any, *, into: Any, quantizer: Packs, name: str) -> None:
        """Draw a module and put its quantized form into the empty module that stands in its place."""
        own = self._draw(module, owner)
        for tensor_name in own:
            _put(module, tensor_name, getattr(module, tensor_name).to(self._stored_as))
        quantizer.pack(module, into, name=name)
        for tensor_name, empty in own.items():
            if tensor_name != "weight":
                _put(into, tensor_name, getattr(module, tensor_name).to(empty.dtype))

    def _draw(self, module: Any, owner: Any) -> dict[str, torch.Tensor]:
        """Materialise the module's own tensors and initialise them; returns the empty ones that were replaced."""
        import torch

        own = {}
        for name, empty in _own_tensors(module):
            if id(empty) in self._made:
                shared = self._made[id(empty)][1]
                shared._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it alone
                _put(module, name, shared)
                continue
            own[name] = empty
            as_drawn = empty.dtype == self._computed_as and name not in module._non_persistent_buffers_set
            dtype = self._drawn_as if as_drawn else empty.dtype
            _put(module, name, torch.zeros(empty.shape, dtype=dtype, device=self._device))
        if own:
            owner._init_weights(module)
        return own

    def _finished(self, module: Any, name: str, *, wanted: torch.dtype) -> torch.Tensor:
        """A drawn tensor as a checkpoint would give it back: in the stored type, then in that of the arithmetic."""
        drawn: torch.Tensor = getattr(module, name)
        if drawn.is_floating_point() and name not in module._non_persistent_buffers_set:
            drawn = drawn.to(self._stored_as) if wanted == self._computed_as else drawn
        return drawn.to(wanted)


def _own_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of the module itself, those that checkpoints leave out among them."""
    yield from list(module.named_parameters(recurse=False))
    yield from list(module.named_buffers(recurse=False))


def _put(module: Any, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer; a tensor that already is a parameter stays the same object (tied)."""
    import torch

    if name in module._parameters and not isinstance(tensor, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    setattr(module, name, tensor)
