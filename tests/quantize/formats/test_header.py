from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import ITEM_BITS, encode_header, read_header, tensor_bytes

TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def write(path: Path, table: object, data: bytes) -> Path:
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {f"t.{name}": torch.zeros(3, 5).to(dtype) for name, dtype in TORCH.items()}
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 4), "ünïcode \"name'": torch.ones(2)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt", "other": "x"})
    infos = read_header(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert set(infos) == set(file.keys())
        for name, info in infos.items():
            part = file.get_slice(name)
            assert (info.dtype, list(info.shape)) == (part.get_dtype(), part.get_shape())
            stored = (tmp_path / "a.safetensors").read_bytes()[info.start : info.end]
            assert stored == bytes(file.get_tensor(name).contiguous().reshape(-1).view(torch.uint8).numpy())
            assert info.nbytes == len(stored)
            assert info.parameters == math.prod(info.shape)


@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(TORCH)), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
        max_size=6,
    ),
    seed=st.integers(0, 255),
)
@settings(max_examples=60, deadline=None)
def test_the_library_and_we_read_what_we_encode(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, tuple[int, ...]]], seed: int
) -> None:
    names = sorted(tensors, key=lambda name: (-ITEM_BITS[tensors[name][0]], name))
    header = encode_header((name, *tensors[name]) for name in names)
    data = {name: bytes((seed + i) % 2 for i in range(tensor_bytes(*tensors[name]))) for name in names}
    path = tmp_path_factory.mktemp("encode") / "a.safetensors"
    path.write_bytes(header + b"".join(data.values()))
    assert len(header) % 8 == 0
    assert list(read_header(path)) == names
    loaded = load_file(path)
    assert set(loaded) == set(names)
    for name, tensor in loaded.items():
        dtype, shape = tensors[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (TORCH[dtype], shape)
        assert bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) == data[name]


GOOD = {"a": entry(0, 4), "b": entry(4, 6)}
BROKEN: dict[str, tuple[object, bytes]] = {
    "hole": ({"a": entry(0, 4), "b": entry(5, 7)}, bytes(7)),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)),
    "cut short": (GOOD, bytes(5)),
    "not JSON": (b'{"a": ', b""),
    "a list": ([1, 2], b""),
    "unknown dtype": ({"a": entry(0, 4, dtype="F7")}, bytes(4)),
    "size against shape": ({"a": entry(0, 4, [3])}, bytes(4)),
    "size against dtype": ({"a": entry(0, 4, [4], "F32")}, bytes(4)),
    "negative shape": ({"a": entry(0, 4, [-2, -2])}, bytes(4)),
    "no offsets": ({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, case: str) -> None:
    path = write(tmp_path / "a.safetensors", *BROKEN[case])
    with pytest.raises(UserError, match="not a safetensors file, or not all of one") as refused:
        read_header(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("case", "data"),
    [
        ("nothing", b""),
        ("more than the file", struct.pack("<Q", 100) + b"{}"),
        ("a pointer to large file storage", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    ],
)
def test_what_is_no_safetensors_file_is_said_to_be_none(tmp_path: Path, case: str, data: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(UserError, match="not a safetensors file"):
        read_header(path)


def test_every_way_to_cut_a_file_short_is_noticed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3, 2), "b": torch.ones(4)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError):
            read_header(cut)
