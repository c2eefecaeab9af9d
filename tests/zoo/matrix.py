"""Quantize every model of the zoo in every way, and say what came of it.

    python -m tests.zoo.matrix --only llama --only mixtral --columns ptpc_fp8 --json outcomes.json

A pair of a model and a column runs `quantmint quantize` and `quantmint inspect --source` in this process, as commands.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.zoo.models import build, configuration, names, table

_CALIBRATION = ("--calibration", "tiny", "--samples", "20", "--sequence-length", "32", "--batch-size", "4")

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "ptpc_fp8": ("--scheme", "ptpc_fp8"),
    "fp8_cache": ("--scheme", "fp8", "--kv-cache", "fp8", *_CALIBRATION),
    "fp8_block": ("--scheme", "fp8_block"),
    "mxfp4": ("--scheme", "mxfp4"),
    "mxfp4_quark": ("--scheme", "mxfp4", "--format", "quark"),
    "mxfp4_fp8": ("--scheme", "mxfp4_fp8", "--format", "quark", *_CALIBRATION),
    "mxfp4_gptq": ("--scheme", "mxfp4", "--algorithm", "gptq", *_CALIBRATION),
}
"""Options of `quantmint quantize` by column."""

_MARKS = {"sound": "ok", "refused": "refused", "unsound": "UNSOUND", "raw": "RAW"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one pair.

    ``kind`` is "sound"; "refused", with the message of an error that exits with 2; "unsound", with the first finding
    of an inspection; or "raw", with the type and the message of any other error. ``share`` is that part of the
    decoder's parameters, without embeddings, that the checkpoint holds quantized. ``where`` is the innermost line of
    this repository that a raw error came through, or the command whose inspection has the finding.
    """

    name: str
    column: str
    kind: str
    message: str = ""
    share: float = 0.0
    seconds: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


def outcome(name: str, column: str, workdir: Path, *, keep: bool = False) -> Outcome:
    """Quantize a model as a column says, inspect what was made beside its source, and return what came of it.

    The source is built once in ``workdir`` and used by all columns. What was made is removed unless ``keep``.
    """
    folder, out = source(name, workdir), workdir / "made" / f"{name}-{column}"
    return outcome_of(name, column, folder, out, keep=keep)


def source(name: str, workdir: Path, *, dtype: str = "bfloat16") -> Path:
    """Return the folder of a model, which is built at the first call, by any process."""
    folder = workdir / "sources" / (name if dtype == "bfloat16" else f"{name}-{dtype}")
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, _quiet():
            built = build(name, Path(scratch) / "model", dtype=dtype)
            with suppress(OSError):  # another process was faster
                built.rename(folder)
    return folder


def outcome_of(name: str, column: str, folder: Path, out: Path, *, keep: bool = False) -> Outcome:
    """Return what comes of the model in ``folder`` in a column; ``name`` says whose parameters are counted."""
    shutil.rmtree(out, ignore_errors=True)
    started = time.monotonic()
    kind, message, where, share = "sound", "", "", 0.0
    try:
        with _quiet():
            _quantize(folder, out, column)
            share, finding = _inspect(name, folder, out)
        if finding is not None:
            kind, message, where = "unsound", finding, "inspect --source"
    except Exception as error:
        kind, message, where = _classified(error)
    finally:
        seconds = time.monotonic() - started
        if not keep:
            shutil.rmtree(out, ignore_errors=True)
    return Outcome(name, column, kind, message, share, round(seconds, 3), where)


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what is written to both streams."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def _quantize(folder: Path, out: Path, column: str) -> None:
    from quantmint.pipeline.commands.quantize import quantize

    options = (*COLUMNS[column], "--device", "cpu")
    quantize.main([str(folder), str(out), *options], standalone_mode=False)


def _inspect(name: str, folder: Path, out: Path) -> tuple[float, str | None]:
    """Return the quantized share of the decoder, and the first finding of an inspection beside the source."""
    from quantmint.pipeline.commands.quantize import inspect

    written = io.StringIO()
    with redirect_stdout(written):
        inspect.main([str(out), "--source", str(folder), "--device", "cpu", "--json"], standalone_mode=False)
    inspection: dict[str, Any] = json.loads(written.getvalue())
    share = quantized_parameters(out) / decoder_parameters(name)
    for finding in inspection["findings"]:
        return share, "{rule}: {where}: {message}".format(**finding)
    return share, None


def quantized_parameters(folder: Path) -> int:
    """Count the elements that a checkpoint holds in eight bits, and those in four, of which a byte holds two."""
    from safetensors import safe_open

    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_slice(name)
                if not name.endswith("_scale"):
                    count += {"U8": 2, "F8_E4M3": 1, "I8": 1}.get(tensor.get_dtype(), 0) * prod(tensor.get_shape())
    return count


def decoder_parameters(name: str) -> int:
    """Count the elements of a model's decoder, without its embeddings."""
    return _decoder_parameters(name, json.dumps(table()[name]["config"], sort_keys=True))


@cache
def _decoder_parameters(name: str, config: str) -> int:
    """Count as `decoder_parameters` does; ``config`` is in the key because some tests build a model in other sizes."""
    import torch
    import transformers

    entry = table()[name]
    with torch.device("meta"):
        model: Any = getattr(transformers, entry.get("class", entry["architecture"]))(configuration(name))
    decoder = getattr(model, "thinker", model).get_decoder()
    embeddings = [module.weight for module in decoder.modules() if isinstance(module, torch.nn.Embedding)]
    return sum(p.numel() for p in decoder.parameters()) - sum(weight.numel() for weight in embeddings)


def _classified(error: Exception) -> tuple[str, str, str]:
    """Return kind, message and place of an error."""
    import click

    from quantmint.pipeline.base.errors import InspectionError, QuantmintError

    if isinstance(error, click.ClickException):
        return "refused", error.format_message(), ""
    if isinstance(error, InspectionError):
        lines = str(error).splitlines()
        return "unsound", lines[1].strip() if len(lines) > 1 else lines[0], "quantize"
    message = " ".join(error.message.split()) if isinstance(error, QuantmintError) else str(error).strip()
    if isinstance(error, QuantmintError) and error.exit_code == 2:
        return ("refused", message, "") if message else ("raw", f"{type(error).__name__}: ", _place(error))
    cause = error.__cause__ if isinstance(error, QuantmintError) and error.__cause__ is not None else error
    return "raw", f"{type(cause).__name__}: {message or type(error).__name__}", _place(cause)


def _place(error: BaseException) -> str:
    root = Path(__file__).parents[2]
    frames = traceback.extract_tb(error.__traceback__)
    paths = [(Path(frame.filename), frame) for frame in frames]
    inside = [(path, frame) for path, frame in paths if root in path.parents and ".venv" not in path.parts]
    own = [(path, frame) for path, frame in inside if "tests" not in path.parts]
    return "" if not own else f"{own[-1][0].relative_to(root)}:{own[-1][1].lineno} {own[-1][1].name}"


def run(
    models: Sequence[str], columns: Sequence[str], workdir: Path, *, jobs: int = 1, show: Callable[[Outcome], None]
) -> list[Outcome]:
    """Return the outcomes of all pairs, a model after the other; ``jobs`` models run in processes of their own."""
    outcomes: list[Outcome] = []
    if jobs == 1:
        rows: Iterator[list[Outcome]] = (_row(name, columns, workdir) for name in models)
        for row in rows:
            outcomes += row
            _show(row, show)
        return outcomes
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        for row in pool.map(_row, models, [columns] * len(models), [workdir] * len(models)):
            outcomes += row
            _show(row, show)
    return outcomes


def _show(row: Sequence[Outcome], show: Callable[[Outcome], None]) -> None:
    for pair in row:
        show(pair)


def _row(name: str, columns: Sequence[str], workdir: Path) -> list[Outcome]:
    try:
        source(name, workdir)
    except Exception as error:  # a table that transformers disagrees with must not hide the other models
        message = f"{type(error).__name__}: it cannot be built: {error}"
        return [Outcome(name, column, "raw", message) for column in columns]
    return [outcome(name, column, workdir) for column in columns]


def _prepare() -> None:
    """Set a process up: one thread, no network, no warnings."""
    import logging
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from transformers.utils import logging as of_transformers

    of_transformers.disable_progress_bar()


def print_table(outcomes: Sequence[Outcome], columns: Sequence[str]) -> None:
    """Print models down and columns across, counts, seconds, and the distinct failures with the models they hit."""
    pairs = {(pair.name, pair.column): pair for pair in outcomes}
    models = list(dict.fromkeys(pair.name for pair in outcomes))
    width, wide = max(map(len, models), default=0), max(map(len, columns))
    _line(" " * width, *(f"{column:>{wide}}" for column in columns))
    for name in models:
        row = [pairs[name, column] for column in columns]
        _line(f"{name:<{width}}", *(f"{_mark(pair):>{wide}}" for pair in row))
    for kind in _MARKS:
        counts = Counter(pair.column for pair in outcomes if pair.kind == kind)
        _line(f"{kind:<{width}}", *(f"{counts[column]:>{wide}}" for column in columns))
    seconds = {column: [pair.seconds for pair in outcomes if pair.column == column] for column in columns}
    _line(f"{'seconds':<{width}}", *(f"{sum(s) / max(len(s), 1):>{wide}.2f}" for s in seconds.values()))
    failures: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for pair in outcomes:
        if pair.kind != "sound":
            failures[pair.kind, _common(pair)][pair.name].append(pair.column)
    for (kind, message), hits in sorted(failures.items(), key=lambda item: (item[0][0], -len(item[1]))):
        _line(f"\n{kind}: {message}")
        by_columns: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, hit in hits.items():
            by_columns[tuple(hit)].append(name)
        for hit, group in by_columns.items():
            _line(f"    {'all columns' if len(hit) == len(columns) else ', '.join(hit)}: {', '.join(group)}")


_FOLDER = re.compile(r"\S*/(sources|made)/\S+?(?=[:\s])")
_LAYER = re.compile(r"\.\d+(?=\.)")


def _common(pair: Outcome) -> str:
    """Return message and place without the folder and the number of a layer, so that equal failures are grouped."""
    message = _LAYER.sub(".N", _FOLDER.sub("FOLDER", pair.message))
    return f"{message} [{pair.where}]" if pair.where else message


def _mark(pair: Outcome) -> str:
    return f"{100 * pair.share:.0f} %" if pair.kind == "sound" else _MARKS[pair.kind]


def _line(*cells: str) -> None:
    sys.stdout.write("  ".join(cells) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix as the command line says; return 1 where a pair is unsound or raw."""
    parser = argparse.ArgumentParser(prog="tests.zoo.matrix", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", action="extend", nargs="+", metavar="NAME", choices=names(), help="Models to run.")
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the outcomes there.")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="Models at a time.")
    parser.add_argument("--workdir", type=Path, metavar="FOLDER", help="Keep the sources here for the next run.")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        workdir = given.workdir or Path(scratch)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if given.jobs == 1:
            _prepare()
        outcomes = run(
            given.only or names(),
            given.columns,
            workdir.absolute(),
            jobs=given.jobs,
            show=lambda pair: sys.stderr.write(f"{pair.name} {pair.column} {pair.seconds:.2f} s {pair}\n") and None,
        )
    print_table(outcomes, given.columns)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([asdict(pair) for pair in outcomes], indent=1) + "\n", encoding="utf-8")
    return int(any(pair.kind in ("unsound", "raw") for pair in outcomes))


if __name__ == "__main__":
    sys.exit(main())
