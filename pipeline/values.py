"""Frozen values, their canonical JSON and their digest.

Everything that crosses a module or process boundary is a `Value`, so that equal content has equal JSON and
an equal digest whatever machine wrote it.

>>> class Point(Value):
...     x: int
>>> Point(x=1).digest() == Point(x=1).digest()
True
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


class Value(BaseModel):
    """Immutable, no unknown fields, no silent conversion, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def to_json(self) -> str:
        """Readable JSON of every field; `model_validate_json` reads it back to an equal value."""
        return self.model_dump_json(indent=2)

    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON."""
        return digest(self.model_dump(mode="json"))


AnyValue = TypeVar("AnyValue", bound=Value)


def canonical_json(data: Any) -> str:
    """JSON with sorted keys and no spaces. Raises ValueError on NaN and infinity, TypeError on other types."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(data: Any) -> str:
    """SHA-256 (hex) of `canonical_json(data)`."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()
