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
    def trunk(self) -> Any:
        """The model without its output head, whose product, the largest tensor of a forward, nobody needs."""
        base = self.model.base_model
        # Llama 4's text has the base's name of the model that also sees.
        return self.model.model if base is self.model and hasattr(self.model, "model") else base

    @property
    def body(self) -> list[str]:
        """Parameters and persistent buffers of `trunk`."""
        trunk = self.trunk
        return held(self.model, next(name for name, module in self.model.named_modules() if module is trunk))

    @property
    def nbytes(self) -> int:
        """Bytes of `body` on a device."""
        return nbytes(self.model, self.body)


def replica(folder: Path, device: str, *, trust_remote_code: bool = False) -> Replica:
    """Build a model on the meta device and find its weights; nothing is read yet.

    Raises `CalibrationError` for a folder that holds no model that transformers knows, in safetensors.
    """
    shards = Shards(folder)
    model = build(folder, stored=shards.dtype, trust_remote_code=trust_remote_code)
    settle_buffers(model, device)
    owned = owners(model, shards.names)
    return Replica(model, Weights(model, shards, owned, device), owned, device, attention_by_layer(model))


def load_resident(folder: Path, device: str, *, trust_remote_code: bool = False) -> Replica:
    """A model with all that calibration needs of it on one device."""
    made = replica(folder, device, trust_remote_code=trust_remote_code)
    with without_bars():
        made.weights.load(made.body)
    return made
