"""Checks the distances on held text beside llama.cpp's own `llama-perplexity --kl-divergence`: same weights, same text.

One GGUF file of 16-bit floats is the baseline; each of the others is compared with it, here through transformers in
FP32 and there through llama.cpp. Given `--llama-quantize`, each file is also written out as FP32 floats for llama.cpp,
which then computes as is done here: what is left is the arithmetic of the figures themselves. Without that, llama.cpp
rounds activations to 8 bits beside quantized weights (and to 16 beside F16), which is part of its own divergence.
The tokens that llama.cpp scored are read from its file and must be those scored here. Writes `compare_kl.json` and
`compare_kl.md` to FOLDER and prints the page.

    python -m scripts.compare_kl FOLDER --model CHECKPOINT --text FILE --llama-perplexity PATH
        [--llama-quantize PATH] [--types q8_0 q4_0] [--context 512] [--windows 16] [--threads 1]

`llama-perplexity` is built from llama.cpp's source:
`cmake -S llama.cpp -B build && cmake --build build --target llama-perplexity llama-quantize`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.distribution_results import DistributionRequest, DistributionResult
from pipeline.distribution_run import measure_distribution, write_reference
from pipeline.distribution_text import Windows, read_windows
from pipeline.errors import PipelineError, StageError, UsageError
from pipeline.gguf_file import GGUF_NAME
from pipeline.progress import silent
from pipeline.quantizers.gguf import Gguf
from pipeline.store import file_sha256, write_atomically
from pipeline.text_table import markdown_table
from pipeline.values import Value, digest
from scripts.compared_times import say

KEY = "compared with llama.cpp"
BASELINE = "f16"
FIGURES: Mapping[str, tuple[str, float]] = {
    "token_perplexity": (r"Mean PPL\(Q\) +: +([\d.]+)", 1),
    "baseline_token_perplexity": (r"Mean PPL\(base\) +: +([\d.]+)", 1),
    "log_perplexity_ratio": (r"Mean ln\(PPL\(Q\)/PPL\(base\)\) +: +(-?[\d.]+)", 1),
    "kl_mean_nats": (r"Mean +KLD: +(-?[\d.]+)", 1),
    "kl_median_nats": (r"Median +KLD: +(-?[\d.]+)", 1),
    "kl_p99_nats": (r"99\.0% +KLD: +(-?[\d.]+)", 1),
    "kl_p999_nats": (r"99\.9% +KLD: +(-?[\d.]+)", 1),
    "kl_max_nats": (r"Maximum KLD: +(-?[\d.]+)", 1),
    "probability_difference_mean": (r"Mean +Δp: +(-?[\d.]+)", 0.01),
    "probability_difference_rms": (r"RMS Δp +: +([\d.]+)", 0.01),
    "top1_agreement_share": (r"Same top p: +([\d.]+)", 0.01),
}
"""Our name of a figure; how llama.cpp prints it, and what one of its units is."""


class ComparedFigure(Value):
    """One figure of one variant by both; `arithmetic` is llama.cpp's."""

    variant: str
    arithmetic: str
    figure: str
    ours: float
    llama_cpp: float


class KlComparison(Value):
    """All figures, and on what."""

    model: str
    text_sha256: str
    context_tokens: int
    windows: int
    scored_tokens: int
    llama_perplexity: str
    figures: tuple[ComparedFigure, ...]


def check_given(arguments: argparse.Namespace) -> None:
    """Raises UsageError for what can't be compared, before anything is made."""
    for option in ("llama_perplexity", "llama_quantize"):
        path = getattr(arguments, option)
        if path is not None and shutil.which(path) is None:
            raise UsageError(f"--{option.replace('_', '-')} {path}: isn't an executable program")
    if arguments.windows < 2 or arguments.context < 8 or arguments.threads < 1:
        raise UsageError("--windows must be at least 2, --context at least 8 and --threads at least 1")


def compare(arguments: argparse.Namespace) -> KlComparison:
    """Everything in turn. Raises UsageError as `check_given` does, StageError when llama.cpp fails."""
    check_given(arguments)
    folder: Path = arguments.folder
    request = DistributionRequest(
        text=str(arguments.text.resolve()),
        text_sha256=file_sha256(arguments.text),
        context_tokens=arguments.context,
        max_tokens=arguments.context * arguments.windows,
    )
    types = (BASELINE, *arguments.types)
    for kind in types:
        make_variant(arguments.model, folder / kind, kind)
    windows = read_windows(request, folder=folder / BASELINE)
    ours = {kind: _ours(folder, kind, windows, request) for kind in types}
    figures: list[ComparedFigure] = []
    for arithmetic in ("own", "FP32") if arguments.llama_quantize else ("own",):
        theirs = LlamaPerplexity(arguments, fp32=arithmetic == "FP32", windows=windows)
        theirs.write_base(folder / BASELINE / GGUF_NAME)
        for kind in types:
            figures += _figures(kind, arithmetic, ours[kind], theirs.compare(folder / kind / GGUF_NAME))
        theirs.base.unlink()
    return KlComparison(
        model=arguments.model.resolve().name,
        text_sha256=request.text_sha256,
        context_tokens=request.context_tokens,
        windows=len(windows.ids),
        scored_tokens=len(windows.ids) * windows.scored_tokens,
        llama_perplexity=_version(arguments.llama_perplexity),
        figures=tuple(figures),
    )


def make_variant(model: Path, out: Path, kind: str) -> None:
    """The model in `out`, written anew unless the same model's files made what is there; never half of it."""
    made_from, source = out / "made-from.sha256", _digest_of(model)
    if made_from.is_file() and made_from.read_text("utf-8") == source:
        return
    say(f"writing {out}")
    partial = out.with_name(f".partial-{out.name}")
    for left in (partial, out):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    Gguf.model_validate({"type": kind}).quantize(model, partial, device="cpu", progress=silent)
    (partial / made_from.name).write_text(source, "utf-8")
    partial.rename(out)


def _digest_of(model: Path) -> str:
    files = sorted(path for path in model.iterdir() if path.is_file())
    return digest({path.name: file_sha256(path) for path in files})


def _ours(folder: Path, kind: str, windows: Windows, request: DistributionRequest) -> DistributionResult:
    """Through transformers in FP32; the baseline writes its distribution first and is compared with it too."""
    say(f"{kind} through transformers")
    model: Any = Gguf.model_validate({"type": kind}).load(
        folder / kind, device="cpu", compute_dtype="float32"
    )
    reference = folder / "reference"
    if kind == BASELINE:
        shutil.rmtree(reference, ignore_errors=True)
        reference.mkdir()
        write_reference(model, windows, folder=reference, key=KEY, batch_size=4, progress=say)
    asked = request.model_copy(update={"reference": str(reference), "reference_key": KEY})
    return measure_distribution(model, windows, request=asked, batch_size=4, progress=say)


class LlamaPerplexity:
    """llama.cpp's program on one text, with `base` as the file of the baseline's log-probabilities."""

    def __init__(self, arguments: argparse.Namespace, *, fp32: bool, windows: Windows) -> None:
        self._given, self._fp32, self._windows = arguments, fp32, windows
        self.base: Path = arguments.folder / "llama-base.kld"

    def write_base(self, file: Path) -> None:
        """Raises StageError when llama.cpp scored other tokens than ours."""
        self._run(file)
        found, expected = tokens_of(self.base), self._windows.ids
        if found != expected:
            raise StageError(
                f"llama.cpp cut {self._given.text} into other tokens than the checkpoint's tokenizer"
            )

    def compare(self, file: Path) -> dict[str, float]:
        """The figures that it prints of a file against the baseline."""
        return read_figures(self._run(file, "--kl-divergence"))

    def _run(self, file: Path, *options: str) -> str:
        """Cache in FP32, too: in F16 it would be one more difference."""
        given = self._given
        say(f"{file.parent.name} through llama.cpp{' in FP32' if self._fp32 else ''}")
        command = [str(given.llama_perplexity), "-m", str(self._as_run(file)), "-f", str(given.text)]
        command += ["-c", str(given.context), "--chunks", str(given.windows), "-t", str(given.threads)]
        command += ["-ctk", "f32", "-ctv", "f32", "--kl-divergence-base", str(self.base), *options]
        return _said_by(command)

    def _as_run(self, file: Path) -> Path:
        """The file itself, or its weights written out as FP32."""
        if not self._fp32:
            return file
        floats = file.with_name("floats.gguf")
        if not floats.is_file():
            partial = file.with_name("floats.partial")
            command = [str(self._given.llama_quantize), "--allow-requantize", str(file), str(partial), "F32"]
            _said_by(command)
            partial.rename(floats)
        return floats


def _said_by(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        raise StageError(f"{Path(command[0]).name} failed: {done.stderr.strip()[-500:]}")
    return done.stdout + done.stderr


def tokens_of(base: Path) -> tuple[tuple[int, ...], ...]:
    """Token ids [windows][context] in llama.cpp's file: magic, n_ctx, n_vocab, n_chunk, tokens, all int32."""
    import numpy

    with base.open("rb") as file:
        if file.read(8) != b"_logits_":
            raise StageError(f"{base} isn't a file of llama.cpp's log-probabilities")
        context, _, windows = numpy.frombuffer(file.read(12), dtype="<i4").tolist()
        tokens = numpy.frombuffer(file.read(4 * context * windows), dtype="<i4")
    return tuple(map(tuple, tokens.reshape(windows, context).tolist()))


def read_figures(text: str) -> dict[str, float]:
    """Figures by our names. Raises StageError naming the one that isn't in llama.cpp's output."""
    found = {}
    for name, (pattern, unit) in FIGURES.items():
        match = re.search(pattern, text)
        if match is None:
            raise StageError(f"llama-perplexity printed no {name} ({pattern})")
        found[name] = float(match[1]) * unit
    return found


def _figures(
    kind: str, arithmetic: str, ours: DistributionResult, theirs: dict[str, float]
) -> Iterator[ComparedFigure]:
    assert ours.distance is not None
    for name, value in theirs.items():
        mine = getattr(ours if name in DistributionResult.model_fields else ours.distance, name)
        if mine is not None:
            yield ComparedFigure(variant=kind, arithmetic=arithmetic, figure=name, ours=mine, llama_cpp=value)


def _version(program: Path) -> str:
    match = re.search(r"version: *(.+)", _said_by([str(program), "--version"]))
    return match[1] if match else "unknown"


def page(found: KlComparison) -> str:
    """The comparison as Markdown."""
    header = ("variant", "llama.cpp computes in", "figure", "ours", "llama.cpp", "difference")
    rows = [
        (
            one.variant,
            "FP32" if one.arithmetic == "FP32" else "its own kernels",
            one.figure,
            f"{one.ours:.6f}",
            f"{one.llama_cpp:.6f}",
            f"{one.ours - one.llama_cpp:+.6f}",
        )
        for one in found.figures
    ]
    return "\n\n".join(
        [
            f"# Distances on held text, beside llama-perplexity ({found.llama_perplexity})",
            f"{found.model}, baseline {BASELINE}; {found.windows} windows of {found.context_tokens} tokens, "
            f"{found.scored_tokens:,} scored, the same tokens in both; text with SHA-256 {found.text_sha256[:16]}…. "
            "Ours computes in FP32.",
            markdown_table(header, rows, text_columns=("llama.cpp computes in", "figure")),
        ]
    )


def main() -> int:
    """Exit code 0; a user's mistake is said without a traceback."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for option in ("--model", "--text", "--llama-perplexity"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--llama-quantize", type=Path)
    parser.add_argument("--types", nargs="+", default=["q8_0", "q4_0"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    try:
        found = compare(arguments)
    except PipelineError as error:
        say(str(error))
        return error.exit_code
    write_atomically(arguments.folder / "compare_kl.json", found.to_json())
    write_atomically(arguments.folder / "compare_kl.md", page(found) + "\n")
    print(page(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
