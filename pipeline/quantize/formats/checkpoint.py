"""A model folder: its configuration, its shards, and where each tensor lies, by the headers of its safetensors files.

>>> info = read_header(Path("model.safetensors"))["model.norm.weight"]
>>> info.dtype, info.shape, info.nbytes
('BF16', (4096,), 8192)

The layout is that of the safetensors format: a little-endian u64 with the header's length, the header as JSON, then
the tensors' bytes without holes. A file whose header promises anything else is refused before its bytes are used.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock, local
from typing import Any

from quantmint.calibration.encodings import OLD_MODELOPT, with_old_modelopt
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.index import INDEX_NAME as INDEX_NAME
from quantmint.calibration.index import SINGLE_NAME as SINGLE_NAME
from quantmint.calibration.index import weight_files
from quantmint.calibration.lazy import torch
from quantmint.pipeline.base.errors import StageError, UserError

ITEM_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
SIXTEEN_BIT = frozenset({"BF16", "F16"})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: its safetensors dtype, its shape, and its bytes [start, end) in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Return the size on disk in bytes."""
        return self.end - self.start

    @property
    def parameters(self) -> int:
        """Return the number of elements by the stored shape."""
        return prod(self.shape)


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes that a tensor of a safetensors dtype and shape takes."""
    return (prod(shape) * ITEM_BITS[dtype] + 7) // 8


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file, which the safetensors library has checked; return its tensors by name.

    The tensors are in file order. Raises `UserError` for a file that is not safetensors, is cut short, has holes or
    overlaps, or whose shapes and sizes disagree.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"), path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            table = json.loads(stream.read(length))
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: not a safetensors file, or not all of one: {error}.",
            hint="Where it is cut short or padded, fetch it again.",
        ) from None
    table.pop("__metadata__", None)
    infos = [
        TensorInfo(name, each["dtype"], tuple(each["shape"]), *(8 + length + end for end in each["data_offsets"]))
        for name, each in table.items()
    ]
    # An empty tensor starts where the next one does, in whichever order the two are listed.
    return {info.name: info for info in sorted(infos, key=lambda info: (info.start, info.end))}


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return the safetensors header for tensors (name, dtype, shape) that follow each other in this order.

    It includes its length in front. The JSON is padded with spaces to a multiple of 8 bytes, as the reference
    implementation does, so that the data starts aligned.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        end = position + tensor_bytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder in the Hugging Face layout; ``tensors`` maps each name to its file's name and its place there."""

    folder: Path
    config: Mapping[str, Any]
    shards: tuple[str, ...]
    tensors: Mapping[str, tuple[str, TensorInfo]]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(info.nbytes for _, info in self.tensors.values())

    def in_shard(self, shard: str) -> tuple[TensorInfo, ...]:
        """Return the tensors of one file, in file order."""
        infos = [info for name, info in self.tensors.values() if name == shard]
        return tuple(sorted(infos, key=lambda info: info.start))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises `UserError`, for a syntax error with its line and column."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None
    except RecursionError:
        raise UserError(f"{path}: it is nested deeper than any configuration is.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model's ``config.json``, with the quantization that an older ModelOpt describes beside it.

    Raises `UserError` for a file that is missing or damaged.
    """
    config = read_json(folder / "config.json")
    try:
        return with_old_modelopt(config, folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / OLD_MODELOPT}: cannot be read: {error}.") from None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a model folder, and check that configuration, index and files agree.

    Raises `UserError` for a missing ``config.json``, weights that are not safetensors, files that the index names but
    the folder lacks, tensors that are in several files or not where the index places them, and names that leave the
    folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.", hint="A model folder holds config.json and *.safetensors.")
    config = read_config(folder)
    shards, placed = _shards(folder)
    tensors: dict[str, tuple[str, TensorInfo]] = {}
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if name in tensors:
                raise UserError(f"{folder}: tensor {name!r} is in {tensors[name][0]} as well as in {shard}.")
            tensors[name] = (shard, info)
    if placed is not None:
        _agree(folder, placed, tensors)
    return Checkpoint(folder, config, shards, tensors)


def _shards(folder: Path) -> tuple[tuple[str, ...], Mapping[str, str] | None]:
    try:
        return weight_files(folder)
    except CalibrationError as error:
        message, _, hint = str(error).partition("\n")
        raise UserError(message, hint=hint or None) from None


def _agree(folder: Path, placed: Mapping[str, str], tensors: Mapping[str, tuple[str, TensorInfo]]) -> None:
    for name, shard in placed.items():
        if name not in tensors:
            raise UserError(f"{folder / INDEX_NAME}: places {name!r} in {shard}, which does not hold it.")
        if tensors[name][0] != shard:
            raise UserError(f"{folder / INDEX_NAME}: places {name!r} in {shard}; it is in {tensors[name][0]}.")
    unlisted = sorted(set(tensors) - set(placed))
    if unlisted:
        raise UserError(
            f"{folder / INDEX_NAME}: does not list {len(unlisted)} tensors that are there: {unlisted[0]!r}…"
        )


_AHEAD = 64 << 20  # bytes that the kernel is asked to fetch before they are needed


class Files:
    """Files of a folder, opened when they are first read; any thread may read into its own buffer.

    Nothing is mapped: pages of a map count as this process's memory, and are given to it 4 KiB at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._lock = Lock()

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, shard: str, name: str, offset: int, into: memoryview, *, ahead: bool = True) -> None:
        """Fill the buffer ``into`` from file ``shard`` at ``offset``. Raises `StageError` naming the file and ``name``.

        With ``ahead`` the kernel is asked to fetch the bytes that follow, for a caller that reads on.
        """
        try:
            descriptor = self._open.get(shard) or self._opened(shard)
            if ahead:
                os.posix_fadvise(descriptor, offset + into.nbytes, _AHEAD, os.POSIX_FADV_WILLNEED)
            while into.nbytes:
                count = os.preadv(descriptor, [into], offset)
                if not count:
                    raise StageError(
                        f"{self._folder / shard}: the file ends inside {name}; it was longer when its header was read.",
                        hint="Restore the file and run the same command: finished files are kept.",
                    )
                offset += count
                into = into[count:]
        except OSError as error:
            raise StageError(f"{self._folder / shard}: {name} cannot be read: {error.strerror}.") from error

    def _opened(self, shard: str) -> int:
        with self._lock:
            if shard not in self._open:
                self._open[shard] = os.open(self._folder / shard, os.O_RDONLY)
            return self._open[shard]


def torch_dtype(dtype: str) -> torch.dtype:
    """Return PyTorch's dtype for a safetensors dtype. Raises `AttributeError` for types of less than a byte."""
    names = {"BOOL": "bool", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
             "F8_E8M0": "float8_e8m0fnu"}  # fmt: skip
    kinds = {"U": "uint", "I": "int", "F": "float"}
    torch_type: torch.dtype = getattr(torch, names.get(dtype) or f"{kinds[dtype[0]]}{dtype[1:]}")
    return torch_type


class Reader:
    """Reads tensors of a checkpoint, or rows of them, onto one device; any thread may use it."""

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu") -> None:
        self._checkpoint, self._files, self._device = checkpoint, Files(checkpoint.folder), device
        self._pinned = local()
        # Elements to look at together: what a core's cache holds of them and their like, or what a bus is quick with.
        self.piece = 1 << 20 if device == "cpu" else 1 << 24

    def __del__(self) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's entry in its file's header. Raises `KeyError` for a name that is not there."""
        return self._checkpoint.tensors[name][1]

    def __call__(self, name: str) -> torch.Tensor:
        """Return the whole tensor of that name, as it is stored. Raises `StageError` where it cannot be read."""
        shape = self.info(name).shape
        return self.rows(name, 0, shape[0] if shape else 1).view(shape)

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of a tensor, as they are stored; a scalar counts as one row."""
        shape = self.info(name).shape
        return self._flat(name, first, last, prod(shape[1:])).view(last - first, *shape[1:])

    def matrix_rows(self, name: str, index: int, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of matrix ``index`` of a stack [E, R, ...], as they are stored: [last - first, C].

        C is the product of the dimensions behind R.
        """
        _, height, *inner = self.info(name).shape
        return self._flat(name, index * height + first, index * height + last, prod(inner))

    def _flat(self, name: str, first: int, last: int, columns: int) -> torch.Tensor:
        """Return rows [first, last) of a tensor viewed as a matrix with ``columns`` columns."""
        shard, info = self._checkpoint.tensors[name]
        width = columns * ITEM_BITS[info.dtype] // 8
        size = (last - first) * width
        raw = torch.empty(size, dtype=torch.uint8) if self._device == "cpu" else self._buffer(size)
        # First rows may be all that is looked at; a model that the page cache cannot hold would be read in vain.
        self._files.read(shard, name, info.start + first * width, raw.numpy().data, ahead=first > 0)
        return raw.to(self._device).view(torch_dtype(info.dtype)).view(last - first, columns)

    def _buffer(self, size: int) -> torch.Tensor:
        """Return ``size`` bytes of this thread's pinned memory, uint8; the same memory is returned again each time."""
        buffer: torch.Tensor | None = getattr(self._pinned, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = self._pinned.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return buffer[:size]
