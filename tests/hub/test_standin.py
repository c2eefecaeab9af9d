"""The Hub's stand-in, asked by nothing but the real client."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from tests.hub.standin import HubStandIn


def test_a_folder_goes_up_and_comes_down(hub: HubStandIn, tmp_path: Path) -> None:
    api, folder = HfApi(endpoint=hub.url, token=hub.token), tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    written = {"model.safetensors": b"\0" * 2**20, "README.md": b"---\nlicense: mit\n---\n", "sub/x.json": b"{}"}
    for name, content in written.items():
        (folder / name).write_bytes(content)
    api.create_repo("my-org/model", private=True)
    api.upload_folder(repo_id="my-org/model", folder_path=folder)
    api.create_tag("my-org/model", tag="v1")

    down = Path(snapshot_download("my-org/model", revision="v1"))

    assert {name: (down / name).read_bytes() for name in written} == written
