"""What would keep a release back is told before it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.recipe.destinations import Hub, Storage
from quantmint.pipeline.recipe.sections import Licence, Publish
from quantmint.pipeline.stages.publish import require_admission
from quantmint.pipeline.stages.setting import Setting
from tests.hub.standin import HubStandIn

REPO = Hub(repo="my-org/Small-FP8")
APACHE = Licence(id="apache-2.0")


@pytest.fixture
def publishing(setting: Setting) -> Callable[..., Setting]:
    def get(**section: Any) -> Setting:
        recipe = setting.recipe.model_copy(update={"publish": Publish(**section)})
        return replace(setting, loaded=replace(setting.loaded, recipe=recipe))

    return get


@pytest.fixture
def silent(hub: HubStandIn) -> Iterator[HubStandIn]:
    """A Hub at which nothing may be changed."""
    yield hub
    assert hub.sent("PUT", "") == []
    assert [request for request in hub.sent("POST", "") if "validate-yaml" not in request.path] == []


def test_a_folder_is_ones_own(publishing: Callable[..., Setting]) -> None:
    require_admission(publishing())


def test_a_licence_that_nobody_stated(publishing: Callable[..., Setting], silent: HubStandIn) -> None:
    with pytest.raises(UserError, match=r"my-org/Small-FP8 could not be published: its licence .* table of licences"):
        require_admission(publishing(hub=REPO))
    require_admission(publishing(hub=REPO, licence=APACHE))


def test_the_sources_own_card_counts(publishing: Callable[..., Setting], silent: HubStandIn, project: Path) -> None:
    (project / "model" / "README.md").write_text("---\nlicense: cc-by-nd-4.0\n---\n")
    with pytest.raises(UserError, match="does not allow to pass on"):
        require_admission(publishing(hub=REPO))


def test_a_token_that_may_only_read(
    publishing: Callable[..., Setting], silent: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", silent.new_token("read"))
    with pytest.raises(UserError, match="may only read"):
        require_admission(publishing(hub=REPO, licence=APACHE))


def test_a_folder_in_the_way(publishing: Callable[..., Setting], setting: Setting) -> None:
    (setting.home / "published" / setting.recipe.name).mkdir(parents=True)
    with pytest.raises(UserError, match="not published by quantmint"):
        require_admission(publishing())


def test_storage_that_is_there(publishing: Callable[..., Setting], tmp_path: Path) -> None:
    storage = Storage(url=f"file://{tmp_path}/bucket")
    require_admission(publishing(folder=None, storage=storage, licence=APACHE))
    with pytest.raises(UserError, match="could not be published"):
        require_admission(publishing(folder=None, storage=storage))


def test_a_run_asks_before_it_works(quantmint: Callable[..., Any], project: Path, silent: HubStandIn) -> None:
    section = "publish: {hub: {repo: nobodys/Small-FP8}, licence: {id: apache-2.0}}"
    text = (project / "r.yaml").read_text()
    (project / "r.yaml").write_text(text.replace("publish: {folder: published}", section))
    ended = quantmint("run", "r.yaml")
    assert ended.code == 2
    assert "quant is no member of nobodys" in ended.err
    assert not list((project / "store").rglob("record.json"))
