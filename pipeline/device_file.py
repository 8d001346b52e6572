"""Devices described in a YAML file: a box that is in no table, or several cards planned for as one.

    # my-box.yaml
    name: my-box
    memory_bytes: 48e9
    bandwidth_bytes_per_s: 768e9
    peak_flops_per_s: {fp16: 155e12}
    dollars_per_hour: 0.79
    source: RTX A6000 data sheet, tensor figure halved; rent of our provider

    device_named("./my-box.yaml", folder=Path("recipes")).bandwidth_bytes_per_s

The schema is as strict as a recipe's: every problem is reported at once, with its line, and nothing is guessed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, ValidationError

from pipeline.data_sheet import Device, is_device_file
from pipeline.errors import RecipeError, UsageError
from pipeline.hardware import named
from pipeline.schema_faults import schema_faults
from pipeline.values import Value
from pipeline.yaml_document import Document, Fault, dotted, one_line, parse, read_text, shortened

MOST_FILE_BYTES = 64 * 2**10
"""Far more than a device needs; a model or a log named by mistake isn't read to its end."""
SMALLEST = 1_000_000
"""No device has fewer bytes, or moves or computes less a second: such a figure is one in GB or TFLOP/s."""


def _whole(value: Any) -> Any:
    """`48e9` is how people write 48,000,000,000 bytes; YAML reads it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _in_base_units(value: float) -> float:
    if 0 < value < SMALLEST:
        raise ValueError(
            f"{value:g} is too small; write 80 GB as 80e9, 3350 GB/s as 3350e9, 989 TFLOP/s as 989e12"
        )
    return value


def _on_one_line(text: str) -> str:
    """Control characters would reach the terminal of whoever plans with the file."""
    if not text.isprintable():
        raise ValueError("may hold printable characters only, on one line")
    return text


Bytes = Annotated[int, BeforeValidator(_whole), Field(gt=0, lt=2**63), AfterValidator(_in_base_units)]
Rate = Annotated[float, Field(gt=0, le=1e18), AfterValidator(_in_base_units)]


class _Peaks(Value):
    """Dense operations per second by type."""

    fp32: Rate | None = None
    fp16: Rate | None = None
    bf16: Rate | None = None
    fp8: Rate | None = None
    int8: Rate | None = None
    fp4: Rate | None = None


class DeviceFile(Value):
    """What a device file holds. `source` says where the figures come from, which every plan repeats."""

    name: Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    kind: Literal["cpu", "cuda", "mps"] = "cuda"
    memory_bytes: Bytes
    bandwidth_bytes_per_s: Rate
    peak_flops_per_s: _Peaks = _Peaks()
    last_level_cache_bytes: Annotated[int, BeforeValidator(_whole), Field(gt=0, lt=2**63)] | None = None
    dollars_per_hour: Annotated[float, Field(gt=0, le=1e6)] | None = None
    source: Annotated[
        str,
        StringConstraints(strip_whitespace=True, min_length=1, max_length=500),
        AfterValidator(_on_one_line),
    ]


def device_named(name: str, *, folder: Path) -> Device:
    """The device of that name in the data-sheet table, this machine for `host`, or the one a file describes.

    A name that ends in .yaml or .yml or holds a slash is a path, relative to `folder`. Raises UsageError.
    """
    if not is_device_file(name):
        return named(name)
    try:
        path = folder / Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"hardware {name}: there is no such user on this machine") from None
    return load_device(path)


def load_device(path: Path) -> Device:
    """Read a device file. Raises UsageError that lists every problem found in it."""
    label = f"device file {one_line(str(path))}"
    try:
        document = parse(_text(path))
    except RecipeError as error:
        raise UsageError(f"{label}: {str(error).removeprefix(f'{path}: ')}") from None
    found = _validated(document, label=label)
    return Device(
        name=found.name,
        kind=found.kind,
        memory_bytes=found.memory_bytes,
        threads=None,
        last_level_cache_bytes=found.last_level_cache_bytes,
        bandwidth_bytes_per_s=found.bandwidth_bytes_per_s,
        peak_flops_per_s=found.peak_flops_per_s.model_dump(exclude_none=True),
        source=f"{found.source} ({path.name})",
        dollars_per_hour=found.dollars_per_hour,
        price_source=f"device file {path.name}" if found.dollars_per_hour else "",
    )


def _text(path: Path) -> str:
    """The file's text. What can't be a device file is refused unread: folders, pipes, large files."""
    try:
        if path.is_dir():
            raise RecipeError("is a folder; name a device file, for example recipes/devices/8xh100-sxm.yaml")
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        raise RecipeError("no such file") from None
    except OSError as error:
        raise RecipeError(f"can't be read: {error.strerror}") from None
    except ValueError:
        raise RecipeError("is not a path") from None
    if not path.is_file():
        raise RecipeError("is no regular file")
    if size_bytes > MOST_FILE_BYTES:
        raise RecipeError(f"has {size_bytes:,} bytes; a device file has at most {MOST_FILE_BYTES:,}")
    text = read_text(path)
    if all(not line.strip() or line.lstrip().startswith("#") for line in text.splitlines()):
        raise RecipeError("is empty; a device needs name, memory_bytes, bandwidth_bytes_per_s and source")
    return text


def _validated(document: Document, *, label: str) -> DeviceFile:
    data, faults = document.data, list(document.faults)
    if not isinstance(data, dict):
        if faults:
            raise UsageError(_report(label, faults))
        found = shortened(repr(data))
        raise UsageError(f"{label}: the top level must be keys and values (name: …), found {found}")
    device = None
    try:
        # From JSON, because strict JSON input accepts an int for a float, and nothing else.
        device = DeviceFile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        schema = DeviceFile.model_json_schema()
        faults += schema_faults(error, document, data, schema=schema, known=faults)
    if faults or device is None:
        raise UsageError(_report(label, faults))
    return device


def _report(label: str, faults: list[Fault]) -> str:
    ordered = sorted(faults, key=lambda fault: (fault.line or 0, dotted(fault.path)))
    count = f"{len(ordered)} problem{'s' if len(ordered) != 1 else ''}"
    return "\n".join([f"{label}: {count}", *(f"  {fault}" for fault in ordered)])
