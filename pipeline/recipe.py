"""The recipe's schema and `load_recipe`, the only reader of recipes.

A recipe says what is measured and when it ships. Loading reports every problem at once, each with its line,
dotted path, the nearest allowed name and what is allowed.

    recipe = load_recipe(Path("recipes/demo.yaml")).recipe
    recipe.expand(device="cpu").variants
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from pipeline.data_sheet import DATA_SHEET
from pipeline.engines.base import Engine
from pipeline.errors import RecipeError
from pipeline.pick_results import Preference
from pipeline.plugins import plugin_classes
from pipeline.quantizers.base import Quantizer
from pipeline.recipe_faults import ONE_FORM, cross_faults
from pipeline.recipe_sections import (
    AnyRule,
    CapacitySpec,
    CostSpec,
    ModelSpec,
    Name,
    QualitySpec,
    ServingSpec,
    SpeedSpec,
    TrafficSpec,
    VariantSpec,
    WayToRun,
    Workload,
)
from pipeline.schema_faults import schema_faults
from pipeline.values import Value
from pipeline.yaml_document import Document, Fault, dotted, parse, read_text


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
    prefer: Preference | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.precisions is None) == (self.variants is None):
            raise ValueError(ONE_FORM)
        return self

    def expand(self, *, device: str, best: Mapping[str, WayToRun] | None = None) -> ExpandedRecipe:
        """The recipe with every default of `device` ("cpu" or "cuda") written out.

        `best` is what wins on this very device, by precision; without it the short form means what runs anywhere.
        """
        preferred = self.speed.engine if self.speed else None
        variants = self.variants or tuple(
            _named_precision(name.lower(), device=device, best=best or {}, preferred=preferred)
            for name in self.precisions or ()
        )
        written_out = tuple(
            variant
            if variant.engine
            else variant.model_copy(update={"engine": engine_for(variant.quantizer, preferred=preferred)})
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
    prefer: Preference | None = None

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


def _named_precision(
    name: str, *, device: str, best: Mapping[str, WayToRun], preferred: Engine | None
) -> VariantSpec:
    """What one name of the short form means; an engine that the recipe names comes before what is best."""
    way = best.get(name)
    if way is not None and (preferred is None or preferred.kind == way.engine.kind):
        return VariantSpec(name=name, quantizer=way.quantizer, engine=preferred or way.engine)
    return VariantSpec(name=name, quantizer=default_quantizer(name, device=device))


def engine_for(quantizer: Quantizer, *, preferred: Engine | None = None) -> Engine:
    """`preferred` where it runs what the quantizer writes; else the first kind that does, transformers before others.

    Raises RecipeError when only another setting of the preferred kind would run it: settings aren't dropped.
    """
    others = [kind() for kind in plugin_classes("pipeline.engines")]
    others.sort(key=lambda engine: engine.kind != "transformers")
    for engine in (preferred, *others):
        if engine is None or engine.refuses(quantizer) is not None:
            continue
        if preferred is not None and engine is not preferred and engine.kind == preferred.kind:
            raise RecipeError(
                f"speed.engine: {preferred.refuses(quantizer)} (quantizer {quantizer.kind}); change that setting, or "
                "give the variant an engine of its own"
            )
        return engine  # type: ignore[no-any-return]
    raise RecipeError(f"no engine runs what the quantizer {quantizer.kind} writes")


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
    packages = ("pipeline.quantizers", "pipeline.engines", "pipeline.rules")
    for kind in (kind for package in packages for kind in plugin_classes(package)):
        block = schema["$defs"][kind.__name__]
        block["required"] = ["kind", *block.get("required", ())]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "pipeline recipe"
    return schema


def load_recipe(path: Path) -> LoadedRecipe:
    """Read and check a recipe. Raises RecipeError that lists every problem found in the file."""
    text = read_text(path)
    if path.name == "report.json":
        raise RecipeError(
            f"{path}: is the report of a run and no recipe; judge it again with `gate {path.parent}`"
        )
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
    if recipe is not None:
        faults += _engine_faults(recipe, document)
    if faults or recipe is None:
        raise RecipeError(_report(path, faults))
    return recipe


def _engine_faults(recipe: Recipe, document: Document) -> list[Fault]:
    """Engines that a variant names and that can't run what its quantizer writes."""
    return [
        Fault(("variants", index, "engine"), document.line(("variants", index, "engine")), refusal)
        for index, variant in enumerate(recipe.variants or ())
        if variant.engine and (refusal := variant.engine.refuses(variant.quantizer))
    ]


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
