"""The stages: a request in, a result out, each run in a process of its own.

    manifest = quantize(QuantizeRequest(...))
    result = capacity(CapacityRequest(...), progress=print)

Every stage works on the checkpoint read back from disk. Out of memory is a result, not a crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pipeline.alternation import TurnResult
from pipeline.capacity_results import CapacityProbe, CapacityResult
from pipeline.checkpoint import build_manifest, check_earned_label, write_manifest
from pipeline.energy import EnergyMeter, energy_meter, joules_of_work
from pipeline.engines.base import Session
from pipeline.errors import StageError
from pipeline.hardware import measure_device_speed
from pipeline.measure import Clock, random_prompts, time_generation
from pipeline.process_memory import (
    peak_resident_bytes,
    reset_peak_resident_bytes,
    resident_bytes_now,
    return_freed_memory,
)
from pipeline.quality import QualityRequest, evaluate
from pipeline.random_weights import write_random_checkpoint
from pipeline.recipe import AnyEngine, AnyQuantizer
from pipeline.results import CheckpointManifest, QualityResult, SourceRecord
from pipeline.speed_results import DeviceSpeed, SpeedShape
from pipeline.values import Value

Progress = Callable[[str], None]


class QuantizeRequest(Value):
    """Source folder → checkpoint in the (empty) folder `out`."""

    source_folder: str
    source: SourceRecord
    quantizer: AnyQuantizer
    device: str
    out: str


class RunnableCheckpoint(Value):
    """A finished checkpoint and how to run it."""

    folder: str
    quantizer: AnyQuantizer
    engine: AnyEngine
    device: str


class SpeedRequest(Value):
    """What a speed worker loads; the shapes that it runs come turn by turn."""

    checkpoint: RunnableCheckpoint


class SpeedOpened(Value):
    """Facts of a loaded speed worker."""

    compute_dtype: str
    execution: str
    weight_bytes_resident: int
    process_bytes_before_load: int
    process_bytes_after_load: int
    peak_load_bytes: int
    energy_source: str


class SpeedQuestion(Value):
    """One turn: which shape, with prompts from which seed."""

    shape: SpeedShape
    seed: int


class CapacityRequest(Value):
    """How many sequences of `context_tokens` (prompt and new tokens together) fit into the budget."""

    checkpoint: RunnableCheckpoint
    context_tokens: int
    new_tokens: int
    budget_bytes: int
    budget_source: str
    max_sequences: int
    kv_bytes_per_sequence_predicted: int | None


class QualityStageRequest(Value):
    """lm-eval tasks on a checkpoint."""

    checkpoint: RunnableCheckpoint
    compute_dtype: Literal["float32", "bfloat16", "float16"]
    quality: QualityRequest


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a CPU or a GPU; plain bugs are not taken for it."""
    if isinstance(error, MemoryError) or type(error).__name__ in (
        "OutOfMemoryError",
        "AcceleratorOutOfMemoryError",
    ):
        return True
    text = str(error).lower()
    said = ("not enough memory", "out of memory", "cannot allocate memory", "can't allocate memory")
    return isinstance(error, (RuntimeError, OSError)) and any(phrase in text for phrase in said)


# --- quantize --------------------------------------------------------------------------------------------


def quantize(request: QuantizeRequest, *, progress: Progress) -> CheckpointManifest:
    """Write the checkpoint and its manifest. Raises CheckpointError when the bytes don't earn the label."""
    out = Path(request.out)
    reset_peak_resident_bytes()
    before, start = resident_bytes_now(), time.perf_counter()
    progress("quantizing")
    notes = request.quantizer.quantize(Path(request.source_folder), out, device=request.device)
    seconds = time.perf_counter() - start
    peak = max(0, peak_resident_bytes() - before)
    progress("hashing and counting what is on disk")
    manifest = build_manifest(
        out,
        quantizer=request.quantizer,
        source=request.source,
        seconds=seconds,
        peak_memory_bytes=peak,
        notes=notes,
    )
    check_earned_label(manifest, quantizer=request.quantizer)
    write_manifest(out, manifest)
    return manifest


# --- speed -----------------------------------------------------------------------------------------------


class SpeedSession:
    """The worker's side of the speed stage: one loaded variant that runs a batch when it has the turn."""

    def __init__(self, request: SpeedRequest) -> None:
        # Imported before the first reading, because libraries are no weights.
        import torch  # noqa: F401
        import transformers.modeling_utils  # noqa: F401

        reset_peak_resident_bytes()
        before = resident_bytes_now()
        self._session = _open(request.checkpoint)
        after = resident_bytes_now()
        self._meter = energy_meter(request.checkpoint.device)
        self.opened = SpeedOpened(
            compute_dtype=self._session.compute_dtype,
            execution=self._session.execution,
            weight_bytes_resident=self._session.memory().weight_bytes_resident,
            process_bytes_before_load=before,
            process_bytes_after_load=after,
            peak_load_bytes=self._session.memory().peak_bytes,
            energy_source=self._meter.source,
        )

    def answer(self, question: str) -> TurnResult:
        """The same for a `SpeedQuestion` as JSON."""
        asked = SpeedQuestion.model_validate_json(question)
        return self.run(asked.shape, seed=asked.seed)

    def run(self, shape: SpeedShape, *, seed: int) -> TurnResult:
        """One timed generation with fresh prompts."""
        return take_turn(self._session, shape=shape, seed=seed, clock=time.perf_counter, meter=self._meter)


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
    session.release()
    session.reset_peak()
    try:
        before_joules = meter.read_joules()
        trace = time_generation(session, prompts=prompts, new_tokens=shape.new_tokens, clock=clock)
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


def _open(checkpoint: RunnableCheckpoint) -> Session:
    return checkpoint.engine.open(
        Path(checkpoint.folder), quantizer=checkpoint.quantizer, device=checkpoint.device
    )


# --- capacity --------------------------------------------------------------------------------------------


def capacity(request: CapacityRequest, *, progress: Progress) -> CapacityResult:
    """Find the largest batch that really runs prefill and decode at full length within the budget."""
    return capacity_of(_open(request.checkpoint), request=request, progress=progress)


def capacity_of(session: Session, *, request: CapacityRequest, progress: Progress) -> CapacityResult:
    """The same of a loaded session. Raises StageError when a batch fails for another reason than memory."""
    prober = _Prober(session, request=request)
    weights = session.memory().weight_bytes_resident
    first = prober(1, progress=progress)
    kv_bytes = prober.kv_bytes_per_sequence
    per_sequence = request.kv_bytes_per_sequence_predicted or kv_bytes
    predicted = max(0, (request.budget_bytes - weights) // per_sequence) if per_sequence else None
    found = 0
    if first.outcome == "measured":
        found = largest_that_fits(
            lambda count: prober(count, progress=progress).outcome == "measured",
            start=_first_guess(prober, progress=progress) if request.max_sequences > 1 else 1,
            ceiling=request.max_sequences,
        )
    failed = next((probe for probe in prober.probes if probe.outcome == "failed"), None)
    if failed:
        raise StageError(f"holding {failed.sequences} sequences failed: {failed.because}")
    at_ceiling = found == request.max_sequences
    return CapacityResult(
        context_tokens=request.context_tokens,
        budget_bytes=request.budget_bytes,
        budget_source=request.budget_source,
        weight_bytes_resident=weights,
        kv_bytes_per_sequence=kv_bytes,
        kv_bytes_per_sequence_predicted=request.kv_bytes_per_sequence_predicted,
        predicted_sequences=predicted,
        measured_sequences=found,
        peak_bytes_per_sequence=_slope(prober.probes),
        limited_by="ceiling" if at_ceiling else "memory",
        because=_why_limited(prober.probes, at_ceiling=at_ceiling, ceiling=request.max_sequences),
        probes=tuple(prober.probes),
    )


def _first_guess(prober: _Prober, *, progress: Progress) -> int:
    """Where to start the search: what is left after two sequences, at what the second one added."""
    one, two = prober(1, progress=progress), prober(2, progress=progress)
    if two.outcome != "measured" or one.peak_bytes is None or two.peak_bytes is None:
        return 1
    added = max(two.peak_bytes - one.peak_bytes, prober.kv_bytes_per_sequence, 1)
    return 2 + max(0, prober.budget_bytes - two.peak_bytes) // added


def _slope(probes: list[CapacityProbe]) -> float | None:
    """Bytes that one more sequence takes; None unless two batches ran."""
    ran = sorted((p.sequences, p.peak_bytes) for p in probes if p.outcome == "measured" and p.peak_bytes)
    if len(ran) < 2:
        return None
    (few, low), (many, high) = ran[0], ran[-1]
    return (high - low) / (many - few)


def largest_that_fits(fits: Callable[[int], bool], *, start: int, ceiling: int) -> int:
    """Largest count in 1 … ceiling for which `fits` is true, when 1 is known to fit.

    Gallops away from `start` until the limit is enclosed, then bisects.
    """
    low, high, stride, probe = 1, ceiling + 1, 1, start
    grown = shrunk = False
    while high - low > 1:
        probe = min(max(probe, low + 1), high - 1)
        if fits(probe):
            low, grown = probe, True
            probe = low + stride
        else:
            high, shrunk = probe, True
            probe = high - stride
        stride *= 2
        if grown and shrunk:
            probe = (low + high) // 2
    return low


def _why_limited(probes: list[CapacityProbe], *, at_ceiling: bool, ceiling: int) -> str:
    if at_ceiling:
        return f"the recipe's capacity.max_sequences ({ceiling}) was reached; more was not tried"
    failed = [probe for probe in probes if probe.outcome == "out_of_memory"]
    return min(failed, key=lambda probe: probe.sequences).because if failed else ""


class _Prober:
    """Runs one batch at full length and says whether it stayed within the budget; keeps every try."""

    def __init__(self, session: Session, *, request: CapacityRequest) -> None:
        self._session = session
        self._request = request
        self.budget_bytes = request.budget_bytes
        self.probes: list[CapacityProbe] = []
        # One tiny batch brings every weight into memory and fills the libraries' own buffers, so that what
        # the process holds beside the weights afterwards is not counted as cache or activations.
        session.prefill([[0, 0]], new_tokens=2)
        session.decode_step()
        session.release()
        return_freed_memory()
        self._weights = session.memory().weight_bytes_resident
        self._idle = resident_bytes_now()
        self.kv_bytes_per_sequence = 0

    def __call__(self, sequences: int, *, progress: Progress) -> CapacityProbe:
        known = next((probe for probe in self.probes if probe.sequences == sequences), None)
        if known:
            return known
        progress(f"holding {sequences} sequences of {self._request.context_tokens} tokens")
        probe = self._probe(sequences)
        self.probes.append(probe)
        return probe

    def _probe(self, sequences: int) -> CapacityProbe:
        request, session = self._request, self._session
        prompts = random_prompts(
            batch_size=sequences,
            prompt_tokens=request.context_tokens - request.new_tokens,
            vocabulary_tokens=session.vocabulary_tokens,
            seed=sequences,
        )
        session.release()
        return_freed_memory()  # a larger probe before this one must not count
        session.reset_peak()
        try:
            session.prefill(prompts, new_tokens=request.new_tokens)
            for _ in range(request.new_tokens - 1):
                session.decode_step()
            session.synchronize()
            memory = session.memory()
        except Exception as error:  # noqa: BLE001  (out of memory is a result; anything else fails the stage)
            session.release()
            outcome: Literal["out_of_memory", "failed"] = (
                "out_of_memory" if is_out_of_memory(error) else "failed"
            )
            because = f"{type(error).__name__}: {first_line(error)}"
            return CapacityProbe(sequences=sequences, outcome=outcome, because=because)
        self.kv_bytes_per_sequence = (memory.kv_cache_bytes or 0) // sequences
        session.release()
        used = memory.peak_bytes
        if request.checkpoint.device == "cpu":
            used = self._weights + max(0, memory.peak_bytes - self._idle)
        if used > request.budget_bytes:
            because = f"{sequences} sequences need {used:,} B, the budget is {request.budget_bytes:,} B"
            return CapacityProbe(
                sequences=sequences, outcome="out_of_memory", because=because, peak_bytes=used
            )
        return CapacityProbe(sequences=sequences, outcome="measured", peak_bytes=used)


# --- quality ---------------------------------------------------------------------------------------------


def quality(request: QualityStageRequest, *, progress: Progress) -> QualityResult:
    """Load the checkpoint and evaluate every task on it."""
    checkpoint = request.checkpoint
    progress("loading")
    model = checkpoint.quantizer.load(
        Path(checkpoint.folder), device=checkpoint.device, compute_dtype=request.compute_dtype
    )
    return evaluate(
        model,
        tokenizer_folder=Path(checkpoint.folder),
        request=request.quality,
        compute_dtype=request.compute_dtype,
        device=checkpoint.device,
        progress=progress,
    )


# --- device and random weights ---------------------------------------------------------------------------


class DeviceSpeedRequest(Value):
    """Which device's limits to measure, for which arithmetic types."""

    device: str
    dtypes: tuple[str, ...]


def device_speed(request: DeviceSpeedRequest, *, progress: Progress) -> DeviceSpeed:
    """Read bandwidth and matrix FLOP/s of the device, now."""
    progress("measuring memory bandwidth and FLOP/s")
    return measure_device_speed(request.device, dtypes=request.dtypes)


class RandomSourceRequest(Value):
    """A model made from its config: every tensor drawn from a seeded normal distribution."""

    config: dict[str, Any]
    seed: int
    out: str
    shard_bytes: int = 2_000_000_000


class RandomSource(Value):
    """What was written."""

    files: tuple[str, ...]
    parameters: int


def random_source(request: RandomSourceRequest, *, progress: Progress) -> RandomSource:
    """Write a checkpoint of random 16-bit weights shard by shard; never more than one shard in memory."""
    written = write_random_checkpoint(
        request.config,
        out=Path(request.out),
        seed=request.seed,
        shard_bytes=request.shard_bytes,
        progress=progress,
    )
    return RandomSource(files=written.files, parameters=written.parameters)
