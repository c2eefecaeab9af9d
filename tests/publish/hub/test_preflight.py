"""What would stop a publication is found before a byte is sent."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.publish.release import Release
from tests.publish.hub.conftest import REPO, Publisher

MakeRelease = Callable[..., Release]
CARD = b"---\nlicense: mit\nbase_model: org/base\n---\n# A model\n"


def refused(publisher: Publisher, release: Release, sentence: str, repo: str = REPO, **section: object) -> str:
    """Preflight says so, in whole, and nothing was written."""
    before = publisher.writes()
    with pytest.raises(UserError, match=re.escape(sentence)) as raised:
        publisher.target(repo, **section).preflight(release)
    assert publisher.writes() == before
    assert publisher.hub.token not in str(raised.value)
    return str(raised.value)


def test_nothing_stops_it(publisher: Publisher, make_release: MakeRelease) -> None:
    release = make_release("one", files={"README.md": CARD})
    publisher.target().preflight(release)
    assert publisher.writes() == []
    publisher.publish(release)
    publisher.target().preflight(release)
    publisher.target("quant/mine").preflight(release)


def test_no_token(publisher: Publisher, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    found = refused(publisher, make_release("one"), "there is no token of the Hub")
    assert "hf auth login" in found


def test_a_token_that_nobody_knows(
    publisher: Publisher, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    found = refused(publisher, make_release("one"), "cannot ask whose token it is: 401")
    assert "hf_xxx" not in found


def test_tokens_that_may_too_little(
    publisher: Publisher, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, hub = make_release("one"), publisher.hub
    monkeypatch.setenv("HF_TOKEN", hub.new_token("read"))
    refused(publisher, release, "the token 'stand-in' may only read")
    monkeypatch.setenv("HF_TOKEN", hub.new_token("fineGrained", **{"my-org": ["repo.content.read"]}))
    refused(publisher, release, "is not allowed to create repositories in my-org: it lacks repo.write")
    monkeypatch.setenv("HF_TOKEN", hub.new_token("fineGrained", **{REPO: ["repo.write"]}))
    refused(publisher, release, "is not allowed to create repositories in my-org: it lacks repo.write")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    publisher.api.create_repo(REPO, private=True)
    monkeypatch.setenv("HF_TOKEN", hub.new_token("fineGrained", **{REPO: ["repo.write"]}))
    publisher.target().preflight(release)
    publisher.publish(release)
    monkeypatch.setenv("HF_TOKEN", hub.new_token("fineGrained", **{"my-org": ["repo.write"]}))
    publisher.target().preflight(release)
    refused(publisher, release, "it lacks collection.write", collection="All")


def test_organisations(publisher: Publisher, make_release: MakeRelease) -> None:
    release = make_release("one")
    refused(publisher, release, 'quant is no member of my-orgs (did you mean "my-org"?)', "my-orgs/tiny")
    refused(publisher, release, "may not write in read-org: found the role read", "read-org/tiny")


def test_a_public_repository_for_a_private_recipe(publisher: Publisher, make_release: MakeRelease) -> None:
    publisher.api.create_repo(REPO, private=False)
    refused(publisher, make_release("one"), f"{REPO} is public, and the recipe says private: true")
    with pytest.raises(UserError, match="is public"):
        publisher.publish(make_release("one"))
    publisher.target(private=False).preflight(make_release("one"))


def test_a_model_that_somebody_else_put_there(publisher: Publisher, make_release: MakeRelease) -> None:
    publisher.api.create_repo(REPO, private=True)
    publisher.somebody_commits("README.md")
    publisher.target().preflight(make_release("one"))
    publisher.somebody_commits("model.safetensors")
    refused(publisher, make_release("one"), "holds a model that quantmint did not publish")


def test_a_collection_that_is_not_there(publisher: Publisher, make_release: MakeRelease) -> None:
    slug = "my-org/quantized-" + "0" * 24
    refused(publisher, make_release("one"), f"cannot read the collection {slug}", collection=slug)
