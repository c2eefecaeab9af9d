"""How long linear layers take on an accelerator by its data sheet: an estimate, until a checkpoint was served.

    >>> roofline = Roofline(hardware("mi355x"), load("throughput").cells)
    >>> spend(roofline.timed(groups), 2.5)              # what costs the least and is estimated 2.5 times as fast

A product takes the longer of reading its weights and multiplying: each request of a cell reads them once for its
prompt, and for each token of its answer shares them with all that are in flight. Cells count alike, each against its
own time in 16 bit. What is not a linear layer of the decoder is left out, attention, caches and launches before all,
and no kernel reaches its data sheet: a server gains less. Several accelerators share the work evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from eval.workloads import Cell
from pipeline.base.hardware import Hardware
from pipeline.base.schemes import scheme
from pipeline.quantize.budget import Group

_EXPERTS = ".experts."


def fastest(hardware: Hardware, names: Sequence[str]) -> float:
    """What the schemes can gain over 16 bit at most, whether reading or multiplying takes longer."""
    reading = 16 / min(scheme(name).bits_per_weight for name in names)
    return max(reading, *(hardware.flops(_dtype(name)) / hardware.flops("bf16") for name in names))


def _dtype(name: str) -> str:
    return scheme(name).activations.dtype or "bf16"


@dataclass(frozen=True, slots=True)
class Roofline:
    """A machine whose figures are known, and its load; ``routed`` is the share of a mixture's experts that a token
    passes through."""

    hardware: Hardware
    cells: tuple[Cell, ...]
    routed: float = 1.0

    def timed(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups with each option's estimated time, as a share of what all of them take in 16 bit."""
        plain = [self._times(group, 16.0 * group.weights, "bf16") for group in groups]
        totals = [sum(times) for times in zip(*plain, strict=True)]

        def share(group: Group, bits: float, dtype: str) -> float:
            times = self._times(group, bits, dtype)
            return fmean(time / total for time, total in zip(times, totals, strict=True))

        return tuple(
            replace(
                group,
                options=tuple(replace(o, time=share(group, o.bits, _dtype(o.scheme))) for o in group.options),
            )
            for group in groups
        )

    def _times(self, group: Group, bits: float, dtype: str) -> list[float]:
        """Seconds that a request takes in each cell."""
        routed = self.routed if _EXPERTS in group.modules[0] else 1.0

        def product(rows: int) -> float:
            read = bits / 8 * (1 - (1 - routed) ** rows) / self.hardware.bytes_per_second
            return max(read, 2 * group.weights * routed * rows / self.hardware.flops(dtype))

        found = []
        for cell in self.cells:
            answer = cell.longest - cell.input_len if cell.output_len is None else cell.output_len
            prompt, answer = cell.mean_lengths or (cell.input_len, answer)
            found.append(product(prompt) + answer / cell.in_flight * product(cell.in_flight))
        return found
