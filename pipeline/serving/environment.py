"""Where the ``vllm`` command is: an argument, then QUANTMINT_VLLM, then ``.venv-vllm``, then PATH.

    >>> find_vllm().version  # without importing vLLM, which takes some ten seconds
    '0.32.0+cpu'

vLLM lives in its own environment, because its pins clash with llm-compressor's. It is started, never imported. In a
container, QUANTMINT_IMAGE names the image by its digest: what was measured with one image says nothing of another.
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
    """A ``vllm`` command; with ``planned`` none, but a version that is only planned for."""

    executable: Path
    planned: str | None = None

    @property
    def python(self) -> Path:
        """The interpreter that runs the command; ServingError where it cannot be told."""
        beside = self.executable.parent / "python"
        if _runnable(beside):
            return beside
        with self.executable.open("rb") as script:
            words = script.readline(4096).decode("utf-8", errors="replace").removeprefix("#!").split()
        if words and Path(words[0]).name == "env":
            words = words[1:]
        named = shutil.which(words[0]) if words else None
        if named is None or "python" not in Path(named).name:
            raise ServingError(f"cannot tell which Python runs {self.executable}", hint=_HINT)
        return Path(named)

    @property
    def version(self) -> str:
        """vLLM's version, from the metadata of the distribution; ServingError where it has none."""
        return self.planned or _version(self, self.executable.stat().st_mtime_ns)


def find_vllm(
    explicit: str | Path | None = None, *, environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> VllmEnvironment:
    """Return the first ``vllm`` command of the four places.

    ``explicit`` and QUANTMINT_VLLM name the command or the environment that holds it; when they are given and wrong
    that is a UserError, not a reason to look further. ``folder`` (default: the current one) and its parents, then the
    project's own folder, are searched for ``.venv-vllm``.
    """
    variables = os.environ if environ is None else environ
    for given, found_by in ((explicit, "the argument"), (variables.get(VARIABLE), VARIABLE)):
        if given:
            return VllmEnvironment(_command(Path(given), found_by))
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


def _command(given: Path, found_by: str) -> Path:
    path = Path(os.path.abspath(given.expanduser()))  # noqa: PTH100 - resolve() would follow the link out of the environment
    candidate = path / "bin" / "vllm" if path.is_dir() else path
    if not _runnable(candidate):
        raise UserError(f"{found_by} names {given}, but {candidate} is not a command that can be run", hint=_HINT)
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
    """The image as ``name@sha256:DIGEST``; None outside a container. Raises `UserError` for anything else."""
    found = os.environ.get(IMAGE_VARIABLE, "")
    if not found:
        return None
    if _IMAGE.fullmatch(found) is None:
        raise UserError(
            f"{IMAGE_VARIABLE}: found {found!r}, expected an image by its digest, name@sha256: and 64 hex digits",
            hint="`docker inspect --format '{{index .RepoDigests 0}}' IMAGE` prints it; unset it outside a container.",
        )
    return found


def parse_version(text: str) -> Version:
    """Release numbers of a vLLM version: "0.32.0+cpu" is (0, 32, 0). UserError for a text that starts with none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if found is None:
        raise UserError(f"{text!r} is not a version of vLLM: expected something like 0.32.0")
    return tuple(int(part) for part in found[1].split("."))


def within(version: Version, first: Version, end: Version) -> bool:
    """Whether first <= version < end, with an empty bound open; 0.11 and 0.11.0 are one version."""
    width = max(map(len, (version, first, end)))
    number, least, most = ((*bound, *[0] * (width - len(bound))) for bound in (version, first, end))
    return least <= number and (not end or number < most)
