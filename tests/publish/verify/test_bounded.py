"""Small files of a stranger's release take little memory to read, and names in it are names."""

from __future__ import annotations

import gzip
import hashlib
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval import record, samples, suites
from quantmint.eval.errors import DefinitionError, MeasurementError
from quantmint.eval.samples import SampleSet
from quantmint.pipeline.publish.verify.subject import CheckOutcome
from tests.publish.verify import honest
from tests.publish.verify.conftest import Verify
from tests.publish.verify.test_tampering import GATE, edit, said

SUITE = "quantmint/suite/two.yaml"
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """Assert that Python allocates no more bytes within the block, however it ends."""
    tracemalloc.start()
    try:
        yield
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < limit


def test_samples_that_unpack_to_much_more(release: Path, check: Verify) -> None:
    raw = gzip.compress(b'{"samples": {"score": [' + b"1.0," * (16 << 20) + b"1.0]}}", mtime=0)
    (release / "quantmint/samples/facts.candidate.json.gz").write_bytes(raw)
    assert len(raw) < 1 << 17

    def named(data: dict[str, Any]) -> None:
        data["measurements"]["samples"]["facts"]["candidate"]["sha256"] = hashlib.sha256(raw).hexdigest()

    edit(release / GATE, named)
    honest.forge(release)
    found = check(release)["gate"]
    assert (found.outcome, "unpacks to more than" in said(found)) == (CheckOutcome.FAILS, True)
    with pytest.raises(MeasurementError, match="unpacks to more than"), at_most(16 << 20):
        record.read(release / GATE)


def test_items_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_ITEMS", 10)
    with pytest.raises(MeasurementError, match="11 items, expected at most 10"):
        SampleSet.from_json({"task": "x", "metric": "acc", "samples": {"score": [1.0] * 11}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ALIASES, "more than 20,000 values, counting aliases"),
        ("name: &a [*a]\n", "nested too deep, or in themselves"),
        ("name: " + "[" * 5000, "nested too deep"),
        ("name: x\n" + "# much\n" * 200_000, "expected at most 1,048,576"),
        ("name: a\x00b\n", "not valid YAML"),
    ],
    ids=["aliases", "itself", "deep", "large", "characters"],
)
def test_a_suite_that_multiplies(release: Path, check: Verify, text: str, words: str) -> None:
    (release / SUITE).write_text(text)
    with pytest.raises(DefinitionError, match=words), at_most(32 << 20):
        suites.load(str(release / SUITE))
    honest.forge(release)
    found = check(release)["gate"]
    assert (found.outcome, words in said(found)) == (CheckOutcome.FAILS, True), said(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../../outside", "/etc/passwd", "a/b", "..", "a\\b", "x\x01"])
def test_names_of_tasks_are_names(release: Path, check: Verify, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside.yaml").write_text("task: secret of somebody else\n")
    text = (
        (release / SUITE)
        .read_text()
        .replace("task: sums", f"task: {name!r}" if "\x01" not in name else 'task: "x\\x01"')
    )
    (release / SUITE).write_text(text)
    honest.forge(release)
    found = check(release)["gate"]
    assert found.outcome is CheckOutcome.FAILS
    assert "'task'" in said(found)
    assert "secret" not in said(found)
    with pytest.raises(DefinitionError, match="no name of a task"):
        suites.definition(release / "quantmint/suite", "../x")


def test_a_suite_that_is_a_link_is_not_read(release: Path, check: Verify, tmp_path: Path) -> None:
    (tmp_path / "facts.yaml").write_text("task: secret of somebody else\n")
    (release / "quantmint/suite/facts.yaml").symlink_to(tmp_path / "facts.yaml")
    found = check(release)["gate"]
    assert (found.outcome, "secret" in said(found)) == (CheckOutcome.FAILS, False)
    assert "is a link out of the folder" in said(found)


def test_scores_whose_aliases_multiply(release: Path, check: Verify) -> None:
    (release / ".eval_results").mkdir()
    (release / ".eval_results/facts.yaml").write_text(ALIASES + "value: *h\n")
    honest.forge(release)
    found = check(release)["card"]
    assert (found.outcome, "counting aliases" in said(found)) == (CheckOutcome.FAILS, True)
