"""Resolve the devices that calibration and quantization compute on."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quantmint.calibration.container import memory_limit
from quantmint.calibration.lazy import torch
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.machine import Host, cpu_name

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def resolve_device(name: str) -> str:
    """PyTorch's name of a device: "auto" takes a GPU (ROCm's too is called cuda) where there is one.

    It becomes this thread's current one: CUDA graphs, and an operation that forgets to ask, run there.

    Raises `UserError` for one that PyTorch does not see.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.empty(1, device=name).is_cuda:
            torch.cuda.set_device(name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device: found {name!r}, which PyTorch cannot use here: {error}") from None
    return name


def resolve_devices(names: str) -> tuple[str, ...]:
    """The devices that work is spread over: "auto" takes every GPU, else the CPU; a list has commas. The first becomes
    the current one.

    Raises `UserError` for one that PyTorch does not see.
    """
    if names == "auto" and torch.cuda.is_available():
        return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    return tuple(resolve_device(name.strip()) for name in reversed(names.split(",")))[::-1]


def device_memory(device: str) -> int:
    """Bytes of memory that a device has in all; a CPU's are the machine's, as far as the container's limits let us."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    installed, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit()
    return installed if limit is None else min(installed, limit)


def device_title(devices: Iterable[str]) -> str:
    """Return the title of devices: ``8 x AMD Instinct MI300X``, or the model of the CPU."""
    counts = Counter(
        torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else cpu_name(Host())
        for device in devices
    )
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def give_back_memory() -> None:
    """Return to the driver what PyTorch keeps of a GPU's memory for later.

    A server that starts beside us counts on all of it: what calibration left in the allocator of this process is a
    model's size.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def map_devices(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Return the results of work on items that lie on a device each, all at a time, in inference mode.

    What fails first, in the order of the items, is raised when all have ended.
    """
    if len(items) == 1:  # in this thread, whose memory the C library gives back
        with torch.inference_mode():
            return [work(items[0])]

    def in_thread(item: _Item) -> _Result:
        with torch.inference_mode():  # belongs to a thread
            return work(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(in_thread, items))
