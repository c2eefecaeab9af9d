"""The wheel in an environment of its own: one importable name, and a run beside a user's modules of common names."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantmint.pipeline.serving.environment import VllmEnvironment

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


def test_the_tutorial_beside_modules_of_the_same_names(
    environment: Path, warm_vllm: VllmEnvironment, tmp_path: Path
) -> None:
    """Each command of docs/tutorial.md prints what the page shows, in a folder whose modules have our names."""
    checkout, home = tmp_path / "checkout", tmp_path / "demo"
    checkout.mkdir()
    for name in FOLDERS:
        (checkout / name).symlink_to(ROOT / name)
    variables = {
        **os.environ,
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(home),  # every process finds the user's modules first
        "QUANTMINT_VLLM": str(warm_vllm.executable),
        "HF_HUB_OFFLINE": "1",
    }
    folder = checkout
    for command, output in commands((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")):
        if command[0] == "cd":
            folder = home
            (home / "eval").mkdir()
            for file in ("eval/__init__.py", "calibration.py", "pipeline.py", "recipes.py"):
                (home / file).write_text(f"raise SystemExit('imported {file} of the working folder')\n")
            continue
        ended = subprocess.run(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        assert output.fullmatch(plain(ended.stdout)), f"{command}: {plain(ended.stdout)}\nis not {output.pattern}"
    assert (home / "published" / "mine" / "quantmint.json").is_file()


_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
_VARIES = re.compile(r"\bv\d{8}-[0-9a-f]{8}\b|\b[0-9a-f]{12}\b|[-+]?\d[\d.,]*(?: (?:min|s|h)\b)?(?: # s\b)?")
"""What differs between two machines or days: tags, fingerprints, figures, durations."""


def commands(page: str) -> Iterator[tuple[list[str], re.Pattern[str]]]:
    """Yield each command of a page's console blocks, with the pattern of its output; an ellipsis is any text."""
    for block in _BLOCK.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            line, _, output = part.partition("\n")
            parts = map(re.escape, re.split("…\n|…", plain(output)))
            yield shlex.split(line), re.compile(".*".join(parts), re.S)


def plain(output: str) -> str:
    """Return an output with # for what differs between runs, and one space where columns have many."""
    lines = (re.sub(" +", " ", line).rstrip() for line in _VARIES.sub("#", output).splitlines())
    # A time of a minute and more has two numbers, on a busy machine where the page has one.
    return re.sub("#( #)+", "#", "\n".join(lines).replace("# min # s", "#")).strip("\n") + "\n"
