"""Every measured value, with its unit in its name.

Stages return these, the store keeps them as JSON, the gate judges them and the report prints them. A figure
that could not be measured is `None` beside the reason; it is never 0.0 and never NaN.

>>> Distribution.of([0.2, 0.1, 0.4]).median
0.2
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from pipeline.values import Value

Outcome = Literal["measured", "out_of_memory", "void", "failed"]
Verdict = Literal["ship", "no-ship", "inconclusive", "error"]
FindingOutcome = Literal["pass", "fail", "inconclusive", "missing"]


class Problem(Value):
    """Something a plugin's `check` or the preflight found missing, and what mends it."""

    what: str
    fix: str


class Distribution(Value):
    """Repeated samples of one quantity: raw samples, median, quartiles, coefficient of variation.

    The unit stands in the name of the field that holds the distribution.
    """

    median: float
    lower_quartile: float
    upper_quartile: float
    cv_percent: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution:
        """Raises ValueError when there is no sample. One sample has quartiles equal to itself and CV 0."""
        if not samples:
            raise ValueError("a distribution needs at least one sample")
        ordered = sorted(samples)
        mean = statistics.fmean(ordered)
        if len(ordered) == 1:
            lower = upper = ordered[0]
        else:
            lower, _, upper = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(
            median=statistics.median(ordered),
            lower_quartile=lower,
            upper_quartile=upper,
            cv_percent=100 * statistics.pstdev(ordered) / mean if mean else 0.0,
            samples=tuple(samples),
        )


# --- checkpoint -----------------------------------------------------------------------------------------


class FileRecord(Value):
    """One file of a checkpoint folder."""

    name: str
    size_bytes: int
    sha256: str


class Coverage(Value):
    """How many of the model's block weights really are quantized, counted from the file on disk.

    `linear_weights` are the elements of every two-dimensional projection of the blocks (nn.Linear, GPT-2's
    Conv1D) and of expert weights kept as three-dimensional parameters. Embedding and head are counted apart.
    """

    linear_weights: int
    quantized_weights: int
    head_weights: int
    head_quantized: bool
    embedding_weights: int
    unquantized_names: tuple[str, ...] = ()
    groups: dict[str, int] = Field(default_factory=dict)

    @property
    def share(self) -> float:
        """Quantized share of the block weights, 0 to 1."""
        return self.quantized_weights / self.linear_weights if self.linear_weights else 0.0


class SourceRecord(Value):
    """Where the weights came from."""

    model: str
    revision: str | None
    files: tuple[FileRecord, ...]


class CheckpointManifest(Value):
    """`manifest.json` of a checkpoint folder; written last, so that a folder without it is not a checkpoint.

    `weight_bytes_on_disk` sums the tensor data in the safetensors files (headers excluded);
    `weight_bytes_read_per_token` leaves out an untied embedding table, of which one row is read a token.
    `bits_per_weight` is 8 × weight bytes ÷ parameters, head, embedding, scales and zero-points included.
    """

    format_version: Literal[1] = 1
    precision: str
    quantizer: dict[str, Any]
    source: SourceRecord
    files: tuple[FileRecord, ...]
    parameters: int
    coverage: Coverage
    weight_bytes_on_disk: int
    weight_bytes_read_per_token: int
    bits_per_weight: float
    bits_per_block_weight: float
    seconds: float
    peak_memory_bytes: int
    versions: dict[str, str]
    notes: tuple[str, ...] = ()

    def content_digest(self) -> str:
        """Digest of what the bytes are (not of when or how fast they were made)."""
        return self.model_copy(update={"seconds": 0.0, "peak_memory_bytes": 0}).digest()


# --- speed and memory -----------------------------------------------------------------------------------


SpeedTest = Literal["batch", "prefill", "depth"]
"""What a row is for: static batches of the workload, prompt lengths, or depths of context, both at batch 1."""


class SpeedShape(Value):
    """What one row of the speed stage runs: `batch_size` prompts of `prompt_tokens`, `new_tokens` for each."""

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    test: SpeedTest = "batch"

    @property
    def name(self) -> str:
        """The test in llama-bench's words: pp512 (prefill), tg64 @ d4096 (decode at a depth), pp512+tg64 (both)."""
        if self.test == "prefill":
            return f"pp{self.prompt_tokens}"
        if self.test == "depth":
            return f"tg{self.new_tokens} @ d{self.prompt_tokens}"
        return f"pp{self.prompt_tokens}+tg{self.new_tokens}"


class SpeedRow(SpeedShape):
    """One shape of one variant; rows exist for shapes that failed, too.

    Prefill rates count prompt tokens only, decode rates count tokens after the first only.
    `decode_tokens_per_s` is the aggregate of the batch, `..._per_request` one sequence's share of it.
    `bandwidth_share` is of the measured bandwidth, `sheet_bandwidth_share` of the published one;
    `prefill_flops_share` is the prompts' FLOPs ÷ TTFT ÷ the FLOP/s measured at the type of the arithmetic.
    `joules_per_output_token` is the energy of a whole repeat, prefill and decode, ÷ the tokens it produced.
    """

    outcome: Outcome
    because: str = ""
    ttft_s: Distribution | None = None
    tpot_s: Distribution | None = None
    itl_p50_s: float | None = None
    itl_p90_s: float | None = None
    itl_p99_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    decode_tokens_per_s_per_request: float | None = None
    produced_tokens: int | None = None
    bytes_read_per_step: int | None = None
    bandwidth_share: float | None = None
    sheet_bandwidth_share: float | None = None
    prefill_flops_share: float | None = None
    peak_memory_bytes: int | None = None
    warmup_s: tuple[float, ...] = ()
    noisy: bool = False
    joules_per_output_token: Distribution | None = None


class MemoryResult(Value):
    """Bytes of one loaded variant. Resident bytes sum live storages once each, inner tensors included."""

    weight_bytes_on_disk: int
    weight_bytes_resident: int
    weight_bytes_read_per_token: int
    kv_cache_bytes: int | None
    peak_bytes: int
    process_bytes_before_load: int
    process_bytes_after_load: int
    allocator_reserved_bytes: int | None = None


class SpeedResult(Value):
    """What the speed stage measured of one variant.

    `measured_break_even_batch` is how many single streams the best batch is worth, `free_lunch_batch` up to which
    batch a step costs next to nothing more; see `measure.break_even_batch` and `measure.free_lunch_batch`.
    """

    engine: str
    device: str
    compute_dtype: str
    execution: str
    rows: tuple[SpeedRow, ...]
    memory: MemoryResult
    drift_percent: float | None = None
    measured_break_even_batch: float | None = None
    free_lunch_batch: int | None = None
    notes: tuple[str, ...] = ()

    def of(self, test: SpeedTest) -> tuple[SpeedRow, ...]:
        """The rows of one test, in the recipe's order."""
        return tuple(row for row in self.rows if row.test == test)

    def row(self, batch_size: int) -> SpeedRow | None:
        """The workload's row of one batch size, if it was asked for."""
        return next((row for row in self.of("batch") if row.batch_size == batch_size), None)


class DeviceSpeed(Value):
    """Limits of the device measured in the same speed stage."""

    read_bandwidth_bytes_per_s: float
    matmul_flops_per_s: dict[str, float]


class MachineState(Value):
    """Clocks, load and throttling at one moment; None where the machine doesn't tell."""

    cpu_frequency_mhz: float | None
    load_average_1_minute: float | None
    gpu_clock_mhz: int | None = None
    gpu_memory_clock_mhz: int | None = None
    gpu_temperature_celsius: int | None = None
    gpu_power_w: float | None = None
    gpu_throttled_by: tuple[str, ...] = ()


class StageFailure(Value):
    """A stage that gave no result for a variant."""

    stage: Literal["quantize", "speed", "capacity", "quality"]
    reason: Literal["failed", "interrupted", "out_of_memory", "skipped"]
    message: str


class SpeedStageResult(Value):
    """The speed stage over the whole set of variants; `failures` tells which variants have no result."""

    device: DeviceSpeed
    machine_before: MachineState
    machine_after: MachineState
    alternated: bool
    variants: dict[str, SpeedResult]
    failures: dict[str, StageFailure] = Field(default_factory=dict)


# --- capacity -------------------------------------------------------------------------------------------


class CapacityProbe(Value):
    """One try at holding `sequences` sequences of full length at once, prefill and decode included."""

    sequences: int
    outcome: Outcome
    because: str = ""
    peak_bytes: int | None = None


class CapacityResult(Value):
    """How many sequences of `context_tokens` fit at once into `budget_bytes`.

    Predicted from resident weights and KV cache alone; measured by really running prefill and decode with
    that many, activations included (on a CPU: resident weights + growth of the process over its idle state).
    `limited_by` says what ended the search; `peak_bytes_per_sequence` is what one more sequence took, its KV
    cache and its activations, between the smallest and the largest batch that ran.
    """

    context_tokens: int
    budget_bytes: int
    budget_source: str
    weight_bytes_resident: int
    kv_bytes_per_sequence: int
    kv_bytes_per_sequence_predicted: int | None
    predicted_sequences: int | None
    measured_sequences: int | None
    peak_bytes_per_sequence: float | None = None
    limited_by: Literal["memory", "ceiling", "failure"]
    because: str = ""
    probes: tuple[CapacityProbe, ...] = ()


# --- quality --------------------------------------------------------------------------------------------


class MetricScore(Value):
    """One metric of one task; `score` is None when the harness gave nothing finite."""

    score: float | None
    stderr: float | None
    higher_is_better: bool


class Sample(Value):
    """One document: its hash and its value for every metric.

    Rolling log-likelihood tasks hold `log_likelihood_nats`, `words`, `utf8_bytes` and `tokens` instead of
    a score, so that perplexities of any unit follow from sums.
    """

    doc_hash: str
    metrics: dict[str, float]


class TaskResult(Value):
    """One lm-eval task on one checkpoint."""

    task: str
    output_type: str
    task_version: str
    task_hash: str
    prompts_hash: str
    data_hash: str
    num_fewshot: int
    documents: int
    truncated_prompts: int
    primary_metric: str
    metrics: dict[str, MetricScore]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()


class QualityResult(Value):
    """All tasks of one variant, on one engine, with everything both arms must share."""

    engine: str
    device: str
    compute_dtype: str
    batch_size: int
    seed: int
    limit: int | None
    limits: dict[str, int] = Field(default_factory=dict)
    chat_template_hash: str | None
    tokenizer_hash: str
    adds_bos_token: bool
    harness_version: str
    tasks: dict[str, TaskResult]
    logits_finite: bool
    notes: tuple[str, ...] = ()


# --- judgement ------------------------------------------------------------------------------------------


class Finding(Value):
    """What one rule says of one candidate. `because` is one plain sentence."""

    rule: str
    subject: str = ""
    outcome: FindingOutcome
    observed: float | None
    limit: float | None
    unit: str
    interval: tuple[float, float] | None = None
    because: str


class Reconciliation(Value):
    """One planned figure beside the measured one; `because` explains a difference of more than 10 %.

    `batch_size` is that of a decode rate, None for every other figure.
    """

    figure: str
    unit: str
    batch_size: int | None = None
    predicted: float
    measured: float
    because: str

    @property
    def ratio(self) -> float:
        """Measured ÷ predicted."""
        return self.measured / self.predicted


class CostResult(Value):
    """Price of a million tokens on a machine kept busy: $/h ÷ (tok/s × 3600 s/h) × 1e6.

    Output tokens at the measured decode rate of `batch_size`, input tokens at the measured prefill rate of
    `input_batch_size`, each at the batch size with the best rate; None where no such rate was measured.
    Input and output are priced apart because a prefill does a prompt's tokens at once, a decode step one
    for each sequence.
    """

    dollars_per_hour: float
    batch_size: int | None
    dollars_per_million_output_tokens: float | None
    input_batch_size: int | None = None
    dollars_per_million_input_tokens: float | None = None


class VariantResults(Value):
    """Everything measured of one variant; a stage that wasn't asked for or failed is None."""

    name: str
    precision: str
    required: bool
    quantizer: dict[str, Any]
    checkpoint: CheckpointManifest | None = None
    checkpoint_folder: str | None = None
    speed: SpeedResult | None = None
    memory: MemoryResult | None = None
    capacity: CapacityResult | None = None
    quality: QualityResult | None = None
    cost: CostResult | None = None
    planned: tuple[Reconciliation, ...] = ()
    failures: tuple[StageFailure, ...] = ()
    validity: tuple[str, ...] = ()

    @property
    def loaded_memory(self) -> MemoryResult | None:
        """`memory`, or what the speed stage told of it."""
        return self.memory or (self.speed.memory if self.speed else None)


class VariantReport(VariantResults):
    """A variant's results with its verdict. The baseline is judged for validity only (no findings)."""

    verdict: Verdict
    findings: tuple[Finding, ...]


class Report(Value):
    """`report.json`."""

    format_version: Literal[1] = 1
    recipe: str
    recipe_digest: str
    resolved_recipe: dict[str, Any]
    started_at: str
    seconds: float
    provenance: dict[str, Any]
    device: DeviceSpeed | None
    baseline: str
    verdict: Verdict
    because: tuple[str, ...]
    variants: tuple[VariantReport, ...]
    interrupted: bool = False

    def variant(self, name: str) -> VariantReport | None:
        """The variant of that name, if there is one."""
        return next((variant for variant in self.variants if variant.name == name), None)
