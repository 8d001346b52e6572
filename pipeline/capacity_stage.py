"""The capacity stage: the largest batch that really runs prefill and decode at full length within the budget.

    result = measure_capacity(request, log=folder / "stages.log", progress=print)

The search stays in this process, the probes run in a worker. A worker that dies in a probe has shown that the batch
doesn't fit, and the next probe gets a fresh one; as long as it lives it is used again, because loading takes longer
than a probe.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

from pipeline.capacity_probe import CapacityOpened, CapacityRequest, ProbeQuestion
from pipeline.capacity_results import CapacityProbe, CapacityResult, Layout, MemorySplit, PeakPrediction
from pipeline.errors import StageError
from pipeline.processes import Conversation, WorkerError
from pipeline.stages import Progress


class ProbingWorker(Protocol):
    """A loaded variant that answers probes."""

    opened: CapacityOpened

    def probe(self, question: ProbeQuestion) -> CapacityProbe:
        """One try. Raises WorkerError when the worker dies of it."""


AIMS = 4
"""Times that a search trusts the line through two peaks; peaks of small batches are noisy on a CPU."""
OpenWorker = Callable[[], AbstractContextManager[ProbingWorker]]


class CapacityWorker(Conversation):
    """The variant in a process of its own."""

    def __init__(self, request: CapacityRequest, *, log: Path, progress: Progress) -> None:
        super().__init__("capacity", request, log=log, progress=progress)
        self.opened = CapacityOpened.model_validate_json(self.opened_json)

    def probe(self, question: ProbeQuestion) -> CapacityProbe:
        """One try. Raises WorkerError when the process ends instead of answering."""
        return self.ask(question, CapacityProbe, progress=lambda _: None)


def measure_capacity(request: CapacityRequest, *, log: Path, progress: Progress) -> CapacityResult:
    """Load the variant and search. Raises StageError when it can't be loaded, or as `capacity_of` does."""

    def worker() -> CapacityWorker:
        return CapacityWorker(request, log=log, progress=progress)

    return capacity_of(worker, request=request, progress=progress)


def capacity_of(worker: OpenWorker, *, request: CapacityRequest, progress: Progress) -> CapacityResult:
    """The same with a way to get a worker.

    Raises StageError when a batch fails for another reason than memory. A paged cache that fails is a result that
    says so: the contiguous one stands.
    """
    with _Workers(worker) as workers:
        result = _search("contiguous", workers, request=request, progress=progress)
        if request.paged is None:
            return result
        try:
            paged = _search("paged", workers, request=request, progress=progress)
        except StageError as error:
            update = {"limited_by": "failure", "because": str(error), "measured_sequences": None}
            of_contiguous = ("predicted_sequences", "predicted_peak", "memory")
            slopes = ("peak_bytes_per_sequence", "peak_bytes_per_sequence_predicted")
            blank = {**dict.fromkeys((*of_contiguous, *slopes)), "probes": (), "notes": ()}
            blank["kv_bytes_per_sequence_predicted"] = request.paged.kv_bytes_per_sequence_predicted
            paged = result.model_copy(
                update={"layout": "paged", "kv_bytes_per_sequence": None, **update, **blank}
            )
        return result.model_copy(update={"paged": paged})


def is_whole(result: CapacityResult) -> bool:
    """Whether every layout was measured. A paged cache that failed is tried again: its reason may be mended."""
    return result.paged is None or result.paged.limited_by != "failure"


def _search(
    layout: Layout, workers: _Workers, *, request: CapacityRequest, progress: Progress
) -> CapacityResult:
    prober = _Prober(layout, workers, request=request, progress=progress)
    ceiling = min(request.max_sequences, request.checkpoint.engine.most_sequences or request.max_sequences)
    if layout == "paged":
        assert request.paged is not None
        # A sequence decodes a token a step, prompts need some of them too, and more sequences than this never overlap
        # (`overlapping_answer_tokens`).
        step, prompt = request.paged.max_batch_tokens, request.context_tokens - request.new_tokens
        ceiling = min(ceiling, max(1, min(step // 2, (prompt - 2) * step // prompt)))
    found = 0
    if prober.fits(1):
        start = _first_guess(prober) if ceiling > 1 else 1
        found = largest_that_fits(prober.fits, start=start, ceiling=ceiling, between=prober.between)
        ran = _upper_half(prober.probes)
        if found > 2 and 4 * (found - ran[0][0]) < found:  # too near for a slope
            prober((found + 1) // 2)
    return _result(prober, found=found, ceiling=ceiling, opened=workers.opened)


def largest_that_fits(
    fits: Callable[[int], bool],
    *,
    start: int,
    ceiling: int,
    between: Callable[[int, int], int | None] = lambda _low, _high: None,
) -> int:
    """Largest count in 1 … ceiling for which `fits` is true, when 1 is known to fit.

    Gallops away from `start` until the limit is enclosed, then bisects; `between` may know a better place between one
    that fits and one that doesn't, and is asked `AIMS` times at most.
    """
    low, high, stride, probe = 1, ceiling + 1, 1, start
    grown = shrunk = False
    aims = AIMS
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
        if aims and (aim := between(low, high)) is not None:
            probe, stride, aims = aim, 1, aims - 1
    return low


def _first_guess(prober: _Prober) -> int:
    """Where to start the search: what is left after two sequences, at what the second one added."""
    one, two = prober(1), prober(2)
    if two.outcome != "measured" or one.peak_bytes is None or two.peak_bytes is None:
        return 1
    added = max(two.peak_bytes - one.peak_bytes, (two.kv_cache_bytes or 0) // 2, 1)
    return 2 + max(0, prober.request.budget_bytes - two.peak_bytes) // added


class _Workers:
    """One worker at a time: opened when it is needed, used as long as it lives."""

    def __init__(self, open_worker: OpenWorker) -> None:
        self._open_worker = open_worker
        self._stack = ExitStack()
        self._worker: ProbingWorker | None = None
        self._opened: CapacityOpened | None = None

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    @property
    def opened(self) -> CapacityOpened:
        """Facts of the first worker."""
        assert self._opened is not None, "a probe comes first"
        return self._opened

    def alive(self) -> ProbingWorker:
        """A loaded worker. Raises WorkerError when the variant can't be loaded."""
        if self._worker is None:
            self._worker = self._stack.enter_context(self._open_worker())
            self._opened = self._opened or self._worker.opened
        return self._worker

    def drop(self) -> None:
        """End the worker that there is."""
        self._worker = None
        self._stack.close()


class _Prober:
    """Asks for one batch and keeps every try."""

    def __init__(
        self, layout: Layout, workers: _Workers, *, request: CapacityRequest, progress: Progress
    ) -> None:
        self.layout, self.request = layout, request
        self.probes: list[CapacityProbe] = []
        self._workers, self._progress = workers, progress

    def between(self, low: int, high: int) -> int | None:
        """Where the budget ends on the line through the peaks of these two; None where one isn't known."""
        peaks = {probe.sequences: probe.peak_bytes for probe in self.probes}
        below, above = peaks.get(low), peaks.get(high)
        if below is None or above is None or above <= below:
            return None
        return low + (self.request.budget_bytes - below) * (high - low) // (above - below)

    def fits(self, sequences: int) -> bool:
        """Whether so many ran within the budget."""
        return self(sequences).outcome == "measured"

    def __call__(self, sequences: int) -> CapacityProbe:
        """The try, or the one made before. Raises StageError when it failed for another reason than memory."""
        known = next((probe for probe in self.probes if probe.sequences == sequences), None)
        if known:
            return known
        kind = " in a paged cache" if self.layout == "paged" else ""
        self._progress(f"holding {sequences} sequences of {self.request.context_tokens} tokens{kind}")
        worker = self._workers.alive()
        try:
            probe = worker.probe(ProbeQuestion(sequences=sequences, layout=self.layout))
        except WorkerError as error:
            self._workers.drop()
            probe = self._lost(sequences, error)
        self.probes.append(probe)
        if probe.outcome == "failed":
            raise StageError(f"holding {sequences} sequences failed: {probe.because}")
        return probe

    def _lost(self, sequences: int, error: WorkerError) -> CapacityProbe:
        """What the death of a worker says of its batch: killed or refused memory, it was too large.

        Native code that isn't given its memory may also crash with a signal. That is taken for the same where a
        smaller batch ran; on the first one it is a bug. One that was told to end says nothing of its batch.
        """
        smaller_ran = any(
            probe.outcome == "measured" and probe.sequences < sequences for probe in self.probes
        )
        if error.reason == "out_of_memory":
            return CapacityProbe(sequences=sequences, outcome="out_of_memory", because=str(error))
        if error.crashed and smaller_ran:
            because = f"{error}; smaller batches ran, so this is taken for memory that ran out"
            return CapacityProbe(sequences=sequences, outcome="out_of_memory", because=because)
        return CapacityProbe(sequences=sequences, outcome="failed", because=str(error))


def _result(prober: _Prober, *, found: int, ceiling: int, opened: CapacityOpened) -> CapacityResult:
    request = prober.request
    kv_predicted = request.kv_bytes_per_sequence_predicted
    if prober.layout == "paged" and request.paged:
        kv_predicted = request.paged.kv_bytes_per_sequence_predicted
    predicted_peak = opened.predicted_peak if prober.layout == "contiguous" else None
    at_ceiling = found == ceiling
    kv_bytes = _kv_bytes_each(prober.probes)
    slope = _peak_slope(prober.probes)
    return CapacityResult(
        layout=prober.layout,
        engine=request.checkpoint.engine.kind,
        context_tokens=request.context_tokens,
        budget_bytes=request.budget_bytes,
        budget_source=request.budget_source,
        weight_bytes_resident=opened.weight_bytes_resident,
        kv_bytes_per_sequence=kv_bytes,
        kv_bytes_per_sequence_predicted=kv_predicted,
        predicted_peak=predicted_peak,
        predicted_sequences=_predicted_sequences(
            request.budget_bytes - opened.weight_bytes_resident,
            predicted_peak=predicted_peak,
            kv_bytes=kv_predicted or kv_bytes,
        ),
        measured_sequences=found,
        peak_bytes_per_sequence=slope.bytes_per_sequence if slope else None,
        peak_bytes_per_sequence_predicted=(
            predicted_peak.bytes_per_sequence_between(slope.few, slope.many)
            if slope and predicted_peak
            else None
        ),
        memory=_split(prober.probes, found=found, opened=opened),
        limited_by="ceiling" if at_ceiling else "memory",
        because=_why_limited(prober, at_ceiling=at_ceiling, ceiling=ceiling),
        notes=opened.notes,
        probes=tuple(prober.probes),
    )


def _kv_bytes_each(probes: list[CapacityProbe]) -> int | None:
    """Cache of one more sequence: what a pool holds beside is no sequence's."""
    held = sorted((p.sequences, p.kv_cache_bytes) for p in probes if p.kv_cache_bytes)
    if not held:
        return None
    (few, low), (many, high) = held[0], held[-1]
    return (high - low) // (many - few) if many > few else low // few


def _predicted_sequences(
    free_bytes: int, *, predicted_peak: PeakPrediction | None, kv_bytes: int | None
) -> int | None:
    """How many fit beside the weights; by their cache alone where activations aren't predicted."""
    if predicted_peak:
        return predicted_peak.sequences_within(free_bytes)
    return max(0, free_bytes // kv_bytes) if kv_bytes else None


class _PeakSlope(NamedTuple):
    """What one more sequence takes between two batches that ran."""

    few: int
    many: int
    bytes_per_sequence: float


def _peak_slope(probes: list[CapacityProbe]) -> _PeakSlope | None:
    """Between the outermost of the upper half of the batches that ran; None unless there are two.

    The peak of a small batch may lie elsewhere: quanto, for one, dequantizes a weight for its product, and while
    activations are smaller than that weight, more sequences hardly raise the peak.
    """
    ran = _upper_half(probes)
    if len(ran) < 2:
        return None
    (few, low), (many, high) = ran[0], ran[-1]
    return _PeakSlope(few, many, (high - low) / (many - few))


def _upper_half(probes: list[CapacityProbe]) -> list[tuple[int, int]]:
    """(sequences, peak) of the batches that ran with at least half as many as the largest that did, ascending."""
    ran = sorted((p.sequences, p.peak_bytes) for p in probes if p.outcome == "measured" and p.peak_bytes)
    return [(sequences, peak) for sequences, peak in ran if 2 * sequences >= ran[-1][0]]


def _split(probes: list[CapacityProbe], *, found: int, opened: CapacityOpened) -> MemorySplit | None:
    """What the peak of the largest batch was made of."""
    probe = next((probe for probe in probes if probe.sequences == found), None)
    if probe is None or probe.peak_bytes is None or probe.kv_cache_bytes is None:
        return None
    weights = opened.weight_bytes_resident
    return MemorySplit(
        sequences=found,
        weight_bytes=weights,
        kv_cache_bytes=probe.kv_cache_bytes,
        activation_bytes=probe.peak_bytes - weights - probe.kv_cache_bytes,
        reserve_bytes=probe.reserve_bytes,
        process_bytes=opened.process_bytes,
    )


def _why_limited(prober: _Prober, *, at_ceiling: bool, ceiling: int) -> str:
    if at_ceiling and ceiling < prober.request.max_sequences and prober.layout == "contiguous":
        return f"engine {prober.request.checkpoint.engine.kind} runs at most {ceiling} sequences at once"
    if at_ceiling and ceiling < prober.request.max_sequences:
        return f"half of traffic.max_batch_tokens ({ceiling}) was reached; more was not tried"
    if at_ceiling:
        return f"the recipe's capacity.max_sequences ({ceiling}) was reached; more was not tried"
    failed = [probe for probe in prober.probes if probe.outcome == "out_of_memory"]
    return min(failed, key=lambda probe: probe.sequences).because if failed else ""
