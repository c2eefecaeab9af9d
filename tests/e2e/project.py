"""A user's working folder, and a run in it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serving.served.cases import PUBLISHED

RECIPE = "tiny-ptpc-fp8kv" if PUBLISHED.kv_cache == "fp8" else "tiny-ptpc"


@dataclass(frozen=True)
class Project:
    """A working folder of a user: where the store is, and where things are published; ``python`` runs ours."""

    home: Path
    vllm: Path
    python: str | Path = sys.executable

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def published(self) -> Path:
        return self.home / "published" / RECIPE

    def environment(self) -> dict[str, str]:
        return {**os.environ, "QUANTMINT_VLLM": str(self.vllm), "HF_HUB_OFFLINE": "1"}

    def start(self, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as stream:
            return subprocess.Popen(
                [self.python, "-m", "quantmint", *arguments],
                cwd=self.home,
                env={**self.environment(), "PYTHONPATH": str(Path(__file__).parents[2])},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    def run(self, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, "-m", "quantmint", *arguments],
            cwd=self.home,
            env={**self.environment(), "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@dataclass(frozen=True)
class Finished:
    """A project whose first run was killed in the middle of the evaluation and whose second came to the end."""

    project: Project
    first_log: str
    entries_before: dict[str, int]
    survivors: tuple[str, ...]
    result: dict[str, Any]
    exit_code: int
    stderr: str
