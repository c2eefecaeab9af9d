"""Workloads: the cells of request lengths, concurrency or rate that throughput is measured in.

::

    name: chat
    description: Real conversations, 8 a second.
    profile: streaming
    goodput: {ttft: 500, tpot: 40}      # ms; of every cell that has none of its own
    cells:
      - name: in1024-out256-c16         # random tokens, every answer as long as asked for
        input_len: 1024
        output_len: 256
        concurrency: 16
        num_prompts: 256
        warmups: 16
      - name: conversations-r8
        dataset: {sharegpt: ShareGPT_V3_unfiltered_cleaned_split.json}    # beside this file
        rate: 8                         # requests a second, Poisson; inf: all at once
        num_prompts: 960
        warmups: 16
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from eval.definitions import Section, read
from eval.errors import DefinitionError
from eval.prompts import SHAREGPT_PROMPT, SHAREGPT_TOTAL, Kind, PromptFile, lines_of

FOLDER = Path(__file__).parent / "workloads"

_SHARED_KEYS = ("dataset", "goodput")
_WORKLOAD_KEYS = ("name", "description", "profile", "cells", *_SHARED_KEYS)
PROFILES = ("latency", "streaming", "throughput", "offline")
"""What a server may be for. Whoever plans one has a row for each of these names."""
_CELL_KEYS = (
    "name", "input_len", "output_len", "concurrency", "rate", "num_prompts", "warmups", "ignore_eos", *_SHARED_KEYS,
)  # fmt: skip
GOALS = ("ttft", "tpot", "e2el")
"""What a request's latency may be bound by: time to first token, time per token after it, the whole request."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on the server: `num_prompts` requests are measured, after `warmups` that are thrown away.

    Prompts are `input_len` random tokens, or come from `file`, where none is longer than `input_len`. At most
    `concurrency` requests are in flight (None: any number); they arrive at `rate` a second at random (None: each as
    soon as there is room). An answer has `output_len` tokens at most (None: what the file says of each), and exactly
    so many with `ignore_eos`, where a model's end of text does not end it. `goodput` are the latencies, ms by name,
    that a request must keep to count as a good one.
    """

    name: str
    input_len: int
    output_len: int | None
    concurrency: int | None
    num_prompts: int
    warmups: int
    rate: float | None = None
    file: PromptFile | None = None
    ignore_eos: bool = True
    goodput: tuple[tuple[str, float], ...] = ()

    @property
    def output_tokens(self) -> int | None:
        """How many tokens all answers have together; None where that depends on the model or on the file."""
        fixed = self.ignore_eos and self.output_len is not None
        return self.num_prompts * self.output_len if fixed and self.output_len is not None else None

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt plus answer."""
        if self.file is not None and self.file.kind == "sharegpt":
            return SHAREGPT_TOTAL
        answer = self.output_len
        if answer is None and self.file is not None:
            answer = lines_of(self.file.path).longest_answer
        return self.input_len + (answer or 0)

    @property
    def in_flight(self) -> int:
        """The most requests that can be in flight: what a server is planned for."""
        return self.num_prompts if self.concurrency is None else min(self.concurrency, self.num_prompts)

    def to_json(self) -> dict[str, Any]:
        """All that shapes a measurement, for its fingerprint: a file is its content, wherever it lies."""
        file = self.file
        facts: dict[str, Any] = {
            "name": self.name,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "concurrency": self.concurrency,
            "num_prompts": self.num_prompts,
            "warmups": self.warmups,
        }
        more: dict[str, Any] = {
            "rate": self.rate,
            "file": None if file is None else {**_file_facts(file), "sha256": file.sha256},
            "ignore_eos": None if self.ignore_eos else False,
            "goodput": dict(self.goodput) or None,
        }
        return facts | {key: value for key, value in more.items() if value is not None}


def _file_facts(file: PromptFile) -> dict[str, object]:
    return {"kind": file.kind, "chat_template": file.chat_template}


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
        return max(cell.longest for cell in self.cells)

    @property
    def in_flight(self) -> int:
        """The most requests that any cell has in flight."""
        return max(cell.in_flight for cell in self.cells)


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Names of the workloads in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load(name: str, folder: Path = FOLDER) -> Workload:
    """Load a workload by its name, or by the path of a YAML file.

    Raises `DefinitionError` with the nearest existing name, or with file, line and key of what is wrong in it.
    """
    if is_path(name):
        return parse(Path(name))
    if name not in names(folder):
        near = difflib.get_close_matches(name, names(folder), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names(folder))}"
        raise DefinitionError(f"no workload {name!r} in {folder}; {hint}")
    return parse(folder / f"{name}.yaml")


def is_path(name: str) -> bool:
    """Whether a workload is named by its file."""
    return name.endswith((".yaml", ".yml"))


def parse(path: Path) -> Workload:
    """Load a workload from any file."""
    root = read(path)
    root.only(_WORKLOAD_KEYS)
    if root.need("name", str) != path.stem:
        raise root.error(f"'name' must be the file's name, {path.stem!r}", "name")
    cells: dict[str, Cell] = {}
    for section in root.sections("cells"):
        cell = _cell(section, root)
        if cell.name in cells:
            raise section.error(f"cell {cell.name!r} appears twice", "name")
        cells[cell.name] = cell
    profile = root.need("profile", str)
    if profile not in PROFILES:
        near = difflib.get_close_matches(profile, PROFILES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise root.error(f"no profile {profile!r}: expected one of {', '.join(PROFILES)}{hint}", "profile")
    return Workload(root.need("name", str), root.need("description", str), profile, tuple(cells.values()))


def _cell(section: Section, root: Section) -> Cell:
    section.only(_CELL_KEYS)
    file = _file(section if "dataset" in section.values else root)
    cell = Cell(
        name=_name(section),
        input_len=_input_len(section, file),
        output_len=section.count("output_len") if file is None or "output_len" in section.values else None,
        concurrency=section.count("concurrency") if "concurrency" in section.values else None,
        num_prompts=section.count("num_prompts"),
        warmups=section.count("warmups", least=0),
        rate=_rate(section),
        file=file,
        ignore_eos=_ignore_eos(section, file),
        goodput=_goodput(section if "goodput" in section.values else root),
    )
    if cell.concurrency is None and "rate" not in section.values:
        raise section.error("missing key 'concurrency' or 'rate': how many requests there are at a time")
    if cell.concurrency is not None and cell.num_prompts < cell.concurrency:
        raise section.error(
            f"{cell.num_prompts} prompts never reach a concurrency of {cell.concurrency}", "num_prompts"
        )
    if file is not None and file.kind == "jsonl":
        _check_lines(section, cell, file.path)
    if file is not None and file.kind == "sharegpt" and (cell.output_len or 0) >= SHAREGPT_TOTAL:
        raise section.error(
            f"'output_len' must be below {SHAREGPT_TOTAL}: vLLM leaves out what is longer", "output_len"
        )
    return cell


def _name(section: Section) -> str:
    """It names files."""
    name = section.need("name", str)
    if not name or name.startswith(".") or not all(part.isalnum() or part in "-_." for part in name):
        raise section.error(f"'name' may have letters, digits, '-', '_' and '.', found {name!r}", "name")
    return name


def _input_len(section: Section, file: PromptFile | None) -> int:
    if file is None or file.kind == "jsonl":
        return section.count("input_len")
    if "input_len" in section.values:
        raise section.error(
            f"'input_len' goes with random prompts and jsonl files: vLLM takes ShareGPT's of up to {SHAREGPT_PROMPT} "
            "tokens",
            "input_len",
        )
    return SHAREGPT_PROMPT


def _rate(section: Section) -> float | None:
    if section.values.get("rate") == "inf":
        return None
    value = section.get("rate", float)
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise section.error(f"'rate' must be above 0 requests a second, or inf, found {value}", "rate")
    return value


def _ignore_eos(section: Section, file: PromptFile | None) -> bool:
    """Answers to random tokens have no end of their own; vLLM does not look for one."""
    value = section.get("ignore_eos", bool)
    if file is None and value is False:
        raise section.error("'ignore_eos' is always true for random prompts", "ignore_eos")
    return file is None if value is None else value


def _goodput(section: Section) -> tuple[tuple[str, float], ...]:
    goals = section.section("goodput")
    if goals is None:
        return ()
    goals.only(GOALS)
    found = tuple((name, goals.need(name, float)) for name in GOALS if name in goals.values)
    for name, value in found:
        if value <= 0:
            raise goals.error(f"{name!r} must be above 0 ms, found {value}", name)
    if not found:
        raise section.error(f"'goodput' must have one of {', '.join(GOALS)}", "goodput")
    return found


def _file(section: Section) -> PromptFile | None:
    if section.values.get("dataset") in (None, "random"):
        return None
    if isinstance(section.values["dataset"], str):
        raise section.error(
            f"'dataset' must be random, {{sharegpt: FILE}} or {{jsonl: FILE}}, found {section.values['dataset']!r}",
            "dataset",
        )
    dataset = section.section("dataset")
    assert dataset is not None  # noqa: S101 - None was the random one
    dataset.only((*get_args(Kind), "chat_template"))
    given: list[Kind] = [kind for kind in get_args(Kind) if kind in dataset.values]
    if len(given) != 1:
        raise section.error("'dataset' must name one file: {sharegpt: FILE} or {jsonl: FILE}", "dataset")
    kind = given[0]
    path = (section.path.absolute().parent / dataset.need(kind, str)).resolve()
    if not path.is_file():
        raise dataset.error(f"found no file {path}", kind)
    if kind == "jsonl" and path.suffix != ".jsonl":
        raise dataset.error(f"vLLM reads files whose name ends in .jsonl, found {path.name}", kind)
    template = dataset.get("chat_template", bool)
    if kind == "sharegpt" and template is not None:
        raise dataset.error("'chat_template' goes with a jsonl file", "chat_template")
    return PromptFile(kind, path, chat_template=template is not False)


def _check_lines(section: Section, cell: Cell, path: Path) -> None:
    lines = lines_of(path)
    if lines.prompts < cell.num_prompts:
        raise section.error(f"{cell.num_prompts} prompts are more than the {lines.prompts} of {path}", "num_prompts")
    if cell.output_len is None and lines.longest_answer is None:
        raise section.error(f"missing key 'output_len': not every line of {path} has \"output_tokens\"")
