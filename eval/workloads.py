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
        num_prompts: 256                # ten times the concurrency, or more
        warmups: 32
      - name: conversations-r8
        dataset: {sharegpt: ShareGPT_V3_unfiltered_cleaned_split.json}    # beside this file
        rate: 8                         # requests a second, Poisson; inf: all at once
        num_prompts: 960
        warmups: 16

Prompts that begin and end together would come in waves, of prompts only and of answers only. So random ones have 80 to
100 % of `input_len` and answers of `output_len`, as InferenceX has it; and before each cell its server answers other
prompts, which are not measured: `warmups`, and at least twice as many as are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from quantmint.eval import records
from quantmint.eval.prompts import SHAREGPT_PROMPT, SHAREGPT_TOTAL, Kind, PromptFile, lines_of
from quantmint.eval.records import Document, Place, Record, read

FOLDER = Path(__file__).parent / "workloads"

Profile = Literal["latency", "streaming", "throughput", "offline"]
"""What a server may be for. Whoever plans one has a row for each of these names."""

WAVES = 10
"""Prompts for each that is in flight: with fewer, filling and emptying the batch is a large part of a measurement."""
SPREAD = 0.11
"""What vLLM is told of lengths: those around the mean by so much, whose longest is what a cell names."""

_Count = Annotated[int, Field(ge=1)]
_Above = Annotated[float, Field(gt=0)]
_SHORT = 10  # tokens: what is shorter has no room to vary


@dataclass(frozen=True, slots=True)
class _Goals(Record):
    """Limits of a request's latencies in ms: time to first token, time per token after it, whole request."""

    ttft: _Above | None = None
    tpot: _Above | None = None
    e2el: _Above | None = None


@dataclass(frozen=True, slots=True)
class _Dataset(Record):
    """A file of prompts, ShareGPT or JSON lines, named by its path or relative to the workload's file."""

    sharegpt: str | None = None
    jsonl: str | None = None
    chat_template: bool | None = None


@dataclass(frozen=True, slots=True)
class _Cell(Record):
    """A cell as the file states it; result files are named after `name`."""

    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]
    num_prompts: _Count
    warmups: Annotated[int, Field(ge=0)]
    input_len: _Count | None = None
    output_len: _Count | None = None
    concurrency: _Count | None = None
    rate: _Above | Literal["inf"] | None = None
    ignore_eos: bool | None = None
    dataset: _Dataset | Literal["random"] | None = None
    goodput: _Goals | None = None


@dataclass(frozen=True, slots=True)
class _Workload(Record):
    """A workload as the file states it; `dataset` and `goodput` are the cells' defaults."""

    name: str
    description: str
    profile: Profile
    cells: Annotated[tuple[_Cell, ...], Field(min_length=1)]
    dataset: _Dataset | Literal["random"] | None = None
    goodput: _Goals | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on the server: `num_prompts` requests are measured, after others that are discarded (`discarded`).

    Prompts are up to `input_len` random tokens, or come from `file`, where none is longer than `input_len`. At most
    `concurrency` requests are in flight (None: any number); they arrive at random at `rate` a second (None: each as
    soon as there is room). An answer has `output_len` tokens at most (None: the number in the file); with `ignore_eos`
    the model's end of text does not end it earlier. `goodput` are the latencies, ms by name, that a request must keep
    to count as a good one.
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
    def mean_lengths(self) -> tuple[int, int] | None:
        """Return the mean prompt and answer in tokens, around which lengths vary by the share `SPREAD`.

        None if the lengths do not vary, or come from a file.
        """
        if self.file is not None or self.output_len is None or min(self.input_len, self.output_len) < _SHORT:
            return None
        return int(self.input_len / (1 + SPREAD)), int(self.output_len / (1 + SPREAD))

    @property
    def output_tokens(self) -> tuple[int, int] | None:
        """Return the fewest and the most tokens of all answers together; None if model or file decide their number."""
        if not self.ignore_eos or self.output_len is None:
            return None
        shortest = self.output_len if self.mean_lengths is None else int(self.mean_lengths[1] * (1 - SPREAD))
        return self.num_prompts * shortest, self.num_prompts * self.output_len

    @property
    def discarded(self) -> int:
        """Return the number of requests that a server answers before the measured ones.

        It is `warmups`, or twice the concurrency if that is more.
        """
        return max(self.warmups, 2 * (self.concurrency or 1))

    @property
    def longest(self) -> int:
        """Return the tokens of the longest possible request, prompt plus answer."""
        if self.file is not None and self.file.kind == "sharegpt":
            return SHAREGPT_TOTAL
        answer = self.output_len
        if answer is None and self.file is not None:
            answer = lines_of(self.file.path).longest_answer
        return self.input_len + (answer or 0)

    @property
    def in_flight(self) -> int:
        """Return the most requests that can be in flight, for which a server is planned."""
        return self.num_prompts if self.concurrency is None else min(self.concurrency, self.num_prompts)

    def to_json(self) -> dict[str, Any]:
        """Return everything that shapes a measurement, for its fingerprint; a file counts by its SHA-256."""
        file = self.file
        facts: dict[str, Any] = {
            "name": self.name,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "concurrency": self.concurrency,
            "num_prompts": self.num_prompts,
            "warmups": self.warmups,
        }
        options: dict[str, Any] = {
            "rate": self.rate,
            "file": None
            if file is None
            else {"kind": file.kind, "chat_template": file.chat_template, "sha256": file.sha256},
            "ignore_eos": None if self.ignore_eos else False,
            "goodput": dict(self.goodput) or None,
        }
        return facts | {key: value for key, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of cells. `profile` is the load that a server of these cells is tuned for."""

    name: str
    description: str
    profile: str
    cells: tuple[Cell, ...]

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request, prompt plus answer, that the server's maximum length must hold."""
        return max(cell.longest for cell in self.cells)

    @property
    def in_flight(self) -> int:
        """Return the most requests that any cell has in flight."""
        return max(cell.in_flight for cell in self.cells)


def load(name: str) -> Workload:
    """Return the workload with a name, or the workload in a YAML file by its path.

    Raises `DefinitionError` with the nearest existing name, or with file, line and key of a fault.
    """
    return parse(Path(name) if records.is_path(name) else records.file_of("workload", name, FOLDER))


def parse(path: Path) -> Workload:
    """Return the workload in a file. Raises `DefinitionError` with file, line and key of a fault."""
    document = read(path)
    field_names = {field.name for kind in (_Workload, _Cell, _Dataset, _Goals) for field in fields(kind)}
    written = document.read(_Workload, field_names)
    if written.name != path.stem:
        raise document.error(f"'name' must be the file's name, {path.stem!r}", "name")
    cells: dict[str, Cell] = {}
    for number, entry in enumerate(written.cells):
        cell = _cell(document, written, entry, ("cells", number))
        if cell.name in cells:
            raise document.error(f"cell {cell.name!r} appears twice", "cells", number, "name")
        cells[cell.name] = cell
    return Workload(written.name, written.description, written.profile, tuple(cells.values()))


def _cell(document: Document, workload: _Workload, entry: _Cell, at: Place) -> Cell:
    """Return a cell with the workload's defaults filled in; `DefinitionError` for settings that do not go together."""
    written = document.data["cells"][at[-1]]
    file = _file(
        document, entry.dataset if "dataset" in written else workload.dataset, at if "dataset" in written else ()
    )
    goals = entry.goodput if "goodput" in written else workload.goodput
    if entry.input_len is None and (file is None or file.kind == "jsonl"):
        raise document.error("missing key 'input_len'", *at)
    if entry.input_len is not None and file is not None and file.kind == "sharegpt":
        why = f"vLLM takes ShareGPT's of up to {SHAREGPT_PROMPT} tokens"
        raise document.error(f"'input_len' goes with random prompts and jsonl files: {why}", *at, "input_len")
    if entry.output_len is None and file is None:
        raise document.error("missing key 'output_len'", *at)
    if file is None and entry.ignore_eos is False:  # answers to random tokens have no end of their own
        raise document.error("'ignore_eos' is always true for random prompts", *at, "ignore_eos")
    if entry.concurrency is None and entry.rate is None:
        raise document.error("missing key 'concurrency' or 'rate': how many requests there are at a time", *at)
    if entry.concurrency is not None and entry.num_prompts < entry.concurrency:
        few = f"{entry.num_prompts} prompts never reach a concurrency of {entry.concurrency}"
        raise document.error(few, *at, "num_prompts")
    if file is not None and file.kind == "jsonl":
        lines = lines_of(file.path)
        if lines.prompts < entry.num_prompts:
            few = f"{entry.num_prompts} prompts are more than the {lines.prompts} of {file.path}"
            raise document.error(few, *at, "num_prompts")
        if entry.output_len is None and lines.longest_answer is None:
            raise document.error(f"missing key 'output_len': not every line of {file.path} has \"output_tokens\"", *at)
    if file is not None and file.kind == "sharegpt" and (entry.output_len or 0) >= SHAREGPT_TOTAL:
        long = f"'output_len' must be below {SHAREGPT_TOTAL}: vLLM leaves out what is longer"
        raise document.error(long, *at, "output_len")
    return Cell(
        name=entry.name,
        input_len=SHAREGPT_PROMPT if entry.input_len is None else entry.input_len,
        output_len=entry.output_len,
        concurrency=entry.concurrency,
        num_prompts=entry.num_prompts,
        warmups=entry.warmups,
        rate=None if entry.rate == "inf" else entry.rate,
        file=file,
        ignore_eos=file is None if entry.ignore_eos is None else entry.ignore_eos,
        goodput=() if goals is None else tuple((n, limit) for n, limit in goals.to_json().items() if limit is not None),
    )


def _file(document: Document, dataset: _Dataset | str | None, at: Place) -> PromptFile | None:
    if dataset is None or isinstance(dataset, str):
        return None
    lengths: list[tuple[Kind, str]] = [(kind, name) for kind in get_args(Kind) if (name := getattr(dataset, kind))]
    if len(lengths) != 1:
        raise document.error("'dataset' must name one file: {sharegpt: FILE} or {jsonl: FILE}", *at, "dataset")
    kind, name = lengths[0]
    path = (document.path.absolute().parent / name).resolve()
    if not path.is_file():
        raise document.error(f"found no file {path}", *at, "dataset", kind)
    if kind == "jsonl" and path.suffix != ".jsonl":
        raise document.error(f"vLLM reads files whose name ends in .jsonl, found {path.name}", *at, "dataset", kind)
    if kind == "sharegpt" and dataset.chat_template is not None:
        raise document.error("'chat_template' goes with a jsonl file", *at, "dataset", "chat_template")
    return PromptFile(kind, path, chat_template=dataset.chat_template is not False)
