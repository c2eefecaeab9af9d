"""evaluate: lm-eval's tasks against one side's server, every sample kept."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from eval import harness
from eval.errors import DefinitionError, MeasurementError
from eval.samples import SampleSet
from eval.suites import SuiteTask
from pipeline.errors import InvalidMeasurementError, StageError
from pipeline.serving.running.server import Server
from pipeline.stage import Job, Output, Setting, versions, write_json
from pipeline.stages.commands import run_logged
from pipeline.stages.serve import SERVER_LOG, Side, faults, launch_plan, model_key, vllm_version
from pipeline.stages.servers import keep_log
from pipeline.stages.source import model_folder
from pipeline.store.disk import sha256_of
from pipeline.store.entries import Entry

_REQUESTS = re.compile(r"Requesting API: +\d+%\|[^|]*\| (\d+)/(\d+) ")
TASKS = Path(harness.__file__).parent / "tasks"


@dataclass(frozen=True, slots=True)
class EvaluateStage:
    """A task that was finished is not asked again after an interruption."""

    side: Side
    family: str = "evaluate"
    version: int = 1

    @property
    def key(self) -> str:
        """One for each side."""
        return f"evaluate-{self.side}"

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The server, which stands for the model and the launch; the model for its tokenizer."""
        return {"serve": f"serve-{self.side}", "model": model_key(self.side)}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The tasks by content, and how they are asked."""
        evaluation = setting.recipe.evaluation
        return {
            "tasks": [{**_task_settings(task), "files": _task_files(task.task)} for task in setting.suite.tasks],
            "limit": evaluation.limit,
            "concurrency": evaluation.concurrency,
            "max_length": setting.recipe.target.max_model_len,
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """What asks, tokenizes and answers."""
        return {**versions("lm-eval", "transformers", "datasets"), **vllm_version(setting)}

    def run(self, job: Job) -> Output:
        """One lm-eval process a task."""
        setting = job.setting
        tokenizer = model_folder(job.inputs["model"])
        unfinished = [task for task in setting.suite.tasks if not _samples_file(job.path, task).is_file()]
        server = job.servers.get(self.side, launch_plan(setting, self.side, tokenizer))
        try:
            harness.materialise_tasks(TASKS, [task.task for task in setting.suite.tasks], job.path / "tasks")
            for task in unfinished:
                job.progress.say(f"{task.task}: {task.items:,} items")
                with _requests_bar(job) as watch:
                    _ask(job, task, server, tokenizer, watch)
            sets = [read_samples(job.path, task) for task in setting.suite.tasks]
        except (MeasurementError, DefinitionError) as error:
            raise InvalidMeasurementError(f"evaluate {self.side}: {error}") from error
        shutil.rmtree(job.path / "tasks")
        scan = keep_log(server, job.path / SERVER_LOG)
        scores = {
            samples.task: sum(sample.score for sample in samples.samples) / len(samples.samples) for samples in sets
        }
        return Output(
            result={"scores": scores, "faults": faults(scan)},
            summary=", ".join(f"{task} {score:.2%}" for task, score in scores.items()),
        )

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Nothing lies outside the store."""
        return True


@contextmanager
def _requests_bar(job: Job) -> Iterator[Callable[[str], None]]:
    """A bar over the requests that lm-eval says it has sent, from the first time that it says how many there are."""
    with ExitStack() as stack:
        advance: Callable[[int], None] | None = None
        told = 0

        def watch(log: str) -> None:
            nonlocal advance, told
            seen = _REQUESTS.findall(log)
            if seen:
                done, total = map(int, seen[-1])
                advance = advance or stack.enter_context(job.progress.bar(total, "requests"))
                advance(done - told)
                told = done

        yield watch


def read_samples(folder: Path, task: SuiteTask) -> SampleSet:
    """The samples of a task that a stage has kept."""
    path = _samples_file(folder, task)
    return SampleSet.from_json(json.loads(path.read_text(encoding="utf-8")))


def _ask(job: Job, task: SuiteTask, server: Server, tokenizer: Path, watch: Callable[[str], None]) -> None:
    setting = job.setting
    output = job.path / "lm-eval" / task.task
    shutil.rmtree(output, ignore_errors=True)  # half a task cannot be told from a whole one
    output.mkdir(parents=True)
    argv = harness.command(
        sys.executable,
        task,
        base_url=server.base_url,
        model_name=server.model_name,
        tokenizer_path=tokenizer,
        output_dir=output,
        include_path=job.path / "tasks",
        limit=setting.recipe.evaluation.limit,
        num_concurrent=setting.recipe.evaluation.concurrency,
        max_length=setting.recipe.target.max_model_len,
    )
    local = (job.path / "tasks" / f"{task.task}.yaml").is_file()
    env = {**server.client_environment(), "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_OFFLINE": "1"} if local else {}
    log = job.path / f"{task.task}.log"
    try:
        run_logged(
            argv, log, what=f"lm-eval on {task.task}", env=env, watch=watch, secrets=() if local else ("HF_TOKEN",)
        )
    except StageError:
        server.get("/health")
        raise
    samples = harness.read_samples(output, task.task, task.metric, task.filter)
    _samples_file(job.path, task).parent.mkdir(exist_ok=True)
    write_json(_samples_file(job.path, task), samples.to_json())


def _samples_file(folder: Path, task: SuiteTask) -> Path:
    return folder / "samples" / f"{task.task}.json"


def _task_settings(task: SuiteTask) -> dict[str, object]:
    """What of a task shapes the answers; whether and how they are judged is the gate's business."""
    judged = ("items", "expected_flip_rate", "gated", "margin")
    return {key: value for key, value in asdict(task).items() if key not in judged}


def _task_files(name: str) -> dict[str, str]:
    """SHA-256 of the files of a task of ours, by name; a task of lm-eval is its version's."""
    return {path.name: sha256_of(path) for path in (TASKS / f"{name}.yaml", TASKS / f"{name}.jsonl") if path.is_file()}
