"""YAML text → plain data plus the line of every key, with the surprises of YAML 1.1 taken out.

PyYAML follows YAML 1.1, where `no` is False, `1:10` is 70 and `1e-2` is text. A recipe is read by the rules
people expect (the core schema of YAML 1.2): only `true`/`false` are booleans, `1e-2` is a number, and what
is neither stays text, which the schema then refuses by name. Tags, duplicate keys, merge keys and aliases
that refer to themselves are refused.

>>> parse("a: [1, 1e-2, no]").data
{'a': [1, 0.01, 'no']}
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import RecipeError

KeyPath = tuple[str | int, ...]

_MAX_NODES = 20_000
_MAX_DEPTH = 50
_TOO_DEEP = f"the document nests more than {_MAX_DEPTH} levels deep"
_UNSTORABLE = re.compile("[\\x00\\ud800-\\udfff]")
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2's core schema; used for composing nodes only."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's name)


for _name, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9][0-9_]*$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:(?:[0-9][0-9_]*)?\.[0-9_]+|[0-9][0-9_]*\.?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
        "-+0123456789.",
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN"),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), [*_first])
_Loader.add_implicit_resolver(_TAG + "null", re.compile(r"^$"), [""])


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a document: where and what."""

    path: KeyPath
    line: int | None
    message: str

    def __str__(self) -> str:
        """One line of printable text, whatever the document holds."""
        where = f"line {self.line}: " if self.line else ""
        what = f"{dotted(self.path)}: " if self.path else ""
        return one_line(where + what + self.message)


@dataclass(frozen=True)
class Document:
    """Plain data of one YAML document and the lines (from 1) its keys and items stand on."""

    data: Any
    lines: dict[KeyPath, int]
    faults: tuple[Fault, ...] = ()
    numbers: dict[KeyPath, str] = field(default_factory=dict)
    """Numbers as they are written: `25921e05` stays readable in a message."""

    def line(self, path: KeyPath) -> int | None:
        """Line of `path`, or of its nearest ancestor that the text holds."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None


@dataclass
class _Builder:
    lines: dict[KeyPath, int] = field(default_factory=dict)
    numbers: dict[KeyPath, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    open_nodes: set[int] = field(default_factory=set)
    nodes: int = 0

    def fault(self, path: KeyPath, node: yaml.Node, message: str) -> None:
        self.faults.append(Fault(path, node.start_mark.line + 1, message))

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise RecipeError(f"the document expands to more than {_MAX_NODES} values (nested aliases?)")
        if len(path) > _MAX_DEPTH:
            raise RecipeError(_TOO_DEEP)
        if id(node) in self.open_nodes:
            self.fault(path, node, "an alias that contains itself is not allowed")
            return None
        self.lines.setdefault(path, node.start_mark.line + 1)
        self.open_nodes.add(id(node))
        try:
            return self._build(node, path)
        finally:
            self.open_nodes.discard(id(node))

    def _build(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self.fault(path, node, f"the tag {node.tag!r} is not allowed: recipes hold plain data only")
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        return self.mapping(node, path)

    def mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in (_TAG + "str",):
                text = getattr(key_node, "value", "")
                self.fault(path, key_node, f"the key {text!r} must be plain text")
                continue
            key = key_node.value
            if key == "<<":
                self.fault(path, key_node, "merge keys (<<) are not supported; write the keys out")
            elif key in result:
                first = self.lines[(*path, key)]
                self.fault((*path, key), key_node, f"the key stands twice (first on line {first})")
            else:
                self.lines[(*path, key)] = key_node.start_mark.line + 1
                result[key] = self.build(value_node, (*path, key))
        return result

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        kind = node.tag.removeprefix(_TAG)
        text = node.value
        if kind == "str":
            if not _UNSTORABLE.search(text):
                return text
            self.fault(path, node, "holds a NUL or half a surrogate pair, which no name or path can hold")
            return None
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            return self.number(int, text.replace("_", ""), node, path)
        if kind == "float":
            return self.number(
                float, text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"), node, path
            )
        self.fault(path, node, f"the tag {node.tag!r} is not allowed: recipes hold plain data only")
        return None

    def number(self, kind: type[int] | type[float], text: str, node: yaml.Node, path: KeyPath) -> Any:
        try:
            value = kind(text)
            finite = math.isfinite(value)
        except (ValueError, OverflowError):
            value, finite = 0, False
        if not finite:
            self.fault(path, node, f"{node.value[:40]!r} is not a finite number")
            return None
        self.numbers[path] = node.value
        return value


def dotted(path: KeyPath) -> str:
    """`("gate", 0, "factor")` → `gate[0].factor`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{shortened(part)}"
    return text


def shortened(text: str, *, limit: int = 60) -> str:
    """At most `limit` characters, so that a pasted file in place of a name doesn't fill the screen."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def one_line(text: str) -> str:
    """`text` with line breaks and control characters (which could steer a terminal) written as escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def parse(text: str) -> Document:
    """The single document in `text`. Raises RecipeError when it isn't YAML or not exactly one document."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise RecipeError(
                "the file is empty; a recipe needs at least 'model' and 'precisions' or 'variants'"
            )
        builder = _Builder()
        data = builder.build(node, ())
    except yaml.composer.ComposerError as error:
        raise RecipeError(_marked("holds more than one document or an undefined alias", error)) from error
    except yaml.MarkedYAMLError as error:
        raise RecipeError(_marked("is not valid YAML", error)) from error
    except RecursionError:
        raise RecipeError(_TOO_DEEP) from None
    except yaml.YAMLError as error:
        raise RecipeError(f"is not valid YAML: {one_line(str(error).splitlines()[0])}") from error
    finally:
        if loader is not None:
            loader.dispose()
    return Document(data=data, lines=builder.lines, faults=tuple(builder.faults), numbers=builder.numbers)


def _marked(what: str, error: yaml.MarkedYAMLError) -> str:
    line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
    return one_line(f"{line}{what}: {shortened(str(error.problem or error.context), limit=200)}")


def _near_file(path: Path) -> str:
    """A YAML file of nearly that name, in the same folder or among the recipes here."""
    folders = dict.fromkeys((path.parent, Path("recipes")))
    known = [file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.yaml"))]
    near = get_close_matches(path.stem, [file.stem for file in known], n=1, cutoff=0.6)
    return next((f"; did you mean {file}?" for file in known if near and file.stem == near[0]), "")


def read_text(path: Path) -> str:
    """The file's text, always as UTF-8 (a byte-order mark is dropped). Raises RecipeError naming the file."""
    try:
        if path.is_char_device() or path.is_block_device():
            raise RecipeError(f"{path}: is a device; name a recipe file, for example recipes/demo.yaml")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file{_near_file(path)}") from None
    except IsADirectoryError:
        fix = "a recipe file, for example recipes/demo.yaml"
        if (path / "report.json").is_file():
            fix = f"the recipe that it was made with, {path / 'recipe.yaml'}, or judge the run again with `gate`"
        raise RecipeError(f"{path}: is a folder; name {fix}") from None
    except OSError as error:
        raise RecipeError(f"{path}: can't be read: {error.strerror}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path}: is not UTF-8 at byte {error.start} (0x{raw[error.start]:02x}); save it as UTF-8"
        ) from None
