"""The project of the stages' tests, for what is typed in it, and a set of texts to calibrate on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.stages.conftest import _alone, orchestra, project, quantmint, setting, with_vllm, write_gate, write_model

__all__ = ["_alone", "orchestra", "project", "quantmint", "setting", "with_vllm", "write_gate", "write_model"]


@pytest.fixture
def words() -> tuple[str, ...]:
    text = "\n".join(" ".join(f"w{(line * word) % 500 + 4}" for word in range(1, 60)) for line in range(1, 40))
    Path("words.txt").write_text(text)
    Path("words.yaml").write_text(
        "name: words\ndescription: Words.\nfile: words.txt\nsamples: 8\nsequence_length: 64\nseed: 2\n"
    )
    return "--calibration", "words.yaml"


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("quantmint.pipeline.runs.forecast", "quantmint.pipeline.runs.preflight"):
        monkeypatch.setattr(f"{place}.free_bytes", lambda path: 10**16)
