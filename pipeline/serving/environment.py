"""Find the ``vllm`` command and its version: an argument, then QUANTMINT_VLLM, then ``.venv-vllm``, then PATH.

    >>> find_vllm().version  # without importing vLLM, which takes some ten seconds
    '0.32.0+cpu'

vLLM lives in its own environment, because its pins clash with llm-compressor's. It is started, never imported. In a
container, QUANTMINT_IMAGE names the image by its digest, because a measurement holds for one image only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

from quantmint.pipeline.base.errors import ServingError, UserError

VARIABLE = "QUANTMINT_VLLM"
FOLDER = ".venv-vllm"
IMAGE_VARIABLE: Final = "QUANTMINT_IMAGE"
Version: TypeAlias = tuple[int, ...]
"""The release numbers of a vLLM: "0.32.0+cpu" is (0, 32, 0)."""
_IMAGE: Final = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}")
_HINT = (
    f"`make serving` builds {FOLDER} with vLLM for the CPU; on a GPU machine install vLLM's own build in an environment"
    f" of its own, or run in its container, and set {VARIABLE} to that environment or to its `vllm` command"
)


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """A ``vllm`` command; ``planned`` is a version to plan for where no such command exists."""

    executable: Path
    planned: str | None = None

    @property
    def python(self) -> Path:
        """The Python interpreter of the command. Raises `ServingError` when its first line does not name one."""
        sibling = self.executable.parent / "python"
        if _runnable(sibling):
            return sibling
        with self.executable.open("rb") as script:
            words = script.readline(4096).decode("utf-8", errors="replace").removeprefix("#!").split()
        if words and Path(words[0]).name == "env":
            words = words[1:]
        interpreter = shutil.which(words[0]) if words else None
        if interpreter is None or "python" not in Path(interpreter).name:
            raise ServingError(f"cannot tell which Python runs {self.executable}", hint=_HINT)
        return Path(interpreter)

    @property
    def version(self) -> str:
        """vLLM's version from its package metadata. Raises `ServingError` when the environment has no vLLM."""
        return self.planned or _version(self, self.executable.stat().st_mtime_ns)


def find_vllm(
    explicit: str | Path | None = None, *, environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> VllmEnvironment:
    """Return the first ``vllm`` command of the four places.

    ``explicit`` and QUANTMINT_VLLM name the command or its environment; a wrong one raises `UserError`. ``.venv-vllm``
    is searched for in ``folder`` (default: the current one), its parents, and the project's own folder. Raises
    `UserError` when no place has the command.
    """
    variables = os.environ if environ is None else environ
    for name, origin in ((explicit, "the argument"), (variables.get(VARIABLE), VARIABLE)):
        if name:
            return VllmEnvironment(_command(Path(name), origin))
    start = (folder or Path.cwd()).resolve()
    project = Path(__file__).resolve().parents[2]
    for place in (start, *start.parents, project):
        candidate = place / FOLDER / "bin" / "vllm"
        if _runnable(candidate):
            return VllmEnvironment(candidate)
    on_path = shutil.which("vllm", path=variables.get("PATH"))
    if on_path is not None:
        return VllmEnvironment(Path(on_path))
    raise UserError(
        f"no vLLM found: {VARIABLE} is not set, and neither {FOLDER} nor PATH has a `vllm` command", hint=_HINT
    )


def _command(name: Path, origin: str) -> Path:
    path = Path(os.path.abspath(name.expanduser()))  # noqa: PTH100 - resolve() would follow the link out of the environment
    candidate = path / "bin" / "vllm" if path.is_dir() else path
    if not _runnable(candidate):
        raise UserError(f"{origin} names {name}, but {candidate} is not an executable file", hint=_HINT)
    return candidate


def _runnable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


@cache
def _version(environment: VllmEnvironment, _mtime_ns: int) -> str:
    python = environment.python
    try:
        done = subprocess.run(
            [str(python), "-c", "import importlib.metadata as m; print(m.version('vllm'))"],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServingError(f"{python} does not answer: {error}", hint=_HINT) from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ServingError(f"{python} has no vLLM ({reason})", hint=_HINT)
    return done.stdout.strip()


def serving_image() -> str | None:
    """Return QUANTMINT_IMAGE, an image as ``name@sha256:DIGEST``; None when unset.

    Raises `UserError` for another form.
    """
    image = os.environ.get(IMAGE_VARIABLE, "")
    if not image:
        return None
    if _IMAGE.fullmatch(image) is None:
        raise UserError(
            f"{IMAGE_VARIABLE}: found {image!r}, expected an image by its digest, name@sha256: and 64 hex digits",
            hint="`docker inspect --format '{{index .RepoDigests 0}}' IMAGE` prints it; unset it outside a container.",
        )
    return image


def parse_version(text: str) -> Version:
    """Return the release numbers of a vLLM version: (0, 32, 0) for "0.32.0+cpu".

    Raises `UserError` for another form.
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if match is None:
        raise UserError(f"{text!r} is not a version of vLLM: expected something like 0.32.0")
    return tuple(int(part) for part in match[1].split("."))


def within(version: Version, first: Version, end: Version) -> bool:
    """Return whether first <= version < end; an empty bound is open, and 0.11 equals 0.11.0."""
    width = max(map(len, (version, first, end)))
    number, least, most = ((*bound, *[0] * (width - len(bound))) for bound in (version, first, end))
    return least <= number and (not end or number < most)
