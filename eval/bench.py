"""What a load on a server measured: cells, the launches that they ran on, the order of those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eval.records import Record

Side = Literal["baseline", "candidate"]


@dataclass(frozen=True, slots=True)
class CellResult(Record):
    """One cell on one launch of a server.

    `duration` is in seconds, throughputs in tokens per second over all requests, latencies in milliseconds: time to
    first token (ttft), time per output token after the first (tpot), gap between tokens (itl), whole request (e2el).

    `gpus` shared the work. `concurrency` and `request_rate` (requests per second) are the cell's limits, None without
    one: a cell with a rate offers that load whatever the server could do, so that its throughput says nothing about
    speed, only its latencies do. `goodput` counts the requests per second that met the cell's latency goals, None
    where it has none. `peak_concurrency` and `peak_output_throughput` are vLLM's: requests that were in flight at any
    time of a second, which may be more than were at once, and tokens of a second, each the largest of all seconds.
    """

    cell: str
    completed: int
    failed: int
    duration: float
    output_throughput: float
    total_throughput: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p50: float
    itl_p99: float
    e2el_p50: float
    e2el_p99: float
    gpus: int = 1
    concurrency: int | None = None
    request_rate: float | None = None
    requests_per_second: float | None = None
    goodput: float | None = None
    peak_concurrency: int | None = None
    peak_output_throughput: float | None = None


@dataclass(frozen=True, slots=True)
class Machine(Record):
    """The accelerators (on a CPU server: the cores) while the cells of a launch ran; None where nothing tells.

    `clock_mhz` is the median clock under load, `clock_mhz_low` its 5th percentile, `temperature_c` the highest
    temperature, `power_w` the median power of all accelerators together. `throttled` names what slowed them down that
    should not: heat, a failing power supply; a power cap that is reached under load is as it should be, and shows in
    the clock. `samples` counts the looks.
    """

    clock_mhz: float | None = None
    clock_mhz_low: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttled: tuple[str, ...] = ()
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Launch(Record):
    """One fresh server of a side, with what every cell measured on it: the replicate of a comparison.

    `number` counts the launches of both sides in the order in which they were made, from 0. `kv_tokens`,
    `kv_cache_dtype` and `attention_backend` are those that the server's log says were really chosen, None where it
    does not say. `started_seconds` went by before it answered. `client_cpu` is the largest share of one core that the
    load generator used while a cell ran: it is one thread, so that near 1.0 it sets the pace and not the server; None
    where it was not seen. `started` is the time of the start (ISO 8601, UTC): launches of a series that was
    interrupted lie further apart. `faults` are lines of the log that void what was measured, each with what it means.
    `device` is what the server ran on, in its own words: a series may go on, or be made again, on another machine.
    """

    side: Side
    number: int
    cells: Mapping[str, CellResult]
    kv_tokens: int | None
    kv_cache_dtype: str | None
    started_seconds: float
    client_cpu: float | None
    machine: Machine
    started: str | None = None
    attention_backend: str | None = None
    faults: tuple[str, ...] = ()
    device: str | None = None


def order(launches: int) -> tuple[Side, ...]:
    """The sides of a series with so many launches on each: ABBA BAAB BAAB ABBA, A being the baseline.

    It is the Thue-Morse sequence: a drift of the machine that is linear in time (of any degree d, over 2^(d+1)
    launches) is the same on both sides and cancels (Prouhet 1851).
    """
    return tuple("candidate" if number.bit_count() % 2 else "baseline" for number in range(2 * launches))
