"""What a container must see: every name of every file of a recipe, and where links lead."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from pipeline.base.errors import UserError
from pipeline.clusters.submit.mounts import mounts_of, needs_of, parse_mount
from pipeline.recipe.load import load_recipe
from tests.clusters.submit.test_command import ended


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A working folder, and a recipe elsewhere that extends one of a third place."""
    for name in ("work", "recipes", "teams"):
        (tmp_path / name).mkdir()
    base = {"quantization": {"scheme": "ptpc_fp8"}, "source": {"folder": "../model"}}
    (tmp_path / "teams/base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    recipe = {"name": "mine", "extends": "../teams/base.yaml"}
    (tmp_path / "recipes/mine.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return tmp_path


def test_the_folders_of_a_recipe_and_the_cache_are_needed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk / "work")
    environment = {"HF_HOME": str(disk / "hf"), "HF_HUB_CACHE": str(disk / "hub")}
    needs = needs_of(load_recipe("../recipes/mine.yaml"), disk / "work", environment)
    assert {path.resolve() for path in needs.recipes} == {disk / "recipes", disk / "teams"}
    assert needs.caches == (disk / "hf", disk / "hub")
    assert needs.variables == environment
    assert needs_of(load_recipe("tiny-ptpc-fp8kv"), disk / "work", environment).recipes == (), "it is in the image"


def test_outer_mounts_come_first_and_hold_the_inner(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work/store").symlink_to(tmp_path / "away")
    asked = (parse_mount(f"/nvme:{tmp_path}/work/scratch"), parse_mount("/opt/tools"))
    (tmp_path / "work/scratch").mkdir()
    paths = [tmp_path / "work/store", tmp_path / "work", tmp_path / "work/scratch/a", Path("/opt/tools/b")]
    found = mounts_of(paths, asked)
    assert {mount.target for mount in found} == {
        "/opt/tools",
        str(tmp_path / "work"),
        str(tmp_path / "away"),
        str(tmp_path / "work/scratch"),
    }
    targets = [mount.target for mount in found]
    assert targets.index(str(tmp_path / "work")) < targets.index(str(tmp_path / "work/scratch"))


@pytest.mark.parametrize("path", ["/", "/a,b", "/a:b"])
def test_what_cannot_be_mounted(path: str) -> None:
    with pytest.raises(UserError, match="--container: found the folder"):
        mounts_of([Path(path)], ())


@pytest.mark.parametrize("text", ["data", "/a:b", "/a:/b:ro", "/a,/b", "/a:/b/.."])
def test_what_is_no_mount(text: str) -> None:
    with pytest.raises(UserError, match="--mount"):
        parse_mount(text)


def test_the_command_mounts_them(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(disk / "work")
    monkeypatch.setenv("HF_HOME", str(disk / "hf"))
    words = ("tiny-ptpc-fp8kv", "--slurm", "--dry-run", "--mount", "/nvme")
    assert ended(*words, "--container", "/images/a.sif") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("srun")]
    written = shlex.split(line)
    assert f"/nvme:/nvme,{disk}/work:{disk}/work,{disk}/hf:{disk}/hf" in written
    assert f"HF_HOME={disk}/hf" in written
    assert not (disk / "hf").exists(), "a dry run makes nothing"
    assert ended(*words) == 2
    assert "--mount without --container" in capsys.readouterr().err
