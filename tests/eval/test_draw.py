"""The order of items: the same for everybody, a random sample at every look, passages whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eval.harness import by_leaf, draw, some

# Some documents share a passage, most do not.
DOCUMENTS = st.dictionaries(
    st.sampled_from(["law", "art", "physics"]),
    st.lists(st.sampled_from(["", "", "", "p", "q", "r"]), min_size=1, max_size=150),
    min_size=1,
)


@given(DOCUMENTS, st.integers(1, 6), st.integers(0, 99), st.none() | st.integers(1, 200))
def test_every_item_once_and_no_passage_in_two_looks(
    documents: dict[str, list[str]], looks: int, seed: int, limit: int | None
) -> None:
    drawn = draw(documents, looks=looks, seed=seed, limit=limit)
    items = [item for look in drawn for item in look]
    everything = {(leaf, number) for leaf, names in documents.items() for number in range(len(names))}
    assert len(set(items)) == len(items) == min(len(everything), limit or len(everything))
    assert set(items) <= everything
    assert 1 <= len(drawn) <= looks
    assert all(drawn)
    met: dict[str, int] = {}
    for number, look in enumerate(drawn):
        for leaf, document in look:
            if passage := documents[leaf][document]:
                assert met.setdefault(passage, number) == number


def test_the_order_is_on_record() -> None:
    """Files of measurements are paired across machines and years: this order may never change."""
    assert some([("law", n) for n in range(1000)], 4, seed=7) == (
        ("law", 323),
        ("law", 662),
        ("law", 723),
        ("law", 862),
    )
    (first, *_) = draw({"law": [""] * 200, "art": [""] * 200}, looks=4, seed=7)
    assert by_leaf(first[:3] + first[-3:]) == {"art": [4, 8, 10], "law": [191, 194, 196]}


def test_a_limit_keeps_what_a_smaller_one_draws_and_takes_no_first_rows() -> None:
    documents = {"law": [""] * 500}
    (few,) = draw(documents, looks=1, seed=1, limit=50)
    (more,) = draw(documents, looks=1, seed=1, limit=100)
    assert set(few) < set(more)
    assert few != tuple(("law", number) for number in range(50))


def test_looks_are_like_the_whole() -> None:
    """Of a file sorted by subject, each look has every subject in its share: 300 items in 4 looks of 75."""
    drawn = draw({"sorted": [""] * 1200}, looks=4, seed=3)
    assert [len(look) for look in drawn] == [300] * 4
    for look in drawn:
        assert 100 < sum(number < 600 for _, number in look) < 200


def test_one_passage_for_all_is_one_look() -> None:
    assert [len(look) for look in draw({"one": ["same"] * 400}, looks=4, seed=0)] == [400]
