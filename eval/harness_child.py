"""lm-eval in a process of its own, told what to ask batch by batch: ``python -m quantmint.eval.harness_child SOCKET``.

One process for all tasks and batches of a stage: importing lm-eval and reading its index of tasks takes longer than
many a batch. Messages are JSON lines on a Unix socket (`eval.harness` writes them). Each is answered by one line,
``{"reply": ...}``, or ``{"refused": why}`` where what was asked for cannot be measured; lines ``{"expect": n}`` and
``{"done": n}`` count requests before it. Whatever else goes wrong ends the process, with its traceback in the log.

A prompt depends on its document and the seed alone. lm-eval draws few-shot examples from one stream for all documents
of a call, so that a document's prompt would depend on those that are asked with it; here the stream begins anew for
each document, at a seed of its own. So a batch that is asked again, after an interruption or as a control, is the same.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantmint.eval.errors import MeasurementError
from quantmint.eval.foreign import sandbox_templates
from quantmint.eval.harness import Asked, answer, digest, read_rows, write_asked
from quantmint.eval.samples import Sample
from quantmint.eval.suites import SuiteTask

_CREDENTIALS = struct.calcsize("3i")
Tell = Callable[[Mapping[str, Any]], None]
Model = Callable[[Mapping[str, Any], Callable[[int], None], Callable[[int], None]], Any]
"""A model of lm-eval from its arguments, and from what is told of requests as they come to be and are done."""


class TaskHarness:
    """lm-eval with its model and the tasks loaded so far."""

    def __init__(self, opening: Mapping[str, Any], tell: Tell, model: Model | None = None) -> None:
        from lm_eval import evaluator
        from lm_eval.tasks import TaskManager

        from quantmint.eval.harness_client import client_of

        sandbox_templates()
        # After each batch it would run pip, nvcc and lscpu; what a stage ran on is kept beside its samples, once.
        evaluator.add_env_info = lambda _: None
        self._seed: int = opening["seed"]
        self._manager = TaskManager(include_path=opening["include_path"], include_defaults=not opening["only_ours"])
        self._model: Any = (model or client_of(opening.get("runtime", "vllm")))(
            opening["model"], lambda count: tell({"expect": count}), lambda count: tell({"done": count})
        )
        self._loaded: dict[str, tuple[SuiteTask, dict[str, Any], dict[str, list[str]]]] = {}

    def load(self, task: SuiteTask, commits: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        """Load a task, or the leaf tasks of a group, and return the reply to `eval.harness.loading`.

        ``commits`` maps data sets of the Hub to the commits to read. Raises `MeasurementError` for a task that lm-eval
        does not have, for another commit than asked for, and for a document without the field to cluster by.
        """
        self._reseed()
        if task.task not in self._manager.all_tasks:
            raise MeasurementError(f"lm-eval has no task {task.task!r}")
        with reading(commits):
            leaves: dict[str, Any] = self._manager.load([task.task])["tasks"]
        for leaf in leaves.values():
            _fix_documents(leaf)
            _fix_prompts(leaf, self._seed)
        clusters = {name: _clusters(leaf, task.cluster) for name, leaf in leaves.items()}
        self._loaded[task.task] = (task, leaves, clusters)
        datasets_read = (dataset_of(leaf, commits) for leaf in leaves.values())
        datasets = {repr(dataset): dataset for dataset in datasets_read if dataset is not None}
        return {"documents": clusters, "datasets": [datasets[key] for key in sorted(datasets)]}

    def ask(self, name: str, documents: Mapping[str, list[int]], destination: Path) -> dict[str, Any]:
        """Ask documents, given by leaf task, of the loaded task ``name``, and write the batch to ``destination``.

        Returns the reply to `eval.harness.asking`. Raises `MeasurementError` for a missing metric or a value that is
        not finite.
        """
        import lm_eval

        task, leaves, clusters = self._loaded[name]
        tasks = [leaves[leaf] for leaf in documents]
        kinds = {leaf.OUTPUT_TYPE for leaf in tasks}
        bos = self._model.begins_with_bos() and not task.chat and kinds != {"loglikelihood_rolling"}
        self._model.add_bos_token = bos
        self._model.temperatures.clear()
        self._model.full = 0
        generation = {"temperature": 0}
        if task.max_gen_tokens is not None:
            generation["max_gen_toks"] = task.max_gen_tokens
        results = lm_eval.simple_evaluate(
            self._model,
            tasks=tasks,
            task_manager=self._manager,
            samples=dict(documents),
            num_fewshot=task.num_fewshot,
            gen_kwargs=generation if "generate_until" in kinds else None,
            apply_chat_template=task.chat,
            fewshot_as_multiturn=task.chat,
            random_seed=self._seed,
            numpy_random_seed=self._seed,
            torch_random_seed=self._seed,
            fewshot_random_seed=self._seed,
            bootstrap_iters=0,
            log_samples=True,
        )
        samples: list[Sample] = []
        answers: list[dict[str, Any]] = []
        for leaf in documents:
            rows = results["samples"][leaf]
            samples += read_rows(rows, leaf, task, clusters[leaf])
            if task.kind == "score":
                answers += [
                    answer(row, leaf, task, _choices(leaves[leaf], row)) for row in rows if row["filter"] == task.filter
                ]
        settings = {
            "temperature": max(self._model.temperatures, default=None),
            # Of all leaf tasks, for two batches of a group are asked alike whichever of its tasks they are of.
            "num_fewshot": _common([leaves[leaf].config.num_fewshot for leaf in sorted(leaves)]),
            "chat_template": self._model.template_digest() if task.chat else None,
            "bos": bos,
            "seed": self._seed,
            "lm_eval": lm_eval.__version__,
            "tokenizer": self._model.tokenizer_digest(),
        }
        write_asked(destination, Asked(settings, tuple(samples), tuple(answers)))
        return {"items": len(samples), "full": self._model.full}

    def _reseed(self) -> None:
        """Seed the global random generators: some tasks shuffle their choices with them while they are loaded."""
        import numpy as np

        random.seed(self._seed)
        np.random.seed(self._seed)


def _fix_documents(leaf: Any) -> None:
    """Read the documents once: lm-eval reads them for every batch, and some tasks shuffle choices while reading."""
    documents = leaf.eval_docs
    setattr(leaf, "test_docs" if leaf.has_test_docs() else "validation_docs", lambda: documents)


def _fix_prompts(leaf: Any, seed: int) -> None:
    build = leaf.fewshot_context

    def fewshot_context(doc: Any, *args: Any, **options: Any) -> Any:
        leaf.set_fewshot_seed(seed=int(digest([seed, doc]), 16))
        return build(doc, *args, **options)

    leaf.fewshot_context = fewshot_context


def _clusters(leaf: Any, field: str | None) -> list[str]:
    """Return a hash of ``field``, such as a passage, for each document of a leaf task; "" for all without a ``field``.

    Documents with equal hashes are one cluster. Raises `MeasurementError` for a document without the field.
    """
    documents = leaf.eval_docs
    if field is None:
        return [""] * len(documents)
    digests = []
    for number, document in enumerate(documents):
        if field not in document:
            raise MeasurementError(
                f"{leaf.task_name}#{number} has no field {field!r} to cluster by; there are {', '.join(document)}"
            )
        digests.append(digest(document[field]))
    return digests


def _choices(leaf: Any, row: Mapping[str, Any]) -> list[str] | None:
    return list(leaf.doc_to_choice(row["doc"])) if leaf.OUTPUT_TYPE == "multiple_choice" else None


def _common(values: list[Any]) -> Any:
    """Return the value that all leaf tasks have, or the list of values if they differ."""
    return values[0] if len(set(values)) == 1 else values


# `datasets` keeps the address of every file that it fetched, with the commit that it resolved to.
_FILE = re.compile(r"^hf://datasets/(?P<path>[^@]+)@(?P<commit>[0-9a-f]{40})/")
# Builders of `datasets` that read files of ours; our files are in the stage's fingerprint.
_LOCAL = ("json", "csv", "parquet", "text", "arrow")


@contextmanager
def reading(commits: Mapping[str, str]) -> Iterator[None]:
    """Within the block, let `datasets` read each data set of the Hub in ``commits`` at its commit.

    lm-eval's tasks name no revision, a group may read several data sets, and some tasks fetch theirs by code of their
    own. All of them call `datasets.load_dataset`, which is replaced for the block.
    """
    import datasets

    load = datasets.load_dataset

    def load_at_commit(path: str, *args: Any, **options: Any) -> Any:
        if path in commits:
            options["revision"] = commits[path]
        return load(path, *args, **options)

    datasets.load_dataset = load_at_commit
    try:
        yield
    finally:
        datasets.load_dataset = load


def dataset_of(task: Any, commits_by_path: Mapping[str, str] = MappingProxyType({})) -> dict[str, str | None] | None:
    """Return ``path``, ``name`` and ``commit`` of a loaded task's data set on the Hub; None for local files.

    The commit is the one that `datasets` recorded at the download (several are joined by a comma), else that of
    ``commits_by_path``, the commits given to `reading`, else None. Raises `MeasurementError` if another commit was read
    than was asked for, as happens without a network when only that one is in the cache.
    """
    path = task.config.dataset_path
    if path is None or path in _LOCAL:
        return None
    commits: set[str] = set()
    splits = task.dataset.values() if isinstance(task.dataset, dict) else ()
    for split in splits:
        for file in (getattr(split, "info", None) and split.info.download_checksums) or ():
            match = _FILE.match(str(file))
            if match is not None:
                commits.add(match["commit"])
    read = ", ".join(sorted(commits)) or commits_by_path.get(path)
    if path in commits_by_path and read != commits_by_path[path]:
        raise MeasurementError(f"{path} was to be read at commit {commits_by_path[path]}, and {read} is what was read")
    return {"path": path, "name": task.config.dataset_name, "commit": read}


class Session:
    """The state of one stage's conversation.

    ``model`` makes lm-eval's model from its arguments (None: a client of a completions server).
    """

    def __init__(self, model: Model | None = None) -> None:
        self._model = model
        self._harness: TaskHarness | None = None

    def reply(self, kind: str, content: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
        """Carry out a message and return the reply's content; ``tell`` receives counts of requests in the meantime.

        ``kind`` is "open", which must come first, "load" or "ask". Raises `MeasurementError` for a message that cannot
        be carried out.
        """
        if kind == "open":
            self._harness = TaskHarness(content, tell, self._model)
            return {}
        assert self._harness is not None  # noqa: S101 - "open" is the first message
        if kind == "load":
            return self._harness.load(SuiteTask.from_json(content["task"]), content["commits"])
        return self._harness.ask(content["task"], content["documents"], Path(content["destination"]))


def answer_on(address: str, reply: Callable[[str, Mapping[str, Any], Tell], Any]) -> None:
    """Connect to a Unix socket and answer each line with ``reply``, until the other end closes.

    ``address`` is a path, or @ and an abstract name. A `MeasurementError` becomes the answer ``{"refused": ...}``;
    other errors end the process. Raises `PermissionError` for another user's socket.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS))
        if user != os.geteuid():  # of those who listen there, only ours may say what is loaded and run
            raise PermissionError(f"{address} is another user's socket")
        with connection.makefile("rw", encoding="utf-8") as lines:

            def send(message: Mapping[str, Any]) -> None:
                lines.write(json.dumps(message) + "\n")
                lines.flush()

            while line := lines.readline():
                (kind, content), *_ = json.loads(line).items()
                try:
                    answer = reply(kind, content, send)
                except MeasurementError as error:
                    send({"refused": str(error)})
                else:
                    send({"reply": answer})


if __name__ == "__main__":
    answer_on(sys.argv[1], Session().reply)
