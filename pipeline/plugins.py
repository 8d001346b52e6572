"""Kind → file → class: a plugin is one file in a package, named after its kind.

>>> sorted(kinds("pipeline.engines"))
['transformers']
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from pipeline.values import Value


def kinds(package: str) -> tuple[str, ...]:
    """Names of the plugin files in `package`, sorted; nothing is imported but the package itself."""
    path = importlib.import_module(package).__path__
    return tuple(sorted(module.name for module in pkgutil.iter_modules(path) if module.name != "base"))


@cache
def plugin_class(package: str, kind: str) -> type[Value]:
    """The class that `package/kind.py` defines.

    Raises LookupError when there is no such file; an ImportError inside the file comes through as it is.
    """
    if kind not in kinds(package):
        raise LookupError(f"no {kind!r} in {package}; there are: {', '.join(kinds(package))}")
    module = importlib.import_module(f"{package}.{kind}")
    found = [
        item
        for item in vars(module).values()
        if isinstance(item, type)
        and issubclass(item, Value)
        and item.__module__ == module.__name__
        and "kind" in item.model_fields
    ]
    assert len(found) == 1, f"{module.__name__} must define exactly one plugin class, has {found}"
    assert found[0].model_fields["kind"].default == kind, f"{module.__name__}: kind must be {kind!r}"
    return found[0]


def plugin_classes(package: str) -> tuple[type[Any], ...]:
    """Every plugin class of `package`, by kind."""
    return tuple(plugin_class(package, kind) for kind in kinds(package))
