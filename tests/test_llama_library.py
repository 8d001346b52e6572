"""The proof that llama.cpp's structs lie as they are assumed to, its log, its buffers, and what keeps it from use."""

from __future__ import annotations

import ctypes
import platform
import re
from typing import Any

import pytest

from pipeline.errors import PrerequisiteError
from pipeline.llama_buffers import buffers, cache_width, caches, flash_attention
from pipeline.llama_library import (
    CONTEXT_DEFAULTS,
    KNOWN_VERSION,
    MODEL_DEFAULTS,
    ContextParameters,
    LlamaLog,
    ModelParameters,
    layout_fault,
    library_problems,
    load_library,
)
from pipeline.packages import installed_version
from tests.tiny_gguf import needs_llama_cpp

STRUCTS = pytest.mark.parametrize(
    ("struct", "defaults"), [(ModelParameters, MODEL_DEFAULTS), (ContextParameters, CONTEXT_DEFAULTS)]
)


def images(struct: type[ctypes.Structure], defaults: Any, *, room: int = 64) -> list[bytes]:
    """Memory as a library leaves it that has exactly this struct, filled with two different bytes before."""
    found = []
    for fill in (0xAA, 0x55):
        memory = bytearray([fill] * (ctypes.sizeof(struct) + room))
        values = struct(**defaults)
        for name, *_ in struct._fields_:
            field = getattr(struct, name)
            span = slice(field.offset, field.offset + field.size)
            memory[span] = bytes(values)[span]
        found.append(bytes(memory))
    return found


@STRUCTS
def test_memory_with_the_known_layout_and_defaults_passes(struct: Any, defaults: Any) -> None:
    assert layout_fault(struct, images=images(struct, defaults), defaults=defaults) == ""


@STRUCTS
def test_a_field_more_anywhere_in_the_real_struct_is_noticed(struct: Any, defaults: Any) -> None:
    for place in range(0, ctypes.sizeof(struct) + 8, 8):
        longer = [image[:place] + bytes(8) + image[place:] for image in images(struct, defaults)]
        assert layout_fault(struct, images=longer, defaults=defaults) != "", place


@STRUCTS
def test_a_field_less_is_noticed(struct: Any, defaults: Any) -> None:
    for place in range(0, ctypes.sizeof(struct) - 8, 8):
        shorter = [
            image[:place] + image[place + 8 :] + image[-8:] for image in images(struct, defaults, room=72)
        ]
        assert layout_fault(struct, images=shorter, defaults=defaults) != "", place


def test_a_changed_default_is_named() -> None:
    changed = images(ContextParameters, {**CONTEXT_DEFAULTS, "n_batch": 4096})
    fault = layout_fault(ContextParameters, images=changed, defaults=CONTEXT_DEFAULTS)
    assert fault == "n_batch is 4096 by default, not 2048"


@needs_llama_cpp
def test_the_installed_library_has_the_known_layout_and_says_what_it_is() -> None:
    library = load_library()
    assert load_library() is library
    assert library.functions.llama_context_default_params().n_ubatch == 512
    assert KNOWN_VERSION in library.version()
    assert re.fullmatch(r"\w+(, \w+)*", library.features())


@pytest.mark.skipif(
    installed_version("xllamacpp") != KNOWN_VERSION or platform.machine() not in ("x86_64", "AMD64"),
    reason=f"asked only of x86 with xllamacpp {KNOWN_VERSION}",
)
def test_a_processor_without_avx2_is_told_what_to_use_instead() -> None:
    (problem,) = library_problems(device="cpu", flags=frozenset({"sse2", "avx"}))
    assert "AVX2" in problem.what
    assert "transformers" in problem.fix
    assert library_problems(device="cpu", flags=frozenset({"avx2"})) == ()


@pytest.mark.skipif(installed_version("xllamacpp") is not None, reason="the optional extra is installed")
def test_a_missing_package_comes_with_its_fix() -> None:
    with pytest.raises(PrerequisiteError, match=r"pip install 'pipeline\[llama-cpp\]'"):
        load_library()


# --- the log ---------------------------------------------------------------------------------------------

DEBUG, INFO, ERROR, CONTINUED = 1, 2, 4, 5


def test_errors_are_the_reason_and_debugging_is_left_out() -> None:
    log = LlamaLog()
    log.callback(INFO, b"loading\n", None)
    assert log.reason() == "loading"
    log.callback(DEBUG, b"graph: 1\n", None)
    log.callback(ERROR, b"load: no ", None)
    log.callback(CONTINUED, b"tensor\n", None)
    log.callback(INFO, b"bye\n", None)
    assert list(log.lines) == ["loading", "load: no tensor", "bye"]
    assert log.reason() == "load: no tensor"
    log.clear()
    assert log.reason() == "llama.cpp gave no reason"


# --- buffers from the log --------------------------------------------------------------------------------

LINES = (
    "print_info: n_embd_k_gqa          = 192",
    "print_info: n_embd_v_gqa          = 192",
    "load_tensors:          CPU model buffer size =   136.40 MiB",
    "load_tensors:   CPU_REPACK model buffer size =    28.50 MiB",
    "llama_kv_cache:        CPU KV buffer size =    33.75 MiB",
    "llama_kv_cache: size =   33.75 MiB (   512 cells,  30 layers,  3/3 seqs), K (f16):   16.88 MiB",
    "resolve_fused_ops: Flash Attention enabled",
    "sched_reserve:        CPU compute buffer size =    15.17 MiB",
    "sched_reserve:        CPU compute buffer size =    15.50 MiB",
)


def test_caches_are_exact_where_their_shape_explains_the_logged_size() -> None:
    (cache,) = caches(LINES, values_per_cell=cache_width(LINES))
    assert cache.allocated_bytes == 512 * 3 * 30 * 384 * 2
    assert cache.filled_bytes([100, 20, 5]) == 125 * 30 * 384 * 2
    assert cache.filled_bytes([9999, 0, 0]) == 512 * 30 * 384 * 2


def test_caches_of_another_shape_keep_the_logged_size() -> None:
    assert cache_width(["print_info: n_embd_k_gqa          = [192, 0, 192]"]) is None
    for values in (None, 500):
        (cache,) = caches(LINES, values_per_cell=values)
        assert cache.allocated_bytes == 33.75 * 2**20


def test_recurrent_state_is_full_from_the_start() -> None:
    line = "llama_memory_recurrent: size =    2.00 MiB (     4 cells,  24 layers,  4 seqs  0 rs_seq), R"
    (cache,) = caches([line], values_per_cell=384)
    assert cache.filled_bytes([3]) == cache.allocated_bytes == 2 * 2**20


def test_buffers_of_weights_add_up_and_work_buffers_made_anew_replace_the_old() -> None:
    assert buffers(LINES, "model").by_place == {
        "CPU": round(136.40 * 2**20),
        "CPU_REPACK": round(28.50 * 2**20),
    }
    assert buffers(LINES, "compute").total_bytes == round(15.50 * 2**20)


def test_flash_attention_is_what_the_context_says_last() -> None:
    assert flash_attention(LINES) is True
    assert flash_attention((*LINES, "resolve_fused_ops: Flash Attention disabled")) is False
    assert flash_attention(()) is None
