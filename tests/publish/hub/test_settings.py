"""Who sees a repository, and which collection lists it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantmint.pipeline.publish.destination import Operation
from quantmint.pipeline.publish.release import Release
from tests.hub.standin import Fault
from tests.publish.hub.conftest import REPO, Publisher

MakeRelease = Callable[..., Release]


def test_what_closes_it_comes_before_the_first_byte(publisher: Publisher, make_release: MakeRelease) -> None:
    publisher.publish(make_release("one"), private=False, gated="manual")
    info = publisher.api.model_info(REPO)
    assert (info.private, info.gated) == (False, "manual")
    order = [path for _, path in publisher.writes()]
    settings = next(n for n, path in enumerate(order) if path.endswith("/settings"))
    assert settings < next(n for n, path in enumerate(order) if "/storage/" in path)
    before = publisher.writes()
    assert publisher.publish(make_release("one"), private=False, gated="manual").again
    assert publisher.writes() == before


def test_what_opens_it_comes_after_the_last(publisher: Publisher, make_release: MakeRelease) -> None:
    publisher.publish(make_release("one"))
    release = make_release("two", day=22)
    told = publisher.target(private=False).planned_operations(release, candidate=False)
    assert Operation("set", "public") in told
    publisher.hub.faults.append(Fault("POST", "/tag/", status=403))
    with pytest.raises(Exception, match="403"):
        publisher.publish(release, private=False)
    assert publisher.api.model_info(REPO).private, "not before the release is whole"
    publisher.publish(release, private=False)
    assert not publisher.api.model_info(REPO).private


def test_a_gate_that_somebody_set_by_hand_stays(publisher: Publisher, make_release: MakeRelease) -> None:
    publisher.publish(make_release("one"))
    publisher.api.update_repo_settings(REPO, gated="auto")
    publisher.publish(make_release("two", day=22))
    assert publisher.api.model_info(REPO).gated == "auto"


def test_a_collection_by_its_title(publisher: Publisher, make_release: MakeRelease) -> None:
    release = make_release("one")
    for repo in (REPO, REPO, "my-org/other"):
        publisher.publish(release, repo=repo, collection="Quantized models")
    (found,) = publisher.api.list_collections(owner="my-org")
    items = publisher.api.get_collection(found.slug).items
    assert [(item.item_id, item.item_type) for item in items] == [(REPO, "model"), ("my-org/other", "model")]
    assert found.private


def test_a_collection_by_its_slug(publisher: Publisher, make_release: MakeRelease) -> None:
    made = publisher.api.create_collection("Some", namespace="my-org")
    publisher.publish(make_release("one"), collection=made.slug)
    assert [item.item_id for item in publisher.api.get_collection(made.slug).items] == [REPO]
    assert len(list(publisher.api.list_collections(owner="my-org"))) == 1
