"""A stand-in for the calls of vLLM 0.30 that `vllm_stepping` makes, with its names, its scheduling and its objects.

Sources: `LLMEngine` and `InprocClient` (vllm/v1/engine), `Scheduler` and its output (vllm/v1/core/sched),
`KVCacheConfig` (vllm/v1/kv_cache_interface.py), `EngineArgs` and `SamplingParams`. Requests get internal names,
decoding sequences go first, prompts in pieces into what is left of a step; the youngest gives its blocks back when none
is free. The model is a sum: the next token follows from all tokens of the sequence, so that every schedule must give
the same answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pipeline.vllm_stepping import VllmLibrary

VOCABULARY = 97
DELTA = object()
LAYERS, LAYER_BLOCK_BYTES = 2, 4096
WEIGHT_BYTES = 4 * VOCABULARY * 8


@dataclass
class EngineArgs:
    """The arguments that are passed, under vLLM's names; any other is a TypeError, as there."""

    model: str
    dtype: str
    load_format: str
    skip_tokenizer_init: bool
    generation_config: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    async_scheduling: bool
    scheduler_cls: type
    disable_log_stats: bool
    seed: int


@dataclass
class SamplingParams:
    """Likewise."""

    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool
    output_kind: object
    prompt_logprobs: int | None = None


@dataclass
class _Request:
    request_id: str
    external: str
    prompt: list[int]
    parameters: SamplingParams
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    blocks: int = 0
    seen: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Scheduler:
    """First come, first served, over `num_blocks` blocks of which one is never given out."""

    def __init__(self, arguments: EngineArgs, *, num_blocks: int, block_size: int) -> None:
        self.max_num_running_reqs = arguments.max_num_seqs
        self.max_num_scheduled_tokens = arguments.max_num_batched_tokens
        self.cache_config = SimpleNamespace(block_size=block_size)
        self.free = num_blocks - 1
        tensors = [SimpleNamespace(size=num_blocks * LAYER_BLOCK_BYTES) for _ in range(LAYERS)]
        self.kv_cache_config = SimpleNamespace(num_blocks=num_blocks, kv_cache_tensors=tensors)
        pool = SimpleNamespace(get_num_free_blocks=lambda: self.free)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []

    def schedule(self, throttle_prefills: bool = False) -> SimpleNamespace:
        """A step's plan; facts of a request are those before the step, as in vLLM."""
        del throttle_prefills
        budget, planned = self.max_num_scheduled_tokens, {}
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        for request in list(self.running):
            wanted = min(budget, len(request.tokens) - request.num_computed_tokens)
            if request not in self.running or not wanted:
                continue
            while not self._grow(request, wanted) and request in self.running:
                self._preempt(self.running[-1])
            if request not in self.running:
                break
            planned[request.request_id] = wanted
            cached.req_ids.append(request.request_id)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            budget -= wanted
        new = []
        while self.waiting and budget and len(self.running) < self.max_num_running_reqs:
            request = self.waiting[0]
            wanted = min(budget, len(request.tokens))
            if not self._grow(request, wanted):
                break
            self.running.append(self.waiting.pop(0))
            planned[request.request_id] = wanted
            budget -= wanted
            if request.seen:
                cached.resumed_req_ids.add(request.request_id)
                cached.req_ids.append(request.request_id)
                cached.num_computed_tokens.append(0)
            else:
                new.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=0))
            request.seen = True
        return SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=planned
        )

    def _grow(self, request: _Request, tokens: int) -> bool:
        size = self.cache_config.block_size
        more = -(-(request.num_computed_tokens + tokens) // size) - request.blocks
        if more > self.free:
            return False
        self.free -= more
        request.blocks += more
        return True

    def _preempt(self, request: _Request) -> None:
        self.give_back(request)
        self.running.remove(request)
        self.waiting.insert(0, request)

    def give_back(self, request: _Request) -> None:
        self.free += request.blocks
        request.blocks = request.num_computed_tokens = 0


class Model:
    """Weights, and logits that are highest at the sum of a sequence's tokens."""

    def __init__(self) -> None:
        import torch

        self.weight = torch.zeros(VOCABULARY, 8)

    def parameters(self) -> list[Any]:
        return [self.weight]

    def buffers(self) -> list[Any]:
        return []

    def compute_logits(self, sums: Any) -> Any:
        import torch

        rows = torch.zeros(len(sums), VOCABULARY)
        rows[torch.arange(len(sums)), torch.tensor([one % VOCABULARY for one in sums])] = 1.0
        return rows


class LLMEngine:
    """`add_request`, `abort_request` and `step`, with an EngineCore behind an in-process client."""

    def __init__(
        self, arguments: EngineArgs, *, num_blocks: int, block_size: int, on_step: Callable[[int], None]
    ) -> None:
        self.arguments = arguments
        scheduler = arguments.scheduler_cls(arguments, num_blocks=num_blocks, block_size=block_size)
        self.scheduler: Scheduler = scheduler
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        self.model = Model()
        self.gives_two_tokens = False
        self._on_step = on_step
        self._counter = itertools.count()

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self.model)]

    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams) -> str:
        assert params.temperature == 0.0
        assert params.ignore_eos
        assert params.output_kind is DELTA
        name = f"{request_id}-{next(self._counter):08x}"
        self.scheduler.waiting.append(_Request(name, request_id, prompt["prompt_token_ids"], params))
        return name

    def abort_request(self, request_ids: list[str]) -> None:
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.external in request_ids:
                self._end(request)

    def _end(self, request: _Request) -> None:
        self.scheduler.give_back(request)
        for queue in (self.scheduler.running, self.scheduler.waiting):
            if request in queue:
                queue.remove(request)

    def step(self) -> list[SimpleNamespace]:
        planned = self.scheduler.schedule(throttle_prefills=False).num_scheduled_tokens
        self._on_step(sum(planned.values()))
        outputs = []
        for request in [one for one in self.scheduler.running if one.request_id in planned]:
            request.num_computed_tokens += planned[request.request_id]
            if request.num_computed_tokens < len(request.tokens):
                continue
            token = int(self._logits(request).argmax())
            request.output.append(token)
            given = [token, token] if self.gives_two_tokens else [token]
            outputs.append(
                SimpleNamespace(request_id=request.external, outputs=[SimpleNamespace(token_ids=given)])
            )
            if len(request.output) == request.parameters.max_tokens:
                self._end(request)
        return outputs

    def _logits(self, request: _Request) -> Any:
        """The last token's come first, then those of the prompt, where they are asked for."""
        tokens = request.tokens
        sums = list(itertools.accumulate(tokens, initial=0))[1:]
        last = self.model.compute_logits(sums[-1:])
        if request.parameters.prompt_logprobs is not None and not request.output:
            self.model.compute_logits(sums)
        return last[0]


def library(
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    on_step: Callable[[int], None] = lambda _tokens: None,
    started: list[LLMEngine] | None = None,
) -> VllmLibrary:
    """vLLM as `load_vllm` gives it; engines that were started are appended to `started`."""

    def build(arguments: EngineArgs) -> LLMEngine:
        engine = LLMEngine(arguments, num_blocks=num_blocks, block_size=block_size, on_step=on_step)
        if started is not None:
            started.append(engine)
        return engine

    return VllmLibrary(
        version="0.30.0",
        EngineArgs=EngineArgs,
        SamplingParams=SamplingParams,
        delta_outputs=DELTA,
        Scheduler=Scheduler,
        build=build,
    )
