from __future__ import annotations

import enum
import hashlib
import json
import math
import pathlib
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.pipeline.base.canonical import (
    ABSENT,
    JsonDifference,
    UnstableValueError,
    canonical_json,
    difference,
    fingerprint,
    plain,
)
from quantmint.pipeline.base.errors import StageError

finite = st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: x != 0 or math.copysign(1, x) > 0)
text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers() | finite | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=15
)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Named(str, enum.Enum):  # noqa: UP042  (the old spelling prints itself as "Named.A")
    A = "a"


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "LOUD"


def shuffled(value: object) -> object:
    """An equal value with every mapping in reverse order and every list a tuple."""
    if isinstance(value, dict):
        return types.MappingProxyType({key: shuffled(item) for key, item in reversed(value.items())})
    if isinstance(value, list):
        return tuple(shuffled(item) for item in value)
    return value


def typed(value: object) -> object:
    """A form whose equality tells 1, 1.0 and True apart."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (type(value), value)


@given(values)
def test_equal_values_have_equal_bytes(value: object) -> None:
    assert canonical_json(shuffled(value)) == canonical_json(value)


@given(values, values)
def test_different_values_have_different_bytes(one: object, other: object) -> None:
    assert (canonical_json(one) == canonical_json(other)) == (typed(one) == typed(other))


@given(values)
def test_the_fingerprint_survives_a_record(value: object) -> None:
    read_back = json.loads(json.dumps(plain(value), indent=2))
    assert canonical_json(read_back) == canonical_json(value)
    assert fingerprint(read_back) == hashlib.sha256(canonical_json(value)).hexdigest()


def test_the_bytes_are_fixed() -> None:
    value = {"b": [1, 1.0, True, None], "a": {"é": "\n/\u2028", "E": 1e16, "e": 1e-7}, "c": Colour.RED, "d": Level.LOW}
    expected = '{"a":{"E":1e+16,"e":1e-07,"é":"\\n/\u2028"},"b":[1,1.0,true,null],"c":"red","d":1}'
    assert canonical_json(value) == expected.encode()
    assert fingerprint({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_subclasses_count_by_their_value() -> None:
    assert canonical_json([Loud("x"), Named.A, Level.LOW]) == b'["x","a",1]'
    assert [type(item) for item in plain([Loud("x"), Level.LOW])] == [str, int]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (math.nan, "a float (nan)"),
        (-0.0, "a float (-0.0)"),
        ("\ud800", "a str ('\\ud800')"),
        ({1, 2}, "a set"),
        (b"", "a bytes"),
        (pathlib.Path("model"), "Path"),
        (object(), "a object"),
        ({1: "x"}, "a dict"),
        ({"\ud800": 1}, "a str"),
    ],
)
@given(keys=st.lists(st.sampled_from(["recipe", "gate", "a b"]), max_size=3))
def test_unstable_values_are_refused_with_their_place(keys: list[str], bad: object, word: str) -> None:
    value, place = bad, "$"
    for key in keys:
        place += f".{key}" if key.isidentifier() else f'["{key}"]'
    for key in reversed(keys):
        value = {key: value, "other": 1}
    with pytest.raises(UnstableValueError) as caught:
        canonical_json(value)
    assert str(caught.value).startswith(f"{place} ")
    assert word in str(caught.value)
    assert isinstance(caught.value, StageError)


def test_difference() -> None:
    old = {"recipe": {"scheme": "fp8", "margin": 1, "gone": None}, "inputs": ["a", "b"], "same": (1, 2)}
    new = {"recipe": {"scheme": "mxfp4", "margin": 1.0, "a-b": {"x": 1}}, "inputs": ["a", "c", "d"], "same": [1, 2]}
    assert difference(old, new) == [
        JsonDifference("$.inputs[1]", "b", "c"),
        JsonDifference("$.inputs[2]", ABSENT, "d"),
        JsonDifference('$.recipe["a-b"]', ABSENT, {"x": 1}),
        JsonDifference("$.recipe.gone", None, ABSENT),
        JsonDifference("$.recipe.margin", 1, 1.0),
        JsonDifference("$.recipe.scheme", "fp8", "mxfp4"),
    ]
    assert [change.path for change in difference(new, old)] == [change.path for change in difference(old, new)]


@given(values, values)
def test_no_difference_means_one_fingerprint(one: object, other: object) -> None:
    assert (difference(one, other) == []) == (fingerprint(one) == fingerprint(other))
