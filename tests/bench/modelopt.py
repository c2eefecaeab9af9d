"""Hold decoded NVFP4 weights against ModelOpt's own, which `pip install nvidia-modelopt` brings.

::

    python -m tests.bench.modelopt

ModelOpt quantizes random weights; ours decodes the tensors that its exports store, and so does ModelOpt.
"""

from __future__ import annotations

import sys

import click
import torch

from quantmint.calibration.encodings import recognise


@click.command()
@click.option("--rows", default=512, show_default=True)
@click.option("--columns", default=1024, show_default=True)
@click.option("--rounds", default=8, show_default=True)
def main(rows: int, columns: int, rounds: int) -> None:
    """Print how many numbers are equal; end with 1 where one is not."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    equal = total = 0
    for seed in range(rounds):
        generator = torch.Generator().manual_seed(seed)
        weight = (torch.randn(rows, columns, generator=generator) * 10.0 ** (seed - 4)).bfloat16()
        quantized, scale, overall = NVFP4QTensor.quantize(weight, block_size=16)
        theirs = quantized.dequantize(torch.bfloat16, scale=scale, double_scale=overall, block_sizes={-1: 16})
        elements = quantized._quantized_data
        tensors = {"a.weight": elements, "a.weight_scale": scale, "a.weight_scale_2": overall}
        kinds = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
        encoded = recognise({name: (kinds[t.dtype], tuple(t.shape)) for name, t in tensors.items()}, "a.weight")
        assert encoded is not None
        ours = encoded.rule.decode(elements, [scale, overall])
        equal += int((ours == theirs).sum())
        total += theirs.numel()
    click.echo(f"{equal:,} of {total:,} numbers are equal")
    sys.exit(equal != total)


if __name__ == "__main__":
    main()
