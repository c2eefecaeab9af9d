"""What is read of the base's own card: its front matter, from the snapshot or the Hub, and its absence."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantmint.pipeline.stages.card import base_metadata, front_matter
from quantmint.pipeline.stages.setting import SourceIdentity
from tests.hub.standin import HubStandIn

CARD = "---\nlicense: llama3.3\nlanguage:\n- en\n---\n# Base\n\n---\nlicense: mit\n---\n"
NO_COMMIT = "0" * 40


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (CARD, {"license": "llama3.3", "language": ["en"]}),
        (CARD.replace("\n", "\r\n"), {"license": "llama3.3", "language": ["en"]}),
        ("# no front matter\n---\nlicense: mit\n---\n", {}),
        ("---\nlicense: mit\n", {}),
        ("---\n- a list\n---\n", {}),
        ("---\nlicense: [mit\n---\n", {}),
        ("---\nlicense: !!python/object/apply:os.getcwd []\n---\n", {}),
        ("", {}),
    ],
)
def test_front_matter(tmp_path: Path, text: str, found: dict[str, object]) -> None:
    (tmp_path / "README.md").write_text(text, encoding="utf-8", newline="")
    assert front_matter(tmp_path) == found


def test_a_folder_without_a_card_states_nothing(tmp_path: Path) -> None:
    assert base_metadata(SourceIdentity(tmp_path, "0" * 64), tmp_path, warn=pytest.fail) == {}


def test_a_repositorys_card_at_its_commit(hub: HubStandIn, tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=hub.url, token=hub.token)
    api.create_repo("my-org/base")
    at = api.upload_file(path_or_fileobj=CARD.encode(), path_in_repo="README.md", repo_id="my-org/base").oid
    api.upload_file(path_or_fileobj=b"---\nlicense: mit\n---\n", path_in_repo="README.md", repo_id="my-org/base")
    found = base_metadata(SourceIdentity(None, str(at), "my-org/base"), tmp_path, warn=pytest.fail)
    assert found["license"] == "llama3.3"
    # Beside the weights it needs nobody.
    (tmp_path / "README.md").write_text("---\nlicense: gemma\n---\n")
    assert base_metadata(SourceIdentity(None, NO_COMMIT, "my-org/gone"), tmp_path, warn=pytest.fail) == {
        "license": "gemma"
    }


def test_no_card_is_no_fault_and_no_answer_is_told(hub: HubStandIn, tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=hub.url, token=hub.token)
    api.create_repo("my-org/bare")
    at = api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id="my-org/bare").oid
    assert base_metadata(SourceIdentity(None, str(at), "my-org/bare"), tmp_path, warn=pytest.fail) == {}
    told: list[str] = []
    assert base_metadata(SourceIdentity(None, NO_COMMIT, "my-org/absent"), tmp_path, warn=told.append) == {}
    assert told == ["my-org/absent: its card cannot be had, so its licence and languages are unknown here"]
