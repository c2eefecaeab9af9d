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
    """Return PyTorch's name of a device; "auto" is "cuda" where there is a GPU (also with ROCm), else "cpu".

    A GPU that is named becomes this thread's current device: CUDA graphs, and operations without a device, run there.

    Raises `UserError` for a device that PyTorch cannot use.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(1, device=name).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # by its number: PyTorch does not take a bare "cuda" there
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device: found {name!r}, which PyTorch cannot use here: {error}") from None
    return name


def resolve_devices(names: str) -> tuple[str, ...]:
    """Return PyTorch's names of the devices to spread work over; "auto" takes every GPU, or else the CPU.

    ``names`` is a list separated by commas; the first GPU that it names becomes this thread's current device. Raises
    `UserError` for a device that PyTorch cannot use.
    """
    if names == "auto" and torch.cuda.is_available():
        return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    return tuple(resolve_device(name.strip()) for name in reversed(names.split(",")))[::-1]


def device_memory(device: str) -> int:
    """Return the bytes of memory of a device in all, or within the limit of the container or the process, if less."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1] * torch.cuda.get_per_process_memory_fraction(device))
    installed, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit()
    return installed if limit is None else min(installed, limit)


def device_title(devices: Iterable[str]) -> str:
    """Return the title of some devices, such as ``8 x AMD Instinct MI300X``, or the model of the CPU."""
    counts = Counter(
        torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else cpu_name(Host())
        for device in devices
    )
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def give_back_memory() -> None:
    """Return the memory that PyTorch holds unused on the GPUs to the driver.

    A server that starts on the same GPU needs it: what calibration left in this process's allocator is as large as a
    model.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def map_devices(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Call ``work`` on all items at a time, in inference mode; return the results in the order of the items.

    Each item lies on a device and has a thread of its own; a single item runs in this thread. An exception of the first
    item that failed is raised when all threads have ended.
    """
    if len(items) == 1:  # in this thread, whose memory the C library gives back
        with torch.inference_mode():
            return [work(items[0])]

    def in_thread(item: _Item) -> _Result:
        with torch.inference_mode():  # belongs to a thread
            return work(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(in_thread, items))
