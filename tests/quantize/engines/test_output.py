from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.digest import template_digest
from quantmint.pipeline.quantize.engines.stream import worker
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import ITEM_BITS, Checkpoint, encode_header, open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.formats.layout import layout
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.quantize.schemes.fp8 import ptpc_fp8
from quantmint.pipeline.quantize.schemes.scales import fp8_scale

ROOT = Path(__file__).parents[3]
FORMATS = ("compressed-tensors", "quark")
ODD = {
    "model-1.safetensors": {
        "scalar": ("F32", ()),
        "empty": ("BF16", (0, 3)),
        "odd.mask": ("U8", (7,)),
        "three.bias": ("BF16", (3,)),
        "model.layers.0.self_attn.k_proj.weight": ("BF16", (3, 5)),
        "model.layers.0.self_attn.v_proj.weight": ("BF16", (5, 3)),
        "rotary": ("F64", (3,)),
        "model.layers.0.self_attn.o_proj.weight": ("F16", (7, 9)),
        "steps": ("I64", (1,)),
    },
    "model-2.safetensors": {
        "flag": ("BOOL", (1,)),
        "model.layers.1.mlp.up_proj.weight": ("BF16", (1, 1)),
        "model.layers.1.mlp.down_proj.weight": ("BF16", (13, 8)),
        "last.weight": ("F32", (3, 3)),
    },
}


def kv_ranges(checkpoint_format: str) -> dict[str, float]:
    return dict(zip(layout(checkpoint_format).kv_scale_names("model.layers.0.self_attn"), (3.25, 7.0), strict=True))


@pytest.fixture
def odd(tmp_path: Path, write_model: Callable[..., Checkpoint]) -> Checkpoint:
    """Sizes that are no multiple of anything."""
    return write_model(tmp_path / "odd", ODD)


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_every_tensor_is_aligned_whatever_the_sizes(
    run: Callable[..., dict[str, bytes]], odd: Checkpoint, tmp_path: Path, checkpoint_format: str
) -> None:
    run(odd, tmp_path / "work", checkpoint_format=checkpoint_format, ranges=kv_ranges(checkpoint_format))
    made = open_checkpoint(tmp_path / "work" / "checkpoint")
    for name, (_, info) in made.tensors.items():
        assert info.start % (ITEM_BITS[info.dtype] // 8) == 0, name
    assert any(info.dtype == "F8_E4M3" and info.nbytes % 2 for _, info in made.tensors.values())


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_odd_sizes_come_out_right(
    run: Callable[..., dict[str, bytes]], odd: Checkpoint, tmp_path: Path, checkpoint_format: str
) -> None:
    run(odd, tmp_path / "work", checkpoint_format=checkpoint_format, ranges=kv_ranges(checkpoint_format))
    for shard in ODD:
        source, made = load_file(odd.folder / shard), load_file(tmp_path / "work" / "checkpoint" / shard)
        for name, tensor in source.items():
            if not name.endswith("_proj.weight"):
                assert torch.equal(made[name], tensor), name
                continue
            expected = ptpc_fp8(tensor)
            scale = made[f"{name}_scale"]
            assert torch.equal(made[name].view(torch.uint8), expected["weight"].view(torch.uint8))
            assert torch.equal(scale.reshape(-1), expected["weight_scale"])
            assert scale.shape == ((tensor.shape[0],) if checkpoint_format == "quark" else (tensor.shape[0], 1))
            assert scale.dtype == tensor.dtype


@pytest.mark.parametrize(
    ("checkpoint_format", "names", "shape"),
    [
        ("compressed-tensors", ("k_scale", "v_scale"), (1,)),
        ("quark", ("k_proj.output_scale", "v_proj.output_scale"), ()),
    ],
)
def test_kv_scales_lie_beside_their_k_projection(
    run: Callable[..., dict[str, bytes]],
    odd: Checkpoint,
    tmp_path: Path,
    checkpoint_format: str,
    names: tuple[str, str],
    shape: tuple[int, ...],
) -> None:
    run(odd, tmp_path / "work", checkpoint_format=checkpoint_format, ranges=kv_ranges(checkpoint_format))
    made = load_file(tmp_path / "work" / "checkpoint" / "model-1.safetensors")
    for name, amax in zip(names, (3.25, 7.0), strict=True):
        scale = made[f"model.layers.0.self_attn.{name}"]
        assert scale.shape == shape
        assert scale.dtype == torch.bfloat16
        assert float(scale) == float(fp8_scale(torch.tensor(amax).bfloat16()))


def test_companions_come_along_and_code_only_when_asked(
    run: Callable[..., dict[str, bytes]], small: Checkpoint, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "LICENSE.txt", "modeling_x.py", "chat_template.jinja", "pytorch_model.bin"):
        (small.folder / name).write_bytes(name.encode())
    (small.folder / "README.md").write_text("the card of the source")
    (small.folder / "additional_chat_templates").mkdir()
    (small.folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    made = run(small, tmp_path / "work")
    assert template_digest(tmp_path / "work" / "checkpoint") == template_digest(small.folder)
    assert "README.md" not in made
    assert made["tokenizer.json"] == b"tokenizer.json"
    assert {"LICENSE.txt", "chat_template.jinja"} <= set(made)
    assert not {"modeling_x.py", "pytorch_model.bin"} & set(made)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F64", (8, 8)), ("F8_E4M3", (8, 8)), ("BF16", (8,)), ("BF16", (2, 8, 8))]
)
def test_what_is_no_matrix_of_numbers_is_refused_before_anything_is_written(
    write_model: Callable[..., Checkpoint],
    plain: Callable[..., Structure],
    tmp_path: Path,
    dtype: str,
    shape: tuple[int, ...],
) -> None:
    source = write_model(tmp_path / "model", {"model.safetensors": {"m.q_proj.weight": (dtype, shape)}})
    with pytest.raises(UserError, match=r"m\.q_proj\.weight is .*expected a matrix of"):
        plan_shards(source, plain(["m.q_proj"]), Choice({"m.q_proj": "ptpc_fp8"}, (), False), "quark")


def test_static_kv_scales_without_a_k_projection_are_refused(
    write_model: Callable[..., Checkpoint], plain: Callable[..., Structure], tmp_path: Path
) -> None:
    source = write_model(tmp_path / "model", {"model.safetensors": {"a.o_proj.weight": ("BF16", (8, 8))}})
    with pytest.raises(UserError, match=r"a has no k_proj or qkv_proj there") as refused:
        plan_shards(source, plain(["a.o_proj"], ("a",)), Choice({"a.o_proj": "ptpc_fp8"}, (), True), "quark")
    assert "kv_cache: auto" in str(refused.value)


def test_the_disk_begins_before_a_file_is_whole_and_with_all_of_it_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(worker, "start_flush", started.append)
    monkeypatch.setattr(worker, "_FLUSH", 100)
    sink = worker.Sink(tmp_path / "file", 330)
    for offset in range(0, 330, 30):
        sink.write(offset, memoryview(bytes([offset // 30]) * 30))
    sink.close()
    assert len(started) == 3
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([number]) * 30 for number in range(11))


MEASURED = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import torch
from killed_run import engine

def peak():  # ru_maxrss would count the parent's memory before the exec as well
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])

engine(Path(sys.argv[1]) / "warm", Path(sys.argv[2]) / "warm", lambda _: None)
before = peak()
engine(Path(sys.argv[1]) / "large", Path(sys.argv[2]) / "large", lambda _: None)
print(json.dumps([before, peak()]))
"""


@pytest.mark.slow
def test_memory_is_a_few_pieces_and_not_a_file(tmp_path: Path) -> None:
    def write(folder: Path, name: str, count: int, width: int) -> None:
        folder.mkdir(exist_ok=True)
        weight = torch.randn(width, width, generator=torch.Generator().manual_seed(3)).bfloat16().view(torch.uint8)
        with (folder / name).open("wb") as stream:
            names = [f"{name[:-12]}.layers.{number}.up_proj.weight" for number in range(count)]
            stream.write(encode_header((each, "BF16", (width, width)) for each in names))
            for _ in names:
                stream.write(weight.numpy().data)
        (folder / "config.json").write_text("{}")

    # Larger than what glibc would take from its arenas, whose own waste is not what is looked for.
    width = 4608
    largest = 2 * width * width  # bytes
    write(tmp_path / "warm", "model.safetensors", 2, 64)
    write(tmp_path / "large", "model.safetensors", 16, width)
    finished = subprocess.run(
        [sys.executable, "-c", MEASURED, tmp_path, tmp_path / "out", ROOT, Path(__file__).parent],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    before, after = json.loads(finished.stdout)
    # Held at once: a few pieces a worker and the blocks of two files, 44 MB as seen; not a file of 680.
    assert 0 < after - before < 3 * largest
