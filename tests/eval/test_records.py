"""Records: what is written comes back, and nothing else is taken for one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from quantmint.eval.errors import MeasurementError
from quantmint.eval.records import Record
from quantmint.eval.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Inner(Record):
    size: float
    pair: tuple[float, int] = (0.5, 1)
    verdict: Verdict = Verdict.PASS


@dataclass(frozen=True, slots=True)
class Outer(Record):
    name: str
    inner: tuple[Inner, ...] = ()
    by_name: Mapping[str, Inner | None] = field(default_factory=dict)


WHOLE = Outer("a", (Inner(1e-300), Inner(0.1 + 0.2, (7.0, 3), Verdict.FAIL)), {"b": None, "c": Inner(3.0)})


def test_what_is_written_comes_back() -> None:
    text = json.dumps(WHOLE.to_json(), allow_nan=False)
    assert Outer.from_json(json.loads(text)) == WHOLE
    assert json.loads(text)["inner"][1] == {"size": 0.1 + 0.2, "pair": [7.0, 3], "verdict": "FAIL"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "not a Outer: Input should be an object"),
        ({}, "not a Outer: name: Field required"),
        ({"name": "a", "size": 1}, "size: Unexpected keyword argument"),
        ({"name": 1}, "name: .*found 1"),
        ({"name": "a", "inner": [{"size": "1"}]}, "inner.0.size: .*found '1'"),
        ({"name": "a", "inner": [{"size": True}]}, "inner.0.size"),
        ({"name": "a", "inner": [{"size": math.nan}]}, "inner.0.size: .*finite"),
        ({"name": "a", "inner": [{"size": 10**400}]}, "inner.0.size: .*finite"),
        ({"name": "a", "inner": [{"size": 1, "pair": [1.0, 2, 3]}]}, "inner.0.pair"),
        ({"name": "a", "by_name": {"b": {"size": 1, "verdict": "FINE"}}}, "by_name.b.verdict: .*'PASS'.*'FINE'"),
        ({"name": "a\ud800"}, "not a Outer"),
    ],
)
def test_anything_else_is_refused(data: Any, words: str) -> None:
    with pytest.raises(MeasurementError, match=words):
        Outer.from_json(data)
