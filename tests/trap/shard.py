"""Serve a checkpoint with one shard of one rank transposed in a real vLLM, a fault of tensor parallelism alone.

    python shard.py --vllm PATH/TO/vllm --into FOLDER [--parameter REGEX] [--rank 1]
    QUANTMINT_VLLM=FOLDER/bin/vllm quantmint run RECIPE
    FOLDER/bin/vllm serve MODEL --tensor-parallel-size 2

FOLDER/bin/vllm is the real command, with FOLDER in front of PYTHONPATH. There, `sitecustomize.py` is a copy of this
file: Python imports it in every process, and it waits for vLLM's weight loader. Once the weights are loaded, and before
any kernel packs them, the parameters whose names match are filled with their own transposed numbers, on that rank only.
The file needs nothing but Python's own library and the vLLM that it wraps (0.32 was read).
"""

import argparse
import importlib.abc
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

_LOADER = "vllm.model_executor.model_loader.default_loader"
_SETTINGS = Path(__file__).with_name("shard.json")
_PARAMETER = r"layers\.1\.mlp\.down_proj\.weight(_packed)?$"


def transpose(model, pattern):
    """Fill each matching parameter with its own transposed numbers, and return their names."""
    import torch

    names = []
    for name, parameter in model.named_parameters():
        if re.search(pattern, name) and parameter.dim() == 2:
            data = parameter.data
            # Bytes move, so that any element type will do; the shape stays, or nothing would load.
            size = data.element_size()
            raw = data.contiguous().view(torch.uint8).reshape(*data.shape, size)
            moved = raw.transpose(0, 1).contiguous().reshape(data.shape[0], data.shape[1] * size)
            data.copy_(moved.view(data.dtype))
            names.append(name)
    return names


def _patch(module, pattern, rank):
    """Wrap the loader's `load_weights`; without tensor parallelism of two or more nothing is changed."""
    loader = module.DefaultModelLoader
    original = loader.load_weights

    def load_weights(self, model, *arguments, **options):
        result = original(self, model, *arguments, **options)
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank as rank_of
        from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size as size_of

        if size_of() > 1 and rank_of() == rank:
            names = transpose(model, pattern)
            sys.stderr.write(f"shard.py: transposed on rank {rank}: {', '.join(names) or 'nothing matches'}\n")
            if not names:
                raise RuntimeError(f"shard.py: no matrix on rank {rank} matches {pattern!r}")
        return result

    loader.load_weights = load_weights


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that patches vLLM's loader as soon as it is imported."""

    def __init__(self, pattern, rank):
        self._pattern, self._rank = pattern, rank

    def find_spec(self, name, path=None, target=None):
        if name != _LOADER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _patch(module, self._pattern, self._rank)

        spec.loader.exec_module = exec_module
        return spec


def wrap(vllm, folder, pattern=_PARAMETER, rank=1):
    """Write the command with the fault below `folder`, and return its path."""
    vllm, folder = Path(vllm).absolute(), Path(folder).absolute()
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(__file__, folder / "sitecustomize.py")
    (folder / "shard.json").write_text(json.dumps({"parameter": pattern, "rank": rank}))
    python = vllm.parent / "python"
    interpreter = python if python.is_file() else vllm.read_text(errors="replace").partition("\n")[0].removeprefix("#!")
    command = folder / "bin" / "vllm"
    command.write_text(
        f"#!{interpreter}\nimport os, sys\n"
        f"path = os.pathsep.join(filter(None, [{str(folder)!r}, os.environ.get('PYTHONPATH')]))\n"
        f"os.environ['PYTHONPATH'] = path\nos.execv({str(vllm)!r}, [{str(vllm)!r}, *sys.argv[1:]])\n"
    )
    command.chmod(0o755)
    return command


def main():
    """Write the wrapped command, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the real `vllm` command")
    parser.add_argument("--into", type=Path, required=True, help="folder for the wrapped command")
    parser.add_argument(
        "--parameter", default=_PARAMETER, help=f"names of parameters, by search (default: {_PARAMETER})"
    )
    parser.add_argument("--rank", type=int, default=1, help="tensor-parallel rank that has the fault (default: 1)")
    options = parser.parse_args()
    sys.stdout.write(f"{wrap(options.vllm, options.into, options.parameter, options.rank)}\n")


if __name__ == "__main__":
    main()
elif __name__ == "sitecustomize" and _SETTINGS.is_file():
    _settings = json.loads(_SETTINGS.read_text())
    sys.meta_path.insert(0, _Finder(_settings["parameter"], _settings["rank"]))
