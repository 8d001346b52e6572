"""Which packages are installed, from their metadata: nothing is imported.

>>> installed_version("a-package-that-nobody-has") is None
True
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib import metadata


def installed_version(name: str) -> str | None:
    """The version of a package, or None when it isn't installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions by name, of those that are installed."""
    return {name: version for name in names if (version := installed_version(name)) is not None}


def quiet_torchao() -> None:
    """Only errors from torchao, which transformers imports where it is installed.

    It warns of every kernel that it has no library for, whether anything asked for them or not.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
