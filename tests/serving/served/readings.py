"""How the bytes of a checkpoint can be read: as its format means them, as a server may compute, and the wrong ways.

Each wrong way is one that a loader of these formats could take: every shape fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quantmint.pipeline.base.schemes import scheme as row_of
from tests.serving.served.cases import Case

if TYPE_CHECKING:
    import torch

    Parts = Mapping[str, torch.Tensor]
    Modules = Mapping[str, Parts]

LAYER = "model.layers.1."


def _as_stored(modules: Modules) -> Modules:
    return modules


@dataclass(frozen=True)
class Reading:
    """One way to read a checkpoint, and to compute with it; two of one name and the same flags are one.

    ``change`` maps the stored parts of all modules to what is read of them. ``quantized`` is False for the source's
    own weights, ``activations`` and ``cache`` for inputs and a KV cache that nothing rounds; ``mx_activations`` is
    False where only the inputs of MX modules are left in 16 bit, beside modules of another scheme. ``truncated`` cuts K
    and V off where FP8 ends and does not round them. ``kv_scales`` maps K's and V's scale to what they are taken for.
    """

    name: str
    change: Callable[[Modules], Modules] = field(default=_as_stored, compare=False)
    quantized: bool = True
    activations: bool = True
    mx_activations: bool = True
    cache: bool = True
    truncated: bool = False
    kv_scales: Callable[[float, float], tuple[float, float]] = field(
        default=lambda key, value: (key, value), compare=False
    )


AS_MEANT = Reading("as the format means it")


def plausible(case: Case) -> Iterator[Reading]:
    """Readings with the right weights and scales: servers differ in what they compute with them.

    vLLM multiplies some schemes with activations of 16 bit where it has no kernel for others. Its CPU build (0.32) cuts
    K and V off on their way into an FP8 cache: the answers are twice as near to that as to rounding.
    """
    rounds = any(row_of(scheme).activations.kind != "none" for scheme in case.schemes)
    caches = (False, True) if case.kv_cache == "fp8" else (False,)
    for truncated in caches:
        cut = "K and V cut off" if truncated else ""
        yield replace(AS_MEANT, name=cut or AS_MEANT.name, truncated=truncated)
        if rounds:
            name = " and ".join(part for part in ("activations in 16 bit", cut) if part)
            yield Reading(name, activations=False, truncated=truncated)
        if len({row_of(scheme).is_mx for scheme in case.schemes}) > 1:
            name = " and ".join(part for part in ("activations of MX modules in 16 bit", cut) if part)
            yield Reading(name, mx_activations=False, truncated=truncated)


def faults(case: Case, right: Reading) -> Iterator[Reading]:
    """Wrong readings that a comparison must tell from ``right``: of one layer, or of what a loader does to all."""
    yield replace(right, name="scales of layer 1 twice as large", change=_of(LAYER, _doubled(case)))
    yield replace(right, name="rows of q one off in layer 1", change=_of(f"{LAYER}self_attn.q_proj", _rows_rolled))
    weight = row_of(case.scheme).weight
    if weight.granularity != "per_tensor":  # one scale for both: vLLM's fused kernels take the larger of them
        yield replace(right, name="scales of the row before", change=_of("", _scales(lambda scale: scale.roll(1, 0))))
    if weight.granularity in ("per_channel", "group"):  # the scales of large blocks are too much alike
        yield replace(right, name="scales of gate and up exchanged", change=_exchanged)
    if weight.granularity in ("group", "block"):
        yield replace(right, name="scales of the next group", change=_of("", _scales(lambda scale: scale.roll(-1, -1))))
    if weight.dtype == "e2m1":
        yield replace(right, name="nibbles in the other order", change=_of(f"{LAYER}mlp.", _packed(_nibbles_exchanged)))
    if weight.bits <= 4 and row_of(case.scheme).activations.kind == "none":  # else it drowns in what the server rounds
        yield replace(right, name="weights of the 16-bit source", quantized=False)


def wrong_caches(right: Reading) -> Iterator[Reading]:
    """Wrong readings of a calibrated cache: no rounding, no scales, scales of the other."""
    yield replace(right, name="the cache in 16 bit", cache=False)
    yield replace(right, name="KV scales of 1.0", kv_scales=lambda key, value: (1.0, 1.0))
    yield replace(right, name="KV scales exchanged", kv_scales=lambda key, value: (value, key))


def _of(prefix: str, how: Callable[[str, Parts], Parts]) -> Callable[[Modules], Modules]:
    """Change the modules whose names start so."""
    return lambda modules: {
        name: how(name, parts) if name.startswith(prefix) else parts for name, parts in modules.items()
    }


def _scales(how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str, Parts], Parts]:
    def change(_: str, parts: Parts) -> Parts:
        scale = parts["weight_scale"]
        return {**parts, "weight_scale": how(scale) if scale.ndim else scale}

    return change


def _doubled(case: Case) -> Callable[[str, Parts], Parts]:
    def change(name: str, parts: Parts) -> Parts:
        scale = parts["weight_scale"]
        # E8M0 holds the exponent.
        return {**parts, "weight_scale": scale + 1 if row_of(case.scheme_of(name)).is_mx else scale * 2}

    return change


def _exchanged(modules: Modules) -> Modules:
    changed = dict(modules)
    for gate in [name for name in modules if name.endswith("gate_proj")]:
        up = gate.replace("gate_proj", "up_proj")
        changed[gate] = {**modules[gate], "weight_scale": modules[up]["weight_scale"]}
        changed[up] = {**modules[up], "weight_scale": modules[gate]["weight_scale"]}
    return changed


def _packed(how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str, Parts], Parts]:
    def change(_: str, parts: Parts) -> Parts:
        role = "weight_packed" if "weight_packed" in parts else "weight"
        return {**parts, role: how(parts[role])}

    return change


def _nibbles_exchanged(packed: torch.Tensor) -> torch.Tensor:
    return (packed >> 4) | ((packed & 15) << 4)


def _rows_rolled(name: str, parts: Parts) -> Parts:
    import torch

    # By bytes: FP8 cannot be rolled everywhere.
    return _packed(lambda stored: stored.view(torch.uint8).roll(1, 0).view(stored.dtype))(name, parts)
