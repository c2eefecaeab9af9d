from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import INDEX_NAME, ITEM_BITS, Reader, open_checkpoint, tensor_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index that tells the truth."""
    save_file({"a": torch.ones(2, 3), "b": torch.ones(5)}, tmp_path / "one.safetensors")
    save_file({"c": torch.ones(4).bfloat16()}, tmp_path / "two.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    return tmp_path


def index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        open_checkpoint(folder)
    return str(error.value)


def test_opens_shards_and_places_each_tensor(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.shards == ("one.safetensors", "two.safetensors")
    assert {name: shard for name, (shard, _) in checkpoint.tensors.items()} == {
        "a": "one.safetensors",
        "b": "one.safetensors",
        "c": "two.safetensors",
    }
    assert checkpoint.nbytes == 4 * 6 + 4 * 5 + 2 * 4
    starts = [info.start for info in checkpoint.in_shard("one.safetensors")]
    assert starts == sorted(starts)
    assert len(starts) == 2


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "two.safetensors").unlink()
    message = refused(folder)
    assert "two.safetensors" in message
    assert "1 are missing" in message
    assert "resumed" in message


@pytest.mark.parametrize("name", ["../two.safetensors", "/etc/two.safetensors", "two.bin", "two.safetensors/"])
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, name: str) -> None:
    save_file({"c": torch.ones(4).bfloat16()}, folder.parent / "two.safetensors")
    index(folder, {"a": "one.safetensors", "b": "one.safetensors", "c": name})
    assert "is not the name of a safetensors file beside it" in refused(folder)


def test_an_index_that_places_a_tensor_elsewhere_is_caught(folder: Path) -> None:
    index(folder, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    assert "places 'b' in two.safetensors; it is in one.safetensors" in refused(folder)


def test_an_index_that_omits_a_tensor_is_caught(folder: Path) -> None:
    index(folder, {"a": "one.safetensors", "c": "two.safetensors"})
    assert "does not list 1 tensors that are there: 'b'" in refused(folder)


def test_a_tensor_in_two_shards_is_caught(folder: Path) -> None:
    save_file({"a": torch.ones(2, 3), "c": torch.ones(4)}, folder / "two.safetensors")
    assert "'a' is in one.safetensors as well as in two.safetensors" in refused(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04")
    message = refused(tmp_path)
    assert name in message
    assert "can run code" in message
    assert "*.safetensors" in message


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "absent")
    (tmp_path / "file").touch()
    assert "no such folder" in refused(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "no such file"), ("{", "config.json:1:2: not JSON"), ("[]", "expected a JSON object, found list")],
)
def test_a_config_that_is_none_is_refused(folder: Path, text: str | None, words: str) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    assert words in refused(folder)


def test_what_follows_first_rows_is_not_fetched_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, *more: asked.append(offset))
    checkpoint = open_checkpoint(folder)
    read, start = Reader(checkpoint), checkpoint.tensors["a"][1].start
    assert torch.equal(read.rows("a", 0, 1), torch.ones(1, 3))
    assert not asked
    assert torch.equal(read.rows("a", 1, 2), torch.ones(1, 3))
    assert asked == [start + 24]


@pytest.mark.parametrize("dtype", ITEM_BITS)
def test_tensors_are_as_long_as_safetensors_has_them(dtype: str) -> None:
    """The library refuses a header whose length does not follow from dtype and shape."""
    length = tensor_bytes(dtype, (4, 6))
    header = json.dumps({"x": {"dtype": dtype, "shape": [4, 6], "data_offsets": [0, length]}}).encode()
    ((name, content),) = safetensors.deserialize(struct.pack("<Q", len(header)) + header + bytes(length))
    assert (name, content["dtype"], len(content["data"])) == ("x", dtype, length)
