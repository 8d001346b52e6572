"""llama.cpp as a shared library: found in the wheel xllamacpp, checked before it is trusted, called by ctypes.

The wheel's only shared object exports llama.cpp's C API, so each step of a model can be run and timed in this process,
with no server in between. Structs pass by value there, and a wrong layout would corrupt memory without a word. So one
version of the wheel is known, and at loading its own default parameters must show the layout that is assumed here.

    library = load_library()
    library.functions.llama_print_system_info().decode()
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import PrerequisiteError
from pipeline.packages import installed_version
from pipeline.processor import processor_flags
from pipeline.results import Problem

PACKAGE = "xllamacpp"
KNOWN_VERSION = "2026.10.11549"
"""Of the wheel; the structs below are those of its llama.cpp (0.6.0-dev)."""
PROJECT_PAGE = "https://github.com/xorbitsai/xllamacpp"
FIX_VERSION = f"pip install {PACKAGE}=={KNOWN_VERSION}"
FIX_EXTRA = "pip install -c constraints.txt -e '.[llama-cpp]'"

LOAD_WITHOUT_MMAP = 0
"""`LLAMA_LOAD_MODE_NONE`: tensors are read into memory of the process."""
ONE_DEVICE = 0
"""`LLAMA_SPLIT_MODE_NONE`."""
ALL_LAYERS = -1

_NAMES = {
    "llama_load_mode_name": {-1: "auto", 0: "none", 1: "mmap"},
    "llama_flash_attn_type_name": {-1: "auto", 0: "disabled", 1: "enabled"},
}
"""Enumerators that are used here, as llama.cpp itself names them."""
_KEPT_LINES = 4000
_DEBUG_LEVEL, _ERROR_LEVEL, _CONTINUED_LEVEL = 1, 4, 5
"""`GGML_LOG_LEVEL_DEBUG`, `…_ERROR`, `…_CONT` of ggml.h."""


class ModelParameters(ctypes.Structure):
    """`llama_model_params` of llama.h."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParameters(ctypes.Structure):
    """`llama_context_params` of llama.h."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    """`llama_batch` of llama.h: tokens with positions, sequences, and a mark on those whose logits are wanted."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_F16 = 1
"""`GGML_TYPE_F16`."""
MODEL_DEFAULTS: Mapping[str, Any] = {
    "n_gpu_layers": ALL_LAYERS,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "use_extra_bufts": True,
}
CONTEXT_DEFAULTS: Mapping[str, Any] = {
    **{"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max_per_seq": 1},
    **{"n_threads": 4, "n_threads_batch": 4},
    **dict.fromkeys(("rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type"), -1),
    **dict.fromkeys(("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"), -1.0),
    **{"defrag_thold": -1.0, "type_k": _F16, "type_v": _F16},
    **dict.fromkeys(("offload_kqv", "no_perf", "op_offload", "swa_full"), True),
}
"""What `llama_*_default_params` of the known version return; every other field is 0."""

KV_ELEMENT_BYTES = 2
"""Keys and values are kept in F16, llama.cpp's default."""
MOST_SEQUENCES = 256
"""`LLAMA_MAX_SEQ`."""
CACHE_GRAIN_TOKENS = 256
"""A sequence's cache is made in such pieces (`llama_n_ctx_seq` rounds up)."""
_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)


class LlamaLog:
    """What llama.cpp says, kept instead of printed."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._errors: deque[str] = deque(maxlen=8)
        self._begun, self._level = "", 0
        self.callback = _LOG_CALLBACK(self._take)

    def _take(self, level: int, text: bytes, _data: object) -> None:
        if level != _CONTINUED_LEVEL:
            self._level = level
        if self._level == _DEBUG_LEVEL:
            return
        *whole, self._begun = (self._begun + text.decode("utf-8", "replace")).split("\n")
        self.lines.extend(whole)
        if self._level == _ERROR_LEVEL:
            self._errors.extend(whole)

    def clear(self) -> None:
        """Forget everything, so that what comes next belongs to the next call."""
        self.lines.clear()
        self._errors.clear()

    def reason(self) -> str:
        """The errors since `clear`, or the last line, as one sentence."""
        said = list(self._errors) or list(self.lines)[-1:]
        return "; ".join(line.strip() for line in said if line.strip()) or "llama.cpp gave no reason"


class LlamaLibrary:
    """The loaded library: its C functions with their types, and its log."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions
        self.log = LlamaLog()
        functions.llama_log_set(self.log.callback, None)
        functions.llama_backend_init()

    def features(self) -> str:
        """What the processor can do of what this build uses, such as "AVX2, F16C, FMA, LLAMAFILE, REPACK"."""
        said = self.functions.llama_print_system_info().decode()
        pairs = (part.split("=") for part in said.replace("CPU :", "").split("|") if "=" in part)
        return ", ".join(name.strip() for name, value in pairs if value.strip() == "1")

    def version(self) -> str:
        """llama.cpp's own version and that of the wheel."""
        return f"llama.cpp {self.functions.llama_version().decode()} ({PACKAGE} {installed_version(PACKAGE)})"


def library_problems(*, device: str, flags: frozenset[str] | None = None) -> tuple[Problem, ...]:
    """What keeps the library from being used on `device`; loaded only to ask it for a GPU.

    `flags` are the CPU's instruction sets, by default those that the system names.
    """
    found = installed_version(PACKAGE)
    if found is None:
        return (Problem(what=f"the package {PACKAGE} (llama.cpp) is not installed", fix=FIX_EXTRA),)
    if found.split("+")[0] != KNOWN_VERSION:
        return (_unknown(f"{PACKAGE} {found} is installed, and only {KNOWN_VERSION} is known"),)
    flags = processor_flags() if flags is None else flags
    if flags and platform.machine() in ("x86_64", "AMD64") and "avx2" not in flags:
        return (
            Problem(
                what=f"this CPU has no AVX2, which {PACKAGE}'s llama.cpp is built for",
                fix="use the engine transformers with a quantizer of its own (quanto, bitsandbytes)",
            ),
        )
    if device == "cuda" and not load_library().functions.llama_supports_gpu_offload():
        return (
            Problem(
                what=f"the installed {PACKAGE} runs on the CPU only",
                fix=f"install its CUDA wheel, version {KNOWN_VERSION}, from the project's own index: {PROJECT_PAGE}",
            ),
        )
    return ()


@cache
def load_library() -> LlamaLibrary:
    """The installed library, once a process. Raises PrerequisiteError when it isn't the known one."""
    if problems := library_problems(device="cpu"):
        raise _refused(problems[0])
    path = _library_file()
    if path is None:
        raise _refused(_unknown(f"{PACKAGE} holds no shared library"))
    try:
        functions = ctypes.CDLL(str(path))
        _declare(functions)
    except (OSError, AttributeError) as error:
        raise _refused(_unknown(f"{path}: {error}")) from error
    if fault := next(_layout_faults(functions), ""):
        raise _refused(_unknown(f"{path}: {fault}"))
    return LlamaLibrary(functions)


def _refused(problem: Problem) -> PrerequisiteError:
    return PrerequisiteError(f"{problem.what}; fix: {problem.fix}")


def _unknown(what: str) -> Problem:
    return Problem(what=f"{what} (known: {PACKAGE} {KNOWN_VERSION})", fix=FIX_VERSION)


def _library_file() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = [path for folder in folders or () for path in sorted(Path(folder).glob(f"{PACKAGE}*"))]
    return next((path for path in files if path.suffix in (".so", ".pyd", ".dylib")), None)


# --- the layout ------------------------------------------------------------------------------------------


def _layout_faults(functions: Any) -> Iterator[str]:
    """What the library shows of its structs and enumerators that isn't as it is assumed here."""
    for name, known in _NAMES.items():
        for value, expected in known.items():
            said = getattr(functions, name)(value).decode()
            if said != expected:
                yield f"{name}({value}) is {said!r}, not {expected!r}"
    for function, struct, defaults in (
        ("llama_model_default_params", ModelParameters, MODEL_DEFAULTS),
        ("llama_context_default_params", ContextParameters, CONTEXT_DEFAULTS),
    ):
        images = [_default_image(functions, function, struct, fill=fill) for fill in (0xAA, 0x55)]
        if fault := layout_fault(struct, images=images, defaults=defaults):
            yield f"{function}: {fault}"


_SLACK = 256
"""Bytes behind an assumed struct that a longer real one may write into."""


def _default_image(functions: Any, name: str, struct: type[ctypes.Structure], *, fill: int) -> bytes:
    """The memory that a function leaves which returns a struct, filled with `fill` before.

    On x86-64 (System V and Windows) a caller hands the place of a large result as a hidden first argument, so that
    every byte that is written can be seen; elsewhere only the values can.
    """
    size = ctypes.sizeof(struct) + _SLACK
    if platform.machine() in ("x86_64", "AMD64"):
        memory = (ctypes.c_ubyte * size)(*([fill] * size))
        ctypes.CFUNCTYPE(c_void_p, c_void_p)((name, functions))(ctypes.addressof(memory))
        return bytes(memory)
    roomy = type(
        "Roomy", (ctypes.Structure,), {"_fields_": (("known", struct), ("more", ctypes.c_ubyte * _SLACK))}
    )
    values = bytes(ctypes.CFUNCTYPE(roomy)((name, functions))())[: ctypes.sizeof(struct)]
    return _with_padding(struct, values, fill=fill) + bytes([fill] * _SLACK)


def _with_padding(struct: type[ctypes.Structure], values: bytes, *, fill: int) -> bytes:
    covered = _covered(struct)
    return bytes(value if place in covered else fill for place, value in enumerate(values))


def layout_fault(
    struct: type[ctypes.Structure], *, images: Iterable[bytes], defaults: Mapping[str, Any]
) -> str:
    """How memory images of default parameters differ from `struct` with `defaults` (else 0); "" when they don't.

    The images are of memory filled with different bytes before: what is equal to the struct's size and holes must be
    exactly what was not written.
    """
    images = list(images)
    size = ctypes.sizeof(struct)
    written = {place for place, found in enumerate(zip(*images, strict=True)) if len(set(found)) == 1}
    if written != _covered(struct):
        return f"{len(written)} bytes are written where {len(_covered(struct))} were expected, or at other places"
    found = struct.from_buffer_copy(images[0][:size])
    for name, *_ in struct._fields_:
        value, expected = getattr(found, name), defaults.get(name, 0)
        if (value or 0) != expected:
            return f"{name} is {value!r} by default, not {expected!r}"
    return ""


def _covered(struct: type[ctypes.Structure]) -> set[int]:
    """The bytes of a struct that belong to a field; the others are padding."""
    fields = [getattr(struct, field[0]) for field in struct._fields_]
    return {place for field in fields for place in range(field.offset, field.offset + field.size)}


# --- the functions ---------------------------------------------------------------------------------------

_POINTER = c_void_p
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LOG_CALLBACK, c_void_p)),
    "llama_version": (c_char_p, ()),
    "llama_print_system_info": (c_char_p, ()),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_load_mode_name": (c_char_p, (ctypes.c_int,)),
    "llama_flash_attn_type_name": (c_char_p, (ctypes.c_int,)),
    "llama_model_default_params": (ModelParameters, ()),
    "llama_context_default_params": (ContextParameters, ()),
    "llama_model_load_from_file": (_POINTER, (c_char_p, ModelParameters)),
    "llama_model_free": (None, (_POINTER,)),
    "llama_model_size": (c_uint64, (_POINTER,)),
    "llama_model_has_encoder": (c_bool, (_POINTER,)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_vocab_n_tokens": (c_int32, (_POINTER,)),
    "llama_init_from_model": (_POINTER, (_POINTER, ContextParameters)),
    "llama_free": (None, (_POINTER,)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_memory_clear": (None, (_POINTER, c_bool)),
    "llama_n_ctx_seq": (c_uint32, (_POINTER,)),
    "llama_n_batch": (c_uint32, (_POINTER,)),
    "llama_n_ubatch": (c_uint32, (_POINTER,)),
    "llama_n_seq_max": (c_uint32, (_POINTER,)),
    "llama_n_threads": (c_int32, (_POINTER,)),
    "llama_n_threads_batch": (c_int32, (_POINTER,)),
    "llama_decode": (c_int32, (_POINTER, Batch)),
    "llama_synchronize": (None, (_POINTER,)),
    "llama_get_logits_ith": (_POINTER, (_POINTER, c_int32)),
}
"""Result and arguments of what is called, from llama.h of the known version."""


def _declare(functions: Any) -> None:
    """Raises AttributeError for one that the library lacks."""
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
