"""Change one place of the product at a time, and see whether the tests of its room notice.

::

    python -m tests.tools.mutation --count 100 --seed 1 --jobs 2 --json build/mutation.json
    python -m tests.tools.mutation --count 10 --room store
    python -m tests.tools.mutation --again build/mutation.json    # those that survived, by the slow tests too

Places are drawn by a seed from the syntax trees of the rooms below: a comparison that is turned, a number that is one
larger, a condition that is negated, an error that is not raised. Each is made in a copy of the working tree, where the
fast tests of the room run until one fails, those first that name the module. A place that no test notices is listed
with its line as it was and as it became: somebody must say whether the two mean the same.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import click

ROOT = Path(__file__).parents[2]
ROOMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "quantize": ("pipeline/quantize", ("tests/quantize",)),
    "statistics": ("eval/statistics", ("tests/eval/statistics", "tests/eval/gate", "tests/eval/comparison")),
    "gate": ("eval/gate", ("tests/eval/gate", "tests/eval/comparison")),
    "verify": ("pipeline/publish/verify", ("tests/publish/verify",)),
    "publish": ("pipeline/publish", ("tests/publish",)),
    "store": (
        "pipeline/store",
        ("tests/store", "tests/publish/test_remote_tier.py", "tests/runs/test_remote_store.py"),
    ),
}
"""Folder and tests of each room."""
_COPIED = (
    "quantmint", "pipeline", "calibration", "eval", "recipes", "tests", "docs",
    "pyproject.toml", "README.md", "Makefile",
)  # fmt: skip
_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
_LIMIT_S = 900.0  # of the tests of one place; a change that never ends is noticed


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a file, from character ``start`` to ``end``, and the text that takes its place."""

    path: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Return the source with this place changed."""
        return source[: self.start] + self.text + source[self.end :]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a place: "killed", "survived", or "slow" where the tests did not end in time."""

    room: str
    place: Place
    before: str
    after: str
    outcome: str
    seconds: float


def places(path: Path) -> list[Place]:
    """Return the places of a file that can be changed, in their order."""
    source = path.read_text(encoding="utf-8")
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded = source.encode()

    def offset(line: int, column: int) -> int:
        return len(encoded[: starts[line - 1] + column].decode())

    def place(node: ast.expr | ast.stmt, text: str) -> Place:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        return Place(path.relative_to(ROOT).as_posix(), node.lineno, *span, text)

    def segment(node: ast.AST) -> str:
        return ast.get_source_segment(source, node) or ""

    def changes(node: ast.AST) -> Iterator[Place]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARISONS:
                yield place(node, f"(({segment(left)}) {_COMPARISONS[type(operator)]} ({segment(right)}))")
            case ast.BoolOp(op=operator, values=values):
                word = " or " if isinstance(operator, ast.And) else " and "
                yield place(node, f"({word.join(f'({segment(value)})' for value in values)})")
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _SIGNS:
                yield place(node, f"(({segment(left)}) {_SIGNS[type(operator)]} ({segment(right)}))")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield place(node, f"bool({segment(operand)})")
            case ast.Constant(value=bool() as value):
                yield place(node, str(not value))
            case ast.Constant(value=int() as value):
                yield place(node, str(value + 1))
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield place(test, f"(not ({segment(test)}))")
            case ast.Raise():
                yield place(node, "pass")

    return sorted((each for node in _code(ast.parse(source)) for each in changes(node)), key=lambda each: each.start)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that a program computes with: no annotations or decorators, nothing that only type checkers read.

    Decorators are those of data classes: whether one is frozen or has slots changes nothing that is computed.
    """
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "decorator_list", "returns", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr):  # whose parts have no place in 3.11
                continue
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                continue
            yield node
            yield from _code(node)


def draw(rooms: Sequence[str], count: int, seed: int) -> list[tuple[str, Place]]:
    """Draw places by a seed, from each room as many as its share of all places."""
    found: dict[Place, str] = {}
    for room in rooms:
        for path in sorted((ROOT / ROOMS[room][0]).rglob("*.py")):
            for each in places(path):
                found.setdefault(each, room)  # verify lies within publish
    chosen = random.Random(seed).sample(sorted(found, key=lambda each: (each.path, each.start)), count)  # noqa: S311
    return [(found[each], each) for each in chosen]


def survivors(results: Path) -> list[tuple[str, Place]]:
    """Return the places of an earlier run that no test noticed."""
    kept = json.loads(results.read_text(encoding="utf-8"))
    return [(each["room"], Place(**each["place"])) for each in kept if each["outcome"] == "survived"]


def run(room: str, place: Place, tree: Path, *, slow: bool = False) -> Result:
    """Run a room's tests in a copy of the tree with one place changed, and put the file back."""
    path = tree / place.path
    source = path.read_text(encoding="utf-8")
    changed = place.apply(source)
    path.write_text(changed, encoding="utf-8")
    start = time.monotonic()
    try:
        code = _tests(_ordered(ROOMS[room][1], place.path), tree, slow=slow)
    finally:
        path.write_text(source, encoding="utf-8")
    outcome = {None: "slow", 0: "survived"}.get(code, "killed")
    lines = [text.splitlines()[place.line - 1].strip() for text in (source, changed)]
    return Result(room, place, *lines, outcome, round(time.monotonic() - start, 1))


def _ordered(paths: Sequence[str], changed: str) -> list[str]:
    """Return the files of tests, those first that name the changed module, then those of the folder of its name."""
    module, room = Path(changed).stem, Path(changed).parent.name
    files = [file for path in paths for file in sorted((ROOT / path).rglob("test_*.py"), key=str)]
    files += [ROOT / path for path in paths if (ROOT / path).is_file()]

    def rank(file: Path) -> tuple[int, str]:
        text = file.read_text(encoding="utf-8")
        named = f"{room}.{module} import" in text or re.search(rf"\.{room} import .*\b{module}\b", text) is not None
        return (0 if named else 1 if file.parent.name == room or module in file.stem else 2), str(file)

    return [file.relative_to(ROOT).as_posix() for file in sorted(dict.fromkeys(files), key=rank)]


def _tests(paths: Sequence[str], tree: Path, *, slow: bool = False) -> int | None:
    """Return pytest's exit code, None where it did not end in time."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    which = () if slow else ("-m", "not slow")
    order = [sys.executable, "-P", "-m", "pytest", "-q", "-x", *which, "-p", "no:cacheprovider", *paths]
    try:
        return subprocess.run(
            order, cwd=tree, env=environment, capture_output=True, timeout=_LIMIT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return None


class Trees:
    """Copies of the working tree below ``folder``, each used by one worker at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: Queue[Path] = Queue()
        for number in range(count):
            tree = folder / str(number)
            tree.mkdir()
            for name in _COPIED:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, tree / name, symlinks=True)
                else:
                    shutil.copyfile(ROOT / name, tree / name)
            self._free.put(tree)

    @contextmanager
    def one(self) -> Iterator[Path]:
        """Lend a copy that nobody else uses meanwhile."""
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)


@click.command()
@click.option("--count", default=100, show_default=True, help="Places to change.")
@click.option("--seed", default=1, show_default=True, help="What decides which.")
@click.option("--room", "rooms", multiple=True, type=click.Choice(list(ROOMS)), help="Rooms (default: all).")
@click.option("--jobs", default=1, show_default=True, help="Places that are tried at a time.")
@click.option(
    "--again", type=click.Path(exists=True, path_type=Path), help="The survivors in this file, by slow tests too."
)
@click.option("--json", "target", type=click.Path(path_type=Path), help="File for the results.")
def command(count: int, seed: int, rooms: tuple[str, ...], jobs: int, again: Path | None, target: Path | None) -> None:
    """Change places drawn by a seed, one at a time, and list those that no test notices."""
    chosen = draw(rooms or tuple(ROOMS), count, seed) if again is None else survivors(again)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        trees = Trees(Path(scratch), jobs)

        def unchanged(room: str) -> int | None:
            with trees.one() as tree:
                return _tests(ROOMS[room][1], tree)

        def tried(drawn: tuple[str, Place]) -> Result:
            with trees.one() as tree:
                return run(*drawn, tree, slow=again is not None)

        used = list(dict.fromkeys(room for room, _ in chosen if again is None))
        for room, code in zip(used, pool.map(unchanged, used), strict=True):
            if code != 0:
                raise click.ClickException(f"{room}: its tests fail before anything is changed")
        for result in pool.map(tried, chosen):
            results.append(result)
            place = result.place
            click.echo(f"{result.outcome:8} {result.seconds:6.1f} s  {place.path}:{place.line}")
            if result.outcome == "survived":
                click.echo(f"    - {result.before}\n    + {result.after}")
            if target is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n", encoding="utf-8")
    noticed = sum(result.outcome != "survived" for result in results)
    click.echo(f"{noticed} of {len(results)} were noticed ({noticed / max(len(results), 1):.0%}).")


if __name__ == "__main__":
    command()
