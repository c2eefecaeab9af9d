"""Running lm-eval against a completions endpoint, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from eval.errors import DefinitionError, MeasurementError
from eval.harness_log import read_log
from eval.samples import SampleSet
from eval.suites import SuiteTask


def materialise_tasks(tasks_dir: Path, names: Iterable[str], destination: Path) -> tuple[str, ...]:
    """Copy our own task files so that `--include_path destination` finds them from any working directory.

    `datasets` resolves `data_files` against the working directory, so they become absolute. Names without a file in
    `tasks_dir` belong to lm-eval itself. Returns the names that were written; `DefinitionError` for a broken file.
    """
    destination.mkdir(parents=True, exist_ok=True)
    written = []
    for name in names:
        source = tasks_dir / f"{name}.yaml"
        if not source.is_file():
            continue
        try:
            task: dict[str, Any] = yaml.safe_load(source.read_text(encoding="utf-8"))
            files = task["dataset_kwargs"]["data_files"]
            if task["task"] != name:
                raise DefinitionError(f"{source}: 'task' must be the file's name, {name!r}, found {task['task']!r}")
            task["dataset_kwargs"]["data_files"] = _absolute(source, files)
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise DefinitionError(f"{source}: not a local lm-eval task with data_files: {error}") from error
        text = yaml.safe_dump(task, sort_keys=False, allow_unicode=True)
        (destination / source.name).write_text(text, encoding="utf-8")
        written.append(name)
    return tuple(written)


def _absolute(source: Path, files: Any) -> Any:
    if isinstance(files, dict):
        return {split: _absolute(source, name) for split, name in files.items()}
    if isinstance(files, list):
        return [_absolute(source, name) for name in files]
    path = (source.parent / str(files)).resolve()
    if not path.is_file():
        raise DefinitionError(f"{source}: data file {path} does not exist")
    return str(path)


def command(
    python: str | Path,
    task: SuiteTask,
    *,
    base_url: str,
    model_name: str,
    tokenizer_path: str | Path,
    output_dir: Path,
    include_path: Path | None = None,
    limit: int | None = None,
    num_concurrent: int = 8,
    batch_size: int = 32,
    max_length: int = 2048,
    seed: int = 1234,
) -> list[str]:
    """Argument list that evaluates one task of a suite and logs its samples below `output_dir`.

    `base_url` is the server without `/v1`; `max_length` its maximum length in tokens. Prompts go out as token ids, so
    the server's tokenizer has no say. `batch_size` prompts share one HTTP request: parsing and scheduling a list is
    far cheaper than as many requests, above all for the four one-line requests that a multiple-choice item makes.
    Generation is greedy, and the seed fixes the few-shot examples.
    """
    values = {
        "model": model_name,
        "base_url": f"{base_url.rstrip('/')}/v1/completions",
        "tokenizer": str(tokenizer_path),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": "True",
        "num_concurrent": str(num_concurrent),
        "max_retries": "3",
        "max_length": str(max_length),
        "timeout": "3600",
    }
    for key, value in values.items():
        if "," in value:
            raise MeasurementError(f"{key} {value!r} holds a comma, which lm-eval's model arguments cannot carry")
    arguments = [
        str(python), "-m", "lm_eval", "run",
        "--model", "local-completions",
        "--model_args", ",".join(f"{key}={value}" for key, value in values.items()),
        "--tasks", task.task,
        "--batch_size", str(batch_size),
        "--seed", str(seed),
        "--output_path", str(output_dir),
        "--log_samples",
    ]  # fmt: skip
    generation = ["temperature=0"]
    if task.max_gen_tokens is not None:
        generation.append(f"max_gen_toks={task.max_gen_tokens}")
    arguments += ["--gen_kwargs", ",".join(generation)]
    if include_path is not None:
        arguments += ["--include_path", str(include_path)]
    if task.num_fewshot is not None:
        arguments += ["--num_fewshot", str(task.num_fewshot)]
    if limit is not None:
        arguments += ["--limit", str(limit)]
    if task.chat:
        arguments.append("--apply_chat_template")
    return arguments


def read_samples(output_dir: Path, task: str, metric: str, filter_name: str = "none") -> SampleSet:
    """Read what one run of `command` logged for a task, or for all tasks of a group.

    lm-eval writes `<output_dir>/<model>/samples_<leaf task>_<time>.jsonl`. Since one run has one task or group of the
    suite, every file below belongs to it. Raises `MeasurementError` where there is none, or two of one leaf task.
    """
    logs: dict[str, Path] = {}
    for path in sorted(output_dir.rglob("samples_*.jsonl")):
        leaf = path.stem.removeprefix("samples_").rsplit("_", 1)[0]
        if leaf in logs:
            raise MeasurementError(f"{output_dir}: two logs of {leaf}: {logs[leaf].name}, {path.name}")
        logs[leaf] = path
    if not logs:
        raise MeasurementError(f"{output_dir}: no samples of {task}; did lm-eval end early?")
    return SampleSet(
        task,
        metric,
        tuple(sample for leaf, path in logs.items() for sample in read_log(path, leaf, metric, filter_name)),
    )
