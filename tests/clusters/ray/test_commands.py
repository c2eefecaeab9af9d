"""``--on`` where there is nothing to work on: one error, before anything is written."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.commands.cli import main


@pytest.fixture
def refused(models: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Quantize with these options, which is refused; what is said of it."""

    source = models("llama")
    capsys.readouterr()  # where it has just been built

    def call(*options: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["quantize", str(source), str(tmp_path / "out"), "--scheme", "ptpc_fp8", *options])
        assert ended.value.code == 2
        assert not (tmp_path / "out").exists()
        said = capsys.readouterr().err
        assert said.startswith("quantmint: ")
        return said

    return call


def closed() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_no_cluster_answers(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed()
    assert f"no Ray cluster answers at ray://127.0.0.1:{port}: " in refused("--on", f"ray://127.0.0.1:{port}")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    said = refused("--on", "ray")
    assert f"no Ray cluster answers at 127.0.0.1:{port}: " in said
    assert "ray start --head" in said


def test_a_library_is_not_spread(refused: Callable[..., str]) -> None:
    said = refused(
        "--on",
        "ray",
        "--engine",
        "llmcompressor",
        "--algorithm",
        "gptq",
        "--calibration",
        "tiny",
        "--sequence-length",
        "64",
    )
    assert "the engine llmcompressor runs in one process" in said


def test_without_ray_it_says_where_it_comes_from(models: Callable[..., Path], tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['ray'] = None\n"
        "from quantmint.pipeline.commands.cli import main\n"
        f"main(['quantize', {str(models('llama'))!r}, {str(tmp_path / 'out')!r}, '--scheme', 'ptpc_fp8', "
        "'--on', 'ray', '--json'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "pip install 'quantmint[ray]'" in json.loads(ended.stdout)["error"]
