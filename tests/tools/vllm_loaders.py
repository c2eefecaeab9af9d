"""Table of how vLLM builds and loads each architecture, read from its own classes, which are built without weights.

    .venv/bin/python -m tests.tools.vllm_loaders                         # all models of tests/zoo
    .venv/bin/python -m tests.tools.vllm_loaders llama jamba             # replace the rows of these
    .venv/bin/python -m tests.tools.vllm_loaders --python OTHER/bin/python

This part, in quantmint's environment, writes the zoo's models to a temporary folder. The second, `vllm_table` in vLLM's
environment, writes ``pipeline/quantize/model/loaders/vllm-X.Y.yaml``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ROOT = Path(__file__).parents[2]


def build_zoo(names: Sequence[str], folder: Path) -> list[Path]:
    """Write models of the zoo below a folder; return the folder of each."""
    from tests.zoo import models

    folders: list[Path] = []
    for name in names or models.names():
        try:
            folders.append(models.build(name, folder / name))
        except Exception as error:
            sys.stderr.write(f"{name}: the zoo cannot build it: {type(error).__name__}: {error}\n")
    return folders


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models of tests/zoo whose rows are replaced (default: a new table)")
    parser.add_argument("--python", default=str(ROOT / ".venv-vllm" / "bin" / "python"), help="Python that has vLLM")
    parser.add_argument("--output", type=Path, help="file to write (default: the table of this version)")
    parser.add_argument("--trace", type=Path, help="also write the module that each module on disk reaches, as JSON")
    parser.add_argument("--update", action="store_true", help="keep the rows of other classes")
    arguments = parser.parse_args()
    script = str(Path(__file__).with_name("vllm_table.py"))
    with tempfile.TemporaryDirectory() as folder:
        command = [arguments.python, script, *map(str, build_zoo(arguments.names, Path(folder)))]
        command += ["--output", str(arguments.output)] if arguments.output else []
        command += ["--trace", str(arguments.trace)] if arguments.trace else []
        command += ["--update"] if arguments.update or arguments.names else []
        environment = {**os.environ, "PYTHONHASHSEED": "0"}  # vLLM's Transformers backend renames by a set
        sys.exit(subprocess.run(command, check=False, env=environment).returncode)


if __name__ == "__main__":
    main()
