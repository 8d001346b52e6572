"""What must hold before any work begins: packages, device, memory, disk, weights, tasks, data.

ready = preflight(loaded, recipe=recipe, device=device, store=store)
if ready.problems: raise PrerequisiteError(ready.message("recipes/27b.yaml"))
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from pipeline.capacity_probe import CapacityRequest, PagedCache
from pipeline.device_file import device_named
from pipeline.distribution_checks import distribution_request, reference_size
from pipeline.distribution_results import DistributionRequest
from pipeline.engines.transformers import stored_dtype
from pipeline.errors import RecipeError
from pipeline.footprint import ShapeFacts, kv_bytes, weight_bytes
from pipeline.gate_tasks import rule_problems
from pipeline.hardware import Device
from pipeline.model_source import hub_is_offline, read_config, source_problems
from pipeline.planning import known_shapes
from pipeline.recipe import ExpandedRecipe, LoadedRecipe
from pipeline.recipe_sections import CapacitySpec, QualitySpec, TrafficSpec, VariantSpec
from pipeline.results import Problem
from pipeline.serving_load import ServingLoad, serving_load
from pipeline.stages import RunnableCheckpoint
from pipeline.store import Store
from pipeline.task_checks import check as check_tasks
from pipeline.task_sizes import quality_request
from pipeline.tasks import QualityRequest
from pipeline.traffic import read_trace
from pipeline.variant_plan import USABLE_MEMORY_SHARE, budget_bytes, compute_bytes, kv_element_bytes

LEAST_PAGE_TOKENS = 4
"""Of transformers' continuous batching (5.24, `ContinuousBatchingConfig.page_size`)."""

ComputeType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Preflight:
    """Facts gathered before a run, and what is missing for it."""

    recipe: ExpandedRecipe
    device: Device
    facts: ShapeFacts | None
    quality: QualityRequest | None
    load: ServingLoad | None
    problems: tuple[Problem, ...]
    distribution: DistributionRequest | None = None

    def message(self, recipe: str) -> str:
        """Every problem with its fix."""
        count = len(self.problems)
        head = f"{recipe}: {count} thing{'s are' if count != 1 else ' is'} missing on this machine"
        return "\n".join(
            [head, *(f"  - {problem.what}\n    fix: {problem.fix}" for problem in self.problems)]
        )

    def capacity_budget(self, spec: CapacitySpec) -> tuple[int, str]:
        """Bytes a variant may use, and who said so."""
        budget, named = budget_bytes(self.recipe, device=self.device), spec.memory_budget_bytes
        if named is None:
            return budget, f"{USABLE_MEMORY_SHARE:g} × memory of {self.device.name}"
        if budget < named:
            return (
                budget,
                f"memory of {self.device.name}: the recipe names {named / 1e9:.1f} GB, more than there is",
            )
        return budget, "recipe"

    def kv_bytes(self, context_tokens: int, *, variant: VariantSpec) -> int | None:
        """Predicted KV cache of one sequence; None where the architecture's cache isn't known."""
        if self.facts is None:
            return None
        assert variant.engine is not None
        reserved = variant.engine.cache_tokens(context_tokens)
        return kv_bytes(self.facts, reserved, element_bytes=kv_element_bytes(variant))

    def capacity_request(
        self, spec: CapacitySpec, *, variant: VariantSpec, checkpoint: RunnableCheckpoint
    ) -> CapacityRequest:
        """What to search for; a paged cache takes blocks and steps of the traffic section, or its defaults."""
        budget, source = self.capacity_budget(spec)
        traffic = self.recipe.traffic or TrafficSpec()
        in_blocks = traffic.block_tokens * -(-spec.context_tokens // traffic.block_tokens)
        paged = PagedCache(
            block_tokens=traffic.block_tokens,
            max_batch_tokens=traffic.max_batch_tokens,
            kv_bytes_per_sequence_predicted=self.kv_bytes(in_blocks, variant=variant),
        )
        return CapacityRequest(
            checkpoint=checkpoint,
            context_tokens=spec.context_tokens,
            new_tokens=self.recipe.workload.new_tokens,
            budget_bytes=budget,
            budget_source=source,
            max_sequences=spec.max_sequences,
            kv_bytes_per_sequence_predicted=self.kv_bytes(spec.context_tokens, variant=variant),
            paged=paged if "paged" in spec.layouts else None,
        )

    def quality_dtype(self, spec: QualitySpec, *, folder: Path) -> ComputeType:
        """Arithmetic of the quality stage: the stored 16-bit type on CUDA, FP32 on a CPU (exact, and faster)."""
        if spec.compute_dtype != "auto":
            return spec.compute_dtype
        return "float32" if self.device.kind == "cpu" else cast(ComputeType, stored_dtype(folder))


def preflight(loaded: LoadedRecipe, *, recipe: ExpandedRecipe, device: Device, store: Store) -> Preflight:
    """Look at everything; nothing is loaded, written or downloaded."""
    facts = known_shapes(loaded, store=store)
    request = quality_request(loaded, recipe)
    load, load_problems = _serving_load(loaded, recipe)
    held, held_problems = _held_text(loaded, recipe, request, facts)
    problems = [
        *_store_problems(store),
        *_hardware_problems(loaded, recipe, device),
        *_plugin_problems(loaded, recipe, device),
        *source_problems(loaded),
        *load_problems,
        *held_problems,
        *(_size_problems(recipe, device, facts, store=store, held=held) if facts else ()),
        *(_serving_problems(load, facts) if load and facts else ()),
        *(_length_problems(request, facts) if request and facts else ()),
        *(_quality_problems(loaded, request) if request else ()),
    ]
    return Preflight(
        recipe=recipe,
        device=device,
        facts=facts,
        quality=request,
        load=load,
        problems=tuple({problem.what: problem for problem in problems}.values()),
        distribution=held,
    )


def _held_text(
    loaded: LoadedRecipe, recipe: ExpandedRecipe, request: QualityRequest | None, facts: ShapeFacts | None
) -> tuple[DistributionRequest | None, tuple[Problem, ...]]:
    """The text whose distribution is compared, where the recipe names one."""
    spec = recipe.quality.distribution if recipe.quality else None
    if spec is None or request is None:
        return None, ()
    longest = facts.context_tokens if facts else None
    return distribution_request(loaded, spec, data_folder=Path(request.data_folder), longest_tokens=longest)


def _store_problems(store: Store) -> Iterator[Problem]:
    place = store.place()
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = "no permission to write" if place.is_dir() else "a file"
        yield Problem(
            what=f"the store {store.root} can't be written ({place}: {reason})",
            fix="free it, or name another folder in PIPELINE_STORE",
        )


def _hardware_problems(loaded: LoadedRecipe, recipe: ExpandedRecipe, device: Device) -> Iterator[Problem]:
    if recipe.hardware == "host":
        return
    wanted = device_named(recipe.hardware, folder=loaded.path.resolve().parent)
    if wanted.kind != device.kind:
        yield Problem(
            what=f"the recipe is for {wanted.name} ({wanted.memory_bytes / 1e9:.0f} GB, {wanted.kind}); "
            f"this machine has {device.name} ({device.kind})",
            fix=f"run it on a machine with {wanted.name}, or set `hardware: host` for a model that fits here",
        )


def _plugin_problems(loaded: LoadedRecipe, recipe: ExpandedRecipe, device: Device) -> Iterator[Problem]:
    architecture = read_config(loaded)
    pages = recipe.serving is not None or (recipe.capacity is not None and "paged" in recipe.capacity.layouts)
    for variant in recipe.variants:
        yield from variant.quantizer.check(device=device.kind)
        if architecture:
            yield from variant.quantizer.model_problems(
                architecture.config, weights=recipe.model.weights, folder=Path(architecture.source).parent
            )
        if variant.engine:
            missing = variant.engine.check(device=device.kind)
            yield from missing or variant.engine.needs(variant.quantizer)
            if pages and not variant.engine.serves:
                yield Problem(
                    what=f"{variant.name}: engine {variant.engine.kind} has no continuous batching over a paged cache, "
                    "which serving and capacity.layouts [paged] measure",
                    fix="leave those out, or take a quantizer that engine transformers runs",
                )
    if pages and recipe.traffic is not None and recipe.traffic.block_tokens < LEAST_PAGE_TOKENS:
        yield Problem(
            what=f"traffic.block_tokens is {recipe.traffic.block_tokens}; transformers' paged cache has pages of at "
            f"least {LEAST_PAGE_TOKENS} tokens",
            fix=f"set traffic.block_tokens to {LEAST_PAGE_TOKENS} or more",
        )


def _size_problems(
    recipe: ExpandedRecipe,
    device: Device,
    facts: ShapeFacts,
    *,
    store: Store,
    held: DistributionRequest | None,
) -> Iterator[Problem]:
    on_disk = reference_size(held, vocabulary_tokens=facts.vocabulary_tokens) if held else 0
    tokens = recipe.workload.prompt_tokens + recipe.workload.new_tokens
    for variant in recipe.variants:
        weights = weight_bytes(facts, quantizer=variant.quantizer, compute_bytes=compute_bytes(variant))
        on_disk += weights.on_disk if recipe.model.weights == "trained" else 0  # random ones aren't stored
        cache = kv_bytes(facts, tokens, element_bytes=kv_element_bytes(variant)) or 0
        if weights.resident + cache > device.memory_bytes:
            yield Problem(
                what=f"{variant.name} needs {weights.resident / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB for "
                f"one sequence; {device.name} has {device.memory_bytes / 1e9:.1f} GB",
                fix="use a device with more memory, fewer bits, or a smaller model",
            )
    free = shutil.disk_usage(store.place()).free
    if on_disk > free:
        yield Problem(
            what=f"the checkpoints{' and the distribution of the text' if held else ''} need {on_disk / 1e9:.1f} GB of "
            f"disk; {store.root} has {free / 1e9:.1f} GB free",
            fix="free space, or name a folder on a larger disk in PIPELINE_STORE"
            + (", or lower quality.distribution.max_tokens" if held else ""),
        )
    limit = facts.context_tokens
    lengths = {
        "workload.prompt_tokens": tokens,
        "capacity.context_tokens": recipe.capacity.context_tokens if recipe.capacity else 0,
        **(recipe.speed.sequence_tokens(new_tokens=recipe.workload.new_tokens) if recipe.speed else {}),
    }
    wrong = {key: length for key, length in lengths.items() if limit is not None and length > limit}
    if wrong:
        yield Problem(
            what=f"{max(wrong.values())} tokens are longer than the model's limit of {limit}",
            fix=f"shorten {', '.join(wrong)}",
        )


def _serving_load(
    loaded: LoadedRecipe, recipe: ExpandedRecipe
) -> tuple[ServingLoad | None, tuple[Problem, ...]]:
    """What is to be served; a trace that holds too little is a problem."""
    spec, traffic = recipe.serving, recipe.traffic
    if spec is None or traffic is None or traffic.trace is None:
        return serving_load(recipe, trace=()), ()
    try:
        trace = read_trace(loaded.resolve(traffic.trace))
    except RecipeError as error:
        return None, (Problem(what=str(error), fix="mend the trace, or name another one in traffic.trace"),)
    if len(trace) < spec.requests:
        what = f"{traffic.trace} holds {len(trace)} requests; serving.requests asks for {spec.requests}"
        return None, (
            Problem(what=what, fix=f"set serving.requests to {len(trace)}, or take a longer trace"),
        )
    return serving_load(recipe, trace=trace), ()


def _serving_problems(load: ServingLoad, facts: ShapeFacts) -> Iterator[Problem]:
    limit = facts.context_tokens
    if limit is not None and load.longest_tokens > limit:
        yield Problem(
            what=f"serving runs sequences of {load.longest_tokens} tokens (padding included), longer than the "
            f"model's limit of {limit}",
            fix="shorten the lengths of traffic or workload"
            + (", or serving.prefix_tokens" if load.prefix_tokens else ""),
        )


def _length_problems(request: QualityRequest, facts: ShapeFacts) -> Iterator[Problem]:
    asked, limit = request.max_length_tokens, facts.context_tokens
    if asked is not None and limit is not None and asked > limit:
        yield Problem(
            what=f"quality.max_length_tokens is {asked}, the model reads at most {limit}",
            fix=f"set it to {limit} or less, or leave it out",
        )


def _quality_problems(loaded: LoadedRecipe, request: QualityRequest) -> tuple[Problem, ...]:
    model = loaded.recipe.model
    tokenizer = loaded.resolve(model.id) if model.is_local else None
    found = check_tasks(request, offline=hub_is_offline(), tokenizer_folder=tokenizer)
    spec = loaded.recipe.quality
    sequential = spec is not None and spec.sequential
    return (*found, *rule_problems(loaded.recipe.gate, request, sequential=sequential))
