"""vLLM's engine, stepped in this process: requests by number, and what each step of its scheduler did.

vLLM serves from a process of its own and schedules ahead. Here a clock has to stand between two steps, and a step's
tokens have to be there when it ends: so the engine lives in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) and
schedules no step before the last one is done. Facts are those of vLLM 0.30's sources, whose engine internals are no
stable interface: `engines.vllm` refuses other versions.

    engine = SteppedEngine(library, library.build(library.EngineArgs(model="folder")))
    engine.submit(0, [1, 2, 3], most_tokens=8)
    while (stepped := engine.step()) is not None:
        print(stepped.tokens)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.engines.base import ServedStep
from pipeline.errors import StageError

NOTHING = ServedStep((), 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class VllmLibrary:
    """The parts of vLLM that are used, handed in: so a scripted one proves the same code without a GPU."""

    version: str
    EngineArgs: Callable[..., Any]
    SamplingParams: Callable[..., Any]
    delta_outputs: Any
    """RequestOutputKind.DELTA."""
    Scheduler: type
    build: Callable[[Any], Any]
    """LLMEngine.from_engine_args."""


def load_vllm() -> VllmLibrary:
    """Import vLLM, set to run its engine in this process and to report to nobody."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import vllm
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.core.sched.scheduler import Scheduler

    return VllmLibrary(
        version=vllm.__version__,
        EngineArgs=vllm.EngineArgs,
        SamplingParams=vllm.SamplingParams,
        delta_outputs=RequestOutputKind.DELTA,
        Scheduler=Scheduler,
        build=vllm.LLMEngine.from_engine_args,
    )


def telling(scheduler: type) -> type:
    """The scheduler with a memory of what its last step was to do: vLLM's own place for other schedulers."""

    class Telling(scheduler):  # type: ignore[misc]
        planned: Any = None

        def schedule(self, *arguments: Any, **named: Any) -> Any:
            self.planned = super().schedule(*arguments, **named)
            return self.planned

    return Telling


@dataclass
class _Running:
    """A request under way: how long its prompt is and how many tokens it has got."""

    number: int
    prompt_tokens: int
    most_tokens: int
    produced: int = 0
    started: bool = False


@dataclass
class Stepped:
    """What one step did, and the tokens that it gave, by request."""

    facts: ServedStep = NOTHING
    tokens: dict[int, int] = field(default_factory=dict)


class SteppedEngine:
    """One LLMEngine in this process, its requests by number, and what each of its steps did."""

    def __init__(self, library: VllmLibrary, engine: Any) -> None:
        self.library, self.engine = library, engine
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._requests: dict[str, _Running] = {}
        self.most_sequences: int = self._scheduler.max_num_running_reqs
        self.most_batch_tokens: int = self._scheduler.max_num_scheduled_tokens
        self.most_held_blocks = 0

    @property
    def blocks(self) -> int:
        """Blocks of the cache; one of them stands for tokens that nobody looks at any more."""
        return int(self._scheduler.kv_cache_config.num_blocks) - 1

    @property
    def pool_bytes(self) -> int:
        """The whole cache, which is made when the engine starts."""
        return sum(int(tensor.size) for tensor in self._scheduler.kv_cache_config.kv_cache_tensors)

    @property
    def block_bytes(self) -> int:
        """One block, all layers together."""
        return self.pool_bytes // int(self._scheduler.kv_cache_config.num_blocks)

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return int(self._scheduler.cache_config.block_size)

    @property
    def held_blocks(self) -> int:
        """Blocks that sequences have now."""
        return self.blocks - int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def model(self) -> Any:
        """vLLM's module with the weights."""
        (model,) = self.engine.apply_model(lambda model: model)
        return model

    def limit(self, *, sequences: int, batch_tokens: int) -> None:
        """Schedule no more than so much in a step, from the next one on."""
        self._scheduler.max_num_running_reqs = sequences
        self._scheduler.max_num_scheduled_tokens = batch_tokens

    def submit(self, number: int, prompt: Sequence[int], *, most_tokens: int, **sampling: Any) -> None:
        """Queue a request that ends after `most_tokens` tokens, whatever they are."""
        parameters = self.library.SamplingParams(
            temperature=0.0,
            max_tokens=most_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self.library.delta_outputs,
            **sampling,
        )
        name = self.engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, parameters)
        self._requests[name] = _Running(number, len(prompt), most_tokens)

    def step(self) -> Stepped | None:
        """One step of whatever waits and runs; None when nothing does. Raises what vLLM raises."""
        if not self._requests:
            return None
        outputs = self.engine.step()
        self.most_held_blocks = max(self.most_held_blocks, self.held_blocks)
        given = {int(output.request_id): list(output.outputs[0].token_ids) for output in outputs}
        return self._counted(self._scheduler.planned, given)

    def _counted(self, planned: Any, given: Mapping[int, list[int]]) -> Stepped:
        """From the scheduler's plan; a request that gave its blocks back and comes again counts as preempted."""
        before = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
        cached = planned.scheduled_cached_reqs
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        again = {new.req_id for new in planned.scheduled_new_reqs} | set(cached.resumed_req_ids)
        prefill = decode = held = pairs = preempted = 0
        started, tokens = [], {}
        for name, query in planned.num_scheduled_tokens.items():
            request, past = self._requests[name], int(before[name])
            # A sequence decodes when the last token that it got is the only one that isn't in the cache.
            if request.produced and query == 1 and past == request.prompt_tokens + request.produced - 1:
                decode += 1
            else:
                prefill += query
            held += past
            pairs += query * past + query * (query + 1) // 2
            preempted += request.started and name in again
            if not request.started:
                started.append(request.number)
                request.started = True
            new = given.get(request.number, [])
            if len(new) > 1:
                raise StageError(f"vLLM gave request {request.number} {len(new)} tokens in one step")
            if new:
                tokens[request.number] = int(new[0])
                request.produced += 1
            if request.produced >= request.most_tokens:
                del self._requests[name]
        facts = ServedStep(
            produced=tuple(tokens),
            prefill_tokens=prefill,
            decode_sequences=decode,
            cached_tokens=held,
            pairs=pairs,
            preempted=preempted,
            started=tuple(started),
        )
        return Stepped(facts, tokens)

    def forget(self) -> None:
        """End every request and give its blocks back."""
        if self._requests:
            self.engine.abort_request([str(request.number) for request in self._requests.values()])
        self._requests.clear()
        self.most_held_blocks = self.held_blocks
