"""SGLang's forms, read: log probabilities of a prompt, names and folders, earlier versions, and what is no SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.eval.harness_client import SglangClient
from quantmint.pipeline.base.errors import ServingError
from quantmint.pipeline.serving.running.dialect import SGLANG, VLLM, dialect_of
from quantmint.pipeline.serving.running.endpoint import EndpointLauncher
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.serving.sglang import sglang_plan
from quantmint.pipeline.stages.canary import read_prompt
from tests.serving.served.cases import MODEL
from tests.serving.sglang_server import SglangServer

IDS = [3, 1, 4, 1, 5]


class Fixed:
    """A model whose logits at position i are row i of ``table``."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __call__(self, ids: torch.Tensor) -> Any:
        return type("Output", (), {"logits": self.table[None, : ids.shape[1]]})


class Plain:
    def decode(self, ids: list[int], **_: Any) -> str:
        return str(ids)


TABLE = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def sglang() -> Iterator[SglangServer]:
    with SglangServer(Fixed(TABLE), Plain(), MODEL) as server:
        yield server


def running(server: SglangServer) -> RunningServer:
    return RunningServer("model", server.url, None, 0.0, dialect=SGLANG)


def test_log_probabilities_of_a_prompt_are_the_models(sglang: SglangServer) -> None:
    answer = read_prompt(running(sglang), "p", IDS, 3)
    expected = TABLE.double().log_softmax(-1)
    assert answer.actual == pytest.approx([float(expected[at, token]) for at, token in enumerate(IDS[1:])], abs=1e-4)
    assert [list(row) for row in answer.tokens] == expected[:4].topk(3, dim=-1).indices.tolist()
    (body,) = sglang.bodies
    assert body == {
        "input_ids": IDS,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
    }


def test_values_that_are_not_finite_are_a_silent_answer(sglang: SglangServer) -> None:
    sglang.model = Fixed(torch.full((8, 12), float("nan")))
    assert read_prompt(running(sglang), "p", IDS, 3).actual == ()


def test_answers_for_other_tokens_are_refused(sglang: SglangServer) -> None:
    right = sglang.generated
    sglang.generated = lambda body: right({**body, "input_ids": body["input_ids"][:-1]})  # type: ignore[method-assign]
    with pytest.raises(ServingError, match="for 4 tokens, expected those of the prompt, 5"):
        read_prompt(running(sglang), "p", IDS, 3)


def test_earlier_versions_name_themselves_under_another_path(sglang: SglangServer) -> None:
    sglang.earlier = True
    assert running(sglang).version() == "0.5.9"
    assert [path for path, _ in sglang.asked] == ["/server_info", "/get_server_info"]


def plan(folder: Path = MODEL, length: int = 512) -> Any:
    return sglang_plan(folder, served_model_name="model", max_model_len=length, kv_cache_dtype="auto")


def test_another_folder_or_a_shorter_context_is_refused(sglang: SglangServer, tmp_path: Path) -> None:
    launcher = EndpointLauncher(sglang.url, SGLANG)
    assert launcher.attach(plan()).model_name == "model"
    with pytest.raises(ServingError, match=f"it serves {MODEL}, expected {tmp_path}"):
        launcher.attach(plan(tmp_path))
    with pytest.raises(ServingError, match=r"it takes 512 tokens, expected 513 \(--context-length\)"):
        launcher.attach(plan(length=513))


def test_names_of_runtimes() -> None:
    assert (dialect_of("vllm"), dialect_of("sglang")) == (VLLM, SGLANG)
    with pytest.raises(ValueError, match="found runtime 'sglan', expected vllm or sglang"):
        dialect_of("sglan")


def entry(value: float | None, token: int) -> list[Any]:
    return [value, token, None]


def test_lm_evals_client_sums_the_continuation_and_knows_the_likeliest() -> None:
    tokens = [entry(None, 7), entry(-1.0, 8), entry(-0.5, 9), entry(-2.0, 5)]
    tops = [None, [entry(-0.1, 1)], [entry(-0.5, 9)], [entry(-0.3, 2)]]
    answer = {"meta_info": {"input_token_logprobs": tokens, "input_top_logprobs": tops}}
    prompt = [7, 8, 9, 5]
    scores = SglangClient.parse_logprobs([answer, answer], [prompt, prompt], [2, 3])
    assert scores == [(-2.5, False), (-2.0, False)]
    shorter = {"meta_info": {"input_token_logprobs": tokens[:3], "input_top_logprobs": tops[:3]}}
    assert SglangClient.parse_logprobs([shorter], [prompt[:3]], [2]) == [(-0.5, True)]
    with pytest.raises(ValueError, match="answered for 3 tokens, expected the prompt's 4"):
        SglangClient.parse_logprobs([shorter], [prompt], [2])
