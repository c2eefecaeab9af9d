"""Measured ranges: the largest magnitude of each observed tensor, in one small file that every scheme reuses.

Ranges meet by maximum, which no order of batches, devices or machines can change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.errors import CalibrationError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Ranges:
    """Largest magnitudes, float32.

    ``inputs``: by linear module, shape []. ``keys`` and ``values``: by attention module, one value a KV head, [H_kv];
    keys are taken after the rotary embedding, which is what a server caches.
    """

    inputs: Mapping[str, torch.Tensor]
    keys: Mapping[str, torch.Tensor]
    values: Mapping[str, torch.Tensor]

    def save(self, path: Path) -> None:
        """Write a safetensors file with the names ``MODULE.input``, ``MODULE.k`` and ``MODULE.v``."""
        from safetensors.torch import save_file

        # Modules with one input have one tensor here, which the file holds for each of them.
        tensors = {f"{module}.{kind}": amax.clone() for kind, table in self._tables() for module, amax in table.items()}
        save_file(dict(sorted(tensors.items())), path)

    def _tables(self) -> tuple[tuple[str, Mapping[str, torch.Tensor]], ...]:
        return ("input", self.inputs), ("k", self.keys), ("v", self.values)


def load_ranges(path: Path) -> Ranges:
    """Read what `Ranges.save` wrote; raise `CalibrationError` for a file that holds anything else."""
    from safetensors.torch import load_file

    tables: dict[str, dict[str, torch.Tensor]] = {"input": {}, "k": {}, "v": {}}
    for name, amax in load_file(path).items():
        module, _, kind = name.rpartition(".")
        if kind not in tables:
            raise CalibrationError(f"{path}: {name!r} is not a range: expected MODULE.input, MODULE.k or MODULE.v")
        tables[kind][module] = amax
    return Ranges(inputs=tables["input"], keys=tables["k"], values=tables["v"])
