"""Counters of speculative decoding, as vLLM 0.32 writes them under /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from quantmint.eval.errors import MeasurementError
from quantmint.pipeline.serving.running import counters as module
from quantmint.pipeline.serving.running.counters import DraftCounters, counters, drafts_since, read_drafts
from quantmint.pipeline.serving.running.server import RunningServer

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="model"}} {drafts}.0
vllm:spec_decode_num_drafts_total{{engine="1",model_name="model"}} 2.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="model"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="model"}} 1.2e+01
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="model"}} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="model",position="0"}} 4.0
vllm:generation_tokens_total{{engine="0",model_name="model"}} {generated}.0
"""


@dataclass(frozen=True, slots=True)
class Server(RunningServer):
    """Answers /metrics with the texts in turn; the last one stays."""

    texts: list[str] = field(default_factory=list)

    def get(self, path: str, *, timeout: float = 30.0) -> str:
        assert path == "/metrics"
        return self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]


def server(*texts: str) -> Server:
    return Server("model", "http://127.0.0.1:1", None, 0.0, texts=list(texts))


def test_engines_are_added_up_and_names_that_begin_alike_are_told_apart() -> None:
    values = counters(METRICS.format(drafts=4, generated=9))
    assert values["vllm:spec_decode_num_drafts"] == 6
    assert values["vllm:spec_decode_num_accepted_tokens"] == 5
    assert read_drafts(server(METRICS.format(drafts=4, generated=9))) == DraftCounters(6, 12, 5, 9)


def test_counters_that_lag_behind_their_answer_are_waited_for() -> None:
    before = DraftCounters(6, 12, 5, 9)
    late = server(
        *(METRICS.format(drafts=4, generated=tokens) for tokens in (9, 12)), METRICS.format(drafts=7, generated=17)
    )
    assert drafts_since(late, before, 8) == DraftCounters(3, 0, 0, 8)


@pytest.mark.parametrize("generated", [12, 99], ids=["fewer", "more"])
def test_tokens_of_other_requests_are_an_error(monkeypatch: pytest.MonkeyPatch, generated: int) -> None:
    monkeypatch.setattr(module, "_LIMIT_S", 0.1)
    with pytest.raises(MeasurementError, match="its counters are not of these requests alone"):
        drafts_since(server(METRICS.format(drafts=4, generated=generated)), DraftCounters(6, 12, 5, 9), 8)


def test_a_server_that_does_not_speculate_is_told_by_its_missing_counters() -> None:
    with pytest.raises(MeasurementError, match="no vllm:spec_decode_num_drafts: it does not speculate"):
        read_drafts(server('vllm:generation_tokens_total{engine="0"} 1.0\n'))
