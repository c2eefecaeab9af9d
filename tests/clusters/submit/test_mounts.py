"""What a container of a job on Slurm sees of the host."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.commands.cluster_options import parse_mount
from tests.clusters.submit.test_command import ended


@pytest.mark.parametrize("text", ["data", "/a:b", "/a:/b:ro", "/a,/b"])
def test_what_is_no_mount(text: str) -> None:
    with pytest.raises(UserError, match="--mount"):
        parse_mount(text)


def test_folders_and_where_links_lead_are_mounted_outer_ones_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work, away, hub = tmp_path / "work", tmp_path / "away", tmp_path / "hf"
    for folder in (work, away, tmp_path / "recipes"):
        folder.mkdir()
    (work / "store").symlink_to(away)
    recipe = "name: mine\nextends: tiny-ptpc-fp8kv\n"
    (tmp_path / "recipes/mine.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(work)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(hub))
    words = ("../recipes/mine.yaml", "--slurm", "--dry-run", "--container", "/images/a.sif")
    assert ended(*words, "--mount", "/nvme", "--mount", f"/ssd:{work}/scratch") == 0
    (line,) = [line for line in capsys.readouterr().out.replace("\\\n", "").splitlines() if line.startswith("srun")]
    written = shlex.split(line)
    same = [f"{path}:{path}" for path in (work, away, tmp_path / "recipes", hub)]
    assert written[written.index("--bind") + 1] == ",".join(["/nvme:/nvme", *same, f"/ssd:{work}/scratch"])
    assert f"HF_HOME={hub}" in written
    assert not hub.exists(), "a dry run makes nothing"
