"""What a container must see: every name of every file of a recipe, and where links lead."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from pipeline.base.errors import UserError
from pipeline.clusters.submit.mounts import Mount, mounts_of, needs_of, parse_mount
from pipeline.recipe.load import load_recipe
from tests.clusters.submit.test_command import ended


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A working folder, and files of its recipe everywhere else."""
    for name in (
        "work/recipes",
        "teams",
        "models/blobs",
        "models/snapshots/a",
        "sets",
        "loads",
        "keys",
        "tuned",
        "big",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models/blobs/0").touch()
    (tmp_path / "models/snapshots/a/model.safetensors").symlink_to("../../blobs/0")
    (tmp_path / "models/link").symlink_to(tmp_path / "models/snapshots/a")
    (tmp_path / "keys/signing.pem").touch()
    (tmp_path / "tuned/kernels.csv").touch()
    (tmp_path / "tuned/chat.jinja").touch()
    (tmp_path / "big/texts.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    sets = {"name": "ours", "description": "Ours.", "file": "../big/texts.jsonl", "text": "text"}
    (tmp_path / "sets/ours.yaml").write_text(yaml.safe_dump(sets), encoding="utf-8")
    base = {
        "source": {"folder": "../models/link"},
        "quantization": {"scheme": "ptpc_fp8", "kv_cache": "fp8"},
        "calibration": {"set": str(tmp_path / "sets/ours.yaml")},
        "serve": {
            "tunableop": "../tuned/kernels.csv",
            "knobs": {"--chat-template": str(tmp_path / "tuned/chat.jinja")},
        },
        "publish": {"folder": str(tmp_path / "out"), "sign": {"key": "../keys/signing.pem"}},
    }
    (tmp_path / "teams/base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    recipe = {"name": "mine", "extends": "../../teams/base.yaml"}
    (tmp_path / "work/recipes/mine.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return tmp_path


def opens(path: Path, mounts: tuple[Mount, ...]) -> bool:
    """Whether a path can be gone in a container that has these mounts and nothing else, link by link.

    A mount point is a folder or file there, whatever it is outside, and so is what lies above one.
    """
    targets = {Path(mount.target) for mount in mounts}
    here, ahead = Path("/"), list(reversed(path.parts[1:]))
    while ahead:
        part = ahead.pop()
        there = here.parent if part == ".." else here / part
        within = any(there.is_relative_to(target) for target in targets)
        if not (there.exists() or there.is_symlink() if within else any(one.is_relative_to(there) for one in targets)):
            return False
        if within and there not in targets and there.is_symlink():
            leads = there.readlink()
            here = Path("/") if leads.is_absolute() else here
            ahead += [step for step in reversed(leads.parts) if step != "/"]
        else:
            here = there
    return True


def test_all_that_a_recipe_names_is_seen(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk / "work")
    environment = {"HF_HOME": str(disk / "hf"), "HF_HUB_CACHE": str(disk / "hub")}
    needs = needs_of(load_recipe("mine"), disk / "work", environment)
    for made in ("out/mine", "hf/hub", "hub/models--a"):
        (disk / made).mkdir(parents=True)
    mounts = mounts_of((disk / "work", *needs.read, *needs.written), ())
    for name in (
        "work/recipes/mine.yaml",
        "teams/base.yaml",
        "models/link/model.safetensors",
        "models/snapshots/a/model.safetensors",
        "models/blobs/0",
        "sets/ours.yaml",
        "big/texts.jsonl",
        "keys/signing.pem",
        "tuned/kernels.csv",
        "tuned/chat.jinja",
        "out/mine",
        "hf/hub",
        "hub/models--a",
    ):
        assert opens(disk / name, mounts), name
        assert not opens(disk / name, (Mount(str(disk / "work"), str(disk / "work")),)) or name.startswith("work")
    assert needs.variables == {"HF_HOME": str(disk / "hf"), "HF_HUB_CACHE": str(disk / "hub")}
    assert {disk / "out", disk / "hf", disk / "hub"} == set(needs.written)


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
