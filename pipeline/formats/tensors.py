"""The tensors that a format stores for a quantized module, from the table in ``tensors.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import ceil
from typing import Any

import yaml

from pipeline.errors import UserError
from pipeline.formats.header import tensor_bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that belongs in a checkpoint; ``role`` is its name's last part in the format's table."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size on disk, bytes."""
        return tensor_bytes(self.dtype, self.shape)


@cache
def _table() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    text = resources.files("pipeline.formats").joinpath("tensors.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, dict[str, dict[str, Any]]]] = yaml.safe_load(text)
    return table


def stores(checkpoint_format: str, scheme: str) -> bool:
    """Whether the format has a layout for the scheme."""
    return scheme in _table().get(checkpoint_format, {})


def weight_tensors(
    checkpoint_format: str, scheme: str, module: str, shape: tuple[int, int], scale_dtype: str
) -> tuple[StoredTensor, ...]:
    """What is stored for a linear module whose 16-bit weight is ``shape`` = [O, I].

    Raises `UserError` where the format has no layout for the scheme.
    """
    if not stores(checkpoint_format, scheme):
        known = ", ".join(sorted(_table().get(checkpoint_format, {})))
        raise UserError(f"the format {checkpoint_format} has no layout for {scheme}; it has: {known}.")
    return tuple(
        StoredTensor(
            f"{module}.{role}",
            role,
            scale_dtype if entry["dtype"] == "scale" else entry["dtype"],
            tuple(_dimension(token, shape) for token in entry["shape"]),
        )
        for role, entry in _table()[checkpoint_format][scheme].items()
    )


def _dimension(token: str | int, shape: tuple[int, int]) -> int:
    if isinstance(token, int):
        return token
    product, _, divisor = token.partition("/")
    symbol, _, factor = product.partition("*")
    value = {"O": shape[0], "I": shape[1]}[symbol] * int(factor or 1)
    return ceil(value / int(divisor)) if divisor else value
