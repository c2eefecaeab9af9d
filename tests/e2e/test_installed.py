"""The wheel in an environment of its own: one importable name, and a run beside a user's modules of common names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from quantmint.pipeline.serving.environment import VllmEnvironment
from tests.e2e.project import RECIPE

ROOT = Path(__file__).parents[2]
FOLDERS = ("calibration", "eval", "pipeline", "recipes")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes beside what it builds."""
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, sources / name)
    for name in ("quantmint", *FOLDERS):
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, sources)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; its requirements are read where they are, after the environment's own."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    _pip("--python", folder / "bin" / "python", "install", "--no-deps", wheel)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_wheel_holds_one_name_and_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == {"quantmint"}
    tracked = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert {f"quantmint/{name}" for name in tracked} - names == set()


def test_a_run_beside_modules_of_the_same_names(environment: Path, warm_vllm: VllmEnvironment, tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    for file in ("eval/__init__.py", "calibration.py", "pipeline.py", "recipes.py"):
        (tmp_path / file).write_text(f"raise SystemExit('imported {file} of the working folder')\n")
    (tmp_path / "own.yaml").write_text(f"name: own\nextends: {RECIPE}\n")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}  # every process finds them first
    ended = subprocess.run(
        [environment / "bin" / "quantmint", "run", "own.yaml", "--json"],
        cwd=tmp_path,
        env={**variables, "QUANTMINT_VLLM": str(warm_vllm.executable), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["verdict"] == "PASS"
    assert (tmp_path / "published" / "own" / "quantmint.json").is_file()
