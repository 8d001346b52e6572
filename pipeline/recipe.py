"""The recipe's schema and `load_recipe`, the only reader of recipes.

A recipe says what is measured and when it ships. Loading reports every problem at once, each with its line,
dotted path, the nearest allowed name and what is allowed.

    recipe = load_recipe(Path("recipes/demo.yaml")).recipe
    recipe.expand(device="cpu").variants
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from pipeline.capacity_results import Layout
from pipeline.data_sheet import DATA_SHEET
from pipeline.engines.base import Engine
from pipeline.errors import RecipeError
from pipeline.fleet import Targets
from pipeline.plugins import plugin_classes
from pipeline.quantizers.base import Quantizer
from pipeline.recipe_faults import ONE_FORM, cross_faults, schema_faults
from pipeline.rules.base import Rule
from pipeline.traffic import Distribution
from pipeline.values import Value
from pipeline.yaml_document import Document, Fault, dotted, parse, read_text

# A field annotated with the base class would drop the subclass's fields when dumped, and two recipes that
# differ in them would share a digest; the union over the discovered kinds keeps every field.
if TYPE_CHECKING:
    AnyQuantizer = Quantizer
    AnyEngine = Engine
    AnyRule = Rule
else:

    def _union(package: str) -> Any:
        classes = plugin_classes(package)
        return classes[0] if len(classes) == 1 else Annotated[Union[classes], Field(discriminator="kind")]  # noqa: UP007

    AnyQuantizer = _union("pipeline.quantizers")
    AnyEngine = _union("pipeline.engines")
    AnyRule = _union("pipeline.rules")

Name = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Positive = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What every generator in use accepts."""


class ModelSpec(Value):
    """Which weights. `id` is a hub id, or a local folder when it starts with `.`, `/` or `~`.

    `config` names a transformers config.json (relative to the recipe), so that planning and random weights
    need no hub.
    """

    id: Annotated[str, Field(min_length=1)]
    revision: Annotated[str, Field(min_length=1)] | None = None
    weights: Literal["trained", "random"] = "trained"
    config: Annotated[str, Field(min_length=1)] | None = None
    seed: Seed = 0

    @property
    def is_local(self) -> bool:
        """Whether `id` is a folder rather than a hub id."""
        return self.id.startswith((".", "/", "~"))


class VariantSpec(Value):
    """One way to store and run the model. Optional variants are judged but don't change the exit code."""

    name: Name
    quantizer: AnyQuantizer
    engine: AnyEngine | None = None
    required: bool = True


class Workload(Value):
    """Tokens of one request: exact prompt and output lengths."""

    prompt_tokens: Positive = 512
    new_tokens: Annotated[int, Field(ge=2)] = 64


class SpeedSpec(Value):
    """What the speed stage runs. A figure with a CV over `max_cv_percent` is measured again, then marked.

    Beside the workload's static batches, at batch 1: prefill alone over `prompt_tokens`, whole and in pieces of
    each of `prefill_chunk_tokens`, and decode of the workload's new tokens over `context_tokens`, depths that the
    prompt fills.
    """

    engine: AnyEngine | None = None
    batch_sizes: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1,)
    prompt_tokens: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    prefill_chunk_tokens: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    context_tokens: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    warmup: Annotated[int, Field(ge=1)] = 2
    repeats: Annotated[int, Field(ge=3, le=1000)] = 5
    min_seconds: Annotated[float, Field(ge=0)] = 1.0
    max_cv_percent: Annotated[float, Field(gt=0)] = 5.0

    def sequence_tokens(self, *, new_tokens: int) -> dict[str, int]:
        """The longest sequence of each list of lengths, by its name in the recipe."""
        longest = {}
        if self.prompt_tokens:
            longest["speed.prompt_tokens"] = max(self.prompt_tokens)
        if self.context_tokens:
            longest["speed.context_tokens + workload.new_tokens"] = max(self.context_tokens) + new_tokens
        return longest


class ServingSpec(Value):
    """Continuous batching beside static batches of the same requests, at each `concurrency`.

    The first `requests` of `traffic`, within its `max_batch_tokens` and `block_tokens`, in a closed loop and as they
    come; without `traffic` requests of the workload's lengths. `prefix_tokens` times prefill from a cached prefix.
    """

    concurrency: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1, 4, 8)
    requests: Annotated[int, Field(gt=0, le=100_000)] = 32
    repeats: Annotated[int, Field(ge=3, le=1000)] = 3
    max_cv_percent: Annotated[float, Field(gt=0)] = 5.0
    prefix_tokens: Positive | None = None


class CapacitySpec(Value):
    """How many sequences of `context_tokens` must be held; the budget defaults to 0.9 × the device's memory.

    `layouts` are those of the KV cache; the paged one takes `block_tokens` and `max_batch_tokens` of `traffic`.
    """

    context_tokens: Annotated[int, Field(ge=4)]
    memory_budget_bytes: Positive | None = None
    max_sequences: Positive = 256
    layouts: Annotated[tuple[Layout, ...], Field(min_length=1)] = ("contiguous",)

    @field_validator("layouts")
    @classmethod
    def _judged_layout(cls, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        if "contiguous" not in layouts:
            raise ValueError("lacks contiguous, which the gate judges; write [contiguous, paged]")
        return layouts


class QualitySpec(Value):
    """lm-eval tasks, by official name or from `task_folders` (relative to the recipe).

    `limit` is the first N documents of every task, `limits` the same for single tasks by name.
    """

    tasks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    task_folders: tuple[str, ...] = ()
    data_folder: str | None = None
    limit: Positive | None = None
    limits: dict[str, Positive] = Field(default_factory=dict)
    seed: Seed = 1234
    batch_size: Positive = 8
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    apply_chat_template: bool = False
    max_length_tokens: Positive | None = None
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    confirm_unsafe_code: bool = False


class CostSpec(Value):
    """Price of the machine."""

    dollars_per_hour: Annotated[float, Field(gt=0, le=1e6)]


class Efficiency(Value):
    """What serving is taken to reach of the device's limits before anything is measured.

    A step takes its floor at these shares of bandwidth and FLOP/s, and `overhead_s_per_layer` besides: published
    engines lose about the same time on every layer, whatever the precision (docs/predictions.md).
    """

    bandwidth: Annotated[float, Field(ge=0.01, le=1)] = 1.0
    flops: Annotated[float, Field(ge=0.01, le=1)] = 0.6
    overhead_s_per_layer: Annotated[float, Field(ge=0, le=1)] = 1e-4


class TrafficSpec(Value):
    """The requests that `serving` and `plan`'s fleet serve: drawn from distributions, or a trace file.

    A device runs continuous batching with a paged KV cache: at most `max_sequences` at once, at most
    `max_batch_tokens` tokens a step, pages of `block_tokens`.
    """

    requests_per_s: Annotated[float, Field(ge=1e-4, le=1e6)] | None = None
    prompt_tokens: Distribution | None = None
    new_tokens: Distribution | None = None
    trace: Annotated[str, Field(min_length=1)] | None = None
    targets: Targets = Targets()
    efficiency: Efficiency = Efficiency()
    block_tokens: Annotated[int, Field(gt=0, le=65_536)] = 16
    max_batch_tokens: Annotated[int, Field(gt=0, le=1_000_000)] = 2048
    max_sequences: Annotated[int, Field(gt=0, le=100_000)] = 256
    seed: Seed = 1234


class Recipe(Value):
    """A model, its variants, what is measured of them and the gate."""

    model: ModelSpec
    precisions: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    baseline: Name | None = None
    variants: Annotated[tuple[VariantSpec, ...], Field(min_length=1)] | None = None
    hardware: Annotated[str, Field(min_length=1)] = "host"
    workload: Workload = Workload()
    speed: SpeedSpec | None = None
    serving: ServingSpec | None = None
    capacity: CapacitySpec | None = None
    quality: QualitySpec | None = None
    cost: CostSpec | None = None
    traffic: TrafficSpec | None = None
    gate: Annotated[tuple[AnyRule, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.precisions is None) == (self.variants is None):
            raise ValueError(ONE_FORM)
        return self

    def expand(self, *, device: str) -> ExpandedRecipe:
        """The recipe with every default of `device` ("cpu" or "cuda") written out."""
        engine = (self.speed.engine if self.speed else None) or _default_engine()
        variants = self.variants or tuple(
            VariantSpec(name=name.lower(), quantizer=default_quantizer(name.lower(), device=device))
            for name in self.precisions or ()
        )
        written_out = tuple(
            variant if variant.engine else variant.model_copy(update={"engine": engine})
            for variant in variants
        )
        baseline = self.baseline or next(
            v.name for v in written_out if v.quantizer.precision in ("fp16", "bf16")
        )
        return ExpandedRecipe(
            **{name: getattr(self, name) for name in Recipe.model_fields if name not in _REPLACED},
            baseline=baseline,
            variants=written_out,
        )


_REPLACED = ("precisions", "baseline", "variants")


class ExpandedRecipe(Value):
    """A recipe as it runs: long form, every variant with its quantizer and engine, the baseline named."""

    model: ModelSpec
    baseline: str
    variants: tuple[VariantSpec, ...]
    hardware: str
    workload: Workload
    speed: SpeedSpec | None
    serving: ServingSpec | None
    capacity: CapacitySpec | None
    quality: QualitySpec | None
    cost: CostSpec | None
    traffic: TrafficSpec | None
    gate: tuple[AnyRule, ...]

    def ordered(self) -> tuple[VariantSpec, ...]:
        """The baseline first, then the candidates in the recipe's order."""
        return tuple(sorted(self.variants, key=lambda variant: variant.name != self.baseline))


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and the file it came from; relative paths in it start at the file's folder."""

    path: Path
    text: str
    recipe: Recipe

    def resolve(self, name: str) -> Path:
        """A path written in the recipe, as an absolute one. Raises RecipeError for the home of nobody here."""
        try:
            return (self.path.resolve().parent / Path(name).expanduser()).resolve()
        except RuntimeError:
            raise RecipeError(f"{self.path}: {name}: there is no such user on this machine") from None


def default_quantizer(precision: str, *, device: str) -> Quantizer:
    """What the short form `precision` means on `device`. Raises LookupError when no quantizer answers."""
    for kind in plugin_classes("pipeline.quantizers"):
        found: Quantizer | None = kind.default_for(precision, device=device)
        if found is not None:
            return found
    raise LookupError(precision)


def precision_names() -> tuple[str, ...]:
    """Every precision that the short form knows."""
    known = ("fp32", "fp16", "bf16", "int8", "int4", "fp8", "fp4")
    kinds = plugin_classes("pipeline.quantizers")
    return tuple(name for name in known if any(kind.default_for(name, device="cuda") for kind in kinds))


def _named_alone(name: str) -> Quantizer | None:
    """The quantizer of `{name: fp16}`: a native type needs no more words, and is the same on every device."""
    try:
        quantizer = default_quantizer(name.lower(), device="cpu")
    except LookupError:
        return None
    return quantizer if quantizer.kind == "native" else None


def _default_engine() -> Engine:
    engine: Engine = TypeAdapter(AnyEngine).validate_python({"kind": "transformers"})
    return engine


@cache
def json_schema() -> dict[str, Any]:
    """JSON schema of a recipe file, short forms included, for editors. Shared: not to be changed."""
    schema = Recipe.model_json_schema()
    forms = [form for name in precision_names() for form in (name, name.upper())]
    model = schema["properties"]["model"]
    schema["properties"]["model"] = {
        "anyOf": [{"type": "string", "description": "hub id, or a folder starting with ./, / or ~"}, model]
    }
    schema["properties"]["precisions"] = {
        "type": "array",
        "minItems": 1,
        "items": {"enum": forms},
    }
    schema["properties"]["hardware"] = {
        "default": "host",
        "anyOf": [
            {"enum": ["host", *DATA_SHEET]},
            {
                "type": "string",
                "pattern": r"/|\.ya?ml$",
                "description": "a device file, relative to the recipe",
            },
        ],
    }
    schema["oneOf"] = [{"required": ["precisions"]}, {"required": ["variants"]}]
    variant = schema["$defs"]["VariantSpec"]
    variant["required"] = ["name"]
    variant["anyOf"] = [
        {"required": ["quantizer"]},
        {"properties": {"name": {"enum": [form for form in forms if _named_alone(form)]}}},
    ]
    for kind in (*plugin_classes("pipeline.quantizers"), *plugin_classes("pipeline.rules")):
        block = schema["$defs"][kind.__name__]
        block["required"] = ["kind", *block.get("required", ())]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "pipeline recipe"
    return schema


def load_recipe(path: Path) -> LoadedRecipe:
    """Read and check a recipe. Raises RecipeError that lists every problem found in the file."""
    text = read_text(path)
    try:
        document = parse(text)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    return LoadedRecipe(path=path, text=text, recipe=_validate(document, path=path))


def _validate(document: Document, *, path: Path) -> Recipe:
    if not isinstance(document.data, dict):
        kind = type(document.data).__name__
        raise RecipeError(f"{path}: the top level must be keys and values (model: …), found a {kind}")
    data = _long_form(document.data)
    faults = [*document.faults, *cross_faults(document, data, precisions=precision_names())]
    recipe = None
    try:
        # Validated from JSON because strict JSON input accepts a list for a tuple and an int for a float,
        # and nothing else.
        recipe = Recipe.model_validate_json(json.dumps(data))
    except ValidationError as error:
        faults += schema_faults(error, document, data, schema=json_schema(), known=faults)
    if faults or recipe is None:
        raise RecipeError(_report(path, faults))
    return recipe


def _long_form(data: dict[str, Any]) -> dict[str, Any]:
    """Short forms written out as far as the shape of the data allows: `model: x`, a variant without quantizer."""
    data = dict(data)
    if isinstance(data.get("model"), str):
        data["model"] = {"id": data["model"]}
    if isinstance(data.get("traffic"), dict):
        data["traffic"] = _long_traffic(data["traffic"])
    if isinstance(data.get("variants"), list):
        data["variants"] = [_long_variant(variant) for variant in data["variants"]]
    return data


def _long_traffic(traffic: dict[str, Any]) -> dict[str, Any]:
    """A length that is one number means that every request has it."""
    fixed = {
        key: {"distribution": "fixed", "tokens": traffic[key]}
        for key in ("prompt_tokens", "new_tokens")
        if type(traffic.get(key)) is int
    }
    return {**traffic, **fixed}


def _long_variant(variant: Any) -> Any:
    if not isinstance(variant, dict) or "quantizer" in variant or not isinstance(variant.get("name"), str):
        return variant
    quantizer = _named_alone(variant["name"])
    return {**variant, "quantizer": quantizer.model_dump()} if quantizer else variant


def _report(path: Path, faults: list[Fault]) -> str:
    ordered = sorted(faults, key=lambda fault: (fault.line or 0, dotted(fault.path)))
    count = f"{len(ordered)} problem{'s' if len(ordered) != 1 else ''}"
    return "\n".join([f"{path}: {count}", *(f"  {fault}" for fault in ordered)])
