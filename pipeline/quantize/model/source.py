"""Read what a source holds in 16 bit: weights decoded, taken out of their stacks and turned the right way round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import prod
from threading import local

from quantmint.calibration.decoders import WHOLE
from quantmint.calibration.encodings import plain_name
from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, Reader
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.structure import Structure


def divided(structure: Structure, quantized: Collection[str]) -> Mapping[str, Sequence[str]]:
    """Map each tensor of the source with a quantized module's weight, or stacked bias, to all modules that it is of.

    These tensors are taken apart; every other tensor but scales is carried over whole, see `whole_tensor`.
    """
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for module, weight in (*structure.weights.items(), *structure.biases.items()):
        modules[weight.tensor].append(module)
    return {name: owners for name, owners in modules.items() if any(owner in quantized for owner in owners)}


def is_bias_stack(structure: Structure, name: str) -> bool:
    """Return whether a tensor of the source stacks the biases of experts."""
    return any(bias.tensor == name for bias in structure.biases.values())


def whole_tensor(structure: Structure, name: str) -> WeightSource:
    """Return the source of a whole tensor, which is decoded where it is not in 16 bit."""
    return WeightSource(name, encoded=structure.encoded.get(name))


def carried(source: Checkpoint, structure: Structure, quantized: Collection[str]) -> dict[str, WeightSource]:
    """Map each tensor that a checkpoint holds beside its ``quantized`` modules to where the source has it.

    A stack of experts of which some are quantized is written as single experts; those that are not stay in 16 bit.
    """
    modules_of, scales = divided(structure, quantized), structure.decoded_away
    tensors: dict[str, WeightSource] = {}
    for name in source.tensors:
        if name in scales:
            continue
        if name in modules_of and is_bias_stack(structure, name):
            tensors |= {f"{module}.bias": structure.biases[module] for module in modules_of[name]}
        elif name in modules_of:
            unquantized = (module for module in modules_of[name] if module not in quantized)
            tensors |= {f"{module}.weight": structure.weights[module] for module in unquantized}
        else:
            tensors[plain_name(name) if name in structure.encoded else name] = whole_tensor(structure, name)
    return tensors


class SourceReader:
    """Reads weights of a source by their `WeightSource`, decoded, onto one device; any thread may use it."""

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu") -> None:
        self._checkpoint, self._read = checkpoint, Reader(checkpoint, device)
        self._last = local()  # the matrix that a thread read last, where it is stored as [I, O]

    def __contains__(self, weight: WeightSource) -> bool:
        return weight.tensor in self._checkpoint.tensors

    def dtype(self, weight: WeightSource) -> str:
        """Return the safetensors dtype in which a weight is carried over: BF16 for encoded weights, else as stored."""
        return "BF16" if weight.encoded is not None else self._read.info(weight.tensor).dtype

    def shape(self, weight: WeightSource) -> tuple[int, ...]:
        """Return the decoded shape of a weight; [O, I] for the part of a stack."""
        shape = self._read.info(weight.tensor).shape
        if weight.encoded is not None:
            return weight.encoded.rule.shape(
                (shape[-2], shape[-1]) if weight.expert is None else (shape[1], prod(shape[2:]))
            )
        if weight.expert is None:
            return shape
        if len(shape) == 2:
            return (shape[1],)
        outputs, inputs = reversed(shape[1:]) if weight.transposed else shape[1:]
        first, last = weight.rows or (0, outputs)
        return last - first, inputs

    def rows(self, weight: WeightSource, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of a weight, decoded to 16 bit or else in its stored dtype; a scalar is one row.

        Raises `StageError` where they cannot be read.
        """
        if weight.expert is None or weight.encoded is not None:
            return self._decoded(weight, first, last)
        if len(self._read.info(weight.tensor).shape) == 2:
            return self._read.rows(weight.tensor, weight.expert, weight.expert + 1)[0, first:last]
        start = weight.rows[0] if weight.rows else 0
        if weight.transposed:
            return self._turned(weight)[start + first : start + last]
        return self._read.matrix_rows(weight.tensor, weight.expert, start + first, start + last)

    def _decoded(self, weight: WeightSource, first: int, last: int) -> torch.Tensor:
        if weight.encoded is None:
            return self._read.rows(weight.tensor, first, last)
        if weight.encoded.rule.turned:
            return self._turned(weight)[first:last]
        rule = weight.encoded.rule
        begin = first // rule.rows * rule.rows
        scales = [
            self._read_all(name)
            if shared == WHOLE
            else self._rows_of(name, weight.expert, begin // shared, -(-last // shared))
            for name, shared in zip(weight.encoded.scales, rule.scale_rows, strict=False)
        ]
        return rule.decode(self._rows_of(weight.tensor, weight.expert, begin, last), scales)[first - begin :]

    def _rows_of(self, name: str, expert: int | None, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of a tensor, or of one expert's matrix in a stack."""
        if expert is None:
            return self._read.rows(name, first, last)
        return self._read.matrix_rows(name, expert, first, last)

    def _read_all(self, name: str) -> torch.Tensor:
        shape = self._read.info(name).shape
        return self._read.rows(name, 0, shape[0] if shape else 1)

    def _turned(self, weight: WeightSource) -> torch.Tensor:
        """Return a matrix stored as [I, O] as [O, I], decoded; a thread's last one is kept for its next call."""
        key, matrix = getattr(self._last, "value", (None, None))
        if matrix is None or key != (weight.tensor, weight.expert):
            if weight.encoded is not None:
                scales = [self._read_all(name) for name in weight.encoded.scales]
                matrix = weight.encoded.rule.decode(self._read_all(weight.tensor), scales)
            else:
                assert weight.expert is not None  # noqa: S101
                inputs = self._read.info(weight.tensor).shape[1]
                matrix = self._read.matrix_rows(weight.tensor, weight.expert, 0, inputs).t()
            self._last.value = (weight.tensor, weight.expert), matrix
        turned: torch.Tensor = matrix
        return turned
