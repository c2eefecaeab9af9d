"""What a model needs of the device that it is measured on, asked of the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.activations import Activations
from calibration.calls import layer_names
from calibration.errors import CalibrationError, NotReplayableError
from calibration.replica import Replica
from calibration.room import Need, forward_bytes, free_bytes
from calibration.weights import held, nbytes, without_bars

if TYPE_CHECKING:
    import torch


def need_of(first: Replica, batches: Sequence[torch.Tensor]) -> tuple[Need, str | None]:
    """What a copy takes, and why its layers cannot be run one at a time; None where they can."""
    reason: str | None = None
    largest = 0
    try:
        layers = layer_names(first.model, first.attention.values())
        largest = max(nbytes(first.model, held(first.model, name)) for name in layers)
    except NotReplayableError as error:
        reason = str(error)
    batch, length = (max(sizes) for sizes in zip(*(batch.shape for batch in batches), strict=True))
    return Need(first.nbytes, largest, forward_bytes(first.model.config.get_text_config(), batch, length)), reason


def activations_for(
    replicas: Sequence[Replica], batches: Sequence[torch.Tensor], need: Need, asked: int | None, folder: Path
) -> Activations:
    """Where the hidden states of layer mode are kept.

    ``asked`` are the bytes of host memory that they may take, the rest of which is spilled to ``folder``; None takes a
    quarter of what is free. A GPU keeps the states of its batches where there is ample room.
    """
    import torch

    config = replicas[0].model.config.get_text_config()
    width = config.hidden_size * torch.finfo(replicas[0].model.dtype).bits // 8
    states = sum(batch.numel() for batch in batches) * width
    gpus = [one.device for one in replicas if not one.device.startswith("cpu")]
    # A GPU keeps the states of its batches beside two layers and a forward, and leaves half of the rest free.
    room = min((free_bytes(device) - 2 * need.layer - need.forward for device in gpus), default=0)
    on_device = bool(gpus) and states <= len(gpus) * room // 2
    budget = states if on_device else asked if asked is not None else free_bytes("cpu") // 4
    return Activations(folder, budget, on_device=on_device)


@contextmanager
def measuring(folder: Path) -> Iterator[None]:
    """Word what a model or a device refuses in the block as `CalibrationError`, with what to do instead."""
    import torch

    try:
        with without_bars():
            yield
    except NotReplayableError as error:
        raise CalibrationError(
            f"{folder}: its layers cannot be run one at a time: {error}; "
            "take calibration.mode: resident on a device that holds it, or quantization.engine: llmcompressor"
        ) from error
    except torch.OutOfMemoryError as error:
        raise CalibrationError(
            f"out of memory: take a smaller calibration.batch_size, or calibration.mode: layer: {error}"
        ) from error
