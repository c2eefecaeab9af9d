"""Count what keeps a reader from understanding names and docstrings: `python -m tests.tools.wording`.

Each room has a ceiling for each count; `make lint` fails where one is exceeded. A ceiling is only ever lowered:
``--write`` sets it to today's count where that is less. Counting does not understand: a name that fits no better than
the one it replaces is no improvement, though the count goes down.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CEILINGS = Path(__file__).with_name("wording.yaml")
_ROOMS = (*(f"pipeline/{path.name}" for path in sorted((ROOT / "pipeline").iterdir()) if path.is_dir()
            and not path.name.startswith("_")), "eval", "calibration", "recipes")  # fmt: skip
_QUESTION = re.compile(r"(what|where|when|which|who|whose|how|as|of)\b", re.IGNORECASE)
_EMPTY = frozenset(
    re.findall(
        r"\w+",
        "found told tell made make one ones each own asked ask said say given give beside reckoned held kept seen took "
        "taken lacking lacks owed came went wanted known used put drawn meant left gone got gotten they them it others "
        "other more rest thing things something whole both all",
    )
)
_LINES, _PARAMETERS = 60, 8


@dataclass(frozen=True)
class Counts:
    """Counts of one room: docstrings that begin with a question word, names that name nothing, functions that are long
    (over 60 lines) or wide (over 8 parameters), and class names that another file has too."""

    questions: int = 0
    names: int = 0
    long: int = 0
    wide: int = 0
    classes: int = 0


def findings(room: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the place of everything that is counted in a room, classes aside."""
    for path in sorted((ROOT / room).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            at = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if _QUESTION.match(text):
                    yield "questions", f"{at} {text.splitlines()[0]}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                if (node.end_lineno or node.lineno) - node.lineno >= _LINES:
                    yield "long", f"{at} {node.name}"
                if len([*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs]) > _PARAMETERS:
                    yield "wide", f"{at} {node.name}"
                if node.name.strip("_") in _EMPTY:
                    yield "names", f"{at} {node.name}"
            name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
            name = node.arg if isinstance(node, ast.arg) else name
            if name is not None and name.strip("_") in _EMPTY:
                yield "names", f"{at} {name}"


def repeated_classes() -> Mapping[str, list[str]]:
    """Return, by room, class names that more than one file of the product has, with those files."""
    files: dict[str, set[str]] = defaultdict(set)
    for room in _ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    files[node.name.lstrip("_")].add(str(path.relative_to(ROOT)))
    return {
        room: [f"{name}: {', '.join(sorted(where))}" for name, where in sorted(files.items())
               if len(where) > 1 and any(file.startswith(f"{room}/") for file in where)]
        for room in _ROOMS
    }  # fmt: skip


def counts() -> dict[str, Counts]:
    """Return the counts of each room."""
    classes = repeated_classes()
    result = {}
    for room in _ROOMS:
        kinds = [kind for kind, _ in findings(room)]
        result[room] = Counts(
            **{kind: kinds.count(kind) for kind in ("questions", "names", "long", "wide")}, classes=len(classes[room])
        )
    return result


def main(arguments: list[str]) -> int:
    """Print what exceeds its ceiling; with ``--list ROOM`` everything that is counted there."""
    if arguments[:1] == ["--list"]:
        room = arguments[1]
        print("\n".join([*(f"{kind}: {text}" for kind, text in findings(room)), *repeated_classes()[room]]))  # noqa: T201
        return 0
    today = counts()
    ceilings = yaml.safe_load(CEILINGS.read_text(encoding="utf-8")) if CEILINGS.is_file() else {}
    if arguments == ["--write"]:
        lowered = {
            room: {kind: min(count, ceilings.get(room, {}).get(kind, count)) for kind, count in asdict(found).items()}
            for room, found in today.items()
        }
        CEILINGS.write_text(yaml.safe_dump(lowered, sort_keys=True), encoding="utf-8")
        return 0
    exceeded = [
        f"{room}: {count} {kind}, at most {ceilings.get(room, {}).get(kind, 0)}: "
        f"`python -m tests.tools.wording --list {room}` names them"
        for room, found in today.items()
        for kind, count in asdict(found).items()
        if count > ceilings.get(room, {}).get(kind, 0)
    ]
    print("\n".join(exceeded) or "wording: no room exceeds its ceilings")  # noqa: T201
    return bool(exceeded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
