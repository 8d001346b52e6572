"""Which quantizer and engine the precisions of a recipe's short form mean on this very device.

One engine runs all of them, so that their speeds can be compared, and with it each precision has the fastest
quantizer that can store the model. The order was measured: by `doctor --engines` on this machine, else by this project
on a CPU with AVX2 (docs/results/). What lacks a package, can't use the device or can't store the architecture is passed
over, so that the short form works everywhere and is fast where it can be.

    wanted = Wanted(precisions=("fp16", "int8"), config=config, weights="trained")
    recipe.expand(device="cpu", best=best_ways(device, wanted, ranking=None))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.engines.base import Engine
from pipeline.engines.llama_cpp import LlamaCpp
from pipeline.engines.transformers import Transformers
from pipeline.hardware import Device, fingerprint
from pipeline.packages import installed_versions
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.dynamic_int8 import DynamicInt8
from pipeline.quantizers.gguf import Gguf
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.quantizers.torchao import Torchao
from pipeline.recipe_sections import WayToRun
from pipeline.results import Problem
from pipeline.values import Value, digest

ENGINE_RANKING = "engine-ranking"
"""Where the store keeps what `doctor --engines` measured, by machine."""


RANKED_PACKAGES = ("torch", "transformers", "bitsandbytes", "optimum-quanto", "torchao", "xllamacpp")


class Pair(NamedTuple):
    """A way to store weights and one to run them."""

    quantizer: Quantizer
    engine: Engine

    @property
    def name(self) -> str:
        """`gguf q8_0 on llama_cpp`."""
        settings = self.quantizer.model_dump(exclude={"kind"}, exclude_none=True)
        said = [str(value) for value in settings.values() if not isinstance(value, bool)]
        return f"{' '.join([self.quantizer.kind, *said])} on {self.engine.kind}"


class RankedPair(Value):
    """A pair by its name, and how fast it decoded the model that pairs are compared on; None where it failed."""

    name: str
    decode_tokens_per_s: float | None


class EngineRanking(Value):
    """What was measured on one machine, by precision, the fastest first. `model` says on what."""

    measured_at: str
    model: str
    pairs: dict[str, tuple[RankedPair, ...]]


_TORCH, _LLAMA = Transformers(), LlamaCpp()
_NF4 = Bitsandbytes(type="nf4", double_quant=True)
READ_BACK = ("llama", "qwen2", "gemma3_text", "gpt2", "qwen3_moe", "qwen3_5_text")
"""Model types whose GGUF files were seen to come back through transformers, as measuring their quality needs."""
PAIRS: dict[str, dict[str, tuple[Pair, ...]]] = {
    "cpu": {
        "fp16": (Pair(Gguf(type="f16"), _LLAMA), Pair(Native(dtype="fp16"), _TORCH)),
        "bf16": (Pair(Gguf(type="bf16"), _LLAMA), Pair(Native(dtype="bf16"), _TORCH)),
        "int8": (
            Pair(Gguf(type="q8_0"), _LLAMA),
            Pair(DynamicInt8(), _TORCH),
            Pair(Quanto(weights="int8"), _TORCH),
        ),
        "int4": (
            Pair(Gguf(type="q4_0"), _LLAMA),
            Pair(Quanto(weights="int4"), _TORCH),
            Pair(_NF4, _TORCH),
        ),
    },
    "cuda": {
        "int8": (
            Pair(Bitsandbytes(type="int8"), _TORCH),
            Pair(Torchao(weights="int8"), _TORCH),
            Pair(Quanto(weights="int8"), _TORCH),
        ),
        "int4": (
            Pair(_NF4, _TORCH),
            Pair(Torchao(weights="int4"), _TORCH),
            Pair(Quanto(weights="int4"), _TORCH),
        ),
        "fp8": (Pair(Quanto(weights="fp8"), _TORCH), Pair(Torchao(weights="fp8"), _TORCH)),
    },
}
"""Pairs to choose among. On a CPU in the order measured here; on CUDA the order is that of the short form before
anything was measured, and only `doctor --engines` changes it."""


def ranking_key(device: Device) -> str:
    """Of this machine with these versions of what runs models: a new one may be faster."""
    return digest([fingerprint(device), installed_versions(RANKED_PACKAGES)])


@dataclass(frozen=True)
class Wanted:
    """What a recipe asks of the pairs: its precisions, its model and what is measured.

    `config` is the model's config.json, `weights` are "trained" or "random" ones, `folder` is where they lie, where
    that is known. `engine` is the kind that the recipe names, if it names one; `serving` says whether the engine must
    batch continuously over a paged cache.
    """

    precisions: tuple[str, ...]
    config: Mapping[str, Any]
    weights: str
    folder: Path | None = None
    engine: str | None = None
    serving: bool = False


def best_ways(device: Device, wanted: Wanted, *, ranking: EngineRanking | None) -> dict[str, WayToRun]:
    """The fastest pair for each precision, all on the fastest engine that has one for every precision.

    A precision without a pair here is left out: it means what it means on any device, on transformers.
    """
    known = PAIRS.get(device.kind, {})
    usable: dict[str, list[Pair]] = {}
    passed_over: dict[str, list[str]] = {}
    for precision in wanted.precisions:
        for pair in _in_order(known.get(precision, ()), _ranked(ranking, precision)):
            reason = next(_problems(pair, device=device, wanted=wanted), None)
            if reason is None:
                usable.setdefault(precision, []).append(pair)
            else:
                passed_over.setdefault(precision, []).append(f"{pair.name} passed over ({reason})")
    engine = _engine_of_all(usable, wanted=wanted, ranking=ranking)
    found = {}
    for precision, pairs in usable.items():
        on_engine = [pair for pair in pairs if pair.engine.kind == engine]
        if not on_engine:
            continue
        pair = on_engine[0]
        reasons = [_because(pair, precision, device=device, ranking=ranking), *passed_over.get(precision, ())]
        found[precision] = WayToRun(
            quantizer=pair.quantizer, engine=pair.engine, because=f"{pair.name}: {'; '.join(reasons)}"
        )
    return found


def _engine_of_all(usable: Mapping[str, list[Pair]], *, wanted: Wanted, ranking: EngineRanking | None) -> str:
    """The kind that runs every precision, the fastest by the ranking, else by the order of the pairs."""
    if wanted.engine is not None:
        return wanted.engine
    kinds = list(dict.fromkeys(pair.engine.kind for pairs in usable.values() for pair in pairs))
    whole = [
        kind
        for kind in kinds
        if all(
            any(pair.engine.kind == kind for pair in usable.get(precision, ()))
            for precision in wanted.precisions
        )
    ]
    return max(whole, key=lambda kind: _mean_rate(kind, usable, ranking), default=_TORCH.kind)


def _mean_rate(kind: str, usable: Mapping[str, list[Pair]], ranking: EngineRanking | None) -> float:
    """Geometric mean of the best measured rates of an engine; 0 where a precision wasn't measured on it."""
    best = []
    for precision, pairs in usable.items():
        rates = _rates(_ranked(ranking, precision))
        best.append(
            max((rates.get(pair.name, 0.0) for pair in pairs if pair.engine.kind == kind), default=0.0)
        )
    return math.prod(best) ** (1 / len(best)) if best else 0.0


def _ranked(ranking: EngineRanking | None, precision: str) -> tuple[RankedPair, ...]:
    return ranking.pairs.get(precision, ()) if ranking else ()


def _rates(ranked: tuple[RankedPair, ...]) -> dict[str, float]:
    return {one.name: one.decode_tokens_per_s for one in ranked if one.decode_tokens_per_s}


def _in_order(pairs: tuple[Pair, ...], ranked: tuple[RankedPair, ...]) -> list[Pair]:
    """Measured ones first, the fastest of them first; then those not measured, in their order; failed ones last."""
    rates = _rates(ranked)
    failed = {one.name for one in ranked if not one.decode_tokens_per_s}
    return sorted(pairs, key=lambda pair: (pair.name in failed, -rates.get(pair.name, 0.0)))


def _problems(pair: Pair, *, device: Device, wanted: Wanted) -> Iterator[str]:
    if wanted.serving and not pair.engine.serves:
        yield f"{pair.engine.kind} has no continuous batching, which the recipe measures"
    if pair.quantizer.kind == "gguf" and wanted.config.get("model_type") not in READ_BACK:
        yield f"the model type {wanted.config.get('model_type')!r} was never seen to come back from a GGUF file"
    lacking = lacks(pair, device=device, config=wanted.config, weights=wanted.weights, folder=wanted.folder)
    yield from (problem.what for problem in lacking)


def lacks(
    pair: Pair, *, device: Device, config: Mapping[str, Any], weights: str, folder: Path | None
) -> Iterator[Problem]:
    """What keeps a pair from storing and running a model here; see `Wanted` for the arguments."""
    yield from pair.quantizer.check(device=device.kind)
    yield from pair.quantizer.model_problems(config, weights=weights, folder=folder)
    yield from pair.engine.check(device=device.kind)
    yield from pair.engine.needs(pair.quantizer)


def _because(pair: Pair, precision: str, *, device: Device, ranking: EngineRanking | None) -> str:
    rates = _rates(_ranked(ranking, precision))
    if ranking is not None and pair.name in rates:
        place = 1 + sum(rate > rates[pair.name] for rate in rates.values())
        said = "the fastest" if place == 1 else f"number {place}"
        return (
            f"{said} of {len(rates)} measured on this machine ({rates[pair.name]:.3g} tok/s with {ranking.model}, "
            f"{ranking.measured_at})"
        )
    if device.kind == "cpu" and pair == PAIRS["cpu"][precision][0]:
        return "the fastest on a CPU with AVX2 (docs/results/)"
    return "not measured on this machine; `python -m pipeline doctor --engines FOLDER` does"
