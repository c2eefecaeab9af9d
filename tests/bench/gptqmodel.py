"""Hold decoded INT4 of AWQ and GPTQ against GPTQModel's own, which `pip install gptqmodel` brings.

::

    python -m tests.bench.gptqmodel

Random numbers are packed by GPTQModel; ours decodes the words, and so does GPTQModel, with scales in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click
import torch

from quantmint.calibration.encodings import recognise

GROUP = 128
_KINDS = {torch.int32: "I32", torch.float16: "F16"}
_DECLARED: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
}


def awq(seed: int, rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what AutoAWQ stores of a random weight [rows, columns], and the weight as GPTQModel decodes it."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq

    numbers, zeros, scales, _ = random_parts(seed, rows, columns, ordered=True)
    qweight, qzeros = pack_awq(numbers, zeros, 4)
    theirs = dequantize_gemm(qweight, qzeros, scales.float(), 4, GROUP)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales}, theirs.t()


def gptq(seed: int, rows: int, columns: int, *, form: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what GPTQ stores of a random weight [rows, columns], and the weight as GPTQModel decodes it."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    numbers, zeros, scales, g_idx = random_parts(seed, rows, columns, ordered=seed % 2 == 0)
    layer = TorchLinear(4, GROUP, sym=False, desc_act=seed % 2 == 1, in_features=columns, out_features=rows)
    linear = torch.nn.Linear(columns, rows, bias=False)
    stored_zeros = zeros.clamp(min=1)  # the first format cannot hold a zero point of 0
    linear.weight.data = ((numbers - stored_zeros[g_idx]) * scales.float()[g_idx]).t().contiguous()
    layer.pack_original(linear, scales.float().t(), stored_zeros.float().t(), g_idx.int())
    parts = {"qweight": layer.qweight, "qzeros": layer.qzeros.clone(), "scales": layer.scales, "g_idx": layer.g_idx}
    if form == "gptq":
        parts["qzeros"] -= 0x11111111
        layer.qzeros.data.copy_(parts["qzeros"])
        convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
    layer.scales = layer.scales.float()
    layer.post_init()
    return parts, layer.dequantize_weight().t()


def random_parts(seed: int, rows: int, columns: int, *, ordered: bool) -> tuple[torch.Tensor, ...]:
    """Return random numbers [I, O] and zero points [n, O] from 0 to 15, float16 scales [n, O], groups int64 [I]."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(16, (columns, rows), generator=generator, dtype=torch.int32)
    zeros = torch.randint(16, (columns // GROUP, rows), generator=generator, dtype=torch.int32)
    scales = (torch.rand(columns // GROUP, rows, generator=generator) * 10.0 ** (seed % 4 - 4)).half()
    order = torch.arange(columns) // GROUP
    return numbers, zeros, scales, order if ordered else order[torch.randperm(columns, generator=generator)]


def cases(rounds: int, rows: int, columns: int) -> Iterator[tuple[str, Mapping[str, torch.Tensor], torch.Tensor]]:
    """Yield for each format and round its name, the stored tensors, and the weight [rows, columns] of GPTQModel."""
    for seed in range(rounds):
        yield "awq", *awq(seed, rows, columns)
        yield "gptq", *gptq(seed, rows, columns, form="gptq")
        yield "gptq_v2", *gptq(seed, rows, columns, form="gptq_v2")


@click.command()
@click.option("--rows", default=512, show_default=True)
@click.option("--columns", default=1024, show_default=True)
@click.option("--rounds", default=8, show_default=True)
def main(rows: int, columns: int, rounds: int) -> None:
    """Print how many numbers are equal; end with 1 where one is not."""
    equal, total = dict.fromkeys(_DECLARED, 0), dict.fromkeys(_DECLARED, 0)
    for form, parts, theirs in cases(rounds, rows, columns):
        tensors = {f"a.{name}": (_KINDS[part.dtype], tuple(part.shape)) for name, part in parts.items()}
        encoded = recognise(tensors, "a.qweight", _DECLARED[form])
        assert encoded is not None
        ours = encoded.rule.decode(parts["qweight"], [parts[name.removeprefix("a.")] for name in encoded.scales])
        equal[form] += int((ours == theirs.bfloat16()).sum())
        total[form] += theirs.numel()
    for form in _DECLARED:
        click.echo(f"{form}: {equal[form]:,} of {total[form]:,} numbers are equal")
    sys.exit(equal != total)


if __name__ == "__main__":
    main()
