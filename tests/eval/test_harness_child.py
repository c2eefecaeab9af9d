"""lm-eval itself, told batch by batch, against a stand-in for a server."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.eval import harness
from quantmint.eval.errors import MeasurementError
from quantmint.eval.harness import Asked, read_asked
from quantmint.eval.suites import SuiteTask
from tests.eval.completions import Completions

CHOICE: Mapping[str, Any] = {
    "task": "colours",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "colours.jsonl", "train": "examples.jsonl"}},
    "test_split": "test",
    "fewshot_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "num_fewshot": 3,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
SUMS: Mapping[str, Any] = {
    **CHOICE,
    "task": "sums",
    "output_type": "generate_until",
    "doc_to_choice": None,
    "doc_to_target": "7",
    "num_fewshot": 0,
    # What the suite asks for goes before this.
    "generation_kwargs": {"until": ["?"], "do_sample": True, "temperature": 0.7, "max_gen_toks": 9},
    "filter_list": [
        {"name": "number", "filter": [{"function": "regex", "regex_pattern": "([0-9]+)"}, {"function": "take_first"}]}
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TEXTS: Mapping[str, Any] = {
    "task": "texts",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "colours.jsonl"}},
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}],
}
COLOURS = SuiteTask("colours", "acc", 12, 0.03, cluster="passage")
WORDS = SuiteTask("texts", "word_perplexity", 12, 0.03, expected_spread=0.02)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a word; a BOS before every text, as Llama's tokenizer puts it; a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "user:", "red", "blue", "Colour", "Example", "is", *map(str, range(40))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = "{{ bos_token }} {% for m in messages %}user: {{ m.content }} {% endfor %}"
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for task in (CHOICE, SUMS, TEXTS, {**CHOICE, "task": "one", "num_fewshot": 0}, {**CHOICE, "task": "two"}):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(dict(task)))
    rows = [
        {"question": f"Colour {i} is", "choices": ["red", "blue"], "answer": i % 2, "passage": i // 4,
         "text": " ".join(str(word % 40) for word in range(i, i + 5 + 3 * i))}
        for i in range(12)
    ]  # fmt: skip
    examples = [{"question": f"Example {i} is", "choices": ["red", "blue"], "answer": i % 2} for i in range(30)]
    (folder / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    written = folder / "written"
    harness.materialise_tasks(folder, ["colours", "sums", "texts", "one", "two"], written)
    (written / "both.yaml").write_text(yaml.safe_dump({"group": "both", "task": ["one", "two"]}))
    return written


@pytest.fixture
def server() -> Iterator[Completions]:
    with Completions() as made:
        yield made


class Told:
    """The harness as its process uses it, with its news kept."""

    def __init__(
        self, server: Completions, tasks: Path, tokenizer: Path, folder: Path, seed: int = 7, length: int = 64
    ) -> None:
        from quantmint.eval.harness_child import TaskHarness

        self.news: list[Mapping[str, Any]] = []
        self.reply: Mapping[str, int] = {}
        self._folder = folder
        endpoint = harness.Endpoint(server.base_url, "m", tokenizer, length, seed, concurrency=3, batch_size=4)
        self._harness = TaskHarness(harness.opening(endpoint, tasks, only_ours=True)["open"], self.news.append)

    def load(self, task: SuiteTask) -> dict[str, Any]:
        return self._harness.load(task)

    def ask(self, task: SuiteTask, *numbers: int, leaf: str = "") -> Asked:
        self.load(task)
        path = self._folder / "batch.gz"
        self.reply = self._harness.ask(task.task, {leaf or task.task: list(numbers)}, path)
        return read_asked(path)


@pytest.fixture
def told(
    server: Completions, tasks: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Told]:
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    return lambda **options: Told(server, tasks, tokenizer, tmp_path, **options)


def hashes(asked: Asked) -> dict[int, str]:
    return {sample.doc_id: sample.prompt_hash for sample in asked.samples}


@pytest.mark.slow
def test_a_prompt_depends_on_its_document_and_the_seed_alone(server: Completions, told: Callable[..., Told]) -> None:
    """lm-eval itself draws few-shot examples from one stream for all documents of a call."""
    all_at_once = told().ask(COLOURS, *range(12))
    everything = set(server.prompts)
    server.asked.clear()
    some = told().ask(COLOURS, 3, 7, 8)
    assert hashes(some) == {n: hashes(all_at_once)[n] for n in (3, 7, 8)}
    assert len(server.prompts) == 6
    assert set(server.prompts) <= everything
    assert [s for s in all_at_once.samples if s.doc_id in (3, 7, 8)] == list(some.samples)
    examples = {shown["prompt"].rpartition("\n\n")[0] for shown in all_at_once.answers}
    assert len(examples) == 12  # three of thirty, drawn for each document
    assert hashes(told(seed=8).ask(COLOURS, 3)) != hashes(told().ask(COLOURS, 3))


def test_what_is_told_of_choices(told: Callable[..., Told]) -> None:
    one = told()
    loaded = one.load(COLOURS)
    (clusters,) = loaded["documents"].values()
    assert [clusters.index(name) for name in clusters] == [0] * 4 + [4] * 4 + [8] * 4
    assert loaded["datasets"] == []
    asked = one.ask(COLOURS, *range(12))
    assert [sample.cluster for sample in asked.samples] == clusters
    for sample, shown in zip(asked.samples, asked.answers, strict=True):
        assert sample.score == (shown["response"] == shown["target"])
        assert shown["response"] == shown["choices"][shown["loglikelihoods"].index(max(shown["loglikelihoods"]))]
    assert one.news[0] == {"expect": 24}
    assert sum(news.get("done", 0) for news in one.news) == 24
    assert {key: asked.settings[key] for key in ("temperature", "num_fewshot", "chat_template", "seed")} == {
        "temperature": None, "num_fewshot": 3, "chat_template": None, "seed": 7,
    }  # fmt: skip


def test_generation_is_greedy_whatever_the_task_says(server: Completions, told: Callable[..., Told]) -> None:
    task = SuiteTask("sums", "exact_match", 12, 0.03, filter="number", max_gen_tokens=5)
    asked = told().ask(task, 0, 1, 2)
    assert {(body["temperature"], body["max_tokens"], body["seed"]) for body in server.asked} == {(0, 5, 7)}
    assert asked.settings["temperature"] == 0
    for sample, shown in zip(asked.samples, asked.answers, strict=True):
        assert shown["response"].strip() == f"{shown['extracted']}."
        assert sample.score == (shown["extracted"] == "7")


def test_a_perplexity_is_the_one_that_the_server_stands_for(server: Completions, told: Callable[..., Told]) -> None:
    one = told()
    asked = one.ask(WORDS, 0, 2, 11)
    assert [sample.weight for sample in asked.samples] == [5.0, 11.0, 38.0]
    for sample, prompt in zip(asked.samples, sorted(server.prompts, key=len), strict=True):
        assert prompt[0] == 0 != prompt[1]  # one BOS to begin with
        (choice,) = server.choices({"prompt": [list(prompt)], "echo": True})
        assert sample.score == pytest.approx(math.fsum(choice["logprobs"]["token_logprobs"][1:-1]))
    assert asked.answers == ()
    assert one.news == [{"expect": 3}, {"done": 1}, {"done": 1}, {"done": 1}]


def test_prompts_that_were_cut_are_counted(server: Completions, told: Callable[..., Told]) -> None:
    """lm-eval cuts a prompt at its beginning and says nothing where text is generated."""
    sums = SuiteTask("sums", "exact_match", 12, 0.03, filter="number", max_gen_tokens=5)
    for length, full in ((64, 0), (8, 2)):
        one = told(length=length)
        one.ask(sums, 3, 4)
        assert one.reply == {"items": 2, "full": full}
    assert {len(prompt) for prompt in server.prompts} == {4, 2}  # <s> Colour 3 is; what is left of it
    one = told(length=9)
    one.ask(replace(COLOURS, num_fewshot=2), 0, 1)
    assert one.reply["full"] == 4
    one.ask(WORDS, 11)
    assert one.reply["full"] == 0


def test_a_bos_that_the_tokenizer_puts_is_put_once(server: Completions, told: Callable[..., Told]) -> None:
    asked = told().ask(replace(COLOURS, num_fewshot=0), 0)
    assert asked.settings["bos"] is True
    assert {prompt[:2] for prompt in server.prompts} == {(0, 5)}
    server.asked.clear()
    chat = told().ask(replace(COLOURS, chat=True), 0)
    assert {prompt[:3] for prompt in server.prompts} == {(0, 2, 6)}
    assert (chat.settings["bos"], len(chat.settings["chat_template"])) == (False, 64)


def test_a_group_is_asked_by_leaf(told: Callable[..., Told]) -> None:
    group = SuiteTask("both", "acc", 24, 0.03)
    one = told()
    assert {leaf: len(names) for leaf, names in one.load(group)["documents"].items()} == {"one": 12, "two": 12}
    asked = one.ask(group, 4, 5, leaf="two")
    assert [sample.key for sample in asked.samples] == [("two", 4, "none"), ("two", 5, "none")]


def test_requests_that_were_in_flight_when_one_failed_tell_of_that_one(
    server: Completions, tasks: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own failure, of a connection that was closed, is what a log would end with."""
    from aiohttp import ClientResponseError, ClientSession

    from quantmint.eval.harness_client import CountingClient

    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    endpoint = harness.Endpoint(server.base_url, "m", tokenizer, 64, 7)
    client = CountingClient(endpoint.model_arguments(), lambda _: None, lambda _: None)
    arrived, over = threading.Event(), threading.Event()

    def hold(body: dict[str, Any]) -> None:
        if len(body["prompt"]) == 2:
            arrived.set()
            over.wait(60)

    async def scene() -> BaseException | None:
        async with ClientSession() as session:
            room = asyncio.Semaphore(2)
            options: dict[str, Any] = {"generate": True, "gen_kwargs": {"max_gen_toks": 4}}
            held = asyncio.create_task(client.amodel_call(session, room, [[1], [2]], **options))
            assert await asyncio.to_thread(arrived.wait, 60)
            with pytest.raises(ClientResponseError, match="500"):
                await client.amodel_call(session, room, [[3]], **options)
        await asyncio.wait([held])
        return held.exception()

    server.fail_after, server.meanwhile = 0, hold
    try:
        seen = asyncio.run(scene())
    finally:
        over.set()
    assert isinstance(seen, ClientResponseError)
    assert seen.status == 500


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (replace(COLOURS, task="colors"), "lm-eval has no task 'colors'"),
        (
            replace(COLOURS, cluster="topic"),
            "colours#0 has no field 'topic' to cluster by; there are question, choices",
        ),
        (replace(COLOURS, metric="acc_norm"), "colours#0: no metric 'acc_norm'"),
        (replace(COLOURS, filter="strict-match"), "no sample with filter 'strict-match'; there are ['none']"),
    ],
)
def test_what_cannot_be_measured_is_refused(told: Callable[..., Told], task: SuiteTask, words: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        told().ask(task, 0)
    assert words in str(caught.value)
