"""What must hold around lm-eval while it runs: greedy decoding, the head left alone, silence.

with quiet(), plain_decoding(model), head_left_alone(model):
    ...
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def plain_decoding(model: Any) -> Iterator[None]:
    """Generation settings that shipped with the model (sampling, repetition penalty) out of the way."""
    shipped = getattr(model, "generation_config", None)
    if shipped is None:
        yield
        return
    from transformers import GenerationConfig

    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(shipped, name, None) for name in ids})
    try:
        yield
    finally:
        model.generation_config = shipped


@contextlib.contextmanager
def head_left_alone(model: Any) -> Iterator[None]:
    """HFLM ties head and embedding again, which would put 16-bit weights in place of a quantized head."""
    model.tie_weights = lambda *_, **__: None
    try:
        yield
    finally:
        del model.tie_weights


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """lm-eval's bars, log lines and prints kept off the terminal's streams; no worker processes for it."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    start, logger = tqdm.__init__, logging.getLogger("lm_eval")
    level, several = logger.level, os.environ.get("DISABLE_MULTIPROC")
    tqdm.__init__ = functools.partialmethod(start, disable=True)
    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        tqdm.__init__ = start
        logger.setLevel(level)
        if several is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = several
