"""The benchmark of DeepSeek R1's shape writes what the release has, and runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint, tensor_bytes
from tests.bench.deepseek import Shape, write_source

ROOT = Path(__file__).parents[2]


def test_a_whole_model_has_the_sizes_of_the_release() -> None:
    files = Shape(layers=61, dense=3, experts=256).shards()
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    assert len(files) in range(155, 170)
    assert 670e9 < sum(tensor_bytes(*tensor) for tensor in tensors.values()) < 690e9
    assert tensors["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"] == ("F8_E4M3", (576, 7168))
    assert tensors["model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == ("F32", (5, 56))
    assert tensors["model.layers.60.mlp.experts.255.down_proj.weight"] == ("F8_E4M3", (7168, 2048))
    assert "model.layers.2.mlp.experts.0.down_proj.weight" not in tensors


def test_the_source_is_written_once_and_has_no_nan(tmp_path: Path) -> None:
    shape = Shape(layers=2, dense=1, experts=2, narrow=True)
    total = write_source(tmp_path / "r1", shape)
    checkpoint = open_checkpoint(tmp_path / "r1")
    assert checkpoint.nbytes == total
    (path,) = (tmp_path / "r1").glob("*.safetensors")
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    info, data = checkpoint.tensors[name][1], path.read_bytes()
    codes = data[info.start : info.end]
    assert len(set(codes)) > 100
    assert not {0x7F, 0xFF} & set(codes)
    written = path.stat().st_mtime_ns
    assert write_source(tmp_path / "r1", shape) == total
    assert path.stat().st_mtime_ns == written


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    shape = ["--layers", "2", "--experts", "4", "--narrow", "--device", "cpu"]
    places = ["--source", str(tmp_path / "r1"), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "r1.jsonl")]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.bench.deepseek", *shape, *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    for words in ("whole process", "past the page cache", "cp of the source"):
        assert words in ended.stdout
    result = json.loads((tmp_path / "r1.jsonl").read_text())
    assert result["run"]["record"]["inspection"] == "PASS"
    assert result["run"]["record"]["schemes"] == {"mxfp4": 3 + 3 * 5}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r1.jsonl"], "source and checkpoint are removed"
