"""Time GPTQ of one product of a layer's experts: one after the other, and side by side.

::

    python -m tests.bench.experts --device cuda:0 --experts 128 --rows 1536 --columns 2048

The default is the gate and up projection of a layer of Qwen3 30B A3B. Each expert has a Hessian of its own. Seconds are
of the rounding alone, without the decompositions, which both ways share; the second of two runs counts.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--experts", default=128, show_default=True)
@click.option("--rows", default=1536, show_default=True, help="Outputs of an expert's product.")
@click.option("--columns", default=2048, show_default=True, help="Its inputs.")
@click.option("--together", default=32, show_default=True, help="Experts that are rounded side by side.")
@click.option("--kernel", default="mxfp4", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def command(device: str, experts: int, rows: int, columns: int, together: int, kernel: str, as_json: bool) -> None:
    """Round random experts both ways, and say how the sums of their errors compare."""
    import torch

    from quantmint.pipeline.quantize.gptq.solver import factorize, round_stack, round_weight
    from quantmint.pipeline.quantize.schemes.registry import KERNELS

    generator = torch.Generator(device).manual_seed(0)
    with torch.inference_mode():
        weights = [
            torch.randn(rows, columns, generator=generator, device=device).mul_(0.02).bfloat16() for _ in range(experts)
        ]
        factors = [factorize(_hessian(columns, generator, device), KERNELS[kernel]) for _ in weights]
        seconds: dict[str, float] = {}
        for _ in range(2):
            start = time.perf_counter()
            single = [
                round_weight(weight, factor, KERNELS[kernel]) for weight, factor in zip(weights, factors, strict=True)
            ]
            _wait(device)
            seconds["single"] = time.perf_counter() - start
            start = time.perf_counter()
            stacked = [
                made
                for first in range(0, experts, together)
                for made in round_stack(
                    weights[first : first + together], factors[first : first + together], KERNELS[kernel]
                )
            ]
            _wait(device)
            seconds["stacked"] = time.perf_counter() - start
        errors = sum(made.after for made in single), sum(made.after for made in stacked)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "shape": [experts, rows, columns],
        "kernel": kernel,
        "seconds": {name: round(took, 3) for name, took in seconds.items()},
        "error_ratio": errors[1] / errors[0],
    }
    if as_json:
        click.echo(json.dumps(record))
    else:
        click.echo(
            f"{experts} experts of {rows} x {columns} in {kernel} on {record['device']}: one after the other "
            f"{seconds['single']:.2f} s, {together} side by side {seconds['stacked']:.2f} s "
            f"({seconds['single'] / seconds['stacked']:.1f} x); error of the second over the first "
            f"{record['error_ratio']:.6f}"
        )


def _hessian(columns: int, generator: torch.Generator, device: str) -> torch.Tensor:
    """Return X^T X of inputs of which some are far larger than others, float32 [columns, columns]."""
    import torch

    inputs = torch.randn(2 * columns, columns, generator=generator, device=device)
    inputs *= torch.randn(columns, generator=generator, device=device).exp()
    return inputs.t() @ inputs


def _wait(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    command()
