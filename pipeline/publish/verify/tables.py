"""Compare the figures of Markdown tables with those that this version of quantmint renders of the same evidence.

    differences("README.md", text, {"Accuracy": markdown.accuracy(gate)})

All figures of a row are compared, and no words, which may differ between versions. Figures of a table with another head
cannot be matched: they are reported as unknown and not as a difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

_NUMBER: Final = re.compile(r"(?<![\w.])[-+\N{MINUS SIGN}]?\d[\d,]*(?:\.\d+)?")
_WORD: Final = re.compile(r"\b(?:PASS|FAIL|INCONCLUSIVE|INVALID)\b")
_ESCAPED: Final = re.compile(r"\\(.)")
_RULE: Final = re.compile(r"[:\- ]+")

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Differences:
    """Sentences for figures that differ, and for tables or rows that cannot be compared."""

    faults: tuple[str, ...]
    unknown: tuple[str, ...]


def differences(file: str, text: str, expected: Mapping[str, str]) -> Differences:
    """Compare each table of ``expected`` (Markdown by the table's name, "" for no table) with the file's tables."""
    tables = list(tables_of(text))
    faults: list[str] = []
    unknown: list[str] = []
    for name, markdown in expected.items():
        for head, *rows in tables_of(markdown):
            same = [table for table in tables if table[0] == head]
            if not same:
                unknown.append(f"{file} has no table {name} with the columns {', '.join(head)}")
            for _, *there in same:
                result = _rows(file, name, head, rows, there)
                faults += result.faults
                unknown += result.unknown
    return Differences(tuple(faults), tuple(unknown))


def tables_of(text: str) -> Iterator[list[Row]]:
    """Yield the tables of a Markdown text as cells by row, the head first."""
    table: list[Row] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells = cells_of(line)
            if not all(_RULE.fullmatch(cell) for cell in cells):
                table.append(cells)
        elif table:
            yield table
            table = []


def cells_of(line: str) -> Row:
    """Return the cells of a line of a table as plain text."""
    parts = re.split(r"(?<!\\)\|", line.strip())
    return tuple(plain(_ESCAPED.sub(r"\1", cell)).replace("**", "") for cell in parts[1:-1])


def plain(text: str) -> str:
    """Return text with single plain blanks, also for the no-break blanks before units."""
    return " ".join(text.split())


def _rows(file: str, name: str, head: Row, expected: list[Row], there: list[Row]) -> Differences:
    """Compare rows with the same first cell; a row of one side alone is unknown, because versions differ in rows."""
    by_name = {row[0]: row for row in expected}
    faults = [
        f"{file}: the table {name} says {cell} of {row[0]} ({column}), the evidence says {right}"
        for row in there
        if row[0] in by_name
        for column, cell, right in zip(head[1:], row[1:], by_name[row[0]][1:], strict=False)
        if not _same(cell, right)
    ]
    names = {row[0] for row in there}
    unknown = [
        f"{file}: the table {name} has {row}, which this version does not know" for row in names - by_name.keys()
    ]
    unknown += [f"{file}: the table {name} lacks {row}" for row in by_name.keys() - names]
    return Differences(tuple(faults), tuple(sorted(unknown)))


def _same(cell: str, right: str) -> bool:
    """Return whether two cells have the same verdicts, and the same numbers to the digits that both show."""
    pairs = zip(_NUMBER.findall(cell), _NUMBER.findall(right), strict=False)
    return (
        len(_NUMBER.findall(cell)) == len(_NUMBER.findall(right))
        and all(_equal(number, second) for number, second in pairs)
        and _WORD.findall(cell) == _WORD.findall(right)
    )


def _equal(number: str, second: str) -> bool:
    texts = [text.replace(",", "").replace("\N{MINUS SIGN}", "-") for text in (number, second)]
    digits = min(len(text.partition(".")[2]) for text in texts)
    return abs(float(texts[0]) - float(texts[1])) <= 0.500001 * 10.0**-digits * (texts[0] != texts[1])
