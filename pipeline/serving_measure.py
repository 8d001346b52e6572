"""The clock around serving: the same requests through static batches, continuous batching and a cached prefix.

A request's times are counted from when it was sent (closed loop), came (open loop) or its batch began (static).
The device is synchronised before each reading of the clock, and one reading ends a step and begins the next, so that
whatever happens between two steps is in one of them. Tokens are counted as they come; nothing is assumed.

    trace = serve_continuously(serving, requests, prompts=prompts, concurrency=4, clock=time.perf_counter)
    trace.duration_s, trace.output_tokens
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from pipeline.engines.base import ServedStep, ServingSession, Session
from pipeline.measure import Clock
from pipeline.serving_load import PREFIX_NEW_TOKENS, in_batches
from pipeline.step_times import StepSample
from pipeline.traffic import Request
from pipeline.values import Value

WaitUntil = Callable[[float], None]
"""Sleeps until the clock shows so many seconds."""
IDLE_STEPS = 100
"""Steps in a row that neither compute a prompt nor give a token, after which an engine is taken to hang."""


class RequestTrace(Value):
    """One request's raw times, in seconds from the start of the run; `token_times_s` are those of tokens that came."""

    prompt_tokens: int
    new_tokens: int
    arrival_s: float
    start_s: float | None
    token_times_s: tuple[float, ...]

    @property
    def finished(self) -> bool:
        """Whether all of its tokens came."""
        return len(self.token_times_s) >= self.new_tokens

    @property
    def ttft_s(self) -> float:
        """From the arrival to the first token."""
        return self.token_times_s[0] - self.arrival_s

    @property
    def latency_s(self) -> float:
        """From the arrival to the last token."""
        return self.token_times_s[-1] - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None when there is only one."""
        gaps = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / gaps if gaps else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between tokens."""
        return tuple(after - before for before, after in itertools.pairwise(self.token_times_s))


class ServingTrace(Value):
    """One run over all requests: their times, and every step's time with what was wanted of it.

    `step_tokens` are the tokens that each step gave to requests.
    """

    requests: tuple[RequestTrace, ...]
    steps: tuple[StepSample, ...]
    step_tokens: tuple[int, ...]
    preemptions: int

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last token."""
        last = max((one.token_times_s[-1] for one in self.requests if one.token_times_s), default=0.0)
        return last - min(one.arrival_s for one in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens that came."""
        return sum(len(one.token_times_s) for one in self.requests)

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of the requests that got a token."""
        return sum(one.prompt_tokens for one in self.requests if one.token_times_s)

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens that came ÷ duration."""
        return self.output_tokens / self.duration_s

    @property
    def mean_batch(self) -> float:
        """Sequences that got a token in a step, weighted by the step's time."""
        given_s = sum(step.seconds * given for step, given in zip(self.steps, self.step_tokens, strict=True))
        return given_s / sum(step.seconds for step in self.steps)


class PrefixTrace(Value):
    """Requests of one prefix, one at a time: each one's TTFT, and the prompt tokens that its steps computed."""

    ttft_s: tuple[float, ...]
    computed_tokens: tuple[int, ...]
    produced: tuple[int, ...]


def prompts_of(requests: Sequence[Request], *, vocabulary_tokens: int, seed: int) -> list[list[int]]:
    """Uniform token ids for each request; another seed gives other prompts."""
    generator = random.Random(seed)
    return [
        [generator.randrange(vocabulary_tokens) for _ in range(request.prompt_tokens)] for request in requests
    ]


# --- continuous batching ---------------------------------------------------------------------------------


def serve_continuously(
    session: ServingSession,
    requests: Sequence[Request],
    *,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    clock: Clock,
    wait_until: WaitUntil | None = None,
) -> ServingTrace:
    """Serve all requests, at most `concurrency` of them under way.

    Without `wait_until` all of them wait at the client (closed loop); with it each one comes at its arrival, and the
    clock is slept through while none is there. Ends early when the engine has no work left or hangs: then tokens
    are missing in the trace.
    """
    session.synchronize()
    zero_s = now_s = clock()
    client = _Client(requests, zero_s=zero_s, arrivals=wait_until is not None)
    while client.goes_on:
        for request in client.due(now_s, room=concurrency):
            session.submit(request, prompts[request], new_tokens=requests[request].new_tokens)
        if wait_until is not None and not client.under_way:
            wait_until(zero_s + client.next_arrival_s)
            now_s = clock()
            continue
        step = session.step()
        session.synchronize()
        end_s = clock()
        if step is None:
            break
        client.take(step, begin_s=now_s, end_s=end_s)
        now_s = end_s
    return client.trace()


class _Client:
    """Sends requests and notes when their tokens come; times are the clock's, the trace's count from `zero_s`."""

    def __init__(self, requests: Sequence[Request], *, zero_s: float, arrivals: bool) -> None:
        self._requests, self._zero_s, self._arrivals = requests, zero_s, arrivals
        self._sent_s: list[float] = []
        self._start_s: dict[int, float] = {}
        self._tokens_s: list[list[float]] = [[] for _ in requests]
        self._steps: list[StepSample] = []
        self._given: list[int] = []
        self._preemptions = self._ended = self._idle = 0

    @property
    def under_way(self) -> int:
        return len(self._sent_s) - self._ended

    @property
    def goes_on(self) -> bool:
        return self._ended < len(self._requests) and self._idle < IDLE_STEPS

    @property
    def next_arrival_s(self) -> float:
        return self._requests[len(self._sent_s)].arrival_s

    def due(self, now_s: float, *, room: int) -> list[int]:
        """The requests that are to be sent now, counted as sent."""
        first = len(self._sent_s)
        while len(self._sent_s) < len(self._requests) and (self._arrivals or self.under_way < room):
            due_s = self._zero_s + self.next_arrival_s if self._arrivals else now_s
            if due_s > now_s:
                break
            self._sent_s.append(due_s)
        return list(range(first, len(self._sent_s)))

    def take(self, step: ServedStep, *, begin_s: float, end_s: float) -> None:
        self._idle = 0 if step.produced or step.prefill_tokens else self._idle + 1
        self._preemptions += step.preempted
        for request in step.started:
            self._start_s.setdefault(request, begin_s)
        for request in step.produced:
            self._tokens_s[request].append(end_s)
            self._ended += len(self._tokens_s[request]) == self._requests[request].new_tokens
        self._given.append(len(step.produced))
        self._steps.append(
            StepSample(
                seconds=end_s - begin_s,
                prefill_tokens=step.prefill_tokens,
                decode_sequences=step.decode_sequences,
                cached_tokens=step.cached_tokens,
                pairs=step.pairs,
            )
        )

    def trace(self) -> ServingTrace:
        """Requests that were never sent arrived, for the trace, at its end."""
        zero_s = self._zero_s
        sent_s = [*self._sent_s, *[self._sent_s[-1]] * (len(self._requests) - len(self._sent_s))]
        return ServingTrace(
            requests=tuple(
                RequestTrace(
                    prompt_tokens=request.prompt_tokens,
                    new_tokens=request.new_tokens,
                    arrival_s=sent_s[place] - zero_s,
                    start_s=self._start_s[place] - zero_s if place in self._start_s else None,
                    token_times_s=tuple(time_s - zero_s for time_s in self._tokens_s[place]),
                )
                for place, request in enumerate(self._requests)
            ),
            steps=tuple(self._steps),
            step_tokens=tuple(self._given),
            preemptions=self._preemptions,
        )


# --- static batches --------------------------------------------------------------------------------------


def serve_statically(
    session: Session,
    requests: Sequence[Request],
    *,
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    clock: Clock,
) -> ServingTrace:
    """Serve all requests in batches in order: padded to the longest prompt, run until the longest answer is done.

    A batch's requests arrive when it begins. Tokens past a request's end are computed, because nobody can leave the
    batch, and are not counted.
    """
    session.synchronize()
    zero_s = begin_s = clock()
    traces: list[RequestTrace] = []
    steps: list[StepSample] = []
    given: list[int] = []
    for batch in in_batches(requests, batch_size):
        first = len(traces)
        times_s, counts = _run_batch(
            session,
            prompts[first : first + len(batch)],
            new_tokens=max(r.new_tokens for r in batch),
            clock=clock,
        )
        for before_s, end_s, place in zip([begin_s, *times_s], times_s, itertools.count(), strict=False):
            wanted = [request for request in batch[: counts[place]] if request.new_tokens > place]
            given.append(len(wanted))
            steps.append(_wanted_of_step(wanted, place=place, seconds=end_s - before_s))
        traces += [
            RequestTrace(
                prompt_tokens=request.prompt_tokens,
                new_tokens=request.new_tokens,
                arrival_s=begin_s - zero_s,
                start_s=begin_s - zero_s,
                token_times_s=tuple(
                    time_s - zero_s
                    for time_s, count in zip(times_s[: request.new_tokens], counts, strict=False)
                    if row < count
                ),
            )
            for row, request in enumerate(batch)
        ]
        begin_s = times_s[-1]
    return ServingTrace(requests=tuple(traces), steps=tuple(steps), step_tokens=tuple(given), preemptions=0)


def _run_batch(
    session: Session, prompts: Sequence[Sequence[int]], *, new_tokens: int, clock: Clock
) -> tuple[list[float], list[int]]:
    """When each step's tokens were there, on the clock, and how many sequences got one."""
    counts = [len(session.prefill(prompts, new_tokens=new_tokens))]
    session.synchronize()
    times_s = [clock()]
    for _ in range(new_tokens - 1):
        counts.append(len(session.decode_step()))
        session.synchronize()
        times_s.append(clock())
    return times_s, counts


def _wanted_of_step(wanted: Sequence[Request], *, place: int, seconds: float) -> StepSample:
    """Step `place` of a batch (0: the prefill), in what was wanted of it: no padding, no ended request."""
    if place == 0:
        return StepSample(
            seconds=seconds,
            prefill_tokens=sum(one.prompt_tokens for one in wanted),
            decode_sequences=0,
            cached_tokens=0,
            pairs=sum(one.prompt_tokens * (one.prompt_tokens + 1) // 2 for one in wanted),
        )
    cached = sum(one.prompt_tokens + place - 1 for one in wanted)
    return StepSample(
        seconds=seconds,
        prefill_tokens=0,
        decode_sequences=len(wanted),
        cached_tokens=cached,
        pairs=cached + len(wanted),
    )


# --- a cached prefix -------------------------------------------------------------------------------------


def prefill_with_prefix(
    session: ServingSession, *, prompts: Sequence[Sequence[int]], clock: Clock
) -> PrefixTrace:
    """Two tokens for each prompt, one request after the other, in a session that keeps prefixes.

    Two, because a request that ends in the step of its prefill may leave nothing in the cache (transformers 5.24).
    """
    found = [_one_alone(session, place, prompt, clock=clock) for place, prompt in enumerate(prompts)]
    return PrefixTrace(
        ttft_s=tuple(ttft_s for ttft_s, _, _ in found),
        computed_tokens=tuple(computed for _, computed, _ in found),
        produced=tuple(produced for _, _, produced in found),
    )


def _one_alone(
    session: ServingSession, request: int, prompt: Sequence[int], *, clock: Clock
) -> tuple[float, int, int]:
    """TTFT (0 when nothing came), prompt tokens computed, tokens produced."""
    session.synchronize()
    begin_s = clock()
    session.submit(request, prompt, new_tokens=PREFIX_NEW_TOKENS)
    ttft_s = 0.0
    computed = produced = idle = 0
    while produced < PREFIX_NEW_TOKENS and idle < IDLE_STEPS and (step := session.step()) is not None:
        session.synchronize()
        now_s = clock()
        if step.produced and not produced:
            ttft_s = now_s - begin_s
        produced += step.produced.count(request)
        computed += step.prefill_tokens
        idle = 0 if step.produced or step.prefill_tokens else idle + 1
    return ttft_s, computed, produced
