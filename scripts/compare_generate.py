"""Checks this project's clock against `transformers.generate` timed by hand: the same quantity, within 5 %.

Both run the same loaded model on the same fresh prompt, one after the other, in an order that changes with every
repeat, so that a drifting machine is fair to both. By hand: one call of `generate`, the clock read before it and, by a
stopping criterion that never stops, after every token; its set-up before the first forward is part of TTFT, which is
why prompts are not tiny. Both must make the same tokens, or not the same work was timed. Writes `generate.json` and
`generate.md` to FOLDER and prints the page.

    python -m scripts.compare_generate FOLDER [--repeats 31] [--variants fp32 bf16] [--device cpu] [--model DIRECTORY]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.engines.transformers import Transformers, TransformersSession
from pipeline.hardware import detect
from pipeline.measure import random_prompts, time_generation
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.values import Value
from scripts.compared_times import Compared, missed, ratio_table, say, verdict, write_comparison
from scripts.fetch_demo_model import MODEL_FOLDER

LIMIT = 0.05
VARIANTS: dict[str, Quantizer] = {
    "fp32": Native(dtype="fp32"),
    "bf16": Native(dtype="bf16"),
    "int8-quanto": Quanto(weights="int8"),
    "nf4-bitsandbytes": Bitsandbytes(type="nf4"),
}
SHAPES = ((1, 128, 8), (4, 32, 8))
"""Batch size, prompt tokens, new tokens: short, since a busy machine changes its speed from second to second and many
short pairs show a ratio better than few long ones."""
FIGURES = ("TTFT", "TPOT", "end to end")


class Timed(Value):
    """One batch by one of the two ways, in seconds."""

    ttft_s: float
    end_to_end_s: float

    def figure_s(self, name: str, *, new_tokens: int) -> float:
        """TTFT, seconds a token after the first, or all of it."""
        tpot_s = (self.end_to_end_s - self.ttft_s) / (new_tokens - 1)
        return {"TTFT": self.ttft_s, "TPOT": tpot_s}.get(name, self.end_to_end_s)


class Comparison(Value):
    """Everything that was compared, and on what."""

    model: str
    device: str
    threads: int
    versions: dict[str, str]
    figures: tuple[Compared, ...]


def compare(model: Path, *, variants: Sequence[str], device: str, repeats: int) -> Comparison:
    """Variants of the model at every shape. Raises RuntimeError where the two make different tokens."""
    import torch

    found: list[Compared] = []
    for name in variants:
        quantizer = VARIANTS[name]
        with tempfile.TemporaryDirectory() as folder:
            say(f"{name}: quantizing")
            out = Path(folder) / "checkpoint"
            out.mkdir()
            quantizer.quantize(model, out, device=device)
            engine = Transformers(compute_dtype="float32" if name == "fp32" else "bfloat16")
            with engine.open(out, quantizer=quantizer, device=device) as session:
                assert isinstance(session, TransformersSession)
                for shape in SHAPES:
                    found += _figures(name, session, shape=shape, repeats=repeats)
    return Comparison(
        model=model.name,
        device=detect().name if device == detect().kind else device,
        threads=torch.get_num_threads(),
        versions={name: version(name) for name in ("torch", "transformers")},
        figures=tuple(found),
    )


def _figures(
    variant: str, session: TransformersSession, *, shape: tuple[int, int, int], repeats: int
) -> Iterator[Compared]:
    batch_size, prompt_tokens, new_tokens = shape
    pairs = []
    for seed in range(-1, repeats):  # the first one warms up
        say(f"{variant}: batch {batch_size}, {prompt_tokens}+{new_tokens} tokens, repeat {seed + 1}")
        prompts = random_prompts(
            batch_size=batch_size,
            prompt_tokens=prompt_tokens,
            vocabulary_tokens=session.vocabulary_tokens,
            seed=1000 + seed,
        )
        if seed < 0:
            _check_same_tokens(session, prompts, new_tokens=new_tokens, variant=variant)
            continue
        ways = [_ours, _by_hand] if seed % 2 else [_by_hand, _ours]
        timed = {way: way(session, prompts, new_tokens=new_tokens) for way in ways}
        pairs.append((timed[_ours], timed[_by_hand]))
    for figure in FIGURES:
        yield Compared.of(
            [
                (
                    ours.figure_s(figure, new_tokens=new_tokens),
                    by_hand.figure_s(figure, new_tokens=new_tokens),
                )
                for ours, by_hand in pairs
            ],
            variant=variant,
            batch_size=batch_size,
            test=f"pp{prompt_tokens}+tg{new_tokens}",
            figure=figure,
            limit=LIMIT,
        )


def _check_same_tokens(
    session: TransformersSession, prompts: list[list[int]], *, new_tokens: int, variant: str
) -> None:
    import torch

    steps = [session.prefill(prompts, new_tokens=new_tokens)]
    steps += [session.decode_step() for _ in range(new_tokens - 1)]
    session.release()
    _, by_hand = _generate(session.model, torch.tensor(prompts), new_tokens=new_tokens)
    if [list(sequence) for sequence in zip(*steps, strict=True)] != by_hand:
        raise RuntimeError(f"{variant}: the two ways made different tokens")


def _ours(session: TransformersSession, prompts: list[list[int]], *, new_tokens: int) -> Timed:
    session.release()
    trace = time_generation(session, prompts=prompts, new_tokens=new_tokens, clock=time.perf_counter)
    return Timed(ttft_s=trace.ttft_s, end_to_end_s=trace.token_times_s[-1])


def _by_hand(session: TransformersSession, prompts: list[list[int]], *, new_tokens: int) -> Timed:
    import torch

    session.release()
    input_ids = torch.tensor(prompts, device=session.model.device)
    times_s, _ = _generate(session.model, input_ids, new_tokens=new_tokens)
    return Timed(ttft_s=times_s[0], end_to_end_s=times_s[-1])


def _generate(model: Any, input_ids: Any, *, new_tokens: int) -> tuple[list[float], list[list[int]]]:
    """Seconds from the call to each token, device synchronised, and the new tokens [sequence][token]."""
    import torch
    from transformers import StoppingCriteriaList

    input_ids = input_ids.to(model.device)
    model.generation_config.eos_token_id = None  # exactly as many tokens as asked for
    times_s: list[float] = []

    def note_time(sequences: Any, _scores: Any, **_: Any) -> Any:
        _wait_for(model.device)
        times_s.append(time.perf_counter() - start)
        return torch.zeros(len(sequences), dtype=torch.bool, device=model.device)

    _wait_for(model.device)
    start = time.perf_counter()
    with torch.no_grad():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note_time]),
        )
    if len(times_s) != new_tokens:
        raise RuntimeError(f"generate took {len(times_s)} steps for {new_tokens} tokens")
    made: list[list[int]] = output[:, input_ids.shape[1] :].tolist()
    return times_s, made


def _wait_for(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the page --------------------------------------------------------------------------------------------


def page(found: Comparison) -> str:
    """The comparison as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
    return "\n\n".join(
        (
            "# This project's clock beside `transformers.generate`",
            f"{found.model} on {found.device}, {found.threads} thread(s); {versions}. Both ways time the same loaded "
            "model on the same prompts, in alternation, and must make the same tokens. Ratio: ours ÷ by hand, "
            f"median and quartiles over the repeats; limit ± {100 * LIMIT:.0f} %: {verdict(found.figures)}.",
            ratio_table(found.figures, unit="ms", other="generate", scale=1e3),
        )
    )


def main() -> int:
    """0 when every figure is within the limit, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments = parser.parse_args()
    found = compare(
        arguments.model, variants=arguments.variants, device=arguments.device, repeats=arguments.repeats
    )
    write_comparison(arguments.folder, "generate", found, page=page(found))
    return 1 if missed(found.figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
