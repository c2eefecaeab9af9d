"""Read YAML with the position of every key and value.

    >>> document = parse("gate:\\n  accuracy: {margin: 1e-3}\\n", "r.yaml")
    >>> document.data, str(document.values["gate", "accuracy", "margin"])
    ({'gate': {'accuracy': {'margin': 0.001}}}, 'r.yaml:2:22')

PyYAML reads YAML 1.1, where `no` is false, `1:30` is ninety and `1e-3` is text. Recipes follow the core schema of YAML
1.2 instead, as editors do. Everything that could make a small file expensive or surprising (tags, repeated keys, deep
nesting, aliases that multiply) is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quantmint.eval.records import SAFE_LOADER, is_shallow
from quantmint.pipeline.base.errors import RecipeError, shown_path
from quantmint.pipeline.recipe.faults import Fault, Position, YamlPath

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_LEVELS = 100  # a value in itself ends here, whatever limit of the interpreter a library has set

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_ODD = re.compile("[\t\ufeff]")
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class YamlDocument:
    """A parsed file: plain data, with the position of every key and of every value.

    Both maps are keyed by the path from the root, whose own path is (); list items are numbered.
    """

    data: dict[str, Any]
    keys: Mapping[YamlPath, Position]
    values: Mapping[YamlPath, Position]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


class Dumper(yaml.SafeDumper):
    """A dumper for `parse`: it quotes text that YAML 1.2 would read as another type."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


for _class in (_Loader, Dumper):
    _class.add_implicit_resolver(_TAG + "null", _NULL, ["~", "n", "N", ""])
    _class.add_implicit_resolver(_TAG + "bool", _BOOL, list("tTfF"))
    _class.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))
    _class.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))

_SCALARS = {"yaml_implicit_resolvers": _Loader.yaml_implicit_resolvers}
_FastLoader: Any = type("_FastLoader", (SAFE_LOADER,), _SCALARS)
"""libyaml's loader with the same scalars, where PyYAML was built with it."""


def read(path: Path) -> YamlDocument:
    """Parse a file. Raises `RecipeError` where it cannot be read, is too large, or `parse` refuses it."""
    return parse(text_of(path), shown_path(path))


def text_of(path: Path) -> str:
    """Return a file's text, for callers that need its lines as well (a pipe can be read once). Raises `RecipeError`."""
    start = Position(shown_path(path), 1, 1)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _refused(start, f"found {path.stat().st_size:,} bytes, expected a recipe of at most {MAX_BYTES:,}")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RecipeError(f"{start.file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refused(start, f"found a byte that is not UTF-8 at offset {error.start}, expected text") from error


def parse(text: str, file: str) -> YamlDocument:
    """Parse text; `file` is the file name of its positions.

    Raises `RecipeError` for anything but one mapping with unique text keys and scalars of YAML 1.2's core schema.
    """
    data, reader = _read(text, file, mapping=True)
    return YamlDocument(data, reader.keys, reader.values)


def plain_value(text: str, file: str) -> Any:
    """Parse text that may also be a list or a scalar. Raises `RecipeError` as `parse` does."""
    return _read(text, file, mapping=False)[0]


def _read(text: str, file: str, *, mapping: bool) -> tuple[Any, _NodeReader]:
    start = Position(file, 1, 1)
    reader = _NodeReader(file)
    try:
        node = _compose(text)
        if node is None or (mapping and not isinstance(node, yaml.MappingNode)):
            raise _refused(start, f"found {_kind(node)}, expected a {'mapping' if mapping else 'value'}")
        return reader.value(node, ()), reader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _refused(_place(file, mark) if mark else start, f"not valid YAML: {error.problem}") from error
    except RecursionError:
        raise _refused(start, "found values nested too deep, or in themselves, expected a recipe") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # characters, escapes or numbers without a place
        raise _refused(start, f"not valid YAML: {error}") from error


def _compose(text: str) -> yaml.Node | None:
    """Return the root node of a text, composed by libyaml, which takes a tenth of PyYAML's time.

    What libyaml refuses is left to PyYAML, for its messages, as are values nested too deep, for its `RecursionError`:
    libyaml would overflow the stack. So are tabs, which only PyYAML refuses inside text, and byte order marks, which
    only it counts as no column.
    """
    try:
        if not _ODD.search(text) and is_shallow(text, MAX_LEVELS, _FastLoader):
            return yaml.compose(text, _FastLoader)
    except yaml.YAMLError:
        pass
    return yaml.compose(text, _Loader)


@dataclass
class _NodeReader:
    """A converter of YAML nodes to plain data; each use of an alias counts towards the limit of nodes."""

    file: str
    keys: dict[YamlPath, Position] = field(default_factory=dict)
    values: dict[YamlPath, Position] = field(default_factory=dict)
    nodes: int = 0

    def value(self, node: yaml.Node, path: YamlPath) -> Any:
        place = _place(self.file, node.start_mark)
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _refused(place, f"found more than {MAX_NODES:,} values, counting aliases, expected a recipe")
        if len(path) > MAX_LEVELS:
            raise RecursionError
        self.values[path] = place
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, place)
        raise _refused(place, f"found the tag {node.tag}, expected a plain value")

    def mapping(self, node: yaml.MappingNode, path: YamlPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = _place(self.file, key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                raise _refused(place, f"found {_kind(key_node)} as a key, expected text")
            key = str(key_node.value)
            if key in data:
                first = self.keys[(*path, key)]
                raise _refused(place, f'found "{key}" twice, expected it once; it is on line {first.line} already')
            self.keys[(*path, key)] = place
            data[key] = self.value(value_node, (*path, key))
        return data

    def scalar(self, node: yaml.ScalarNode, place: Position) -> Any:
        text = str(node.value)
        match node.tag.removeprefix(_TAG):
            case "str":
                return text
            case "null" if _NULL.match(text):
                return None
            case "bool" if _BOOL.match(text):
                return text.lower() == "true"
            case "int" if _INT.match(text):
                return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
            case "float" if _FLOAT.match(text):
                word = text.lower().replace(".inf", "inf").replace(".nan", "nan")
                number = float(word)
                if not math.isfinite(number):
                    raise _refused(place, f"found {text}, expected a finite number")
                return number
        raise _refused(place, f"found the tag {node.tag} on this value, expected a plain value")


def _place(file: str, mark: yaml.Mark) -> Position:
    return Position(file, mark.line + 1, mark.column + 1)


def _kind(node: yaml.Node | None) -> str:
    if node is None:
        return "nothing"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return f'"{node.value}"' if node.tag == _TAG + "str" else str(node.value or "null")


def _refused(place: Position, message: str) -> RecipeError:
    return RecipeError(str(Fault(place, (), message)))
