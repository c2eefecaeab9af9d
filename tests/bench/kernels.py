"""Each scheme's kernel as it runs, and the same lines under ``torch.compile``: seconds a GB, and whether bytes agree.

::

    python -m tests.bench.kernels --device cpu

The engine runs what this shows to be faster, or as fast without the seconds that compiling takes: see `kernels`.
One thread on a CPU, because the engine's workers are threads already.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch

ROUNDS = 7
COLUMNS = 4096


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--piece", type=float, help="MB of weight at a time (default: the engine's).")
@click.option("--json", "as_json", is_flag=True)
def command(device: str, piece: float | None, as_json: bool) -> None:
    """Time every kernel, eager and compiled."""
    import torch
    import torch._inductor.config

    from quantmint.pipeline.quantize.engines.stream.schedule import CPU_PIECE, GPU_PIECE
    from quantmint.pipeline.quantize.schemes.registry import KERNELS
    from quantmint.pipeline.quantize.schemes.scales import amax

    torch._logging.set_logs(dynamo=logging.ERROR)  # a branch on the numbers is meant, and costs one call more
    torch.set_num_threads(1)
    # Without it the compiler keeps what is rounded to 16 bits between two operations in 32, and bytes differ.
    torch._inductor.config.emulate_precision_casts = True
    size = int(piece * 1e6) if piece else CPU_PIECE if device.startswith("cpu") else GPU_PIECE
    rows = size // (2 * COLUMNS) // 128 * 128
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, COLUMNS, generator=generator).mul_(0.02).bfloat16().to(device)
    largest = amax(weight)
    found = []
    for name, kernel in KERNELS.items():
        given = largest if kernel.whole else None
        compiled = torch.compile(kernel.compute, dynamic=False)
        start = time.perf_counter()
        made = compiled(weight, given)
        _wait(weight)
        seconds_to_compile = time.perf_counter() - start
        expected = kernel.compute(weight, given)
        found.append(
            {
                "kernel": name,
                "eager": _seconds(lambda k=kernel, g=given: k.compute(weight, g), weight),
                "compiled": _seconds(lambda c=compiled, g=given: c(weight, g), weight),
                "seconds_to_compile": round(seconds_to_compile, 2),
                "same_bytes": all(_same(expected[role], made[role]) for role in expected),
            }
        )
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU, one thread"
    if as_json:
        click.echo(json.dumps({"device": where, "torch": torch.__version__, "piece": weight.nbytes, "kernels": found}))
        return
    click.echo(f"{where}, torch {torch.__version__}, pieces of {weight.nbytes / 1e6:.1f} MB; seconds a GB of weight")
    click.echo(f"{'kernel':22}{'eager':>9}{'compiled':>10}{'ratio':>8}{'compiling':>11}  bytes")
    for row in found:
        ratio = row["compiled"] / row["eager"]
        agree = "same" if row["same_bytes"] else "DIFFER"
        click.echo(
            f"{row['kernel']:22}{row['eager']:9.3f}{row['compiled']:10.3f}{ratio:8.2f}"
            f"{row['seconds_to_compile']:9.1f} s  {agree}"
        )


def _seconds(compute: Callable[[], Any], weight: torch.Tensor) -> float:
    """The median round's seconds a GB."""
    repeats = max(int(2e8 // weight.nbytes), 3)
    compute()
    rounds = []
    for _ in range(ROUNDS):
        _wait(weight)
        start = time.perf_counter()
        for _ in range(repeats):
            compute()
        _wait(weight)
        rounds.append((time.perf_counter() - start) / repeats)
    return statistics.median(rounds) / weight.nbytes * 1e9


def _wait(weight: torch.Tensor) -> None:
    import torch

    if weight.device.type == "cuda":
        torch.cuda.synchronize(weight.device)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


if __name__ == "__main__":
    command()
