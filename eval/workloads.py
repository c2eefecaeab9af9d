"""Workloads: the cells of request lengths by concurrency that throughput is measured in."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from eval.definitions import Section, read
from eval.errors import DefinitionError

FOLDER = Path(__file__).parent / "workloads"

_WORKLOAD_KEYS = ("name", "description", "profile", "cells")
PROFILES = ("latency", "streaming", "throughput", "offline")
"""What a server may be for. Whoever plans one has a row for each of these names."""
_CELL_KEYS = ("name", "input_len", "output_len", "concurrency", "num_prompts", "warmups")


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on the server: random prompts of `input_len` tokens, each answered with exactly `output_len` tokens.

    At most `concurrency` requests are in flight; `num_prompts` are measured after `warmups` that are thrown away.
    """

    name: str
    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int
    warmups: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of cells; `profile` is what a server that meets such a load is for."""

    name: str
    description: str
    profile: str
    cells: tuple[Cell, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt plus answer: what the server's maximum length must hold."""
        return max(cell.input_len + cell.output_len for cell in self.cells)


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Names of the workloads in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load(name: str, folder: Path = FOLDER) -> Workload:
    """Load a workload by its name.

    Raises `DefinitionError` with the nearest existing name, or with file, line and key of what is wrong in it.
    """
    if name not in names(folder):
        near = difflib.get_close_matches(name, names(folder), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names(folder))}"
        raise DefinitionError(f"no workload {name!r} in {folder}; {hint}")
    return parse(folder / f"{name}.yaml")


def parse(path: Path) -> Workload:
    """Load a workload from any file."""
    root = read(path)
    root.only(_WORKLOAD_KEYS)
    if root.need("name", str) != path.stem:
        raise root.error(f"'name' must be the file's name, {path.stem!r}", "name")
    cells: dict[str, Cell] = {}
    for section in root.sections("cells"):
        cell = _cell(section)
        if cell.name in cells:
            raise section.error(f"cell {cell.name!r} appears twice", "name")
        cells[cell.name] = cell
    profile = root.need("profile", str)
    if profile not in PROFILES:
        near = difflib.get_close_matches(profile, PROFILES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise root.error(f"no profile {profile!r}: expected one of {', '.join(PROFILES)}{hint}", "profile")
    return Workload(root.need("name", str), root.need("description", str), profile, tuple(cells.values()))


def _cell(section: Section) -> Cell:
    section.only(_CELL_KEYS)
    cell = Cell(
        name=section.need("name", str),
        input_len=section.count("input_len"),
        output_len=section.count("output_len"),
        concurrency=section.count("concurrency"),
        num_prompts=section.count("num_prompts"),
        warmups=section.count("warmups", least=0),
    )
    if cell.num_prompts < cell.concurrency:
        raise section.error(
            f"{cell.num_prompts} prompts never reach a concurrency of {cell.concurrency}", "num_prompts"
        )
    return cell
