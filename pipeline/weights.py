"""What every quantizer needs around its own step: scan the source, carry the side files, load and check.

Quantizers spread one bad number over a row or a block, casts turn large numbers into infinity, and a shipped
generation config can make saving fail at the end of a long job. So the source is scanned tensor by tensor
first, side files are copied as they are but for that config, and a loaded model is checked for what loaders
leave out silently: missing tensors, weights on the meta device, an untied head.

    scan = scan_source(folder)
    notes = copy_side_files(folder, out)
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import CheckpointError, StageError
from pipeline.packages import installed_version
from pipeline.results import Problem
from pipeline.shard_writer import Blocks
from pipeline.tensorfile import INDEX_NAME, TensorInfo, read_json, tensors
from pipeline.values import Value

if TYPE_CHECKING:
    import torch

_NOT_CARRIED = {"config.json", "generation_config.json", "manifest.json", INDEX_NAME}
SIDE_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab", ".bpe")
"""Files beside the weights that a checkpoint carries: tokenizer, template, vocabulary."""
SAMPLING_FLAGS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Settings that only sampling reads, with the defaults that transformers lets pass."""


FLUSHED = "flushed"
_CAST_WEIGHTS = 262_144
"""Few enough that a piece stays in the cache from reading to writing."""
_MAPPED_BYTES = 268_435_456


class SourceScan(Value):
    """A source without NaN or infinity. `overflows` maps tensors to weights beyond FP16's largest, 65504."""

    overflows: dict[str, int]


def missing_packages(*names: str) -> tuple[Problem, ...]:
    """A problem for each package that isn't installed; nothing is imported."""
    return tuple(
        Problem(what=f"the package {name} is not installed", fix=f"pip install {name}")
        for name in names
        if installed_version(name) is None
    )


def scan_source(folder: Path) -> SourceScan:
    """Read every float tensor once, one in memory at a time.

    Raises StageError naming the tensors that hold NaN or infinity, with how many.
    """
    import torch

    bad: dict[str, int] = {}
    overflows: dict[str, int] = {}
    for name, tensor in read_tensors(folder):
        largest = largest_magnitude(tensor) if tensor.is_floating_point() else 0.0
        if not math.isfinite(largest):
            bad[name] = tensor.numel() - int(tensor.isfinite().sum())
        elif largest >= _rounded_to_infinity(torch.float16):
            overflows[name] = int(tensor.to(torch.float16).isinf().sum())
    if bad:
        raise StageError(
            f"{folder}: {_counted(bad, 'non-finite')}; a quantizer spreads NaN and infinity over whole rows. "
            "The source is damaged: fetch it again."
        )
    return SourceScan(overflows=overflows)


def refuse_overflow(scan: SourceScan, *, label: str) -> None:
    """Raise StageError when weights don't fit FP16's range; `label` is the precision that needs FP16."""
    if scan.overflows:
        raise StageError(
            f"{label}: {_counted(scan.overflows, 'too large for FP16 (65504):')} would become infinite. "
            "Use bf16, which has the range of FP32."
        )


def sixteen_bit_type(source_dtype: str, scan: SourceScan) -> str:
    """The type for whatever stays unquantized: the source's own 16 bits, else FP16 if its range suffices."""
    if source_dtype in ("float16", "bfloat16"):
        return source_dtype
    return "bfloat16" if scan.overflows else "float16"


def unquantized_type(source_dtype: str, folder: Path) -> str:
    """`sixteen_bit_type` of a folder whose main type is `source_dtype`; its weights are read only if that decides."""
    if source_dtype in ("float16", "bfloat16"):
        return source_dtype
    return sixteen_bit_type(source_dtype, scan_source(folder))


def largest_magnitude(tensor: torch.Tensor) -> float:
    """The largest |value| of a float tensor, infinite or NaN if one is; 0.0 of an empty one."""
    import torch

    if not tensor.numel():
        return 0.0
    lowest, highest = (tensor if tensor.element_size() > 1 else tensor.to(torch.float32)).aminmax()
    return max(-float(lowest), float(highest))


def cast(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, *, counts: Counter[str] | None = None
) -> torch.Tensor | Blocks:
    """A finite tensor as `dtype`, cast a little at a time while it is written.

    Weights that become zero are added to `counts[FLUSHED]` meanwhile. Raises StageError when a weight is too
    large for `dtype`.
    """
    import torch

    if tensor.dtype == dtype:
        return tensor
    exact = torch.promote_types(tensor.dtype, dtype) == dtype
    if not exact and largest_magnitude(tensor) >= _rounded_to_infinity(dtype):
        over = int(tensor.to(dtype).isinf().sum())
        raise StageError(
            f"{name}: {over} weights too large for {str(dtype).removeprefix('torch.')} would become infinite"
        )
    pieces = _cast_pieces(tensor, dtype, counts=None if exact else counts)
    return Blocks(dtype=dtype, shape=tuple(tensor.shape), pieces=pieces)


def _rounded_to_infinity(dtype: torch.dtype) -> float:
    """The smallest number that a cast makes infinite: halfway from the largest to the next power of two.

    65,520 for FP16. The largest is (2 - eps) times a power of two; a tie goes to the even neighbour, infinity.
    """
    import torch

    about = torch.finfo(dtype)
    return float(about.max * (2 - about.eps / 2) / (2 - about.eps))


def _cast_pieces(
    tensor: torch.Tensor, dtype: torch.dtype, *, counts: Counter[str] | None
) -> Iterator[torch.Tensor]:
    """By way of FP32, which is exact for 16-bit types and twice as fast between two of them."""
    import torch

    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CAST_WEIGHTS):
        piece = flat[start : start + _CAST_WEIGHTS]
        wide = piece.to(torch.float32) if piece.element_size() == 2 else piece
        made = wide.to(dtype)
        if counts is not None and (zeros := made.numel() - _nonzero(made)):
            counts[FLUSHED] += zeros - (wide.numel() - _nonzero(wide))
        yield made


def _nonzero(tensor: torch.Tensor) -> int:
    """How many aren't ±0; numpy counts whole numbers several times as fast as torch counts floats."""
    import numpy
    import torch

    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(numpy.count_nonzero(tensor.view(whole).numpy() << 1))


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, one after the other, in the order of the files."""
    found = tensors(folder)
    for file, names in _by_file(found).items():
        yield from read_file(folder / file, {name: found[name] for name in names})


def read_file(path: Path, wanted: Mapping[str, TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of one file, mapped, not copied.

    The file is mapped anew every so often, because pages that were read count as this process's until then.
    """
    from safetensors import safe_open

    names = iter(wanted)
    name = next(names, None)
    while name is not None:
        mapped_bytes = 0
        with safe_open(path, framework="pt") as opened:
            while name is not None and mapped_bytes < _MAPPED_BYTES:
                mapped_bytes += wanted[name].size_bytes
                yield name, opened.get_tensor(name)
                name = next(names, None)


def copy_side_files(source: Path, out: Path) -> tuple[str, ...]:
    """Copy tokenizer, template and the like; repair the generation config. Returns notes of repairs."""
    for path in sorted(source.iterdir()):
        carried = path.suffix in SIDE_SUFFIXES and path.name not in _NOT_CARRIED
        if carried and path.is_file() and not path.name.startswith("."):
            shutil.copyfile(path, out / path.name)
    if not (source / "generation_config.json").is_file():
        return ()
    settings, dropped = repaired_generation_config(read_json(source / "generation_config.json"))
    write_json(out / "generation_config.json", settings)
    return (f"generation_config.json: dropped {', '.join(dropped)}, set although sampling is off",) * bool(
        dropped
    )


def copy_config(source: Path, out: Path, *, dtype: str) -> None:
    """Copy `config.json`, saying in every part of it that weights are stored as `dtype` (torch's name)."""
    write_json(out / "config.json", config_of_type(read_json(source / "config.json"), dtype=dtype))


def config_of_type(config: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """The config with `dtype` (torch's name) as the type of its weights, in every part that says one."""
    typed = {**config, "dtype": dtype}
    typed.pop("torch_dtype", None)
    if isinstance(config.get("text_config"), dict):
        typed["text_config"] = {**config["text_config"], "dtype": dtype}
        typed["text_config"].pop("torch_dtype", None)
    return typed


def repaired_generation_config(settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Without sampling settings that contradict `do_sample: false`; transformers refuses to save those."""
    if settings.get("do_sample"):
        return settings, ()
    dropped = tuple(
        name
        for name, default in SAMPLING_FLAGS.items()
        if settings.get(name) is not None and settings[name] != default
    )
    return {name: value for name, value in settings.items() if name not in dropped}, dropped


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Readable JSON with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def saving_to(out: Path) -> Iterator[None]:
    """Let a full disk come out as an OSError that names the folder.

    safetensors wraps it into an error of its own, and a plain write doesn't say where it failed.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error)
        if not full or getattr(error, "filename", None):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out)) from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and only errors from transformers, which would garble the one line on a terminal."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_pretrained(folder: Path, **settings: Any) -> torch.nn.Module:
    """transformers' loader, offline and without remote code. Raises CheckpointError on a missing tensor."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below by name, where transformers would say "see above"
            **settings,
        )
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors of the model are in no file, such as {missing[0]}"
        )
    if mismatched := sorted(str(entry) for entry in report["mismatched_keys"]):
        raise CheckpointError(f"{folder}: tensors of the wrong shape, such as {mismatched[0]}")
    return model  # type: ignore[no-any-return]


def ready(model: torch.nn.Module, *, folder: Path, device: str) -> torch.nn.Module:
    """The model in eval mode, checked: all of it on `device`, nothing on meta, a tied head still tied.

    Raises CheckpointError.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != device.split(":")[0]:
            raise CheckpointError(
                f"{folder}: {name} is on {tensor.device.type}, not on {device}, after loading"
            )
    anything: Any = model
    head, embedding = anything.get_output_embeddings(), anything.get_input_embeddings()
    tied = anything.config.get_text_config(decoder=True).tie_word_embeddings
    if tied and head is not None and head.weight.data_ptr() != embedding.weight.data_ptr():
        raise CheckpointError(
            f"{folder}: the head should be the embedding (tied), but was loaded apart from it"
        )
    model.requires_grad_(False)
    return model.eval()


def cast_unquantized(model: torch.nn.Module, compute_dtype: str) -> None:
    """Bring 16-bit float parameters and buffers to `compute_dtype` in place, so that tied ones stay tied.

    FP32 ones stay: what a model keeps in FP32 (rotary tables, scales) it keeps on purpose.
    """
    import torch

    wanted = getattr(torch, compute_dtype)
    for module in model.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for _, tensor in own:
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype in _sixteen_bit():
                tensor.data = tensor.data.to(wanted)


def keep_types(model: Any, compute_dtype: str) -> None:
    """Give an empty model's tensors the types that transformers' loader would: FP32 where the class insists.

    A class names such tensors by patterns; those that it creates in another type keep that anyway.
    """
    import torch
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(getattr(torch, compute_dtype))
    if not plan:
        return
    pattern = build_glob_alternation(list(plan))[0]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and pattern.search(name):
            tensor.data = tensor.data.to(torch.float32)


def _sixteen_bit() -> tuple[torch.dtype, ...]:
    import torch

    return torch.float16, torch.bfloat16


def _by_file(found: Mapping[str, TensorInfo]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for name, info in found.items():
        files.setdefault(info.file, []).append(name)
    return files


def _counted(found: dict[str, int], what: str) -> str:
    """ "1 non-finite weight in a.weight", or the total with the first names."""
    total, names = sum(found.values()), list(found)
    noun = "weight" if total == 1 else "weights"
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    where = ", ".join(f"{name} ({found[name]})" if len(names) > 1 else name for name in names[:3])
    if what.endswith(":"):
        return f"{total} {noun} {what} {where}{more}"
    return f"{total} {what} {noun} in {where}{more}"
