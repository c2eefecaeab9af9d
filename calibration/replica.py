"""One copy of a model on one device: what every mode of calibration runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibration.cache import attention_by_layer
from calibration.names import owners
from calibration.weights import Shards, Weights, build, held, nbytes, settle_buffers, without_bars


@dataclass(frozen=True, slots=True)
class Replica:
    """A model with its weights on disk, none or some of which are on ``device``.

    ``owned`` maps names on disk to the model's own; ``attention`` are the attention modules by layer.
    """

    model: Any
    weights: Weights
    owned: Mapping[str, str]
    device: str
    attention: Mapping[int, str] = field(repr=False)

    @property
    def body(self) -> list[str]:
        """Parameters and persistent buffers of all but the output head, whose product is never computed."""
        prefix = self.model.base_model_prefix
        return held(self.model, prefix if hasattr(self.model, prefix) else "")

    @property
    def nbytes(self) -> int:
        """Bytes of `body` on a device."""
        return nbytes(self.model, self.body)


def replica(folder: Path, device: str, *, trust_remote_code: bool = False) -> Replica:
    """Build a model on the meta device and find its weights; nothing is read yet.

    Raises `CalibrationError` for a folder that holds no model that transformers knows, in safetensors.
    """
    shards = Shards(folder)
    model = build(folder, trust_remote_code=trust_remote_code)
    settle_buffers(model, device)
    owned = owners(model, shards.names)
    return Replica(model, Weights(model, shards, owned, device), owned, device, attention_by_layer(model))


def load_resident(folder: Path, device: str, *, trust_remote_code: bool = False) -> Replica:
    """A model with all that calibration needs of it on one device."""
    made = replica(folder, device, trust_remote_code=trust_remote_code)
    with without_bars():
        made.weights.load(made.body)
    return made
