"""Decide whether a model fits resident, or a layer at a time.

Weights are known to the byte. What a forward needs beside them is estimated from above: attention that is computed
step by step holds its scores, in the model's dtype and as float32, for all heads of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantmint.calibration.activations import Activations
from quantmint.calibration.container import memory_left
from quantmint.calibration.errors import CalibrationError, NotReplayableError
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import Replica
from quantmint.calibration.weights import held, nbytes

Mode = Literal["auto", "resident", "layer"]

SHARE = 0.85
"""The share of the free memory that is planned with; the rest is for fragments, and for others."""
_STATES = 4  # hidden states lie in a quarter of the memory, beyond which they would go to the disk and back
ROUNDED_AT_A_TIME = 1 << 28  # numbers of a weight that a GPU rounds at a time: what is in between is 15 GB at most


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a copy of a model needs: all ``weights``, those of the largest ``layer``, ``forward`` and ``states``.

    ``forward`` is what a forward of one batch takes beside the weights, ``states`` the hidden states of all batches
    between two layers.
    """

    weights: int
    layer: int
    forward: int
    states: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The mode of a calibration, and why it was chosen, as part of a sentence."""

    mode: Literal["resident", "layer"]
    reason: str


def forward_bytes(config: Any, batch: int, length: int, *, is_fused: bool = False) -> int:
    """Return an upper bound on the bytes beside the weights for a forward of [``batch``, ``length``] tokens.

    Scores: 10 bytes for each head and pair of positions (16-bit scores, float32 softmax, 16-bit probabilities, and the
    mask); none where attention ``is_fused``. Tokens: ten vectors of the hidden size and three of the inner one, in 16
    bit. State spaces: as transformers computes them without kernels, float32 for each token, head and number of the
    state, with every token of its chunk.
    """
    hidden, heads = config.hidden_size, _first_number(config, "num_attention_heads")
    inner = max(_first_number(config, "intermediate_size"), 4 * hidden)
    tokens = (10 * hidden + 3 * inner) * 2
    states = _first_number(config, "mamba_d_state", "ssm_state_size", "state_size")
    channels = _first_number(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    chunk = _first_number(config, "mamba_chunk_size", "chunk_size")
    # Without heads each channel has a state of its own, and tokens come one after the other.
    scan = 4 * min(chunk, length) * channels * states if chunk else 3 * 4 * inner * states
    scores = 0 if is_fused else length * heads * 10
    return int(batch * length * (scores + tokens + scan))


def _first_number(config: Any, *names: str) -> int:
    """Return the first of the named fields that a configuration has, of a list the largest entry; 0 for none."""
    number = next((value for name in names if (value := getattr(config, name, None))), 0)
    return int(max(number) if isinstance(number, list | tuple) else number)


def rounding_bytes(shapes: Iterable[tuple[int, int]]) -> int:
    """Return an upper bound on the bytes that GPTQ takes for the largest of some weights [O, I].

    What layers and a forward take is not counted. In float32: rounding takes two squares of [I, I], the Hessian and its
    factor, and fourteen times the rows that are rounded at a time (13.6 were measured on a GPU, with three scales to
    choose from), beside the weight and its target in 16 bit. Before it, the Hessian is decomposed in two squares,
    beside five times the weight where it compensates.
    """

    def of(rows: int, columns: int) -> int:
        square, numbers = columns * columns, rows * columns
        return 4 * max(2 * square + 14 * min(numbers, ROUNDED_AT_A_TIME) + 2 * numbers, 2 * square + 5 * numbers)

    return max((of(*shape) for shape in shapes), default=0)


def require_rounding_room(need: Need, rounding: int, room: int, device: str) -> bool:
    """Raise `CalibrationError` where a layer, a forward and GPTQ's ``rounding`` bytes exceed 85 % of ``room`` bytes.

    Return whether the next layer's weights, which are read meanwhile, fit too. ``device`` is its name for the message.
    """
    takes, usable = need.layer + need.forward + rounding, int(room * SHARE)
    if takes > usable:
        raise CalibrationError(
            f"GPTQ takes {_gb(takes)}, of which {_gb(rounding)} to round the largest weight, and {device} has room for "
            f"{_gb(usable)}: take a larger device, or `algorithm: none`"
        )
    return takes + need.layer <= usable


def learning_place(takes: int, weights: int, device: str, free: int) -> str:
    """Return the device of ``takes`` bytes of weights to learn: ``device`` where it has room for them, else "cpu".

    They and the model's ``weights`` bytes take less than two thirds of its ``free`` bytes then. The rest is for the
    layer that runs, and for hidden states. From the host they are copied to a GPU and back in each step.
    """
    return device if weights + takes < 2 * free // 3 else "cpu"


def require_learning_room(takes: int, place: str, room: int) -> None:
    """Raise `CalibrationError` where ``takes`` bytes of weights to learn exceed 85 % of ``room`` bytes.

    ``place`` is `learning_place`'s device, for the message.
    """
    if takes > (usable := int(room * SHARE)):
        raise CalibrationError(
            f"to learn the rounding of weights takes {_gb(takes)}, and {place} has room for {_gb(usable)}: take "
            "`tuned: {weights: false}`, or a machine with more memory"
        )


def decide(
    mode: Mode, need: Need, devices: Sequence[str], free: Mapping[str, int], not_replayable: str | None
) -> Decision:
    """Return the mode of a calibration: the one asked for, or with "auto" the one that fits and takes less memory.

    Both modes compute the same; layer mode holds two layers, as the next one's weights are read meanwhile. ``devices``
    has an entry for each copy, so a device may be named twice; ``free`` are bytes by device. ``not_replayable`` says
    why the layers cannot be run one at a time, None where they can. "resident" is taken without checking that it fits.
    Raises `CalibrationError` where layer mode is not possible or does not fit, and where "auto" finds no mode that
    fits.
    """
    usable = {device: int(free[device] * SHARE) // devices.count(device) for device in devices}
    tightest = min(usable, key=lambda device: usable[device])
    resident, layers = need.weights + need.forward, 2 * need.layer + need.forward
    fits = resident <= usable[tightest]
    room = f"the model takes {_gb(resident)} to run, and {tightest} has room for {_gb(usable[tightest])}"
    if not_replayable is not None and mode == "layer":
        raise CalibrationError(
            f"found calibration.mode layer, but the model's layers cannot be run one at a time: {not_replayable}; take "
            "mode: resident, or auto"
        )
    if mode == "resident" or (not_replayable is not None and fits):
        why = room if not_replayable is None else f"its layers cannot be run one at a time: {not_replayable}; {room}"
        return Decision("resident", "as the recipe asks" if mode == "resident" else why)
    if not_replayable is not None:
        raise CalibrationError(
            f"{room}; its layers cannot be run one at a time either: {not_replayable}. Take a smaller "
            "calibration.batch_size, or a larger device"
        )
    if mode == "auto" and fits and layers + _STATES * need.states < resident:
        return Decision("layer", f"two layers and what runs through them take {_gb(layers + need.states)}, {room}")
    if mode == "auto" and fits:
        return Decision("resident", room)
    if layers > usable[tightest]:
        raise CalibrationError(
            f"two layers of the model and a forward take {_gb(layers)}, and {tightest} has room "
            f"for {_gb(usable[tightest])}: take a smaller calibration.batch_size, or a larger device"
        )
    return Decision("layer", "as the recipe asks" if mode == "layer" else room)


def free_bytes(device: str) -> int:
    """Return the bytes of memory that can still be allocated on a device; on a CPU within the control groups' limits.

    Memory that PyTorch's allocator holds unused on a GPU counts as free. A share of the GPU that the process is limited
    to (``PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.5``) is obeyed.
    """
    if torch.device(device).type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return min(int(free) + torch.cuda.memory_reserved(device) - allocated, limit - allocated)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    within_limits = memory_left()
    return available if within_limits is None else min(available, within_limits)


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"


def need_of(first: Replica, batches: Sequence[torch.Tensor]) -> Need:
    """Return the bytes that one copy needs; 0 for ``layer`` and ``states`` where layers cannot be run one at a time."""
    batch, length = (max(sizes) for sizes in zip(*(batch.shape for batch in batches), strict=True))
    config, largest, states = first.model.config.get_text_config(), 0, 0
    if first.obstacle is None:
        loop = first.walkable
        largest = max(nbytes(first.model, held(first.model, name)) for name in loop.layers)
        states = sum(batch.numel() for batch in batches) * loop.width * torch.finfo(first.model.dtype).bits // 8
    is_fused = getattr(config, "_attn_implementation", None) == "sdpa"
    return Need(first.nbytes, largest, forward_bytes(config, batch, length, is_fused=is_fused), states)


def layers_bytes(first: Replica) -> int:
    """Return the bytes of the weights of all layers of one copy."""
    return sum(nbytes(first.model, held(first.model, layer)) for layer in first.walkable.layers)


def host_bytes(asked: int | None) -> int:
    """Return the bytes of host memory for hidden states: ``asked``, or if None a quarter of the free memory."""
    return free_bytes("cpu") // _STATES if asked is None else asked


def activations_for(devices: Sequence[str], need: Need, host: int, folder: Path) -> Activations:
    """Return the store of hidden states for layer mode.

    They stay on the GPUs where half of what two layers and a forward leave free holds all of them. Else they take
    ``host`` bytes of the host's memory, and the rest is spilled to ``folder``.
    """
    # Beside two layers and a forward, and half of the rest is left free.
    free = 0 if devices[0].startswith("cpu") else min(map(free_bytes, devices))
    room = len(devices) * ((free - 2 * need.layer - need.forward) // 2)
    return Activations(folder, room, on_device=True) if 0 < need.states <= room else Activations(folder, host)


@contextmanager
def measuring(folder: Path) -> Iterator[None]:
    """Within the block, turn `NotReplayableError` and a lack of memory into `CalibrationError` that says what to do."""
    try:
        yield
    except NotReplayableError as error:
        raise CalibrationError(f"{folder}: its layers cannot be run one at a time: {error}") from error
    except torch.OutOfMemoryError as error:
        raise CalibrationError(
            "out of memory: take a smaller calibration.batch_size, or calibration.mode: layer if the layers can be "
            f"run one at a time: {error}"
        ) from error
