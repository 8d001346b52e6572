"""The schema's errors, said for people: line, dotted path, the nearest allowed name and the allowed values.

The errors come from pydantic; this module gives them the line and the path as they stand in the file.

>>> nearest("int88", ("int8", "int4"))
"; did you mean 'int8'? (allowed: int8, int4)"
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.yaml_document import Document, Fault, KeyPath, shortened

if TYPE_CHECKING:
    from pydantic import ValidationError


def nearest(name: str, allowed: Sequence[Any]) -> str:
    """`; did you mean 'x'? allowed: x, y` for messages; the first part only when something is near."""
    allowed = [shortened(str(one)) for one in allowed]
    close = difflib.get_close_matches(name.lower(), allowed, n=1, cutoff=0.55)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(dict.fromkeys(allowed))
    return f"{hint} (allowed: {listed})" if hint else f"; allowed: {listed}" if allowed else ""


def schema_faults(
    error: ValidationError,
    document: Document,
    data: dict[str, Any],
    *,
    schema: dict[str, Any],
    known: Sequence[Fault],
) -> list[Fault]:
    """One fault for each of pydantic's errors that isn't an echo of one that is `known`."""
    faults = []
    for item in error.errors(include_url=False):
        path = _as_written(_path_in_file(item["loc"], data), document.data)
        if _is_echo(item, path, known=known):
            continue
        message = _message(item, path, schema=schema, data=data, written=document.numbers.get(path))
        faults.append(Fault(path, document.line(path), message))
    return faults


def _is_echo(item: Any, path: KeyPath, *, known: Sequence[Fault]) -> bool:
    """Whether the error only says again what another fault says better."""
    if item["type"] == "too_short":
        # Wrong items, each reported on its own, don't count for pydantic.
        return bool(len(item["input"]) >= item["ctx"]["min_length"])
    if item["type"] == "value_error":
        # Fields that contradict each other: not when one of them couldn't be read in the first place.
        text = str(item["ctx"]["error"])
        return any(
            fault.path[: len(path)] == path and (len(fault.path) > len(path) or fault.message == text)
            for fault in known
        )
    return path in {fault.path for fault in known}


def _path_in_file(location: tuple[int | str, ...], data: Any) -> KeyPath:
    """The path without the union tags that pydantic puts in (`quantizer.quanto.weights`)."""
    path: list[int | str] = []
    here: Any = data
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if (isinstance(here, dict) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        ):
            here = here[part]  # type: ignore[index]
        elif not last or not isinstance(here, dict) or part in (here.get("kind"), here.get("distribution")):
            continue  # a tag of a union, not a key of the file
        path.append(part)
    return tuple(path)


def _as_written(path: KeyPath, data: Any) -> KeyPath:
    """The part of a long form's path that stands in the file, where a short form may end earlier."""
    here = data
    for index, part in enumerate(path):
        if isinstance(here, dict):
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            here = here[part] if part < len(here) else None
        else:
            return path if here is None else path[:index]
    return path


def _message(
    item: Any, path: KeyPath, *, schema: dict[str, Any], data: dict[str, Any], written: str | None
) -> str:
    """`written` is the text of a number, which its value may not show (`25921e05` is 2592100000.0)."""
    kind, context = item["type"], item.get("ctx", {})
    found = shown(item["input"]) if written is None else shortened(written)
    if kind == "extra_forbidden":
        allowed = _allowed_keys(path[:-1], schema=schema, data=data)
        return f"unknown key{nearest(str(path[-1]), allowed)}"
    if kind == "missing":
        return "is missing; it must be given"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _kind_message(item, context)
    if kind in ("literal_error", "enum"):
        expected = context.get("expected", "")
        allowed = re.findall(r"'([^']*)'", expected) or re.findall(r"\d+", expected)
        return f"{found} is not allowed{nearest(str(item['input']), allowed)}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "tuple_type":
        hint = f"; write [{item['input']}]" if _is_short_scalar(item["input"]) else ""
        return f"expected a list, found {found}{hint}"
    if kind == "too_short":
        return "is empty; it needs at least one item"
    if kind == "bool_type":
        return f"expected true or false, found {found}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected keys and values ({{key: value}}), found {found}"
    if kind == "string_type":
        return f"expected text, found {found}; put it in quotes"
    if kind == "string_pattern_mismatch":
        return f"{found} may hold letters, digits, '_', '.' and '-' only, and starts with a letter or digit"
    return f"{item['msg'].replace('Input should be', 'should be')}; found {found}{_percent_hint(item, path)}"


def _percent_hint(item: Any, path: KeyPath) -> str:
    """`65%` as the field wants it: percent where its name says so, else a share of 1."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", str(item["input"]))
    if found is None:
        return ""
    number = float(found[1])
    in_percent = path and str(path[-1]).endswith("percent")
    return f"; write {number if in_percent else number / 100:.6g}"


def shown(value: Any) -> str:
    """A value for a message: as Python writes it, cut where it is long."""
    return shortened(repr(value))


def _is_short_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and value != "" and len(str(value)) <= 40


def _kind_message(item: Any, context: dict[str, Any]) -> str:
    allowed = re.findall(r"'([^']*)'", context.get("expected_tags", ""))
    key = context["discriminator"].strip("'")
    if item["type"] == "union_tag_invalid":
        return f"unknown {key} {shown(context['tag'])}{nearest(context['tag'], allowed)}"
    if key == "kind":
        return "the key 'kind' is missing; see `python -m pipeline kinds`"
    return f"the key {key!r} is missing; it names one of fixed, uniform, lognormal"


def _allowed_keys(path: KeyPath, *, schema: dict[str, Any], data: Any) -> list[str]:
    node: dict[str, Any] = schema
    here: Any = data
    for part in path:
        node = _object_schema(node, here, schema)
        node = node.get("items", {}) if isinstance(part, int) else node.get("properties", {}).get(part, {})
        here = here[part]
    return sorted(_object_schema(node, here, schema).get("properties", {}))


def _object_schema(node: dict[str, Any], here: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Follow references, and the alternative of a union that `kind` or the type of `here` chooses."""
    if "$ref" in node:
        return _object_schema(schema["$defs"][node["$ref"].rsplit("/", 1)[1]], here, schema)
    mapping = node.get("discriminator", {}).get("mapping")
    if mapping and isinstance(here, dict) and here.get("kind") in mapping:
        return _object_schema({"$ref": mapping[here["kind"]]}, here, schema)
    wanted = "array" if isinstance(here, list) else "object"
    for option in node.get("anyOf", node.get("oneOf", ())):
        found = _object_schema(option, here, schema)
        if found.get("type") == wanted:
            return found
    return node
