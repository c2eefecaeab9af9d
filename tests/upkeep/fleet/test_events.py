from __future__ import annotations

from typing import Any

from quantmint.pipeline.upkeep.fleet.events import Event, line_of


def event(kind: Any, recipe: str = "llama8b-ptpc", **facts: Any) -> Event:
    return Event(kind=kind, recipe=recipe, at="2026-11-21T03:00:00Z", queued=0, running=1, **facts)


EVENTS = [
    event("queued", reason="base 1a2b3c4 -> 5d6e7f8"),
    event("queued", "qwen-mxfp4", reason="never released"),
    event("started", attempt=1),
    event("stage", stage="3/12 quantize", attempt=1),
    event("retrying", attempt=1, wait_s=60.0, reason="the Hub answers [503]"),
    event("started", attempt=2),
    event("stage", stage="4/12 inspect", attempt=2),
    event(
        "finished",
        "qwen-mxfp4",
        attempt=1,
        state="failed",
        exit_code=5,
        duration_s=4000.0,
        reason="no such flag: " + "x" * 200,
        log="store/refresh/logs/a.log",
    ),
]
PASSED = event(
    "finished", attempt=2, state="ran", verdict="PASS", exit_code=0, duration_s=700.0, tag="v20261121-00000001"
)


def test_lines_for_a_log() -> None:
    assert [line_of(one) for one in [*EVENTS[:6], PASSED]] == [
        "llama8b-ptpc: queued: base 1a2b3c4 -> 5d6e7f8",
        "qwen-mxfp4: queued: never released",
        "llama8b-ptpc: started",
        "llama8b-ptpc: [3/12 quantize]",
        "llama8b-ptpc: failed, tried again in 1 min 00 s: the Hub answers [503]",
        "llama8b-ptpc: started, attempt 2",
        "llama8b-ptpc: PASS in 11 min 40 s, released v20261121-00000001",
    ]
    assert str(line_of(EVENTS[-1])).startswith("qwen-mxfp4: failed with exit code 5 in 1 h 06 min: no such flag")
    assert str(line_of(EVENTS[-1])).endswith("(log: store/refresh/logs/a.log)")
    held = event("held", state="held", verdict="FAIL", exit_code=1, reason="judged before")
    assert line_of(held) == "llama8b-ptpc: held: judged before"
