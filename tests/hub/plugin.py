"""The fixture ``hub``: a Hub of one's own that `huggingface_hub` talks to, in this process and in its children."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.standin import HubStandIn


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with HubStandIn() as standing_in:
        use(standing_in, tmp_path / "hf-home", monkeypatch)
        yield standing_in


def use(hub: HubStandIn, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the Hub of this process and of those that it starts; the client read its settings at import."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import close_session

    settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    settings |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1,localhost"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    read: dict[str, object] = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_URL_HOSTS": frozenset({*getattr(constants, "HF_URL_HOSTS", ()), "127.0.0.1"}),
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    for name, value in read.items():
        monkeypatch.setattr(constants, name, value, raising=False)  # not every version has them all
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    close_session()
