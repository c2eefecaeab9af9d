"""Launches that must not be compared: missing, out of order, throttled, at another clock, with a busy client."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from quantmint.eval.gate import Policy, judge
from quantmint.eval.measurements import Launch, MachineState, Measurements
from quantmint.eval.verdict import Verdict

Launches = list[Launch]


def at(number: int, **changes: object) -> Callable[[Launches], Launches]:
    """One launch otherwise; in ABBA BAAB, the first is the baseline's."""
    return lambda made: [
        dataclasses.replace(launch, **changes) if launch.number == number else launch for launch in made
    ]


def clock(mhz: dict[int, float]) -> Callable[[Launches], Launches]:
    return lambda made: [
        dataclasses.replace(launch, machine=MachineState(clock_mhz=mhz.get(launch.number, 2000.0))) for launch in made
    ]


def cells(**changes: object) -> Callable[[Launches], Launches]:
    """Every cell of the third launch otherwise."""
    return lambda made: at(
        2,
        cells={name: dataclasses.replace(cell, **changes) for name, cell in made[2].cells.items()},  # type: ignore[arg-type]
    )(made)


def pieces(share: float) -> Callable[[Launches], Launches]:
    """In the third launch the best second has so many pieces of answers for a token of the mean second."""

    def change(made: Launches) -> Launches:
        found = made[2].cells.items()
        peaks = {
            name: dataclasses.replace(cell, peak_output_throughput=share * cell.output_throughput)
            for name, cell in found
        }
        return at(2, cells=peaks)(made)

    return change


def without_a_cell(made: Launches) -> Launches:
    cells = dict(list(made[5].cells.items())[1:])
    return [*made[:5], dataclasses.replace(made[5], cells=cells), *made[6:]]


def in_blocks(made: Launches) -> Launches:
    """First all of the baseline, then all of the candidate."""
    by_side = sorted(made, key=lambda launch: launch.side)
    return [dataclasses.replace(launch, number=number) for number, launch in enumerate(by_side)]


FAULTS: list[tuple[str, Callable[[Launches], Launches], str]] = [
    (
        "one side short",
        lambda made: made[:-1],
        "Launches are missing or repeated: found the numbers 0, 1, 2, 3, 4, 5, 6.",
    ),
    (
        "a gap",
        lambda made: [made[0], made[1], *made[4:]],
        "Launches are missing or repeated: found the numbers 0, 1, 4",
    ),
    ("blocks", in_blocks, "The launches were made in the order AAAABBBB, expected ABBABAAB (A is the baseline)."),
    (
        "another machine",
        at(3, device="NVIDIA H100 80GB HBM3"),
        "Launch 3 of the baseline ran on NVIDIA H100 80GB HBM3, where the baseline was served on AMD Instinct MI300X.",
    ),
    ("failed requests", cells(failed=3), "3 requests of in1024-out1024-c64 failed"),
    ("no cell", without_a_cell, "Launches without a result of in1024-out1024-c64: 5."),
    (
        "cache",
        at(2, kv_cache_dtype="auto"),
        "Launch 2 of the candidate: its KV cache is auto, but the launch asked for",
    ),
    ("log", at(1, faults=("scales were 1.0: WARNING x",)), "Launch 1 of the candidate: scales were 1.0: WARNING x."),
    ("client", at(3, client_cpu=0.99), "The load generator used 99% of its core in launch 3"),
    ("server", at(3, server_cpu=0.93), "The API server used 93% of its core in launch 3: making text was measured"),
    (
        "late",
        pieces(0.3),
        "The best second of in1024-out1024-c64 was below half of its mean in launch 2",
    ),
    ("few prompts", cells(concurrency=7), "64 prompts for 7 in flight are mostly filling and emptying a batch"),
    ("heat", at(6, machine=MachineState(throttled=("thermal",))), "The machine was slowed down in launch 6: thermal."),
    ("clock", clock({3: 1800.0}), "The clock changed between launches of the baseline, from 1,800 to 2,000 MHz."),
    (
        "backend",
        at(4, attention_backend="TRITON_ATTN"),
        "ran on several attention backends: ROCM_AITER_FA, TRITON_ATTN",
    ),
]


@pytest.mark.parametrize(("change", "reason"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_faults(
    measurements: Measurements, policy: Policy, change: Callable[[Launches], Launches], reason: str
) -> None:
    changed = dataclasses.replace(measurements, launches=tuple(change(list(measurements.launches))))
    report = judge(changed, policy)
    assert report.verdict is Verdict.INVALID
    assert any(reason in found for found in report.reasons), report.reasons


def test_what_is_no_fault(measurements: Measurements, policy: Policy) -> None:
    for change in (
        # The candidate's kernels draw more power, so all of its launches run at a lower clock: that is its own speed.
        clock({launch.number: 1600.0 for launch in measurements.launches if launch.side == "candidate"}),
        clock({2: 1960.0, 5: 2040.0}),
        at(3, client_cpu=0.6, server_cpu=0.85),
        cells(concurrency=6, peak_output_throughput=20_000.0),
        pieces(0.9),  # now and then two tokens of a request came as one piece
        at(3, client_cpu=None, machine=MachineState(), kv_cache_dtype=None, attention_backend=None),
        lambda made: list(reversed(made)),  # numbers tell the order, not the file
    ):
        changed = dataclasses.replace(measurements, launches=tuple(change(list(measurements.launches))))
        assert judge(changed, policy).verdict is Verdict.PASS


def test_a_cpu_has_the_clock_that_it_has(measurements: Measurements, policy: Policy) -> None:
    """Turbo and heat are a CPU's normal state; the same launches of a GPU are void."""
    turbo = clock({0: 3400.0, 3: 2100.0})(list(measurements.launches))
    hot = [dataclasses.replace(made, machine=dataclasses.replace(made.machine, throttled=("heat",))) for made in turbo]
    there = dataclasses.replace(measurements, launches=tuple(hot))
    assert judge(there, policy).verdict is Verdict.INVALID
    sides = {
        side: dataclasses.replace(getattr(there, side), hardware="cpu", device="AMD EPYC")
        for side in ("baseline", "candidate")
    }
    assert (
        judge(dataclasses.replace(there, **sides), dataclasses.replace(policy, hardware="cpu")).verdict is Verdict.PASS
    )
