"""Which accelerators the variables of the environment leave to a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def chosen(value: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Indices into ``uuids`` that a list of numbers and UUIDs names, in its order; all of them for None.

    As in the runtimes of both makers, a UUID may be cut short, and the first entry that names nothing ends the list.
    """
    if value is None:
        return tuple(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        found += matches
    return tuple(found)


def visible_amd(environ: Mapping[str, str], uuids: Sequence[str]) -> tuple[int, ...]:
    """Indices of AMD's GPUs that vLLM sees: what a second variable names of those in ROCR_VISIBLE_DEVICES.

    vLLM on ROCm reads CUDA_VISIBLE_DEVICES, takes HIP_VISIBLE_DEVICES for it where only that is set, and takes an empty
    value for one that is not set (vLLM 0.32 platforms/rocm.py).
    """
    first = chosen(environ.get(ROCR) or None, uuids)
    second = chosen(environ.get(CUDA) or environ.get(HIP) or None, [uuids[index] for index in first])
    return tuple(first[index] for index in second)


def visible_cuda(environ: Mapping[str, str], uuids: Sequence[str]) -> tuple[int, ...]:
    """Indices of NVIDIA's GPUs that CUDA_VISIBLE_DEVICES leaves; an empty value leaves none."""
    return chosen(environ.get(CUDA), uuids)
