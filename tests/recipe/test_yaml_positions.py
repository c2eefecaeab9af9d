"""YAML of recipes: positions, YAML 1.2 scalars, and refused syntax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quantmint.pipeline.base.errors import RecipeError
from quantmint.pipeline.recipe.faults import Position
from quantmint.pipeline.recipe.yaml_positions import MAX_BYTES, Dumper, parse, read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # text in YAML 1.2, something else in 1.1
        *[(word, word) for word in ("yes", "no", "on", "off", "Yes", "NO", "y", "n", "1:30", "1_000", "2024-01-01")],
        ("=", "="),
        ("<<", "<<"),
        ("0b11", "0b11"),
        ("true", True),
        ("False", False),
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-2.5e+3", -2500.0),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-7", -7),
        ("~", None),
        ("", None),
        ("null", None),
        ("'true'", "true"),
        ('"8"', "8"),
        ("!!str 8", "8"),
        ("!!float 8", None),
        ("[1, [a]]", [1, ["a"]]),
        ("{a: {}}", {"a": {}}),
        ("|\n  two\n  lines", "two\nlines"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("v0.1", "v0.1"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    if text == "!!float 8":
        assert parse(f"k: {text}", "f").data == {"k": 8.0}
        return
    found = parse(f"k: {text}", "f").data["k"]
    assert found == value
    assert type(found) is type(value)


def test_positions_of_keys_and_values() -> None:
    document = parse("# comment\na:\n  b: [x,\n      {c: 1}]\n", "f.yaml")
    assert document.keys == {
        ("a",): Position("f.yaml", 2, 1),
        ("a", "b"): Position("f.yaml", 3, 3),
        ("a", "b", 1, "c"): Position("f.yaml", 4, 8),
    }
    assert document.values == {
        (): Position("f.yaml", 2, 1),
        ("a",): Position("f.yaml", 3, 3),
        ("a", "b"): Position("f.yaml", 3, 6),
        ("a", "b", 0): Position("f.yaml", 3, 7),
        ("a", "b", 1): Position("f.yaml", 4, 7),
        ("a", "b", 1, "c"): Position("f.yaml", 4, 11),
    }


REFUSED = {
    "repeated key": ("a: 1\nb: 2\na: 3\n", 'f:3:1: found "a" twice, expected it once; it is on line 1 already'),
    "number as a key": ("1: a", "f:1:1: found 1 as a key, expected text"),
    "list as a key": ("[a]: b", "f:1:1: found a list as a key, expected text"),
    "empty": ("", "f:1:1: found nothing, expected a mapping"),
    "list": ("- a\n", "f:1:1: found a list, expected a mapping"),
    "two documents": ("a: 1\n---\nb: 2\n", "f:2:1: not valid YAML: but found another document"),
    "object tag": (
        "a: !!python/object/apply:os.system [ls]",
        "f:1:4: found the tag tag:yaml.org,2002:python/object/apply:os.system, expected a plain value",
    ),
    "own tag": ("a: !env HOME", "f:1:4: found the tag !env on this value, expected a plain value"),
    "wrong tag": (
        "a: !!int many",
        "f:1:4: found the tag tag:yaml.org,2002:int on this value, expected a plain value",
    ),
    "unclosed": ("a: [1, 2\n", "f:2:1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    "tab": ("a:\n\tb: 1\n", "f:2:1: not valid YAML: found character '\\t' that cannot start any token"),
    "unknown alias": ("a: *b", "f:1:4: not valid YAML: found undefined alias 'b'"),
    "alias to itself": ("a: &x [*x]", "f:1:1: found values nested too deep, or in themselves, expected a recipe"),
    "infinity": ("a: .inf", "f:1:4: found .inf, expected a finite number"),
    "deep": ("a: " + "[" * 3000, "f:1:1: found values nested too deep, or in themselves, expected a recipe"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_syntax(case: str) -> None:
    text, expected = REFUSED[case]
    with pytest.raises(RecipeError) as refused:
        parse(text, "f")
    assert str(refused.value) == expected


def test_aliases_may_share_but_not_multiply() -> None:
    assert parse("a: &x [1]\nb: *x\n", "f").data == {"a": [1], "b": [1]}
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    with pytest.raises(RecipeError, match="not valid YAML"):
        parse(f"a: {'9' * 5000}\nb: \x07", "f")
    with pytest.raises(RecipeError, match="found more than 20,000 values, counting aliases"):
        parse(bomb, "f")


def test_a_file_that_is_not_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("f.yaml")
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(RecipeError, match=r"^f.yaml:1:1: found a byte that is not UTF-8 at offset 3, expected text$"):
        read(path)
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(RecipeError, match="found 1,048,577 bytes, expected a recipe of at most 1,048,576"):
        read(path)
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read(path).data == {"a": 1}
    with pytest.raises(RecipeError, match=r"^gone.yaml: cannot be read: No such file or directory$"):
        read(Path("gone.yaml"))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    # The reader refuses control characters, and a line separator does not survive folding.
    | st.text(st.characters(exclude_categories=("C", "Z"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcnoty01.:", max_size=6), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text("abcnoty01.:", max_size=6), PLAIN, max_size=4))
def test_dumped_values_are_read_back(data: dict[str, Any]) -> None:
    text = yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    assert parse(text, "f").data == data
