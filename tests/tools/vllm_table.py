"""Write the table of how vLLM builds and loads each architecture: the part of `vllm_loaders` in vLLM's environment.

    .venv-vllm/bin/python tests/tools/vllm_table.py FOLDER...

It imports nothing of quantmint, and the modules beside it by their own names, as Python puts a script's folder on its
path. A class is built on the meta device, as on an Instinct GPU, with a quantization that records which module asks it
for a method, and under which name. Then each tensor of the checkpoint goes through the class's own ``load_weights``,
whose last step, the ``weight_loader`` of a parameter, records which parameter the tensor reaches. No code of a model is
interpreted, and no kernel runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from vllm_architecture import read
from vllm_reading import reason
from vllm_rows import row, union

for _variable, _value in {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(_variable, _value)

ROOT = Path(__file__).parents[2]
LOADERS = ROOT / "pipeline" / "quantize" / "model" / "loaders"
HEADER = """\
# How vLLM {version} builds and loads each architecture. Written by tests/tools/vllm_loaders.py; read by ../loader.py.
# Names are vLLM's unless said otherwise; * stands for the number of a layer or an expert.
#   quantized    modules that ask for a quantization
#   unquantized  modules with a matrix that never ask, and heads and embeddings
#   absorbed     projections that latent attention multiplies into its neighbours, in 16 bit
#   experts      containers of routed experts, with the last names of an expert's projections on disk
#   fused        module, or its last name: the modules on disk that it is loaded from, by last name or whole
#   unlisted     fused modules that a quantization's lists must call by vLLM's name
#   renames      kind, text on disk, text in vLLM and, where it holds for a part, that part; null: vLLM skips the tensor
#   listed       renames that a quantization's lists of names go through, where others than the tensors'
#   moves        what load_weights renames after that: beginnings of names
#   prefixes     names under which modules ask, where not their own: beginnings of names
#   skipped      modules on disk that vLLM does not load
#   drafter      class that serves the layers for multi-token prediction
#   generic      whether vLLM has no class of its own, and runs transformers' in its Transformers backend
#   place        of a drafter: beginning of its modules' names on disk; model: the layers after the model's last
"""


def write_table(output: Path, version: str, rows: Mapping[str, Any], failures: Mapping[str, str]) -> None:
    """Write the table as YAML, sorted by class."""
    table = {"vllm": version, "architectures": dict(sorted(rows.items())), "failures": dict(sorted(failures.items()))}
    body = yaml.safe_dump(table, default_flow_style=None, sort_keys=False, width=120)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(HEADER.format(version=version) + body, encoding="utf-8")


def generate(folders: Sequence[Path], output: Path | None, trace_file: Path | None, *, update: bool) -> None:
    """Read the class of each folder, and write the table."""
    from vllm_builder import Builder

    builder = Builder()
    import vllm

    version = vllm.__version__.partition("+")[0]
    output = output or LOADERS / f"vllm-{'.'.join(version.split('.')[:2])}.yaml"
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    traces: dict[str, dict[str, str]] = defaultdict(dict)
    failures: dict[str, str] = {}
    for folder in folders:
        start = time.perf_counter()
        try:
            for architecture, reading in read(builder, folder):
                rows[architecture].append(row(reading))
                traces[architecture].update(reading.loads)
            sys.stderr.write(f"{folder.name}: {time.perf_counter() - start:.1f} s\n")
        except Exception as error:
            architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
            failures[architecture] = reason(error)
            sys.stderr.write(f"{folder.name}: cannot be built: {failures[architecture]}\n")
    table = yaml.safe_load(output.read_text(encoding="utf-8")) if update and output.is_file() else {}
    architectures = {**table.get("architectures", {}), **{name: union(facts) for name, facts in rows.items()}}
    failures = {**table.get("failures", {}), **failures}
    failures = {name: message for name, message in failures.items() if name not in architectures}
    write_table(output, version, architectures, failures)
    if trace_file:
        trace_file.write_text(json.dumps(traces, indent=1, sort_keys=True), encoding="utf-8")
    sys.stderr.write(f"{output}: {len(architectures)} classes, {len(failures)} that cannot be built\n")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="models to read")
    parser.add_argument("--output", type=Path, help="file to write (default: the table of this version)")
    parser.add_argument("--trace", type=Path, help="also write the module that each module on disk reaches, as JSON")
    parser.add_argument("--update", action="store_true", help="keep the rows of other classes")
    arguments = parser.parse_args()
    generate(arguments.folders, arguments.output, arguments.trace, update=arguments.update)


if __name__ == "__main__":
    main()
