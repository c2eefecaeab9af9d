"""What lm-eval is answered: as one forward pass says, whatever shares a batch, and as transformers generates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.reference.lm import (
    ReferenceLM,
    divergences,
    keep_logprobs,
    load_tokenizer,
    logits_of,
    prompt_logprobs,
)
from quantmint.pipeline.serving.reference.model import ReferenceModel, load

CONTEXTS = ("w5 w6 w7", "w9", "w40 w41 w42 w43 w44 w45 w46", "w9 w10")
END = "w2"
ARGUMENTS = {"max_length": 64, "batch_size": 4}


class Model:
    """The runtime's model of lm-eval, with its news kept."""

    def __init__(self, loaded: ReferenceModel, folder: Path, **arguments: int) -> None:
        self.expected: list[int] = []
        self.done: list[int] = []
        tokenizer = load_tokenizer(folder, loaded)
        self.lm = ReferenceLM(loaded, tokenizer, {**ARGUMENTS, **arguments}, self.expected.append, self.done.append)
        self.lm.add_bos_token = False

    def ids(self, text: str) -> list[int]:
        return list(self.lm.tok_encode(text))

    def likelihoods(self, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = self.lm.loglikelihood([_instance("loglikelihood", *pair) for pair in pairs])
        return found

    def texts(self, *prompts: str, **options: Any) -> list[str]:
        given = {"until": [], "max_gen_toks": 6, "temperature": 0, **options}
        found: list[str] = self.lm.generate_until([_instance("generate_until", prompt, given) for prompt in prompts])
        return found


def _instance(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]


def said(loaded: ReferenceModel, ids: list[int], last: int) -> float:
    """The log probability of the last tokens, from one pass over these ids alone."""
    logprobs = logits_of(loaded, torch.tensor([ids]))[0, :-1].log_softmax(-1)
    return float(logprobs.gather(1, torch.tensor(ids[1:])[:, None])[-last:].sum())


@pytest.mark.parametrize("scheme", ["none", "ptpc_fp8"])
def test_a_likelihood_is_that_of_one_forward_whatever_shares_the_batch(
    llama: ReferenceModel, models: Any, quantize: Any, scheme: str
) -> None:
    folder = models("llama") if scheme == "none" else quantize("llama", "compressed-tensors").folder
    loaded = llama if scheme == "none" else load(folder, "cpu")
    assert bool(loaded.kv_scales) is (scheme != "none")
    model = Model(loaded, folder)
    pairs = [(context, choice) for context in CONTEXTS for choice in (" w8", " w8 w21", " w30")]
    found = model.likelihoods(*pairs)
    for (context, choice), (likelihood, greedy) in zip(pairs, found, strict=True):
        ids, last = model.ids(context + choice), len(model.ids(choice))
        assert likelihood == pytest.approx(said(loaded, ids, last), abs=1e-3)
        assert greedy is (logits_of(loaded, torch.tensor([ids]))[0, -last - 1 : -1].argmax(-1).tolist() == ids[-last:])
    assert (model.expected, sum(model.done)) == ([12], 12)
    assert model.lm.full == 0


def test_a_text_is_read_in_windows_and_counted_once(llama: ReferenceModel, models: Any) -> None:
    model = Model(llama, models("llama"), max_length=8)
    text = " ".join(f"w{number}" for number in range(4, 24))
    (found,) = model.lm.loglikelihood_rolling([_instance("loglikelihood_rolling", text)])
    assert found < 0
    assert (model.expected, model.done) == ([1], [1])
    assert model.lm.full == 0, "its windows are full by design"


@pytest.mark.parametrize("scheme", ["none", "ptpc_fp8"])
def test_generation_is_greedy_and_that_of_the_prompt_alone(
    llama: ReferenceModel, models: Any, quantize: Any, scheme: str
) -> None:
    folder = models("llama") if scheme == "none" else quantize("llama", "compressed-tensors").folder
    loaded = llama if scheme == "none" else load(folder, "cpu")
    model = Model(loaded, folder)
    found = model.texts(*CONTEXTS)
    assert len({*found, ""}) > 2
    for context, text in zip(CONTEXTS, found, strict=True):
        ids = model.ids(context)
        for _ in range(6):
            ids.append(int(logits_of(loaded, torch.tensor([ids]))[0, -1].argmax()))
        # lm-eval stops at the text of the end token, with which words begin here.
        expected, *_ = model.lm.tok_decode(ids[-6:]).split(END)
        assert text.split() == expected.split()
    assert model.lm.temperatures == {0.0}
    assert (model.expected, sum(model.done)) == ([4], 4)


def test_an_answer_ends_before_a_string(llama: ReferenceModel, models: Any) -> None:
    model = Model(llama, models("llama"))
    (free,) = model.texts(CONTEXTS[2])
    stop = free.split()[2]
    (cut,) = model.texts(CONTEXTS[2], until=[stop])
    assert cut == free[: free.index(stop)]


def test_prompts_that_may_have_been_cut_are_counted(llama: ReferenceModel, models: Any) -> None:
    model = Model(llama, models("llama"), max_length=8)
    model.likelihoods((CONTEXTS[2], " w8"), (CONTEXTS[1], " w8"))
    assert model.lm.full == 1
    model.lm.full = 0
    model.texts(CONTEXTS[2], CONTEXTS[1], max_gen_toks=2)
    assert model.lm.full == 1


def test_what_the_canary_reads_is_one_forward(llama: ReferenceModel) -> None:
    ids = [5, 77, 300, 12, 40]
    first, *positions = prompt_logprobs(llama, ids, 20)
    expected = logits_of(llama, torch.tensor([ids]))[0].log_softmax(-1)
    assert first is None
    for place, position in enumerate(positions):
        assert position is not None
        likeliest = expected[place].topk(20).indices.tolist()
        assert set(map(int, position)) == {*likeliest, ids[place + 1]}
        for token, told in position.items():
            assert told["logprob"] == pytest.approx(float(expected[place, int(token)]), abs=1e-6)


def test_the_cache_is_rounded(quantize: Any) -> None:
    loaded = load(quantize("llama", "compressed-tensors").folder, "cpu")
    ids = torch.arange(4, 34)[None]
    one = logits_of(loaded, ids)
    plain = logits_of(replace(loaded, kv_scales={}), ids)
    coarse = logits_of(replace(loaded, kv_scales=dict.fromkeys(loaded.kv_scales, (100.0, 100.0))), ids)
    assert 0 < (one - plain).abs().sum() < (coarse - plain).abs().sum()


def test_a_folder_without_a_tokenizer_is_told(llama: ReferenceModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its tokenizer cannot be loaded"):
        load_tokenizer(tmp_path, llama)


def test_the_file_of_generation_says_where_answers_end_and_nothing_else(
    llama: ReferenceModel, models: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(models("llama"), tmp_path / "model")
    settings: Mapping[str, Any] = {"eos_token_id": [2, 9], "repetition_penalty": 1.3, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    load_tokenizer(folder, llama)
    config = llama.model.generation_config
    assert {2, 9} <= set(config.eos_token_id)
    assert config.repetition_penalty in (None, 1.0)
    assert not config.do_sample


def test_divergences_are_those_of_the_whole_vocabulary(
    llama: ReferenceModel, quantize: Any, models: Any, tmp_path: Path
) -> None:
    candidate = load(quantize("llama", "compressed-tensors").folder, "cpu")
    ids, places, path = list(range(4, 40)), (3, 10, 20, 34), str(tmp_path / "baseline.npy")
    keep_logprobs(llama, ids, places, path)
    expected = []
    for place in places:
        first, other = (
            logits_of(side, torch.tensor([ids[: place + 1]]))[0, -1].double().log_softmax(-1)
            for side in (llama, candidate)
        )
        expected.append(float((first.exp() * (first - other)).sum()))
    assert divergences(candidate, ids, places, path) == pytest.approx(expected, rel=1e-3)
    assert min(expected) > 1e-5
    assert divergences(llama, ids, places, path) == pytest.approx([0.0] * len(places), abs=1e-9)
