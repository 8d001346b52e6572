"""The stages: a request in, a result out, each run in a process of its own.

    manifest = quantize(QuantizeRequest(...))
    result = quality(QualityStageRequest(...), progress=print)

Every stage works on the checkpoint read back from disk. Out of memory is a result, not a crash.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipeline.alternation import TurnResult
from pipeline.answer_journal import AnswerJournal
from pipeline.checkpoint import build_manifest, check_earned_label, write_manifest
from pipeline.distribution_reference import Reference
from pipeline.distribution_results import DistributionRequest
from pipeline.distribution_run import measure_distribution, write_reference
from pipeline.distribution_text import read_windows
from pipeline.early_stopping import Stopping
from pipeline.energy import EnergyMeter, energy_meter, joules_of_work
from pipeline.engine_agreement import Observed, compare, observe, text_tokens
from pipeline.engines.base import Session
from pipeline.engines.transformers import Transformers
from pipeline.errors import CheckpointError
from pipeline.execution_choice import choose_execution
from pipeline.hardware import measure_device_speed
from pipeline.measure import Clock, random_prompts, time_generation
from pipeline.process_memory import (
    peak_resident_bytes,
    reset_peak_resident_bytes,
    resident_bytes_now,
)
from pipeline.quality import QualityRequest, evaluate, prepare_tasks
from pipeline.random_weights import is_random, random_manifest, write_random_variant
from pipeline.recipe_sections import AnyEngine, AnyQuantizer
from pipeline.results import CheckpointManifest, QualityResult, SourceRecord
from pipeline.speed_results import DeviceSpeed, ExecutionChoice, SpeedShape
from pipeline.store import telling_of_full_disk
from pipeline.tensor_stream import forget
from pipeline.values import Value

Progress = Callable[[str], None]


class QuantizeRequest(Value):
    """Source folder → checkpoint in the folder `out`, which is empty or holds what a stopped call left."""

    source_folder: str
    source: SourceRecord
    quantizer: AnyQuantizer
    device: str
    out: str


class RandomVariantRequest(Value):
    """Config and seed → a variant without tensors in the (empty) folder `out`."""

    config: dict[str, Any]
    seed: int
    source: SourceRecord
    quantizer: AnyQuantizer
    out: str


class RunnableCheckpoint(Value):
    """A finished checkpoint, or a variant of random weights, and how to run it."""

    folder: str
    quantizer: AnyQuantizer
    engine: AnyEngine
    device: str

    def open(self) -> Session:
        """Load it. Raises CheckpointError, or the engine's own out of memory."""
        return self.engine.open(Path(self.folder), quantizer=self.quantizer, device=self.device)


class SpeedRequest(Value):
    """What a speed worker loads; the shapes that it runs come turn by turn."""

    checkpoint: RunnableCheckpoint


class SpeedOpened(Value):
    """Facts of a loaded speed worker."""

    compute_dtype: str
    execution: str
    weight_bytes_resident: int
    weight_bytes_copied: int = 0
    process_bytes_before_load: int
    process_bytes_after_load: int
    peak_load_bytes: int
    energy_source: str


class SpeedQuestion(Value):
    """One turn: which shape, with prompts from which seed."""

    shape: SpeedShape
    seed: int


class QualityStageRequest(Value):
    """lm-eval tasks on a checkpoint; tasks of `stopping` end when they are decided.

    In the file `answers` every batch's answers are kept, and those that are there aren't computed again.
    """

    checkpoint: RunnableCheckpoint
    compute_dtype: Literal["float32", "bfloat16", "float16"]
    quality: QualityRequest
    stopping: Stopping | None = None
    answers: str | None = None
    distribution: DistributionRequest | None = None


class ReferenceRequest(Value):
    """A checkpoint's distribution of a text into the (empty) folder `out`."""

    checkpoint: RunnableCheckpoint
    compute_dtype: Literal["float32", "bfloat16", "float16"]
    distribution: DistributionRequest
    batch_size: int
    out: str


def _log(text: str) -> None:
    """Into the stage's log: a line of progress may be dropped."""
    sys.stderr.write(f"{text}\n")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a CPU or a GPU; plain bugs are not taken for it."""
    if isinstance(error, MemoryError) or type(error).__name__ in (
        "OutOfMemoryError",
        "AcceleratorOutOfMemoryError",
    ):
        return True
    text = str(error).lower()
    said = (
        *("not enough memory", "out of memory", "cannot allocate memory", "can't allocate memory"),
        "std::bad_alloc",
    )
    return isinstance(error, (RuntimeError, OSError)) and any(phrase in text for phrase in said)


# --- quantize --------------------------------------------------------------------------------------------


def quantize(request: QuantizeRequest, *, progress: Progress) -> CheckpointManifest:
    """Write the checkpoint and its manifest. Raises CheckpointError when the bytes don't earn the label."""
    out = Path(request.out)
    reset_peak_resident_bytes()
    before, start = resident_bytes_now(), time.perf_counter()
    progress("quantizing")
    with telling_of_full_disk(out):
        notes = request.quantizer.quantize(
            Path(request.source_folder), out, device=request.device, progress=progress
        )
    seconds = time.perf_counter() - start
    peak = max(0, peak_resident_bytes() - before)
    progress("hashing and counting what is on disk")
    try:
        manifest = build_manifest(
            out,
            quantizer=request.quantizer,
            source=request.source,
            seconds=seconds,
            peak_memory_bytes=peak,
            notes=notes,
        )
        check_earned_label(manifest, quantizer=request.quantizer)
    except CheckpointError:
        forget(out)  # what is refused isn't worth going on with
        raise
    write_manifest(out, manifest)
    forget(out)
    return manifest


def random_variant(request: RandomVariantRequest, *, progress: Progress) -> CheckpointManifest:
    """Write config, seed and manifest; no weight is made. Raises CheckpointError as `quantize` does."""
    out = Path(request.out)
    reset_peak_resident_bytes()
    before, start = resident_bytes_now(), time.perf_counter()
    progress("counting what will be quantized")
    write_random_variant(request.config, out=out, seed=request.seed, quantizer=request.quantizer)
    manifest = random_manifest(out, quantizer=request.quantizer, source=request.source)
    manifest = manifest.model_copy(
        update={
            "seconds": time.perf_counter() - start,
            "peak_memory_bytes": max(0, peak_resident_bytes() - before),
        }
    )
    check_earned_label(manifest, quantizer=request.quantizer)
    write_manifest(out, manifest)
    return manifest


# --- speed -----------------------------------------------------------------------------------------------


class SpeedSession:
    """The worker's side of the speed stage: one loaded variant that runs a batch when it has the turn."""

    def __init__(self, request: SpeedRequest) -> None:
        request.checkpoint.engine.import_libraries()  # before the first reading, because libraries are no weights
        reset_peak_resident_bytes()
        before = resident_bytes_now()
        self._session = request.checkpoint.open()
        if is_random(Path(request.checkpoint.folder)):
            self._session.reset_peak()  # drawing weights takes memory that loading a checkpoint wouldn't
        after = resident_bytes_now()
        self._meter = energy_meter(request.checkpoint.device)
        self._shape: SpeedShape | None = None
        self._choices: dict[SpeedShape, ExecutionChoice | None] = {}
        memory = self._session.memory()
        self.opened = SpeedOpened(
            compute_dtype=self._session.compute_dtype,
            execution=self._session.execution,
            weight_bytes_resident=memory.weight_bytes_resident,
            weight_bytes_copied=memory.weight_bytes_copied,
            process_bytes_before_load=before,
            process_bytes_after_load=after,
            peak_load_bytes=memory.peak_bytes,
            energy_source=self._meter.source,
        )

    def answer(self, question: str) -> TurnResult:
        """The same for a `SpeedQuestion` as JSON."""
        asked = SpeedQuestion.model_validate_json(question)
        return self.run(asked.shape, seed=asked.seed)

    def run(self, shape: SpeedShape, *, seed: int) -> TurnResult:
        """One timed generation with fresh prompts; memory that another shape left is handed back before.

        Where the session has two ways to run, a shape's first turn begins with the choice between them.
        """
        if shape != self._shape:
            self._session.release()
            self._shape = shape
            self._choose(shape, seed=seed)
        turn = take_turn(self._session, shape=shape, seed=seed, clock=time.perf_counter, meter=self._meter)
        return turn.model_copy(update={"choice": self._choices[shape]})

    def _choose(self, shape: SpeedShape, *, seed: int) -> None:
        """Measure once a shape; a compiler that wasn't ready in time isn't waited for again."""
        session = self._session
        unfinished = (made for made in self._choices.values() if made and made.outcome == "unfinished")
        given_up = next(unfinished, None)
        if shape in self._choices or given_up:
            choice = self._choices.setdefault(shape, given_up)
            session.run_as(choice.kept if choice else session.executions[0])
        else:
            self._choices[shape] = choose_execution(session, shape=shape, seed=seed, clock=time.perf_counter)


def take_turn(
    session: Session, *, shape: SpeedShape, seed: int, clock: Clock, meter: EnergyMeter
) -> TurnResult:
    """One timed generation of a loaded session with fresh prompts; what goes wrong is a result."""
    prompts = random_prompts(
        batch_size=shape.batch_size,
        prompt_tokens=shape.prompt_tokens,
        vocabulary_tokens=session.vocabulary_tokens,
        seed=seed,
    )
    session.reset_peak()
    try:
        before_joules = meter.read_joules()
        trace = time_generation(
            session,
            prompts=prompts,
            new_tokens=shape.new_tokens,
            clock=clock,
            chunk_tokens=shape.chunk_tokens,
        )
        after_joules = meter.read_joules()
        memory = session.memory()
    except Exception as error:  # noqa: BLE001  (classified and reported as this row's outcome)
        session.release()
        reason: Literal["out_of_memory", "failed"] = "out_of_memory" if is_out_of_memory(error) else "failed"
        return TurnResult(outcome=reason, because=f"{type(error).__name__}: {first_line(error)}")
    energy_j = joules_of_work(
        meter, before_joules=before_joules, after_joules=after_joules, seconds=trace.token_times_s[-1]
    )
    return TurnResult(
        outcome="measured", trace=trace.model_copy(update={"energy_j": energy_j}), memory=memory
    )


def first_line(error: BaseException) -> str:
    """The start of an exception's text, for a message on one line."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"


# --- quality ---------------------------------------------------------------------------------------------


def quality(request: QualityStageRequest, *, progress: Progress) -> QualityResult:
    """Load the checkpoint through transformers and evaluate every task on it.

    Where another engine is timed, both run one text before that, so that what fails there costs no evaluation; one
    after the other, because two copies of the weights needn't fit. Raises as that engine's `open` does.
    """
    checkpoint, folder = request.checkpoint, Path(request.checkpoint.folder)
    reference = Transformers(compute_dtype=request.compute_dtype)
    progress("loading tasks")
    tasks = prepare_tasks(request.quality)  # before hours of loading and answering
    timed = None if checkpoint.engine.kind == reference.kind else _text_by(checkpoint, progress=progress)
    held = (
        read_windows(request.distribution, folder=folder) if request.distribution else None
    )  # before hours of tasks
    progress("loading")
    session = reference.open(folder, quantizer=checkpoint.quantizer, device=checkpoint.device)
    agreement = None
    if timed is not None:
        progress(f"comparing {checkpoint.engine.kind} with {reference.kind}")
        expected = observe(session, tokens=timed.tokens)
        agreement = compare(
            expected, timed.observed, reference_engine=reference.kind, engine=checkpoint.engine.kind
        )
    result = evaluate(
        session.model,
        tokenizer_folder=folder,
        request=request.quality,
        compute_dtype=request.compute_dtype,
        device=checkpoint.device,
        progress=progress,
        journal=AnswerJournal(Path(request.answers), tell=_log) if request.answers else None,
        stopping=request.stopping,
        tasks=tasks,
    )
    distribution = (
        measure_distribution(
            session.model,
            held,
            request=request.distribution,
            batch_size=request.quality.batch_size,
            progress=progress,
        )
        if held and request.distribution
        else None
    )
    return result.model_copy(update={"agreement": agreement, "distribution": distribution})


def reference(request: ReferenceRequest, *, progress: Progress) -> Reference:
    """Load the checkpoint as `quality` does and write its distribution. Raises StageError when it isn't finite."""
    checkpoint, folder = request.checkpoint, Path(request.checkpoint.folder)
    held = read_windows(request.distribution, folder=folder)
    progress("loading")
    session = Transformers(compute_dtype=request.compute_dtype).open(
        folder, quantizer=checkpoint.quantizer, device=checkpoint.device
    )
    with telling_of_full_disk(Path(request.out)):
        return write_reference(
            session.model,
            held,
            folder=Path(request.out),
            key=request.distribution.reference_key,
            batch_size=request.batch_size,
            progress=progress,
        )


class _Timed(NamedTuple):
    """What the timed engine makes of the text."""

    tokens: tuple[int, ...]
    observed: Observed


def _text_by(checkpoint: RunnableCheckpoint, *, progress: Progress) -> _Timed:
    progress(f"loading into {checkpoint.engine.kind}")
    with checkpoint.open() as session:
        tokens = text_tokens(Path(checkpoint.folder), vocabulary_tokens=session.vocabulary_tokens)
        return _Timed(tokens=tokens, observed=observe(session, tokens=tokens))


# --- device ----------------------------------------------------------------------------------------------


class DeviceSpeedRequest(Value):
    """Which device's limits to measure, for which arithmetic types."""

    device: str
    dtypes: tuple[str, ...]


def device_speed(request: DeviceSpeedRequest, *, progress: Progress) -> DeviceSpeed:
    """Read bandwidth and matrix FLOP/s of the device, now."""
    progress("measuring memory bandwidth and FLOP/s")
    return measure_device_speed(request.device, dtypes=request.dtypes)
