"""Warm executables of a whole test run: its processes share what imports the libraries.

    with shared_vllm(folder, find_vllm()) as vllm: ...
    with shared_python(folder) as python: ...
    with shared_library(folder, "quark") as python: ...

``folder`` is one for all test processes. The first of them starts the process that keeps what is warm, which ends
with the last one's block. Else each test process would import vLLM three times: for servers, for their engines and for
the clients that load them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quantmint.pipeline.serving.environment import VllmEnvironment
from tests.warm.executable import warm_python, warm_vllm

if TYPE_CHECKING:
    import pytest

_ROOT = Path(__file__).parents[2]
_PLACE = "holders.socket"
_MODEL = (
    "transformers.models.llama.modeling_llama",
    "quantmint.pipeline.quantize.engines.libraries.job",
    "quantmint.pipeline.quantize.model.reader",
)
# First what imports the library as it has to be imported.
_ENGINES = {
    "quark": ("tests.quantize.oracles.with_quark", "quark.torch.utils.llm.model_preparation", *_MODEL),
    "llmcompressor": (
        "tests.quantize.oracles.with_llmcompressor",
        "llmcompressor.modeling.moe.linearize",
        "llmcompressor.modifiers.gptq",
        "llmcompressor.modifiers.transform.awq",
        *_MODEL,
    ),
}


def for_all_workers(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder that the workers of pytest-xdist share: their temporary folders are beside each other."""
    base = factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    root.mkdir(exist_ok=True)
    return root


@contextlib.contextmanager
def shared_vllm(folder: Path, vllm: VllmEnvironment) -> Iterator[VllmEnvironment]:
    """`warm_vllm` for as long as anybody's block runs."""
    with _kept(folder, os.environ, "vllm", str(vllm.executable)):
        yield VllmEnvironment(folder / "bin" / "vllm")


@contextlib.contextmanager
def shared_python(folder: Path) -> Iterator[Path]:
    """`warm_python` for as long as anybody's block runs; PyTorch has one thread in each of its programs."""
    with _kept(folder, {**os.environ, "OMP_NUM_THREADS": "1"}, "python"):
        yield folder / "python"


@contextlib.contextmanager
def shared_library(folder: Path, engine: str) -> Iterator[Path]:
    """`warm_python` with the library of an engine alone: it patches what others import."""
    # Quark compiles an extension with the tools beside the interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    with _kept(folder, {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}, "python", *_ENGINES[engine]):
        yield folder / "python"


@contextlib.contextmanager
def _kept(folder: Path, environment: Mapping[str, str], *arguments: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with _alone(folder):
            line = stack.enter_context(_connected(folder) or _started(folder, environment, *arguments))
        try:
            yield
        finally:
            # Nobody comes while the last one leaves, so what comes then starts anew.
            with _alone(folder):
                line.shutdown(socket.SHUT_WR)
                line.recv(1)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _connected(folder: Path) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(str(folder / _PLACE))
    except OSError:
        line.close()
        return None
    return line


def _started(folder: Path, environment: Mapping[str, str], *arguments: str) -> socket.socket:
    line, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.warm.shared", str(theirs.fileno()), str(folder), *arguments],
            cwd=_ROOT,
            env={**environment, "PYTHONPATH": str(_ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # what a terminal interrupts are the test processes, and they leave
        )
    assert line.recv(1), f"what is kept in {folder} could not be made"
    return line


def _keep(number: str, place: str, kind: str, *given: str) -> None:
    """Keep it for who is on the other end of a socket, and for all who connect, until the last has left."""
    folder, first = Path(place), socket.socket(fileno=int(number))
    for left in folder.glob("*.socket"):
        left.unlink()
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as stack:
        stack.enter_context(
            warm_vllm(folder, VllmEnvironment(Path(given[0])))
            if kind == "vllm"
            else warm_python(folder, os.environ, *given)
        )
        listening.bind(str(folder / _PLACE))
        listening.listen(64)
        first.send(b"\n")
        lines = [first]
        while True:
            ready, _, _ = select.select([listening, *lines], [], [])
            if listening in ready:
                lines.append(listening.accept()[0])
            left = [line for line in lines if line in ready and not line.recv(1)]
            if len(left) == len(lines):
                break  # they wait for our end
            for line in left:
                lines.remove(line)
                line.close()


if __name__ == "__main__":
    _keep(*sys.argv[1:])
