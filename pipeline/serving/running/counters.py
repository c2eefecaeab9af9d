"""Read the counters of speculative decoding that a running vLLM shows under /metrics.

    >>> counters('vllm:spec_decode_num_drafts_total{engine="0",model_name="model"} 12.0')
    {'vllm:spec_decode_num_drafts': 12.0}

Counters of several engines are added up. vLLM counts a step when it hands the step's tokens on, so that the counters
of an answer may follow the answer by some milliseconds.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Self

from quantmint.eval.errors import MeasurementError
from quantmint.pipeline.serving.running.server import RunningServer

_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*?)(?:_total)?(?:\{[^}]*\})? (?P<value>[-+.\dEe]+)$", re.M)
_DRAFTS = "vllm:spec_decode_num_drafts"
_PROPOSED = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_GENERATED = "vllm:generation_tokens"
_POLL_S, _LIMIT_S = 0.02, 10.0


def counters(text: str) -> dict[str, float]:
    """Return the sum of each metric's samples over all labels, by the metric's name without ``_total``."""
    sums: defaultdict[str, float] = defaultdict(float)
    for line in _LINE.finditer(text):
        sums[line["name"]] += float(line["value"])
    return dict(sums)


@dataclass(frozen=True, slots=True)
class DraftCounters:
    """The counters of a server: drafts, tokens proposed in them, tokens accepted, and all tokens of its answers."""

    drafts: int
    proposed: int
    accepted: int
    generated: int

    def __sub__(self, earlier: Self) -> DraftCounters:
        return DraftCounters(
            self.drafts - earlier.drafts,
            self.proposed - earlier.proposed,
            self.accepted - earlier.accepted,
            self.generated - earlier.generated,
        )


def read_drafts(server: RunningServer) -> DraftCounters:
    """Return the counters of a server now.

    Raises `MeasurementError` for a server without counters of drafts: it was not started with speculative decoding.
    """
    values = counters(server.get("/metrics"))
    absent = [name for name in (_DRAFTS, _PROPOSED, _ACCEPTED, _GENERATED) if name not in values]
    if absent:
        raise MeasurementError(f"the server's /metrics has no {absent[0]}: it does not speculate, or counts nothing")
    return DraftCounters(*(int(values[name]) for name in (_DRAFTS, _PROPOSED, _ACCEPTED, _GENERATED)))


def drafts_since(server: RunningServer, before: DraftCounters, tokens: int) -> DraftCounters:
    """Return how far the counters went on since ``before``, once ``tokens`` tokens of answers are counted.

    Raises `MeasurementError` where another number of tokens is counted: other requests are answered meanwhile.
    """
    end = time.monotonic() + _LIMIT_S
    while (change := read_drafts(server) - before).generated < tokens and time.monotonic() < end:
        time.sleep(_POLL_S)
    if change.generated != tokens:
        raise MeasurementError(
            f"the server answered with {tokens} tokens and counted {change.generated}: its counters are not of these "
            "requests alone"
        )
    return change
