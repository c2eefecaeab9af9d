"""Rates of a machine: those of the table, or of a like machine with what a second's measurement says of this one."""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from quantmint.calibration.lazy import torch
from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.machine import Host, cpu_name
from quantmint.pipeline.quantize.engines.stream.schedule import CPU_PIECE, GPU_PIECE
from quantmint.pipeline.quantize.schemes.registry import KERNELS

Origin: TypeAlias = Literal["table", "measured", "borrowed", "data sheet"]
_MEASURED_S = 0.2
"""Seconds of a measurement, after a first round that does not count."""
_COPIED = 64 << 20  # bytes, more than a cache holds
_HASHED = 8 << 20
_WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Of the square matrices that are multiplied: the first that keeps a device busy for `_BUSY_S`, or the last."""
_BUSY_S = 0.005
_COLUMNS = 4096
_KERNEL = "ptpc_fp8"
"""The kernel that is measured; others are taken to be faster or slower than on the like machine by its ratio."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes or operations per second of a machine, all cores together; sizes in bytes.

    ``read``: from the page cache into memory. ``disk``: from the disk. ``write``: into the page cache. ``sync``: from
    there to the disk. ``hash``: SHA-256 of one thread, because a file's bytes are hashed one after the other. ``load``:
    from a mapped file to the device, by one thread. ``kernels``: bytes of 16-bit weight, by kernel. ``link``: between
    memory and device, one way while the other is busy too; None on a CPU. ``flops``: operations of bfloat16 products on
    the device, ``float32``: of those in float32. ``scores``: attention scores through a softmax there. ``resident``:
    memory of an interpreter that has imported what the stages need, ``start``: the seconds until it has, and has read
    the structure of a model that it never saw.
    """

    machine: str
    device_kind: str
    read: float
    disk: float
    write: float
    sync: float
    hash: float
    load: float
    kernels: Mapping[str, float]
    link: float | None
    flops: float
    float32: float
    scores: float
    resident: int
    start: float

    def kernel(self, name: str) -> float:
        """Return the rate of a kernel in bytes of 16-bit weight per second.

        The slowest known rate for an unmeasured one.
        """
        return self.kernels.get(name) or min(self.kernels.values())


def rates_here(device: str, cores: int) -> tuple[Rates, Origin]:
    """Return the rates of this machine with PyTorch's ``device`` and ``cores`` cores, and their origin.

    They come from the table, or are measured in about a second where it has no such machine; what cannot be measured,
    such as the disk, is then a similar machine's. "borrowed" rates are all another machine's, because the measurement
    failed.
    """
    title = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    rates, origin = rates_for(title, cores)
    name = f"{cpu_name(Host()) if device == 'cpu' else title}, {cores} cores"
    if origin == "table":
        # A CPU's row is chosen by the number of cores: the machine's own name must not be lost behind it.
        return (replace(rates, machine=f"{name}, taken for {rates.machine}") if device == "cpu" else rates), origin
    try:
        return measured(rates, device, name), "measured"
    except RuntimeError:  # PyTorch's: no memory left on the device, no such product there
        return rates, "borrowed"


def measured(like: Rates, device: str, name: str) -> Rates:
    """Return the rates of ``like``, replaced by what is measured on ``device``: copies, hashing, products, one kernel.

    Rates that depend on one of these, such as writing on copying, are scaled with it. ``name`` is this machine's title.
    """
    on_cpu = device == "cpu"
    source = torch.zeros(_COPIED, dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = _rate(lambda: target.copy_(source), _COPIED, "cpu") / like.read
    content = bytes(_HASHED)
    hashed = _rate(lambda: hashlib.sha256(content).digest(), _HASHED, "cpu")
    flops, float32 = (_products(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    link, load = (None, like.load * copied) if on_cpu else _uploads(device)
    # A worker of the engine computes with one thread of its own, and all cores have one: so do PyTorch's threads here.
    piece = CPU_PIECE * torch.get_num_threads() if on_cpu else GPU_PIECE
    weight = torch.ones((max(piece // (2 * _COLUMNS), 1), _COLUMNS), dtype=torch.bfloat16, device=device)
    kernel = _rate(lambda: KERNELS[_KERNEL].compute(weight, None), weight.nbytes, device) / like.kernel(_KERNEL)
    return replace(
        like,
        machine=f"this machine ({name}), and for its disk {like.machine}",
        read=like.read * copied,
        write=like.write * copied,
        load=load,
        hash=hashed,
        link=link,
        flops=flops,
        float32=float32,
        scores=like.scores * flops / like.flops,
        kernels={name: rate * kernel for name, rate in like.kernels.items()},
    )


def _products(device: str, dtype: torch.dtype) -> float:
    """Return operations per second of products of square matrices in ``dtype``.

    The matrices grow until a product takes 5 ms, because on some CPUs a large one would take a second.
    """
    rate = 0.0
    for width in _WIDTHS:
        matrix = torch.ones((width, width), dtype=dtype, device=device)
        rate = _rate(partial(torch.mm, matrix, matrix), 2 * width**3, device, seconds=_BUSY_S)
        if 2 * width**3 / rate > _BUSY_S:
            return rate
    return rate


def _uploads(device: str) -> tuple[float, float]:
    """Return bytes per second from pinned memory to a GPU, and from a file in the page cache through pinned memory.

    One thread reads the file, as it does when a layer is loaded: that, and not the link, is what takes the time.
    """
    pinned = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=device)
    link = _rate(lambda: target.copy_(pinned, non_blocking=True), _COPIED, device)
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(bytes(_COPIED))

        def load() -> None:
            file.seek(0)
            file.readinto(pinned.numpy().data)
            target.copy_(pinned, non_blocking=True)

        return link, _rate(load, _COPIED, device)


def _rate(work: Callable[[], object], amount: int, device: str, *, seconds: float = _MEASURED_S) -> float:
    """Return ``amount`` over the time of the fastest call of ``work`` within ``seconds``; each call does ``amount``.

    The fastest counts because other load only slows calls down, such as a model that is still written to the disk.
    """

    def settle() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    work()
    settle()
    fastest, end = math.inf, time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or fastest == math.inf:
        work()
        settle()
        fastest = min(fastest, time.perf_counter() - start)
    return amount / fastest


HOST_CORES, HOST_BYTES = 24, 256 << 30
"""Of a node's host for each accelerator: two processors of 96 cores and 2 TiB beside eight."""


def rates_of(target: str) -> tuple[Rates, Origin]:
    """Return the rates of a node with this accelerator of the hardware table, for planning on another machine.

    They come from the table for a CPU and an H100. Else they are an H100 machine's, scaled by operations and memory
    bandwidth of the data sheets; host and disk are taken to be alike. Raises `UserError` for a name that the hardware
    table lacks; hardware without a bandwidth in the table raises `TypeError`, without bf16 TFLOPS `KeyError`.
    """
    row, like = hardware(target), known("h100")
    if row.kind == "cpu" or target == "h100":
        return known("two-cores" if row.kind == "cpu" else "h100"), "table"
    h100 = hardware("h100")
    flops, moved = row.flops("bf16") / h100.flops("bf16"), row.bytes_per_second / h100.bytes_per_second
    derived = replace(
        like,
        machine=f"{row.title} by its data sheet, for the host and its disk {like.machine}",
        device_kind=row.kind,
        flops=like.flops * flops,
        float32=like.float32 * flops,
        scores=like.scores * moved,
        kernels={name: rate * moved for name, rate in like.kernels.items()},
    )
    return derived, "data sheet"


def rates_for(device: str, cores: int) -> tuple[Rates, Literal["table", "borrowed"]]:
    """Return the table's rates of a device, such as "cpu" or "NVIDIA H100 80GB HBM3", with ``cores`` cores.

    Without such a row they are "borrowed" from a two-core CPU machine or an H100.
    """
    for name, row in load_table(__file__, "machines.yaml").items():
        when = row["when"]
        if str(when["device"]) in device and when.get("cores", cores) == cores:
            return known(name), "table"
    return known("two-cores" if device == "cpu" else "h100"), "borrowed"


def known(name: str) -> Rates:
    """Return the rates of a row of `machines.yaml`. Raises `KeyError` for an unknown name."""
    row = load_table(__file__, "machines.yaml")[name]
    return Rates(machine=row["machine"], **row["rates"])
