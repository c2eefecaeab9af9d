"""How the stream engine and calibration scale over the nodes of a Ray cluster, and what eight nodes would do.

::

    python -m tests.bench.scaling --nodes 1,2,3 --json docs/bench-scaling.json --plot docs/bench-scaling.svg
    python -m tests.bench.scaling --nodes 1,2,4,8 --cores 2          # on a machine of 16 cores

A Llama of random weights is quantized by one process and by Ray clusters of this machine, each node bound to cores of
its own as far as there are any; the bytes are compared. Then parts are timed one by one, and a model of more nodes is
made of them, see `tests.bench.scaling_model`. Nodes of one machine share its memory, its disk and its caches: what is
measured here is what Ray adds, and how far cores carry; what is modelled is said to be modelled.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tests.bench.model import SHAPES, describe, into_page_cache, write_model
from tests.bench.scaling_model import Parts, modelled

ROOT = Path(__file__).parents[2]
SCHEME = "ptpc_fp8"
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_raylet_start_wait_time_s": "180"}


def share_of_cores(nodes: int, cores: int | None) -> list[list[int]]:
    """The cores of each node: ``cores`` apiece, none of them twice where there are enough (None: dealt out evenly)."""
    mine = sorted(os.sched_getaffinity(0))
    each = cores or max(len(mine) // nodes, 1)
    return [[mine[(node * each + number) % len(mine)] for number in range(each)] for node in range(nodes)]


@contextmanager
def cluster(cores: Sequence[Sequence[int]]) -> Iterator[str]:
    """A Ray of one node for each of these lists of cores; gives the address of its head."""
    folder = tempfile.mkdtemp(prefix="qm-ray-", dir="/tmp")
    environment = {**os.environ, **_QUIET, "RAY_TMPDIR": folder}
    order = json.dumps([list(each) for each in cores])
    held = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.scaling_child", "hold", order],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert held.stdin is not None
    assert held.stdout is not None
    try:
        address = next((line for line in held.stdout if line.startswith("address ")), "").partition(" ")[2].strip()
        if not address:
            raise click.ClickException("Ray did not start")
        yield address
    finally:
        held.stdin.close()
        held.wait()
        shutil.rmtree(folder, ignore_errors=True)


def measured(order: dict[str, Any], cores: Sequence[int] | None) -> dict[str, Any]:
    """Run a driver in a process of its own, on these cores alone where they are given."""
    program = [sys.executable, "-m", "tests.bench.scaling_child", "drive", json.dumps(order)]
    bound = [] if cores is None else ["taskset", "-c", ",".join(map(str, sorted(set(cores))))]
    os.sync()
    ended = subprocess.run(
        [*bound, *program],
        cwd=ROOT,
        env={**os.environ, **_QUIET},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def unlike_values(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The ranges that are not the expected ones, [expected, found] by name, in the order of the forward."""
    names = [*expected, *(name for name in found if name not in expected)]
    return {name: [expected.get(name), found.get(name)] for name in names if expected.get(name) != found.get(name)}


def disturbed(result: dict[str, Any]) -> bool:
    """Whether others were at work on the machine: then ratios of what was measured are no speed-ups."""
    machine = result["machine"]
    return bool(machine["load_before"] > machine["cores"] / 2)


def _seconds(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {found[name]:.1f} s" for name in ("quantize", "calibrate") if name in found)


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="2gb", show_default=True, help="The model's shape.")
@click.option("--size", type=float, help="Its size in GB, by the number of layers (default: the shape's own).")
@click.option("--shards", default=16, show_default=True, help="Files that it comes in.")
@click.option("--nodes", default="1,2,3", show_default=True, help="Sizes of the clusters, with commas between them.")
@click.option("--cores", type=int, help="Cores of each node (default: all cores, dealt out evenly).")
@click.option("--rounds", default=1, show_default=True, help="How often each is measured; the least time counts.")
@click.option("--samples", default=16, show_default=True, help="Calibration sequences; 0 leaves calibration out.")
@click.option("--length", default=128, show_default=True, help="Tokens of a calibration sequence.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work; three times the size must be free.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result there.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw it there: .svg or .png.")
def main(
    shape: str,
    size: float | None,
    shards: int,
    nodes: str,
    cores: int | None,
    rounds: int,
    samples: int,
    length: int,
    folder: Path | None,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """Measure one process and clusters of this machine, and model eight nodes from the parts."""
    counts = sorted({int(count) for count in nodes.split(",")})
    work = Path(tempfile.mkdtemp(prefix="quantmint-bench-", dir=folder))
    try:
        source = work / "source"
        layers = SHAPES[shape].layers_for(size or SHAPES[shape].gigabytes)
        nbytes = write_model(source, SHAPES[shape], layers, shards)
        result: dict[str, Any] = {
            "machine": describe("cpu"),
            "scheme": SCHEME,
            "model_gb": nbytes / 1e9,
            "layers": layers,
            "shards": shards,
            "samples": samples,
            "length": length,
            "rounds": rounds,
            "cores_a_node": {},
            "runs": {},
        }
        order = {"source": str(source), "scheme": SCHEME, "samples": samples, "length": length}
        digests: set[str] = set()
        first: dict[int, dict[str, Any]] = {}  # ranges by threads: on a CPU a product's last bit depends on them
        differ: dict[str, dict[str, Any]] = {}

        def take(name: str, address: str | None, bound: Sequence[int] | None) -> None:
            for number in range(rounds):
                into_page_cache(source)
                out = work / "out"
                shutil.rmtree(out, ignore_errors=True)
                found = measured({**order, "out": str(out), "on": address}, bound)
                digests.add(found["sha256"])
                values = found.pop("values", {})
                if unlike := unlike_values(first.setdefault(found["threads"], values), values):
                    differ[name] = {**unlike, **differ.get(name, {})}
                known = result["runs"].get(name)
                if known is None or found["quantize"] < known["quantize"]:
                    result["runs"][name] = {**found, "round": number, "load": round(os.getloadavg()[0], 1)}
            click.echo(f"{name}: {_seconds(result['runs'][name])}", err=True)

        take("one process", None, None)
        for count in counts:
            each = share_of_cores(count, cores)
            result["cores_a_node"][str(count)] = len(each[0])
            began = time.perf_counter()
            with cluster(each) as address:
                started = time.perf_counter() - began
                take(f"{count} nodes", address, each[0])  # its threads are those of the shares
                result["runs"][f"{count} nodes"]["cluster_start"] = started
        if cores is not None and cores < len(os.sched_getaffinity(0)):
            take("one process, cores of a node", None, share_of_cores(1, cores)[0])
        result["ranges_that_differ"] = differ
        result["same_bytes"] = len(digests) == 1 and not differ
        result["disturbed"] = disturbed(result)
        parts = Parts.of(result, source)
        result["parts"] = asdict(parts)
        result["modelled"] = modelled(parts)
        _show(result)
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            from tests.bench import plots

            plots.scaling(result, plot)
        sys.exit(0 if result["same_bytes"] else 1)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _show(result: dict[str, Any]) -> None:
    machine = result["machine"]
    click.echo(
        f"{result['model_gb']:.2f} GB of bf16 in {result['shards']} files to {result['scheme']} on {machine['cores']} "
        f"cores of {machine['processor']}, load {machine['load_before']} before"
    )
    if result["disturbed"]:
        click.echo("  others were at work on this machine: the ratios below are no speed-ups")
    first = result["runs"]["one process"]
    for name, found in result["runs"].items():
        ratio = f"{first['quantize'] / found['quantize']:.2f} x one process"
        click.echo(f"  measured  {name:<28} {_seconds(found)} ({ratio})")
    for row in result["modelled"]["rows"]:
        click.echo(
            f"  modelled  {row['model']}, {row['nodes']} nodes of {row['cores']} cores: "
            f"quantize {row['quantize']:.1f} s ({row['quantize_speedup']:.2f} x one node; "
            f"{row['quantize_one_disk']:.1f} s by one disk), calibrate {row['calibrate']:.1f} s"
        )
    for name, values in result["ranges_that_differ"].items():
        shown = ", ".join(f"{each} {was} {now}" for each, (was, now) in list(values.items())[:3])
        click.echo(f"  {name}: {len(values)} ranges are not those of the first run with so many threads: {shown} ...")
    click.echo(f"bytes are the same: {'yes' if result['same_bytes'] else 'NO'}")


if __name__ == "__main__":
    main()
