"""Checkpoints, quality, judgement and the report, as values with units in their names.

Stages return these, the store keeps them as JSON, the gate judges them and the report prints them. A figure
that could not be measured is `None` beside the reason; it is never 0.0 and never NaN.

>>> Coverage(linear_weights=200, quantized_weights=190, head_weights=0, head_quantized=False, embedding_weights=9).share
0.95
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from pipeline.capacity_results import CapacityResult
from pipeline.distribution_results import DistributionResult
from pipeline.measured import Bound, Distribution, StageFailure
from pipeline.pick_results import Pick
from pipeline.serving_results import ServingCost, ServingResult
from pipeline.speed_results import DeviceSpeed, MemoryResult, SpeedResult
from pipeline.values import Value

Verdict = Literal["ship", "no-ship", "inconclusive", "error"]
FindingOutcome = Literal["pass", "fail", "inconclusive", "missing"]


class Problem(Value):
    """Something a plugin's `check` or the preflight found missing, and what mends it."""

    what: str
    fix: str


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
    With a `random_seed` the weights are made from it when they are loaded and no tensor lies on disk: the same
    figures then say what a file would hold.
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
    random_seed: int | None = None
    notes: tuple[str, ...] = ()

    def content_digest(self) -> str:
        """Digest of what the bytes are (not of when, how fast or in how many goes they were made)."""
        return self.model_copy(update={"seconds": 0.0, "peak_memory_bytes": 0, "notes": ()}).digest()


# --- quality --------------------------------------------------------------------------------------------


class MetricScore(Value):
    """One metric of one task; `score` is None when the harness gave nothing finite."""

    score: float | None
    stderr: float | None
    higher_is_better: bool


class Sample(Value):
    """One document: its hash and its value for every metric; `prompt_hash` is that of what the model was asked.

    `answer_hash` is that of its log-likelihoods to the last bit; None for generated text.

    Rolling log-likelihood tasks hold `log_likelihood_nats`, `words`, `utf8_bytes` and `tokens` instead of
    a score, so that perplexities of any unit follow from sums.
    """

    doc_hash: str
    metrics: dict[str, float]
    prompt_hash: str | None = None
    answer_hash: str | None = None


class TaskResult(Value):
    """One lm-eval task on one checkpoint.

    `scored_tokens` are what lm-eval alone would have put through the model for its log-likelihoods, padding left out,
    `computed_tokens` what went through; None where nothing was scored so. `scoring` is the way they were computed.
    Evaluated sequentially, `documents` of `available_documents` were answered, and each bound of the paired
    drop holds with `look_confidence`; both are None where a task's documents were fixed beforehand.
    `void` says why no verdict can rest on the task. `chance_score` is what guessing gets where there are choices, or
    always the same answer where they are the same in every document. `unanswerable_documents` have no right answer
    among their choices; `repeated_documents` were asked what an earlier one was asked, and are judged once.
    `unextracted` counts, for each filter that extracts an answer, the documents in which it found none;
    `truncated_outputs` are generated answers that the length limit ended, `output_tokens` the lengths of all of them.
    """

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
    available_documents: int | None = None
    scoring: Literal["shared prefixes", "lm-eval"] = "lm-eval"
    scored_tokens: int | None = None
    computed_tokens: int | None = None
    look_confidence: float | None = None
    fewshot_source: str | None = None
    void: str | None = None
    chance_score: float | None = None
    empty_prompts: int = 0
    double_bos_prompts: int = 0
    unanswerable_documents: int = 0
    repeated_documents: int = 0
    output_tokens: Distribution | None = None
    truncated_outputs: int | None = None
    unextracted: dict[str, int] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()


MAX_ENGINE_KL_NATS = 0.05
"""Mean divergence beyond which two engines compute different models.

8-bit activations cost thousandths of a nat (docs/results/); a wrong rope, norm or tensor costs whole ones.
"""
MAX_ENGINE_KL_P99_NATS = 0.5
"""The same for the worst positions: what is wrong only where a context is long, or a token rare, hides in a mean."""


class EngineAgreement(Value):
    """One checkpoint by two engines, on the same short text; `engine`'s distribution as seen from the reference's.

    `same_greedy_tokens` counts the equal tokens before the first that differs.
    """

    engine: str
    reference_engine: str
    text_tokens: int
    kl_mean_nats: float
    kl_p99_nats: float
    same_top1_share: float
    greedy_tokens: int
    same_greedy_tokens: int

    @property
    def holds(self) -> bool:
        """Whether both compute the same model, but for the arithmetic's rounding."""
        return self.kl_mean_nats <= MAX_ENGINE_KL_NATS and self.kl_p99_nats <= MAX_ENGINE_KL_P99_NATS

    @property
    def text(self) -> str:
        """One line for people."""
        return (
            f"{self.engine} against {self.reference_engine} on {self.text_tokens} tokens of the same file: KL "
            f"{self.kl_mean_nats:.2g} nats in the mean and {self.kl_p99_nats:.2g} at p99, "
            f"{100 * self.same_top1_share:.1f} % equal best tokens, greedy equal for {self.same_greedy_tokens} of "
            f"{self.greedy_tokens} tokens"
        )


class QualityResult(Value):
    """All tasks of one variant, on one engine, with everything both arms must share.

    `agreement` compares that engine with the one that is timed, where it is another one; `distribution` is that of
    the same loaded model on held text, where the recipe names one. `max_length_tokens`, the longest sequence that was
    computed, is None in old reports.
    """

    engine: str
    device: str
    compute_dtype: str
    batch_size: int
    seed: int
    limit: int | None
    limits: dict[str, int] = Field(default_factory=dict)
    chat_template_hash: str | None
    chat_template_applied: bool = False
    tokenizer_hash: str
    adds_bos_token: bool
    max_length_tokens: int | None = None
    harness_version: str
    tasks: dict[str, TaskResult]
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    logits_finite: bool
    agreement: EngineAgreement | None = None
    distribution: DistributionResult | None = None
    notes: tuple[str, ...] = ()


# --- judgement ------------------------------------------------------------------------------------------


class Power(Value):
    """What a number of documents decides, one-sided at 80 % power, when nothing is lost in truth.

    `documents_needed` are those that a margin needs, `detectable_points` is the smallest margin that `documents`
    decide, None where their number isn't known. `flip_rate` is the share of answers that change, either way; of
    graded scores the variance of a document's difference, which counts the same.
    """

    documents: int | None
    flip_rate: float
    detectable_points: float | None
    documents_needed: int

    @property
    def decides(self) -> bool | None:
        """Whether the documents are enough for the margin."""
        return None if self.documents is None else self.documents >= self.documents_needed


class Finding(Value):
    """What one rule says of one candidate. `because` is one plain sentence.

    `power` is what the documents could have decided at the flip rate that was observed.
    """

    rule: str
    subject: str = ""
    outcome: FindingOutcome
    observed: float | None
    limit: float | None
    unit: str
    interval: tuple[float, float] | None = None
    because: str
    power: Power | None = None

    @property
    def name(self) -> str:
        """Rule and subject; a gate that has a rule twice gives two of one name (`told_apart`)."""
        return f"{self.rule} {self.subject}".rstrip()

    @property
    def metric(self) -> str:
        """The name with a dot between rule and subject: figures and metrics are named so."""
        return self.name.replace(" ", ".", 1)


def told_apart(names: Sequence[str]) -> tuple[str, ...]:
    """The names in their order, repeated ones numbered.

    >>> told_apart(("min_speedup", "max_kl", "min_speedup"))
    ('min_speedup', 'max_kl', 'min_speedup (2)')
    """
    counts: Counter[str] = Counter()
    numbered = []
    for name in names:
        counts[name] += 1
        numbered.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return tuple(numbered)


class Reconciliation(Value):
    """One planned figure beside the measured one; `because` explains a difference of more than 5 %
    in bytes and sequences, 10 % in speed.

    `batch_size` is that of a decode rate, and `bound` what sets its roof; None for every other figure.
    """

    figure: str
    unit: str
    batch_size: int | None = None
    bound: Bound | None = None
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
    for each sequence. `serving` holds prices at the rates of each measured row of the serving stage.
    """

    dollars_per_hour: float
    batch_size: int | None
    dollars_per_million_output_tokens: float | None
    input_batch_size: int | None = None
    dollars_per_million_input_tokens: float | None = None
    serving: tuple[ServingCost, ...] = ()


class VariantResults(Value):
    """Everything measured of one variant; a stage that wasn't asked for or failed is None.

    `null_quality` is the baseline's quality once more, at another batch size: what differs is noise.
    """

    name: str
    precision: str
    required: bool
    quantizer: dict[str, Any]
    checkpoint: CheckpointManifest | None = None
    checkpoint_folder: str | None = None
    speed: SpeedResult | None = None
    memory: MemoryResult | None = None
    serving: ServingResult | None = None
    capacity: CapacityResult | None = None
    quality: QualityResult | None = None
    null_quality: QualityResult | None = None
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


class BaselineRun(Value):
    """The earlier run whose variants were the baseline of their namesakes; `name` is its folder's."""

    name: str
    started_at: str
    recipe_digest: str
    commit: str | None = None

    @property
    def text(self) -> str:
        """One line for people."""
        commit = f", commit {self.commit[:12]}" if self.commit else ""
        return f"judged beside the run {self.name} of {self.started_at}{commit}: each variant against its namesake"


def _a_time(text: str) -> str:
    """`text`, when it is a time of ISO 8601; what reads reports puts them in order by it."""
    datetime.fromisoformat(text)
    return text


class Report(Value):
    """`report.json`. `pick` is None in reports from before there was one, and so is `content_sha256`.

    That is the digest of all else in the file (see `stored_reports.sealed`); None for a report that isn't in one.
    """

    format_version: Literal[1] = 1
    recipe: str
    recipe_digest: str
    resolved_recipe: dict[str, Any]
    started_at: Annotated[str, AfterValidator(_a_time)]
    seconds: float = Field(ge=0)
    provenance: dict[str, Any]
    device: DeviceSpeed | None
    baseline: str
    verdict: Verdict
    because: tuple[str, ...]
    variants: tuple[VariantReport, ...]
    interrupted: bool = False
    pick: Pick | None = None
    baseline_run: BaselineRun | None = None
    content_sha256: str | None = None

    @property
    def model_id(self) -> str | None:
        """The recipe's model."""
        model = self.resolved_recipe.get("model")
        name = model.get("id") if isinstance(model, dict) else model
        return None if name is None else str(name)

    def variant(self, name: str) -> VariantReport | None:
        """The variant of that name, if there is one."""
        return next((variant for variant in self.variants if variant.name == name), None)
