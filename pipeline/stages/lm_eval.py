"""lm-eval against a server: one process for all tasks of a stage, the answers of every batch saved.

Tasks read data sets of the Hub at the commits that a fingerprint names and lm-eval is then given.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantmint.calibration.errors import CalibrationError
from quantmint.eval import harness
from quantmint.eval.errors import MeasurementError
from quantmint.eval.harness import read_asked
from quantmint.eval.suites import TASKS_FOLDER, SuiteTask, definition, located
from quantmint.pipeline.base.errors import QuantmintError, StageError
from quantmint.pipeline.base.processes import Conversation
from quantmint.pipeline.base.transience import says_transient
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.servers import ReferenceServer
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Job
from quantmint.pipeline.store.disk import sha256_of


def data_commits(setting: Setting, task: SuiteTask) -> dict[str, str]:
    """Return the commit of each of a task's data sets, by repository; those that cannot be resolved are left out."""
    commits: dict[str, str] = {}
    for name in task.data:
        repo, revision = located(name)
        with suppress(CalibrationError, QuantmintError):
            commits[repo] = setting.commits.dataset(repo, revision)
    return commits


def has_own_tasks(setting: Setting) -> bool:
    """Return whether the suite brings task definitions that are neither lm-eval's nor quantmint's."""
    suite = setting.suite
    has_own_tasks = suite.own_tasks != TASKS_FOLDER
    return has_own_tasks and any(definition(suite.own_tasks, task.task) is not None for task in suite.tasks)


SAMPLES = "samples"
LOG = "lm-eval.log"
_BATCHES = "asked"
_OURS = "tasks"


@dataclass(frozen=True, slots=True)
class Harness:
    """A running lm-eval that has been opened for a suite's tasks."""

    job: Job
    talk: Conversation

    def load(self, task: SuiteTask) -> Mapping[str, Any]:
        """Load a task, and return its ``documents`` (clusters by leaf task) and the ``datasets`` that they come from.

        A data set without a known commit gives a warning.
        """
        self.job.progress.say(f"{task.task}: loading")
        commits = data_commits(self.job.setting, task)
        loaded = self.talk.ask(harness.loading(task, commits))
        for dataset in loaded["datasets"]:
            if dataset["path"] not in commits:
                self.job.progress.warn(
                    f"{task.task} reads {dataset['path']} at no fixed commit, so nobody will notice when it changes: "
                    "the suite does not name it under `data`, or the Hub could not be asked"
                )
        return loaded

    def ask(self, task: SuiteTask, items: Sequence[harness.Item], advance: Callable[[int], None]) -> Path:
        """Ask items of a loaded task, and return the file of their answers in the stage's folder.

        ``advance`` is called with the number of items answered since its last call. Raises `MeasurementError` where not
        all items were answered.
        """
        path = batches(self.job.path) / task.task / f"{harness.items_digest(items)}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        reply = self.talk.ask(harness.asking(task, harness.by_leaf(items), path), _counter(len(items), advance))
        if reply["full"]:
            room = self.job.setting.recipe.target.max_model_len
            self.job.progress.warn(
                f"{task.task}: {reply['full']} prompts fill the server's {room} tokens, and what is longer was cut "
                "at its beginning; target.max_model_len should be larger"
            )
        answered = {(sample.task, sample.doc_id) for sample in read_asked(path).samples}
        if answered != set(items):
            raise MeasurementError(f"{task.task}: lm-eval did not answer the {len(items)} items that it was asked")
        return path


@contextmanager
def open_harness(
    job: Job,
    server: RunningServer,
    tokenizer: Path,
    tasks: Sequence[SuiteTask],
    *,
    concurrency: int,
    batch_size: int = 32,
) -> Iterator[Harness]:
    """Yield lm-eval, opened for these tasks on ``server``; it is online only where their data is on the Hub.

    An online process has our Hub token, unless the suite brings templates of its own. ``concurrency`` is the number of
    requests in flight. Raises `DefinitionError` where such a suite asks for more than data and the recipe does not
    trust code, `StageError` where lm-eval fails, `ServingError` where the server has died.
    """
    setting = job.setting
    trusted = setting.recipe.trust_remote_code
    names = [task.task for task in tasks]
    ours = harness.materialise_tasks(setting.suite.own_tasks, names, job.path / _OURS, trusted=trusted)
    local = len(ours) == len(tasks)
    endpoint = harness.Endpoint(
        base_url=server.base_url,
        model_name=server.model_name,
        tokenizer=tokenizer,
        max_length=setting.recipe.target.max_model_len - server.dialect.reserved,
        seed=setting.recipe.evaluation.seed,
        concurrency=concurrency,
        batch_size=batch_size,
        runtime=server.dialect.runtime,
        path=server.dialect.completions,
    )
    opening = harness.opening(endpoint, job.path / _OURS, only_ours=local)
    if isinstance(server, ReferenceServer):  # lm-eval is in its process
        server.ask("open", **opening["open"])
        assert server.talk is not None  # noqa: S101 - it answered
        yield Harness(job, server.talk)
        return
    env = {"OPENAI_API_KEY": "unused", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"} | (
        {"HF_HUB_OFFLINE": "1"} if local else {}
    )
    try:
        talk, log = job.servers.lm_eval(env, () if local or has_own_tasks(setting) else ("HF_TOKEN",))
        before = log.stat().st_size
        talk.ask(opening)
        yield Harness(job, talk)
        (job.path / LOG).write_bytes(log.read_bytes()[before:])
    except StageError as error:
        server.get("/health")  # where the server has died, that is the error to tell
        error.transient = says_transient(error.message)
        raise


def batches(folder: Path) -> Path:
    """Return the subfolder of a stage's folder for answers by batch; `tidy` removes it."""
    return folder / _BATCHES


def tidy(folder: Path) -> None:
    """Remove from a stage's folder what only lm-eval needed: task definitions and batches of answers."""
    for name in (_OURS, _BATCHES):
        shutil.rmtree(folder / name, ignore_errors=True)


def samples_file(folder: Path, task: SuiteTask) -> Path:
    """Return the path of a task's samples in a stage's folder."""
    return folder / SAMPLES / f"{task.task}.json"


def task_settings(setting: Setting, *tasks: SuiteTask) -> dict[str, object]:
    """Return what determines the answers to tasks, for a fingerprint: the tasks by content, and how they are asked.

    Task files count by SHA-256, data on the Hub by its commits where known; what only the gate uses is left out.
    """
    judged = ("items", "expected_flip_rate", "expected_spread", "gated", "margin", "data")
    items: list[dict[str, object]] = []
    for task in tasks:
        commits = data_commits(setting, task)
        items.append(
            {
                **{key: value for key, value in asdict(task).items() if key not in judged},
                "files": {path.name: sha256_of(path) for path in setting.suite.files(task)},
                **({"data": commits} if commits else {}),
            }
        )
    return {
        "tasks": items,
        "seed": setting.recipe.evaluation.seed,
        "concurrency": setting.recipe.evaluation.concurrency,
        "max_length": setting.recipe.target.max_model_len,
    }


def _counter(items: int, advance: Callable[[int], None]) -> Callable[[Mapping[str, Any]], None]:
    """Return a callback that turns lm-eval's counts of requests into items, and calls ``advance`` with the new ones.

    An item may make several requests.
    """
    expected = done = told = 0

    def news(line: Mapping[str, Any]) -> None:
        nonlocal expected, done, told
        expected += int(line.get("expect", 0))
        done += int(line.get("done", 0))
        answered = items * done // max(expected, 1)
        advance(answered - told)
        told = answered

    return news
