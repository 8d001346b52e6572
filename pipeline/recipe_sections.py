"""The sections of a recipe, as values: what each key means, its default and what is allowed.

>>> Workload(prompt_tokens=128).new_tokens
64
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field, field_validator

from pipeline.capacity_results import Layout
from pipeline.engines.base import Engine
from pipeline.fleet import Targets
from pipeline.plugins import plugin_classes
from pipeline.quantizers.base import Quantizer
from pipeline.rules.base import Rule
from pipeline.traffic import Distribution
from pipeline.values import Value

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


class WayToRun(Value):
    """A quantizer and the engine that runs what it writes; `because` says why this pair was chosen."""

    quantizer: AnyQuantizer
    engine: AnyEngine
    because: str = ""


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


EVAL_DATA = "${EVAL_DATA}"
"""At the start of a path: the quality section's `data_folder`."""


class DistributionSpec(Value):
    """A text whose next tokens every variant predicts, in windows of `context_tokens`, at most `max_tokens` of it.

    `text` is relative to the recipe, or to `data_folder` after `${EVAL_DATA}`.
    """

    text: Annotated[str, Field(min_length=1)]
    context_tokens: Annotated[int, Field(ge=8)] = 512
    max_tokens: Annotated[int, Field(ge=16)] = 8192


class QualitySpec(Value):
    """lm-eval tasks, by official name or from `task_folders` (relative to the recipe).

    `limit` is the first N documents of every task, `limits` the same for single tasks by name. The baseline is
    evaluated once more at `null_batch_size`, whose differences are noise. `sequential`: candidates stop at the
    documents that decide the gate. `scoring: lm_eval` shares no prefixes, for both arms of a comparison.
    """

    tasks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    task_folders: tuple[str, ...] = ()
    data_folder: str | None = None
    limit: Positive | None = None
    limits: dict[str, Positive] = Field(default_factory=dict)
    seed: Seed = 1234
    batch_size: Positive = 8
    null_batch_size: Positive | None = None
    sequential: bool = False
    scoring: Literal["shared_prefixes", "lm_eval"] = "shared_prefixes"
    distribution: DistributionSpec | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    apply_chat_template: bool = False
    max_length_tokens: Annotated[int, Field(ge=8)] | None = None
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
