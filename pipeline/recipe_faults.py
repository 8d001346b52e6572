"""What is wrong with a recipe's data, said for people: schema errors and contradictions between sections.

The schema's errors come from pydantic; this module gives them the line, the dotted path as it stands in the
file, the nearest allowed name and the allowed values. Contradictions are looked for in the raw data, so that
they are reported together with schema errors.

    faults = cross_faults(document, data, precisions=("fp16", "int8"))
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.data_sheet import DATA_SHEET, is_device_file, nearest_device
from pipeline.plugins import kinds, plugin_class, plugin_classes
from pipeline.quality_faults import evaluation_faults
from pipeline.yaml_document import Document, Fault, KeyPath, shortened

if TYPE_CHECKING:
    from pydantic import ValidationError


ONE_FORM = (
    "give either 'precisions' (short form) or 'variants' (long form): without a precision, "
    "a model's size and whether it fits are undefined"
)


def nearest(name: str, allowed: Sequence[Any]) -> str:
    """`; did you mean 'x'? allowed: x, y` for messages; the first part only when something is near."""
    allowed = [shortened(str(one)) for one in allowed]
    close = difflib.get_close_matches(name.lower(), allowed, n=1, cutoff=0.55)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(dict.fromkeys(allowed))
    return f"{hint} (allowed: {listed})" if hint else f"; allowed: {listed}" if allowed else ""


# --- schema errors ---------------------------------------------------------------------------------------


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
    shown = _shown(item["input"]) if written is None else shortened(written)
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
        return f"{shown} is not allowed{nearest(str(item['input']), allowed)}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "tuple_type":
        hint = f"; write [{item['input']}]" if _is_short_scalar(item["input"]) else ""
        return f"expected a list, found {shown}{hint}"
    if kind == "too_short":
        return "is empty; it needs at least one item"
    if kind == "bool_type":
        return f"expected true or false, found {shown}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected keys and values ({{key: value}}), found {shown}"
    if kind == "string_type":
        return f"expected text, found {shown}; put it in quotes"
    if kind == "string_pattern_mismatch":
        return f"{shown} may hold letters, digits, '_', '.' and '-' only, and starts with a letter or digit"
    return f"{item['msg'].replace('Input should be', 'should be')}; found {shown}"


def _shown(value: Any) -> str:
    return shortened(repr(value))


def _is_short_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and value != "" and len(str(value)) <= 40


def _kind_message(item: Any, context: dict[str, Any]) -> str:
    allowed = re.findall(r"'([^']*)'", context.get("expected_tags", ""))
    key = context["discriminator"].strip("'")
    if item["type"] == "union_tag_invalid":
        return f"unknown {key} {_shown(context['tag'])}{nearest(context['tag'], allowed)}"
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


# --- contradictions between sections ---------------------------------------------------------------------


def cross_faults(document: Document, data: dict[str, Any], *, precisions: Sequence[str]) -> list[Fault]:
    """Contradictions that no single field shows. Parts of the wrong shape are left to the schema."""
    found = [
        *_environment_faults(data, ()),
        *_form_faults(data),
        *_hardware_faults(data),
        *_precision_faults(data, precisions),
        *_variant_faults(data),
        *_gate_faults(data),
        *_limit_faults(data),
        *evaluation_faults(data),
        *_random_weight_faults(data),
        *_length_faults(data),
        *_chunk_faults(data),
        *_traffic_faults(data),
        *_serving_faults(data),
        *_repetition_faults(data),
    ]
    unread = {fault.path for fault in document.faults}
    return [Fault(path, document.line(path), message) for path, message in found if path not in unread]


Found = Iterator[tuple[KeyPath, str]]


def _environment_faults(node: Any, path: KeyPath) -> Found:
    if path == ("quality", "distribution", "text") and isinstance(node, str):
        node = node.removeprefix("${EVAL_DATA}")  # the one name that has a meaning in a recipe
    if isinstance(node, str) and (match := re.search(r"\$\{(\w*)\}", node)):
        yield path, f"environment variables are not expanded in a recipe (${{{match[1]}}}); write the value"
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from _environment_faults(value, (*path, key))


def _form_faults(data: dict[str, Any]) -> Found:
    if (data.get("precisions") is None) == (data.get("variants") is None):
        yield (), ONE_FORM


def _hardware_faults(data: dict[str, Any]) -> Found:
    name = data.get("hardware", "host")
    known = ("host", *DATA_SHEET)
    if not isinstance(name, str) or name in known or is_device_file(name):
        return
    near = nearest_device(name)
    hint = f"; did you mean {near!r}?" if near else ""
    yield (
        ("hardware",),
        f"{_shown(name)} is not a device with a data sheet here{hint} (allowed: {', '.join(known)}, "
        "or a device file such as ./my-box.yaml)",
    )


def _precision_faults(data: dict[str, Any], known: Sequence[str]) -> Found:
    named = data.get("precisions")
    if not isinstance(named, list):
        return
    lowered = []
    for index, name in enumerate(named):
        if not isinstance(name, str) or name.lower() not in known:
            yield ("precisions", index), f"{_shown(name)} is not a precision{nearest(str(name), known)}"
        elif name.lower() in lowered:
            yield ("precisions", index), f"{name!r} stands twice"
        lowered.append(str(name).lower())
    if not {"fp16", "bf16"} & set(lowered):
        yield ("precisions",), "a 16-bit baseline is needed: add fp16 or bf16"
    baseline = data.get("baseline")
    if isinstance(baseline, str) and baseline not in lowered:
        yield ("baseline",), f"{_shown(baseline)} is not among the precisions{nearest(baseline, lowered)}"
    if isinstance(baseline, str) and baseline in lowered and baseline not in ("fp16", "bf16"):
        yield (
            ("baseline",),
            f"{baseline!r} can't be the baseline: an ordinary 16-bit variant is needed (fp16, bf16)",
        )


def _variant_faults(data: dict[str, Any]) -> Found:
    variants = [v for v in _dicts(data.get("variants")) if isinstance(v[1].get("name"), str)]
    names: list[str] = []
    sixteen_bit = []
    for index, variant in variants:
        if variant["name"] in names:
            yield ("variants", index, "name"), f"{_shown(variant['name'])} is the name of an earlier variant"
        names.append(variant["name"])
        quantizer = variant.get("quantizer")
        if _precision(quantizer) in ("fp16", "bf16"):
            sixteen_bit.append(variant["name"])
        if quantizer is None:
            message = f"{_shown(variant['name'])} needs a quantizer; see `python -m pipeline kinds`"
            yield ("variants", index, "quantizer"), message
    if not variants:
        return
    baseline = data.get("baseline")
    if baseline is None and not sixteen_bit:
        yield ("variants",), "a 16-bit baseline is needed: add {name: fp16}"
    elif isinstance(baseline, str) and baseline not in names:
        yield ("baseline",), f"{_shown(baseline)} is not a variant{nearest(baseline, names)}"
    elif isinstance(baseline, str) and baseline not in sixteen_bit:
        yield (
            ("baseline",),
            f"{_shown(baseline)} can't be the baseline: an ordinary 16-bit variant is needed (fp16, bf16)",
        )
    if len(names) == 1:
        yield ("variants",), "a candidate is needed beside the baseline"
    base = baseline or (sixteen_bit[0] if sixteen_bit else None)
    candidates = [variant for _, variant in variants if variant["name"] != base]
    if candidates and all(variant.get("required") is False for variant in candidates):
        yield ("variants",), "no candidate is required, so no verdict is possible; set required: true on one"


def _precision(quantizer: Any) -> str | None:
    """The label of a quantizer as it is written; None for one that can't be read, which the schema reports."""
    if not isinstance(quantizer, dict) or quantizer.get("kind") not in kinds("pipeline.quantizers"):
        return None
    try:
        label: str = (
            plugin_class("pipeline.quantizers", quantizer["kind"])
            .model_validate_json(json.dumps(quantizer))
            .precision  # type: ignore[attr-defined]
        )
    except ValueError:
        return None
    return label


def _gate_faults(data: dict[str, Any]) -> Found:
    rules = {rule.model_fields["kind"].default: rule for rule in plugin_classes("pipeline.rules")}
    speed = data.get("speed")
    batch_sizes = speed.get("batch_sizes", [1]) if isinstance(speed, dict) else None
    quality = data.get("quality")
    tasks = quality.get("tasks") if isinstance(quality, dict) else None
    for index, rule in _dicts(data.get("gate")):
        kind = rules.get(str(rule.get("kind")))
        if kind is None:
            continue  # the schema says so
        for section in sorted(kind.needs):
            if data.get(section) is None:
                yield (
                    ("gate", index),
                    f"{rule['kind']} needs the section {section!r}, which the recipe doesn't have",
                )
        wanted = rule.get("batch_size", 1)
        if "batch_size" in kind.model_fields and isinstance(batch_sizes, list) and wanted not in batch_sizes:
            yield (
                ("gate", index),
                f"batch size {_shown(wanted)} is not measured; speed.batch_sizes: {_shown(batch_sizes)}",
            )
        known = tasks if isinstance(tasks, list) else []
        named = rule.get("tasks")
        for place, task in enumerate(named if isinstance(named, list) else ()):
            if known and task not in known:
                message = f"{_shown(task)} is not among quality.tasks{nearest(str(task), known)}"
                yield ("gate", index, "tasks", place), message


def _limit_faults(data: dict[str, Any]) -> Found:
    quality = data.get("quality")
    limits = quality.get("limits") if isinstance(quality, dict) else None
    tasks = quality.get("tasks") if isinstance(quality, dict) else None
    if not isinstance(limits, dict) or not isinstance(tasks, list):
        return
    for task in limits:
        if task not in tasks:
            message = f"{_shown(task)} is not among quality.tasks{nearest(task, tasks)}"
            yield ("quality", "limits", task), message


def _random_weight_faults(data: dict[str, Any]) -> Found:
    model = data.get("model")
    if not isinstance(model, dict) or model.get("weights") != "random":
        return
    if data.get("quality") is not None:
        yield (
            ("quality",),
            "random weights have no quality to measure; remove the section or use trained weights",
        )
    if model.get("config") is None and not str(model.get("id", "")).startswith((".", "/", "~")):
        yield ("model", "config"), "random weights need the architecture: name a transformers config.json"


def _length_faults(data: dict[str, Any]) -> Found:
    capacity, workload = data.get("capacity"), data.get("workload")
    context = capacity.get("context_tokens") if isinstance(capacity, dict) else None
    new = workload.get("new_tokens", 64) if isinstance(workload, dict) else 64
    if isinstance(context, int) and isinstance(new, int) and not isinstance(context, bool) and context <= new:
        message = f"{_shown(context)} tokens hold no prompt beside workload.new_tokens: {_shown(new)}; make it larger"
        yield ("capacity", "context_tokens"), message


def _chunk_faults(data: dict[str, Any]) -> Found:
    speed = data.get("speed")
    block = speed if isinstance(speed, dict) else {}
    chunks, prompts = block.get("prefill_chunk_tokens"), block.get("prompt_tokens")
    if chunks is not None and prompts is None:
        message = "cuts the prompts of speed.prompt_tokens, which the recipe doesn't have; add their lengths"
        yield ("speed", "prefill_chunk_tokens"), message
    longest = max((one for one in _list(prompts) if type(one) is int), default=None)
    for index, chunk in enumerate(_list(chunks)):
        if type(chunk) is int and longest is not None and chunk >= longest:
            message = (
                f"no prompt of speed.prompt_tokens is longer than {_shown(chunk)} tokens; make it smaller"
            )
            yield ("speed", "prefill_chunk_tokens", index), message


def _traffic_faults(data: dict[str, Any]) -> Found:
    traffic = data.get("traffic")
    if not isinstance(traffic, dict):
        return
    drawn = [key for key in ("requests_per_s", "prompt_tokens", "new_tokens") if traffic.get(key) is not None]
    if traffic.get("trace") is not None:
        for key in drawn:
            yield ("traffic", key), "stands beside a trace, which holds it already; keep one of them"
    else:
        for key in ("requests_per_s", "prompt_tokens", "new_tokens"):
            if key not in drawn:
                yield ("traffic", key), "is missing; give it, or a trace file (traffic.trace)"
    most, tokens = traffic.get("max_sequences", 256), traffic.get("max_batch_tokens", 2048)
    if isinstance(most, int) and isinstance(tokens, int) and most > tokens > 0:
        message = (
            f"{_shown(most)} sequences decode a token each, more than max_batch_tokens: {_shown(tokens)}"
        )
        yield ("traffic", "max_sequences"), message
    targets = traffic.get("targets")
    if isinstance(targets, dict) and not (
        {"ttft_s", "tpot_s"} & {key for key in targets if targets[key] is not None}
    ):
        yield ("traffic", "targets"), "holds no limit; give ttft_s, tpot_s or both, in seconds"


def _serving_faults(data: dict[str, Any]) -> Found:
    serving, traffic = data.get("serving"), data.get("traffic")
    if not isinstance(serving, dict):
        return
    limits = traffic if isinstance(traffic, dict) else {}
    requests, sizes = serving.get("requests", 32), serving.get("concurrency", [1, 4, 8])
    tokens, block = limits.get("max_batch_tokens", 2048), limits.get("block_tokens", 16)
    for index, size in enumerate(sizes if isinstance(sizes, list) else ()):
        path: KeyPath = ("serving", "concurrency", index) if "concurrency" in serving else ("serving",)
        if _exceeds(size, requests):
            yield path, f"{_shown(size)} are never under way at once of serving.requests: {_shown(requests)}"
        elif _exceeds(size, tokens):
            message = f"{_shown(size)} sequences decode a token each, more than a step's {_shown(tokens)}"
            yield path, f"{message} (traffic.max_batch_tokens)"
    prefix = serving.get("prefix_tokens")
    if _exceeds(block, prefix):
        message = f"{_shown(prefix)} tokens fill no block of {_shown(block)} (traffic.block_tokens)"
        yield ("serving", "prefix_tokens"), f"{message}, and only whole blocks are reused"


def _exceeds(value: Any, limit: Any) -> bool:
    """Of whole numbers above 0; anything else is the schema's business."""
    return type(value) is int and type(limit) is int and value > limit > 0


_LISTS = (
    *(("speed", "batch_sizes"), ("speed", "prompt_tokens"), ("speed", "context_tokens")),
    ("speed", "prefill_chunk_tokens"),
    *(("serving", "concurrency"), ("quality", "tasks"), ("capacity", "layouts")),
)


def _repetition_faults(data: dict[str, Any]) -> Found:
    for section, field in _LISTS:
        block = data.get(section)
        listed = _list(block.get(field)) if isinstance(block, dict) else []
        for index, item in enumerate(listed):
            if item in listed[:index]:
                yield (section, field, index), f"{_shown(item)} stands twice"


def _list(items: Any) -> list[Any]:
    return items if isinstance(items, list) else []


def _dicts(items: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(index, item) for index, item in enumerate(_list(items)) if isinstance(item, dict)]
