"""The worker's side of the capacity stage: a loaded variant that tries to hold so many sequences, and says how it went.

Every try really runs prefill and decode at full length. On a CPU it runs under a limit of the system's, so that one
far over the budget is refused its memory instead of taking the machine down.

    session = CapacitySession(request)
    session.probe(ProbeQuestion(sequences=8)).outcome
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pipeline.capacity_results import CapacityProbe, Layout, PeakPrediction
from pipeline.engines.base import ServingSession, Session, SessionMemory
from pipeline.errors import StageError
from pipeline.hardware import available_memory_bytes
from pipeline.measure import random_prompts
from pipeline.process_memory import (
    private_bytes_now,
    private_memory_limit,
    resident_bytes_now,
    return_freed_memory,
    return_large_blocks_at_once,
)
from pipeline.scheduler import Serving
from pipeline.stages import RunnableCheckpoint, first_line, is_out_of_memory
from pipeline.values import Value

SLACK_BYTES = 256_000_000
"""What a probe may ask for beyond the budget before it is refused: thread stacks, buffers, pages never touched."""

WARM_UP_TOKENS = 512


class PagedCache(Value):
    """The paged layout: as in `scheduler.Serving`, with a pool that just holds the sequences of a probe."""

    block_tokens: int
    max_batch_tokens: int
    kv_bytes_per_sequence_predicted: int | None

    def blocks(self, tokens: int) -> int:
        """Blocks that a sequence fills."""
        return -(-tokens // self.block_tokens)


class CapacityRequest(Value):
    """How many sequences of `context_tokens` (prompt and new tokens together) fit into the budget."""

    checkpoint: RunnableCheckpoint
    context_tokens: int
    new_tokens: int
    budget_bytes: int
    budget_source: str
    max_sequences: int
    kv_bytes_per_sequence_predicted: int | None
    paged: PagedCache | None = None


class ProbeQuestion(Value):
    """One try."""

    sequences: int
    layout: Layout = "contiguous"


class CapacityOpened(Value):
    """Facts of a loaded variant. `limit_bytes` is how much probes may take beside the idle process, if limited."""

    weight_bytes_resident: int
    process_bytes: int
    predicted_peak: PeakPrediction | None
    limit_bytes: int | None
    notes: tuple[str, ...]


class CapacitySession:
    """One loaded variant in a process of its own."""

    def __init__(self, request: CapacityRequest, *, session: Session | None = None) -> None:
        """`session` is one that is loaded already; by default the request's checkpoint is."""
        predicted, not_predicted = None, ""
        if session is None:
            return_large_blocks_at_once()
            predicted, not_predicted = _predicted(request)
        self._session = session or request.checkpoint.open()
        self._request = request
        self._warm_up()
        self._weights = self._session.memory().weight_bytes_resident
        self._idle = idle = resident_bytes_now()
        self._limit, not_limited = self._private_limit()
        on_cpu = request.checkpoint.device == "cpu"
        idle_private = private_bytes_now()
        self.opened = CapacityOpened(
            weight_bytes_resident=self._weights,
            process_bytes=max(0, idle - self._weights) if on_cpu else idle,
            predicted_peak=predicted,
            limit_bytes=self._limit - idle_private if self._limit is not None and idle_private else None,
            notes=tuple(note for note in (not_predicted, not_limited) if note),
        )

    def _warm_up(self) -> None:
        """Bring every weight into memory and fill the libraries' own buffers, which are no cache and no activations.

        A matrix library packs its operands into buffers that grow with the product up to a size and are kept: MKL
        took 14 MB for SmolLM2-135M in FP32, all of it from 384 rows on.
        """
        session, request = self._session, self._request
        tokens = min(WARM_UP_TOKENS, request.context_tokens - request.new_tokens)
        vocabulary = session.vocabulary_tokens
        try:
            for batch, length in ((1, min(2, tokens)), (-(-WARM_UP_TOKENS // tokens), tokens)):
                prompts = random_prompts(
                    batch_size=batch, prompt_tokens=length, vocabulary_tokens=vocabulary, seed=0
                )
                session.prefill(prompts, new_tokens=2)
                session.decode_step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        session.release()
        return_freed_memory()

    def _private_limit(self) -> tuple[int | None, str]:
        """The system's limit for this process while it probes, and what must be said about it."""
        if self._request.checkpoint.device != "cpu":
            return None, ""
        idle = private_bytes_now()
        if idle is None:
            return None, "this platform can't limit a process's memory: a probe may take more than the budget"
        left, free = max(0, self._request.budget_bytes - self._weights), available_memory_bytes()
        if left + SLACK_BYTES <= free:
            return idle + left + SLACK_BYTES, ""
        return idle + min(left + SLACK_BYTES, free), (
            f"the budget leaves {left / 1e9:.2f} GB beside the weights, this machine had {free / 1e9:.2f} GB free: "
            "probes could not take more than that"
            if left > free
            else ""
        )

    def answer(self, question: str) -> CapacityProbe:
        """The same as `probe` for a `ProbeQuestion` as JSON."""
        return self.probe(ProbeQuestion.model_validate_json(question))

    def probe(self, question: ProbeQuestion) -> CapacityProbe:
        """Run so many sequences to their full length; out of memory and failures are outcomes."""
        session = self._session
        session.release()
        return_freed_memory()
        # Read anew: buffers that libraries kept of a larger probe must not count in this one.
        self._idle = resident_bytes_now()
        session.reset_peak()
        try:
            with private_memory_limit(self._limit):
                memory = self._run(question)
        except Exception as error:  # noqa: BLE001  (out of memory is a result; anything else fails the stage)
            session.release()
            return_freed_memory()
            outcome: Literal["out_of_memory", "failed"] = (
                "out_of_memory" if is_out_of_memory(error) else "failed"
            )
            because = f"{type(error).__name__}: {first_line(error)}"
            return CapacityProbe(sequences=question.sequences, outcome=outcome, because=because)
        session.release()
        return self._judged(question.sequences, memory)

    def _run(self, question: ProbeQuestion) -> SessionMemory:
        if question.layout == "paged":
            return self._run_paged(question.sequences)
        request, session = self._request, self._session
        session.prefill(
            self._prompts(question.sequences, new_tokens=request.new_tokens), new_tokens=request.new_tokens
        )
        for _ in range(request.new_tokens - 1):
            session.decode_step()
        session.synchronize()
        return session.memory()

    def _run_paged(self, sequences: int) -> SessionMemory:
        paged, request = self._request.paged, self._request
        assert paged is not None, "the request says how"
        limits = Serving(
            max_batch_tokens=paged.max_batch_tokens,
            max_sequences=sequences,
            block_tokens=paged.block_tokens,
            cache_blocks=sequences * paged.blocks(request.context_tokens),
        )
        new_tokens = overlapping_answer_tokens(request, sequences=sequences)
        with self._session.serving(limits, share_prefixes=False) as serving:
            for number, prompt in enumerate(self._prompts(sequences, new_tokens=new_tokens)):
                serving.submit(number, prompt, new_tokens=new_tokens)
            _serve_together(serving, sequences=sequences, new_tokens=new_tokens)
            return serving.memory()

    def _prompts(self, sequences: int, *, new_tokens: int) -> list[list[int]]:
        return random_prompts(
            batch_size=sequences,
            prompt_tokens=self._request.context_tokens - new_tokens,
            vocabulary_tokens=self._session.vocabulary_tokens,
            seed=sequences,
        )

    def _judged(self, sequences: int, memory: SessionMemory) -> CapacityProbe:
        """Whether what was used is within the budget."""
        used, budget = memory.peak_bytes, self._request.budget_bytes
        if self._request.checkpoint.device == "cpu":
            used = self._weights + max(0, memory.peak_bytes - self._idle)
        reserved = memory.reserved_bytes
        over = used > budget
        return CapacityProbe(
            sequences=sequences,
            outcome="out_of_memory" if over else "measured",
            because=f"{sequences} sequences need {used:,} B, the budget is {budget:,} B" if over else "",
            peak_bytes=used,
            kv_cache_bytes=memory.kv_cache_bytes,
            reserve_bytes=None if reserved is None else max(0, reserved - memory.peak_bytes),
        )


def overlapping_answer_tokens(request: CapacityRequest, *, sequences: int) -> int:
    """New tokens of each sequence in a paged probe: at least the request's, and enough to wait for the last prompt.

    Prompts enter in pieces of what decoding leaves of a step's tokens, so that the first sequences would end before
    the last one begins; a longer answer to a prompt that much shorter keeps the length. With b tokens a step, s
    sequences and p prompt tokens beside the request's answer, answers longer by w make the last prompt join after
    s × (p − w) ÷ (b − s) steps, which is at most w from w = s × p ÷ b on. Raises StageError when no prompt is left.
    """
    assert request.paged is not None
    prompt_tokens, most = request.context_tokens - request.new_tokens, request.paged.max_batch_tokens
    longer_by = -(-sequences * prompt_tokens // most) + 1 if sequences > 1 else 0
    if longer_by >= prompt_tokens:
        raise StageError(
            f"{sequences} sequences of {request.context_tokens} tokens never run at the same time: at {most} tokens "
            "a step the first ends before the last begins; raise traffic.max_batch_tokens"
        )
    return request.new_tokens + longer_by


def _serve_together(serving: ServingSession, *, sequences: int, new_tokens: int) -> None:
    """Step to the end. Raises StageError unless all sequences decoded in one step and each got all its tokens."""
    produced, together, preempted = 0, 0, 0
    while (step := serving.step()) is not None:
        produced += len(step.produced)
        together = max(together, step.decode_sequences)
        preempted += step.preempted
    serving.synchronize()
    if produced != sequences * new_tokens or together < sequences or preempted:
        raise StageError(
            f"of {sequences} sequences at most {together} ran at the same time and {preempted} were preempted; "
            f"{produced} of {sequences * new_tokens} tokens were produced"
        )


def _predicted(request: CapacityRequest) -> tuple[PeakPrediction | None, str]:
    """The peak from shapes, or why there is none."""
    try:
        predicted = request.checkpoint.engine.predicted_peak(
            Path(request.checkpoint.folder),
            prompt_tokens=request.context_tokens - request.new_tokens,
            new_tokens=request.new_tokens,
        )
    except Exception as error:  # noqa: BLE001  (a model's code may raise anything on tensors without data)
        return None, f"activations are not predicted: {type(error).__name__}: {first_line(error)}"
    return predicted, ""
