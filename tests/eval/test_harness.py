"""lm-eval itself parses our command and writes the logs that we read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from eval import harness
from eval.errors import DefinitionError, MeasurementError
from eval.suites import SuiteTask

CHOICE = {
    "task": "colours",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "colours.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "colours.yaml").write_text(yaml.safe_dump(CHOICE))
    rows = [{"question": f"Colour {i} is", "choices": ["red", "blue"], "answer": i % 2} for i in range(12)]
    (folder / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(tmp_path: Path, **changes: object) -> list[str]:
    task = SuiteTask("colours", "acc", 12, 0.03, num_fewshot=0, max_gen_tokens=64, chat=True)
    settings: dict[str, object] = {
        "base_url": "http://127.0.0.1:8000/", "model_name": "base", "tokenizer_path": tmp_path / "model",
        "output_dir": tmp_path / "out", "include_path": tmp_path / "tasks", "limit": 5, "num_concurrent": 4,
        "batch_size": 256, "max_length": 512, "seed": 7,
    }  # fmt: skip
    return harness.command(sys.executable, task, **(settings | changes))  # type: ignore[arg-type]


def parsed(argv: list[str]) -> Namespace:
    """What lm-eval's own parser makes of the arguments."""
    from lm_eval._cli import HarnessCLI

    assert argv[1:3] == ["-m", "lm_eval"]
    namespace: Namespace = HarnessCLI()._parser.parse_args(argv[3:])
    return namespace


def test_lm_eval_understands_the_command(tmp_path: Path) -> None:
    from lm_eval.config.evaluate_config import EvaluatorConfig

    arguments = parsed(command(tmp_path))
    assert arguments.model == "local-completions"
    assert arguments.tasks == ["colours"]
    assert arguments.model_args == {
        "model": "base", "base_url": "http://127.0.0.1:8000/v1/completions", "tokenizer": str(tmp_path / "model"),
        "tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 4, "max_retries": 3,
        "max_length": 512, "timeout": 3600,
    }  # fmt: skip
    assert arguments.gen_kwargs == {"temperature": 0, "max_gen_toks": 64}
    assert (arguments.num_fewshot, arguments.limit, arguments.seed) == (0, 5, [7] * 4)
    assert (arguments.log_samples, arguments.apply_chat_template) == (True, True)
    config = EvaluatorConfig.from_cli(arguments)
    assert (config.batch_size, config.output_path, config.num_fewshot) == ("256", str(tmp_path / "out"), 0)


@pytest.mark.slow
def test_lm_evals_client_accepts_the_model_arguments(tmp_path: Path) -> None:
    """The server is never called here; the client builds itself from our arguments."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "red": 2}, unk_token="<s>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        tmp_path / "model"
    )
    arguments = parsed(command(tmp_path))
    client = LocalCompletionsAPI(**arguments.model_args, batch_size=arguments.batch_size)
    assert (client._batch_size, client._concurrent, client.max_length) == (256, 4, 511)
    assert client.tokenized_requests is True
    payload = client._create_payload([[2]], generate=True, gen_kwargs=dict(arguments.gen_kwargs), eos="</s>")
    assert (payload["temperature"], payload["max_tokens"]) == (0, 64)


def test_commas_in_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="holds a comma"):
        command(tmp_path, tokenizer_path="models/a,b")


def run(tmp_path: Path, tasks: Path, out: Path) -> subprocess.CompletedProcess[str]:
    written = harness.materialise_tasks(tasks, ["colours", "gsm8k"], tmp_path / "include")
    assert written == ("colours",)
    argv = harness.command(
        sys.executable, SuiteTask("colours", "acc", 12, 0.03), base_url="http://127.0.0.1:1", model_name="m",
        tokenizer_path="t", output_dir=out, include_path=tmp_path / "include",
    )  # fmt: skip
    # The same command with lm-eval's own model of random scores in place of a server.
    argv[argv.index("local-completions")] = "dummy"
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    return subprocess.run(
        argv, cwd=tmp_path / "elsewhere", env={**os.environ, **offline}, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_logs_of_a_real_run(tmp_path: Path, tasks: Path) -> None:
    out = tmp_path / "out"
    done = run(tmp_path, tasks, out)
    assert done.returncode == 0, done.stderr[-2000:]
    found = harness.read_samples(out, "colours", "acc")
    assert [sample.doc_id for sample in found.samples] == list(range(12))
    (results,) = out.rglob("results_*.json")
    mean = sum(sample.score for sample in found.samples) / 12
    assert json.loads(results.read_text())["results"]["colours"]["acc,none"] == pytest.approx(mean)
    assert len({sample.prompt_hash for sample in found.samples}) == 12
    with pytest.raises(MeasurementError, match="no metric 'acc_norm'"):
        harness.read_samples(out, "colours", "acc_norm")
    with pytest.raises(MeasurementError, match="no sample with filter 'strict-match'"):
        harness.read_samples(out, "colours", "acc", "strict-match")
    # A second attempt into the same folder must not be mixed with the first.
    (log,) = out.rglob("samples_*.jsonl")
    (log.parent / "samples_colours_2099-01-01T00-00-00.jsonl").write_text(log.read_text())
    with pytest.raises(MeasurementError, match="two logs of colours"):
        harness.read_samples(out, "colours", "acc")


def test_groups_are_read_as_one(tmp_path: Path) -> None:
    for leaf in ("mmlu_law", "mmlu_art_history"):
        row = {
            "doc_id": 0, "filter": "none", "metrics": ["acc"], "acc": 1.0,
            "doc_hash": "a" * 64, "prompt_hash": "b" * 64, "target_hash": "c" * 64,
        }  # fmt: skip
        (tmp_path / f"samples_{leaf}_2026-01-01T00-00-00.123.jsonl").write_text(json.dumps(row) + "\n")
    found = harness.read_samples(tmp_path, "mmlu", "acc")
    assert {sample.key for sample in found.samples} == {("mmlu_law", 0, "none"), ("mmlu_art_history", 0, "none")}


def test_an_empty_folder_is_not_a_measurement(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="no samples of colours"):
        harness.read_samples(tmp_path, "colours", "acc")


def test_data_files_become_absolute_in_every_form(tmp_path: Path, tasks: Path) -> None:
    for files in ("colours.jsonl", ["colours.jsonl"], {"test": ["colours.jsonl"]}):
        (tasks / "colours.yaml").write_text(yaml.safe_dump(CHOICE | {"dataset_kwargs": {"data_files": files}}))
        harness.materialise_tasks(tasks, ["colours"], tmp_path / "include")
        text = (tmp_path / "include" / "colours.yaml").read_text()
        assert str(tasks / "colours.jsonl") in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset_kwargs": {"data_files": "gone.jsonl"}}, "gone.jsonl does not exist"),
        ({"dataset_kwargs": {}}, "not a local lm-eval task with data_files"),
        ({"task": "colors"}, "'task' must be the file's name, 'colours'"),
    ],
)
def test_broken_task_files(tmp_path: Path, tasks: Path, change: dict[str, object], words: str) -> None:
    (tasks / "colours.yaml").write_text(yaml.safe_dump(CHOICE | change))
    with pytest.raises(DefinitionError, match=words):
        harness.materialise_tasks(tasks, ["colours"], tmp_path / "include")
