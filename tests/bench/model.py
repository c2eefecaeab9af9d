"""What is measured with: a Llama of random weights, written as fast as the disk takes it, and this machine.

Values come from one block of normal numbers, which every tensor starts to read at a place of its own: 14 GB of fresh
random numbers would take longer than everything that is measured.
"""

from __future__ import annotations

import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

_BLOCK = (1 << 23) + 9  # elements; prime to every row length, so that rows of a tensor differ
VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama; ``gigabytes`` of bfloat16 is what a model of that shape has unless asked otherwise."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    gigabytes: float

    def tensors(self, layers: int, vocabulary: int = VOCABULARY) -> dict[str, tuple[int, ...]]:
        """The tensors by name, in the order of a checkpoint."""
        kv = self.kv_heads * self.hidden // self.heads
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, self.hidden)}
        for layer in range(layers):
            found |= {
                f"model.layers.{layer}.{name}.weight": shape
                for name, shape in (
                    ("input_layernorm", (self.hidden,)),
                    ("mlp.down_proj", (self.hidden, self.intermediate)),
                    ("mlp.gate_proj", (self.intermediate, self.hidden)),
                    ("mlp.up_proj", (self.intermediate, self.hidden)),
                    ("post_attention_layernorm", (self.hidden,)),
                    ("self_attn.k_proj", (kv, self.hidden)),
                    ("self_attn.o_proj", (self.hidden, self.hidden)),
                    ("self_attn.q_proj", (self.hidden, self.hidden)),
                    ("self_attn.v_proj", (kv, self.hidden)),
                )
            }
        return found | {"model.norm.weight": (self.hidden,), "lm_head.weight": (vocabulary, self.hidden)}

    def layers_for(self, gigabytes: float) -> int:
        """How many layers make a model of about that size."""
        base = _size(self.tensors(0))
        return max(1, round((gigabytes * 1e9 - base) / (_size(self.tensors(1)) - base)))


SHAPES = {
    "270m": Shape(hidden=1024, intermediate=2816, heads=8, kv_heads=4, gigabytes=0.27),
    "2gb": Shape(hidden=2048, intermediate=5632, heads=16, kv_heads=8, gigabytes=2.0),
    "8b": Shape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, gigabytes=14.5),
    "70b": Shape(hidden=8192, intermediate=28672, heads=64, kv_heads=8, gigabytes=137.0),
    "405b": Shape(hidden=16384, intermediate=53248, heads=128, kv_heads=8, gigabytes=811.0),
    "tiny": Shape(hidden=256, intermediate=512, heads=4, kv_heads=2, gigabytes=0.04),
}


def write_model(folder: Path, shape: Shape, layers: int, shards: int, *, vocabulary: int = VOCABULARY) -> int:
    """Write a model into that many files of about the same size; returns the bytes of its tensors."""
    import torch
    from transformers import LlamaConfig

    from quantmint.pipeline.quantize.formats.checkpoint import INDEX_NAME, SINGLE_NAME

    files = _split(shape.tensors(layers, vocabulary), shards)
    total = sum(map(_size, files))
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [SINGLE_NAME]
    folder.mkdir(parents=True)
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_write_shard, [folder / name for name in names], files, [block] * len(files)))
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index))
    write_tokenizer(folder, vocabulary)
    LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=vocabulary,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    return total


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with one word per token id; oneshot wants one even where it is given token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w2").save_pretrained(
        folder
    )


def _split(tensors: dict[str, tuple[int, ...]], shards: int) -> list[dict[str, tuple[int, ...]]]:
    files: list[dict[str, tuple[int, ...]]] = [{}]
    share, written = _size(tensors) / shards, 0
    for name, shape in tensors.items():
        if written >= share * len(files):
            files.append({})
        files[-1][name] = shape
        written += _size({name: shape})
    return files


def _write_shard(path: Path, tensors: dict[str, tuple[int, ...]], block: object) -> None:
    import torch

    from quantmint.pipeline.quantize.formats.checkpoint import encode_header

    assert isinstance(block, torch.Tensor)
    values = memoryview(block.view(torch.uint8).numpy().data)
    ones = torch.ones(max(shape[-1] for shape in tensors.values()), dtype=torch.bfloat16)
    with path.open("wb") as stream:
        stream.write(encode_header((name, "BF16", shape) for name, shape in tensors.items()))
        for name, shape in tensors.items():
            left = 2 * prod(shape)
            if len(shape) == 1:  # norms
                stream.write(ones[: shape[0]].view(torch.uint8).numpy().data)
                continue
            start = 2 * (int.from_bytes(sha256(name.encode()).digest()[:8], "little") % _BLOCK)
            while left:
                part = values[start : start + left]
                stream.write(part)
                left -= part.nbytes
                start = 0


def _size(tensors: dict[str, tuple[int, ...]]) -> int:
    return sum(2 * prod(shape) for shape in tensors.values())


def into_page_cache(folder: Path) -> None:
    """Read a model, so that who comes first is not the one who waits for the disk."""

    def read(path: Path) -> None:
        piece = bytearray(1 << 22)
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(piece):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, folder.iterdir()))


def describe(device: str) -> dict[str, Any]:
    """Processor, cores, memory, accelerator and PyTorch of this machine."""
    import torch

    from quantmint.pipeline.quantize.device import device_title, resolve_devices

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "simd": torch.backends.cpu.get_cpu_capability(),
        "accelerator": None if device == "cpu" else device_title(resolve_devices(device)),
    }
