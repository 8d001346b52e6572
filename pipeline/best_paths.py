"""Which quantizer and engine a precision means on this very device: the fastest pair that runs the model here.

Pairs come in an order that was measured: by `doctor --engines` on this machine, else by this project on a CPU with
AVX2 (docs/results/). A pair that lacks a package, can't use the device or can't store the model's architecture is
passed over, so that a recipe's short form works everywhere and is fast where it can be.

    best = best_ways(device, config=config, weights="trained", ranking=None)
    recipe.expand(device="cpu", best=best)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.engines.base import Engine
from pipeline.engines.llama_cpp import LlamaCpp
from pipeline.engines.transformers import Transformers
from pipeline.hardware import Device
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.dynamic_int8 import DynamicInt8
from pipeline.quantizers.gguf import Gguf
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.quantizers.torchao import Torchao
from pipeline.recipe_sections import WayToRun
from pipeline.values import Value

ENGINE_RANKING = "engine-ranking"
"""Where the store keeps what `doctor --engines` measured, by machine."""


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
PAIRS: dict[str, dict[str, tuple[Pair, ...]]] = {
    "cpu": {
        "fp16": (Pair(Gguf(type="f16"), _LLAMA), Pair(Native(dtype="fp16"), _TORCH)),
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


def best_ways(
    device: Device,
    *,
    config: Mapping[str, Any],
    weights: str,
    folder: Path | None = None,
    engine: str | None = None,
    ranking: EngineRanking | None,
) -> dict[str, WayToRun]:
    """By precision the fastest pair that runs the model of `config` (a config.json) with `weights` on `device`.

    `weights` are "trained" or "random" ones, `folder` is where they lie, where that is known. With `engine`, a kind,
    only its pairs are looked at. Precisions without any pair that runs are left out.
    """
    found = {}
    for precision, pairs in PAIRS.get(device.kind, {}).items():
        passed_over: list[str] = []
        asked = tuple(pair for pair in pairs if engine in (None, pair.engine.kind))
        for pair in _in_order(asked, ranking.pairs.get(precision, ()) if ranking else ()):
            reason = next(_problems(pair, device=device, config=config, weights=weights, folder=folder), None)
            if reason is None:
                because = _because(pair, precision, device=device, ranking=ranking)
                found[precision] = WayToRun(
                    quantizer=pair.quantizer,
                    engine=pair.engine,
                    because=f"{pair.name}: {'; '.join([because, *passed_over])}",
                )
                break
            passed_over.append(f"{pair.name} passed over ({reason})")
    return found


def _in_order(pairs: tuple[Pair, ...], ranked: tuple[RankedPair, ...]) -> list[Pair]:
    """Measured ones first, the fastest of them first; the others keep their order."""
    rates = {one.name: one.decode_tokens_per_s or 0.0 for one in ranked}
    return sorted(pairs, key=lambda pair: -rates.get(pair.name, 0.0))


def _problems(
    pair: Pair, *, device: Device, config: Mapping[str, Any], weights: str, folder: Path | None
) -> Iterator[str]:
    for problem in pair.quantizer.check(device=device.kind):
        yield problem.what
    for problem in pair.quantizer.model_problems(config, weights=weights, folder=folder):
        yield problem.what
    for problem in pair.engine.check(device=device.kind):
        yield problem.what


def _because(pair: Pair, precision: str, *, device: Device, ranking: EngineRanking | None) -> str:
    ranked = ranking.pairs.get(precision, ()) if ranking else ()
    rate = {one.name: one.decode_tokens_per_s for one in ranked}.get(pair.name)
    if ranking is not None and rate:
        others = f"the fastest of {len(ranked)} on this machine"
        return f"{others} ({rate:.3g} tok/s with {ranking.model}, {ranking.measured_at})"
    if device.kind == "cpu":
        return "the fastest on a CPU with AVX2 (docs/results/)"
    return "not measured on this machine; `python -m pipeline doctor --engines FOLDER` does"
