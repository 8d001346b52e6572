"""Contradictions between a recipe's sections, said for people.

They are looked for in the raw data, so that they are reported together with the schema's errors
(`schema_faults`).

    faults = cross_faults(document, data, precisions=("fp16", "int8"))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.data_sheet import DATA_SHEET, is_device_file, nearest_device
from pipeline.gate_faults import gate_faults
from pipeline.plugins import kinds, plugin_class
from pipeline.quality_faults import evaluation_faults
from pipeline.schema_faults import nearest, shown
from pipeline.yaml_document import Document, Fault, KeyPath

ONE_FORM = (
    "give either 'precisions' (short form) or 'variants' (long form): without a precision, "
    "a model's size and whether it fits are undefined"
)


def cross_faults(document: Document, data: dict[str, Any], *, precisions: Sequence[str]) -> list[Fault]:
    """Contradictions that no single field shows. Parts of the wrong shape are left to the schema."""
    found = [
        *_environment_faults(data, ()),
        *_form_faults(data),
        *_hardware_faults(data),
        *_precision_faults(data, precisions),
        *_variant_faults(data),
        *gate_faults(data),
        *_limit_faults(data),
        *evaluation_faults(data),
        *_random_weight_faults(data),
        *_length_faults(data),
        *_chunk_faults(data),
        *_traffic_faults(data),
        *_serving_faults(data),
        *_repetition_faults(data),
        *_preference_faults(data),
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
        f"{shown(name)} is not a device with a data sheet here{hint} (allowed: {', '.join(known)}, "
        "or a device file such as ./my-box.yaml)",
    )


def _precision_faults(data: dict[str, Any], known: Sequence[str]) -> Found:
    named = data.get("precisions")
    if not isinstance(named, list):
        return
    lowered = []
    for index, name in enumerate(named):
        if not isinstance(name, str) or name.lower() not in known:
            said = nearest(str(name), known)
            more = "" if "did you mean" in said else "; other formats have quantizers: use 'variants'"
            yield ("precisions", index), f"{shown(name)} is not a precision{said}{more}"
        elif name.lower() in lowered:
            yield ("precisions", index), f"{name!r} stands twice"
        lowered.append(str(name).lower())
    if not {"fp16", "bf16"} & set(lowered):
        yield ("precisions",), "a 16-bit baseline is needed: add fp16 or bf16"
    baseline = data.get("baseline")
    if isinstance(baseline, str) and baseline not in lowered:
        yield ("baseline",), f"{shown(baseline)} is not among the precisions{nearest(baseline, lowered)}"
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
            yield ("variants", index, "name"), f"{shown(variant['name'])} is the name of an earlier variant"
        names.append(variant["name"])
        quantizer = variant.get("quantizer")
        if _precision(quantizer) in ("fp16", "bf16"):
            sixteen_bit.append(variant["name"])
        if quantizer is None:
            message = f"{shown(variant['name'])} needs a quantizer; see `python -m pipeline kinds`"
            yield ("variants", index, "quantizer"), message
    if not variants:
        return
    baseline = data.get("baseline")
    if baseline is None and not sixteen_bit:
        yield ("variants",), "a 16-bit baseline is needed: add {name: fp16}"
    elif isinstance(baseline, str) and baseline not in names:
        yield ("baseline",), f"{shown(baseline)} is not a variant{nearest(baseline, names)}"
    elif isinstance(baseline, str) and baseline not in sixteen_bit:
        yield (
            ("baseline",),
            f"{shown(baseline)} can't be the baseline: an ordinary 16-bit variant is needed (fp16, bf16)",
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


def _limit_faults(data: dict[str, Any]) -> Found:
    quality = data.get("quality")
    limits = quality.get("limits") if isinstance(quality, dict) else None
    tasks = quality.get("tasks") if isinstance(quality, dict) else None
    if not isinstance(limits, dict) or not isinstance(tasks, list):
        return
    for task in limits:
        if task not in tasks:
            message = f"{shown(task)} is not among quality.tasks{nearest(task, tasks)}"
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
        message = (
            f"{shown(context)} tokens hold no prompt beside workload.new_tokens: {shown(new)}; make it larger"
        )
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
                f"no prompt of speed.prompt_tokens is longer than {shown(chunk)} tokens; make it smaller"
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
        message = f"{shown(most)} sequences decode a token each, more than max_batch_tokens: {shown(tokens)}"
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
            yield path, f"{shown(size)} are never under way at once of serving.requests: {shown(requests)}"
        elif _exceeds(size, tokens):
            message = f"{shown(size)} sequences decode a token each, more than a step's {shown(tokens)}"
            yield path, f"{message} (traffic.max_batch_tokens)"
    prefix = serving.get("prefix_tokens")
    if _exceeds(block, prefix):
        message = f"{shown(prefix)} tokens fill no block of {shown(block)} (traffic.block_tokens)"
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
                yield (section, field, index), f"{shown(item)} stands twice"


_MEASURED_BY = {
    "cheapest": ("cost", "speed"),
    "fastest": ("speed",),
    "smallest": ("speed",),
    "best_quality": ("quality",),
}
"""Sections without which a preference would have no figure to choose by."""


def _preference_faults(data: dict[str, Any]) -> Found:
    wanted = data.get("prefer")
    for section in _MEASURED_BY.get(wanted, ()) if isinstance(wanted, str) else ():
        if data.get(section) is None:
            yield ("prefer",), f"{wanted!r} needs the section {section!r}, which the recipe doesn't have"


def _list(items: Any) -> list[Any]:
    return items if isinstance(items, list) else []


def _dicts(items: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(index, item) for index, item in enumerate(_list(items)) if isinstance(item, dict)]
